"""The compact state in torch operations, on any device: encode, decode and the Adam step (floor 4).

The format and the sequence of operations are those of [Note: compact state], [Note: compact arithmetic] and
[Note: dithered codes] in csrc/cpu_adam/cpu_adam.h, one torch operation for each of theirs, so the results are the
kernels' bits wherever fp32 multiply, add, divide and square root are correctly rounded, which they are on the CPU and
on CUDA. Only the sign and payload of a NaN are not defined.

[Note: fused multiply-add in fp64]
torch has no fma. The fp64 product of two fp32 numbers is exact; its sum with a third is rounded to odd (a last bit
that is even while something was cut off is made odd, towards what was cut off), and then to fp32. Rounding to odd
with at least two more bits than the target makes the second rounding the only one (Boldo and Melquiond, Emulation of
FMA and correctly rounded sums, 2008); the error of the sum is exact too (Knuth's TwoSum).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offloadzero.native.compact import COMPACT_BLOCK
from offloadzero.native.cpu_adam import AdamHyper, AdamScalars, adam_scalars

_LARGEST_FLOAT = torch.finfo(torch.float32).max
_SMALLEST_SCALED = 2.0**-100  # as largest magnitude of a block, and as step size
_BITS_OF_1, _BITS_OF_2 = 127 << 23, 128 << 23
_SPAN_M, _SPAN_S = 14.75, 2.984375  # y - 1 of the largest magnitude of a block
_SHIFT_M, _SHIFT_S = 18, 16  # mantissa bits of y below those of its code
_PIECE_ELEMENTS = 1 << 21  # of a step on the device: bounds its temporaries to some 250 MiB


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master weights of bf16 parameters and int8 remainders: a new tensor."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + (remainder.to(torch.int32) << 8)).view(
        torch.float32
    )


def split(weights: Tensor, param: Tensor, remainder: Tensor) -> None:
    """Write fp32 master weights as bf16 parameters and int8 remainders."""
    # Rounding a NaN of full payload up would make it zero.
    bits = torch.where(weights.isnan(), torch.nan, weights).view(torch.int32) + 0x80
    param.view(torch.int16).copy_((bits + 0x8000) >> 16)
    remainder.copy_((bits >> 8) & 0xFF)


def decode_exp_avg(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 first moments, shape (n,), of int8 codes (sign and magnitude), shape (n,), and one scale per block."""
    x = _expand(codes & 0x7F, _SHIFT_M) - 2.0
    return torch.where(codes < 0, -x, x) * _per_element(scale, codes.numel())


