"""Tensors of which each rank has a part, made whole on all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from offloadzero.observe.collectives import tells_each
from offloadzero.ranks.group import Collectives


def gather_parts(channel: Collectives, whole: Tensor, parts: Mapping[int, Tensor], label: str) -> None:
    """Fill the host tensor `whole`, shape (n,), with the parts of all ranks, which have agreed that this is next.

    A few ranks send theirs one after the other. Of many ranks each adds its own to zeros, on which all work at once.

    Args:
        parts: views of `whole` which together are all of it, by the rank that has the values; without those of none.
    """
    if tells_each(channel.spec.world_size):
        for rank, part in parts.items():
            channel.broadcast(part, label, source=rank)
        return
    for rank, part in parts.items():
        if rank != channel.spec.rank:
            part.zero_()
    channel.all_reduce(whole.view(torch.uint8), label)
