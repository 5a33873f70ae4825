"""Adam's kernel: the right numbers; and what all kernels use: conversions, norms, copies, threads.

Oracles: numpy in fp64 for one Adam step, torch's own rounding for the dtype conversions, math.fsum for sums.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from offloadzero.errors import ConfigError
from offloadzero.native import _kernels, kernels
from offloadzero.native.hyper import AdamHyper
from offloadzero.native.kernels import Isa
from tests.native.kernel_states import (
    ADAMW,
    FLOATS,
    ISAS,
    L2,
    LAYOUTS,
    SIZES,
    State,
    make_grad,
    make_state,
    place,
    to_bits,
)
from tests.support.tiny import script_environment
from tests.support.warm import run_warm

# --- the same bits whatever runs ---


@pytest.mark.parametrize("isa", ISAS)
def test_step_ignores_the_callers_flush_to_zero_mode(isa: Isa) -> None:
    n = 50_000
    start = make_state("fp32", n)
    start.param.mul_(1e-38)
    start.exp_avg.mul_(1e-38)
    start.exp_avg_sq.mul_(1e-35)
    grad = torch.randn(n, generator=torch.Generator().manual_seed(3)) * 1e-38
    hyper = replace(ADAMW, lr=1e-40, eps=1e-8)
    expected, flushed = start.copy(), start.copy()
    expected.step(grad, hyper=hyper, step=1, isa=isa)
    tiny = expected.exp_avg.abs()
    assert ((tiny > 0) & (tiny < 1.1754944e-38)).any()
    assert torch.set_flush_denormal(True)
    try:
        flushed.step(grad, hyper=hyper, step=1, isa=isa)
    finally:
        torch.set_flush_denormal(False)
    flushed.assert_same_bits(expected)


# --- the right numbers ---


def oracle_step(
    weights: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, hyper: AdamHyper, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Algorithm 2 of Loshchilov & Hutter 2019 (and Adam with L2) in fp64; `g` is already scaled."""
    p, m, v = (x.astype(np.float64) for x in (weights, m, v))
    if not hyper.decoupled:
        g = g + hyper.weight_decay * p
    m = hyper.beta1 * m + (1 - hyper.beta1) * g
    v = hyper.beta2 * v + (1 - hyper.beta2) * g * g
    m_hat = m / (1 - hyper.beta1**step) if hyper.bias_correction else m
    v_hat = v / (1 - hyper.beta2**step) if hyper.bias_correction else v
    decay = hyper.lr * hyper.weight_decay * p if hyper.decoupled else 0.0
    return p - decay - hyper.lr * m_hat / (np.sqrt(v_hat) + hyper.eps), m, v


