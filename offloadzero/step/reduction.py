"""The reduction of gradients over the ranks, on the lane that takes them home."""

from __future__ import annotations

from torch import Tensor

from offloadzero.config import OffloadConfig
from offloadzero.ranks.group import Group
from offloadzero.step.coded_reduction import CodedReduce
from offloadzero.step.record_gradient import Brought
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES


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