def decode_exp_avg_sq(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 second moments, shape (n,), of uint8 codes, shape (n,), and one scale per block."""
    s = (_expand(codes, _SHIFT_S) - 2.0) * _per_element(scale, codes.numel())
    return s * s


def encode_exp_avg(exp_avg: Tensor, *, dither: Tensor | int = 1 << (_SHIFT_M - 1)) -> tuple[Tensor, Tensor]:
    """int8 codes, shape (n,), and scales, one per block, of fp32 first moments, shape (n,).

    `dither`, int32 of shape (COMPACT_BLOCK,), decides which codes are rounded up; without it, the nearest are taken.
    """
    m = _blocks(exp_avg)
    magnitude = torch.where(m.isfinite(), m.abs(), torch.nan)
    codes, scale = _encode(magnitude, span=_SPAN_M, shift=_SHIFT_M, dither=dither)
    is_negative = m.signbit() & ~scale.isnan()
    codes = torch.where(is_negative, codes + 0x80, codes).to(torch.uint8).view(torch.int8)
    return codes.flatten()[: exp_avg.numel()], scale.flatten()


def encode_exp_avg_sq(root: Tensor, *, dither: Tensor | int = 1 << (_SHIFT_S - 1)) -> tuple[Tensor, Tensor]:
    """uint8 codes, shape (n,), and scales, one per block, of the square roots of second moments, shape (n,).

    `dither` is as for `encode_exp_avg`.
    """
    magnitude = _blocks(root).abs().clamp(max=_LARGEST_FLOAT)
    codes, scale = _encode(magnitude, span=_SPAN_S, shift=_SHIFT_S, dither=dither)
    return codes.clamp(min=1).to(torch.uint8).flatten()[: root.numel()], scale.flatten()


def sqrt(values: Tensor) -> Tensor:
    """Correctly rounded fp32 square root: torch's vectorised one on the CPU is not."""
    return values.sqrt() if values.device.type == "cuda" else values.double().sqrt().float()


def code_dither(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a step adds to the patterns of exp_avg and exp_avg_sq: int32, each of shape (COMPACT_BLOCK,)."""
    place = torch.arange(COMPACT_BLOCK, device=device)
    reversed_bits = torch.zeros_like(place)
    for bit in range(7):
        reversed_bits |= (place >> bit & 1) << (6 - bit)

    def dither(start: Tensor, increment: int, shift: int) -> Tensor:
        phase = ((start << 25) + step * increment % 2**32) % 2**32
        return (((phase >> 18) * 2 + 1) << (shift - 15)).to(torch.int32)

    return dither(reversed_bits, 0x9E3779B9, _SHIFT_M), dither(place, 0x6A09E667, _SHIFT_S)


class _Factors(NamedTuple):
    """What a call multiplies with: fp32 numbers made of those of AdamScalars in fp32."""

    grad_m: float
    grad_s: float
    root: float
    floor: float


def _factors(scalars: AdamScalars, *, with_l2: bool) -> _Factors:
    grad_scale = 1.0 if with_l2 else scalars.grad_scale
    root, floor = scalars.inv_sqrt_bias_correction2, math.inf
    if scalars.step_size >= _SMALLEST_SCALED:
        root, floor = root / scalars.step_size, scalars.eps / scalars.step_size
    exact = (scalars.one_minus_beta1 * grad_scale, scalars.sqrt_one_minus_beta2 * grad_scale, root, floor)
    # One rounding: doubles hold such products, and quotients with more than twice the bits.
    return _Factors(*torch.tensor(exact, dtype=torch.float64).float().tolist())


def torch_compact_adam_step(
    param: Tensor,
    grad: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    hyper: AdamHyper,
    step: int,
    grad_scale: float,
) -> None:
    """`native.compact.compact_adam_step`, in place on flat tensors of one device."""
    scalars = adam_scalars(hyper, step=step, grad_scale=grad_scale)
    with_l2 = hyper.weight_decay != 0.0 and not hyper.decoupled
    factors = _factors(scalars, with_l2=with_l2)
    dither = code_dither(step, param.device)
    pieces = (
        tensor.split(_PIECE_ELEMENTS) for tensor in (param, grad, remainder_i8, exp_avg_i8, exp_avg_sq_u8)
    )
    scale_pieces = scales.split(_PIECE_ELEMENTS // COMPACT_BLOCK * 2)
    for piece in zip(*pieces, scale_pieces, strict=True):
        _step_piece(*piece, scalars=scalars, factors=factors, dither=dither, with_l2=with_l2)


def _step_piece(
    param: Tensor,
    grad: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    scalars: AdamScalars,
    factors: _Factors,
    dither: tuple[Tensor, Tensor],
    with_l2: bool,
) -> None:
    scale_m, scale_s = scales.view(-1, 2).unbind(1)
    count = param.numel()
    weights = join(param, remainder_i8)
    g = grad.float()
    if with_l2:
        g = fma(weights, scalars.weight_decay, g * scalars.grad_scale)
    expanded, unit = _expand(exp_avg_i8 & 0x7F, _SHIFT_M), _per_element(scale_m * scalars.beta1, count)
    expanded = torch.where(exp_avg_i8 < 0, -expanded, expanded)
    m = fma(expanded, unit, fma(g, factors.grad_m, -torch.copysign(unit * 2.0, expanded)))
    # What the note writes as fma(G, R, -(2 * R)): Y(k) * R rounded once.
    s = (_expand(exp_avg_sq_u8, _SHIFT_S) - 2.0) * _per_element(scale_s * scalars.sqrt_beta2, count)
    from_grad = g * factors.grad_s
    s = sqrt(fma(s, s, from_grad * from_grad))
    weights = fma(weights, scalars.decay, -(m / fma(s, factors.root, factors.floor)))
    codes_m, new_scale_m = encode_exp_avg(m, dither=dither[0])
    codes_s, new_scale_s = encode_exp_avg_sq(s, dither=dither[1])
    split(torch.where(m.isfinite(), weights, torch.nan), param, remainder_i8)
    exp_avg_i8.copy_(codes_m)
    exp_avg_sq_u8.copy_(codes_s)
    scale_m.copy_(new_scale_m)
    scale_s.copy_(new_scale_s)


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c rounded once, of fp32 numbers: [Note: fused multiply-add in fp64]."""
    addend = c.double() if isinstance(c, Tensor) else c
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    # Away from zero is up in the bits; nothing is cut off (or is NaN) where neither comparison holds.
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    is_cut = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    return torch.where(is_cut, bits + towards, bits).view(torch.float64).float()


def _expand(codes: Tensor, shift: int) -> Tensor:
    """2 + X(c), or 2 + Y(c), of codes c >= 0: F and G of [Note: compact arithmetic]."""
    return ((codes.to(torch.int32) << shift) + _BITS_OF_2).view(torch.float32)


def _encode(magnitude: Tensor, *, span: float, shift: int, dither: Tensor | int) -> tuple[Tensor, Tensor]:
    """int32 codes and scales, shape (rows, 1), of finite magnitudes or NaN in rows of one block."""
    largest = _largest_bits(magnitude)
    is_nan = largest.isnan()
    magnitude, largest = (torch.where(is_nan, 0.0, values) for values in (magnitude, largest))
    # Not span / largest: torch takes the reciprocal first, and rounds twice.
    inverse = torch.full_like(largest, span) / largest.clamp(min=_SMALLEST_SCALED)
    codes = (fma(magnitude, inverse, 1.0).view(torch.int32) - _BITS_OF_1 + dither) >> shift
    to_scale = float(torch.tensor(0.5 / span, dtype=torch.float32))
    scale = torch.where(largest >= _SMALLEST_SCALED, largest * to_scale, 0.0)
    return codes, torch.where(is_nan, torch.nan, scale)


def _per_element(scale: Tensor, num_elements: int) -> Tensor:
    return scale.repeat_interleave(COMPACT_BLOCK)[:num_elements]


def _blocks(values: Tensor) -> Tensor:
    """The values in rows of one block, the last filled up with zeros."""
    return F.pad(values, (0, -values.numel() % COMPACT_BLOCK)).view(-1, COMPACT_BLOCK)


def _largest_bits(values: Tensor) -> Tensor:
    """Of values >= 0, the largest pattern of each row: NaN is above all. Shape (rows, 1)."""
    return values.view(torch.int32).amax(1, keepdim=True).view(torch.float32)
