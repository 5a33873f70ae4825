"""The compact optimizer state as typed calls: 5 bytes per parameter and two scales per block.

A record of n parameters is five flat CPU tensors: `param` (bf16), `remainder_i8` (int8), `exp_avg_i8` (int8),
`exp_avg_sq_u8` (uint8), each of n elements, and `scales` (fp32) of `num_scales(n)`. [Note: compact state] in
csrc/cpu_adam/cpu_adam.h says what they mean and how far they are from fp32. Blocks of COMPACT_BLOCK elements
share a pair of scales, so a range that is updated by itself begins at a block's border and ends at one or at the
end of the record. Under that condition the results are the same bits for every cut, instruction set and number of
threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.errors import ConfigError
from offloadzero.native import _kernels
from offloadzero.native.hyper import AdamHyper
from offloadzero.native.kernels import (
    Isa,
    address,
    check_num_threads,
    describe,
    float_code,
    isa_code,
    typed_address,
)


def compact_adam_step(
    param: Tensor,
    grad: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    hyper: AdamHyper,
    step: int,
    grad_scale: float = 1.0,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """One Adam or AdamW step on a compact record, in place, in one pass over memory.

    `grad` is bf16, fp16 or fp32 and is multiplied by `grad_scale` first; `step` counts from 1, and the rounding of the
    moments depends on it ([Note: dithered codes]). The tensors must not overlap. Raises ConfigError for a tensor that
    does not fit, and as `AdamHyper.scalars` does.
    """
    _kernels.compact_adam_step(
        float_code("grad", grad),
        _compact_addresses(param, remainder_i8, exp_avg_i8, exp_avg_sq_u8, scales),
        address("grad", grad, param.numel()),
        param.numel(),
        isa_code(isa),
        check_num_threads(num_threads),
        hyper.scalars(step=step, grad_scale=grad_scale),
        step,
        False,  # the gradient's norm is not asked for
    )


def compact_encode(
    master_fp32: Tensor,
    exp_avg_fp32: Tensor,
    exp_avg_sq_fp32: Tensor,
    param: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Write fp32 master weights and moments (three tensors of n elements) as a compact record.

    Raises ConfigError for a tensor that does not fit.
    """
    num_elements = param.numel()
    _kernels.compact_encode(
        _fp32_addresses(master_fp32, exp_avg_fp32, exp_avg_sq_fp32, num_elements),
        _compact_addresses(param, remainder_i8, exp_avg_i8, exp_avg_sq_u8, scales),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def compact_decode(
    param: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    master_fp32: Tensor,
    exp_avg_fp32: Tensor,
    exp_avg_sq_fp32: Tensor,
    *,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Write the fp32 master weights and moments that a compact record stands for.

    Raises ConfigError for a tensor that does not fit.
    """
    num_elements = param.numel()
    _kernels.compact_decode(
        _compact_addresses(param, remainder_i8, exp_avg_i8, exp_avg_sq_u8, scales),
        _fp32_addresses(master_fp32, exp_avg_fp32, exp_avg_sq_fp32, num_elements),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def _compact_addresses(
    param: Tensor, remainder_i8: Tensor, exp_avg_i8: Tensor, exp_avg_sq_u8: Tensor, scales: Tensor
) -> tuple[int, int, int, int, int]:
    num_elements = param.numel()
    if scales.numel() != num_scales(num_elements):
        allowed = f"must have {num_scales(num_elements)} elements, two per block of {COMPACT_BLOCK}"
        raise ConfigError("scales", describe(scales), allowed)
    return (
        typed_address("param", param, num_elements, torch.bfloat16),
        typed_address("remainder_i8", remainder_i8, num_elements, torch.int8),
        typed_address("exp_avg_i8", exp_avg_i8, num_elements, torch.int8),
        typed_address("exp_avg_sq_u8", exp_avg_sq_u8, num_elements, torch.uint8),
        typed_address("scales", scales, scales.numel(), torch.float32),
    )


def _fp32_addresses(
    master_fp32: Tensor, exp_avg_fp32: Tensor, exp_avg_sq_fp32: Tensor, num_elements: int
) -> tuple[int, int, int]:
    return (
        typed_address("master_fp32", master_fp32, num_elements, torch.float32),
        typed_address("exp_avg_fp32", exp_avg_fp32, num_elements, torch.float32),
        typed_address("exp_avg_sq_fp32", exp_avg_sq_fp32, num_elements, torch.float32),
    )