HYPERS = {
    "adamw": ADAMW,
    "l2": L2,
    "no_decay": replace(ADAMW, weight_decay=0.0),
    "no_bias_correction": replace(ADAMW, bias_correction=False),
    "llm": AdamHyper(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
    "large_lr_and_eps": AdamHyper(lr=0.1, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.0, decoupled=False),
    "betas_zero": AdamHyper(lr=1e-2, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.01),
}


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_against_fp64(layout: str, grad_dtype: torch.dtype, hyper: AdamHyper) -> None:
    """Each of 6 steps is within 1e-6 * max(|before|, |after|, lr) of the fp64 step from the same state.

    Elementwise, of the fp32 weight. lr is the scale of one update: it stands in where a weight is near zero.
    """
    n, grad_scale = 9_973, 0.125
    state = make_state(layout, n, specials=False)
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
    for step in range(1, 7):
        grad = make_grad(n, grad_dtype, seed=step, specials=False)
        before = state.weights()
        p, m, v = oracle_step(
            before,
            state.exp_avg.numpy(),
            state.exp_avg_sq.numpy(),
            grad.double().numpy() * grad_scale,
            hyper,
            step,
        )
        state.step(grad, hyper=hyper, step=step, grad_scale=grad_scale)
        after = state.weights()
        scale = np.maximum(np.maximum(np.abs(before), np.abs(p)), hyper.lr)
        assert (np.abs(after - p) <= 1e-6 * scale).all()
        g_scale = np.abs(grad.double().numpy() * grad_scale) + hyper.weight_decay * np.abs(before)
        assert (np.abs(state.exp_avg.numpy() - m) <= 5e-7 * (np.abs(m) + g_scale)).all()
        assert (np.abs(state.exp_avg_sq.numpy() - v) <= 1e-6 * (v + g_scale**2)).all()
        nearest = torch.from_numpy(after).to(state.param.dtype)
        if layout == "bf16_split":  # ties go away from zero: at most the remainder's half unit apart
            error = (state.param.double().numpy() - after).astype(np.float64)
            assert (np.abs(error) <= np.abs(nearest.double().numpy() - after)).all()
        else:
            assert torch.equal(state.param, nearest)


def test_extreme_gradients_leave_finite_weights() -> None:
    """1e30 squared overflows exp_avg_sq: the update is then 0, never NaN; a zero gradient moves nothing."""
    grad = torch.tensor([1e30, -1e30, 0.0, -0.0, 1e-45, 1e-30])
    state = State(torch.full((6,), 0.5), None, (torch.zeros(6), torch.zeros(6)))
    state.step(grad, hyper=replace(ADAMW, weight_decay=0.0), step=1)
    assert state.param.isfinite().all()
    assert state.param[:4].tolist() == [0.5] * 4
    assert state.exp_avg_sq[:2].isinf().all()


def test_weight_beyond_bf16_keeps_its_master() -> None:
    """A finite weight that rounds to a bf16 infinity is still exact in the pair."""
    weights = torch.tensor([3.4028234e38, -3.4028234e38, 3.3961776e38])
    param, remainder = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    kernels.split_master(weights, param, remainder)
    assert param[:2].isinf().all()
    back = torch.empty(3)
    kernels.join_master(param, remainder, back)
    assert torch.equal(back, weights)


# --- split and join ---


def patterns_of_every_exponent() -> np.ndarray:
    random = np.random.default_rng(5).integers(0, 2**23, 200)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x7F7FFF, 0x7F8000, 0x7FFFFF]
    mantissas = np.concatenate([np.array(edges), random])
    tops = np.arange(512)
    return (tops[:, None] * 2**23 + mantissas[None, :]).astype(np.uint32).ravel()


@pytest.mark.parametrize("isa", ISAS)
def test_split_and_join_against_numpy(isa: Isa) -> None:
    bits = patterns_of_every_exponent()
    master = torch.from_numpy(bits.view(np.float32).copy())
    n = master.numel()
    param, remainder = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    kernels.split_master(master, param, remainder, isa=isa)
    hi = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    assert (param.view(torch.int16).numpy().view(np.uint16) == hi).all()
    assert (remainder.numpy().view(np.uint16) == (bits & 0xFFFF)).all()
    back = torch.empty(n)
    kernels.join_master(param, remainder, back, isa=isa, num_threads=3)
    assert (back.numpy().view(np.uint32) == bits).all()
    not_a_tie = torch.from_numpy((bits & 0xFFFF) != 0x8000)  # ties aside, it is round to nearest even
    same = master.isfinite() & not_a_tie
    assert torch.equal(param[same], master.to(torch.bfloat16)[same])


@pytest.mark.skipif("OFFLOADZERO_TEST_EXHAUSTIVE" not in os.environ, reason="in make campaign")
def test_split_and_join_exhaustively() -> None:
    """All 2^32 patterns on the widest instruction set; the tails and the others are covered above."""
    code = kernels._ISA_CODE[ISAS[-1]]
    assert _kernels.split_join_exhaustive(code, kernels.DEFAULT_NUM_THREADS) == 0


# --- conversions and accumulation ---


