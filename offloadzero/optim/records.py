"""Records: all persistent state of one unit, its layout and its segments (floor 4).

[Note: compact records]
A bf16 record of n trainable elements in the compact layout has, beside the parameters, an 8-bit remainder, int8 and
uint8 moments of n elements each, and two fp32 scales per block of COMPACT_BLOCK elements: 5 + 1/16 bytes per
element. What the bytes mean: [Note: compact state] in csrc/cpu_adam/cpu_adam.h. Parameters may have different
hyperparameters and step counts and are then updated apart, which a block cannot be. So every parameter begins at a
block's border, and no block belongs to two: that costs up to 127 elements (643 bytes) per parameter and makes the
bits of a parameter's state independent of what else is in its record. A record is a whole number of file blocks in
its one-byte segments (up to 4095 elements of padding) and its scales are padded to one; the chunks of its update are
multiples of 65,536 elements, 4096 bytes of scales, so every chunk of every segment is on the grid of direct I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch

from offloadzero.config import SegmentKind, TierName
from offloadzero.memory.arena import ALIGN_BYTES, align_up
from offloadzero.memory.store import Segment
from offloadzero.native.compact import COMPACT_BLOCK, num_scales
from offloadzero.optim.edits import Edits
from offloadzero.optim.spec import AnySpec, StateCodes

PARAM_ALIGN_BYTES = 64  # what torch's CPU allocator gives: kernels see the alignment they see without us


@dataclass(eq=False)
class ParamSlot:
    """One parameter's place in its record."""

    param: torch.nn.Parameter
    name: str
    shape: torch.Size
    offset: int  # elements from the start of the record
    num_elements: int
    group_index: int | None  # of the optimizer's param_groups; None: frozen
    index: int = 0  # in its record's slots
    step: int = 0  # updates so far
    num_writes: int = 0  # other than updates
    num_state_writes: dict[str, int] = field(default_factory=dict)  # the same, by the state's name

    @property
    def trainable(self) -> bool:
        """Whether the optimizer updates it."""
        return self.group_index is not None

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of `flat`, in its shape."""
        return flat[self.offset : self.offset + self.num_elements].view(self.shape)


class FlatViews(NamedTuple):
    """What is where in a record's flat memory: by slot, and between the slots."""

    slots: tuple[torch.Tensor, ...]
    padding: tuple[torch.Tensor, ...]


class SlotViews:
    """The views of a record's parameters at the few fixed addresses where leases place it.

    Making a view costs more than using it: they are kept, of the last addresses. Records of one layout that take turns
    in the same leases may share them.
    """

    MAX_ADDRESSES = 256

    def __init__(self, slots: Sequence[ParamSlot], padding: Sequence[tuple[int, int]] = ()) -> None:
        self._slots = slots
        self._padding = padding
        self._views: dict[int, FlatViews] = {}

    def at(self, flat: torch.Tensor) -> FlatViews:
        """The views in `flat`, which must be memory that lasts as long as this object."""
        address = flat.data_ptr()
        views = self._views.get(address)
        if views is None:
            if len(self._views) == self.MAX_ADDRESSES:
                del self._views[next(iter(self._views))]
            with torch.inference_mode(False):  # an evaluation's views are used in training too
                views = self._views[address] = self.of(flat)
        return views

    def of(self, flat: torch.Tensor) -> FlatViews:
        """New views, of memory that may go."""
        return FlatViews(
            tuple(slot.view_in(flat) for slot in self._slots),
            tuple(flat[start:stop] for start, stop in self._padding),
        )


def slot_layout(slots: Sequence[ParamSlot]) -> Hashable:
    """Equal for slots that lie in the same way in records of the same dtype."""
    return tuple((slot.offset, slot.shape) for slot in slots)


@dataclass(frozen=True)
class UpdateRange:
    """Elements [start, stop) that share hyperparameters, step count and the factor of their gradient."""

    start: int
    stop: int
    group_index: int
    step: int
    factor: float = 1.0


def segment_slice(kind: SegmentKind, start: int, stop: int) -> slice:
    """The elements of a segment that belong to elements [start, stop) of its record, or of a chunk of it.

    `start` is a multiple of COMPACT_BLOCK for the scales, and `stop` may lie inside the last block of a parameter.
    """
    if kind is not SegmentKind.SCALES:
        return slice(start, stop)
    if start % COMPACT_BLOCK:
        raise AssertionError(f"elements [{start}, {stop}) begin inside a block of {COMPACT_BLOCK} elements")
    return slice(num_scales(start), num_scales(stop))


def granule(dtype: torch.dtype, *, compact: bool = False) -> int:
    """A parameter begins in its record at a multiple of so many elements."""
    return COMPACT_BLOCK if compact else PARAM_ALIGN_BYTES // dtype.itemsize


