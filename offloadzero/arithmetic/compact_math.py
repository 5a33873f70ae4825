"""The compact state in torch operations, on any device: encoding, decoding, and the pieces of a step.

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
from torch import Tensor

from offloadzero.core.constants import (
    COMPACT_BLOCK,
    DITHER_STEP_M,
    DITHER_STEP_S,
    SHIFT_M,
    SHIFT_S,
    SMALLEST_SCALED,
    SPAN_M,
    SPAN_S,
)
from offloadzero.native.hyper import StepScalars

_LARGEST_FLOAT = torch.finfo(torch.float32).max
SIGN, MAGNITUDE, INFINITY_BITS = -(1 << 31), (1 << 31) - 1, 255 << 23  # of fp32 patterns
BITS_OF_1, BITS_OF_2 = 127 << 23, 128 << 23


def decode_exp_avg(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the fp32 first moments, shape (n,), of int8 codes (sign and magnitude), and a scale per block."""
    x = _expand(codes & 0x7F, SHIFT_M) - 2.0
    return torch.where(codes < 0, -x, x) * _per_element(scale, codes.numel())


def decode_exp_avg_sq(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the fp32 second moments, shape (n,), of uint8 codes, and a scale per block."""
    s = (_expand(codes, SHIFT_S) - 2.0) * _per_element(scale, codes.numel())
    return s * s


def encode_exp_avg(exp_avg: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest int8 codes, shape (n,), and scales, one per block, of fp32 first moments, shape (n,)."""
    spare = Workspace.allocate(exp_avg)
    load(spare.m, exp_avg)
    codes, scale = spare.encode_exp_avg(1 << (SHIFT_M - 1))
    return codes.flatten()[: exp_avg.numel()].to(torch.uint8).view(torch.int8), scale.flatten()


def encode_exp_avg_sq(root: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest uint8 codes and the scales, one per block, of roots of second moments; shapes are (n,)."""
    spare = Workspace.allocate(root)
    load(spare.s, root)
    codes, scale = spare.encode_root(1 << (SHIFT_S - 1))
    return codes.flatten()[: root.numel()].to(torch.uint8), scale.flatten()


def sqrt(values: Tensor) -> Tensor:
    """Return the correctly rounded fp32 square root; torch's vectorised one on the CPU is not."""
    return sqrt_(values.clone())


def sqrt_(values: Tensor) -> Tensor:
    """Compute `sqrt` in place; on the CPU, where only tests take it, by way of fp64."""
    return values.sqrt_() if values.device.type != "cpu" else values.copy_(values.double().sqrt_())


def code_dither(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The int32 numbers that a step adds to the patterns of exp_avg and exp_avg_sq, each of shape (COMPACT_BLOCK,)."""
    place = torch.arange(COMPACT_BLOCK, device=device)
    reversed_bits = torch.zeros_like(place)
    for bit in range(7):
        reversed_bits |= (place >> bit & 1) << (6 - bit)

    def dither(start: Tensor, phase: int, shift: int) -> Tensor:
        moved = ((start << 25) + phase) % 2**32
        return (((moved >> 18) * 2 + 1) << (shift - 15)).to(torch.int32)

    phase_m, phase_s = dither_phases(step)
    return dither(reversed_bits, phase_m, SHIFT_M), dither(place, phase_s, SHIFT_S)


def dither_phases(step: int) -> tuple[int, int]:
    """The begin of a step's dithers of exp_avg and exp_avg_sq, modulo 2^32: [Note: dithered codes]."""
    return step * DITHER_STEP_M % 2**32, step * DITHER_STEP_S % 2**32


class CompactFactors(NamedTuple):
    """The factors of a step: fp32 numbers made from those of StepScalars in fp32."""

    grad_m: float
    grad_s: float
    root: float
    floor: float


def compact_factors(scalars: StepScalars) -> CompactFactors:
    """Compute the `per call` part of [Note: compact arithmetic]."""
    grad_scale = 1.0 if scalars.with_l2 else scalars.grad_scale
    root, floor = scalars.inv_sqrt_bias_correction2, math.inf
    if scalars.step_size >= SMALLEST_SCALED:
        root, floor = root / scalars.step_size, scalars.eps / scalars.step_size
    exact = (scalars.one_minus_beta1 * grad_scale, scalars.sqrt_one_minus_beta2 * grad_scale, root, floor)
    # Rounded once: doubles hold such products exactly, and quotients with more than twice the bits.
    return CompactFactors(*torch.tensor(exact, dtype=torch.float64, device="cpu").float().tolist())


class Workspace(NamedTuple):
    """Arrays for so many blocks, shape (blocks, COMPACT_BLOCK): five of fp32, and four of fp64 for `fma`."""

    weights: Tensor
    g: Tensor
    m: Tensor
    s: Tensor
    t: Tensor
    d0: Tensor
    d1: Tensor
    d2: Tensor
    d3: Tensor

    @staticmethod
    def allocate(values: Tensor) -> Workspace:
        """Allocate the arrays on the device of flat `values`, for their number."""
        shape = (-(-values.numel() // COMPACT_BLOCK), COMPACT_BLOCK)
        dtypes = (*[torch.float32] * 5, *[torch.float64] * 4)
        return Workspace(*(torch.empty(shape, dtype=dtype, device=values.device) for dtype in dtypes))

    def fma(self, out: Tensor, a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
        """Compute out = a * b + c rounded once: [Note: fused multiply-add in fp64]. `out` may be one of the others."""
        d0, d1, total, d3 = self.d0, self.d1, self.d2, self.d3
        product = d0.copy_(a)
        product.mul_(d1.copy_(b) if isinstance(b, Tensor) else b)
        addend = d1.copy_(c) if isinstance(c, Tensor) else d1.fill_(c)
        torch.add(product, addend, out=total)
        back = torch.sub(total, product, out=d3)
        addend.sub_(back)
        error = product.sub_(torch.sub(total, back, out=d3)).add_(addend)
        # In the bits, away from zero is up. The error of a number that is not finite is NaN.
        towards = error.sign_().mul_(torch.sign(total, out=d1)).nan_to_num_(0.0)
        bits, is_even = total.view(torch.int64), d3.view(torch.int64)
        torch.bitwise_and(bits, 1, out=is_even).bitwise_xor_(1)
        bits.add_(d1.view(torch.int64).copy_(towards).mul_(is_even))
        return out.copy_(total)

    def encode_exp_avg(self, dither: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return codes of `m` as int32 in the low 8 bits and scales, shape (blocks, 1); `m`, `g` and `t` are lost.

        In a block with a number that is not finite codes are 0, the scale is NaN. `dither`, int32 of (COMPACT_BLOCK,),
        decides which codes are rounded up.
        """
        m_bits, signs, codes = (array.view(torch.int32) for array in (self.m, self.g, self.t))
        largest_bits = torch.bitwise_and(m_bits, MAGNITUDE, out=codes).amax(1, keepdim=True)
        is_lost = largest_bits >= INFINITY_BITS
        self.m.masked_fill_(is_lost, 0.0)
        largest = largest_bits.view(torch.float32).masked_fill(is_lost, 0.0)
        torch.bitwise_and(m_bits, SIGN, out=signs).bitwise_or_(BITS_OF_1)
        self.fma(self.t, self.m, _inverse(largest, SPAN_M), self.g)
        codes.bitwise_and_(MAGNITUDE).sub_(BITS_OF_1).add_(dither).bitwise_right_shift_(SHIFT_M)
        codes.bitwise_or_(signs.bitwise_right_shift_(24).bitwise_and_(0x80))
        return codes, _scale(largest, SPAN_M).masked_fill(is_lost, math.nan)

    def encode_root(self, dither: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return codes of `s`, roots of second moments, as int32 and scales, shape (blocks, 1); `s` and `t` are lost.

        In a block that holds NaN the codes are 1 and the scale is NaN. `dither` is as for `encode_exp_avg`.
        """
        codes = self.t.view(torch.int32)
        largest_bits = torch.bitwise_and(self.s.view(torch.int32), MAGNITUDE, out=codes).amax(1, keepdim=True)
        is_lost = largest_bits > INFINITY_BITS
        largest = largest_bits.view(torch.float32).masked_fill(is_lost, 0.0).clamp_(max=_LARGEST_FLOAT)
        self.s.masked_fill_(is_lost, 0.0).clamp_(max=_LARGEST_FLOAT)
        self.fma(self.t, self.s, _inverse(largest, SPAN_S), 1.0)
        codes.sub_(BITS_OF_1).add_(dither).bitwise_right_shift_(SHIFT_S).clamp_(min=1)
        return codes, _scale(largest, SPAN_S).masked_fill(is_lost, math.nan)


def load(array: Tensor, source: Tensor) -> Tensor:
    """Write flat elements into an array of whole blocks, and zeros up to the end of the last."""
    flat = array.view(-1)
    flat[: source.numel()].copy_(source)
    flat[source.numel() :].zero_()
    return array


def _inverse(largest: Tensor, span: float) -> Tensor:
    # span / largest would round twice: torch takes the reciprocal first.
    return torch.full_like(largest, span) / largest.clamp(min=SMALLEST_SCALED)


def _scale(largest: Tensor, span: float) -> Tensor:
    to_scale = float(torch.tensor(0.5 / span, dtype=torch.float32, device="cpu"))
    return (largest * to_scale).masked_fill(largest < SMALLEST_SCALED, 0.0)


def _expand(codes: Tensor, shift: int) -> Tensor:
    """Return 2 + X(c), or 2 + Y(c), of codes c >= 0: F and G of [Note: compact arithmetic]."""
    return ((codes.to(torch.int32) << shift) + BITS_OF_2).view(torch.float32)


def _per_element(scale: Tensor, num_elements: int) -> Tensor:
    return scale.repeat_interleave(COMPACT_BLOCK)[:num_elements]
