"""The elements of a parameter that a rank keeps, and their places in its homes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from offloadzero.core.segments import SegmentKind
from offloadzero.memory.store import HomePart
from offloadzero.ranks.shard import ShardSpec
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record, segment_slice


class KeptPlace(NamedTuple):
    """The place of a slot's elements in a home: `num_elements` from `start` on, after the slot's `skipped` first."""

    start: int
    num_elements: int
    skipped: int


def kept_place(record: Record, slot: ParamSlot, kind: SegmentKind) -> KeptPlace:
    """The place of the part that this rank keeps of a parameter in one of its segments."""
    return _place_of(record, slot, kind, record.shard)


def param_parts(record: Record) -> list[HomePart]:
    """The parts of a home of parameters on nvme, some of which lie in files: [Note: weights in place].

    Neighbours that do not are one part. Empty where no parameter lies in a file.
    """
    if all(slot.source is None for slot in record.slots):
        return []
    parts = [HomePart(0, record.kept_trainable, None, record.name)] if record.kept_trainable else []
    for slot in record.slots:
        place = kept_place(record, slot, SegmentKind.PARAM)
        if slot.trainable or not place.num_elements:
            continue
        if slot.source is not None:
            source = slot.source.behind(place.skipped * record.dtype.itemsize)
            parts.append(HomePart(place.start, place.num_elements, source, slot.name))
        elif parts and parts[-1].source is None:
            start = parts.pop().start
            parts.append(HomePart(start, place.start + place.num_elements - start, None, record.name))
        else:
            parts.append(HomePart(place.start, place.num_elements, None, record.name))
    return parts


def kept_parts(
    record: Record, slot: ParamSlot, kind: SegmentKind, whole: torch.Tensor
) -> dict[int, torch.Tensor]:
    """The views of a parameter's `whole` segment, shape (n,), by the rank that keeps it; without ranks of none."""
    base, total = _region_of(record, slot)
    begin, num_ranks = slot.offset - base, record.shard.world_size
    first, last = (element * num_ranks // total for element in (begin, begin + slot.num_elements - 1))
    parts = {}
    for rank in range(first, last + 1):
        _, num_elements, skipped = _place_of(record, slot, kind, ShardSpec(rank, num_ranks))
        if num_elements:
            parts[rank] = whole[skipped : skipped + num_elements]
    return parts


def _region_of(record: Record, slot: ParamSlot) -> tuple[int, int]:
    """The first element and the number of those of the record that are divided with a slot's: trainable ones or not."""
    if slot.trainable:
        return 0, record.num_trainable
    return record.num_trainable, record.num_elements - record.num_trainable


def _place_of(record: Record, slot: ParamSlot, kind: SegmentKind, shard: ShardSpec) -> KeptPlace:
    start, stop = slot.offset, slot.offset + slot.num_elements
    whole = segment_slice(kind, start, stop)
    if shard.world_size == 1 or (kind is SegmentKind.PARAM and not record.is_gathered):
        return KeptPlace(whole.start, whole.stop - whole.start, 0)
    base, total = _region_of(record, slot)
    first, _ = shard.kept_range(total)
    start, stop = shard.clipped(start - base, stop - base, total)
    if start == stop:
        return KeptPlace(0, 0, 0)
    part = segment_slice(kind, start, stop)
    skipped = segment_slice(kind, first + base, first + base + start).stop - whole.start
    before = 0 if slot.trainable else record.kept_trainable  # of the parameters' home: frozen ones come last
    return KeptPlace(before + part.start, part.stop - part.start, skipped)


def gathered_regions(record: Record, params: torch.Tensor) -> Iterator[torch.Tensor]:
    """The evenly divided regions of a record's parameters, shape (num_elements,): trainable ones, frozen ones."""
    for region in params.tensor_split([record.num_trainable]):
        if region.numel():
            yield region


def kept_regions(record: Record, params: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of these regions that this rank keeps, shape (state.kept_elements,)."""
    for region in params.tensor_split([record.kept_trainable]):
        if region.numel():
            yield region


def kept_params(record: Record, params: torch.Tensor) -> torch.Tensor:
    """The elements that this rank keeps of a record's parameters, shape (num_elements,)."""
    if not record.is_gathered:
        return params
    ranges = [
        (region, record.shard.kept_range(region.numel())) for region in gathered_regions(record, params)
    ]
    return torch.cat([params[:0], *(region[start:stop] for region, (start, stop) in ranges)])
