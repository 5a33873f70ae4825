"""File traffic at one setting of the engine: files, sequences of operations, and what is counted of them.

[Note: step traffic]
One optimizer step over P parameters that are on the drive in the `fp32` layout (bf16 parameter, 16-bit master
remainder, two fp32 moments) reads 2 + 2 + 4 + 4 = 12 bytes per parameter, and writes as many. Mixed traffic has
this ratio, so at a mixed rate of R bytes per second (both directions together) a step takes 24 P / R seconds. A
drive whose write rate falls to W once its cache is full takes 12 P / W at least. Forward and backward read 2 P bytes
each, on top; of parameters in memory that is left out, and 2 P in each direction of the update.

[Note: what a sample counts]
On files without a page cache (O_DIRECT, or a filesystem in memory) the clock starts at a completion, after
every buffer has been through once, and stops at a completion; completions in between count. Such a write
counts when the drive has accepted it: the drive's own cache may be volatile, and the last
fdatasync of the sustained write shows that. Files that go through the page cache are dropped from it beforehand,
and the clock runs from the first submission until everything is transferred and fdatasync has returned.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from offloadzero.errors import AioError
from offloadzero.io.engine import AioEngine, AioFile, AioTicket
from offloadzero.memory.pages import map_pages

KIB, MIB = 1 << 10, 1 << 20
STATE_BYTES_PER_PARAM = 12  # read, and written
SEGMENT_BYTES = (2, 2, 4, 4)  # of a parameter: itself, the remainder, the first and the second moment
NUM_CHUNKS_IN_FLIGHT = 4
_WAIT_SLICE_S = 0.2


class Traffic(str, Enum):
    """The kind of traffic; MIXED is the update of one layer after the other, see [Note: step traffic]."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"


@dataclass(frozen=True, order=True)
class Point:
    """One setting of the file engine; the fields are the arguments of AioEngine."""

    backend: str
    block_size: int
    queue_depth: int
    num_threads: int

    @property
    def in_flight_bytes(self) -> int:
        return self.block_size * self.queue_depth

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sample:
    """One measurement; `seconds` is the time in which the bytes moved, `started_s` counts from the run's."""

    phase: str
    traffic: str
    point: Point
    paths: tuple[int, ...]  # indices of the paths that took part
    direct: bool
    started_s: float
    seconds: float
    bytes_read: int
    bytes_written: int
    operation_bytes: int
    num_operations: int
    latency_p50_s: float
    latency_p99_s: float
    latency_max_s: float
    cpu_s: float
    # (end in seconds from the sample's start, bytes completed since the entry before)
    timeline: tuple[tuple[float, int], ...] = ()
    sync_s: float | None = None

    @property
    def num_bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.num_bytes / 1e9)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.bytes_per_s / 1e9, "cpu_s_per_gb": self.cpu_s_per_gb}


class ScratchFile:
    """A new empty file without a name in a directory: it is gone with the process, whatever ends that.

    Raises AioError when it cannot be made. `num_bytes` is how much of it holds written data.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.num_bytes = 0
        self.cursor = 0
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  # it closes itself
        except OSError as error:
            raise AioError(
                operation="create", path=directory, offset=0, num_bytes=0, errno=error.errno or errno.EIO
            ) from error

    @property
    def allocated_bytes(self) -> int:
        """The bytes that the filesystem keeps for it: less than its size where there are holes or compression."""
        return os.fstat(self._file.fileno()).st_blocks * 512

    def open(self, engine: AioEngine) -> AioFile:
        name = os.path.join(self.directory, "(the benchmark's file)")
        return engine.open(f"/proc/self/fd/{self._file.fileno()}", name=name)

    def advance(self, num_bytes: int) -> int:
        """Return the next offset for `num_bytes`; the beginning where they do not fit before the end."""
        offset = -(-self.cursor // num_bytes) * num_bytes
        if offset + num_bytes > self.num_bytes:
            offset = 0
        self.cursor = offset + num_bytes
        return offset

    def sync(self, *, drop_cache: bool = False) -> None:
        """Write out the file's pages in the page cache; with `drop_cache` forget them."""
        os.fdatasync(self._file.fileno())
        if drop_cache:
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()


