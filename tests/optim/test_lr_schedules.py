"""The schedules against formulas written down independently, in DeepSpeed's own terms."""

from __future__ import annotations

import copy
import io
import math
import warnings
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from offloadzero.api.deepspeed.schedule_by_name import build_lr_scheduler
from offloadzero.api.deepspeed.schedules import (
    DEEPSPEED_SCHEDULES,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from offloadzero.config import SchedulerConfig
from offloadzero.errors import ConfigError


def adam(*lrs: float) -> torch.optim.AdamW:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.5,)]
    return torch.optim.AdamW(groups)


def run(optimizer: torch.optim.Optimizer, schedule: LRScheduler, num_steps: int) -> list[float]:
    """The rate with which each optimizer step runs."""
    seen = []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def build(name: str, optimizer: torch.optim.Optimizer, **params: object) -> LRScheduler:
    return build_lr_scheduler(SchedulerConfig(name, MappingProxyType(params)), optimizer)


def log_warmup(step: int, warmup: int) -> float:
    """Optimizer step `step` sees iteration step - 1; at iteration i the warmup is at log_warmup(i + 1)."""
    if step == 0:
        return 0.0
    return 1.0 if step - 1 >= warmup else math.log(step, warmup)


@pytest.mark.parametrize("warmup", [2, 3, 10, 100])
def test_warmup_log(warmup: int) -> None:
    optimizer = adam()
    schedule = WarmupLR(optimizer, warmup_min_lr=0.1, warmup_max_lr=1.1, warmup_num_steps=warmup)
    expected = [0.1 + log_warmup(step, warmup) for step in range(120)]
    assert run(optimizer, schedule, 120) == pytest.approx(expected)


