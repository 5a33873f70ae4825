"""The reduction of gradients over the ranks, on the lane that takes them home.

[Note: two hops]
Gradients that go as int4 codes (ZeRO++'s qgZ) are reduced within machines and then between them. With N ranks on
machines of G each, the gradient is N parts of k elements, part r for rank r. First each rank sends to each rank of its
machine the parts of those that have that one's place in their machines, N / G of them, as codes. The sums of these, in
fp32, go as codes again between the ranks of equal place, each to its owner, who adds them up in fp32. So a value is
rounded to codes twice, whatever the number of ranks, and a machine sends a quarter of the bytes of a bf16 gradient,
where one all-to-all over all ranks would send that for each of its ranks. With one machine, or one rank on each, there
is one hop. The sums are taken in the order of the ranks: they have the same bits in each run.

The codes that a rank sends have memory of their own in the plan. Those that it receives come to the first bytes of the
gradient's lease, whose values have become codes by then, and its part of the result goes to the last ones. Parameters
of one dimension are reduced as they are: [Note: exact on the wire] in update/wire_codes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offloadzero.arithmetic.block_codes import INT4_BLOCK, INT4_SCALE_DTYPE, add_decoded_int4, encode_int4
from offloadzero.config import OffloadConfig
from offloadzero.config.schema import ZeroPlusPlusConfig
from offloadzero.ranks.group import Collectives, Group
from offloadzero.step.record_gradient import Brought
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES
from offloadzero.update.wire_codes import WireRegion, gradient_wire


class Reduction:
    """Makes a gradient the mean over the ranks, in the form in which it goes between them; one rank's is that.

    Each rank divides what it sends, as DistributedDataParallel does. Where nothing is divided, this rank's part of a
    gradient is all of it.
    """

    def __init__(
        self, group: Group, *, codes: Tensor | None, pieces: Tensor | None, config: OffloadConfig
    ) -> None:
        """Reduce over `group`.

        Args:
            codes: uint8, on the device, of the largest `gradient_code_bytes`; None where that is 0.
            pieces: the same of the largest `gradient_piece_bytes`.
        """
        self._group = group
        self._coded = CodedReduce(group, codes, config=config.zero_plus_plus)
        # That of what does not go as codes, DeepSpeed's `communication_data_type`; None: the gradients' own.
        self._dtype = DTYPES[config.communication_dtype]
        self._pieces = None if pieces is None or self._dtype is None else pieces.view(self._dtype)

    def submit(self, record: Record) -> None:
        """Count a gradient that is reduced and given to the lane as the next one."""
        self._group.reductions.note(record.index)

    def reduce(self, brought: Brought) -> Tensor:
        """Return this rank's part of the mean over the ranks; the gradient is overwritten."""
        record, flat = brought.gradient.record, brought.flat
        if not record.is_reduced:
            return flat
        gradients, label = self._group.gradients, f"{record.name}.grad"
        gradients.begin_submitted()
        codes = self._coded.wire_of(record)
        if codes is not None:
            return self._coded.reduce(record, codes, flat, brought.places)
        if self._pieces is not None and self._dtype != record.dtype:
            return self._reduce_pieces(record, flat, self._pieces, label)
        flat.div_(self._group.spec.world_size)
        if record.shard.world_size > 1:
            return gradients.reduce_scatter(flat, label)
        gradients.all_reduce(flat, label)
        return flat

    def _reduce_pieces(self, record: Record, flat: Tensor, memory: Tensor, label: str) -> Tensor:
        """Reduce in another dtype than the gradient's own, in pieces through memory of a constant size.

        A copy in fp32 would take twice the gradient's bytes on the device, and the largest unit may be a quarter of the
        model. Each piece has as many elements of each rank's part, so every rank adds up those that it keeps.
        """
        gradients, num_parts = self._group.gradients, record.shard.world_size
        parts = flat.view(num_parts, -1)
        own = parts[record.shard.rank]
        num_columns = memory.numel() // num_parts
        for columns, kept in zip(parts.split(num_columns, 1), own.split(num_columns), strict=True):
            wire = memory[: columns.numel()]
            wire.view(columns.shape).copy_(columns)
            wire.div_(self._group.spec.world_size)
            if num_parts > 1:
                kept.copy_(gradients.reduce_scatter(wire, label))
            else:
                gradients.all_reduce(wire, label)
                kept.copy_(wire)
        return own


