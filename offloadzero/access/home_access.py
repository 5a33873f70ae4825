"""Reads and writes of one parameter's part of its record's segments, and of its optimizer's states, where they live.

[Note: a write is whole]
A weight is two segments, the parameter and the rest of its master, and on the device a third place while its module is
in its forward; a moment of the compact layout is two. Each write is one section: an interrupt comes before or after it,
also when it waits. If a second interrupt, say, ends the write nevertheless, the engine becomes unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Protocol

import torch

from offloadzero.access.agreement import Announcements
from offloadzero.core.interrupts import uninterrupted_throughout
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.tickets import FINISHED, AllOf, Ticket
from offloadzero.memory.tiers import SAVE_PRIORITY, UPDATE_PRIORITY
from offloadzero.ranks.group import Group, gather_parts
from offloadzero.update.commits import Committed
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept_elements import kept_parts, kept_place
from offloadzero.update.records import Record, segment_slice
from offloadzero.update.spec import StateCodes

_COPIED_BYTES = 16 << 20  # at a time, on the grid of direct I/O


class Changes(Protocol):
    """What the units on the device know of changes of their homes; `index` is a record's."""

    def update_ticket(self, index: int) -> Ticket:
        """The ticket of the unit's last update."""

    def num_updates(self, index: int) -> int:
        """The number of the unit's updates begun so far."""

    def begin_edit(self, index: int) -> None:
        """Announce that the caller is about to write any of the unit's weights."""

    def expect_no_late_write(self, index: int) -> None:
        """Raise if a write through a kept view has not reached the unit's home."""

    def expect_step_taken(self, index: int) -> None:
        """Raise if backward has updated the unit and step() has not been called."""


