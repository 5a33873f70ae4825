"""Adam on a device as one fused Triton kernel per state layout. No other file imports Triton.

[Note: the kernel's bits in Triton]
The operations are those of [Note: Adam arithmetic] and [Note: compact arithmetic] in csrc/cpu_adam/cpu_adam.h, in their
order. Four things would change bits:
- a product and a sum contracted to a fused multiply-add: `enable_fp_fusion` is off (the compact layout asks for its own
  by name);
- approximate quotients and roots: `div_rn` and `sqrt_rn` are correctly rounded;
- subnormal numbers flushed to zero, as Triton 3.4 does in just these two and later versions do not: the first try finds
  this out, [Note: forms of the update];
- a NaN rounded up to zero: a device's has all bits set, and half a unit more is -0. NaN gets the pattern of the host's
  before it is split.

One launch reads each byte of the record and of the gradient once and writes each byte of the record once, and needs no
memory of its own. The tensors' device is the calling thread's current one, as it is on a lane.
"""

# No `from __future__ import annotations`: Triton reads the annotations of its kernels.

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offloadzero.arithmetic.compact_math import (
    BITS_OF_1,
    BITS_OF_2,
    INFINITY_BITS,
    MAGNITUDE,
    SIGN,
    compact_factors,
    dither_phases,
)
from offloadzero.arithmetic.remainders import (
    COMPACT_REMAINDER_DTYPE,
    HALVES,
    LOST_BITS,
    REMAINDER_DTYPE,
    join_bits,
    low_bits,
    round_high_bits,
    round_low_bits,
)
from offloadzero.core.constants import (
    COMPACT_BLOCK,
    SHIFT_M,
    SHIFT_S,
    SMALLEST_SCALED,
    SPAN_M,
    SPAN_S,
)
from offloadzero.native.hyper import StepScalars

# Elements of one program: with 4 warps a thread has 8, which are 16 bytes of bf16.
ADAM_BLOCK = 1024
COMPACT_ROWS = 16  # blocks of COMPACT_BLOCK elements

_BLOCK = tl.constexpr(COMPACT_BLOCK)
_LOST, _HALF = (tl.constexpr(of[REMAINDER_DTYPE]) for of in (LOST_BITS, HALVES))
_LOST_COMPACT, _HALF_COMPACT = (tl.constexpr(of[COMPACT_REMAINDER_DTYPE]) for of in (LOST_BITS, HALVES))
_NAN_BITS = tl.constexpr(0x7FC00000)
_INFINITY_BITS = tl.constexpr(INFINITY_BITS)
_MAGNITUDE = tl.constexpr(MAGNITUDE)
_SIGN = tl.constexpr(SIGN)
_BITS_OF_1 = tl.constexpr(BITS_OF_1)
_BITS_OF_2 = tl.constexpr(BITS_OF_2)
_LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
_SMALLEST_SCALED = tl.constexpr(SMALLEST_SCALED)
_SHIFT_M, _SHIFT_S = tl.constexpr(SHIFT_M), tl.constexpr(SHIFT_S)
_HALF_M, _HALF_S = (
    tl.constexpr(1 << (SHIFT_M - 15)),
    tl.constexpr(1 << (SHIFT_S - 15)),
)  # of a dither's spacing
_SPAN_M, _SPAN_S = tl.constexpr(SPAN_M), tl.constexpr(SPAN_S)
# Triton rounds them to fp32.
_TO_SCALE_M, _TO_SCALE_S = tl.constexpr(0.5 / SPAN_M), tl.constexpr(0.5 / SPAN_S)


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    scalars: StepScalars,
    master: Tensor | None,
) -> None:
    """Launch one step on flat tensors in the fp32 layout, in place."""
    count = param.numel()
    if not count:
        return
    is_split = master is not None and master.dtype == REMAINDER_DTYPE
    _adam[(triton.cdiv(count, ADAM_BLOCK),)](
        param.view(torch.int16) if is_split else param,
        master,
        grad,
        exp_avg,
        exp_avg_sq,
        count,
        scalars.grad_scale,
        scalars.weight_decay if scalars.with_l2 else scalars.decay,
        scalars.beta1,
        scalars.one_minus_beta1,
        scalars.beta2,
        scalars.one_minus_beta2,
        scalars.eps,
        scalars.step_size,
        scalars.inv_sqrt_bias_correction2,
        IS_SPLIT=is_split,
        WITH_L2=scalars.with_l2,
        BLOCK=ADAM_BLOCK,
        enable_fp_fusion=False,
    )


def compact_adam_step(
    param: Tensor,
    grad: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    scalars: StepScalars,
    step: int,
) -> None:
    """Launch one step on flat tensors in the compact layout, in place."""
    count = param.numel()
    if not count:
        return
    factors = compact_factors(scalars)
    phase_m, phase_s = (phase - (phase >> 31 << 32) for phase in dither_phases(step))  # as signed numbers
    _compact_adam[(triton.cdiv(count, COMPACT_ROWS * COMPACT_BLOCK),)](
        param.view(torch.int16),
        grad,
        remainder_i8,
        exp_avg_i8,
        exp_avg_sq_u8,
        scales,
        count,
        phase_m,
        phase_s,
        scalars.grad_scale,
        scalars.weight_decay,
        scalars.beta1,
        scalars.sqrt_beta2,
        factors.grad_m,
        factors.grad_s,
        factors.root,
        factors.floor,
        scalars.decay,
        WITH_L2=scalars.with_l2,
        ROWS=COMPACT_ROWS,
        enable_fp_fusion=False,
    )


