"""Records: a flat layout, the shard of it that this rank keeps, and its state under one optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import torch

from offloadzero.core.segments import SegmentKind
from offloadzero.memory.store import Segment
from offloadzero.ranks.shard import WHOLE, ShardSpec
from offloadzero.update.edits import Edits
from offloadzero.update.flat_layout import FlatLayout, ParamSlot, make_flat_layout
from offloadzero.update.record_state import RecordState
from offloadzero.update.spec import AnySpec, StateCodes


@dataclass(frozen=True)
class UpdateRange:
    """Elements [start, stop) that share hyperparameters, step count and the factor of their gradient."""

    start: int
    stop: int
    group_index: int
    step: int
    factor: float = 1.0


@dataclass(eq=False)
class Record:
    """Parameters of one dtype that are fetched and released together.

    `flat` has the place of each, `shard` the part that this rank keeps, `state` the segments of that part. `resident`
    records keep their parameters on the device.
    """

    index: int
    name: str
    flat: FlatLayout
    shard: ShardSpec
    state: RecordState
    resident: bool = False
    edits: Edits = field(default_factory=Edits)
    is_reduced: bool = False  # its gradient is the mean over several ranks
    whole_param: Segment | None = None  # all parameters; the update's segment is a part of it

    @property
    def unit_name(self) -> str:
        """The unit's name: a unit has one record for each dtype, `blocks.0`, `blocks.0#bfloat16`."""
        return self.name.split("#")[0]

    # --- of the flat layout, in full sizes; constant values are looked up once ---

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.flat.dtype

    @cached_property
    def slots(self) -> tuple[ParamSlot, ...]:
        """The parameters, trainable ones first."""
        return self.flat.slots

    @cached_property
    def num_elements(self) -> int:
        """The number of elements of the parameters with padding."""
        return self.flat.num_elements

    @cached_property
    def num_trainable(self) -> int:
        """The number of elements that the optimizer updates, with padding: they are the first ones."""
        return self.flat.num_trainable

    @property
    def is_trained_whole(self) -> bool:
        """Whether the optimizer updates all of its parameters."""
        return self.num_trainable == self.num_elements

    @cached_property
    def param_bytes(self) -> int:
        """The bytes of the parameters with padding."""
        return self.flat.num_elements * self.flat.dtype.itemsize

    @property
    def num_params(self) -> int:
        """The number of elements of the parameters without padding."""
        return sum(slot.num_elements for slot in self.slots)

    @cached_property
    def trainable_slots(self) -> tuple[ParamSlot, ...]:
        """The slots that the optimizer updates."""
        return self.flat.trainable_slots

    @cached_property
    def trainable_parts(self) -> tuple[tuple[int, int], ...]:
        """The elements [start, stop) of each trainable slot, without padding."""
        return self.flat.trainable_parts

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) between trainable parameters, which belong to none."""
        return self.flat.padding

    # --- of the state, in the sizes that this rank keeps ---

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters on the device come from the shards of all ranks."""
        return self.shard.world_size > 1 and not self.state.keeps_whole_params

    @property
    def param_home(self) -> Segment:
        """The home of the parameters that this rank keeps."""
        return self.whole_param or self.segments[SegmentKind.PARAM]

    @cached_property
    def kept_trainable(self) -> int:
        """The number of elements that the optimizer updates here, with padding."""
        return self.state.kept_trainable

    @cached_property
    def kept_param_bytes(self) -> int:
        """The bytes of the parameters here, with padding."""
        return self.state.kept_elements * self.flat.dtype.itemsize

    @cached_property
    def kept_parts(self) -> tuple[tuple[int, int], ...]:
        """`trainable_parts`, cut to this shard and counted in it. Empty parts keep their place in the order."""
        clip, total = self.shard.clipped, self.flat.num_trainable
        return tuple(clip(start, stop, total) for start, stop in self.flat.trainable_parts)

    @cached_property
    def spec(self) -> AnySpec:
        """The optimizer."""
        return self.state.spec

    @property
    def compact(self) -> bool:
        """Whether the states are codes with scales."""
        return self.state.compact

    @property
    def can_be_compact(self) -> bool:
        """Whether the states are in the fp32 layout, and could be in the compact one."""
        codes = self.state.spec.codes
        return codes is not None and not self.state.compact and self.dtype == codes.param_dtype

    @property
    def codes(self) -> StateCodes | None:
        """The codes of the states; None in the fp32 layout."""
        return self.state.codes

    @cached_property
    def segments(self) -> dict[SegmentKind, Segment]:
        """The segments that have a home, by name."""
        return self.state.segments

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients are added up."""
        return self.state.grad_dtype

    @grad_dtype.setter
    def grad_dtype(self, dtype: torch.dtype) -> None:
        self.state.grad_dtype = dtype

    @property
    def updates_on_device(self) -> bool:
        """Whether all segments of the update live on the device."""
        return self.state.updates_on_device

    def layout(self) -> Mapping[SegmentKind, tuple[torch.dtype, int]]:
        """The dtype and number of elements of each segment except the gradient."""
        return self.state.layout

    def chunk_slice(self, kind: SegmentKind, start: int, stop: int) -> slice:
        """The segments' elements of a chunk [start, stop). The last includes the padding: file blocks move whole."""
        return self.state.chunk_slice(kind, start, stop)


