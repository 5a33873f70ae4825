"""Reads and writes of one parameter's part of its record's segments, where they live.

[Note: a write is whole]
A weight is two segments, the parameter and the rest of its master, and on the device a third place while its module is
in its forward; a moment of the compact layout is two. Each write is one section: an interrupt comes before or after it,
also when it waits. If a second interrupt, say, ends the write nevertheless, the engine becomes unusable.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offloadzero.core.interrupts import uninterrupted_throughout
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.tickets import FINISHED, AllOf, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.ranks.group import Group
from offloadzero.ranks.parts import gather_parts
from offloadzero.streaming.access.agreed_reads import Announcements
from offloadzero.streaming.unit_changes import UnitChanges
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.local_elements import kept_parts, kept_place
from offloadzero.update.record_state import segment_slice
from offloadzero.update.records import Record


class HomeAccess:
    """Reads and writes homes between steps; waits for the unit's own update only."""

    def __init__(
        self,
        store: TieredStore,
        changes: UnitChanges,
        *,
        clock: StepClock,
        group: Group,
        announcements: Announcements,
    ) -> None:
        """Make the access. The ranks tell each other by `announcements` what they read."""
        self._store = store
        self._changes = changes
        self._clock = clock
        self._group = group
        self._announcements = announcements

    def read(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> torch.Tensor:
        """Read a parameter's part of a segment: a new flat host tensor of the segment's dtype.

        Raises ConfigError for a state of a frozen parameter, StateError when the engine is closed.
        """
        segment = self._segment(record, slot, kind)
        self._changes.expect_no_late_write(record.index)
        part = segment_slice(kind, slot.offset, slot.offset + slot.num_elements)
        target = torch.empty(part.stop - part.start, dtype=segment.dtype, device="cpu")
        with self._clock.waiting("state access"), self._store.failures.handed_over():
            self._changes.update_ticket(record.index).wait()
            self._read_home(record, slot, segment, target)
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
        for kind, values in parts.items():
            self._group.note_write(record.index, slot.index, kind.value, values=values)
        segments = {kind: self._segment(record, slot, kind) for kind in parts}
        if has_changes:
            slot.num_writes.update(parts.keys())
        with self._clock.waiting("state access"):
            with self._store.failures.handed_over():
                self._changes.update_ticket(record.index).wait()
                self._changes.launched_reads().wait()
            ahead = record.edits.begin()
            try:
                with self._store.failures.handed_over():
                    ahead.wait()
                with self._store.failures.whole(f"the write of {slot.name}"):
                    if SegmentKind.PARAM in parts:
                        self._changes.begin_edit(record.index)
                    with self._store.failures.handed_over():
                        AllOf(
                            [self._begin_write(record, slot, segments[kind], parts[kind]) for kind in parts]
                        ).wait()
            finally:
                record.edits.end()

    def write_step(self, record: Record, slot: ParamSlot, step: int) -> None:
        """Set the number of updates that the parameter's states have seen, on all ranks as in `write`."""
        self._group.note_write(record.index, slot.index, "step", step)
        slot.step = step

    def _segment(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> Segment:
        if self._store.is_closed:
            raise StateError(f"{slot.name}: the engine of this model is closed, and its states went with it")
        if kind is not SegmentKind.PARAM and not slot.trainable:
            raise ConfigError(slot.name, kind.value, "a frozen parameter has no optimizer state")
        return record.param_home if kind is SegmentKind.PARAM else record.segments[kind]

    def _read_home(self, record: Record, slot: ParamSlot, segment: Segment, target: torch.Tensor) -> None:
        """Read all of a slot's elements of a segment."""
        if record.shard.world_size == 1 or segment is record.whole_param:
            place = kept_place(record, slot, segment.kind)
            self._store.read(segment, target, start=place.start).wait()
        else:
            self.gather(record, slot, segment, target, slot.name)

    def gather(
        self, record: Record, slot: ParamSlot, segment: Segment, target: torch.Tensor, name: str
    ) -> None:
        """Fill `target` from the parts of all ranks, which read the same ones: [Note: ranks say what they read].

        The caller waits for a state, or a gradient.
        """
        kind = segment.kind
        # The others wait for this rank until the block ends.
        with self._store.failures.whole(f"the read of {name} over the ranks"):
            self._announcements.announce_read(record, slot, kind)
            parts = kept_parts(record, slot, kind, target)
            if record.shard.rank in parts:
                start = kept_place(record, slot, kind).start
                self._store.read(segment, parts[record.shard.rank], start=start).wait()
            label = name if kind is SegmentKind.GRAD else f"{name}.{kind.value}"
            gather_parts(self._group.states, target, parts, label)

    def _begin_write(self, record: Record, slot: ParamSlot, segment: Segment, source: torch.Tensor) -> Ticket:
        """Begin to write the part of `source`, all of a slot's elements, that is kept here."""
        place = kept_place(record, slot, segment.kind)
        if not place.num_elements:
            return FINISHED
        part = source[place.skipped : place.skipped + place.num_elements]
        return self._store.write(segment, part, start=place.start)