def assert_equal_bits_or_both_nan(actual: Tensor, expected: Tensor) -> None:
    same = (to_bits(actual) == to_bits(expected)) | (actual.isnan() & expected.isnan())
    assert same.all(), (actual[~same][:5], expected[~same][:5])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16bit_pattern_widens_exactly(dtype: torch.dtype, isa: Isa) -> None:
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    acc = torch.full((2**16,), -0.0)  # -0 + x is x, the sign of zero included
    kernels.accumulate(acc, grad, isa=isa)
    assert_equal_bits_or_both_nan(acc, grad.float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrowing_rounds_to_nearest_even(dtype: torch.dtype, isa: Isa) -> None:
    """Every 16-bit value, every midpoint between neighbours and its fp32 neighbours, and random patterns."""
    values = torch.arange(2**15 - 1, dtype=torch.int32).to(torch.int16).view(dtype).float()
    values = values[values.isfinite()]
    midpoints = (values[:-1].double() + values[1:].double()).div(2).float()
    bits = torch.cat([values, midpoints]).view(torch.int32)
    random = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(1))
    positive = torch.cat([bits, bits + 1, (bits - 1).clamp_min(0)]).view(torch.float32)
    grad = torch.cat([positive, -positive, random.to(torch.int32).view(torch.float32)])
    acc = torch.full((grad.numel(),), -0.0, dtype=dtype)
    kernels.accumulate(acc, grad, isa=isa)
    assert_equal_bits_or_both_nan(acc, grad.to(dtype))


@pytest.mark.parametrize("n", [1, 17, 4097, 100_003])
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("acc_dtype", FLOATS, ids=str)
def test_accumulate_against_torch(acc_dtype: torch.dtype, grad_dtype: torch.dtype, n: int) -> None:
    start, grad = make_grad(n, acc_dtype, seed=7), make_grad(n, grad_dtype, seed=8)
    if acc_dtype == grad_dtype:
        expected = start.clone().add_(grad)
    else:
        expected = (start.float() + grad.float()).to(acc_dtype)
    for isa in ISAS:
        for num_threads, offset in ((1, 0), (2, 3), (3, 1)):
            acc = place(start, offset)
            kernels.accumulate(acc, place(grad, offset), isa=isa, num_threads=num_threads)
            assert_equal_bits_or_both_nan(acc, expected)


# --- the norm ---