@dataclass(eq=False)
class Record:
    """Parameters of one dtype that are fetched and released together; trainable ones come first.

    `num_trainable` and `num_elements` count padding. `resident` records keep their parameters on the device.
    """

    index: int
    name: str
    dtype: torch.dtype
    slots: tuple[ParamSlot, ...]
    num_trainable: int
    num_elements: int
    spec: AnySpec
    resident: bool = False
    compact: bool = False
    grad_dtype: torch.dtype = torch.float32
    segments: dict[SegmentKind, Segment] = field(default_factory=dict)
    edits: Edits = field(default_factory=Edits)

    @property
    def codes(self) -> StateCodes | None:
        """What the states mean in the compact layout; None in the fp32 layout."""
        return self.spec.codes if self.compact else None

    @property
    def unit_name(self) -> str:
        """A unit has one record for each dtype: `blocks.0`, `blocks.0#bfloat16`."""
        return self.name.split("#")[0]

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters with padding."""
        return self.num_elements * self.dtype.itemsize

    @property
    def num_params(self) -> int:
        """Elements of the parameters without padding."""
        return sum(slot.num_elements for slot in self.slots)

    @cached_property
    def trainable_slots(self) -> tuple[ParamSlot, ...]:
        """The slots the optimizer updates."""
        return tuple(slot for slot in self.slots if slot.trainable)

    @cached_property
    def trainable_parts(self) -> tuple[tuple[int, int], ...]:
        """By trainable slot: its elements [start, stop), without padding."""
        return tuple((slot.offset, slot.offset + slot.num_elements) for slot in self.trainable_slots)

    @cached_property
    def trainable_groups(self) -> tuple[tuple[ParamSlot, ...], ...]:
        """The trainable slots by the optimizer's group: neighbours, without a gap between them."""
        grouped = itertools.groupby(self.trainable_slots, key=lambda slot: slot.group_index)
        return tuple(tuple(slots) for _, slots in grouped)

    def layout(self) -> dict[SegmentKind, tuple[torch.dtype, int]]:
        """Dtype and number of elements of each segment this record needs."""
        segments = {SegmentKind.PARAM: (self.dtype, self.num_elements)}
        if self.num_trainable:
            dtypes = self.spec.state_dtypes(self.dtype, compact=self.compact)
            segments.update({kind: (dtype, self.num_trainable) for kind, dtype in dtypes.items()})
        if self.num_trainable and self.compact:
            scale_bytes = align_up(num_scales(self.num_trainable) * torch.float32.itemsize)
            segments[SegmentKind.SCALES] = (torch.float32, scale_bytes // torch.float32.itemsize)
        return segments

    def chunk_slice(self, kind: SegmentKind, start: int, stop: int) -> slice:
        """What moves for a chunk [start, stop): with the last one goes the padding, so whole file blocks move."""
        part = segment_slice(kind, start, stop)
        if kind is SegmentKind.SCALES and stop == self.num_trainable:
            return slice(part.start, self.layout()[kind][1])
        return part

    def padded(self, num_elements: int) -> int:
        """Elements a parameter takes in this record."""
        return align_up(num_elements, granule(self.dtype, compact=self.compact))

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) between trainable parameters that belong to none."""
        ends = (
            (s.offset + s.num_elements, s.offset + self.padded(s.num_elements)) for s in self.trainable_slots
        )
        return tuple((end, stop) for end, stop in ends if stop > end)

    @property
    def updates_on_device(self) -> bool:
        """Whether every segment of the update lives on the device."""
        return all(segment.tier is TierName.DEVICE for segment in self.segments.values())


def make_record(
    index: int,
    name: str,
    dtype: torch.dtype,
    params: Sequence[tuple[str, torch.nn.Parameter, int | None]],
    *,
    spec: AnySpec,
    resident: bool = False,
    compact: bool = False,
) -> Record:
    """Lay parameters (name, parameter, group index or None) out: trainable first, by group, then frozen.

    `compact` is the layout of the states; a dtype that has none keeps the fp32 layout.
    """
    compact = compact and spec.is_compact(dtype)
    param_align = granule(dtype, compact=compact)
    record_align = ALIGN_BYTES if compact else ALIGN_BYTES // 2  # whole file blocks in the smallest dtype
    ordered = sorted(params, key=lambda item: (item[2] is None, item[2] or 0))  # stable
    slots: list[ParamSlot] = []
    position = 0
    num_trainable: int | None = None
    for param_name, param, group_index in ordered:
        if group_index is None and num_trainable is None:
            position = num_trainable = align_up(position, record_align)
        slots.append(
            ParamSlot(param, param_name, param.shape, position, param.numel(), group_index, len(slots))
        )
        position += align_up(param.numel(), param_align)
    position = align_up(position, record_align)
    if num_trainable is None:
        num_trainable = position
    return Record(index, name, dtype, tuple(slots), num_trainable, position, spec, resident, compact)


def update_ranges(
    record: Record, slots: Iterable[ParamSlot], *, factors: Mapping[int, float] = MappingProxyType({})
) -> list[UpdateRange]:
    """Merge neighbouring `slots` with equal group, step and factor into ranges, in the record's order.

    `factors` of gradients are by slot, 1 where there is none. Padding behind a parameter belongs to its
    range: its gradient is zero, so it stays zero.
    """
    ranges: list[UpdateRange] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if slot.group_index is None:
            raise AssertionError(f"{slot.name} is frozen")
        stop = slot.offset + record.padded(slot.num_elements)
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
    return ranges


def all_ranges(record: Record) -> list[UpdateRange]:
    """`update_ranges` of all trainable slots; in most steps those of a group have seen equally many."""
    ranges: list[UpdateRange] = []
    for slots in record.trainable_groups:
        first, last = slots[0], slots[-1]
        if first.group_index is None or any(slot.step != first.step for slot in slots):
            return update_ranges(record, record.trainable_slots)
        stop = last.offset + record.padded(last.num_elements)
        ranges.append(UpdateRange(first.offset, stop, first.group_index, first.step))
    return ranges