class WriteAllowance:
    """The bytes this run may still write: drives wear. `held_bytes` are kept for later, and are not available now."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.held_bytes = 0

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes - self.held_bytes

    def take(self, num_bytes: int) -> bool:
        """Reserve bytes; return False, and reserve nothing, when so many are not left."""
        if num_bytes > self.left_bytes:
            return False
        self.used_bytes += num_bytes
        return True


class RandomMemory:
    """Memory with random bytes, so that no drive compresses them, cut into buffers.

    It is of the kind that transfers of training use, in huge pages: in small ones a drive may be half as fast, as each
    page of 4 KiB is pinned, and a segment of the request, by itself.
    """

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.frombuffer(map_pages(num_bytes), dtype=np.uint8)
        generator = np.random.Generator(np.random.SFC64())
        words = self.bytes.view(np.uint64)
        for start in range(0, len(words), 2 * MIB):
            part = words[start : start + 2 * MIB]
            part[:] = generator.integers(0, 1 << 64, size=len(part), dtype=np.uint64)

    def cut(self, num_buffers: int, buffer_bytes: int) -> list[Any]:
        """Return `num_buffers` views of `buffer_bytes` each that do not overlap."""
        if num_buffers * buffer_bytes > len(self.bytes):
            raise AssertionError(f"{num_buffers} x {buffer_bytes} bytes asked of {len(self.bytes)}")
        return [self.bytes[i * buffer_bytes : (i + 1) * buffer_bytes] for i in range(num_buffers)]


class Transfer(NamedTuple):
    """One read or write; `buffer` is a part of the slot's."""

    is_write: bool
    file: int
    offset: int
    buffer: Any


class Workload:
    """Hands a slot its operations, in turn over the files; a batch follows when the one before it is complete.

    A batch is `segments` (offset and bytes each) that lie in a row. Of mixed traffic a slot reads those of a record and
    then writes them: [Note: step traffic].
    """

    def __init__(
        self,
        files: Sequence[ScratchFile],
        traffic: Traffic,
        *,
        segments: Sequence[tuple[int, int]],
        num_slots: int,
        memory: RandomMemory,
    ) -> None:
        self._files, self._traffic, self._segments = files, traffic, segments
        self._num_bytes = sum(size for _, size in segments)
        self.operation_bytes = max(size for _, size in segments)
        fit = min(min(file.num_bytes for file in files), len(memory.bytes)) // self._num_bytes
        self.buffers = memory.cut(max(min(num_slots, fit), 1), self._num_bytes)
        self._turn = 0
        self._reading: dict[int, tuple[int, int]] = {}

    def next_batch(self, slot: int) -> list[Transfer]:
        where = self._reading.pop(slot, None)
        is_write = where is not None or self._traffic is Traffic.WRITE
        if where is None:
            index = self._turn % len(self._files)
            self._turn += 1
            where = index, self._files[index].advance(self._num_bytes)
            if self._traffic is Traffic.MIXED:
                self._reading[slot] = where
        index, start = where
        buffer = self.buffers[slot]
        return [Transfer(is_write, index, start + at, buffer[at : at + size]) for at, size in self._segments]


def chunk_segments(num_elements: int) -> list[tuple[int, int]]:
    """Return offset and bytes of the segments of a chunk of parameters, which lie in a row."""
    sizes = [element_bytes * num_elements for element_bytes in SEGMENT_BYTES]
    return list(zip(accumulate(sizes[:-1], initial=0), sizes, strict=True))


# --- The pump ---


@dataclass
class _Batch:
    """The operations a slot has in flight."""

    slot: int
    submitted_s: float
    tickets: list[AioTicket]
    latencies_s: list[float] = field(default_factory=list)

    def is_done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> None:
        for ticket in self.tickets:
            wait_for(ticket)
            self.latencies_s.append(time.monotonic() - self.submitted_s)


