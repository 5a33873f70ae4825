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

import torch
import torch.nn.functional as F
from torch import Tensor

from offloadzero.native.compact import COMPACT_BLOCK
from offloadzero.native.cpu_adam import AdamHyper, AdamScalars, adam_scalars

_INFINITY_BITS = 0x7F800000
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_SMALLEST_FLOAT = 2.0**-149
_COMPAND_LIMIT_BITS = (119 + 127) << 23  # the pattern of 2^119
_ONE_255TH = float(torch.tensor(1.0) / 255.0)
_PIECE_ELEMENTS = 1 << 22  # of a step on the device: bounds its temporaries to some 300 MiB
_ROUNDER = 1.5 * 2.0**23  # adding it leaves x rounded to an integer in the low bits


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
    """fp32 first moments, shape (n,), of int8 codes, shape (n,), and one scale per block."""
    return _expand(codes) * _per_element(scale, codes.numel())


def decode_exp_avg_sq(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 second moments, shape (n,), of uint8 codes, shape (n,), and one scale per block."""
    s = codes.float() * _per_element(scale, codes.numel())
    return s * s


def encode_exp_avg(
    exp_avg: Tensor, *, beside: Tensor | None = None, dither: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """int8 codes, shape (n,), and scales, one per block, of fp32 first moments, shape (n,).

    `beside` are the square roots of the second moments, if they are encoded with the first: the kernel rounds both
    moments of a block the long way when one of them needs it. `dither`, shape (COMPACT_BLOCK,), is added to the codes
    before they are rounded.
    """
    m = _blocks(exp_avg)
    largest = _largest_bits(m.abs())
    finite = largest.view(torch.int32) < _INFINITY_BITS
    # The long way, where 254 m or largest + |m| would overflow or an element is not finite: by the quotient.
    is_long = largest.view(torch.int32) >= _COMPAND_LIMIT_BITS
    if beside is not None:
        is_long |= ~_blocks(beside).isfinite().all(1, keepdim=True)
    x = torch.where(finite & (largest > 0), m / largest, 0.0)
    by_quotient = (x * 254.0) / (x.abs() + 1.0)
    q = (m * 254.0) / (torch.where(largest > 0, largest, _SMALLEST_FLOAT) + m.abs())
    codes = _nearest(torch.where(is_long, by_quotient, q) + dither).to(torch.uint8).view(torch.int8)
    return codes.flatten()[: exp_avg.numel()], torch.where(finite, largest, torch.nan).flatten()


def encode_exp_avg_sq(root: Tensor, *, dither: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """uint8 codes, shape (n,), and scales, one per block, of the square roots of second moments, shape (n,).

    `dither` is as for `encode_exp_avg`.
    """
    s = _blocks(root)
    largest = _largest_bits(s)
    largest = torch.where(largest.isnan(), largest, largest.clamp(max=_LARGEST_FLOAT))
    # Not 255.0 / largest: torch takes the reciprocal first, and rounds twice.
    inverse = torch.where(largest > 0, torch.full_like(largest, 255.0) / largest, 0.0)
    code = torch.where(s > _LARGEST_FLOAT, 255.0, s * inverse)
    codes = _nearest(torch.where(largest.isnan(), 0.0, code) + dither).clamp(min=1).to(torch.uint8)
    return codes.flatten()[: root.numel()], (largest * _ONE_255TH).flatten()


def sqrt(values: Tensor) -> Tensor:
    """Correctly rounded fp32 square root: torch's vectorised one on the CPU is not."""
    return values.sqrt() if values.device.type == "cuda" else values.double().sqrt().float()


def code_dither(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a step adds to the codes of exp_avg and exp_avg_sq: fp32, each of shape (COMPACT_BLOCK,)."""
    place = torch.arange(COMPACT_BLOCK, device=device)
    reversed_bits = torch.zeros_like(place)
    for bit in range(7):
        reversed_bits |= (place >> bit & 1) << (6 - bit)

    def dither(start: Tensor, increment: int) -> Tensor:
        phase = ((start << 25) + step * increment % 2**32) % 2**32
        return ((phase >> 18) * 2 + 1 - 2**14).float() * 2.0**-15

    return dither(reversed_bits, 0x9E3779B9), dither(place, 0x6A09E667)


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
    dither = code_dither(step, param.device)
    with_l2 = hyper.weight_decay != 0.0 and not hyper.decoupled
    pieces = (
        tensor.split(_PIECE_ELEMENTS) for tensor in (param, grad, remainder_i8, exp_avg_i8, exp_avg_sq_u8)
    )
    scale_pieces = scales.split(_PIECE_ELEMENTS // COMPACT_BLOCK * 2)
    for piece in zip(*pieces, scale_pieces, strict=True):
        _step_piece(*piece, scalars=scalars, dither=dither, with_l2=with_l2)


def _step_piece(
    param: Tensor,
    grad: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    scalars: AdamScalars,
    dither: tuple[Tensor, Tensor],
    with_l2: bool,
) -> None:
    scale_m, scale_s = scales.view(-1, 2).unbind(1)
    count = param.numel()
    weights = join(param, remainder_i8)
    g = grad.float() * scalars.grad_scale
    if with_l2:
        g = fma(weights, scalars.weight_decay, g)
    m = fma(_expand(exp_avg_i8), _per_element(scale_m * scalars.beta1, count), g * scalars.one_minus_beta1)
    old_s = exp_avg_sq_u8.float() * _per_element(scale_s * scalars.sqrt_beta2, count)
    s = sqrt(fma(old_s, old_s, (g * scalars.one_minus_beta2) * g))
    denominator = fma(s, scalars.inv_sqrt_bias_correction2, scalars.eps)
    weights = fma(weights, scalars.decay, -((m * scalars.step_size) / denominator))
    codes_m, new_scale_m = encode_exp_avg(m, beside=s, dither=dither[0])
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


def _expand(codes: Tensor) -> Tensor:
    q = codes.float()
    return q / (254.0 - q.abs())


def _per_element(scale: Tensor, num_elements: int) -> Tensor:
    return scale.repeat_interleave(COMPACT_BLOCK)[:num_elements]


def _blocks(values: Tensor) -> Tensor:
    """The values in rows of one block, the last filled up with zeros."""
    return F.pad(values, (0, -values.numel() % COMPACT_BLOCK)).view(-1, COMPACT_BLOCK)


def _largest_bits(values: Tensor) -> Tensor:
    """Of values >= 0, the largest pattern of each row: NaN is above all. Shape (rows, 1)."""
    return values.view(torch.int32).amax(1, keepdim=True).view(torch.float32)


def _nearest(x: Tensor) -> Tensor:
    """x rounded to the nearest even integer, modulo 256, as int32; |x| < 2^22."""
    return (x + _ROUNDER).view(torch.int32) & 0xFF
