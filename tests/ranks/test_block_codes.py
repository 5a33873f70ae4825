"""Block codes against fp64: the error of each value, in memory that is given, and what is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offloadzero.arithmetic.block_codes import (
    INT4_BLOCK,
    INT4_LARGEST,
    INT4_SCALE_DTYPE,
    INT8_BLOCK,
    INT8_LARGEST,
    add_decoded_int4,
    decode_int8,
    encode_int4,
    encode_int8,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_values(seed: int, num_blocks: int, dtype: torch.dtype, block: int) -> Tensor:
    """Blocks of magnitudes far apart, some with one value that is far larger than the others, some of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_blocks, block, generator=generator)
    exponents = torch.randint(-12, 12, (num_blocks, 1), generator=generator)
    values *= torch.exp2(exponents.float())
    values[torch.randint(num_blocks, (1,), generator=generator), 7] *= 40
    values[torch.randint(num_blocks, (1,), generator=generator)] *= float(seed % 3 != 0)
    return values.clamp_(-60_000, 60_000).to(dtype).flatten()  # fp16 ends there


@given(
    seed=st.integers(0, 10_000),
    num_blocks=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    scratch_blocks=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_int8_codes_are_within_half_a_scale(
    seed: int, num_blocks: int, dtype: torch.dtype, scratch_blocks: int
) -> None:
    values = random_values(seed, num_blocks, dtype, INT8_BLOCK)
    codes = torch.empty(values.numel(), dtype=torch.int8)
    scales = torch.full((num_blocks,), math.nan)
    scratch = torch.full((scratch_blocks * INT8_BLOCK + 3,), math.nan)
    encode_int8(values, codes, scales, scratch=scratch)
    found = torch.full_like(values, math.nan)
    decode_int8(codes, scales, found, scratch=scratch)
    exact = values.double().view(num_blocks, -1)
    scale = exact.abs().amax(1, keepdim=True) / INT8_LARGEST
    error = (found.double().view(num_blocks, -1) - exact).abs()
    rounding = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).tiny
    assert bool((error <= scale * 0.5001 + rounding).all())
    assert torch.equal(found[values == 0], values[values == 0])


@given(
    seed=st.integers(0, 10_000),
    num_rows=st.integers(1, 3),
    num_blocks=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_int4_codes_are_within_half_a_scale(
    seed: int, num_rows: int, num_blocks: int, dtype: torch.dtype
) -> None:
    """Rows that lie apart, with something between them that stays as it is; added to what is there."""
    width = num_blocks * INT4_BLOCK
    wide = random_values(seed, 2 * num_rows * num_blocks, dtype, INT4_BLOCK).view(num_rows, 2 * width)
    values, between = wide[:, :width], wide[:, width:].clone()
    packets = torch.full((num_rows, width // 2 + num_blocks * 2 + 4), 0xA5, dtype=torch.uint8)
    codes, scales, rest = packets.split([width // 2, num_blocks * 2, 4], dim=1)
    scratch = torch.full((num_rows * width * 9 // 8,), math.nan)
    encode_int4(values, codes, scales.view(INT4_SCALE_DTYPE), scratch=scratch)
    before = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    total = before.clone()
    add_decoded_int4(codes, scales.view(INT4_SCALE_DTYPE), total, scratch=scratch)
    exact = values.double().reshape(num_rows, num_blocks, -1)
    scale = exact.abs().amax(-1, keepdim=True) / INT4_LARGEST * (1 + 2.0**-7) * (1 + 2.0**-8)
    error = (total.double() - before.double()).view(exact.shape) - exact
    rounding = 1e-6 * (exact.abs() + before.view(exact.shape).abs() + scale) + 2.0**-126
    assert bool((error.abs() <= scale * 0.5001 + rounding).all())
    assert torch.equal(wide[:, width:], between)
    assert bool((rest == 0xA5).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_at_the_end_of_the_values_own_memory(dtype: torch.dtype) -> None:
    values = random_values(1, 5, dtype, INT8_BLOCK)
    codes, scales = torch.empty(values.numel(), dtype=torch.int8), torch.empty(5)
    scratch = torch.empty(2 * INT8_BLOCK)
    encode_int8(values, codes, scales, scratch=scratch)
    apart, together = torch.empty_like(values), torch.empty_like(values)
    decode_int8(codes, scales, apart, scratch=scratch)
    last = together.view(torch.uint8)[-values.numel() :].view(torch.int8)
    last.copy_(codes)
    decode_int8(last, scales, together, scratch=scratch)
    assert torch.equal(apart, together)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    values = torch.randn(2 * INT8_BLOCK, generator=torch.Generator().manual_seed(0))
    values[5] = bad
    codes, scales = torch.empty(values.numel(), dtype=torch.int8), torch.empty(2)
    scratch = torch.empty(INT8_BLOCK)
    encode_int8(values, codes, scales, scratch=scratch)
    found = torch.empty_like(values)
    decode_int8(codes, scales, found, scratch=scratch)
    assert not found[5].isfinite()
    assert bool(found[INT8_BLOCK:].isfinite().all()), "a block has a scale of its own"
    packed = torch.empty(1, values.numel() // 2, dtype=torch.uint8)
    scales = torch.empty(1, values.numel() // INT4_BLOCK, dtype=INT4_SCALE_DTYPE)
    encode_int4(values[None], packed, scales, scratch=torch.empty(values.numel() * 9 // 8))
    total = torch.zeros(1, values.numel())
    add_decoded_int4(packed, scales, total, scratch=torch.empty(values.numel() * 9 // 8))
    assert not total[0, 5].isfinite()
    assert bool(total[0, INT4_BLOCK:].isfinite().all())


def test_the_smallest_and_the_largest_numbers() -> None:
    for value in (2.0**-149, 2.0**-126, torch.finfo(torch.float32).max):
        values = torch.full((INT8_BLOCK,), value)
        codes, scales = torch.empty(INT8_BLOCK, dtype=torch.int8), torch.empty(1)
        encode_int8(values, codes, scales, scratch=torch.empty(INT8_BLOCK))
        found = torch.empty_like(values)
        decode_int8(codes, scales, found, scratch=torch.empty(INT8_BLOCK))
        assert bool(((found - values).abs() <= max(value / 126, 2.0**-126) / 2).all())


class NewMemory(TorchDispatchMode):
    """Notes the operations that give memory which none of their arguments has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {
            one.untyped_storage().data_ptr() for one in (*args, *kwargs.values()) if isinstance(one, Tensor)
        }
        result = func(*args, **kwargs)
        made = result if isinstance(result, tuple | list) else (result,)
        self.found += [str(func) for one in made if one.untyped_storage().data_ptr() not in given]
        return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_take_no_memory(dtype: torch.dtype) -> None:
    values = random_values(0, 4, dtype, INT8_BLOCK)
    codes, scales = torch.empty(values.numel(), dtype=torch.int8), torch.empty(4)
    packed = torch.empty(2, values.numel() // 4, dtype=torch.uint8)
    of_blocks = torch.empty(2, values.numel() // 2 // INT4_BLOCK, dtype=INT4_SCALE_DTYPE)
    total, scratch = torch.zeros(2, values.numel() // 2), torch.empty(values.numel() * 9 // 8)
    with NewMemory() as mode:
        encode_int8(values, codes, scales, scratch=scratch)
        decode_int8(codes, scales, values, scratch=scratch)
        encode_int4(values.view(2, -1), packed, of_blocks, scratch=scratch)
        add_decoded_int4(packed, of_blocks, total, scratch=scratch)
    assert mode.found == []
