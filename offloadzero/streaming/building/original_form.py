"""The way of parameters from their module into their homes, and the way back.

[Note: the original form]
A model gives its memory up unit by unit as its states move to their homes, so that nothing is there twice. When the
engine cannot be built after all, or hands the model back, the values come from the homes. They are the same bits with
one exception: a value whose home holds fewer bits (a frozen fp32 weight under bf16 has no master; the compact layout
rounds the master to 24 bits) comes back as rounded as it would have been trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from offloadzero.access.parameter import restore_parameter
from offloadzero.access.weight_access import WeightAccess, encode
from offloadzero.arithmetic import device_math
from offloadzero.core.segments import SegmentKind
from offloadzero.memory.pages import FreedMemory
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.memory.tiers import InParts, Part
from offloadzero.ranks.group import Group
from offloadzero.streaming.building.waiting_parameters import bring_home, file_bytes, is_in_parts, take
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept_elements import kept_params, kept_place
from offloadzero.update.records import Record, segment_slice


class OriginalForm:
    """The dtype and device that the parameters had, and the records that have taken their values."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._forms = {
            id(slot.param): (slot.param.dtype, slot.param.device)
            for record in records
            for slot in record.slots
        }
        self._taken: list[tuple[Record, TieredStore]] = []
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # the former ones of a start

    def load(self, store: TieredStore, group: Group) -> None:
        """Move all values to their homes, one record at a time: the last first, [Note: the gap] in memory/nvme.py.

        Several ranks take the values of the first one. Those that they have in parts, that rank's already, are
        gathered one parameter at a time.
        """
        freed = FreedMemory()
        waiting = file_bytes(slot.param for record in self._records for slot in record.slots)
        for record in reversed(self._records):
            waiting -= file_bytes(slot.param for slot in record.slots)
            for slot in record.slots:
                bring_home(slot.param)  # one that waits outside the module
            in_parts = [is_in_parts(slot.param) for slot in record.slots]
            values = [
                None if divided else slot.param.data
                for slot, divided in zip(record.slots, in_parts, strict=True)
            ]
            try:
                store.reserve(record.segments.values(), waiting=waiting)
                write_weights(record, store, group, agrees=not all(in_parts))
            except BaseException:
                for slot, value in zip(record.slots, values, strict=True):
                    if value is not None:
                        slot.param.data = value
                raise
            self._taken.append((record, store))
            freed.add(record.param_bytes)
        freed.trim()

    def cast_gradients(self, device: torch.device) -> None:
        """Give gradients that are there the dtype and device that the model has now.

        `model.to(device, dtype)` does so, too: autograd adds the next gradient to them, and refuses another dtype.
        `restore()` brings the former ones back, until `forget_gradients()`.
        """
        for record in self._records:
            for slot in record.slots:
                grad = slot.param.grad
                if grad is not None and (grad.dtype, grad.device) != (record.dtype, device):
                    self._gradients.append((slot.param, grad))
                    slot.param.grad = grad.to(device, record.dtype)

    def forget_gradients(self) -> None:
        """Let the former gradients go."""
        self._gradients = []

    def restore(self, weights: WeightAccess | None = None) -> None:
        """Put the values of the homes back into the parameters; the homes must not be written meanwhile.

        Args:
            weights: reads a record of which each rank has a part. All ranks call this then. None: such a record's
                parameters become NaN, as after a start that has failed, where the others may do something else.
        """
        while self._taken:
            record, store = self._taken[-1]
            if record.shard.world_size == 1:
                self._put_back(record, self._own_values(record, store))
            elif weights is None:
                _give_up(record)
            else:
                self._put_back(record, [self._gathered(weights, record, slot) for slot in record.slots])
            self._taken.pop()
        for param, grad in self._gradients:
            param.grad = grad
        self.forget_gradients()

    def _own_values(self, record: Record, store: TieredStore) -> Iterator[torch.Tensor]:
        param = _read(record, SegmentKind.PARAM, store)
        has_master = SegmentKind.MASTER in record.segments
        master = _read(record, SegmentKind.MASTER, store) if has_master else None
        return (_value(slot, param, master, self._forms[id(slot.param)][0]) for slot in record.slots)

    def _gathered(self, weights: WeightAccess, record: Record, slot: ParamSlot) -> torch.Tensor:
        is_exact = slot.trainable and self._forms[id(slot.param)][0] == torch.float32
        return weights.read_master(record, slot) if is_exact else weights.read(record, slot)

    def _put_back(self, record: Record, values: Iterable[torch.Tensor]) -> None:
        for slot, value in zip(record.slots, values, strict=True):
            dtype, device = self._forms[id(slot.param)]
            restore_parameter(slot.param)
            # A tensor of its own: a view of the record's memory would keep all of it.
            slot.param.data = value.to(device, dtype, copy=True)


