"""The form in which a record's elements go between ranks in fewer bits.

[Note: exact on the wire]
Block codes suit matrices. The weights of a norm or a bias are few, of another magnitude than their neighbours, and
matter more: a block that they shared with a matrix would have a scale that is too coarse for it. So parameters of one
dimension or none go as they are, beside the codes, and are zeros where the codes are made. Every rank sends equally
many bytes: as many exact elements as the rank that keeps most of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from offloadzero.arithmetic.block_codes import (
    INT4_BLOCK,
    INT4_SCALE_DTYPE,
    INT8_BLOCK,
    num_blocks,
    piece_elements,
)
from offloadzero.config.schema import ZeroPlusPlusConfig
from offloadzero.memory.arena import align_up
from offloadzero.ranks.mesh import is_divided_by_tensor_parallelism
from offloadzero.ranks.shard import ShardSpec
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

CODED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGN_BYTES = 16  # of a rank's part of what goes beside the codes


_PARTIAL = 1.125  # of a piece: what decoding four bits takes beside its result


class ExactPart(NamedTuple):
    """Elements [start, stop) of a region that one rank keeps and sends as they are, from `place` on of its own."""

    rank: int
    start: int
    stop: int
    place: int


class WireRegion(NamedTuple):
    """One region of a record, the trainable elements or the frozen ones, on its way between ranks.

    Weights go as codes of 8 bits, gradients of 4. Of a gradient each rank's part, in codes and scales one behind the
    other, is a packet.
    """

    dtype: torch.dtype
    num_elements: int
    shard: ShardSpec
    coded: frozenset[int]  # the parameters that go as codes, by their slots' indices
    exact: tuple[ExactPart, ...]
    exact_elements: int  # that each rank sends

    @property
    def kept_elements(self) -> int:
        """Elements of one rank's part."""
        return self.shard.kept_elements(self.num_elements)

    @property
    def kept_scales(self) -> int:
        """Scales of one rank's part."""
        return num_blocks(self.kept_elements, INT8_BLOCK)

    @property
    def beside_bytes(self) -> int:
        """Bytes that each rank sends beside its int8 codes: their scales, and the exact elements."""
        size = self.kept_scales * torch.float32.itemsize + self.exact_elements * self.dtype.itemsize
        return align_up(size, _ALIGN_BYTES)

    @property
    def gather_bytes(self) -> int:
        """Device memory in which such a region is gathered, beside its lease."""
        scales = num_blocks(self.num_elements, INT8_BLOCK)
        work = scales + piece_elements(self.kept_elements)
        return (
            align_up(work * torch.float32.itemsize, _ALIGN_BYTES) + self.shard.world_size * self.beside_bytes
        )

    @property
    def packet_bytes(self) -> int:
        """Bytes of one rank's part of a gradient: codes, then scales."""
        return (
            self.kept_elements // 2 + num_blocks(self.kept_elements, INT4_BLOCK) * INT4_SCALE_DTYPE.itemsize
        )

    @property
    def piece_elements(self) -> int:
        """Elements of a gradient that are worked on at once."""
        return piece_elements(self.num_elements)

    @property
    def exact_bytes(self) -> int:
        """Bytes of a gradient's elements that go as they are, as many for each rank."""
        return align_up(self.exact_elements * self.shard.world_size * self.dtype.itemsize, _ALIGN_BYTES)

    @property
    def reduce_bytes(self) -> int:
        """Device memory in which a gradient is reduced, beside its lease."""
        work = int((1 + _PARTIAL) * self.piece_elements) * torch.float32.itemsize
        return self.shard.world_size * self.packet_bytes + self.exact_bytes + work


def gradient_wire(record: Record, config: ZeroPlusPlusConfig) -> WireRegion | None:
    """Return how the record's gradient goes as codes; None: as it is."""
    if not config.quantized_gradients or not record.is_gathered or record.dtype not in CODED_DTYPES:
        return None
    if not any(len(slot.shape) > 1 for slot in record.trainable_slots):
        return None
    return _region(record, record.trainable_slots, 0, record.num_trainable)


def gradient_code_bytes(record: Record, config: ZeroPlusPlusConfig) -> int:
    """Return the device memory in which the record's gradient is reduced as codes, beside its lease."""
    wire = gradient_wire(record, config)
    return 0 if wire is None else wire.reduce_bytes


def wire_regions(record: Record, config: ZeroPlusPlusConfig) -> dict[int, WireRegion]:
    """Return the regions whose weights are gathered in fewer bits, by their first element in the record.

    Those whose elements all go as they are, or whose dtype has no codes, are left out.
    """
    of_all, of_frozen = config.quantized_weights, config.quantized_nontrainable_weights
    wanted = (
        (0, record.num_trainable, of_all),
        (record.num_trainable, record.num_elements, of_all or of_frozen),
    )
    found: dict[int, WireRegion] = {}
    if not record.is_gathered or record.dtype not in CODED_DTYPES:
        return found
    for start, stop, is_wanted in wanted:
        slots = [slot for slot in record.slots if start <= slot.offset < stop]
        if is_wanted and stop > start and any(len(slot.shape) > 1 for slot in slots):
            found[start] = _region(record, slots, start, stop)
    return found


def near_copy_bytes(record: Record, config: ZeroPlusPlusConfig) -> int:
    """Return the bytes that this rank keeps of a copy of the record's weights among the ranks of its machine."""
    node_ranks = config.node_ranks
    return record.param_bytes // node_ranks if record.is_gathered and node_ranks > 1 else 0


def _region(record: Record, slots: Sequence[ParamSlot], start: int, stop: int) -> WireRegion:
    coded = frozenset(slot.index for slot in _coded(slots))
    others = [slot for slot in slots if slot.index not in coded]
    exact = tuple(_exact_parts(others, start, stop, record.shard.world_size))
    sent = [0] * record.shard.world_size
    for part in exact:
        sent[part.rank] += part.stop - part.start
    return WireRegion(record.dtype, stop - start, record.shard, coded, exact, max(sent))


def _coded(slots: Sequence[ParamSlot]) -> list[ParamSlot]:
    """The parameters of a region that go as codes: [Note: exact on the wire]."""
    matrices = [slot for slot in slots if len(slot.shape) > 1]
    return [slot for slot in matrices if is_divided_by_tensor_parallelism(slot.param)] or matrices


def _exact_parts(slots: Sequence[ParamSlot], base: int, end: int, world_size: int) -> Iterator[ExactPart]:
    kept = (end - base) // world_size
    places = [0] * world_size
    for slot in slots:
        start, last = slot.offset - base, slot.offset - base + slot.num_elements
        while start < last:
            rank = start // kept
            stop = min(last, (rank + 1) * kept)
            yield ExactPart(rank, start, stop, places[rank])
            places[rank] += stop - start
            start = stop


def weight_code_bytes(record: Record, config: ZeroPlusPlusConfig) -> int:
    """Return the device memory in which the record's weights are gathered in fewer bits, beside its lease."""
    regions = wire_regions(record, config)
    return max((region.gather_bytes for region in regions.values()), default=0)


MAX_PIECE_BYTES = 32 << 20  # of a gradient that goes in another dtype than its own


def gradient_piece_bytes(record: Record, dtype: torch.dtype | None) -> int:
    """Return the device memory in which the record's gradient goes in `dtype`, in pieces; None: in its own."""
    if dtype is None or dtype == record.dtype or not record.is_reduced:
        return 0
    num_ranks = record.shard.world_size
    num_columns = max(1, MAX_PIECE_BYTES // dtype.itemsize // num_ranks)
    return min(record.num_trainable, num_columns * num_ranks) * dtype.itemsize
