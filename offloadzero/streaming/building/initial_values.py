"""The first values in the homes of a model: its weights as the module has them, and the states of a first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offloadzero.access.weights import encode
from offloadzero.core.segments import SegmentKind
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.ranks.group import Group
from offloadzero.streaming.building.spill import take
from offloadzero.update.local_elements import kept_params, kept_place
from offloadzero.update.records import Record


def write_weights(record: Record, store: TieredStore, group: Group, *, agrees: bool = True) -> None:
    """Write the module's present values to the record's homes and free them in the module.

    fp32 values keep all their bits: those that the parameter's dtype cannot hold go to the master. Over several ranks
    those that these have in parts are gathered, and, unless not `agrees`, all become those of the first rank.
    """
    channel = None if group.is_alone else group.control
    layout = record.layout()
    param = torch.zeros(record.num_elements, dtype=record.dtype, device="cpu")
    master = None
    if SegmentKind.MASTER in layout:
        master = torch.zeros(record.num_trainable, dtype=layout[SegmentKind.MASTER][0], device="cpu")
    for slot in record.slots:
        encode(slot, take(slot.param, channel), param, master)
        slot.param.data = torch.zeros((), dtype=record.dtype, device="cpu").expand(slot.shape)
    for values in (param, master) if agrees else ():
        if values is not None:
            group.agree(values)
    kept_param = kept_params(record, param)
    writes: list[Ticket] = [store.write(record.param_home, kept_param)]
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
