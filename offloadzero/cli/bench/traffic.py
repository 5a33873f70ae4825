"""One sample of file traffic: a point of the engine, a kind of traffic, rates, latencies, CPU time.

[Note: what a sample counts]
On files without a page cache (O_DIRECT, or a filesystem in memory) the clock starts at a completion, after
every buffer has been through once, and stops at a completion; completions in between count. Such a write
counts when the drive has accepted it: the drive's own cache may be volatile, and the last
fdatasync of the sustained write shows that. Files that go through the page cache are dropped from it beforehand,
and the clock runs from the first submission until everything is transferred and fdatasync has returned.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from offloadzero.cli.bench.points import (
    MIB,
    NUM_CHUNKS_IN_FLIGHT,
    STATE_BYTES_PER_PARAM,
    Point,
    Traffic,
    chunk_segments,
)
from offloadzero.cli.bench.scratch import ScratchFile
from offloadzero.errors import ConfigError
from offloadzero.io.engine import AioBackend, AioEngine, AioFile, AioTicket
from offloadzero.memory.pages import map_pages

_WAIT_SLICE_S = 0.2


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
        fields = {**vars(self), "point": self.point.to_json()}
        return {**fields, "gb_per_s": self.bytes_per_s / 1e9, "cpu_s_per_gb": self.cpu_s_per_gb}


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


# --- Workloads: the sequences of operations in one slot ---


class Transfer(NamedTuple):
    """One read or write; `buffer` is a part of the slot's."""

    is_write: bool
    file: int
    offset: int
    buffer: Any


class Workload(Protocol):
    """Hands a slot its operations; a batch follows when the one before it is complete."""

    buffers: list[Any]
    operation_bytes: int

    def next_batch(self, slot: int) -> list[Transfer]: ...


