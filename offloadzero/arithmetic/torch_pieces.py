"""The pieces in which updates in torch operations go through a record, in scratch that the caller gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offloadzero.arithmetic.remainders import join, split
from offloadzero.core.constants import COMPACT_BLOCK

FP32_SCRATCH_BYTES = 3 * 4  # per element of a piece with fp32 states: weights, gradient, one spare


class Fp32Piece(NamedTuple):
    """Elements of a record with fp32 states, and room for their update."""

    weights: Tensor  # fp32 master weights; the step leaves the new ones here, which are written back
    states: tuple[Tensor, ...]  # to be written in place
    spare: Tensor  # a part of the scratch
    given_grad: Tensor  # in its own dtype, not to be written
    grad: Tensor  # a part of the scratch

    def scaled_grad(self, grad_scale: float) -> Tensor:
        """Return the gradient in fp32 times `grad_scale`, in the memory of `grad`."""
        return self.grad.copy_(self.given_grad).mul_(grad_scale)


def fp32_pieces(
    param: Tensor, grad: Tensor, states: Sequence[Tensor], *, master: Tensor | None, scratch: Tensor
) -> Iterator[Fp32Piece]:
    """Yield the pieces of flat tensors of one device; the weights of one are written when the next is asked for.

    Args:
        scratch: uint8 of at least COMPACT_BLOCK * FP32_SCRATCH_BYTES; its size is that of the pieces.
    """
    arrays = [array.view(torch.float32) for array in cut(scratch, (4, 4, 4))]
    for part in pieces(param.numel(), arrays[0].numel()):
        weights, g, spare = (array[: part.stop - part.start] for array in arrays)
        piece_master = None if master is None else master[part]
        join(weights, param[part], piece_master, spare=spare)
        yield Fp32Piece(weights, tuple(state[part] for state in states), spare, grad[part], g)
        split(weights, param[part], piece_master, spare=spare)


def cut(scratch: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Cut the scratch into arrays of so many bytes per element, for as many whole blocks as fit."""
    num_elements = scratch.numel() // sum(sizes) // COMPACT_BLOCK * COMPACT_BLOCK
    if not num_elements:
        raise AssertionError(f"{scratch.numel()} bytes of scratch hold no block of {COMPACT_BLOCK} elements")
    return list(scratch[: num_elements * sum(sizes)].split([num_elements * size for size in sizes]))


def pieces(num_elements: int, piece_elements: int) -> Iterator[slice]:
    """Yield ranges of at most `piece_elements`."""
    for start in range(0, num_elements, piece_elements):
        yield slice(start, min(start + piece_elements, num_elements))
