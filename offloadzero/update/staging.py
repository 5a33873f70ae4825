"""Chunks of records in pinned memory, on their way to and from their update.

[Note: reading ahead]
While backward runs the drive has little to do, and it is known which chunks the step will update first: those that
the next forward needs first. Their states are read then, into the slots that are free. When the update comes it
takes a chunk that was read ahead if it is the one it needs and the record has not been written since, nor exchanged its
places (`Edits.num_begun`); otherwise everything read ahead is dropped and read again. Only time depends on it.

A script's write comes after the reads that have begun, and nothing is read ahead of a record while it is written
(`Edits`): even if dropped, a half-written chunk would not match a file's checksums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offloadzero.core.segments import SegmentKind
from offloadzero.memory.arena import Lease, align_up, staggered
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED, AllOf, Ticket
from offloadzero.update.records import Record, all_ranges


class _Slot:
    """Pinned memory for the staged segments of one chunk."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.users: Ticket = FINISHED


@dataclass(eq=False)
class StagedChunk:
    """Elements [start, stop) of a record's segments in memory: in place, or in a slot once `reads` are done."""

    record: Record
    start: int
    stop: int
    version: int
    buffers: dict[SegmentKind, torch.Tensor] = field(default_factory=dict)
    staged: list[SegmentKind] = field(default_factory=list)
    reads: list[Ticket] = field(default_factory=list)
    slot: _Slot | None = None
    used_bytes: int = 0  # of the slot
    makes_next_version: bool = False  # it is written there: [Note: versions]

    def matches(self, record: Record, start: int, stop: int) -> bool:
        """Whether this is that chunk, with the record not written since."""
        return (self.record, self.start, self.stop) == (
            record,
            start,
            stop,
        ) and self.version == record.edits.num_begun


class ChunkStager:
    """Brings chunks into memory and back; used by one thread."""

    def __init__(self, store: TieredStore, slot_leases: Sequence[Lease], *, chunk_elements: int) -> None:
        self._store = store
        self._chunk_elements = chunk_elements
        self.num_slots = len(slot_leases)  # chunks that can be staged at once
        self._free = deque(_Slot(lease) for lease in slot_leases)  # the first freed comes first
        self._ahead: deque[StagedChunk] = deque()

    def stage(
        self, record: Record, start: int, stop: int, *, makes_next_version: bool = False
    ) -> StagedChunk:
        """Start to read a chunk, or take the one that was read ahead."""
        if needs_slot(record):
            if self._ahead and self._ahead[0].matches(record, start, stop):
                chunk = self._ahead.popleft()
                chunk.makes_next_version = makes_next_version
                return _in_next_version(chunk) if makes_next_version else chunk
            self._drop_ahead()
        return self._read(record, start, stop, makes_next_version=makes_next_version)

    def read_ahead(self, records: Sequence[Record]) -> None:
        """Read the chunks that an update of `records` in this order stages first, as far as slots are free now."""
        if self._ahead:
            return  # chunks for a step that was skipped, or for gradients that were dropped
        for record in records:
            if not needs_slot(record):
                continue
            # A rank may keep nothing of a small record but padding, of which its update has no chunk.
            ranges = [part for part in all_ranges(record) if part.start < part.stop]
            if not ranges:
                continue
            first, last = ranges[0].start, ranges[-1].stop
            for start, stop in record.chunks(first, last, self._chunk_elements):
                if not self._free or not self._free[0].users.done():
                    return
                with record.edits.reading() as reads:
                    if reads is None:
                        return
                    chunk = self._read(record, start, stop)
                    reads.extend(chunk.reads)
                self._ahead.append(chunk)

    def memory(self, chunk: StagedChunk, kind: SegmentKind, dtype: torch.dtype) -> torch.Tensor:
        """More of the chunk's slot: uninitialised memory for the chunk's elements of segment `kind`."""
        if chunk.slot is None:
            if not self._free:
                self._drop_ahead()
            chunk.slot = self._free.popleft()
            chunk.slot.users.wait()
        part = chunk.record.chunk_slice(kind, chunk.start, chunk.stop)
        view = chunk.slot.lease.view(dtype, part.stop - part.start, start_byte=chunk.used_bytes)
        chunk.used_bytes += staggered(view.nbytes)
        return view

    def write_back(self, chunk: StagedChunk, *, readers: Sequence[Ticket] = ()) -> list[Ticket]:
        """Start to write the staged segments; the slot is free when the writes and `readers` are complete."""
        record = chunk.record
        writes = []
        for kind in chunk.staged:
            first = record.chunk_slice(kind, chunk.start, chunk.stop).start
            segment = record.segments[kind]
            home = segment.next_version() if chunk.makes_next_version and segment.has_versions else segment
            writes.append(self._store.write(home, chunk.buffers[kind], start=first))
        if chunk.slot is not None:
            chunk.slot.users = AllOf([*writes, *readers])
            self._free.append(chunk.slot)
            chunk.slot = None
        return writes

    def _read(
        self, record: Record, start: int, stop: int, *, makes_next_version: bool = False
    ) -> StagedChunk:
        chunk = StagedChunk(record, start, stop, record.edits.num_begun)
        chunk.makes_next_version = makes_next_version
        for kind, segment in record.segments.items():
            if kind is SegmentKind.GRAD:
                continue
            part = record.chunk_slice(kind, start, stop)
            if segment.is_in_host_memory:
                chunk.buffers[kind] = segment.memory[part]
                continue
            chunk.buffers[kind] = self.memory(chunk, kind, segment.dtype)
            chunk.reads.append(self._store.read(segment, chunk.buffers[kind], start=part.start))
            chunk.staged.append(kind)
        return _in_next_version(chunk) if makes_next_version else chunk

    def _drop_ahead(self) -> None:
        for chunk in self._ahead:
            AllOf(chunk.reads).wait()  # its slot will be used again
            if chunk.slot is not None:
                self._free.append(chunk.slot)
        self._ahead.clear()


def _in_next_version(chunk: StagedChunk) -> StagedChunk:
    """Let the update of the segments in host memory that have two places happen in the next one."""
    record = chunk.record
    for kind, present in chunk.buffers.items():
        segment = record.segments[kind]
        if segment.is_in_host_memory and segment.has_versions:
            part = record.chunk_slice(kind, chunk.start, chunk.stop)
            chunk.buffers[kind] = segment.next_version().memory[part].copy_(present)
    return chunk


def needs_slot(record: Record) -> bool:
    """Whether the record's update brings states to host memory first."""
    return not record.updates_on_device and any(
        not segment.is_in_host_memory
        for kind, segment in record.segments.items()
        if kind is not SegmentKind.GRAD
    )


def device_bytes(record: Record, num_elements: int) -> int:
    """The device memory of a chunk that is updated there: its segments, and its gradient."""
    dtypes = [*(dtype for dtype, _ in record.layout.values()), record.grad_dtype]
    return sum(align_up(num_elements * dtype.itemsize) for dtype in dtypes)


def cut_device_memory(
    memory: torch.Tensor, buffers: Mapping[SegmentKind, torch.Tensor]
) -> tuple[dict[SegmentKind, torch.Tensor], torch.Tensor]:
    """Cut memory, uint8 of the device, into arrays like `buffers`, and what is left."""
    arrays, start = {}, 0
    for kind, buffer in buffers.items():
        arrays[kind] = memory[start : start + buffer.nbytes].view(buffer.dtype)
        start += align_up(buffer.nbytes)
    return arrays, memory[start:]
