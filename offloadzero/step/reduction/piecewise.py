"""The reduction of gradients in another dtype than their own: DeepSpeed's `communication_data_type`.

A gradient goes in pieces through memory of a constant size that the plan has: a copy of it in fp32 would take twice its
bytes on the device, and the largest unit may be a quarter of the model. Each piece has as many elements of each rank's
part, so every rank adds up the elements that it keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offloadzero.ranks.group import Group
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
