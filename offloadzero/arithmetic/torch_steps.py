"""Updates in torch operations on any device, piece by piece, in scratch that the caller gives; Adam's operations.

The sequences of operations are those of [Note: Adam arithmetic] and [Note: compact arithmetic] in
csrc/cpu_adam/cpu_adam.h, one torch operation for each of theirs, written into arrays of the scratch. Beside the scratch
a piece takes a few numbers per block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offloadzero.arithmetic.compact_math import (
    BITS_OF_2,
    INFINITY_BITS,
    MAGNITUDE,
    SIGN,
    CompactFactors,
    Workspace,
    code_dither,
    compact_factors,
    load,
    sqrt_,
)
from offloadzero.arithmetic.remainders import (
    LOST_BITS,
    join,
    join_bits,
    mask_in,
    round_high_bits,
    set_where_nan,
    split,
    take_low_bits,
)
from offloadzero.core.constants import COMPACT_BLOCK, SHIFT_M, SHIFT_S, num_scales
from offloadzero.native.hyper import StepScalars

FP32_SCRATCH_BYTES = 3 * 4  # per element of a piece with fp32 states: weights, gradient, one spare
COMPACT_SCRATCH_BYTES = 5 * 4 + 4 * 8  # per element of a piece with compact states


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


# --- Adam ---


def torch_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    scalars: StepScalars,
    step: int,
    master: Tensor | None,
    scales: Tensor | None,
    scratch: Tensor,
) -> None:
    """`native.kernels.adam_step`, or with `scales` `native.kernels.compact_adam_step`, in place.

    The flat tensors are of one device.

    Args:
        scratch: uint8 of at least COMPACT_BLOCK times the bytes per element above; its size is that of the pieces.
    """
    if scales is None:
        _adam_step(param, grad, exp_avg, exp_avg_sq, scalars=scalars, master=master, scratch=scratch)
    elif master is None:
        raise AssertionError("a compact state without remainder")
    else:
        _compact_adam_step(
            param, grad, master, exp_avg, exp_avg_sq, scales, scalars=scalars, step=step, scratch=scratch
        )


def _adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    scalars: StepScalars,
    master: Tensor | None,
    scratch: Tensor,
) -> None:
    for piece in fp32_pieces(param, grad, (exp_avg, exp_avg_sq), master=master, scratch=scratch):
        weights, t, (m, v) = piece.weights, piece.spare, piece.states
        g = piece.scaled_grad(scalars.grad_scale)
        if scalars.with_l2:
            g.add_(torch.mul(weights, scalars.weight_decay, out=t))
        else:
            weights.mul_(scalars.decay)
        m.mul_(scalars.beta1).add_(torch.mul(g, scalars.one_minus_beta1, out=t))
        v.mul_(scalars.beta2).add_(torch.mul(g, scalars.one_minus_beta2, out=t).mul_(g))
        sqrt_(t.copy_(v)).mul_(scalars.inv_sqrt_bias_correction2).add_(scalars.eps)
        weights.sub_(torch.mul(m, scalars.step_size, out=g).div_(t))


# --- compact ---


def _compact_adam_step(
    param: Tensor,
    grad: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    scalars: StepScalars,
    step: int,
    scratch: Tensor,
) -> None:
    factors = compact_factors(scalars)
    dither = code_dither(step, param.device)
    arrays = cut(scratch, (8, 8, 8, 8, 4, 4, 4, 4, 4))
    doubles = [array.view(torch.float64).view(-1, COMPACT_BLOCK) for array in arrays[:4]]
    floats = [array.view(torch.float32).view(-1, COMPACT_BLOCK) for array in arrays[4:]]
    for part in pieces(param.numel(), floats[0].numel()):
        scale_part = slice(num_scales(part.start), num_scales(part.stop))
        piece = _CompactPiece(
            param[part].view(torch.int16),
            grad[part],
            remainder_i8[part],
            exp_avg_i8[part],
            exp_avg_sq_u8[part],
            scales[scale_part].view(-1, 2),
        )
        spare = Workspace(*(array[: len(piece.scales)] for array in (*floats, *doubles)))
        _step_piece(piece, spare, scalars=scalars, factors=factors, dither=dither)


class _CompactPiece(NamedTuple):
    """Whole blocks of a record and its gradient (the record's end may be short); `scales` of shape (blocks, 2)."""

    param_i16: Tensor
    grad: Tensor
    remainder_i8: Tensor
    exp_avg_i8: Tensor
    exp_avg_sq_u8: Tensor
    scales: Tensor


def _step_piece(
    piece: _CompactPiece,
    spare: Workspace,
    *,
    scalars: StepScalars,
    factors: CompactFactors,
    dither: tuple[Tensor, Tensor],
) -> None:
    weights, g, m, s, t = spare[:5]
    scale_m, scale_s = (scale.unsqueeze(1) for scale in piece.scales.unbind(1))
    low = load(t.view(torch.int32), piece.remainder_i8)
    join_bits(load(weights.view(torch.int32), piece.param_i16), low, LOST_BITS[piece.remainder_i8.dtype])
    load(g, piece.grad)
    if scalars.with_l2:
        spare.fma(g, weights, scalars.weight_decay, torch.mul(g, scalars.grad_scale, out=t))
    _update_exp_avg(spare, load(m.view(torch.int32), piece.exp_avg_i8), scale_m * scalars.beta1, factors)
    _update_root(spare, load(s.view(torch.int32), piece.exp_avg_sq_u8), scale_s * scalars.sqrt_beta2, factors)
    spare.fma(t, s, factors.root, factors.floor)
    spare.fma(weights, weights, scalars.decay, torch.div(m, t, out=g).neg_())
    _store_weights(piece, spare)
    codes, scale = spare.encode_exp_avg(dither[0])
    _store(codes, piece.exp_avg_i8)
    scale_m.copy_(scale)
    codes, scale = spare.encode_root(dither[1])
    _store(codes, piece.exp_avg_sq_u8)
    scale_s.copy_(scale)


def _update_exp_avg(spare: Workspace, codes: Tensor, unit: Tensor, factors: CompactFactors) -> None:
    """Compute m = F * S + (g * grad_m - copysign(2 * S, F)), with the codes in m and S in `unit`."""
    expanded, minus_twice = spare.t.view(torch.int32), spare.s.view(torch.int32)
    torch.bitwise_and(codes, 0x7F, out=expanded).bitwise_left_shift_(SHIFT_M).bitwise_or_(BITS_OF_2)
    torch.bitwise_and(codes, SIGN, out=minus_twice)
    expanded.bitwise_or_(minus_twice)
    minus_twice.bitwise_or_((unit + unit).view(torch.int32)).bitwise_xor_(SIGN)
    spare.fma(spare.m, spare.g, factors.grad_m, spare.s)
    spare.fma(spare.m, spare.t, unit, spare.m)


def _update_root(spare: Workspace, codes: Tensor, unit: Tensor, factors: CompactFactors) -> None:
    """Compute s = sqrt((Y * R)^2 + (g * grad_s)^2), with the codes in s and R in `unit`; g is overwritten."""
    codes.bitwise_left_shift_(SHIFT_S).bitwise_or_(BITS_OF_2)
    # The note writes this as fma(G, R, -(2 * R)), which is Y(k) * R rounded once.
    root = spare.s.sub_(2.0).mul_(unit)
    from_grad = spare.g.mul_(factors.grad_s)
    sqrt_(spare.fma(spare.s, root, root, from_grad.mul_(from_grad)))


def _store_weights(piece: _CompactPiece, spare: Workspace) -> None:
    """Write the weights; those whose first moment is not finite become NaN."""
    magnitude = torch.bitwise_and(spare.m.view(torch.int32), MAGNITUDE, out=spare.t.view(torch.int32))
    is_lost = torch.ge(magnitude, INFINITY_BITS, out=mask_in(spare.g))
    spare.weights.masked_fill_(is_lost, math.nan)
    set_where_nan(spare.weights, spare.t)
    bits, low = spare.weights.view(torch.int32), spare.t.view(torch.int32)
    _store(take_low_bits(bits, dtype=piece.remainder_i8.dtype, spare=low), piece.remainder_i8)
    _store(round_high_bits(bits), piece.param_i16)


def _store(array: Tensor, target: Tensor) -> None:
    """Write elements into a record's segment; integers are cut to their low bits."""
    target.copy_(array.view(-1)[: target.numel()])
