"""Clipping against torch, loss scaling against a small model of the published rule."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadzero.config import LossScaleConfig
from offloadzero.step.step_decision import LossScale, TrialPolicy, decide_step


def squared_norms(gradients: list[torch.Tensor]) -> list[float]:
    return [float(grad.double().square().sum()) for grad in gradients]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
    st.sampled_from([1.0, 2.0, 1024.0, 65536.0]),
    st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_the_factor_is_that_of_clip_grad_norm(
    sizes: list[int], magnitude: float, max_norm: float, loss_scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain = [torch.randn(size, generator=generator, dtype=torch.float64) * magnitude for size in sizes]
    params = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes]
    for param, grad in zip(params, plain, strict=True):
        param.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)

    decision = decide_step(
        squared_norms([grad * loss_scale for grad in plain]), loss_scale=loss_scale, max_norm=max_norm
    )
    assert decision.apply
    assert decision.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert decision.grad_scale == np.float32(decision.grad_scale), "the kernels multiply in fp32"
    for param, grad in zip(params, plain, strict=True):
        expected = param.grad
        assert expected is not None
        torch.testing.assert_close(grad * loss_scale * decision.grad_scale, expected, rtol=2e-7, atol=0)


def test_small_norms_are_left_alone() -> None:
    assert decide_step([0.25, 0.5], loss_scale=1.0, max_norm=1.0).grad_scale == 1.0
    assert decide_step([0.0], loss_scale=1.0, max_norm=1.0).grad_scale == 1.0
    assert decide_step([100.0], loss_scale=4.0, max_norm=0.0).grad_scale == 0.25


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_is_not_applied(bad: float, max_norm: float, place: int) -> None:
    norms = [1.0, 2.0, 3.0]
    norms[place] = bad
    decision = decide_step(norms, loss_scale=2.0, max_norm=max_norm)
    assert not decision.apply
    assert not math.isfinite(decision.grad_norm)
    assert decision.grad_scale == 0.0


def test_norms_whose_sum_would_lose_digits() -> None:
    """The sum does not depend on the order of the records' sizes."""
    norms = [1e16, 1.0, 1.0, 1.0, 1.0]
    results = {
        decide_step(order, loss_scale=1.0, max_norm=1.0).grad_norm for order in itertools.permutations(norms)
    }
    assert results == {math.sqrt(1e16 + 4.0)}


# --- loss scaling ---


class PublishedRule:
    """DeepSpeed's rule (0.19.8): Micikevicius et al. with Megatron's hysteresis, as counters written down anew."""

    def __init__(self, power: int, window: int, hysteresis: int, floor: float, consecutive: bool) -> None:
        self.scale, self.consecutive = 2.0**power, consecutive
        self.window, self.full, self.floor = window, hysteresis, floor
        self.misses_left = hysteresis
        self.index, self.last_miss = 0, -1

    def step(self, finite: bool) -> None:
        index, self.index = self.index, self.index + 1
        if finite:
            if self.consecutive:
                self.misses_left = self.full
            past = index - self.last_miss - 1
            if past > 0 and past % self.window == 0:
                self.scale *= 2
                self.misses_left = self.full
            return
        self.last_miss = index
        self.misses_left -= 1
        if self.misses_left <= 0:
            self.misses_left = 0
            self.scale = max(self.scale / 2, self.floor)


@given(
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([0.25, 1.0, 64.0]),
    st.booleans(),
    st.lists(st.booleans(), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_dynamic_scaling_follows_the_rule(
    power: int, window: int, hysteresis: int, floor: float, consecutive: bool, steps: list[bool]
) -> None:
    config = LossScaleConfig(
        initial_scale_power=power,
        window=window,
        hysteresis=hysteresis,
        min_scale=floor,
        consecutive_hysteresis=consecutive,
    )
    state = LossScale.initial(config)
    model = PublishedRule(power, window, hysteresis, floor, consecutive)
    assert state.scale == model.scale
    for finite in steps:
        state = state.after_step(finite=finite)
        model.step(finite)
        assert state.scale == model.scale


HALVING = LossScaleConfig(initial_scale_power=4, window=2, hysteresis=2)
BY_HAND: dict[str, tuple[LossScaleConfig | None, str, list[float]]] = {
    "up and down": (HALVING, "+--+++-+--", [16, 16, 8, 8, 8, 16, 16, 16, 8, 4]),
    "an overflow is forgotten with the next good step": (
        LossScaleConfig(initial_scale_power=4, hysteresis=2, consecutive_hysteresis=True),
        "-+-+--",
        [16, 16, 16, 16, 16, 8],
    ),
    "or not: the second one then halves the scale": (
        LossScaleConfig(initial_scale_power=4, hysteresis=2, consecutive_hysteresis=False),
        "-+-+--",
        [16, 16, 8, 8, 4, 2],
    ),
    "it doubles with the step after each window": (
        LossScaleConfig(initial_scale_power=10, window=3),
        "+++++++++++",
        [*[1024] * 3, *[2048] * 3, *[4096] * 3, *[8192] * 2],
    ),
    "static": (LossScaleConfig(static=512.0, window=1, hysteresis=1), "++--+-", [512] * 6),
    "none": (None, "+-", [1, 1]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    config, steps, expected = BY_HAND[name]
    state, scales = LossScale.initial(config), []
    for step in steps:
        state = state.after_step(finite=step == "+")
        scales.append(state.scale)
    assert scales == expected


# --- when updates are tried ---


def after(*steps: tuple[bool, int, int]) -> TrialPolicy:
    policy = TrialPolicy()
    for is_plain, num_begun, num_adopted in steps:
        policy = policy.after_step(is_plain=is_plain, num_begun=num_begun, num_adopted=num_adopted)
    return policy


ADOPTED, CLIPPED, UNTRIED, IN_VAIN = (True, 4, 4), (False, 4, 0), (True, 0, 0), (True, 4, 1)


@pytest.mark.parametrize(
    ("steps", "tries"),
    [
        ([], True),
        ([ADOPTED] * 3, True),
        ([ADOPTED, CLIPPED], True),
        ([CLIPPED], False),
        ([CLIPPED] * 8, False),
        ([CLIPPED] * 8 + [UNTRIED] * 3, False),
        ([CLIPPED] * 8 + [UNTRIED] * 4, True),
        ([IN_VAIN], False),
        ([IN_VAIN] + [UNTRIED] * 7, False),
        ([IN_VAIN] + [UNTRIED] * 8, True),
    ],
)
def test_updates_are_tried_unless_most_came_to_nothing(
    steps: list[tuple[bool, int, int]], tries: bool
) -> None:
    assert after(*steps).tries is tries


def test_trials_in_vain_pause_ever_longer_and_one_that_is_adopted_begins_anew() -> None:
    policy, tried = TrialPolicy(), []
    for step in range(2000):
        if policy.tries:
            tried.append(step)
        policy = policy.after_step(is_plain=True, num_begun=4 * policy.tries, num_adopted=0)
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps[:3] == [9, 17, 33]
    assert max(gaps) == 513
    assert after(IN_VAIN, *[UNTRIED] * 8, IN_VAIN, *[UNTRIED] * 16, ADOPTED).next_pause == 8
