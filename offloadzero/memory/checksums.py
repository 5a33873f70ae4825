"""A checksum for each block of the NVMe tier, kept in host memory.

[Note: checksums of swap files]
A drive may give back other bytes than it was given: by a flipped bit, a lost or a misdirected write, or a process
that writes into the file. This changes weights without an error. With checksums each block of BLOCK_BYTES has a CRC-32C
in host memory: computed from the caller's buffer when a write is submitted, compared with the caller's buffer when a
read is waited for. CRC-32C finds every change of up to 32 bits in a row and misses one random change in 2^32; CPUs
compute it faster than drives read. A copy in host memory, unlike one beside the data, also finds a block that holds
the data of an earlier write.

These bytes are verified:

- An entry is the CRC of the first `covered` bytes of its block; a block holds one extent's data at most, as extents
  begin on the grid. Most are covered whole, the last of an extent as far as its data goes.
- A block that was never written reads as zeros, and is verified as such.
- A read that takes only a part of what an entry covers reads the block once more from its beginning, verifies that,
  and compares that part with the caller's bytes.
- A write that leaves a part of what an entry covers as it is reads that part first and verifies it, so damage is
  found and never covered up by a new CRC.
- The bytes behind the covered ones were not written since the extent was last given away (`forget`). They are not
  verified.

The last two make a transfer that begins or ends inside a covered block wait for others in the same block. The chunks
of an update and whole records never do.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offloadzero.core.constants import GRID_BYTES
from offloadzero.errors import AioError
from offloadzero.io import _aio
from offloadzero.memory.arena import align_up
from offloadzero.memory.tickets import Ticket

BLOCK_BYTES = GRID_BYTES  # a block is read by itself
_UNKNOWN = 0xFFFF  # as covered bytes: the content of the block is not known
_ENTRY_BYTES = 4 + 2

Sums = np.ndarray[Any, np.dtype[np.uint32]]


def checksum_bytes(num_bytes: int) -> int:
    """The bytes of host memory that the checksums of `num_bytes` take."""
    return align_up(-(-num_bytes // BLOCK_BYTES) * _ENTRY_BYTES)


def crc32c_blocks(data: torch.Tensor) -> Sums:
    """The CRC of each block of a uint8 tensor, shape (n,); the last may be shorter."""
    sums = np.empty(-(-data.numel() // BLOCK_BYTES), dtype=np.uint32)
    _aio.crc32c_blocks(data.data_ptr(), data.numel(), BLOCK_BYTES, sums.ctypes.data, False)
    return sums


def crc32c(data: torch.Tensor) -> int:
    """The CRC of at most one block."""
    (crc,) = crc32c_blocks(data)
    return int(crc)


@dataclass(frozen=True)
class Transfers:
    """The tier's calls that move bytes, and its name for a place."""

    read: Callable[[int, torch.Tensor], Ticket]  # from a byte of the tier's space on
    write: Callable[[int, torch.Tensor], Ticket]
    file_place: Callable[[int], tuple[str, int]]  # path and offset of a byte
    label: str


@dataclass(frozen=True)
class _Part:
    """Bytes [begin, end) of one block; `at` is their place in the transfer."""

    block: int
    begin: int
    end: int
    at: int

    @property
    def stop(self) -> int:
        return self.at + self.end - self.begin


@dataclass(frozen=True)
class _Run:
    """Whole blocks, or the covered beginning of one, that the caller's bytes from `at` on must match."""

    block: int
    at: int
    num_bytes: int
    expected: Sums  # uint32, one for each block


@dataclass(frozen=True)
class _Again:
    """A block that is read once more, from its beginning."""

    part: _Part
    data: torch.Tensor
    covered: int
    expected: int
    ticket: Ticket