def _give_up(record: Record) -> None:
    """Make the record's parameters NaN, as this rank alone does not have all of their values."""
    for slot in record.slots:
        restore_parameter(slot.param)
        slot.param.data = torch.full((), float("nan"), device="cpu").to(record.dtype).expand(slot.shape)


def _read(record: Record, kind: SegmentKind, store: TieredStore) -> torch.Tensor:
    segment = record.segments[kind]
    values = torch.empty(segment.num_elements, dtype=segment.dtype, device="cpu")
    store.read(segment, values).wait()
    return values


def _value(
    slot: ParamSlot, param: torch.Tensor, master: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    value = param[slot.offset : slot.offset + slot.num_elements]
    if master is not None and slot.trainable and dtype == torch.float32:
        part = segment_slice(SegmentKind.MASTER, slot.offset, slot.offset + slot.num_elements)
        value = device_math.join_master(value, master[part])
    return value.view(slot.shape)


def write_weights(record: Record, store: TieredStore, group: Group, *, agrees: bool = True) -> None:
    """Write the module's present values to the record's homes and free them in the module.

    fp32 values keep all their bits: those that the parameter's dtype cannot hold go to the master. Over several ranks
    those that these have in parts are gathered, and, unless not `agrees`, all become those of the first rank. What lies
    in a file already is not even read, unless there is another rank whose file may have other values.
    """
    channel = None if group.is_alone else group.control
    layout = record.layout
    home = record.param_home
    is_in_place = group.is_alone and isinstance(home.place, InParts)
    written = [Part(0, home)]
    param = torch.empty(record.num_elements, dtype=record.dtype, device="cpu")
    if is_in_place:
        written = [part for part in home.parts if part.home.extent is not None]
        for part in written:
            param[part.start : part.stop].zero_()
    else:
        param.zero_()
    master = None
    if SegmentKind.MASTER in layout:
        master = torch.zeros(record.num_trainable, dtype=layout[SegmentKind.MASTER][0], device="cpu")
    for slot in record.slots:
        if slot.source is None or not is_in_place:
            encode(slot, take(slot.param, channel), param, master)
        slot.param.data = torch.zeros((), dtype=record.dtype, device="cpu").expand(slot.shape)
    for values in (param, master) if agrees else ():
        if values is not None:
            group.agree(values)
    kept_param = kept_params(record, param)
    writes: list[Ticket] = []
    for part in written:
        store.move_written(part.home, kept_param[part.start : part.stop])
        writes.append(store.write(part.home, kept_param[part.start : part.stop]))
    if master is not None and bool(torch.count_nonzero(master)):
        start, stop = record.shard.kept_range(record.num_trainable)
        writes.append(store.write(record.segments[SegmentKind.MASTER], master[start:stop]))
    AllOf(writes).wait()


def write_states(record: Record, groups: Sequence[Mapping[str, object]], store: TieredStore) -> None:
    """Write the states of a first step into their homes, which hold zeros."""
    for slot in record.trainable_slots:
        for kind in record.spec.states:
            value = record.spec.initial_value(kind, groups[slot.group_index or 0])
            place = kept_place(record, slot, kind)
            if value and place.num_elements:
                store.write(
                    record.segments[kind],
                    torch.full((place.num_elements,), value, dtype=torch.float32, device="cpu"),
                    start=place.start,
                ).wait()
