"""The persistent state of one rank's part of a unit: its segments and their homes.

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

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.core.segments import SegmentKind
from offloadzero.memory.arena import align_up
from offloadzero.memory.store import Segment
from offloadzero.ranks.shard import ShardSpec
from offloadzero.update.flat_layout import FlatLayout
from offloadzero.update.spec import AnySpec, StateCodes


def segment_slice(kind: SegmentKind, start: int, stop: int) -> slice:
    """The elements of a segment that belong to elements [start, stop) of its record, or of a chunk of it.

    `start` is a multiple of COMPACT_BLOCK for the scales, and `stop` may lie inside the last block of a parameter.
    """
    if kind is not SegmentKind.SCALES:
        return slice(start, stop)
    if start % COMPACT_BLOCK:
        raise AssertionError(f"elements [{start}, {stop}) begin inside a block of {COMPACT_BLOCK} elements")
    return slice(num_scales(start), num_scales(stop))


@dataclass(eq=False)
class RecordState:
    """The segments of a shard of a flat layout under one optimizer; `segments` has them once they have homes."""

    flat: FlatLayout
    shard: ShardSpec
    spec: AnySpec
    compact: bool
    keeps_whole_params: bool = False  # a shard is trained here, but all parameters are kept
    grad_dtype: torch.dtype = torch.float32
    segments: dict[SegmentKind, Segment] = field(default_factory=dict)

    @property
    def kept_elements(self) -> int:
        """The number of elements of the parameters here, with padding."""
        return (
            self.flat.num_elements
            if self.keeps_whole_params
            else self.shard.kept_elements(self.flat.num_elements)
        )

    @property
    def kept_trainable(self) -> int:
        """The number of elements here that the optimizer updates."""
        return self.shard.kept_elements(self.flat.num_trainable)

    @property
    def codes(self) -> StateCodes | None:
        """The codes of the states in the compact layout; None in the fp32 layout."""
        return self.spec.codes if self.compact else None

    @cached_property
    def layout(self) -> Mapping[SegmentKind, tuple[torch.dtype, int]]:
        """The dtype and number of elements of each segment except the gradient."""
        segments = {SegmentKind.PARAM: (self.flat.dtype, self.kept_elements)}
        trainable = self.kept_trainable
        if trainable:
            dtypes = self.spec.state_dtypes(self.flat.dtype, compact=self.compact)
            segments.update({kind: (dtype, trainable) for kind, dtype in dtypes.items()})
        if trainable and self.compact:
            scale_bytes = align_up(num_scales(trainable) * torch.float32.itemsize)
            segments[SegmentKind.SCALES] = (torch.float32, scale_bytes // torch.float32.itemsize)
        return segments

    def chunk_slice(self, kind: SegmentKind, start: int, stop: int) -> slice:
        """The segments' elements of a chunk [start, stop). The last includes the padding: file blocks move whole."""
        part = segment_slice(kind, start, stop)
        if kind is SegmentKind.SCALES and stop == self.kept_trainable:
            return slice(part.start, self.layout[kind][1])
        return part

    @property
    def updates_on_device(self) -> bool:
        """Whether all segments of the update live on the device."""
        return all(segment.is_on_device for segment in self.segments.values())
