"""The NVMe tier: extents in preallocated files, striped over the given directories.

[Note: the gap]
A model that was built under `zero.Init` waits on the very drives where its states are to live. If all of their space
were reserved beside it, a drive would have to hold both. So each file begins with a gap, as large as the parameters
that wait on its drive: that much is not reserved at first, and together with them the reserved part adds up to the
files' size, which is checked before anything is moved. Units then come home from the last to the first. The space that
a unit leaves on the drive shortens the gap from its end; and since a unit takes no less in its home than it took while
it waited, its home lies behind the gap by then. (Where it does take less, frozen weights in bf16 that waited in fp32,
the gap ends where its home begins.)
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from offloadzero.config import AioConfig
from offloadzero.core.fail_points import through
from offloadzero.core.segments import TierName
from offloadzero.errors import AioError, BudgetError
from offloadzero.io import _aio
from offloadzero.io.engine import AioEngine, AioFile
from offloadzero.memory.arena import ALIGN_BYTES, align_up
from offloadzero.memory.checksums import Checksums, Transfers
from offloadzero.memory.mapped_files import FileRange, MappedFile
from offloadzero.memory.swap_file import MARK_BYTES, KeptFile, SwapFile, remove_stale_files
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.memory.tiers import UPDATE_PRIORITY, Extent, Home, InParts, Part, Tier
from offloadzero.native.termination import DoomedFile
from offloadzero.observe.timeline import NVME_READ, NVME_WRITE, OFF, Timeline

log = logging.getLogger("offloadzero.nvme")

STRIPE_BYTES = 4 * 1024 * 1024
_NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class Piece:
    """The part of a transfer that lies in one file."""

    file_index: int
    file_offset: int
    buffer_offset: int
    num_bytes: int


def stripe_pieces(offset: int, num_bytes: int, num_files: int) -> Iterator[Piece]:
    """Cut a range of the striped space into pieces, one per file and contiguous run."""
    if num_files == 1:
        if num_bytes:
            yield Piece(0, offset, 0, num_bytes)
        return
    position = offset
    end = offset + num_bytes
    while position < end:
        stripe, inside = divmod(position, STRIPE_BYTES)
        size = min(STRIPE_BYTES - inside, end - position)
        yield Piece(stripe % num_files, stripe // num_files * STRIPE_BYTES + inside, position - offset, size)
        position += size


def file_bytes(num_bytes: int, num_files: int) -> int:
    """The size of each of `num_files` files that hold `num_bytes` together."""
    return num_bytes if num_files == 1 else -(-num_bytes // (STRIPE_BYTES * num_files)) * STRIPE_BYTES


def bytes_before(offset: int, file_index: int, num_files: int) -> int:
    """The number of the first `offset` bytes of the striped space that lie in one of its files."""
    if num_files == 1:
        return offset
    stripe, inside = divmod(offset, STRIPE_BYTES)
    whole = (stripe - file_index + num_files - 1) // num_files * STRIPE_BYTES
    return whole + (inside if stripe % num_files == file_index else 0)


@contextlib.contextmanager
def _room_for(num_bytes: int, directory: Path, num_waiting_bytes: int) -> Iterator[None]:
    """Turn an error of the block that says there is no room into a BudgetError with these figures."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = os.statvfs(directory)
        waiting = f" and {num_waiting_bytes:,} hold parameters that wait there" if num_waiting_bytes else ""
        raise BudgetError(
            f"nvme: {num_bytes:,} bytes are needed in {directory}, "
            f"{free.f_bavail * free.f_frsize:,} are free{waiting} ({os.strerror(error.errno)})"
        ) from error


class _BackingFile:
    """A swap file and its place in the engine. `gap` bytes of data at its begin are not reserved yet."""

    def __init__(
        self, engine: AioEngine, directory: Path, kept: KeptFile | None = None, *, least_bytes: int = 0
    ) -> None:
        self.swap = SwapFile(directory, kept, least_bytes=least_bytes)
        self.path = self.swap.path
        self.gap = 0
        try:
            self.file: AioFile = engine.open(self.swap.open_path, name=str(self.path))
        except BaseException:
            self.swap.remove()
            raise

    def preallocate(self, num_bytes: int, *, gap: int = 0) -> None:
        """Reserve room for `num_bytes` of data, except for the gap."""
        self.gap = min(gap, num_bytes)
        if self.gap < num_bytes or not num_bytes:
            self.file.preallocate(MARK_BYTES + num_bytes, start=MARK_BYTES + self.gap if self.gap else 0)

    def shorten_gap(self, num_bytes: int) -> None:
        """Shorten the gap to `num_bytes`, if it is longer."""
        if num_bytes < self.gap:
            self.file.preallocate(MARK_BYTES + self.gap, start=MARK_BYTES + num_bytes)
            self.gap = num_bytes

    def close(self) -> None:
        """Close the file and remove it, unless it is kept. A second call does nothing."""
        try:
            self.file.close()
        finally:
            self.swap.remove()


