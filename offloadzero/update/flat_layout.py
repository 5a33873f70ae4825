"""The places of parameters in a unit's flat memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from offloadzero.core.constants import COMPACT_BLOCK
from offloadzero.core.segments import SegmentKind
from offloadzero.memory.arena import ALIGN_BYTES, align_up

PARAM_ALIGN_BYTES = 64  # as torch's CPU allocator: kernels see the alignment that they see without offloading


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
    num_writes: Counter[SegmentKind] = field(default_factory=Counter)  # other than updates

    @property
    def trainable(self) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.group_index is not None

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of `flat`, in its shape."""
        return flat[self.offset : self.offset + self.num_elements].view(self.shape)


class FlatViews(NamedTuple):
    """The views into a record's flat memory: by slot, and between the slots."""

    slots: tuple[torch.Tensor, ...]
    padding: tuple[torch.Tensor, ...]


class SlotViews:
    """The views of a record's parameters at the few fixed addresses where leases place it.

    Making a view costs more than using it: the views at the last addresses are kept. Records of one layout that take
    turns in the same leases may share them.
    """

    MAX_ADDRESSES = 256

    def __init__(self, slots: Sequence[ParamSlot], padding: Sequence[tuple[int, int]] = ()) -> None:
        self._slots = slots
        self._padding = padding
        self._views: dict[int, FlatViews] = {}

    def at(self, flat: torch.Tensor) -> FlatViews:
        """Return the views in `flat`; the memory must last as long as this object."""
        address = flat.data_ptr()
        views = self._views.get(address)
        if views is None:
            if len(self._views) == self.MAX_ADDRESSES:
                del self._views[next(iter(self._views))]
            with torch.inference_mode(False):  # an evaluation's views are used in training too
                views = self._views[address] = self.of(flat)
        return views

    def of(self, flat: torch.Tensor) -> FlatViews:
        """Return new views of memory that need not last."""
        return FlatViews(
            tuple(slot.view_in(flat) for slot in self._slots),
            tuple(flat[start:stop] for start, stop in self._padding),
        )


def slot_layout(slots: Sequence[ParamSlot]) -> Hashable:
    """Return a key that is equal for slots that lie in the same way in records of the same dtype."""
    return tuple((slot.offset, slot.shape) for slot in slots)


def granule(dtype: torch.dtype, *, compact: bool = False) -> int:
    """The number of elements of which a parameter's begin in its record is a multiple."""
    return COMPACT_BLOCK if compact else PARAM_ALIGN_BYTES // dtype.itemsize


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Parameters of one dtype in flat memory; trainable ones come first.

    `num_trainable` and `num_elements` are full sizes, whichever part a rank keeps, and include padding. Each
    parameter begins at a multiple of `granule` elements.
    """

    dtype: torch.dtype
    slots: tuple[ParamSlot, ...]
    num_trainable: int
    num_elements: int
    granule: int

    @cached_property
    def trainable_slots(self) -> tuple[ParamSlot, ...]:
        """The slots that the optimizer updates."""
        return tuple(slot for slot in self.slots if slot.trainable)

    @cached_property
    def trainable_parts(self) -> tuple[tuple[int, int], ...]:
        """The elements [start, stop) of each trainable slot, without padding."""
        return tuple((slot.offset, slot.offset + slot.num_elements) for slot in self.trainable_slots)

    @cached_property
    def trainable_groups(self) -> tuple[tuple[ParamSlot, ...], ...]:
        """The trainable slots by the optimizer's group: neighbours, without a gap between them."""
        grouped = itertools.groupby(self.trainable_slots, key=lambda slot: slot.group_index)
        return tuple(tuple(slots) for _, slots in grouped)

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) between trainable parameters, which belong to none."""
        ends = (
            (s.offset + s.num_elements, s.offset + self.padded(s.num_elements)) for s in self.trainable_slots
        )
        return tuple((end, stop) for end, stop in ends if stop > end)

    def padded(self, num_elements: int) -> int:
        """The number of elements that a parameter takes here."""
        return align_up(num_elements, self.granule)


def make_flat_layout(
    dtype: torch.dtype,
    params: Sequence[tuple[str, torch.nn.Parameter, int | None]],
    *,
    compact: bool,
    num_shards: int = 1,
    in_file_blocks: bool = True,
) -> FlatLayout:
    """Lay out parameters (name, parameter, group index or None): trainable ones first, by group, then frozen ones.

    `compact`: the states have scales per block, so no block belongs to two parameters. Trainable and frozen elements
    are each a whole number of `num_shards` shards, and no block belongs to two of those. `in_file_blocks`: a shard is a
    whole number of blocks of a file.
    """
    param_align = granule(dtype, compact=compact)
    # File blocks are whole in the smallest dtype.
    shard_align = (ALIGN_BYTES if compact else ALIGN_BYTES // 2) if in_file_blocks else param_align
    record_align = shard_align * num_shards
    ordered = sorted(params, key=lambda item: (item[2] is None, item[2] or 0))  # the sort is stable
    slots: list[ParamSlot] = []
    position = 0
    num_trainable: int | None = None
    for param_name, param, group_index in ordered:
        if group_index is None and num_trainable is None:
            # Parameters of no elements alone have gradients and steps, too.
            position = num_trainable = align_up(max(position, 1 if slots else 0), record_align)
        slots.append(
            ParamSlot(param, param_name, param.shape, position, param.numel(), group_index, len(slots))
        )
        position += align_up(param.numel(), param_align)
    if num_trainable is None:
        position = num_trainable = align_up(max(position, 1), record_align)
    position = align_up(position, record_align)
    return FlatLayout(dtype, tuple(slots), num_trainable, position, param_align)
