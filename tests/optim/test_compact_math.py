"""The compact state in torch operations gives the native kernel's bytes, and its fma is exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from offloadzero.arithmetic import compact_math, device_math
from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.native.kernels import compact_decode, compact_encode
from tests.native.compact_records import make_state
from tests.native.test_compact_dither import dither

Record = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # param, remainder, exp_avg, exp_avg_sq, scales
INF, NAN = float("inf"), float("nan")


def empty(n: int) -> Record:
    dtypes = (torch.bfloat16, torch.int8, torch.int8, torch.uint8)
    param, remainder, m, v = (torch.zeros(n, dtype=dtype) for dtype in dtypes)
    return param, remainder, m, v, torch.zeros(num_scales(n))


def encode(master: Tensor, m: Tensor, v: Tensor) -> Record:
    record = empty(master.numel())
    compact_encode(master, m, v, *record, num_threads=1)
    return record


def extreme_state(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks with moments that are too large or not finite, one after another, among ordinary ones."""
    master, m, v = make_state(n, seed=3)
    block = COMPACT_BLOCK
    m[5 * block] = 2.0**120
    m[6 * block + 3] = -3.4e38
    m[7 * block + 1] = INF
    v[8 * block + 2] = INF
    v[9 * block + 5], m[9 * block + 5] = NAN, NAN
    v[10 * block + 1], m[10 * block + 7] = INF, 2.0**121
    master[11 * block] = NAN
    m[12 * block : 14 * block] *= 2.0**-110  # zero when encoded
    m[12 * block], m[13 * block] = -(2.0**-100), 2.0**-100 - 2.0**-124
    v[14 * block : 15 * block] = 0.0
    v[14 * block + 9] = 2.0**-149
    v[15 * block] = 3e38
    return master, m, v


def assert_same(ours: Record, kernels: Record) -> None:
    for mine, theirs in zip(ours, kernels, strict=True):
        if mine.is_floating_point():
            assert torch.equal(mine.isnan(), theirs.isnan())
            mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("n", [1, 127, 511, 4097])
def test_encoding_and_decoding_are_the_kernels(n: int) -> None:
    master, m, v = extreme_state(n) if n == 4097 else make_state(n)
    expected = encode(master, m, v)
    param, remainder = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int8)
    root = compact_math.sqrt(v)
    codes_m, scale_m = compact_math.encode_exp_avg(m)
    codes_s, scale_s = compact_math.encode_exp_avg_sq(root)
    lost = ~m.isfinite()
    device_math.split_master(torch.where(lost, NAN, master), param, remainder)
    remainder[param.isnan()] = expected[1][param.isnan()]  # of a NaN nothing is defined but that it is one
    assert_same((param, remainder, codes_m, codes_s, torch.stack((scale_m, scale_s), 1).flatten()), expected)

    assert_decoded_same(expected)


def assert_decoded_same(record: Record) -> None:
    back = tuple(torch.empty(record[0].numel()) for _ in range(3))
    compact_decode(*record, *back, num_threads=1)
    ours = (
        device_math.join_master(record[0], record[1]),
        compact_math.decode_exp_avg(record[2], record[4][0::2]),
        compact_math.decode_exp_avg_sq(record[3], record[4][1::2]),
    )
    for mine, theirs in zip(ours, back, strict=True):
        assert torch.equal(mine.nan_to_num().view(torch.int32), theirs.nan_to_num().view(torch.int32))
        assert torch.equal(mine.isnan(), theirs.isnan())


def test_decoding_of_every_byte_is_the_kernels() -> None:
    """A block of zeros, one that is lost, and scales over the whole range; negative zeros among them."""
    n = 64 * COMPACT_BLOCK
    record = empty(n)
    everything = torch.arange(n).to(torch.uint8)
    record[2].view(torch.uint8).copy_(everything)
    record[3].copy_(everything)
    record[4].copy_(torch.logspace(-31, 37, num_scales(n)))
    record[4][:4], record[4][4:8] = 0.0, NAN
    assert_decoded_same(record)


def test_every_code_of_many_random_blocks_is_the_kernels() -> None:
    """A scale that is wrong by one rounding moves one code in 100,000."""
    generator = torch.Generator().manual_seed(8)
    m, root = torch.randn(2, 1 << 21, generator=generator)
    v = root.square()
    expected = encode(m, m, v)
    codes_m, scale_m = compact_math.encode_exp_avg(m)
    codes_s, scale_s = compact_math.encode_exp_avg_sq(compact_math.sqrt(v))
    assert torch.equal(codes_m, expected[2])
    assert torch.equal(codes_s, expected[3])
    assert torch.equal(torch.stack((scale_m, scale_s), 1).flatten(), expected[4])


@pytest.mark.parametrize("step", [1, 1000, 2**32 + 12345])
def test_the_dither_is_the_written_one(step: int) -> None:
    ours = torch.stack(compact_math.code_dither(step, torch.device("cpu")))
    assert torch.equal(ours.long(), torch.from_numpy(dither(step)))


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    spare = compact_math.Workspace(*(torch.full_like(a, NAN).double() for _ in range(9)))
    return spare.fma(torch.empty_like(a), a, b, c)


def test_fma_rounds_once() -> None:
    """Against exact fractions, over many exponents; a part of the sums cancel to the last bits of the product."""
    generator = np.random.default_rng(11)
    exponents = generator.integers(-70, 60, (3, 4000))
    a, b, c = (generator.uniform(-2, 2, (3, 4000)) * 2.0**exponents).astype(np.float32)
    c[:1500] = -(a[:1500].astype(np.float64) * b[:1500]).astype(np.float32)  # cancels to the product's error
    ours = fma(*(torch.from_numpy(x) for x in (a, b, c))).numpy()
    for x, y, z, result in zip(a, b, c, ours, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(result)) - exact)
        for other in (np.nextafter(result, np.float32(INF)), np.nextafter(result, np.float32(-INF))):
            distance = abs(Fraction(float(other)) - exact)
            assert error < distance or (error == distance and int(result.view(np.uint32)) % 2 == 0)


def test_fma_where_two_roundings_differ() -> None:
    """(1 + 2^-12)^2 lies in the middle of two fp32 numbers; 2^-60 decides, and an fp64 sum has no room for it."""
    factor, addend = torch.full((2,), 1.0 + 2.0**-12), torch.tensor([2.0**-60, -(2.0**-60)])
    once = [1 + 2**-11 + 2**-23, 1 + 2**-11]
    assert fma(factor, factor, addend).tolist() == once
    assert (factor.double() * factor.double() + addend.double()).float().tolist() != once