STAIRS = {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
# What it is, its arguments, and the rates of the first steps.
BY_HAND: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    # The minimum twice (iterations -1 and 0), then a quarter of the way each step.
    "linear": (
        "WarmupLR",
        {"warmup_max_lr": 8.0, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0, 0, 2, 4, 6, 8, 8, 8],
    ),
    # A warmup is at least two iterations.
    **{
        f"{warmup} iterations": (
            "WarmupLR",
            {"warmup_max_lr": 1.0, "warmup_num_steps": warmup, "warmup_type": "linear"},
            [0, 0, 0.5, 1],
        )
        for warmup in (0, 1)
    },
    "decay": (
        "WarmupDecayLR",
        {
            "total_num_steps": 6,
            "warmup_min_lr": 1.0,
            "warmup_max_lr": 5.0,
            "warmup_num_steps": 2,
            "warmup_type": "linear",
        },
        [1, 1, 3, 5, 4, 3, 2, 1, 1, 1],
    ),
    "range test": ("LRRangeTest", STAIRS, [1, 1.5, 2, 2.5, 3]),
    "range test in stairs": ("LRRangeTest", {**STAIRS, "lr_range_test_staircase": True}, [1, 1, 2, 2, 3]),
    # DeepSpeed's phase is 0 again where the only half ends: the peak itself is never reached.
    "a cycle without a second half": (
        "OneCycle",
        {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 4, "cycle_second_step_size": 0},
        [0, 0.25, 0.5, 0.75, 0, 0, 0, 0],
    ),
    "a cycle in stairs": (
        "OneCycle",
        {
            "cycle_min_lr": 0,
            "cycle_max_lr": 1,
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 4,
            "cycle_first_stair_count": 2,
        },
        [0, 0, 0, 0.5, 0.5, 0.5, 1, 0.5, 0.5, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_rates_by_hand(name: str) -> None:
    schedule, params, expected = BY_HAND[name]
    optimizer = adam()
    assert run(optimizer, build(schedule, optimizer, **params), len(expected)) == pytest.approx(expected)


def test_warmup_max_lr_defaults_to_each_groups_own_rate() -> None:
    """Of two groups each ends at its own rate, and is at every step as far on its way as the other."""
    optimizer = adam(0.25, 0.75)
    schedule = WarmupLR(optimizer, warmup_num_steps=5)
    for step in range(9):
        expected = [log_warmup(step, 5) * rate for rate in (0.25, 0.75)]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [0.25, 0.75]
    optimizer = adam(0.25, 0.75)
    decay = WarmupDecayLR(optimizer, 40, warmup_max_lr=None, warmup_num_steps=2)
    run(optimizer, decay, 3)
    assert decay.get_last_lr() == [0.25, 0.75]


def test_warmup_bounds_of_each_group() -> None:
    optimizer = adam(0.25, 0.75)
    schedule = WarmupLR(optimizer, warmup_min_lr=[0.5, 1], warmup_max_lr=[2, 3], warmup_num_steps=2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1]
    run(optimizer, schedule, 5)
    assert [group["lr"] for group in optimizer.param_groups] == [2, 3]


def test_warmup_decay_keeps_deepspeeds_default_maximum() -> None:
    optimizer = adam(0.5)
    schedule = WarmupDecayLR(optimizer, 10, warmup_num_steps=2)
    assert max(run(optimizer, schedule, 10)) == 0.001


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
def test_warmup_cosine(warmup_type: str) -> None:
    optimizer = adam(2.0)
    schedule = WarmupCosineLR(
        optimizer, 20, warmup_min_ratio=0.2, warmup_num_steps=5, cos_min_ratio=0.1, warmup_type=warmup_type
    )
    expected = [0.0]  # iteration -1
    for iteration in range(5):
        way = math.log(iteration + 1, 5) if warmup_type == "log" else iteration / 5
        expected.append(2.0 * (0.2 + 0.8 * way))
    # 15 iterations of half a cosine wave from just below 1 to 0.1, which then stays.
    expected += [2.0 * (0.1 + 0.9 * math.cos(math.pi * k / 30) ** 2) for k in range(1, 16)]
    expected += [0.2] * 9
    assert run(optimizer, schedule, 30) == pytest.approx(expected)


def one_cycle_reference(iteration: int, first: int, second: int, low: float, high: float) -> float:
    """The rate inside the cycle as DeepSpeed writes it: a phase x in [0, 1) and a ratio of the halves."""
    total, ratio = first + second, first / (first + second)
    x = (iteration + 1) / total - math.floor((iteration + 1) / total)
    return low + (high - low) * (x / ratio if x <= ratio else (x - 1) / (ratio - 1))


@pytest.mark.parametrize(("first", "second"), [(3, None), (5, 2), (1, 7)])
def test_one_cycle_and_decay(first: int, second: int | None) -> None:
    optimizer = adam()
    schedule = OneCycle(
        optimizer,
        cycle_min_lr=0.1,
        cycle_max_lr=1.0,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        decay_step_size=4,
        decay_lr_rate=0.5,
    )
    down = second or first
    total = first + down
    expected = [one_cycle_reference(i, first, down, 0.1, 1.0) for i in range(-1, total)]
    expected += [0.1 / (1 + 0.5 * k / 4) for k in range(1, 10)]
    assert run(optimizer, schedule, total + 10) == pytest.approx(expected)


def test_one_cycle_moves_the_first_beta() -> None:
    optimizer = adam()
    schedule = OneCycle(
        optimizer, 0.0, 1.0, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.01, decay_lr_rate=1
    )
    seen = []
    for _ in range(8):
        seen.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        schedule.step()
    first = [0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.01, 0.9 * 1.02, 0.9 * 1.03]
    assert [betas[0] for betas in seen] == pytest.approx(first)
    assert {betas[1] for betas in seen} == {0.99}
    with pytest.raises(ConfigError, match="decay_mom_rate"):
        run(optimizer, schedule, 20)


def test_one_cycle_momenta_of_each_group() -> None:
    optimizer = adam(0.5, 0.5)
    schedule = OneCycle(
        optimizer,
        [0.0, 1.0],
        [1.0, 5.0],
        cycle_first_step_size=2,
        cycle_min_mom=[0.5, 0.6],
        cycle_max_mom=[0.9, 0.8],
    )
    rates, momenta = [], []
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        momenta.append([group["betas"][0] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates == [pytest.approx(row) for row in ([0, 1], [0.5, 3], [1, 5], [0.5, 3], [0, 1], [0, 1])]
    expected = ([0.5, 0.6], [0.7, 0.7], [0.5, 0.6], [0.7, 0.7], [0.9, 0.8], [0.9, 0.8])
    assert momenta == [pytest.approx(row) for row in expected]


def test_one_cycle_can_leave_the_betas_alone() -> None:
    optimizer = adam()
    OneCycle(optimizer, 0.0, 1.0, cycle_momentum=False)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
    with pytest.warns(UserWarning, match="SGD has no betas"):
        OneCycle(sgd, 0.25, 1.0)
    assert sgd.param_groups[0]["momentum"] == 0.5
    assert sgd.param_groups[0]["lr"] == 0.25


PARAMS: dict[str, dict[str, object]] = {
    "WarmupLR": {"warmup_max_lr": 1.0, "warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_max_lr": 1.0, "warmup_num_steps": 5},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 5},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "decay_step_size": 3},
    "LRRangeTest": {"lr_range_test_step_size": 3},
}


@pytest.mark.parametrize("name", DEEPSPEED_SCHEDULES)
def test_a_saved_state_continues_the_schedule(name: str) -> None:
    whole_optimizer = adam()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # ordinary use has none
        whole = run(whole_optimizer, build(name, whole_optimizer, **PARAMS[name]), 20)

    optimizer = adam()
    schedule = build(name, optimizer, **PARAMS[name])
    assert isinstance(schedule, LRScheduler)
    first = run(optimizer, schedule, 7)
    file = io.BytesIO()
    torch.save({"schedule": schedule.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_optimizer = adam()
    resumed = build(name, resumed_optimizer, **PARAMS[name])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["schedule"])
    assert resumed.get_last_lr() == schedule.get_last_lr()
    assert first + run(resumed_optimizer, resumed, 13) == whole


@pytest.mark.parametrize("name", DEEPSPEED_SCHEDULES)
def test_deepspeeds_own_state_and_last_batch_iteration_resume(name: str) -> None:
    optimizer = adam()
    schedule = build(name, optimizer, **PARAMS[name])
    whole = run(optimizer, schedule, 20)

    loaded_optimizer = adam()
    loaded = build(name, loaded_optimizer, **PARAMS[name])
    loaded.load_state_dict({"last_batch_iteration": 6})  # DeepSpeed after seven steps
    assert loaded.get_last_lr() == [whole[7]]
    loaded_optimizer.step()
    loaded.step()
    assert run(loaded_optimizer, loaded, 12) == whole[8:]

    resumed_optimizer = adam()
    resumed = build(name, resumed_optimizer, last_batch_iteration=6, **PARAMS[name])
    assert run(resumed_optimizer, resumed, 13) == whole[7:]


@pytest.mark.parametrize("name", DEEPSPEED_SCHEDULES)
def test_a_step_to_an_iteration(name: str) -> None:
    """`step(k)` is DeepSpeed's: the rate (and beta) that k + 1 plain steps lead to, and the plain steps go on."""
    plain_optimizer, optimizer = adam(), adam()
    plain, schedule = (build(name, made, **PARAMS[name]) for made in (plain_optimizer, optimizer))
    states = []
    for _ in range(16):
        plain_optimizer.step()
        plain.step()
        group = plain_optimizer.param_groups[0]
        states.append((group["lr"], group["betas"]))
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iteration in (0, 7, 3, 14):
            schedule.step(iteration)
            group = optimizer.param_groups[0]
            assert (group["lr"], group["betas"]) == states[iteration]
            assert schedule.last_batch_iteration == iteration
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == states[15][0]
    with pytest.raises(ConfigError, match="whole number, at least -1"):
        schedule.step(-2)


def test_a_tensor_rate_is_filled_in_place() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    run(optimizer, schedule, 4)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_torch_schedules_are_built_by_name() -> None:
    optimizer, reference = adam(), adam()
    schedule = build("StepLR", optimizer, step_size=3, gamma=0.5)
    expected = run(reference, torch.optim.lr_scheduler.StepLR(reference, 3, 0.5), 10)
    assert run(optimizer, schedule, 10) == expected
    metric = build("ReduceLROnPlateau", adam(), patience=0)
    assert isinstance(metric, torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_a_rehearsal_leaves_the_optimizer_alone() -> None:
    optimizer = adam()
    before = [{**group} for group in optimizer.param_groups]
    calls: list[int] = []

    def rate(step: int) -> float:
        calls.append(step)
        return 1.0 if step < 1 else 1 / (step - 1)

    with pytest.raises(ConfigError, match="LambdaLR fails with them at its first step: ZeroDivisionError"):
        build("LambdaLR", optimizer, lr_lambda=rate)
    assert calls == [0, 1]
    assert optimizer.param_groups == before
    optimizer.step()
    assert build("ExponentialLR", optimizer, gamma=0.5).get_last_lr() == [before[0]["lr"]]


def test_whole_numbers_may_be_written_as_floats() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    schedule = build("OneCycleLR", optimizer, max_lr=1, total_steps=1e2)  # torch alone refuses it
    assert schedule.total_steps == 100


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLr", {}, r"scheduler\.type = 'WarmupLr': unknown schedule.*did you mean 'WarmupLR'"),
        ("CosineAnealingLR", {}, "did you mean 'CosineAnnealingLR'"),
        ("LRScheduler", {}, "unknown schedule"),
        ("Tensor", {}, "unknown schedule"),
        ("WarmupLR", {"warmup_steps": 3}, r"scheduler\.params\.warmup_steps = 3.*'warmup_num_steps'"),
        ("WarmupLR", {"optimizer": 3}, r"scheduler\.params\.optimizer"),
        ("StepLR", {"step_sise": 3}, "did you mean 'step_size'"),
        ("StepLR", {}, r"scheduler\.params\.step_size = None: StepLR needs it"),
        ("LambdaLR", {"lr_lambda": "text"}, "LambdaLR refuses them"),
        ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps = None"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "at least 1"),
        ("WarmupLR", {"warmup_type": "cosine"}, "allowed log, linear"),
        ("WarmupLR", {"warmup_num_steps": -1}, "at least 0"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "whole number"),
        ("WarmupLR", {"warmup_max_lr": [1, 2, 3]}, "one for each of the 1 groups"),
        ("WarmupLR", {"warmup_max_lr": "high"}, "warmup_max_lr"),
        ("WarmupLR", {"warmup_max_lr": math.inf}, "finite"),
        ("WarmupLR", {"warmup_min_lr": -1e-3}, "at least 0"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "at least 1"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_min_mom": [0.8, 0.8]}, "1 groups"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "at least 1"),
        ("StepLR", {"step_size": 0}, "StepLR fails with them at its first step: ZeroDivisionError"),
        ("StepLR", {"step_size": 1.5}, r"scheduler\.params\.step_size = 1\.5: a whole number"),
        ("StepLR", {"step_size": 30, "gamma": "x"}, r"scheduler\.params\.gamma = 'x': a number"),
        ("StepLR", {"step_size": 30, "gamma": math.nan}, r"scheduler\.params\.gamma = nan: a finite number"),
        ("StepLR", {"step_size": None}, r"scheduler\.params\.step_size = None: a whole number"),
        ("ExponentialLR", {"gamma": None}, r"scheduler\.params\.gamma = None: a number"),
        ("ExponentialLR", {"gamma": True}, r"scheduler\.params\.gamma = True: a number"),
        ("MultiStepLR", {"milestones": "357"}, r"scheduler\.params\.milestones = '357': a list of whole"),
        (
            "MultiStepLR",
            {"milestones": [3, "5"]},
            r"scheduler\.params\.milestones\[1\] = '5': a whole number",
        ),
        (
            "CosineAnnealingLR",
            {"T_max": 0},
            "CosineAnnealingLR fails with them at its first step: ZeroDivision",
        ),
        ("CosineAnnealingWarmRestarts", {"T_0": 0}, "CosineAnnealingWarmRestarts refuses them: ValueError"),
        ("CyclicLR", {"base_lr": 1, "max_lr": 2, "step_size_up": 0}, "CyclicLR refuses them: ZeroDivision"),
        ("CyclicLR", {"base_lr": [1, math.inf], "max_lr": 2}, r"base_lr\[1\] = inf: a finite number"),
        ("OneCycleLR", {"max_lr": 1, "total_steps": 0}, "OneCycleLR refuses them: ValueError"),
        ("LinearLR", {"start_factor": 0.5, "total_iters": 1e400}, "a finite number"),
        ("PolynomialLR", {"power": "x"}, r"scheduler\.params\.power = 'x': a number"),
        (
            "MultiplicativeLR",
            {"lr_lambda": lambda _: "x"},
            "MultiplicativeLR fails with them at its first step",
        ),
        ("LambdaLR", {"lr_lambda": lambda _: math.nan}, "LambdaLR gives a learning rate of nan"),
        ("ChainedScheduler", {"schedulers": [3]}, "ChainedScheduler"),
    ],
)
def test_mistakes(name: str, params: dict[str, object], message: str) -> None:
    before = copy.deepcopy(params)
    with pytest.raises(ConfigError, match=message):
        build_lr_scheduler(SchedulerConfig(name, MappingProxyType(params)), adam())
    assert params == before