class HomeAccess:
    """Reads and writes homes between steps; waits for the unit's own update only."""

    _priority = UPDATE_PRIORITY

    def __init__(
        self,
        store: TieredStore,
        changes: Changes,
        *,
        group: Group,
        announcements: Announcements,
    ) -> None:
        """Make the access. The ranks tell each other by `announcements` what they read."""
        self._store = store
        self._changes = changes
        self._group = group
        self._announcements = announcements

    def pinned(self, announcements: Announcements) -> PinnedHomes:
        """Return an access to records that are pinned; ranks tell by `announcements` what they read."""
        return PinnedHomes(self._store, self._changes, group=self._group, announcements=announcements)

    def read(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> torch.Tensor:
        """Read a parameter's part of a segment: a new flat host tensor of the segment's dtype.

        Raises ConfigError for a state of a frozen parameter, StateError when the engine is closed.
        """
        segment = self._segment(record, slot, kind)
        self._changes.expect_no_late_write(record.index)
        part = segment_slice(kind, slot.offset, slot.offset + slot.num_elements)
        target = torch.empty(part.stop - part.start, dtype=segment.dtype, device="cpu")
        with self._store.clock.waiting("state access"), self._store.failures.handed_over():
            self._changes.update_ticket(record.index).wait()
            self.read_home(record, slot, segment, target)
        return target

    @uninterrupted_throughout
    def write(
        self,
        record: Record,
        slot: ParamSlot,
        parts: Mapping[SegmentKind, torch.Tensor],
        *,
        has_changes: bool = True,
    ) -> None:
        """Write all of `parts`, flat host tensors of their segments' dtypes: [Note: a write is whole].

        It is counted in `slot.num_writes`, unless `has_changes` is False: these bits are there already. Of several
        ranks each writes its part; one that writes other values is found at the next fetch or step. Raises
        what `read` raises.
        """
        segments = {kind: self._segment(record, slot, kind) for kind in parts}
        with self._store.clock.waiting("state access"):
            with self._store.failures.handed_over():
                self._changes.update_ticket(record.index).wait()
                self._store.accelerator.computed().wait()  # may read any weights
                record.commits.complete.wait()  # or it would have a part of what is written here
            ahead = record.edits.begin()
            try:
                with self._store.failures.handed_over():
                    ahead.wait()
                with self._store.failures.whole(f"the write of {slot.name}"):
                    self._leave_committed(record)
                    for kind, values in parts.items():
                        start, kept = _kept(record, slot, kind, values)
                        self._store.move_written(segments[kind], kept, start=start)
                    # A move that is refused has changed nothing.
                    for kind, values in parts.items():
                        self._group.note_write(record.index, slot.index, kind.value, values=values)
                    if has_changes:
                        slot.num_writes.update(parts.keys())
                    if SegmentKind.PARAM in parts:
                        self._changes.begin_edit(record.index)
                    with self._store.failures.handed_over():
                        AllOf(
                            [self._begin_write(record, slot, segments[kind], parts[kind]) for kind in parts]
                        ).wait()
            finally:
                record.edits.end()

    def _leave_committed(self, record: Record) -> None:
        """Have another place written than that of the last commit: [Note: durable runs] in update/commits.py."""
        if record.committed is not Committed.PRESENT:
            return
        for kind in record.layout:
            segment = record.segments[kind]
            if segment.has_versions:
                self._copy_to_next(segment)
        record.flip()

    def _copy_to_next(self, segment: Segment) -> None:
        size = _COPIED_BYTES // segment.dtype.itemsize
        for start in range(0, segment.num_elements, size):
            num_elements = min(size, segment.num_elements - start)
            values = torch.empty(num_elements, dtype=segment.dtype, device="cpu")
            self._store.read(segment, values, start=start).wait()
            self._store.write(segment.next_version(), values, start=start).wait()

    def read_step(self, record: Record, slot: ParamSlot) -> int:
        """The number of updates that the parameter's states have seen, as soon as the last one has counted."""
        with self._store.clock.waiting("state access"), self._store.failures.handed_over():
            self._changes.update_ticket(record.index).wait()
        return slot.step

    def write_step(self, record: Record, slot: ParamSlot, step: int) -> None:
        """Set the number of updates that the parameter's states have seen, on all ranks as in `write`."""
        self._group.note_write(record.index, slot.index, "step", step)
        record.commits.counted.wait()  # or the commit of the last step would have this count
        slot.step = step

    def _segment(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> Segment:
        if self._store.is_closed:
            raise StateError(
                f"{slot.name}: the engine of this model is closed, and the states are gone with it"
            )
        if kind is not SegmentKind.PARAM and not slot.trainable:
            raise ConfigError(slot.name, kind.value, "a frozen parameter has no optimizer state")
        return record.param_home if kind is SegmentKind.PARAM else record.segments[kind]

    def read_home(self, record: Record, slot: ParamSlot, segment: Segment, target: torch.Tensor) -> None:
        """Read all of a slot's elements of a segment. The caller waits for a state, or a gradient."""
        if _is_whole(record, segment):
            place = kept_place(record, slot, segment.kind)
            self._store.read(segment, target, start=place.start, priority=self._priority).wait()
        else:
            self.gather(record, slot, segment, target)

    def read_by_first(self, work: Callable[[], object]) -> None:
        """Do `work`, which reads, on the first rank: [Note: the first rank reads, the others follow]."""
        self._announcements.read_by_first(work, self.read)

    @property
    def leads(self) -> bool:
        """Whether this rank reads now, and the others follow."""
        return self._announcements.leads

    def reads_alone(self, record: Record, segment: Segment) -> bool:
        """Whether a read of a segment needs no call of the other ranks, or they follow this one."""
        return self.leads or _is_whole(record, segment)

    def gather(self, record: Record, slot: ParamSlot, segment: Segment, target: torch.Tensor) -> None:
        """Fill `target` from the parts of all ranks, which read the same ones: [Note: ranks say what they read]."""
        kind = segment.kind
        is_gradient = kind is SegmentKind.GRAD
        name = f"{slot.name}.grad" if is_gradient else slot.name
        # The others wait for this rank until the block ends.
        with self._store.failures.whole(f"the read of {name} over the ranks"):
            self._announcements.announce_read(record, slot, kind)
            parts = kept_parts(record, slot, kind, target)
            if record.shard.rank in parts:
                start = kept_place(record, slot, kind).start
                own = parts[record.shard.rank]
                self._store.read(segment, own, start=start, priority=self._priority).wait()
            label = name if is_gradient else f"{name}.{kind.value}"
            gather_parts(self._announcements.channel, target, parts, label)

    def _begin_write(self, record: Record, slot: ParamSlot, segment: Segment, source: torch.Tensor) -> Ticket:
        """Begin to write the part of `source`, all of a slot's elements, that is kept here."""
        start, kept = _kept(record, slot, segment.kind, source)
        return self._store.write(segment, kept, start=start) if kept.numel() else FINISHED


class PinnedHomes(HomeAccess):
    """Reads places that no update writes, on any thread and behind nothing: [Note: saving in the background]."""

    _priority = SAVE_PRIORITY

    def read(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> torch.Tensor:
        """Read a parameter's part of a segment, of several ranks on all of them: a new flat host tensor."""
        segment = self._segment(record, slot, kind)
        part = segment_slice(kind, slot.offset, slot.offset + slot.num_elements)
        target = torch.empty(part.stop - part.start, dtype=segment.dtype, device="cpu")
        # Other ranks wait for what this one reads: an error ends the engine, and is told to them.
        is_alone = _is_whole(record, segment)
        with nullcontext() if is_alone else self._store.failures.handed_over():
            self.read_home(record, slot, segment, target)
        return target


def _kept(
    record: Record, slot: ParamSlot, kind: SegmentKind, values: torch.Tensor
) -> tuple[int, torch.Tensor]:
    """Where the part of a slot's `values` that is kept here begins in the home, and the part."""
    place = kept_place(record, slot, kind)
    return place.start, values[place.skipped : place.skipped + place.num_elements]


def _is_whole(record: Record, segment: Segment) -> bool:
    """Whether this rank keeps all of a segment."""
    return record.shard.world_size == 1 or segment is record.whole_param


class StateAccess:
    """Reads and writes states in either layout, between steps."""

    def __init__(self, homes: HomeAccess) -> None:
        self._homes = homes

    def read(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> torch.Tensor:
        """Read a state of the optimizer: a new fp32 host tensor in the parameter's shape."""
        values = self._homes.read(record, slot, kind)
        if record.codes is not None:
            values = record.codes.decode(kind, values, self._homes.read(record, slot, SegmentKind.SCALES))
        return values.view(slot.shape)

    def write(self, record: Record, slot: ParamSlot, kind: SegmentKind, value: torch.Tensor) -> None:
        """Set a state of the optimizer; the compact layout rounds it.

        Raises ConfigError for another number of elements, and for a frozen parameter.
        """
        flat = value.detach().to("cpu", torch.float32).reshape(-1).contiguous()
        if flat.numel() != slot.num_elements:
            raise ConfigError(f"{slot.name}.{kind}", tuple(value.shape), f"shape {tuple(slot.shape)}")
        parts = {kind: flat}
        if record.codes is not None:
            scales = self._homes.read(record, slot, SegmentKind.SCALES)
            parts = {kind: record.codes.encode(kind, flat, scales), SegmentKind.SCALES: scales}
        self._homes.write(record, slot, parts)

    def reset(self, record: Record, slot: ParamSlot, group: Mapping[str, object]) -> None:
        """Reset all states, with codes and scales, to those before the first step under the options of `group`."""
        parts = {}
        for kind in (*record.spec.states, *([SegmentKind.SCALES] if record.compact else [])):
            part = segment_slice(kind, slot.offset, slot.offset + slot.num_elements)
            parts[kind] = torch.full(
                (part.stop - part.start,),
                record.spec.initial_value(kind, group),
                dtype=record.segments[kind].dtype,
                device="cpu",
            )
        self._homes.write(record, slot, parts)

    def read_codes(self, record: Record, slot: ParamSlot) -> dict[str, torch.Tensor]:
        """Read the states of the compact layout as stored, by name (`StateCodes.specs`); empty in the fp32 layout."""
        if record.codes is None:
            return {}
        return {
            name: self._homes.read(record, slot, kind).view(shape)
            for name, kind, _, shape in record.codes.specs(slot.shape)
        }

    def write_codes(
        self, record: Record, slot: ParamSlot, codes: StateCodes, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Set all states to a result of `read_codes`, of this run or of one in either layout.

        Raises ConfigError for codes of another dtype or shape.
        """
        expect_codes(slot, codes, values)
        flat = {kind: values[name].reshape(-1) for name, kind, _, _ in codes.specs(slot.shape)}
        if record.codes is None:
            scales = flat.pop(SegmentKind.SCALES)
            flat = {kind: codes.decode(kind, coded, scales) for kind, coded in flat.items()}
        self._homes.write(record, slot, flat)


def expect_codes(slot: ParamSlot, codes: StateCodes, values: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError unless the codes have the dtypes and shapes of `codes.specs`."""
    for name, _, dtype, shape in codes.specs(slot.shape):
        if values[name].shape != shape or values[name].dtype != dtype:
            given = f"{values[name].dtype} {tuple(values[name].shape)}"
            raise ConfigError(f"{slot.name}.{name}", given, f"{dtype} {tuple(shape)}")


def are_codes_of(slot: ParamSlot, codes: StateCodes, values: Mapping[str, torch.Tensor]) -> bool:
    """Whether the codes among `values`, as `read_codes` returns them, belong to the states among them."""
    expect_codes(slot, codes, values)
    scales = values[SegmentKind.SCALES].reshape(-1)
    return all(
        torch.equal(codes.decode(kind, values[name].reshape(-1), scales), values[kind].reshape(-1).float())
        for kind, name in codes.names.items()
    )
