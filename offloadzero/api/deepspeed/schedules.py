"""DeepSpeed's learning-rate schedules as torch schedulers.

Source of the formulas: deepspeed/runtime/lr_schedules.py (0.19) and, behind OneCycle and LRRangeTest, Smith,
"A disciplined approach to neural network hyper-parameters: Part 1", arXiv 1803.09820.

[Note: which iteration a rate belongs to]
DeepSpeed counts `last_batch_iteration` from -1 and sets the rate of iteration -1 at construction; each
step() after an optimizer step adds one. So optimizer step k (from 0) runs with the rate of iteration k - 1,
and a warmup's first two steps both run at its minimum (iterations -1 and 0). torch's `last_epoch` is 0 after
construction: here iteration = last_epoch - 1, so every optimizer step sees the rate it sees under DeepSpeed.
Given as an argument, `last_batch_iteration` is the iteration to resume after, as in DeepSpeed; unlike there,
the rate of that iteration is set at once. `step(k)` sets the rate of iteration k, in DeepSpeed's count and not in
torch's epochs. A DeepSpeed scheduler state, {"last_batch_iteration": n}, loads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offloadzero.config.readers import read_enum, read_float, read_int
from offloadzero.errors import ConfigError

_PARAMS_KEY = "scheduler.params"

# DeepSpeed's OneCycle moves the first beta only and fixes the second.
_ONE_CYCLE_BETA2 = 0.99


class _IterationSchedule(LRScheduler):
    """A schedule that is a function of DeepSpeed's iteration: [Note: which iteration a rate belongs to].

    Subclasses set their own attributes before calling this constructor, which sets the first rate. All
    attributes are plain numbers, texts and lists, so that `state_dict` can be saved anywhere.
    """

    def __init__(self, optimizer: Optimizer, *, last_batch_iteration: int) -> None:
        # torch asks for "initial_lr" when it resumes; a fresh optimizer still has it as its rate.
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """DeepSpeed's count: -1 before the first step()."""
        return self.last_epoch - 1

    def rates(self, iteration: int) -> list[float]:
        """The rate of each parameter group at DeepSpeed's `iteration` (at least -1)."""
        raise NotImplementedError

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next iteration, or of the one given. Raises ConfigError for one that is no iteration."""
        if last_batch_iteration is not None:
            # torch's step() adds one, and iteration i is its epoch i + 1.
            self.last_epoch = _iteration(last_batch_iteration)
        super().step()

    def get_lr(self) -> list[Any]:
        return self.rates(self.last_batch_iteration)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or DeepSpeed's {"last_batch_iteration": n}.

        As with every torch scheduler, the optimizer's own state brings its current rate.
        """
        if "last_batch_iteration" not in state_dict:
            super().load_state_dict(state_dict)
            return
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        self._last_lr = self.get_lr()