@pytest.mark.parametrize("n", [0, *SIZES])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sq_norm_against_exact_sum(dtype: torch.dtype, n: int) -> None:
    grad = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    exact = math.fsum((grad.double().numpy() ** 2).tolist())
    expected = kernels.sq_norm(grad, isa=Isa.SCALAR, num_threads=1)
    assert expected == pytest.approx(exact, rel=1e-14)
    for isa in ISAS:
        for num_threads, offset in ((1, 0), (2, 1), (3, 5)):
            assert kernels.sq_norm(place(grad, offset), isa=isa, num_threads=num_threads) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sq_norms_are_those_of_the_parts_by_themselves(dtype: torch.dtype, isa: Isa) -> None:
    grad = torch.randn(140_001, generator=torch.Generator().manual_seed(7)).to(dtype)
    parts = ((0, 1), (1, 4099), (4099, 4099), (4097, 77_000), (0, 140_001), (139_999, 140_001))
    expected = tuple(kernels.sq_norm(grad[start:stop], isa=isa, num_threads=1) for start, stop in parts)
    assert kernels.sq_norms(grad, parts, isa=isa, num_threads=3) == expected
    assert kernels.sq_norms(grad, (), isa=isa) == ()
    with pytest.raises(ValueError, match="stop"):
        kernels.sq_norms(grad, ((0, 140_002),), isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sq_norm_of_huge_finite_gradients_is_finite(dtype: torch.dtype, isa: Isa) -> None:
    grad = torch.full((100_003,), 3e38, dtype=dtype)
    result = kernels.sq_norm(grad, isa=isa)
    assert math.isfinite(result)
    assert result == pytest.approx(100_003 * float(grad[0]) ** 2, rel=1e-12)


@pytest.mark.parametrize("isa", ISAS)
def test_sq_norm_of_subnormal_gradients(isa: Isa) -> None:
    grad = torch.full((5,), 1e-45)
    assert kernels.sq_norm(grad, isa=isa) == pytest.approx(5 * float(grad[0]) ** 2, rel=1e-15)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sq_norm_reports_one_bad_element_anywhere(bad: float, dtype: torch.dtype, isa: Isa) -> None:
    n = 70_005
    for at in (0, 13, 4095, 4096, 40_000, n - 1):
        grad = torch.ones(n, dtype=dtype)
        grad[at] = bad
        result = kernels.sq_norm(grad, isa=isa)
        assert math.isnan(result) if math.isnan(bad) else result == math.inf


# --- copy ---


@pytest.mark.parametrize("n", [0, 1, 4097, 3_000_001])
@pytest.mark.parametrize("num_threads", [1, 2, 3, None])
def test_copy(n: int, num_threads: int | None) -> None:
    src = torch.randint(-128, 127, (n,), dtype=torch.int8, generator=torch.Generator().manual_seed(n))
    guarded = torch.full((n + 2,), 99, dtype=torch.int8)
    kernels.copy(guarded[1 : n + 1], src, num_threads=num_threads)
    assert torch.equal(guarded[1 : n + 1], src)
    assert guarded[0] == 99
    assert guarded[-1] == 99


def test_copy_between_dtypes_copies_bytes() -> None:
    dst = torch.empty(2, dtype=torch.float32)
    kernels.copy(dst, torch.tensor([0, 0x3F80, 0, 0x4000], dtype=torch.int16))
    assert dst.tolist() == [1.0, 2.0]


def test_copy_refuses_overlap_and_other_sizes() -> None:
    buffer = torch.zeros(100)
    with pytest.raises(ConfigError, match=r"dst.*overlap"):
        kernels.copy(buffer[:60], buffer[40:])
    with pytest.raises(ConfigError, match=r"dst.*400 bytes"):
        kernels.copy(buffer[:60], torch.zeros(100))


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("param", torch.zeros(8, dtype=torch.float64)),
        ("param", torch.zeros(16, dtype=torch.bfloat16)[::2]),
        ("grad", torch.zeros(8, dtype=torch.float64)),
        ("grad", torch.zeros(9)),
        ("grad", torch.zeros(16)[::2]),
        ("grad", torch.zeros(8, device="meta")),
        ("grad", torch.zeros(8).to_sparse()),
        ("exp_avg", torch.zeros(8, dtype=torch.bfloat16)),
        ("exp_avg", torch.zeros(7)),
        ("exp_avg_sq", torch.zeros(1).expand(8)),
        ("master", torch.zeros(4, dtype=torch.int16)),
    ],
)
def test_step_names_the_bad_argument(name: str, bad: Tensor) -> None:
    tensors: dict[str, Tensor] = {
        "param": torch.zeros(8, dtype=torch.bfloat16),
        "grad": torch.zeros(8),
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "master": torch.zeros(8, dtype=torch.int16),
    }
    tensors[name] = bad
    with pytest.raises(ConfigError, match=f"^{name} "):
        kernels.adam_step(**tensors, hyper=ADAMW, step=1)


def test_other_mistakes_are_named() -> None:
    state = make_state("fp32", 8)
    grad = torch.zeros(8)
    with pytest.raises(ConfigError, match=r"^param .*no master"):
        kernels.adam_step(torch.zeros(8).bfloat16(), grad, grad, grad, hyper=ADAMW, step=1)
    with pytest.raises(ConfigError, match=r"^step "):
        state.step(grad, hyper=ADAMW, step=0)
    with pytest.raises(ConfigError, match=r"^num_threads "):
        state.step(grad, hyper=ADAMW, step=1, num_threads=0)
    with pytest.raises(ConfigError, match=r"^hyper "):
        state.step(grad, hyper=ADAMW, step=1, grad_scale=1e300)
    with pytest.raises(ConfigError, match=r"^beta2 "):
        replace(ADAMW, beta2=1.0)
    with pytest.raises(ConfigError, match=r"^lr "):
        replace(ADAMW, lr=math.nan)
    with pytest.raises(ConfigError, match=r"^acc "):
        kernels.accumulate(torch.zeros(8, dtype=torch.int32), grad)


