"""Weights and optimizer states in and out of their homes, one parameter at a time.

[Note: a write is whole]
A weight is two segments, the parameter and the rest of its master, and on the device a third place while its module is
in its forward; a moment of the compact layout is two. Each write is one section: an interrupt comes before or after it,
also when it waits. If a second interrupt, say, ends the write nevertheless, the engine becomes unusable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from offloadzero.arithmetic import device_math
from offloadzero.arithmetic.remainders import REMAINDER_DTYPE
from offloadzero.errors import ConfigError, StateError
from offloadzero.interrupts import UninterruptedThroughout
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.tickets import FINISHED, AllOf, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.segments import SegmentKind
from offloadzero.streaming.block_acts import Block, BlockAct
from offloadzero.streaming.unit_changes import UnitChanges
from offloadzero.streaming.unit_reads import UnitReads
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept import kept_place
from offloadzero.update.record_state import segment_slice
from offloadzero.update.records import Record
from offloadzero.update.spec import StateCodes


class WeightAccess:
    """Reads and edits parameters and states between steps; waits for the unit's own update only."""

    def __init__(
        self, store: TieredStore, changes: UnitChanges, reads: UnitReads, *, clock: StepClock
    ) -> None:
        self._store = store
        self._changes = changes
        self._reads = reads
        self._clock = clock
        self.blocks: list[Block] = []  # in which a script is, the innermost last
        # Of gathered parameters: the history when the script's memory and the home were last the same.
        self._shown: dict[tuple[int, int], tuple[int, int]] = {}

    # --- parameters ---

    def read(self, record: Record, slot: ParamSlot) -> torch.Tensor:
        """Read the parameter in its own dtype: a new host tensor in its shape."""
        return self._read(record, slot, SegmentKind.PARAM).view(slot.shape)

    def read_master(self, record: Record, slot: ParamSlot) -> torch.Tensor:
        """Read the fp32 master weight: a new host tensor in the parameter's shape."""
        return self._master_of(record, slot, self._read(record, slot, SegmentKind.PARAM)).view(slot.shape)

    def _master_of(self, record: Record, slot: ParamSlot, param: torch.Tensor) -> torch.Tensor:
        """Return the fp32 master weight to the parameter's values, both of shape (num_elements,)."""
        if not slot.trainable or SegmentKind.MASTER not in record.segments:
            return param.float()
        return device_math.join_master(param, self._read(record, slot, SegmentKind.MASTER))

    def write(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> None:
        """Set the parameter and its master; fp32 values keep all their bits.

        Raises ConfigError for another number of elements.
        """
        if value.numel() != slot.num_elements:  # torch would broadcast a single one
            raise ConfigError(slot.name, tuple(value.shape), f"shape {tuple(slot.shape)}")
        segment = record.segments.get(SegmentKind.MASTER)
        if segment is None or not slot.trainable:
            param = _rounded(value.detach().to("cpu").reshape(-1), record.dtype)
            parts = {SegmentKind.PARAM: param}
        else:
            param = torch.zeros(slot.num_elements, dtype=record.dtype, device="cpu")
            master = torch.zeros(slot.num_elements, dtype=segment.dtype, device="cpu")
            encode(slot, value.detach().to("cpu"), param, master, base=slot.offset)
            parts = {SegmentKind.PARAM: param, SegmentKind.MASTER: master}
        with UninterruptedThroughout():
            slot.num_writes += 1
            self._write(record, slot, parts)

    # --- operations of scripts on parameters ---

    @property
    def device(self) -> torch.device:
        """The device on which the computation runs."""
        return self._store.accelerator.device

    def num_updates(self, record: Record) -> int:
        """The number of the record's updates begun so far."""
        return self._changes.num_updates(record.index)

    def is_in_forward(self, record: Record) -> bool:
        """Whether a module that needs the record computes."""
        return self._reads.pinned_parameters(record.index) is not None

    def value(self, record: Record, slot: ParamSlot, *, to_write: bool = False) -> torch.Tensor:
        """Return the parameter on the device, in its shape, for an operation that is launched next.

        `to_write`: in memory of its own; otherwise it may be the unit's, and must not be written.
        """
        if slot.trainable:
            self._changes.expect_step_taken(record.index)
        flat = None if self._store.is_closed else self._reads.on_device(record.index)
        if flat is None:
            return self.read(record, slot).to(self.device)
        value = slot.view_in(flat)
        return value.clone() if to_write else value

    def replace(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> None:
        """Write a script's changes to a parameter. Elements whose bits are unchanged keep their fp32 master."""
        new = value.detach().to("cpu").reshape(-1)
        if slot.trainable and SegmentKind.MASTER in record.segments:
            home = self._read(record, slot, SegmentKind.PARAM)
            changed = _bits(new) != _bits(home)
            if not bool(changed.any()):
                return
            new = torch.where(changed, new.float(), self._master_of(record, slot, home))
        with UninterruptedThroughout():
            self.write(record, slot, new)
            flat = self._reads.pinned_parameters(record.index)
            if flat is not None:
                slot.view_in(flat).copy_(value)

    def commit_forward(self, record: Record, places: Iterable[int]) -> None:
        """Write the changes made in place to these slots' parameters in the forward that now ends."""
        flat = self._reads.pinned_parameters(record.index)
        if flat is None:
            raise AssertionError(f"{record.name} is in no forward")
        # One section, with its reads, which may block: after an interrupt the missing commits would be unknown.
        with UninterruptedThroughout():
            for place in places:
                slot = record.slots[place]
                new = slot.view_in(flat).detach().to("cpu", copy=True).reshape(-1)
                self._commit_in_place(record, slot, new)

    def _commit_in_place(self, record: Record, slot: ParamSlot, new: torch.Tensor) -> None:
        """Write the changes made in a forward to a parameter, also where the forward has written the home itself.

        Then the former value is lost, and only the master tells which elements changed: an fp32 one shows it. A
        remainder stays as it is, less than half a step of the new value, except where there is no such number.
        """
        segment = record.segments.get(SegmentKind.MASTER)
        parts = {SegmentKind.PARAM: new}
        if segment is not None and slot.trainable:
            master = parts[SegmentKind.MASTER] = self._read(record, slot, SegmentKind.MASTER)
            if master.dtype == torch.float32:
                changed = _bits(new) != _bits(master.to(record.dtype))
                master[changed] = new[changed].float()
            else:
                master[(new == 0) | ~new.isfinite()] = 0
        slot.num_writes += 1
        self._write(record, slot, parts)

    # --- parameters that a script has gathered: offloadzero/streaming/gathered_block.py ---

    def gather(self, record: Record, slot: ParamSlot, memory: torch.Tensor) -> None:
        """Make a parameter an ordinary one in `memory`, on the device and in its shape, until `scatter`."""
        memory.copy_(self.value(record, slot))
        self._reads.gather(record.index, slot.index, memory)

    def scatter(self, record: Record, slot: ParamSlot) -> torch.Tensor:
        """Undo `gather`; return the value that the parameter holds now."""
        return self._reads.scatter(record.index, slot.index)

    def gathered_value(self, record: Record, slot: ParamSlot) -> torch.Tensor | None:
        """Return the memory of a gathered parameter; None of another one."""
        return self._reads.gathered_in(record.index).get(slot.index)

    def note_shown(self, record: Record, slot: ParamSlot) -> None:
        """Note that a gathered parameter has the value of its home now."""
        self._shown[record.index, slot.index] = self._history(record, slot)

    def is_stale(self, record: Record, slot: ParamSlot) -> bool:
        """Whether the home of a gathered parameter has been written since, by a step say."""
        return self._shown[record.index, slot.index] != self._history(record, slot)

    def _history(self, record: Record, slot: ParamSlot) -> tuple[int, int]:
        return self.num_updates(record) if slot.trainable else 0, slot.num_writes

    def differs(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> bool:
        """Whether the parameter's bits, dtype or shape differ from those of `value`."""
        home = self.read(record, slot)
        if (value.shape, value.dtype) != (home.shape, home.dtype):
            return True
        return not torch.equal(_bits(value.detach().to("cpu").reshape(-1)), _bits(home.reshape(-1)))

    def commit_gathered(self, indices: Collection[int]) -> None:
        """Write what a script has written into gathered parameters, before a forward that needs these records."""
        for block in reversed(self.blocks):
            block.commit(indices)

    # What several ranks do together about them.

    def is_modifier(self, modifier_rank: int) -> bool:  # noqa: ARG002
        """Whether this rank is the one that may write."""
        return True

    def meet(self, act: BlockAct, block: Block) -> None:
        """Raise StateError unless all ranks do the same."""

    def ranks_where(self, flags: Sequence[bool]) -> list[list[int]]:
        """The ranks on which each of `flags` holds. All ranks call this."""
        return [[0] if flag else [] for flag in flags]

    def on_ranks(self, ranks: Sequence[int]) -> str:  # noqa: ARG002
        """Name these ranks in a message, where there are several."""
        return ""

    def value_by(
        self,
        modifier_rank: int,  # noqa: ARG002
        record: Record,  # noqa: ARG002
        slot: ParamSlot,  # noqa: ARG002
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return the value that the parameter has on the rank that may write."""
        return value

    # --- optimizer states ---

    def read_state(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> torch.Tensor:
        """Read a state of the optimizer: a new fp32 host tensor in the parameter's shape."""
        values = self._read(record, slot, kind)
        if record.codes is not None:
            values = record.codes.decode(kind, values, self._read(record, slot, SegmentKind.SCALES))
        return values.view(slot.shape)

    def write_state(self, record: Record, slot: ParamSlot, kind: SegmentKind, value: torch.Tensor) -> None:
        """Set a state of the optimizer; the compact layout rounds it.

        Raises ConfigError for another number of elements, and for a frozen parameter.
        """
        flat = value.detach().to("cpu", torch.float32).reshape(-1).contiguous()
        if flat.numel() != slot.num_elements:
            raise ConfigError(f"{slot.name}.{kind}", tuple(value.shape), f"shape {tuple(slot.shape)}")
        parts = {kind: flat}
        if record.codes is not None:
            scales = self._read(record, slot, SegmentKind.SCALES)
            parts = {kind: record.codes.encode(kind, flat, scales), SegmentKind.SCALES: scales}
        with UninterruptedThroughout():
            _count_writes(slot, [kind])
            self._write(record, slot, parts)

    def write_step(self, record: Record, slot: ParamSlot, step: int) -> None:  # noqa: ARG002
        """Set the number of updates that the parameter's states have seen."""
        slot.step = step

    def reset_states(self, record: Record, slot: ParamSlot, group: Mapping[str, object]) -> None:
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
        with UninterruptedThroughout():
            _count_writes(slot, parts)
            self._write(record, slot, parts)

    def read_codes(self, record: Record, slot: ParamSlot) -> dict[str, torch.Tensor]:
        """Read the states of the compact layout as stored, by name (`StateCodes.specs`); empty in the fp32 layout."""
        if record.codes is None:
            return {}
        return {
            name: self._read(record, slot, kind).view(shape)
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
        with UninterruptedThroughout():
            _count_writes(slot, flat)
            self._write(record, slot, flat)

    # --- segments ---

    def _segment(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> Segment:
        if self._store.is_closed:
            raise StateError(f"{slot.name}: the engine of this model is closed, and its states went with it")
        if kind is not SegmentKind.PARAM and not slot.trainable:
            raise ConfigError(slot.name, kind.value, "a frozen parameter has no optimizer state")
        return record.param_home if kind is SegmentKind.PARAM else record.segments[kind]

    def _read(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> torch.Tensor:
        segment = self._segment(record, slot, kind)
        self._changes.expect_no_late_write(record.index)
        part = segment_slice(kind, slot.offset, slot.offset + slot.num_elements)
        target = torch.empty(part.stop - part.start, dtype=segment.dtype, device="cpu")
        with self._clock.waiting("state access"), self._store.failures.handed_over():
            self._changes.update_ticket(record.index).wait()
            self._read_home(record, slot, segment, target)
        return target

    def _read_home(self, record: Record, slot: ParamSlot, segment: Segment, target: torch.Tensor) -> None:
        """Read all of a slot's elements of a segment."""
        place = kept_place(record, slot, segment.kind)
        self._store.read(segment, target, start=place.start).wait()

    def _write(self, record: Record, slot: ParamSlot, parts: Mapping[SegmentKind, torch.Tensor]) -> None:
        """Write all of `parts`: [Note: a write is whole]."""
        segments = {kind: self._segment(record, slot, kind) for kind in parts}
        with UninterruptedThroughout(), self._clock.waiting("state access"):
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

    def _begin_write(self, record: Record, slot: ParamSlot, segment: Segment, source: torch.Tensor) -> Ticket:
        """Begin to write the part of `source`, all of a slot's elements, that is kept here."""
        place = kept_place(record, slot, segment.kind)
        if not place.num_elements:
            return FINISHED
        part = source[place.skipped : place.skipped + place.num_elements]
        return self._store.write(segment, part, start=place.start)


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


def _count_writes(slot: ParamSlot, kinds: Iterable[SegmentKind]) -> None:
    for kind in kinds:
        slot.num_state_writes[kind.value] = slot.num_state_writes.get(kind.value, 0) + 1


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The patterns of floating-point values as integers: NaN equals itself, -0 differs from 0."""
    return values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def _rounded(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter without a master, rounded as a trained one is, so that checkpoints have the same bits."""
    if (flat.dtype, dtype) != (torch.float32, torch.bfloat16):
        return flat.to(dtype).contiguous()
    param, remainder = torch.empty_like(flat, dtype=dtype), torch.empty_like(flat, dtype=REMAINDER_DTYPE)
    device_math.split_master(flat, param, remainder)
    return param


def encode(
    slot: ParamSlot, value: torch.Tensor, param: torch.Tensor, master: torch.Tensor | None, *, base: int = 0
) -> None:
    """Write `value` into a parameter and its master, both flat and starting at element `base` of the record."""
    flat = value.reshape(-1)
    start, stop = slot.offset - base, slot.offset - base + slot.num_elements
    target = param[start:stop]
    if master is None or not slot.trainable:
        target.copy_(flat)
    else:
        device_math.split_master(flat.float(), target, master[start:stop])