def make_record(
    index: int,
    name: str,
    dtype: torch.dtype,
    params: Sequence[tuple[str, torch.nn.Parameter, int | None]],
    *,
    spec: AnySpec,
    shard: ShardSpec = WHOLE,
    resident: bool = False,
    compact: bool = False,
    keeps_whole_params: bool = False,
    is_reduced: bool = False,
) -> Record:
    """Lay out parameters (name, parameter, group index or None), and the shard's part of them under an optimizer.

    `compact` is the layout of the states; a dtype without it keeps the fp32 layout.
    """
    compact = compact and spec.is_compact(dtype)
    # The small rest is whole on each of perhaps a thousand ranks: a file block for each would be most of it.
    in_file_blocks = shard.world_size == 1 or not resident
    flat = make_flat_layout(
        dtype, params, compact=compact, num_shards=shard.world_size, in_file_blocks=in_file_blocks
    )
    state = RecordState(flat, shard, spec, compact, keeps_whole_params)
    return Record(index, name, flat, shard, state, resident, is_reduced=is_reduced)


def update_ranges(
    record: Record, slots: Iterable[ParamSlot], *, factors: Mapping[int, float] = MappingProxyType({})
) -> list[UpdateRange]:
    """Merge neighbouring `slots` with equal group, step and factor into ranges of the shard, in the record's order.

    `factors` of gradients are by slot, 1 where there is none. Padding behind a parameter belongs to its
    range: its gradient is zero, so it stays zero.
    """
    ranges: list[UpdateRange] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if slot.group_index is None:
            raise AssertionError(f"{slot.name} is frozen")
        stop = slot.offset + record.flat.padded(slot.num_elements)
        factor = factors.get(slot.index, 1.0)
        shared = (slot.group_index, slot.step, factor)
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and last.stop == slot.offset
            and (last.group_index, last.step, last.factor) == shared
        ):
            ranges[-1] = UpdateRange(last.start, stop, *shared)
        else:
            ranges.append(UpdateRange(slot.offset, stop, *shared))
    return _kept(record, ranges)


def all_ranges(record: Record) -> list[UpdateRange]:
    """Return `update_ranges` of all trainable slots; in most steps all of a group have the same count."""
    ranges: list[UpdateRange] = []
    for slots in record.flat.trainable_groups:
        first, last = slots[0], slots[-1]
        if first.group_index is None or any(slot.step != first.step for slot in slots):
            return update_ranges(record, record.trainable_slots)
        stop = last.offset + record.flat.padded(last.num_elements)
        ranges.append(UpdateRange(first.offset, stop, first.group_index, first.step))
    return _kept(record, ranges)


def _kept(record: Record, ranges: list[UpdateRange]) -> list[UpdateRange]:
    """Cut ranges of the record to its shard, and count them in that."""
    if record.shard.world_size == 1:
        return ranges
    clipped = ((part, record.shard.clipped(part.start, part.stop, record.num_trainable)) for part in ranges)
    return [replace(part, start=start, stop=stop) for part, (start, stop) in clipped if start < stop]