class Checksums:
    """The checksums of `num_bytes` of a tier's space. Any thread may call; transfers must not overlap."""

    def __init__(self, num_bytes: int) -> None:
        self._sums = np.zeros(0, dtype=np.uint32)
        self._covered = np.zeros(0, dtype=np.uint16)
        self._zero_sum = crc32c(torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="cpu"))
        # The last transfer of each block that is read or written in part.
        self._in_part: dict[int, Ticket] = {}
        self._in_part_lock = threading.Lock()
        self._table_lock = threading.Lock()  # protects the two arrays, which grow
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Add fresh blocks, up to `num_bytes` in all."""
        with self._table_lock:
            more = -(-num_bytes // BLOCK_BYTES) - len(self._sums)
            if more > 0:
                self._sums = np.concatenate((self._sums, np.zeros(more, dtype=np.uint32)))
                self._covered = np.concatenate((self._covered, np.zeros(more, dtype=np.uint16)))

    def forget(self, start: int, num_bytes: int) -> None:
        """Give the range away: its bytes are no longer verified."""
        with self._table_lock:
            self._covered[start // BLOCK_BYTES : -(-(start + num_bytes) // BLOCK_BYTES)] = _UNKNOWN

    def _entry(self, block: int) -> tuple[int, int]:
        """Return a block's checksum and covered bytes."""
        with self._table_lock:
            return int(self._sums[block]), int(self._covered[block])

    def _enter(self, block: int, sums: Sums, covered: int) -> None:
        """Set the entries from `block` on."""
        with self._table_lock:
            self._sums[block : block + len(sums)] = sums
            self._covered[block : block + len(sums)] = covered

    # --- writing ---

    def write(self, start: int, data: torch.Tensor, transfers: Transfers) -> Ticket:
        """Write, and remember the checksums."""
        first, last = _whole_blocks(start, data.numel())
        if first < last:
            whole = data[first * BLOCK_BYTES - start : last * BLOCK_BYTES - start]
            self._enter(first, crc32c_blocks(whole), BLOCK_BYTES)
        parts = list(_parts(start, data.numel()))
        if not parts:
            return transfers.write(start, data)
        with self._in_part_lock:
            for part in parts:
                self._merge(part, data[part.at : part.stop], transfers)
            ticket = transfers.write(start, data)
            self._in_part.update({part.block: ticket for part in parts})
        return ticket

    def _merge(self, part: _Part, piece: torch.Tensor, transfers: Transfers) -> None:
        """Set the entry of a block of which a part is written. Raises AioError."""
        self._settle(part.block)
        expected, covered = self._entry(part.block)
        if part.begin or (covered != _UNKNOWN and covered > part.end):
            length = part.end if covered == _UNKNOWN else max(covered, part.end)
            old = torch.empty(length, dtype=torch.uint8, device="cpu")
            transfers.read(part.block * BLOCK_BYTES, old).wait()
            self._check_beginning(part.block, old, covered, expected, transfers)
            old[part.begin : part.end] = piece
            piece = old
        self._enter(part.block, crc32c_blocks(piece), piece.numel())

    def _settle(self, block: int) -> None:
        """Wait for the last transfer of a part of the block."""
        ticket = self._in_part.pop(block, None)
        if ticket is not None:
            ticket.wait()

    # --- reading ---

    def read(self, start: int, data: torch.Tensor, transfers: Transfers) -> Ticket:
        """Read; the ticket verifies the bytes."""
        runs, again_parts = self._plan_read(start, data.numel())
        if not again_parts:
            return CheckedRead(self, transfers.read(start, data), data, runs, (), transfers)
        with self._in_part_lock:
            again = tuple(self._read_again(part, transfers) for part in again_parts)
            ticket = transfers.read(start, data)
        return CheckedRead(self, ticket, data, runs, again, transfers)

    def _plan_read(self, start: int, num_bytes: int) -> tuple[list[_Run], list[_Part]]:
        """Find the checksums for the caller's bytes, as they are now, and the parts that must be read again."""
        first, last = _whole_blocks(start, num_bytes)
        runs: list[_Run] = []
        again: list[_Part] = []
        if first < last:
            with self._table_lock:
                covered, expected = self._covered[first:last].copy(), self._sums[first:last].copy()
            expected[covered == 0] = self._zero_sum
            odd = np.flatnonzero((covered != 0) & (covered != BLOCK_BYTES))
            begin = 0
            for index in (*map(int, odd), last - first):
                at = (first + begin) * BLOCK_BYTES - start
                if begin < index:
                    runs.append(_Run(first + begin, at, (index - begin) * BLOCK_BYTES, expected[begin:index]))
                if index < last - first and covered[index] != _UNKNOWN:
                    block = first + index
                    again.append(_Part(block, 0, BLOCK_BYTES, block * BLOCK_BYTES - start))
                begin = index + 1
        for part in _parts(start, num_bytes):
            crc, covered_bytes = self._entry(part.block)
            if covered_bytes == _UNKNOWN or (covered_bytes and covered_bytes <= part.begin):
                continue  # nothing of it was written
            if part.begin == 0 and covered_bytes == part.end:
                runs.append(_Run(part.block, part.at, part.end, np.array([crc], dtype=np.uint32)))
            else:
                again.append(part)
        return runs, again

    def _read_again(self, part: _Part, transfers: Transfers) -> _Again:
        self._settle(part.block)
        expected, covered = self._entry(part.block)
        data = torch.empty(max(covered, part.end), dtype=torch.uint8, device="cpu")
        ticket = transfers.read(part.block * BLOCK_BYTES, data)
        self._in_part[part.block] = ticket
        return _Again(part, data, covered, expected, ticket)

    def verify(
        self, data: torch.Tensor, runs: list[_Run], again: tuple[_Again, ...], transfers: Transfers
    ) -> None:
        """Compare the bytes that were read with the checksums. Raises AioError."""
        for run in runs:
            index = _aio.crc32c_find_mismatch(
                data.data_ptr() + run.at, run.num_bytes, BLOCK_BYTES, run.expected.ctypes.data
            )
            if index >= 0:
                begin = run.at + index * BLOCK_BYTES
                block = data[begin : min(begin + BLOCK_BYTES, run.at + run.num_bytes)]
                raise _mismatch(run.block + index, block, int(run.expected[index]), transfers)
        for entry in again:
            self._check_beginning(entry.part.block, entry.data, entry.covered, entry.expected, transfers)
            part = entry.part
            if not torch.equal(entry.data[part.begin : part.end], data[part.at : part.stop]):
                raise _mismatch(part.block, data[part.at : part.stop], None, transfers)

    def _check_beginning(
        self, block: int, data: torch.Tensor, covered: int, expected: int, transfers: Transfers
    ) -> None:
        """Compare the beginning of the block, all covered bytes and perhaps more, with its checksum."""
        if covered == _UNKNOWN:
            return
        if covered == 0:
            if data.any():
                raise _mismatch(block, data, crc32c(torch.zeros_like(data)), transfers)
        elif crc32c(data[:covered]) != expected:
            raise _mismatch(block, data[:covered], expected, transfers)