@dataclass(frozen=True)
class _Registered:
    """The result of registering one buffer: the bytes that the file engine has taken, and why not the rest."""

    num_bytes: int
    asked_bytes: int
    reason: str


class NvmeTier(Tier):
    """A striped address space of `num_bytes`, reserved on disk before anything is written.

    `waiting`: bytes by drive (`st_dev`) that will be free when the parameters that wait there have come home. As many
    bytes are reserved only then, by `reserve`: [Note: the gap]. Fresh extents read as zeros.

    `kept`: the file in each of the directories has that name, and stays: [Note: durable runs] in update/commits.py. One
    that is found keeps its size until `grow` is called, when it is known to be of this run.

    Raises BudgetError when a filesystem has no room, AioError for other failures.
    """

    name = TierName.NVME

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        num_bytes: int,
        aio: AioConfig,
        timeline: Timeline = OFF,
        waiting: Mapping[int, int] = _NOTHING,
        kept: KeptFile | None = None,
    ) -> None:
        self._pid = os.getpid()
        self.num_bytes = align_up(num_bytes)
        self._timeline = timeline
        self._next_offset = 0
        self._checksums = Checksums(self.num_bytes) if aio.checksums else None
        self._files: list[_BackingFile] = []
        self._doomed: list[DoomedFile] = []
        self._registered: dict[int, _Registered] = {}  # by address
        self._registered_lock = threading.Lock()
        self.engine = AioEngine(
            backend=aio.backend,
            block_size=aio.block_size,
            queue_depth=aio.queue_depth * aio.num_threads,  # the engine's depth is that of all its threads
            num_threads=aio.num_threads,
            transfer_timeout_s=aio.transfer_timeout_s,
        )
        _open_tiers.add(self)
        try:
            for directory in directories:
                remove_stale_files(directory)
            found = None if kept is None else kept.file_bytes
            for directory, least_bytes in zip(directories, found or [0] * len(directories), strict=True):
                self._files.append(_BackingFile(self.engine, directory, kept, least_bytes=least_bytes))
                if kept is None:
                    self._doomed.append(DoomedFile(self._files[-1].path))
            if found is None:
                self._preallocate(waiting)
            if self._checksums is not None and kept is not None:
                self._checksums.forget(0, self.num_bytes)  # what is there has none
        except BaseException:
            self.close()
            raise

    def _preallocate(self, waiting: Mapping[int, int]) -> None:
        per_file = file_bytes(self.num_bytes, len(self._files))
        for backing, gap in zip(self._files, self._gaps(waiting), strict=True):
            with _room_for(per_file, backing.path.parent, gap):
                backing.preallocate(per_file, gap=gap)

    def reserve(self, extents: Iterable[Extent], *, waiting: Mapping[int, int]) -> None:
        """Reserve the space of `extents` and all behind them, and of the rest all but the bytes still `waiting`.

        Raises BudgetError when a filesystem has no room.
        """
        first = min((extent.offset for extent in extents), default=self.num_bytes)
        for index, (backing, gap) in enumerate(zip(self._files, self._gaps(waiting), strict=True)):
            with _room_for(backing.gap, backing.path.parent, gap):
                backing.shorten_gap(min(gap, bytes_before(first, index, len(self._files))))

    def _gaps(self, waiting: Mapping[int, int]) -> list[int]:
        """The gap of each file; files on one drive share the bytes that wait there."""
        drives = [os.fstat(backing.swap.descriptor).st_dev for backing in self._files]
        return [waiting.get(drive, 0) // drives.count(drive) // ALIGN_BYTES * ALIGN_BYTES for drive in drives]

    @property
    def files(self) -> list[tuple[Path, int]]:
        """Path and size in bytes of each backing file."""
        return [(backing.path, backing.swap.num_bytes) for backing in self._files]

    @property
    def swap_files(self) -> list[SwapFile]:
        """The files, of which each has its part of the stripes."""
        return [backing.swap for backing in self._files]

    def sync(self) -> None:
        """Block until all that has been written is on the drives. Raises AioError."""
        for backing in self._files:
            try:
                through("nvme.sync", os.fdatasync, self)(backing.swap.descriptor)
            except OSError as error:
                raise AioError(
                    operation="fdatasync", path=str(backing.path), offset=0, num_bytes=0,
                    errno=error.errno or errno.EIO,
                ) from error  # fmt: skip

    @property
    def description(self) -> str:
        """The file engine in use and why, and whether the files bypass the page cache."""
        direct = "; ".join(sorted({backing.file.direct_reason for backing in self._files}))
        checked = "" if self._checksums is None else f"; checksums ({_aio.crc32c_implementation()})"
        return f"{self.engine.backend.value} ({self.engine.reason}); {direct}; {self._buffers()}{checked}"

    def _buffers(self) -> str:
        with self._registered_lock:
            entries = list(self._registered.values())
        done = sum(entry.num_bytes for entry in entries)
        asked = sum(entry.asked_bytes for entry in entries)
        if done == asked:
            return f"buffers registered ({done:,} bytes)" if done else "no buffers so far"
        reasons = "; ".join(sorted({e.reason for e in entries if e.num_bytes < e.asked_bytes}))
        how_much = f"{done:,} of {asked:,} bytes of buffers registered" if done else "buffers not registered"
        return f"{how_much} ({reasons})"

    def register(self, buffer: torch.Tensor, *, may_pin: bool) -> None:
        """Register a host buffer for transfers: its pages are pinned now, as far as the kernel takes them."""
        if may_pin:
            num_bytes = self.engine.register_parts(buffer)
            reason = self.engine.buffers_reason
        else:
            num_bytes, reason = 0, "pin_memory is false"
        with self._registered_lock:
            self._registered[buffer.data_ptr()] = _Registered(num_bytes, buffer.nbytes, reason)
        if num_bytes < buffer.nbytes:
            log.info(
                "%s of %s bytes of buffers registered: %s", f"{num_bytes:,}", f"{buffer.nbytes:,}", reason
            )

    def unregister(self, buffer: torch.Tensor) -> None:
        """Undo `register`, before the memory is freed or unpinned."""
        with self._registered_lock:
            entry = self._registered.pop(buffer.data_ptr())
        if entry.num_bytes:
            self.engine.unregister_buffer(buffer)

    def allocate(self, dtype: torch.dtype, num_elements: int, label: str) -> Extent:
        """Allocate the next bytes of the files, rounded up to whole blocks. Raises BudgetError past those reserved."""
        size = align_up(num_elements * dtype.itemsize)
        if self._next_offset + size > self.num_bytes:
            raise BudgetError(f"{label}: {size:,} bytes past the {self.num_bytes:,} bytes reserved on nvme")
        extent = Extent(self._next_offset, size)
        self._next_offset += size
        return extent

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` in all; the extents keep their data. Raises like the constructor."""
        before, self.num_bytes = self.num_bytes, align_up(num_bytes)
        try:
            self._preallocate(_NOTHING)
        except BaseException:
            self.num_bytes = before
            raise
        if self._checksums is not None:
            self._checksums.grow(self.num_bytes)

    def read(
        self, home: Home, target: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Fill `target` (host, contiguous) from element `start` of the home on. Raises AioError past its end."""
        data = target.view(torch.uint8)
        begin = self._begin("read", home, start, data.numel())
        transfers = self._transfers(home.label, priority)
        if self._checksums is None:
            return transfers.read(begin, data)
        return self._checksums.read(begin, data, transfers)

    def write(
        self, home: Home, source: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Write `source` (host, contiguous) at element `start` of the home. Raises AioError past its end."""
        data = source.view(torch.uint8)
        begin = self._begin("write", home, start, data.numel())
        transfers = self._transfers(home.label, priority)
        if self._checksums is None:
            return transfers.write(begin, data)
        return self._checksums.write(begin, data, transfers)

    def forget(self, extent: Extent) -> None:
        """Give the extent's data up: they are no longer verified."""
        if self._checksums is not None:
            self._checksums.forget(extent.offset, extent.num_bytes)

    def _begin(self, verb: str, home: Home, start: int, num_bytes: int) -> int:
        """Return the byte of the striped space at which a transfer begins. Raises AioError past the home's end."""
        extent = home.extent
        if extent is None:
            raise AssertionError(f"{home.label} has no extent")
        start_byte = start * home.dtype.itemsize
        begin = extent.offset + start_byte
        if start_byte + num_bytes > extent.num_bytes:
            path, offset = self._file_place(begin)
            raise AioError(
                operation=verb,
                path=path,
                offset=offset,
                num_bytes=num_bytes,
                errno=errno.EINVAL,
                label=home.label,
                detail=f"past the extent's {extent.num_bytes} bytes",
            )
        return begin

    def _transfers(self, label: str, priority: int) -> Transfers:
        read = through("nvme.read", self._submit, self)
        write = through("nvme.write", self._submit, self)
        return Transfers(
            read=partial(read, "read", priority=priority, label=label),
            write=partial(write, "write", priority=priority, label=label),
            file_place=self._file_place,
            label=label,
        )

    def _submit(self, verb: str, start: int, data: torch.Tensor, *, priority: int, label: str) -> Ticket:
        """Submit a transfer of bytes from `start` of the striped space on."""
        tickets = [
            self.submit(
                verb,
                self._files[piece.file_index].file,
                data[piece.buffer_offset : piece.buffer_offset + piece.num_bytes],
                offset=MARK_BYTES + piece.file_offset,
                priority=priority,
                label=label,
            )
            for piece in stripe_pieces(start, data.numel(), len(self._files))
        ]
        return tickets[0] if len(tickets) == 1 else AllOf(tickets)

    def submit(
        self, verb: str, file: AioFile, data: torch.Tensor, *, offset: int, priority: int, label: str
    ) -> Ticket:
        """Submit the "read" or "write" of a range of any file of this engine."""
        submit = self.engine.read if verb == "read" else self.engine.write
        ticket = submit(file, data, offset=offset, priority=priority, label=label)
        lane = NVME_READ if verb == "read" else NVME_WRITE
        self._timeline.add_unfinished(lane, label, ticket.times, ticket.num_bytes)
        return ticket

    def _file_place(self, offset: int) -> tuple[str, int]:
        """The path of the file with one byte of the striped space, and the offset in it."""
        (piece,) = stripe_pieces(offset, 1, len(self._files))
        return str(self._files[piece.file_index].path), MARK_BYTES + piece.file_offset

    def close(self) -> None:
        """End all transfers and remove the files. In a forked child it does nothing: they are the parent's."""
        if os.getpid() != self._pid:
            return
        _open_tiers.discard(self)
        with contextlib.ExitStack() as stack:  # each file is removed even when another's removal fails
            for backing in self._files:
                stack.callback(backing.close)
            stack.callback(self.engine.close)  # runs first
        self._files = []
        for doomed in self._doomed:
            doomed.spare()


class _ReadInPlace:
    """A read from a file of others, which raises AioError if the file is not what it was."""

    def __init__(self, ticket: Ticket, place: FileRange, num_bytes: int, label: str) -> None:
        self._ticket = ticket
        self._check = partial(place.file.expect_unchanged, label, place.offset, num_bytes)

    def wait(self) -> None:
        try:
            self._ticket.wait()
        finally:  # of a file that was cut short the read has failed
            self._check()

    def done(self) -> bool:
        return self._ticket.done()


class InPlaceTier(Tier):
    """The NVMe tier of parameters that lie in files already: [Note: weights in place] in memory/mapped_files.py.

    A home here is in parts: some are ranges of those files, which are never written, and the others are in the swap
    files. A part that is written with other values than its file has moves into the swap files, which grow.
    """

    name = TierName.NVME

    def __init__(self, nvme: NvmeTier, *, budget: int | None) -> None:
        """Read by the engine of `nvme`, whose files may grow to `budget` bytes."""
        self._nvme = nvme
        self._budget = budget
        self._files: dict[MappedFile, AioFile] = {}
        self.num_bytes: Counter[str] = Counter()  # by the path of a file: those that are read there

    def allocate(self, dtype: torch.dtype, num_elements: int, label: str) -> Extent:
        """Allocate a place in the swap files."""
        return self._nvme.allocate(dtype, num_elements, label)

    def add(
        self, start: int, num_elements: int, source: FileRange | None, label: str, *, dtype: torch.dtype
    ) -> Part:
        """Make one part of a home, from its element `start` on. The `source` has the values; None: they are zeros."""
        backing: Tier = self._nvme if source is None else self
        place = source or self.allocate(dtype, num_elements, label)
        if source is not None:
            self.num_bytes[source.file.path] += num_elements * dtype.itemsize
            if source.file not in self._files:
                opened = self._nvme.engine.open(source.file.open_path, readonly=True, name=source.file.path)
                self._files[source.file] = opened
        return Part(
            start, Home(label=label, dtype=dtype, num_elements=num_elements, backing=backing, place=place)
        )

    def read(
        self, home: Home, target: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Fill `target` (host, contiguous) from element `start` of the home on. Raises AioError."""
        if isinstance(home.place, FileRange):
            return self._read_file(home, home.place.behind(start * home.dtype.itemsize), target, priority)
        tickets, position = [], 0
        for part, first, stop in _overlaps(home, start, target.numel()):
            target[position:first].zero_()
            piece, at = target[first:stop], start + first - part.start
            tickets.append(part.home.backing.read(part.home, piece, start=at, priority=priority))
            position = stop
        target[position:].zero_()
        return AllOf(tickets)

    def _read_file(self, home: Home, place: FileRange, target: torch.Tensor, priority: int) -> Ticket:
        ticket = self._nvme.submit(
            "read",
            self._files[place.file],
            target.view(torch.uint8),
            offset=place.offset,
            priority=priority,
            label=home.label,
        )
        return _ReadInPlace(ticket, place, target.nbytes, home.label)

    def write(
        self, home: Home, source: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Write `source` (host, contiguous) at element `start` of the home, but for parts that still lie in files.

        Those have the values already, as `move_written` has seen. Raises AioError.
        """
        tickets = []
        for part, first, stop in _overlaps(home, start, source.numel()):
            if not isinstance(part.home.place, FileRange):
                piece, at = source[first:stop], start + first - part.start
                tickets.append(part.home.backing.write(part.home, piece, start=at, priority=priority))
        return AllOf(tickets)

    def move_written(self, home: Home, source: torch.Tensor, *, start: int) -> None:
        """Move the parts in files for which `source` has other values into the swap files, each with those.

        `source`: as `write` gets it next; a part in a file is written whole. Until its new values are there the part
        has the former ones. Raises AioError; BudgetError where the swap files cannot grow.
        """
        for part, first, stop in _overlaps(home, start, source.numel()):
            if isinstance(part.home.place, FileRange) and not self._holds(part.home, source[first:stop]):
                self._move(home, part, source[first:stop])

    def _holds(self, home: Home, values: torch.Tensor) -> bool:
        """Whether the file has these bits for all of a part."""
        if values.numel() != home.num_elements:
            raise AssertionError(
                f"{home.label}: {values.numel()} of {home.num_elements} elements are written"
            )
        present = torch.empty_like(values)
        self.read(home, present).wait()
        return torch.equal(present.view(torch.uint8), values.view(torch.uint8))

    def _move(self, home: Home, part: Part, values: torch.Tensor) -> None:
        place, num_bytes = part.home.place, align_up(part.home.num_bytes)
        wanted = self._nvme.num_bytes + num_bytes
        if not isinstance(place, FileRange) or not isinstance(home.place, InParts):
            raise AssertionError(f"{home.label} is in no file")
        try:
            if self._budget is not None and wanted > self._budget:
                raise BudgetError(
                    f"{wanted:,} are needed in all, offloadzero.budgets.nvme allows {self._budget:,}"
                )
            self._nvme.grow(wanted)
        except BudgetError as error:
            raise BudgetError(
                f"{part.home.label}: it is read from {place.file.path} and now written, which takes {num_bytes:,} "
                f"bytes of nvme more: {error}. It keeps the value that it had"
            ) from error
        moved = self.add(part.start, part.home.num_elements, None, part.home.label, dtype=part.home.dtype)
        moved.home.backing.write(moved.home, values).wait()
        self.num_bytes[place.file.path] -= part.home.num_bytes
        home.place.parts[home.place.parts.index(part)] = moved

    def close(self) -> None:
        """Close the files, when no read of them is submitted any more."""
        for file in self._files.values():
            file.close()


def _overlaps(home: Home, start: int, num_elements: int) -> Iterator[tuple[Part, int, int]]:
    """Yield the parts that have some of these elements of a home, and which: counted from `start`."""
    for part in [*home.parts]:
        first, stop = max(start, part.start), min(start + num_elements, part.stop)
        if first < stop:
            yield part, first - start, stop - start


_open_tiers: weakref.WeakSet[NvmeTier] = weakref.WeakSet()


@atexit.register
def _remove_files_at_exit() -> None:
    for tier in list(_open_tiers):
        tier.close()
