"""The reduction of gradients over the ranks, on the lane that takes them home."""

from __future__ import annotations

import torch
from torch import Tensor

from offloadzero.ranks.group import Group
from offloadzero.step.record_gradient import Brought
from offloadzero.step.reduction.coded import CodedReduce
from offloadzero.update.records import Record


class PiecewiseReduce:
    """Reduces gradients in `dtype`; used by one lane."""

    def __init__(self, group: Group, memory: Tensor, *, dtype: torch.dtype) -> None:
        """Use `memory`, uint8, on the device, of the largest `gradient_piece_bytes`."""
        self._group = group
        self._memory = memory.view(dtype)

    def reduce(self, record: Record, flat: Tensor) -> Tensor:
        """Return the mean over the ranks of this rank's part of `flat`, shape (num_trainable,), which is overwritten.

        Each rank divides what it sends, as DistributedDataParallel does. Where nothing is divided, this rank's part is
        all of it.
        """
        gradients, label = self._group.gradients, f"{record.name}.grad"
        num_parts = record.shard.world_size
        parts = flat.view(num_parts, -1)
        own = parts[record.shard.rank]
        num_columns = self._memory.numel() // num_parts
        for columns, kept in zip(parts.split(num_columns, 1), own.split(num_columns), strict=True):
            wire = self._memory[: columns.numel()]
            wire.view(columns.shape).copy_(columns)
            wire.div_(self._group.spec.world_size)
            if num_parts > 1:
                kept.copy_(gradients.reduce_scatter(wire, label))
            else:
                gradients.all_reduce(wire, label)
                kept.copy_(wire)
        return own


class Reduction:
    """Makes a gradient the mean over the ranks, in the form in which it goes between them; one rank's is that."""

    def __init__(
        self,
        group: Group,
        *,
        coded: CodedReduce,
        pieces: PiecewiseReduce | None,
        wire_dtype: torch.dtype | None,
    ) -> None:
        """Reduce over `group`.

        Args:
            coded: for gradients that go as codes.
            pieces: for gradients that are not `coded` and whose dtype is not `wire_dtype`; None: there are none.
            wire_dtype: that of what is not `coded`; None: the gradients' own.
        """
        self._group = group
        self._coded = coded
        self._pieces = pieces
        self._wire_dtype = wire_dtype

    def submit(self, record: Record) -> None:
        """Count a gradient that is given to the lane as the next one."""
        if record.is_reduced:
            self._group.reductions.note(record.index)

    def reduce(self, brought: Brought) -> Tensor:
        """Return this rank's part of the mean over the ranks; the gradient is overwritten.

        Each rank divides what it sends, as DistributedDataParallel does.
        """
        record, flat = brought.gradient.record, brought.flat
        if not record.is_reduced:
            return flat
        gradients, label = self._group.gradients, f"{record.name}.grad"
        gradients.begin_submitted()
        codes = self._coded.wire_of(record)
        if codes is not None:
            return self._coded.reduce(record, codes, flat, brought.places)
        if self._pieces is not None and self._wire_dtype != record.dtype:
            return self._pieces.reduce(record, flat)
        flat.div_(self._group.spec.world_size)
        if record.shard.world_size > 1:
            return gradients.reduce_scatter(flat, label)
        gradients.all_reduce(flat, label)
        return flat