def _compiled(function: Callable[..., Tensor]) -> Any:
    """Return a function of [Note: one source for torch and Triton], in remainders.py, for kernels.

    Triton's interpreter looks for `tl` among its globals, which are this file's therefore.
    """
    return triton.jit(FunctionType(function.__code__, globals(), function.__name__))


_join_bits, _low_bits = _compiled(join_bits), _compiled(low_bits)
_round_low_bits, _round_high_bits = _compiled(round_low_bits), _compiled(round_high_bits)


@triton.jit
def _float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _fma(x, y, z):
    """Compute x * y + z rounded once, in fp32 also where an interpreter takes a subnormal argument for fp64."""
    return tl.fma(tl.cast(x, tl.float32), tl.cast(y, tl.float32), tl.cast(z, tl.float32))


@triton.jit
def _load_grad(grad, at, here):
    """Return the gradient in fp32. bf16 is its upper half; older interpreters take subnormal bf16 for zero."""
    x = tl.load(grad + at, mask=here, other=0.0)
    if x.dtype == tl.bfloat16:
        x = _float_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Return fp32 in a parameter's dtype, to nearest even; interpreters cut off the bits that bf16 lacks."""
    if dtype == tl.bfloat16:
        bits = _bits_of_weight(x)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _bits_of_weight(x):
    """Return the pattern of a weight: [Note: the kernel's bits in Triton]."""
    return tl.where(x != x, _NAN_BITS, _bits_of(x))


