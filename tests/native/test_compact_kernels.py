"""The compact state: what its bytes mean, how far it is from fp32, the same bytes everywhere.

Oracles: numpy in fp64 written from [Note: compact state] in csrc/cpu_adam/cpu_adam.h, and AdamW in fp64.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from offloadzero.core.constants import COMPACT_BLOCK, COMPACT_BYTES_PER_PARAM
from offloadzero.errors import ConfigError
from offloadzero.native import kernels
from offloadzero.native.hyper import AdamHyper
from offloadzero.native.kernels import Isa
from tests.native.compact_records import Record, make_grad, make_state
from tests.native.kernel_states import ADAMW, FLOATS, ISAS, L2

SIZES = [1, 15, 16, 17, 127, 128, 129, 4097, 100_003]
LARGEST = np.float64(np.finfo(np.float32).max)
SMALLEST_NORMAL = 2.0**-126
SMALLEST_SCALED = 2.0**-100


# --- the format ---


def companded(num_codes: int, per_segment: int) -> np.ndarray:
    """X(c), or Y(k), of every code: straight segments of so many codes each, every one twice as steep as the last."""
    codes = np.arange(num_codes)
    return 2 * ((1 + codes % per_segment / per_segment) * 2.0 ** (codes // per_segment) - 1)


X, Y = companded(128, 32), companded(256, 128)


def decode_with_numpy(record: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Master, exp_avg and exp_avg_sq in fp32; the products of a code and a scale are exact in fp64."""
    hi = record.param.view(torch.int16).numpy().astype(np.int64)
    bits = (hi * 65536 + record.remainder.numpy().astype(np.int64) * 256) % 2**32
    master = bits.astype(np.uint32).view(np.float32)
    scales = np.repeat(record.scales.numpy().astype(np.float64).reshape(-1, 2), COMPACT_BLOCK, axis=0)
    scale_m, scale_s = scales[: len(master), 0], scales[: len(master), 1]
    m_bytes = record.exp_avg.numpy().view(np.uint8)
    m = np.where(m_bytes < 128, 1.0, -1.0) * X[m_bytes % 128] * scale_m
    s = (Y[record.exp_avg_sq.numpy()] * scale_s).astype(np.float32)
    return master, m.astype(np.float32), s * s


