"""Arenas, leases, pools and slots: fixed memory that is reserved at the start.

[Note: staggered arrays]
An update reads and writes four or five arrays in step. If they lie at equal offsets modulo 2 MiB (a huge page),
Adam in fp32 takes 1.6 times as long (two cores of Zen 4, 2.26 instead of 3.63 Gparam/s). Arrays of 2^k elements one
after the other do lie so; with a page between them they do not.

[Note: a slot each]
Pieces of mixed sizes that come and go leave holes: the number of free bytes says little about the pieces that still
fit. So an owner packs its pieces into a slot that no other owner uses, and as many owners as there are slots find room
whatever came before, if the pieces of each, rounded up to the alignment, fit in one slot. An owner beyond that number,
or one with more than a slot's bytes, gets free bytes of any slot.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from offloadzero.core import interrupts
from offloadzero.core.constants import GRID_BYTES
from offloadzero.errors import BudgetError, StateError
from offloadzero.memory import device as devices
from offloadzero.memory.pages import map_pages
from offloadzero.memory.tickets import FINISHED, LOOK_UP_S, Failures, Ticket

ALIGN_BYTES = GRID_BYTES  # the rule of direct I/O; a multiple of that of copies and kernels


def align_up(num_bytes: int, alignment: int = ALIGN_BYTES) -> int:
    """Return `num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


def staggered(num_bytes: int) -> int:
    """The distance in bytes between the starts of arrays that are used together: [Note: staggered arrays]."""
    return align_up(num_bytes) + ALIGN_BYTES


def room_for(sizes: Iterable[int]) -> int:
    """The bytes in which leases of these sizes, taken in this order, fit wherever the earlier ones lie.

    Leases do not move: n of them leave up to n + 1 holes, none of which need be as large as the free bytes together.
    """
    room = taken = 0
    for num_holes, size in enumerate(map(align_up, sizes), start=1):
        # The largest hole can be smaller than `size` only if all holes together are no larger than this.
        too_little = num_holes * max(0, size - ALIGN_BYTES)
        room = max(room, taken + too_little + min(size, ALIGN_BYTES))
        taken += size
    return room


def allocate_host(num_bytes: int) -> torch.Tensor:
    """Allocate host memory of exactly `num_bytes`, page-aligned, zero: uint8, shape (num_bytes,)."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    mapping = map_pages(num_bytes)
    # open(2): direct I/O into a private mapping can go astray while the process forks (a DataLoader's workers do).
    mapping.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _view(buffer: torch.Tensor, offset: int, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
    # The caller keeps the memory for training, though its first use may be an evaluation in inference mode.
    with torch.inference_mode(False):
        return buffer[offset : offset + num_elements * dtype.itemsize].view(dtype)


class Lease:
    """A fixed-address slice of an arena, lent until `release()`."""

    def __init__(self, arena: Arena, offset: int, num_bytes: int, label: str) -> None:
        self._arena = arena
        self.offset = offset
        self.address = arena.address + offset
        self.num_bytes = num_bytes
        self.label = label
        self._released = False

    def view(self, dtype: torch.dtype, num_elements: int, *, start_byte: int = 0) -> torch.Tensor:
        """Return `num_elements` of `dtype` from `start_byte` on: shape (num_elements,)."""
        size = num_elements * dtype.itemsize
        if start_byte + size > self.num_bytes:
            raise AssertionError(f"{self.label}: view of {start_byte}+{size} in {self.num_bytes} bytes")
        return self._arena.view(self.offset + start_byte, dtype, num_elements)

    @property
    def bytes(self) -> torch.Tensor:
        """The whole lease as uint8."""
        return self._arena.buffer[self.offset : self.offset + self.num_bytes]

    def release(self) -> None:
        """Give the slice back; it must not be touched afterwards. Raises StateError the second time."""
        if self._released:
            raise StateError(f"lease {self.label} was released twice")
        self._released = True
        self._arena._free(self)


class Holes:
    """The free ranges of an address space: best fit first, or from the end; neighbours merge. Not thread-safe."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes  # the free bytes, perhaps not in one piece
        self._ranges: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []  # (offset, size)

    @property
    def largest_bytes(self) -> int:
        """The free bytes in one piece."""
        return max((size for _, size in self._ranges), default=0)

    def take(self, num_bytes: int, *, from_end: bool = False) -> int | None:
        """Take a free range of `num_bytes` and return its offset; None when no range is large enough.

        `from_end`: it is the last part of the last range that is large enough.
        """
        large = [(size, offset) for offset, size in self._ranges if size >= num_bytes]
        if not large:
            return None
        size, offset = max(large, key=lambda hole: hole[1]) if from_end else min(large)
        rest = size - num_bytes
        self._ranges.remove((offset, size))
        if rest:
            self._ranges.append((offset if from_end else offset + num_bytes, rest))
        self.num_bytes -= num_bytes
        return offset + rest if from_end else offset

    def give(self, offset: int, num_bytes: int) -> None:
        """Add a range to the free ones."""
        start, size = offset, num_bytes
        apart = []
        for hole in self._ranges:
            if hole[0] + hole[1] == offset:
                start, size = hole[0], size + hole[1]
            elif hole[0] == offset + num_bytes:
                size += hole[1]
            else:
                apart.append(hole)
        self._ranges = [*apart, (start, size)]
        self.num_bytes += num_bytes


class Arena:
    """One buffer from which leases are cut, as from `Holes`; thread-safe."""

    def __init__(self, name: str, buffer: torch.Tensor, *, poison: bool = False) -> None:
        self.name = name
        self.buffer = buffer
        self.address = buffer.data_ptr()
        self._poison = poison
        self._lock = threading.Lock()
        self._holes = Holes(buffer.numel())
        # Returns elements of a dtype: (from byte `offset` on, dtype, number) -> shape (number,). The views are kept, as
        # leases come back to the same few places.
        self.view = functools.lru_cache(maxsize=256)(functools.partial(_view, buffer))

    @property
    def num_bytes(self) -> int:
        """The capacity in bytes."""
        return self.buffer.numel()

    @property
    def free_bytes(self) -> int:
        """The bytes in no lease (perhaps not in one piece)."""
        return self._holes.num_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The bytes in no lease in one piece."""
        with self._lock:
            return self._holes.largest_bytes

    def try_lease(self, num_bytes: int, label: str, *, from_end: bool = False) -> Lease | None:
        """Lease `num_bytes` (rounded up to the alignment); None when no hole is large enough. No bytes always fit."""
        size = align_up(num_bytes)
        with self._lock:
            offset = self._holes.take(size, from_end=from_end) if size else 0
        return None if offset is None else Lease(self, offset, size, label)

    def lease(self, num_bytes: int, label: str) -> Lease:
        """Lease like `try_lease`; raises BudgetError when no hole is large enough."""
        lease = self.try_lease(num_bytes, label)
        if lease is None:
            raise BudgetError(
                f"{label}: {num_bytes:,} bytes do not fit in the {self.name} arena "
                f"({self.free_bytes:,} of {self.num_bytes:,} bytes free)"
            )
        return lease

    def _free(self, lease: Lease) -> None:
        if self._poison:
            lease.bytes.fill_(0xFF)  # NaN in bf16, fp16 and fp32
        if lease.num_bytes:
            with self._lock:
                self._holes.give(lease.offset, lease.num_bytes)


class PooledBuffer:
    """One buffer of a pool, and the ticket of its last use; a `temporary` one belongs to no pool."""

    def __init__(self, bytes_: torch.Tensor, *, temporary: bool = False) -> None:
        self.bytes = bytes_
        self.temporary = temporary
        self._view_at = functools.lru_cache(maxsize=32)(functools.partial(_view, bytes_))
        self.last_use: Ticket = FINISHED

    def view(self, dtype: torch.dtype, num_elements: int, *, start_byte: int = 0) -> torch.Tensor:
        """Return `num_elements` of `dtype` from `start_byte` on: shape (num_elements,)."""
        return self._view_at(start_byte, dtype, num_elements)


class BufferPool:
    """Equal buffers handed out one at a time; `take` blocks until one is free.

    A buffer may be given back before its last transfer is complete: its next taker gets `last_use` to wait for.
    """

    def __init__(self, leases: Sequence[Lease], *, failures: Failures, poison: bool = False) -> None:
        self.num_buffers = len(leases)
        self._failures = failures
        self._poison = poison
        self._free = deque(PooledBuffer(lease.bytes) for lease in leases)
        # Not taken when a buffer may be free. A wait takes no buffer, so an interrupted one loses none.
        self._given = threading.Lock()

    def take_within(self, wait_s: float) -> PooledBuffer | None:
        """Take a free buffer; None where none is given back for so long. Raises the engine's failure as `take` does."""
        until_s = time.monotonic() + wait_s
        while (buffer := self.try_take()) is None:
            self._wait_given()
            if time.monotonic() > until_s:
                return self.try_take()
        if self._free:
            self._wake()  # the next one's turn
        return buffer

    def take(self) -> PooledBuffer:
        """Take a free buffer; blocks. Raises the engine's failure if there is one, without counting it as seen.

        After a failure buffers may never come back, so the wait looks up now and then.
        """
        while (buffer := self.try_take()) is None:
            self._wait_given()
        if self._free:
            self._wake()  # the next one's turn
        return buffer

    def _wait_given(self) -> None:
        has_come = interrupts.wait(self._given.acquire, timeout=LOOK_UP_S)
        if not has_come and self._failures.first is not None:
            raise self._failures.first from None

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # another thread did
            self._given.release()

    def try_take(self) -> PooledBuffer | None:
        """Take a free buffer; None where there is none."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, buffer: PooledBuffer, *, last_use: Ticket = FINISHED) -> None:
        """Give a buffer back. The next taker must wait for `last_use` before it writes."""
        buffer.last_use = last_use
        # In CUDA's memory the fill would run later, and the next taker waits for `last_use` alone.
        if self._poison and devices.is_host_memory(buffer.bytes) and last_use.done():
            buffer.bytes.fill_(0xFF)
        self._free.append(buffer)
        self._wake()


class Slots:
    """Offsets in equal slots: [Note: a slot each]. An owner is a number of the caller's choice. Not thread-safe."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_bytes = num_slots * slot_bytes
        self._slot_bytes = slot_bytes
        self._slots = [Holes(slot_bytes) for _ in range(num_slots)]
        self._slot_of: dict[int, int] = {}  # by owner, as long as its slot holds a piece

    @property
    def free_bytes(self) -> int:
        """The free bytes in all slots together."""
        return sum(slot.num_bytes for slot in self._slots)

    @property
    def largest_bytes(self) -> int:
        """The largest free piece in any slot."""
        return max((slot.largest_bytes for slot in self._slots), default=0)

    def take(self, owner: int, num_bytes: int) -> int | None:
        """Take `num_bytes` in the owner's slot, or in an unused one, which is then the owner's; return the offset."""
        own = self._slot_of.get(owner)
        offset = self._take_in(own, num_bytes) if own is not None else None
        if offset is not None:
            return offset
        unused = (i for i, slot in enumerate(self._slots) if slot.num_bytes == self._slot_bytes)
        index = next(unused, None)
        offset = self._take_in(index, num_bytes) if index is not None else None
        if index is not None and offset is not None:
            self._slot_of[owner] = index
        return offset

    def take_anywhere(self, num_bytes: int) -> int | None:
        """Take `num_bytes` in the first slot that has them, of any owner; return the offset."""
        offsets = (self._take_in(index, num_bytes) for index in range(len(self._slots)))
        return next((offset for offset in offsets if offset is not None), None)

    def give(self, offset: int, num_bytes: int) -> None:
        """Free a piece again."""
        index, start = divmod(offset, self._slot_bytes)
        self._slots[index].give(start, align_up(num_bytes))
        if self._slots[index].num_bytes == self._slot_bytes:
            self._slot_of = {owner: slot for owner, slot in self._slot_of.items() if slot != index}

    def _take_in(self, index: int, num_bytes: int) -> int | None:
        offset = self._slots[index].take(align_up(num_bytes))
        return None if offset is None else index * self._slot_bytes + offset