class Sequential:
    """Operations of one size that go through the files one after the other, in turn over the files."""

    def __init__(
        self,
        files: Sequence[ScratchFile],
        *,
        is_write: bool,
        operation_bytes: int,
        in_flight_bytes: int,
        memory: RandomMemory,
    ) -> None:
        smallest = min(file.num_bytes for file in files)
        # One more than fill the queue: the engine has the next at hand while Python handles the last.
        num_slots = -(-in_flight_bytes // operation_bytes) + 1
        num_slots = max(min(num_slots, smallest // operation_bytes, len(memory.bytes) // operation_bytes), 1)
        self.buffers = memory.cut(num_slots, operation_bytes)
        self.operation_bytes = operation_bytes
        self._files = files
        self._is_write = is_write
        self._turn = 0

    def next_batch(self, slot: int) -> list[Transfer]:
        index = self._turn % len(self._files)
        self._turn += 1
        offset = self._files[index].advance(self.operation_bytes)
        return [Transfer(self._is_write, index, offset, self.buffers[slot])]


class OptimizerStep:
    """Reads a record's segments and writes them, with several records at once: [Note: step traffic]."""

    def __init__(self, files: Sequence[ScratchFile], *, num_elements: int, memory: RandomMemory) -> None:
        self._segments = chunk_segments(num_elements)
        self._num_bytes = STATE_BYTES_PER_PARAM * num_elements
        fit = min(min(file.num_bytes for file in files), len(memory.bytes)) // self._num_bytes
        self.buffers = memory.cut(max(min(NUM_CHUNKS_IN_FLIGHT, fit), 1), self._num_bytes)
        self.operation_bytes = self._num_bytes // 3  # a moment, the largest part
        self._files = files
        self._turn = 0
        self._reading: dict[int, tuple[int, int]] = {}

    def next_batch(self, slot: int) -> list[Transfer]:
        where = self._reading.pop(slot, None)
        is_write = where is not None
        if where is None:
            index = self._turn % len(self._files)
            self._turn += 1
            where = self._reading[slot] = index, self._files[index].advance(self._num_bytes)
        index, start = where
        buffer = self.buffers[slot]
        return [Transfer(is_write, index, start + at, buffer[at : at + size]) for at, size in self._segments]


# --- The pump ---


class Limits(NamedTuple):
    """The end of a sample: after `seconds` on its clock, at the latest at `deadline_s` of time.monotonic(),
    when `max_bytes` have been submitted, or when no more may be written."""

    seconds: float
    deadline_s: float
    max_bytes: int | None = None
    # No warm-up, and the transfers in flight at the end count: [Note: what a sample counts].
    is_counted_whole: bool = False


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
        self._started_cpu_s = self._ended_cpu_s = cpu_seconds()

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
        self._ended_cpu_s = cpu_seconds()


class Pump:
    """Keeps every slot of a workload busy until the limits, and counts."""

    def __init__(
        self, engine: AioEngine, files: Sequence[AioFile], workload: Workload, allowance: WriteAllowance
    ) -> None:
        self._engine = engine
        self._files = files
        self._workload = workload
        self._allowance = allowance
        self._in_flight: deque[_Batch] = deque()
        self._submitted_bytes = 0

    def run(self, limits: Limits) -> Count:
        """Run the workload to the limits. Raises AioError when an operation fails."""
        num_slots = len(self._workload.buffers)
        count = Count(num_warmup_batches=0 if limits.is_counted_whole else num_slots)
        for slot in range(num_slots):
            self._submit_next(slot, limits)
        is_ending = False
        while self._in_flight:
            finished = self._wait_some()
            now_s = time.monotonic()
            if not is_ending or limits.is_counted_whole:
                count.complete(finished, now_s)
            is_ending |= count.seconds >= limits.seconds or now_s >= limits.deadline_s
            if not is_ending:
                for batch in finished:
                    self._submit_next(batch.slot, limits)
        return count

    def _wait_some(self) -> list[_Batch]:
        """Wait for the oldest batch; return all batches that are complete by then."""
        oldest = self._in_flight.popleft()
        oldest.wait()
        finished = [oldest, *(batch for batch in self._in_flight if batch.is_done())]
        for batch in finished[1:]:
            self._in_flight.remove(batch)
            batch.wait()
        return finished

    def _submit_next(self, slot: int, limits: Limits) -> None:
        if limits.max_bytes is not None and self._submitted_bytes >= limits.max_bytes:
            return
        batch = self._workload.next_batch(slot)
        if not self._allowance.take(sum(part.buffer.nbytes for part in batch if part.is_write)):
            return
        tickets = []
        submitted_s = time.monotonic()
        for part in batch:
            submit = self._engine.write if part.is_write else self._engine.read
            tickets.append(submit(self._files[part.file], part.buffer, offset=part.offset))
            self._submitted_bytes += part.buffer.nbytes
        self._in_flight.append(_Batch(slot, submitted_s, tickets))


def wait_for(ticket: AioTicket) -> None:
    """Wait for a transfer as `AioTicket.wait` does, and look up for signals meanwhile: a drive may hang."""
    while True:
        try:
            return ticket.wait(_WAIT_SLICE_S)
        except TimeoutError:
            continue


def cpu_seconds() -> float:
    """Return the user and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --- Samples ---


class Shape(NamedTuple):
    """The sizes of a run's operations, chosen once from the drive's speed."""

    max_in_flight_bytes: int
    operation_bytes: int
    chunk_elements: int
    rate_bps: float


class Request(NamedTuple):
    """One measurement to take: `paths` are indices of the run's files."""

    phase: str
    traffic: Traffic
    point: Point
    paths: tuple[int, ...]
    seconds: float
    deadline_s: float
    max_bytes: int | None = None
    with_timeline: bool = False


class Bench:
    """The files, memory and allowance of a run; takes samples of them."""

    def __init__(
        self,
        files: Sequence[ScratchFile],
        *,
        in_memory: Sequence[bool],
        allowance: WriteAllowance,
        memory: RandomMemory,
        started_s: float,
    ) -> None:
        self.files = files
        self.allowance = allowance
        self.refusals: dict[Point, str] = {}
        self.direct_reasons: dict[int, str] = {}
        self._in_memory = in_memory
        self._memory = memory
        self._started_s = started_s

    def sample(self, request: Request, shape: Shape) -> Sample | None:
        """Take a sample; None when the engine refuses the point (see `refusals`) or nothing could be counted in time.

        Raises AioError when an operation fails.
        """
        try:
            engine = AioEngine(**request.point.to_json())
        except ConfigError as error:
            self.refusals[request.point] = error.allowed
            return None
        try:
            engine.register_parts(self._memory.bytes)  # as training does with its buffers
            opened = [self._open(engine, index) for index in request.paths]
            return self._measure(request, shape, engine, opened)
        finally:
            engine.close(cancel=True)

    def _open(self, engine: AioEngine, index: int) -> AioFile:
        self.files[index].check()
        file = engine.open(self.files[index].path)
        if engine.backend is not AioBackend.AIOFILES:  # files of that backend never are
            self.direct_reasons.setdefault(index, file.direct_reason)
        return file

    def _measure(
        self, request: Request, shape: Shape, engine: AioEngine, opened: Sequence[AioFile]
    ) -> Sample | None:
        files = [self.files[index] for index in request.paths]
        handles = zip(request.paths, opened, strict=True)
        cached = [self.files[i] for i, handle in handles if not handle.direct and not self._in_memory[i]]
        for file in cached:
            file.drop_cache()
        max_bytes = request.max_bytes
        if cached and max_bytes is None:
            # The page cache takes writes far faster than the drive: its content has to be written out.
            max_bytes = int(shape.rate_bps * request.seconds)
        workload = self._workload(request, shape, files)
        started_s = time.monotonic()
        is_whole = bool(cached) or request.with_timeline
        limits = Limits(request.seconds, request.deadline_s, max_bytes, is_counted_whole=is_whole)
        count = Pump(engine, opened, workload, self.allowance).run(limits)
        sync_s = _sync(opened) if count.bytes_written and is_whole else None
        if cached and count.is_running:
            count.end(time.monotonic())
        if not count.latencies_s or count.seconds <= 0.0:
            return None
        p50, p99 = np.percentile(count.latencies_s, (50, 99)).tolist()
        return Sample(
            phase=request.phase,
            traffic=request.traffic.value,
            point=request.point,
            paths=request.paths,
            direct=all(handle.direct for handle in opened),
            started_s=started_s - self._started_s,
            seconds=count.seconds,
            bytes_read=count.bytes_read,
            bytes_written=count.bytes_written,
            operation_bytes=workload.operation_bytes,
            num_operations=len(count.latencies_s),
            latency_p50_s=p50,
            latency_p99_s=p99,
            latency_max_s=max(count.latencies_s),
            cpu_s=count.cpu_s,
            timeline=buckets(count.timeline) if request.with_timeline else (),
            sync_s=sync_s,
        )

    def _workload(self, request: Request, shape: Shape, files: Sequence[ScratchFile]) -> Workload:
        if request.traffic is Traffic.MIXED:
            return OptimizerStep(files, num_elements=shape.chunk_elements, memory=self._memory)
        return Sequential(
            files,
            is_write=request.traffic is Traffic.WRITE,
            operation_bytes=max(shape.operation_bytes, request.point.block_size),
            in_flight_bytes=request.point.in_flight_bytes,
            memory=self._memory,
        )


def _sync(opened: Sequence[AioFile]) -> float:
    """Return the seconds until everything written is on stable storage."""
    begun_s = time.monotonic()
    for handle in opened:
        handle.sync()
    return time.monotonic() - begun_s


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