@triton.jit
def _adam(
    param,
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    num_elements,
    grad_scale,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    step_size,
    inv_sqrt_bias_correction2,
    IS_SPLIT: tl.constexpr,  # noqa: N803
    WITH_L2: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Do [Note: Adam arithmetic]; `decay` is the weights' factor, or with L2 the share of them in the gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < num_elements
    if IS_SPLIT:
        high = tl.load(param + at, mask=here, other=0).to(tl.int32)
        low = tl.load(master + at, mask=here, other=0).to(tl.int32)
        p = _float_of(_join_bits(high, low, _LOST))
    elif master is not None:
        p = tl.load(master + at, mask=here, other=0.0)
    else:
        p = tl.load(param + at, mask=here, other=0.0)
    g = _load_grad(grad, at, here) * grad_scale
    if WITH_L2:
        g = g + decay * p
    else:
        p = p * decay
    m = beta1 * tl.load(exp_avg + at, mask=here, other=0.0) + one_minus_beta1 * g
    v = beta2 * tl.load(exp_avg_sq + at, mask=here, other=0.0) + (one_minus_beta2 * g) * g
    denominator = tl.sqrt_rn(v) * inv_sqrt_bias_correction2 + eps
    p = p - tl.div_rn(step_size * m, denominator)
    tl.store(exp_avg + at, m, mask=here)
    tl.store(exp_avg_sq + at, v, mask=here)
    if IS_SPLIT:
        bits = _round_low_bits(_bits_of_weight(p), _HALF)
        tl.store(param + at, _round_high_bits(bits).to(tl.int16), mask=here)
        tl.store(master + at, _low_bits(bits, _LOST).to(tl.int16), mask=here)
    else:
        if master is not None:
            tl.store(master + at, p, mask=here)
        tl.store(param + at, _rounded(p, param.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["phase_m", "phase_s"])
def _compact_adam(
    param,
    grad,
    remainder,
    exp_avg,
    exp_avg_sq,
    scales,
    num_elements,
    phase_m,
    phase_s,
    grad_scale,
    weight_decay,
    beta1,
    sqrt_beta2,
    grad_m,
    grad_s,
    root,
    floor,
    decay,
    WITH_L2: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    """Do [Note: compact arithmetic]; a row is a block. The last may be short: zeros change no maximum."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, _BLOCK)
    at = row[:, None] * _BLOCK + place[None, :]
    here = at < num_elements
    row_here = row * _BLOCK < num_elements
    high = tl.load(param + at, mask=here, other=0).to(tl.int32)
    low = tl.load(remainder + at, mask=here, other=0).to(tl.int32)
    p = _float_of(_join_bits(high, low, _LOST_COMPACT))
    g = _load_grad(grad, at, here)
    if WITH_L2:
        g = _fma(weight_decay, p, g * grad_scale)

    scale_m = (beta1 * tl.load(scales + 2 * row, mask=row_here, other=0.0))[:, None]
    code = tl.load(exp_avg + at, mask=here, other=0).to(tl.int32)
    f = _float_of(((code & 0x7F) << _SHIFT_M) | _BITS_OF_2 | (code & _SIGN))
    twice = _float_of(_bits_of(scale_m + scale_m) | (code & _SIGN))
    m = _fma(f, scale_m, _fma(g, grad_m, _float_of(_bits_of(twice) ^ _SIGN)))

    scale_s = (sqrt_beta2 * tl.load(scales + 2 * row + 1, mask=row_here, other=0.0))[:, None]
    code = tl.load(exp_avg_sq + at, mask=here, other=0).to(tl.int32)
    twice = _float_of(_bits_of(scale_s + scale_s) ^ _SIGN)
    old_s = _fma(_float_of((code << _SHIFT_S) | _BITS_OF_2), scale_s, twice)
    t = g * grad_s
    s = tl.sqrt_rn(_fma(old_s, old_s, t * t))

    quotient = _bits_of(tl.div_rn(m, _fma(s, root, floor)))
    p = _fma(p, decay, _float_of(quotient ^ _SIGN))
    is_lost = (_bits_of(m) & _MAGNITUDE) >= _INFINITY_BITS
    bits = _round_low_bits(tl.where(is_lost, _NAN_BITS, _bits_of_weight(p)), _HALF_COMPACT)
    tl.store(param + at, _round_high_bits(bits).to(tl.int16), mask=here)
    tl.store(remainder + at, _low_bits(bits, _LOST_COMPACT).to(tl.int8), mask=here)

    codes, scale = _codes_m(m, place, phase_m)
    tl.store(exp_avg + at, codes.to(tl.int8), mask=here)
    tl.store(scales + 2 * row, scale, mask=row_here)
    codes, scale = _codes_s(s, place, phase_s)
    tl.store(exp_avg_sq + at, codes.to(tl.uint8), mask=here)
    tl.store(scales + 2 * row + 1, scale, mask=row_here)


@triton.jit
def _scale_and_inverse(largest, TO_SCALE: tl.constexpr, SPAN: tl.constexpr):  # noqa: N803
    scale = tl.where(largest < _SMALLEST_SCALED, 0.0, largest * TO_SCALE)
    at_least = tl.where(largest < _SMALLEST_SCALED, _SMALLEST_SCALED, largest)
    return scale, tl.div_rn(tl.full(largest.shape, SPAN, tl.float32), at_least)


@triton.jit
def _dither(start, phase, SHIFT: tl.constexpr, HALF: tl.constexpr):  # noqa: N803
    """Return the numbers below one code that are added to patterns: [Note: dithered codes]."""
    return ((((start << 25) + phase) >> 18 & 0x3FFF) << (SHIFT - 14)) + HALF


@triton.jit
def _codes_m(m, place, phase):
    """Return codes and scales of first moments; in a row with one that is not finite codes are 0, the scale is NaN."""
    largest_bits = tl.max(_bits_of(m) & _MAGNITUDE, axis=1)
    is_finite = largest_bits < _INFINITY_BITS
    scale, inverse = _scale_and_inverse(
        tl.where(is_finite, _float_of(largest_bits), 0.0), _TO_SCALE_M, _SPAN_M
    )
    m = tl.where(is_finite[:, None], m, 0.0)
    sign = _bits_of(m) & _SIGN
    y = _fma(m, inverse[:, None], _float_of(sign | _BITS_OF_1))
    # The place in 7 bits from the other end, shifted to the top.
    reversed_place = (place & 1) << 6 | (place & 2) << 4 | (place & 4) << 2 | (place & 8)
    reversed_place |= (place & 16) >> 2 | (place & 32) >> 4 | (place & 64) >> 6
    dither = _dither(reversed_place, phase, _SHIFT_M, _HALF_M)
    codes = ((_bits_of(y) & _MAGNITUDE) - _BITS_OF_1 + dither[None, :]) >> _SHIFT_M
    return codes | (sign >> 24 & 0x80), tl.where(
        is_finite, scale, _float_of(tl.full(scale.shape, _NAN_BITS, tl.int32))
    )


@triton.jit
def _codes_s(s, place, phase):
    """Return codes and scales of roots of second moments; in a row that holds NaN codes are 1, the scale is NaN."""
    largest_bits = tl.max(_bits_of(s) & _MAGNITUDE, axis=1)
    is_nan = largest_bits > _INFINITY_BITS
    largest = tl.where(is_nan, 0.0, _float_of(largest_bits))
    largest = tl.where(largest > _LARGEST_FLOAT, _LARGEST_FLOAT, largest)
    scale, inverse = _scale_and_inverse(largest, _TO_SCALE_S, _SPAN_S)
    s = tl.where(s > _LARGEST_FLOAT, _LARGEST_FLOAT, s)
    y = _fma(tl.where(is_nan[:, None], 0.0, s), inverse[:, None], 1.0)
    dither = _dither(place, phase, _SHIFT_S, _HALF_S)
    codes = (_bits_of(y) - _BITS_OF_1 + dither[None, :]) >> _SHIFT_S
    codes = tl.where(codes < 1, 1, codes)
    return codes, tl.where(is_nan, _float_of(tl.full(scale.shape, _NAN_BITS, tl.int32)), scale)