@pytest.mark.parametrize("isa", ISAS)
def test_decoding_is_the_written_format(isa: Isa) -> None:
    """Bit by bit: every byte of both codes under many scales; every remainder under every bf16 exponent."""
    n = 256 * 512
    record = Record.empty(n)
    at = torch.arange(n)
    record.param.view(torch.int16).copy_(((at // 256) * 128 + at % 128).to(torch.int16))
    record.remainder.copy_((at % 256 - 128).to(torch.int8))
    record.exp_avg.copy_((at % 256 - 128).to(torch.int8))
    record.exp_avg_sq.copy_((at % 256).to(torch.uint8))
    record.scales.copy_(torch.logspace(-31, 18, record.scales.numel()))
    record.scales[:4] = 0.0
    actual = record.decode(isa=isa, num_threads=2)
    for ours, expected in zip(actual, decode_with_numpy(record), strict=True):
        assert (ours.numpy().view(np.uint32) == expected.view(np.uint32)).all()


def spacing(master: np.ndarray) -> np.ndarray:
    """ulp of bf16 at a weight: 2**-7 of its power of two, in fp64, and that of 2**-126 below it."""
    magnitude = np.maximum(np.abs(master.astype(np.float64)), SMALLEST_NORMAL)
    return 2.0 ** (np.floor(np.log2(magnitude)) - 7)


@pytest.mark.parametrize("isa", ISAS)
def test_remainder_keeps_the_weight_within_ulp_by_512(isa: Isa) -> None:
    """All exponents, both signs, mantissas at and around every edge of rounding; exact for zeros and bf16."""
    random = np.random.default_rng(5).integers(0, 2**23, 300)
    near = np.array([0, 0x80, 0x100, 0x7F80, 0x8000, 0x8080, 0xFF80, 0x10000, 0x7FFF80, 0x7F8000, 0x7FFFFF])
    edges = np.concatenate([near + d for d in (-1, 0, 1)])
    mantissas = np.unique(np.concatenate([edges[(edges >= 0) & (edges < 2**23)], random]))
    bits = (np.arange(512)[:, None] * 2**23 + mantissas[None, :]).astype(np.uint32).ravel()
    master = bits.view(np.float32)
    master = master[np.isfinite(master)]
    zeros = torch.zeros(len(master))
    record = Record.of(torch.from_numpy(master.copy()), zeros, zeros, isa=isa)
    back = record.decode(isa=isa)[0].numpy()
    kept = np.isfinite(back)
    assert (np.abs(master[~kept].astype(np.float64)) > LARGEST - 128 * 2.0**104).all()
    error = np.abs(back[kept].astype(np.float64) - master[kept])
    assert (error <= spacing(master[kept]) / 512).all()
    assert (error > spacing(master[kept]) / 520).any()  # the bound is tight
    exact = (master.view(np.uint32) & 0xFFFF == 0)[kept]
    assert (back[kept].view(np.uint32)[exact] == master[kept].view(np.uint32)[exact]).all()
    assert (record.remainder.numpy()[kept][exact] == 0).all()
    rounded = torch.from_numpy(master[kept]).bfloat16().double().numpy()
    param = record.param.double().numpy()[kept]
    finite = np.isfinite(param) & np.isfinite(rounded)
    # bf16 of the weight rounded to 24 bits: half a unit and what that rounding moved.
    assert (np.abs(param - master[kept])[finite] <= (spacing(master[kept]) * (0.5 + 1 / 512))[finite]).all()


def per_block(values: np.ndarray) -> np.ndarray:
    """The largest magnitude of each element's block."""
    padded = np.pad(np.abs(values), (0, -len(values) % COMPACT_BLOCK)).reshape(-1, COMPACT_BLOCK)
    return np.repeat(padded.max(axis=1), COMPACT_BLOCK)[: len(values)]


def code_step(x: np.ndarray, *, span: float, per_segment: int) -> np.ndarray:
    """Distance of the codes at x, a share of the block's largest magnitude."""
    y = 1 + span * x + 1e-6  # where a segment ends, fp32 may be in the next
    return 2.0 ** np.floor(np.log2(y)) / per_segment / span


def step_of_m(x: np.ndarray) -> np.ndarray:
    return code_step(x, span=14.75, per_segment=32)


def step_of_s(x: np.ndarray) -> np.ndarray:
    return code_step(x, span=2.984375, per_segment=128)


# Of fp32 in encoding and decoding, as shares of the largest magnitude.
ROUNDING = 4e-7


@pytest.mark.parametrize("factor", [1.0, 1e36, 1e-22, 1e-39])
@pytest.mark.parametrize("isa", ISAS)
def test_moments_stay_within_the_stated_error(isa: Isa, factor: float) -> None:
    n = 64 * COMPACT_BLOCK + 50
    master, m, v = make_state(n, specials=False)
    m *= factor
    _, m_back, v_back = (t.double().numpy() for t in Record.of(master, m, v, isa=isa).decode(isa=isa))
    m64, s64, s_back = m.double().numpy(), np.sqrt(v.double().numpy()), np.sqrt(v_back)
    largest = per_block(m64)
    kept = largest >= SMALLEST_SCALED
    assert kept.any() == (factor > 1e-39)
    assert (m_back[~kept] == 0).all()
    error = np.abs(m_back - m64)[kept] / largest[kept]
    bound = step_of_m(np.abs(m64)[kept] / largest[kept]) / 2
    assert (error <= bound + ROUNDING).all()
    assert (error > 0.99 * bound).any() == kept.any()  # the bound is tight
    assert per_block(m_back)[kept] == pytest.approx(largest[kept], rel=1e-6)
    x = s64 / per_block(s64)
    x_back = s_back / per_block(s64)
    small = x < 1 / 382
    assert (np.abs(x_back - x)[~small] <= step_of_s(x[~small]) / 2 + ROUNDING).all()
    assert x_back[small] == pytest.approx(1 / 382, rel=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_a_block_is_zero_below_the_smallest_scale_and_not_at_it(isa: Isa) -> None:
    """No second moment is that small: their roots are kept down to that of the smallest fp32 number."""
    n = 3 * COMPACT_BLOCK
    m, v = torch.zeros(n), torch.zeros(n)
    m[5], m[6] = SMALLEST_SCALED, SMALLEST_SCALED / 2
    m[COMPACT_BLOCK + 5] = -SMALLEST_SCALED * (1 - 2.0**-24)
    v[7] = 2.0**-149
    _, m_back, v_back = Record.of(m, m, v, isa=isa).decode(isa=isa)
    assert m_back[5] == pytest.approx(SMALLEST_SCALED, rel=1e-6)
    assert m_back[6] == pytest.approx(SMALLEST_SCALED / 2, rel=1e-2)
    assert (m_back[COMPACT_BLOCK:] == 0).all()
    assert v_back[7] == 2.0**-149
    assert (v_back[COMPACT_BLOCK:] == 0).all()


def test_small_second_moments_never_vanish_beside_large_ones() -> None:
    """Otherwise the weight would move by m / eps."""
    n = COMPACT_BLOCK
    m, v = torch.full((n,), 1e-5), torch.full((n,), 1e-10)
    m[0], v[0] = 1e-3, 1.0
    record = Record.of(torch.zeros(n), m, v)
    assert (record.decode()[2] > 0).all()
    record.step(torch.zeros(n), hyper=replace(ADAMW, weight_decay=0.0), step=1000)
    assert (record.decode()[0].abs() <= 1e-3).all()


@pytest.mark.parametrize("isa", ISAS)
def test_writing_what_was_read_changes_no_byte(isa: Isa) -> None:
    """Nor the sign of a zero. The scales may change by their rounding."""
    n = 255 * COMPACT_BLOCK
    record = Record.of(*make_state(n), isa=isa)
    assert (record.exp_avg == -128).any()
    again = Record.of(*record.decode(isa=isa), isa=isa)
    assert torch.equal(again.param.view(torch.int16), record.param.view(torch.int16))
    for mine, theirs in zip(again.tensors()[1:4], record.tensors()[1:4], strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(again.scales, record.scales, rtol=1e-6, atol=0)


# --- the same bytes whatever runs ---


@pytest.mark.parametrize("n", SIZES)
def test_encode_and_decode_same_bytes_for_every_isa(n: int) -> None:
    state = make_state(n)
    expected = Record.of(*state, isa=Isa.SCALAR, num_threads=1)
    fp32 = expected.decode(isa=Isa.SCALAR, num_threads=1)
    for isa, num_threads in itertools.product(ISAS, (1, 3)):
        Record.of(*state, isa=isa, num_threads=num_threads).assert_same_bits(expected)
        for mine, theirs in zip(expected.decode(isa=isa, num_threads=num_threads), fp32, strict=True):
            assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("isa", ISAS)
def test_step_same_bytes_however_a_range_is_cut_at_block_borders(isa: Isa) -> None:
    n = 70_001
    start, grad = Record.of(*make_state(n)), make_grad(n, torch.bfloat16)
    whole, cut = start.copy(), start.copy()
    whole.step(grad, hyper=ADAMW, step=2, isa=isa, num_threads=2)
    for begin, end in itertools.pairwise([0, 128, 4096, 40_064, 40_192, n]):
        cut.piece(begin, end).step(grad[begin:end], hyper=ADAMW, step=2, isa=isa)
    cut.assert_same_bits(whole)


def test_bytes_per_parameter() -> None:
    n = 1 << 20
    num_bytes = sum(t.numel() * t.element_size() for t in Record.empty(n).tensors())
    assert num_bytes == n * COMPACT_BYTES_PER_PARAM
    assert COMPACT_BYTES_PER_PARAM <= 5.3


# --- the right numbers ---


def oracle_step(
    state: tuple[np.ndarray, ...], g: np.ndarray, hyper: AdamHyper, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Algorithm 2 of Loshchilov & Hutter 2019 (and Adam with L2) in fp64."""
    p, m, v = (x.astype(np.float64) for x in state)
    if not hyper.decoupled:
        g = g + hyper.weight_decay * p
    m = hyper.beta1 * m + (1 - hyper.beta1) * g
    v = hyper.beta2 * v + (1 - hyper.beta2) * g * g
    m_hat = m / (1 - hyper.beta1**step) if hyper.bias_correction else m
    v_hat = v / (1 - hyper.beta2**step) if hyper.bias_correction else v
    decay = hyper.lr * hyper.weight_decay * p if hyper.decoupled else 0.0
    return p - decay - hyper.lr * m_hat / (np.sqrt(v_hat) + hyper.eps), m, v


@pytest.mark.parametrize(
    "hyper",
    [
        ADAMW,
        L2,
        replace(ADAMW, bias_correction=False),
        AdamHyper(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
        AdamHyper(lr=1e-2, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.01),
    ],
    ids=["adamw", "l2", "no_bias_correction", "llm", "betas_zero"],
)
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
def test_step_against_fp64(grad_dtype: torch.dtype, hyper: AdamHyper) -> None:
    """From the decoded state, each step is the fp64 step, then rounded to the format.

    Elementwise: the weight to 1e-6 * max(|weight|, |update|) and its 24 bits, the moments to the codes' steps.
    """
    n, grad_scale = 79 * COMPACT_BLOCK + 3, 0.125
    master = make_state(n, specials=False)[0]
    record = Record.of(master, torch.zeros(n), torch.zeros(n))
    for step in range(1, 7):
        before = [t.double().numpy() for t in record.decode()]
        grad = make_grad(n, grad_dtype, seed=step, specials=False)
        p, m, v = oracle_step(tuple(before), grad.double().numpy() * grad_scale, hyper, step)
        record.step(grad, hyper=hyper, step=step, grad_scale=grad_scale)
        p_now, m_now, v_now = (t.double().numpy() for t in record.decode())
        scale = np.maximum(np.maximum(np.abs(p), np.abs(p - before[0])), hyper.lr)
        g, wd = grad.double().numpy() * grad_scale, 0.0 if hyper.decoupled else hyper.weight_decay
        # L2 can cancel the gradient: its rounding is then relative to what was cancelled.
        cancelled = (np.abs(g) + wd * np.abs(before[0])) / (np.abs(g + wd * before[0]) + 1e-30)
        bound = 1e-6 * scale + 1e-7 * cancelled * np.abs(p - before[0]) + spacing(p) / 512
        assert (np.abs(p_now - p) <= bound).all()
        top_m, top_s = (
            np.repeat(record.scales.double().numpy()[k::2] * largest, COMPACT_BLOCK)[:n]
            for k, largest in ((0, X[-1]), (1, Y[-1]))
        )
        assert (np.abs(m_now - m) <= (step_of_m(np.abs(m) / top_m) + ROUNDING) * top_m).all()
        s = np.maximum(np.sqrt(v) / top_s, 1 / 382)
        assert (np.abs(np.sqrt(v_now) / top_s - s) <= step_of_s(s) + ROUNDING).all()


def test_a_thousand_steps_stay_near_fp64_adamw() -> None:
    """A noisy quadratic: the compact run ends as near the minimum as the fp64 run, and near that run's path."""
    n = 40 * COMPACT_BLOCK
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(n, generator=generator)
    curvature = torch.exp(torch.randn(n, generator=generator))
    hyper = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.01)
    record = Record.of(torch.zeros(n), torch.zeros(n), torch.zeros(n))
    exact = tuple(np.zeros(n) for _ in range(3))
    for step in range(1, 1001):
        noise = torch.randn(n, generator=generator) * 0.3
        step_hyper = replace(hyper, lr=1e-2 * (1 - step / 1001))
        grad = curvature * (record.decode()[0] - target) + noise
        record.step(grad, hyper=step_hyper, step=step)
        g = curvature.double().numpy() * (exact[0] - target.double().numpy()) + noise.double().numpy()
        exact = oracle_step(exact, g, step_hyper, step)
    loss = [
        float((curvature * (w - target).double() ** 2).mean())
        for w in (record.decode()[0], torch.from_numpy(exact[0]))
    ]
    assert loss[0] <= 1.02 * loss[1]
    assert np.abs(record.decode()[0].double().numpy() - exact[0]).mean() < 0.01


# --- values that are not finite, huge, tiny ---


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bad_gradient_is_never_trained_on_silently(dtype: torch.dtype, bad: float, isa: Isa) -> None:
    """The weight is NaN at once and for good; the other blocks are as without it."""
    n = 5 * COMPACT_BLOCK
    start, grad = Record.of(*make_state(n, specials=False)), make_grad(n, dtype)
    at = 2 * COMPACT_BLOCK + 37
    clean = start.copy()
    clean.step(grad, hyper=ADAMW, step=3, isa=isa)
    grad[at] = bad
    record = start.copy()
    record.step(grad, hyper=ADAMW, step=3, isa=isa)
    assert record.param[at].isnan()
    assert record.param.isnan().sum() == 1
    for begin, end in ((0, 2 * COMPACT_BLOCK), (3 * COMPACT_BLOCK, n)):
        record.piece(begin, end).assert_same_bits(clean.piece(begin, end))
    other = start.copy()
    other.step(grad, hyper=ADAMW, step=3, isa=Isa.SCALAR)
    record.assert_same_bits(other)
    record.step(torch.zeros(n), hyper=ADAMW, step=4, isa=isa)
    assert record.param[2 * COMPACT_BLOCK : 3 * COMPACT_BLOCK].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_of_every_payload_stays_one(isa: Isa) -> None:
    """Adding to its pattern must not carry over into zero."""
    n = COMPACT_BLOCK
    grad = torch.full((n,), -1, dtype=torch.int32).view(torch.float32)
    record = Record.of(torch.ones(n), torch.zeros(n), torch.zeros(n))
    record.step(grad, hyper=ADAMW, step=1, isa=isa)
    assert record.param.isnan().all()
    positive = torch.full((n,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for master in (grad, positive):
        assert Record.of(master, torch.zeros(n), torch.zeros(n), isa=isa).decode(isa=isa)[0].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_huge_finite_gradients_leave_finite_weights(isa: Isa) -> None:
    """A second moment that overflows stops its block, as it stops its element in fp32; nothing becomes NaN."""
    n = 3 * COMPACT_BLOCK
    grad = make_grad(n, torch.float32, specials=False)
    grad[COMPACT_BLOCK + 5] = 1e30
    record = Record.of(torch.full((n,), 0.5), torch.zeros(n), torch.zeros(n))
    hyper = replace(ADAMW, weight_decay=0.0)
    record.step(grad, hyper=hyper, step=1, isa=isa)
    assert record.decode()[0][COMPACT_BLOCK + 5] == 0.5
    for step in range(2, 5):
        before = record.decode()[0]
        record.step(make_grad(n, torch.float32, specials=False, seed=step), hyper=hyper, step=step, isa=isa)
        moved = record.decode()[0] != before
        assert record.decode()[0].isfinite().all()
        assert not moved[COMPACT_BLOCK : 2 * COMPACT_BLOCK].any()
        assert moved[:COMPACT_BLOCK].any()


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_zero_stays_zero(isa: Isa) -> None:
    """A hundred steps without a gradient, beside a block that moves: no bit of weights and moments is set."""
    n = 2 * COMPACT_BLOCK
    record = Record.of(torch.zeros(n), torch.zeros(n), torch.zeros(n), isa=isa)
    grad = torch.zeros(n)
    grad[COMPACT_BLOCK:] = 1e-3
    for step in range(1, 101):
        record.step(grad, hyper=ADAMW, step=step, isa=isa)
        for values in record.decode(isa=isa):
            assert (values[:COMPACT_BLOCK].view(torch.int32) == 0).all()
            assert (values[COMPACT_BLOCK:] != 0).all()


def step_of_size(step_size: float, *, eps: float, isa: Isa) -> tuple[Record, Record]:
    """A record of many magnitudes, among them blocks of zeros, before and after a step; its first gradients are 0."""
    n = 4097
    master, m, v = make_state(n)
    m[COMPACT_BLOCK : 2 * COMPACT_BLOCK], v[COMPACT_BLOCK : 2 * COMPACT_BLOCK] = 1.0, 0.0
    before = Record.of(master, m, v)
    after = before.copy()
    grad = make_grad(n, torch.float32)
    grad[: 3 * COMPACT_BLOCK] = 0.0
    hyper = AdamHyper(step_size, 0.9, 0.999, eps, weight_decay=0.0, bias_correction=False)
    after.step(grad, hyper=hyper, step=1, isa=isa)
    return before, after


@pytest.mark.parametrize("step_size", [0.0, 1e-45, 1e-38, 2.0**-101])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("isa", ISAS)
def test_no_step_moves_no_weight(isa: Isa, eps: float, step_size: float) -> None:
    """Not even to NaN where the moments are zero; the moments move."""
    before, after = step_of_size(step_size, eps=eps, isa=isa)
    assert torch.equal(after.param.view(torch.int16), before.param.view(torch.int16))
    assert torch.equal(after.remainder, before.remainder)
    assert not torch.equal(after.scales, before.scales)


@pytest.mark.parametrize("isa", ISAS)
def test_the_smallest_step_that_counts_moves_zero_weights(isa: Isa) -> None:
    n = COMPACT_BLOCK
    record = Record.of(torch.zeros(n), torch.zeros(n), torch.zeros(n))
    grad = torch.randn(n, generator=torch.Generator().manual_seed(6))
    hyper = AdamHyper(2.0**-100, 0.9, 0.999, 1e-8, weight_decay=0.0, bias_correction=False)
    record.step(grad, hyper=hyper, step=1, isa=isa)
    expected = oracle_step((np.zeros(n),) * 3, grad.double().numpy(), hyper, 1)[0]
    assert record.decode()[0].double().numpy() == pytest.approx(expected, rel=2.0**-15)


@pytest.mark.parametrize("isa", ISAS)
def test_step_ignores_the_callers_flush_to_zero_mode(isa: Isa) -> None:
    n = 1000
    master, _, _ = make_state(n, specials=False)
    start = Record.of(master * 1e-37, torch.zeros(n), torch.full((n,), 1e-30))
    grad = torch.randn(n, generator=torch.Generator().manual_seed(3)) * 1e-38
    # Weights, first moments and quotients by eps / lr are subnormal.
    hyper = replace(ADAMW, lr=1e-8, weight_decay=0.0)
    expected, flushed = start.copy(), start.copy()
    expected.step(grad, hyper=hyper, step=1, isa=isa)
    assert torch.set_flush_denormal(True)
    try:
        flushed.step(grad, hyper=hyper, step=1, isa=isa)
    finally:
        torch.set_flush_denormal(False)
    flushed.assert_same_bits(expected)


# --- large, refused ---


@pytest.mark.slow
def test_a_large_odd_number() -> None:
    n = 2**26 + 3 if "OFFLOADZERO_TEST_EXHAUSTIVE" in os.environ else 2**23 + 3
    master, m, v = make_state(n)
    start, grad = Record.of(master, m, v), make_grad(n, torch.bfloat16)
    del master, m, v
    one, many = start.copy(), start
    one.step(grad, hyper=ADAMW, step=3, isa=Isa.SCALAR, num_threads=2)
    many.step(grad, hyper=ADAMW, step=3, num_threads=2)
    many.assert_same_bits(one)


def _change(name: str, bad: Tensor) -> Callable[[], object]:
    def call() -> object:
        record = Record.empty(300)
        arguments = {
            "param": record.param,
            "grad": torch.zeros(300),
            "remainder_i8": record.remainder,
            "exp_avg_i8": record.exp_avg,
            "exp_avg_sq_u8": record.exp_avg_sq,
            "scales": record.scales,
        }
        return kernels.compact_adam_step(**{**arguments, name: bad}, hyper=ADAMW, step=1)

    return call


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("param", torch.zeros(300)),
        ("grad", torch.zeros(300, dtype=torch.float64)),
        ("grad", torch.zeros(301)),
        ("remainder_i8", torch.zeros(300, dtype=torch.int16)),
        ("exp_avg_i8", torch.zeros(300, dtype=torch.uint8)),
        ("exp_avg_i8", torch.zeros(299, dtype=torch.int8)),
        ("exp_avg_sq_u8", torch.zeros(300, dtype=torch.int8)),
        ("scales", torch.zeros(4)),
        ("scales", torch.zeros(6, dtype=torch.float64)),
    ],
)
def test_step_names_the_bad_argument(name: str, bad: Tensor) -> None:
    with pytest.raises(ConfigError, match=f"^{name} "):
        _change(name, bad)()
