"""Which elements of a parameter a rank keeps, and where they are in its homes (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from offloadzero.segments import SegmentKind
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.record_state import segment_slice
from offloadzero.update.records import Record


class KeptPlace(NamedTuple):
    """Elements of a slot in a home: `num_elements` from `start` on, which are those after the `skipped` first."""

    start: int
    num_elements: int
    skipped: int


def kept_place(record: Record, slot: ParamSlot, kind: SegmentKind) -> KeptPlace:
    """What this rank keeps of a parameter in one of its segments."""
    start, stop = slot.offset, slot.offset + slot.num_elements
    whole = segment_slice(kind, start, stop)
    if record.shard.world_size == 1 or (kind is SegmentKind.PARAM and not record.is_gathered):
        return KeptPlace(whole.start, whole.stop - whole.start, 0)
    base = 0 if slot.trainable else record.num_trainable
    total = record.num_trainable if slot.trainable else record.num_elements - record.num_trainable
    first, _ = record.shard.kept_range(total)
    start, stop = record.shard.clipped(start - base, stop - base, total)
    if start == stop:
        return KeptPlace(0, 0, 0)
    part = segment_slice(kind, start, stop)
    skipped = segment_slice(kind, first + base, first + base + start).stop - whole.start
    before = 0 if slot.trainable else record.kept_trainable  # of the parameters' home: frozen ones come last
    return KeptPlace(before + part.start, part.stop - part.start, skipped)


def gathered_regions(record: Record, params: torch.Tensor) -> Iterator[torch.Tensor]:
    """What of a record's parameters, shape (num_elements,), is divided evenly: the trainable ones, the frozen ones."""
    for region in params.tensor_split([record.num_trainable]):
        if region.numel():
            yield region


def kept_regions(record: Record, params: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same, of those that this rank keeps, shape (state.kept_elements,)."""
    for region in params.tensor_split([record.kept_trainable]):
        if region.numel():
            yield region


def kept_params(record: Record, params: torch.Tensor) -> torch.Tensor:
    """Of a record's parameters, shape (num_elements,), those that this rank keeps."""
    if not record.is_gathered:
        return params
    ranges = [
        (region, record.shard.kept_range(region.numel())) for region in gathered_regions(record, params)
    ]
    return torch.cat([params[:0], *(region[start:stop] for region, (start, stop) in ranges)])