class CodedReduce:
    """Reduces gradients as codes; used by one lane."""

    def __init__(self, group: Group, memory: Tensor | None, *, config: ZeroPlusPlusConfig) -> None:
        """Use `memory`, uint8, on the device, of the largest `gradient_code_bytes`; None where that is 0."""
        self._group = group
        self._memory = memory
        self._config = config
        self._wires: dict[int, WireRegion | None] = {}

    def wire_of(self, record: Record) -> WireRegion | None:
        """Return how the record's gradient goes as codes; None: as it is."""
        if record.index not in self._wires:
            self._wires[record.index] = gradient_wire(record, self._config)
        return self._wires[record.index]

    def reduce(self, record: Record, wire: WireRegion, flat: Tensor, places: Sequence[int]) -> Tensor:
        """Return the mean over the ranks of this rank's part of `flat`, shape (num_trainable,), which is overwritten.

        `places`: the slots that have a gradient there.
        """
        if self._memory is None:
            raise AssertionError("no memory is planned for codes of gradients")
        for start, stop in _idle_ranges(record, places):
            flat[start:stop].zero_()
        hops = _Hops(self._group, wire, self._memory, flat, label=f"{record.name}.grad")
        hops.reduce_exact()
        return hops.reduce()


class _Hops:
    """One gradient on its way: [Note: two hops]."""

    def __init__(self, group: Group, wire: WireRegion, memory: Tensor, flat: Tensor, *, label: str) -> None:
        spec, near, far = group.spec, group.near_gradients, group.far_gradients
        self._group, self._near, self._far = group, near, far
        self._node_ranks = 1 if near is None else near.spec.world_size
        self._num_nodes = 1 if far is None else far.spec.world_size
        self._label = label
        self._region = wire
        self._kept = wire.kept_elements
        self._flat = flat
        num_sent = spec.world_size * wire.packet_bytes
        self._sent, received = memory[:num_sent], flat.view(torch.uint8)[:num_sent]
        self._received = received
        shape = spec.world_size, wire.exact_elements
        exact, rest = memory[num_sent:].split(
            [wire.exact_bytes, memory.numel() - num_sent - wire.exact_bytes]
        )
        self._exact = exact.view(flat.dtype)[: shape[0] * shape[1]].view(shape)
        rest = rest.view(torch.float32)
        self._piece = wire.piece_elements
        self._total, self._scratch = rest[: self._piece], rest[self._piece :]
        self._packet_bytes = wire.packet_bytes

    def reduce_exact(self) -> None:
        """Add up what goes as it is; its places in the gradient become zeros."""
        if not self._region.exact:
            return
        self._exact.zero_()
        for part in self._region.exact:
            values = self._flat[part.start : part.stop]
            self._exact[part.rank, part.place : part.place + values.numel()].copy_(values)
            values.zero_()
        self._exact.div_(self._group.spec.world_size)
        self._group.gradients.reduce_scatter(self._exact.view(-1), f"{self._label}: vectors")

    def reduce(self) -> Tensor:
        """Add up the rest, and put what `reduce_exact` has found to it."""
        if self._near is not None:
            self._send_near(self._near)
        if self._far is not None:
            self._send_far(self._far)
        return self._finish()

    def _send_near(self, near: Collectives) -> None:
        """To each rank of this machine the parts of the ranks of its place in all machines."""
        parts = self._flat.view(self._num_nodes, self._node_ranks, self._kept)
        for place, codes, scales in self._packets(self._sent, self._node_ranks, self._num_nodes):
            for rows, columns in self._pieces(self._num_nodes):
                encode_int4(
                    parts[rows, place, columns],
                    codes[rows, _codes(columns)],
                    scales[rows, _blocks(columns)],
                    scratch=self._scratch,
                )
        near.all_to_all(self._received, self._sent, f"{self._label}: within the machine")

    def _send_far(self, far: Collectives) -> None:
        """To each machine, for its rank of this one's place, what this machine has of that rank's part."""
        num_bytes = self._num_nodes * self._packet_bytes
        sent = self._sent[:num_bytes]
        ((_, codes, scales),) = self._packets(sent, 1, self._num_nodes)
        for rows, columns in self._pieces(self._num_nodes):
            encode_int4(
                self._sum_of_machine(rows, columns),
                codes[rows, _codes(columns)],
                scales[rows, _blocks(columns)],
                scratch=self._scratch,
            )
        far.all_to_all(self._received[:num_bytes], sent, f"{self._label}: between machines")

    def _sum_of_machine(self, rows: slice, columns: slice) -> Tensor:
        """Of the parts of the ranks of this one's place, those of machines `rows`."""
        if self._near is None:
            return self._flat.view(self._num_nodes, self._kept)[rows, columns]
        sources = self._packets(self._received, self._node_ranks, self._num_nodes)
        return self._sum(sources, rows, columns)

    def _sum(self, sources: Iterator[tuple[int, Tensor, Tensor]], rows: slice, columns: slice) -> Tensor:
        shape = rows.stop - rows.start, columns.stop - columns.start
        total: Tensor = self._total[: shape[0] * shape[1]].view(shape).zero_()
        for _, codes, scales in sources:
            packed, of_blocks = codes[rows, _codes(columns)], scales[rows, _blocks(columns)]
            add_decoded_int4(packed, of_blocks, total, scratch=self._scratch)
        return total

    def _finish(self) -> Tensor:
        """The mean, in the last elements of the gradient's memory."""
        rank, kept = self._group.spec.rank, self._kept
        result = self._flat[-kept:]
        num_sources = self._node_ranks if self._far is None else self._num_nodes
        received = self._received[: num_sources * self._packet_bytes]
        for rows, columns in self._pieces(1):
            total = self._sum(self._packets(received, num_sources, 1), rows, columns)
            result[columns].copy_(total.view(-1).div_(self._group.spec.world_size))
        for part in self._region.exact:
            if part.rank == rank:
                size = part.stop - part.start
                start = part.start - rank * kept
                result[start : start + size].copy_(self._exact[rank, part.place : part.place + size])
        return result

    def _packets(
        self, memory: Tensor, num_ranks: int, num_parts: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The packets to each of some ranks, or from them: codes and scales, a row for each part."""
        for place, packets in enumerate(memory.view(num_ranks, num_parts, self._packet_bytes)):
            codes, scales = packets.split([self._kept // 2, self._packet_bytes - self._kept // 2], dim=1)
            yield place, codes, scales.view(INT4_SCALE_DTYPE)

    def _pieces(self, num_parts: int) -> Iterator[tuple[slice, slice]]:
        """Parts, and elements of these, that are worked on at once."""
        if self._kept > self._piece:
            for row in range(num_parts):
                for start in range(0, self._kept, self._piece):
                    yield slice(row, row + 1), slice(start, min(start + self._piece, self._kept))
            return
        num_rows = self._piece // self._kept
        for row in range(0, num_parts, num_rows):
            yield slice(row, min(row + num_rows, num_parts)), slice(0, self._kept)


def _codes(columns: slice) -> slice:
    return slice(columns.start // 2, columns.stop // 2)


def _blocks(columns: slice) -> slice:
    return slice(columns.start // INT4_BLOCK, columns.stop // INT4_BLOCK)


def _idle_ranges(record: Record, places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of a gradient that no parameter with a gradient and no padding behind it has.

    They hold whatever was in the lease before.
    """
    position = 0
    for place in sorted(places):
        slot = record.trainable_slots[place]
        if slot.offset > position:
            yield position, slot.offset
        position = slot.offset + record.padded(slot.num_elements)
    if position < record.num_trainable:
        yield position, record.num_trainable
