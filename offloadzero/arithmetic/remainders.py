"""The fp32 master weights of parameters in torch operations: joined of a parameter and its remainder, and split again.

The formats are [Note: bf16 split] and [Note: compact remainder] in csrc/cpu_adam/remainders.h, which has the host
kernels' own forms.

[Note: one source for torch and Triton]
Four functions consist of operators alone, and `triton.jit` compiles them into the fused kernels (triton_adam.py) as
they stand. Their augmented assignments write into the memory of a tensor; in Triton, where no value is changed, into a
name of the function's own, so that only what they return counts. Triton evaluates annotations: their types are in
comments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

REMAINDER_DTYPE = torch.int16
COMPACT_REMAINDER_DTYPE = torch.int8
# The dtype of the rest of a master weight in the fp32 layout, by the dtype of the parameter.
MASTER_DTYPES: Mapping[torch.dtype, torch.dtype | None] = MappingProxyType(
    {
        torch.bfloat16: REMAINDER_DTYPE,
        torch.float16: torch.float32,
        torch.float32: None,
    }
)

# Lowest bits of the fp32 pattern that are lost, by the dtype of the remainder.
LOST_BITS = {REMAINDER_DTYPE: 0, COMPACT_REMAINDER_DTYPE: 8}
HALVES = {
    dtype: 1 << lost_bits >> 1 for dtype, lost_bits in LOST_BITS.items()
}  # to round to the bits that stay


def join(weights: Tensor, param: Tensor, master: Tensor | None, *, spare: Tensor) -> None:
    """Write the fp32 master weights of a record's parameter and its remainder, or of its fp32 ones."""
    if master is None or master.dtype == torch.float32:
        weights.copy_(param if master is None else master)
        return
    bits = weights.view(torch.int32).copy_(param.view(torch.int16))
    join_bits(bits, spare.view(torch.int32).copy_(master), LOST_BITS[master.dtype])


def split(weights: Tensor, param: Tensor, master: Tensor | None, *, spare: Tensor) -> None:
    """Write fp32 master weights into a record's parameter and master; `weights` is overwritten. NaN stays NaN."""
    if master is None or master.dtype == torch.float32:
        if master is not None:
            master.copy_(weights)
        param.copy_(weights)
        return
    set_where_nan(weights, spare)
    bits = weights.view(torch.int32)
    master.copy_(take_low_bits(bits, dtype=master.dtype, spare=spare.view(torch.int32)))
    param.view(torch.int16).copy_(round_high_bits(bits))


# --- [Note: one source for torch and Triton] ---


def join_bits(high, low, lost_bits):
    # type: (Tensor, Tensor, int) -> Tensor
    """Return the patterns of master weights, of those of bf16 parameters and of remainders that have lost some bits.

    All are int32. The patterns are made in `high`; `low` is overwritten.
    """
    if lost_bits:
        low <<= lost_bits
    high <<= 16
    high += low
    return high


def round_low_bits(bits, half):
    # type: (Tensor, int) -> Tensor
    """Return patterns of master weights rounded to the bits that remainders keep, in the memory of `bits`.

    `half` is that of the lost bits, HALVES.
    """
    if half:
        bits += half
    return bits


def low_bits(bits, lost_bits):
    # type: (Tensor, int) -> Tensor
    """Return int32 numbers whose low bits are the remainders of rounded patterns."""
    return bits >> lost_bits if lost_bits else bits


def round_high_bits(bits):
    # type: (Tensor) -> Tensor
    """Return the int32 patterns of bf16 parameters of rounded patterns, in the memory of `bits`."""
    bits += 0x8000
    bits >>= 16
    return bits


# --- in torch operations ---


def take_low_bits(bits: Tensor, *, dtype: torch.dtype, spare: Tensor) -> Tensor:
    """Return int32 numbers whose low bits are the remainders of `dtype`; `bits`, patterns of weights, are rounded.

    They are `bits` or in `spare`, to be stored before `round_high_bits`.
    """
    lost_bits = LOST_BITS[dtype]
    round_low_bits(bits, HALVES[dtype])
    return torch.bitwise_right_shift(bits, lost_bits, out=spare) if lost_bits else bits


def shortened(remainder_i16: Tensor) -> Tensor:
    """Return the int8 remainders of int16 ones, for parameters that keep their value, as int32.

    So they are cut off at 127: the master weight is off by at most 2^7 spacings of fp32, or 2^8 in the 1 of 512 weights
    that lie that near to the next bf16 number.
    """
    rounded = remainder_i16.to(torch.int32) + HALVES[COMPACT_REMAINDER_DTYPE]
    return (rounded >> LOST_BITS[COMPACT_REMAINDER_DTYPE]).clamp(max=127)


def lengthened(remainder_i8: Tensor) -> Tensor:
    """Return the int16 remainders of int8 ones, exactly."""
    return remainder_i8.to(torch.int16) << LOST_BITS[COMPACT_REMAINDER_DTYPE]


def set_where_nan(weights: Tensor, spare: Tensor) -> None:
    """Give NaN the host's bit pattern: a device's has all bits set, and becomes zero when it is rounded up."""
    weights.masked_fill_(torch.ne(weights, weights, out=mask_in(spare)), math.nan)


def mask_in(spare: Tensor) -> Tensor:
    """Return a bool per element of an fp32 array, in the array's memory."""
    return spare.flatten().view(torch.bool)[: spare.numel()].view(spare.shape)