def test_num_threads() -> None:
    assert kernels.check_num_threads(None) == len(os.sched_getaffinity(0))
    assert kernels.check_num_threads(3) == 3
    with pytest.raises(ConfigError):
        kernels.check_num_threads(0)


# --- processes and threads ---


def run_script(script: str, *, isa: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in script_environment().items() if key != kernels.ISA_ENV}
    if isa is not None:
        env[kernels.ISA_ENV] = isa
    return run_warm([sys.executable, "-c", textwrap.dedent(script)], env=env, timeout_s=60)


@pytest.mark.parametrize("isa", ISAS)
def test_environment_chooses_the_isa(isa: Isa) -> None:
    script = "from offloadzero.native import kernels as c; print(c.active_isa().value)"
    done = run_script(script, isa=isa.value)
    assert done.stdout.split() == [isa.value], done.stderr


def test_environment_with_an_unknown_isa_is_refused() -> None:
    done = run_script("from offloadzero.native import kernels as c; c.active_isa()", isa="avx")
    assert done.returncode == 1
    assert "OFFLOADZERO_ISA = 'avx': allowed scalar, avx2, avx512" in done.stderr


def test_forked_child_works_even_while_another_thread_calls() -> None:
    done = run_script(
        """
        import os, threading, time
        import torch
        from offloadzero.native import kernels as c
        grad = torch.ones(1_000_000)
        stop = False
        def hammer():
            while not stop:
                c.sq_norm(grad, num_threads=3)
        thread = threading.Thread(target=hammer)
        thread.start()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                ok = all(c.sq_norm(grad, num_threads=3) == 1_000_000 for _ in range(5))
                os._exit(0 if ok else 1)
            deadline = time.monotonic() + 20
            while (reaped := os.waitpid(pid, os.WNOHANG))[0] == 0:
                assert time.monotonic() < deadline, "the child hangs"
                time.sleep(0.001)
            assert reaped[1] == 0, reaped
        stop = True
        thread.join()
        assert c.sq_norm(grad, num_threads=3) == 1_000_000
        print("done")
        """
    )
    assert done.stdout == "done\n", done.stderr


def test_interpreter_exits_while_a_daemon_thread_calls() -> None:
    done = run_script(
        """
        import threading, time
        import torch
        from offloadzero.native import kernels as c
        grad = torch.ones(1_000_000)
        def hammer():
            while True:
                c.sq_norm(grad, num_threads=3)
        for _ in range(2):
            threading.Thread(target=hammer, daemon=True).start()
        time.sleep(0.1)
        """
    )
    assert done.returncode == 0, done.stderr


def test_several_threads_call_at_once() -> None:
    n, num_callers, num_steps = 150_001, 4, 10
    grads = [make_grad(n, torch.bfloat16, seed=i) for i in range(num_callers)]
    expected = [make_state("bf16_split", n, seed=i) for i in range(num_callers)]
    actual = [state.copy() for state in expected]

    def train(state: State, grad: Tensor, num_threads: int) -> None:
        for step in range(1, num_steps + 1):
            state.step(grad, hyper=ADAMW, step=step, num_threads=num_threads)

    for state, grad in zip(expected, grads, strict=True):
        train(state, grad, 1)
    threads = [
        threading.Thread(target=train, args=(state, grad, num_threads))
        for state, grad, num_threads in zip(actual, grads, [1, 2, 3, 5], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(actual, expected, strict=True):
        mine.assert_same_bits(theirs)