class WarmupLR(_IterationSchedule):
    """A rise from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` iterations, then a constant rate.

    Each rate is a number, or a list with one for each parameter group; `warmup_max_lr` None is each group's own
    rate. rate(i) = min + (max - min) * fraction(i), see `warmup_fraction`. Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _per_group("warmup_min_lr", warmup_min_lr, optimizer)
        self.max_lrs = _per_group("warmup_max_lr", warmup_max_lr, optimizer)
        self.warmup_num_steps = _whole("warmup_num_steps", warmup_num_steps, minimum=0)
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def fraction(self, iteration: int) -> float:
        """The rate's distance from the minimum as a share of that to the maximum, in [0, 1]."""
        return warmup_fraction(iteration, num_steps=self.warmup_num_steps, warmup_type=self.warmup_type)

    def rates(self, iteration: int) -> list[float]:
        fraction = self.fraction(iteration)
        return [low + (high - low) * fraction for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """WarmupLR, followed by a linear fall to `warmup_min_lr` at iteration `total_num_steps`.

    After the warmup of n = max(2, warmup_num_steps) iterations, with T = total_num_steps, fraction(i) =
    max(0, (T - i) / max(1, T - n)). Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _whole("total_num_steps", total_num_steps, minimum=1)
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def fraction(self, iteration: int) -> float:
        num_warmup = max(2, self.warmup_num_steps)
        if iteration < num_warmup:
            return super().fraction(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - num_warmup))


class WarmupCosineLR(_IterationSchedule):
    """A ratio of each group's rate: warmup from `warmup_min_ratio` to 1, then a cosine to `cos_min_ratio`.

    With n = max(2, warmup_num_steps) and T = total_num_steps: the rate is 0 at iteration -1; the ratio is
    m + (1 - m) * warmup_fraction(i) while i < n; then c + (1 - c) * (1 + cos(pi * x)) / 2 with
    x = min(1, (i - n + 1) / max(1, T - n)). Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _whole("total_num_steps", total_num_steps, minimum=1)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.warmup_num_steps = _whole("warmup_num_steps", warmup_num_steps, minimum=0)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def ratio(self, iteration: int) -> float:
        """The rate divided by the group's own rate."""
        if iteration < 0:
            return 0.0
        num_warmup = max(2, self.warmup_num_steps)
        if iteration < num_warmup:
            fraction = warmup_fraction(
                iteration, num_steps=self.warmup_num_steps, warmup_type=self.warmup_type
            )
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * fraction
        progress = min(1.0, (iteration - num_warmup + 1) / max(1, self.total_num_steps - num_warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)

    def rates(self, iteration: int) -> list[float]:
        ratio = self.ratio(iteration)
        return [float(base_lr) * ratio for base_lr in self.base_lrs]


class LRRangeTest(_IterationSchedule):
    """A rise without end, to find the rate at which training diverges.

    rate(i) = min_lr * (1 + step_rate * x), x = (i + 1) / step_size, rounded down when `staircase`. Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size, minimum=1)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = bool(lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        interval = (iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [low * (1 + self.step_rate * interval) for low in self.min_lrs]


class OneCycle(_IterationSchedule):
    """One rise and fall of the rate (and the opposite of the first beta), then a decay.

    With a = cycle_first_step_size, b = cycle_second_step_size (a when None) and t = i + 1, the scale is
    t / a up to t = a, then (a + b - t) / b; a stair count s > 0 rounds it down to a multiple of 1 / s in that
    half. rate = min + (max - min) * scale; beta1 = max - (max - min) * scale. From i = a + b on, with
    d = (i - a - b + 1) / decay_step_size: rate = min / (1 + decay_lr_rate * d), beta1 = max * (1 +
    decay_mom_rate * d); without a decay (rate or step size 0) they stay. Rates and momenta are numbers, or lists
    with one for each parameter group. As in DeepSpeed, b may be 0 (t = a is then the minimum again), beta1 at
    iteration -1 is its minimum and the second beta is 0.99 throughout; set `cycle_momentum` false to leave betas
    alone. An optimizer without betas keeps its momentum, with a warning. Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        self.first_step_size = _whole("cycle_first_step_size", cycle_first_step_size, minimum=1)
        self.second_step_size = _whole("cycle_second_step_size", cycle_second_step_size, minimum=0)
        self.first_stair_count = _whole("cycle_first_stair_count", cycle_first_stair_count, minimum=0)
        self.second_stair_count = _whole("cycle_second_stair_count", cycle_second_stair_count, minimum=0)
        self.decay_step_size = _whole("decay_step_size", decay_step_size, minimum=0)
        self.min_lrs = _per_group("cycle_min_lr", cycle_min_lr, optimizer)
        self.max_lrs = _per_group("cycle_max_lr", cycle_max_lr, optimizer)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.min_moms = _per_group("cycle_min_mom", cycle_min_mom, optimizer)
        self.max_moms = _per_group("cycle_max_mom", cycle_max_mom, optimizer)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        self.cycle_momentum = bool(cycle_momentum) and _has_betas(optimizer)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def step(self, batch_iteration: int | None = None) -> None:
        """Set rates and first betas of the next iteration, or of the one given. Raises ConfigError like `momenta`."""
        super().step(batch_iteration)
        if self.cycle_momentum:
            momenta = self.momenta(self.last_batch_iteration)
            for group, beta1 in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (beta1, _ONE_CYCLE_BETA2)

    def rates(self, iteration: int) -> list[float]:
        if iteration < self.first_step_size + self.second_step_size:
            scale = self._scale(iteration)
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        decay = 1 + self.decay_lr_rate * self._decay_intervals(iteration)
        return [low / decay for low in self.min_lrs]

    def momenta(self, iteration: int) -> list[float]:
        """First betas at DeepSpeed's `iteration`; ConfigError when the decay drives one to 1 or beyond."""
        if iteration < 0:
            return self.min_moms
        if iteration < self.first_step_size + self.second_step_size:
            scale = self._scale(iteration)
            return [
                high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
        factor = 1 + self.decay_mom_rate * self._decay_intervals(iteration)
        for beta1 in (high * factor for high in self.max_moms):
            if not 0 <= beta1 < 1:
                key = f"{_PARAMS_KEY}.decay_mom_rate"
                allowed = f"beta1 would be {beta1} at iteration {iteration}"
                raise ConfigError(key, self.decay_mom_rate, allowed)
        return [high * factor for high in self.max_moms]

    def _scale(self, iteration: int) -> float:
        passed = (iteration + 1) % (self.first_step_size + self.second_step_size)
        if passed <= self.first_step_size:
            position, size, stairs = passed, self.first_step_size, self.first_stair_count
        else:
            position = self.first_step_size + self.second_step_size - passed
            size, stairs = self.second_step_size, self.second_stair_count
        # Whole-number division: a float scale can land just under a stair and lose it.
        return position * stairs // size / stairs if stairs else position / size

    def _decay_intervals(self, iteration: int) -> float:
        if self.decay_step_size == 0:
            return 0.0
        return (iteration - self.first_step_size - self.second_step_size + 1) / self.decay_step_size


DEEPSPEED_SCHEDULES: Mapping[str, type[LRScheduler]] = MappingProxyType(
    {cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}
)


def warmup_fraction(iteration: int, *, num_steps: int, warmup_type: str) -> float:
    """The progress of a warmup at DeepSpeed's `iteration`, in [0, 1].

    With n = max(2, num_steps): 0 at iteration -1, log(i + 1) / log(n) ("log") or i / n ("linear") while
    i < n, then 1.
    """
    num_steps = max(2, num_steps)
    if iteration < 0:
        return 0.0
    if iteration >= num_steps:
        return 1.0
    if warmup_type == "log":
        return math.log(iteration + 1) / math.log(num_steps)
    return iteration / num_steps


def _iteration(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= -1:
        return value
    raise ConfigError("last_batch_iteration", value, "a whole number, at least -1")


def _warmup_type(value: object) -> str:
    return read_enum(f"{_PARAMS_KEY}.warmup_type", value, ("log", "linear"))


def _has_betas(optimizer: Optimizer) -> bool:
    if all("betas" in group for group in optimizer.param_groups):
        return True
    name = type(optimizer).__name__
    warnings.warn(f"OneCycle: {name} has no betas, so cycle_momentum is off", stacklevel=3)
    return False


def _per_group(key: str, value: float | Sequence[float], optimizer: Optimizer) -> list[float]:
    num_groups = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [_rate(key, value)] * num_groups
    if len(value) != num_groups:
        raise ConfigError(
            f"{_PARAMS_KEY}.{key}", value, f"a number, or one for each of the {num_groups} groups"
        )
    return [_rate(key, entry) for entry in value]


def _rate(key: str, value: object) -> float:
    return read_float(f"{_PARAMS_KEY}.{key}", value, minimum=0)


def _number(key: str, value: object) -> float:
    return read_float(f"{_PARAMS_KEY}.{key}", value)


def _whole(key: str, value: object, *, minimum: int) -> int:
    return read_int(f"{_PARAMS_KEY}.{key}", value, minimum=minimum)
