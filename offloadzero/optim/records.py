"""Records: all persistent state of one unit, its layout and its segments (floor 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from offloadzero.config import SegmentKind, TierName
from offloadzero.memory.store import Segment

PARAM_ALIGN_BYTES = 64  # what torch's CPU allocator gives: kernels see the alignment they see without us
RECORD_ALIGN_ELEMENTS = 2048  # whole 4096-byte blocks in every dtype of two bytes or more

# What a trainable element of each parameter dtype keeps beside itself (DESIGN: state layouts).
MASTER_DTYPES: Mapping[torch.dtype, torch.dtype | None] = {
    torch.bfloat16: torch.int16,  # the low half of the fp32 pattern; the parameter is the high half
    torch.float16: torch.float32,
    torch.float32: None,
}
STATE_KINDS = (SegmentKind.MASTER, SegmentKind.EXP_AVG, SegmentKind.EXP_AVG_SQ)


@dataclass(eq=False)
class ParamSlot:
    """One parameter's place in its record."""

    param: torch.nn.Parameter
    name: str
    shape: torch.Size
    offset: int  # elements from the start of the record
    num_elements: int
    group_index: int | None  # of the optimizer's param_groups; None: frozen
    step: int = 0  # updates so far

    @property
    def trainable(self) -> bool:
        """Whether the optimizer updates it."""
        return self.group_index is not None

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of `flat`, in its shape."""
        return flat[self.offset : self.offset + self.num_elements].view(self.shape)


@dataclass(frozen=True)
class UpdateRange:
    """Elements [start, stop) that share hyperparameters and step count."""

    start: int
    stop: int
    group_index: int
    step: int


def padded(num_elements: int, dtype: torch.dtype) -> int:
    """Elements a parameter takes in its record."""
    return -(-num_elements // _granule(dtype)) * _granule(dtype)


def _granule(dtype: torch.dtype) -> int:
    return PARAM_ALIGN_BYTES // dtype.itemsize


def _round_up(num_elements: int) -> int:
    return -(-num_elements // RECORD_ALIGN_ELEMENTS) * RECORD_ALIGN_ELEMENTS


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
    resident: bool = False
    grad_dtype: torch.dtype = torch.float32
    segments: dict[SegmentKind, Segment] = field(default_factory=dict)
    version: int = 0  # counts writes other than updates

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

    def layout(self) -> dict[SegmentKind, tuple[torch.dtype, int]]:
        """Dtype and number of elements of each segment this record needs."""
        segments = {SegmentKind.PARAM: (self.dtype, self.num_elements)}
        if self.num_trainable:
            master = MASTER_DTYPES[self.dtype]
            if master is not None:
                segments[SegmentKind.MASTER] = (master, self.num_trainable)
            segments[SegmentKind.EXP_AVG] = (torch.float32, self.num_trainable)
            segments[SegmentKind.EXP_AVG_SQ] = (torch.float32, self.num_trainable)
        return segments

    def padding(self) -> Iterator[tuple[int, int]]:
        """Ranges [start, stop) between trainable parameters that belong to none."""
        for slot in self.trainable_slots:
            end = slot.offset + slot.num_elements
            stop = slot.offset + padded(slot.num_elements, self.dtype)
            if stop > end:
                yield end, stop

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
    resident: bool = False,
) -> Record:
    """Lay parameters (name, parameter, group index or None) out: trainable first, by group, then frozen."""
    ordered = sorted(params, key=lambda item: (item[2] is None, item[2] or 0))  # stable
    slots: list[ParamSlot] = []
    position = 0
    num_trainable: int | None = None
    for param_name, param, group_index in ordered:
        if group_index is None and num_trainable is None:
            position = num_trainable = _round_up(position)
        slots.append(ParamSlot(param, param_name, param.shape, position, param.numel(), group_index))
        position += padded(param.numel(), dtype)
    position = _round_up(position)
    if num_trainable is None:
        num_trainable = position
    return Record(index, name, dtype, tuple(slots), num_trainable, position, resident)


def update_ranges(record: Record, slots: Iterable[ParamSlot]) -> list[UpdateRange]:
    """Merge neighbouring `slots` with equal group and step into ranges, in the record's order.

    Padding behind a parameter belongs to its range: its gradient is zero, so it stays zero.
    """
    ranges: list[UpdateRange] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if slot.group_index is None:
            raise AssertionError(f"{slot.name} is frozen")
        stop = slot.offset + padded(slot.num_elements, record.dtype)
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and last.stop == slot.offset
            and (last.group_index, last.step) == (slot.group_index, slot.step)
        ):
            ranges[-1] = UpdateRange(last.start, stop, last.group_index, last.step)
        else:
            ranges.append(UpdateRange(slot.offset, stop, slot.group_index, slot.step))
    return ranges
