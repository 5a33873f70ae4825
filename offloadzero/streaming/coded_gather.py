"""The all-gather of a unit's weights as int8 codes: ZeRO++'s qwZ.

[Note: codes in the lease]
The codes of a region of n elements take the last n bytes of its memory in the lease, and this rank's own elements, from
which they are made, its first ones: with two ranks or more these are apart. When all codes are there they are decoded
from the front, each piece after its codes were read, so the only memory beside the lease is for the scales, for the
elements that go as they are ([Note: exact on the wire] in update/wire_codes.py), and a piece in fp32.

Every rank decodes its own part as the others do: all of them compute with the same weights. The homes keep the exact
ones, which updates and checkpoints read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offloadzero.arithmetic.block_codes import (
    INT8_BLOCK,
    decode_int8,
    encode_int8,
    num_blocks,
    piece_elements,
)
from offloadzero.config.schema import ZeroPlusPlusConfig
from offloadzero.ranks.group import Collectives
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.wire_codes import WireRegion, wire_regions


class CodedGather:
    """Gathers regions of units in fewer bits; used by one lane."""

    def __init__(self, memory: Tensor | None, *, config: ZeroPlusPlusConfig) -> None:
        """Use `memory`, uint8, on the device, of the largest `weight_code_bytes`; None where that is 0."""
        self._memory = memory
        self._config = config
        self._regions: dict[int, dict[int, WireRegion]] = {}

    def is_coded(self, record: Record, slot: ParamSlot) -> bool:
        """Return whether the parameter's values on the device are those that codes stand for."""
        first = 0 if slot.trainable else record.num_trainable
        region = self.region_at(record, first)
        return region is not None and slot.index in region.coded

    def region_at(self, record: Record, start: int) -> WireRegion | None:
        """Return how the region from element `start` on goes between ranks; None: as it is."""
        if record.index not in self._regions:
            self._regions[record.index] = wire_regions(record, self._config)
        return self._regions[record.index].get(start)

    def gather(
        self,
        region: WireRegion,
        target: Tensor,
        shard: Tensor,
        channel: Collectives,
        label: str,
        *,
        copy: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Fill `target`, shape (n,), with the parts of all ranks, of which `shard` is this one's: `copy` brings it."""
        work = _Memory(self._memory, region)
        num_elements, kept, rank = target.numel(), region.kept_elements, region.shard.rank
        codes = target.view(torch.uint8)[-num_elements:].view(torch.int8)
        own = target[:kept]
        copy(own, shard)
        for part in region.exact:
            if part.rank == rank:
                start, stop = part.start - rank * kept, part.stop - rank * kept
                work.exact[rank, part.place : part.place + stop - start].copy_(own[start:stop])
                own[start:stop].zero_()
        encode_int8(own, codes[rank * kept : (rank + 1) * kept], work.sent_scales[rank], scratch=work.scratch)
        channel.all_gather(codes, label)
        channel.all_gather(work.beside, f"{label}: scales")
        work.scales.view(work.sent_scales.shape).copy_(work.sent_scales)
        decode_int8(codes, work.scales, target, scratch=work.scratch)
        for part in region.exact:
            size = part.stop - part.start
            target[part.start : part.stop].copy_(work.exact[part.rank, part.place : part.place + size])


class _Memory:
    """The parts of the memory in which a region is gathered."""

    def __init__(self, memory: Tensor | None, region: WireRegion) -> None:
        if memory is None:
            raise AssertionError("no memory is planned for codes of weights")
        fp32 = torch.float32.itemsize
        num_ranks, kept_scales = region.shard.world_size, region.kept_scales
        self.beside = memory[: num_ranks * region.beside_bytes]  # of all ranks, one after the other
        rows = self.beside.view(num_ranks, region.beside_bytes)
        self.sent_scales = rows[:, : kept_scales * fp32].view(torch.float32)
        exact_start = kept_scales * fp32
        exact_stop = exact_start + region.exact_elements * region.dtype.itemsize
        self.exact = rows[:, exact_start:exact_stop].view(region.dtype)
        num_scales = num_blocks(region.num_elements, INT8_BLOCK)
        rest = memory[self.beside.numel() :].view(torch.float32)
        self.scales = rest[:num_scales]
        self.scratch = rest[num_scales : num_scales + piece_elements(region.kept_elements)]