@dataclass(eq=False)
class CheckedRead:
    """A read whose bytes are verified by the first thread that waits for it."""

    _checksums: Checksums
    _ticket: Ticket
    _data: torch.Tensor
    _runs: list[_Run]
    _again: tuple[_Again, ...]
    _transfers: Transfers
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_verified: bool = False
    _error: AioError | None = None

    def wait(self) -> None:
        """Block until the bytes are there and verified. Raises AioError."""
        self._ticket.wait()
        for entry in self._again:
            entry.ticket.wait()
        with self._lock:
            if not self._is_verified:
                try:
                    self._checksums.verify(self._data, self._runs, self._again, self._transfers)
                except AioError as error:
                    self._error = error
                self._is_verified = True
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._ticket.done() and all(entry.ticket.done() for entry in self._again)


def _whole_blocks(start: int, num_bytes: int) -> tuple[int, int]:
    """Return the first whole block of the range and the one after the last, which is lower when there is none."""
    return -(-start // BLOCK_BYTES), (start + num_bytes) // BLOCK_BYTES


def _parts(start: int, num_bytes: int) -> Iterator[_Part]:
    """Yield the blocks that the range covers in part: its first, its last, both or neither."""
    end = start + num_bytes
    for block in sorted({start // BLOCK_BYTES, end // BLOCK_BYTES}):
        origin = block * BLOCK_BYTES
        begin, stop = max(start, origin), min(end, origin + BLOCK_BYTES)
        if begin < stop and stop - begin < BLOCK_BYTES:
            yield _Part(block, begin - origin, stop - origin, begin - start)


def _mismatch(block: int, data: torch.Tensor, expected: int | None, transfers: Transfers) -> AioError:
    path, offset = transfers.file_place(block * BLOCK_BYTES)
    what = f"CRC-32C {crc32c(data):#010x}"
    return AioError(
        operation="pread",
        path=path,
        offset=offset,
        num_bytes=data.numel(),
        errno=errno.EBADMSG,
        label=transfers.label,
        detail="the file does not hold what was written: "
        + (f"{what}, written {expected:#010x}" if expected is not None else "two reads differ"),
    )