class Count:
    """The transfers that completed while the clock ran."""

    def __init__(self, *, num_warmup_batches: int) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self.latencies_s: list[float] = []
        self.timeline: list[tuple[float, int]] = []
        self.is_running = False
        self._num_warmup_batches = num_warmup_batches
        if num_warmup_batches == 0:
            self._start(time.monotonic())

    def _start(self, now_s: float) -> None:
        self.is_running = True
        self.started_s = self.ended_s = now_s
        self._started_cpu_s = self._ended_cpu_s = time.process_time()

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s if self.is_running else 0.0

    @property
    def cpu_s(self) -> float:
        return self._ended_cpu_s - self._started_cpu_s

    def complete(self, batches: Sequence[_Batch], now_s: float) -> None:
        """Count transfers that have completed together; those of the warm-up only start the clock."""
        if not self.is_running:
            self._num_warmup_batches -= len(batches)
            if self._num_warmup_batches <= 0:
                self._start(now_s)
            return
        for batch in batches:
            written = sum(one.num_bytes for one in batch.tickets if one.operation == "pwrite")
            num_bytes = sum(one.num_bytes for one in batch.tickets)
            self.bytes_written += written
            self.bytes_read += num_bytes - written
            self.latencies_s.extend(batch.latencies_s)
            self.timeline.append((now_s - self.started_s, num_bytes))
        self.end(now_s)

    def end(self, now_s: float) -> None:
        """Note the clock's last reading so far."""
        self.ended_s = now_s
        self._ended_cpu_s = time.process_time()


def pump(
    engine: AioEngine,
    files: Sequence[AioFile],
    workload: Workload,
    allowance: WriteAllowance,
    *,
    seconds: float,
    deadline_s: float,
    max_bytes: int | None = None,
    is_counted_whole: bool = False,
) -> Count:
    """Keep every slot of a workload busy for `seconds` of its clock. Raises AioError when an operation fails.

    It ends before at `deadline_s` of time.monotonic(), when `max_bytes` have been submitted, or when no more may be
    written. `is_counted_whole`: no warm-up, and the transfers in flight at the end count: [Note: what a sample counts].
    """
    num_slots, submitted_bytes = len(workload.buffers), 0
    count = Count(num_warmup_batches=0 if is_counted_whole else num_slots)
    in_flight: deque[_Batch] = deque()

    def submit_next(slot: int) -> None:
        nonlocal submitted_bytes
        if max_bytes is not None and submitted_bytes >= max_bytes:
            return
        parts = workload.next_batch(slot)
        if not allowance.take(sum(part.buffer.nbytes for part in parts if part.is_write)):
            return
        tickets, submitted_s = [], time.monotonic()
        for part in parts:
            submit = engine.write if part.is_write else engine.read
            tickets.append(submit(files[part.file], part.buffer, offset=part.offset))
            submitted_bytes += part.buffer.nbytes
        in_flight.append(_Batch(slot, submitted_s, tickets))

    for slot in range(num_slots):
        submit_next(slot)
    is_ending = False
    while in_flight:
        oldest = in_flight.popleft()
        oldest.wait()
        finished = [oldest, *(batch for batch in in_flight if batch.is_done())]
        for batch in finished[1:]:
            in_flight.remove(batch)
            batch.wait()
        now_s = time.monotonic()
        if not is_ending or is_counted_whole:
            count.complete(finished, now_s)
        is_ending |= count.seconds >= seconds or now_s >= deadline_s
        if max_bytes is not None:  # queues that run empty have no rate
            is_ending |= submitted_bytes >= max_bytes
        if not is_ending:
            for batch in finished:
                submit_next(batch.slot)
    return count


def wait_for(ticket: AioTicket) -> None:
    """Wait for a transfer as `AioTicket.wait` does, and look up for signals meanwhile: a drive may hang."""
    while True:
        try:
            return ticket.wait(_WAIT_SLICE_S)
        except TimeoutError:
            continue


def buckets(timeline: Sequence[tuple[float, int]], num_buckets: int = 120) -> tuple[tuple[float, int], ...]:
    """Return at most `num_buckets` entries of equal length: (end in seconds, bytes)."""
    if not timeline:
        return ()
    length_s = max(timeline[-1][0] / num_buckets, 0.1)
    sums = [0] * (int(timeline[-1][0] / length_s) + 1)
    for at_s, num_bytes in timeline:
        sums[int(at_s / length_s)] += num_bytes
    ends = [(i + 1) * length_s for i in range(len(sums))]
    ends[-1] = timeline[-1][0]
    return tuple(zip(ends, sums, strict=True))
