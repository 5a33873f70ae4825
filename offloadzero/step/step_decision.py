"""The decision whether a step is applied and with which factor, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from offloadzero.config import LossScaleConfig


@dataclass(frozen=True)
class StepDecision:
    """The decision over a step. `grad_scale` multiplies every gradient element (unscale and clip in one)."""

    apply: bool
    grad_scale: float
    grad_norm: float

    def is_plain(self, loss_scale: float) -> bool:
        """Whether the step is applied as it is, neither skipped nor clipped."""
        return self.apply and self.grad_scale == plain_scale(loss_scale)


def plain_scale(loss_scale: float) -> float:
    """The factor of the gradients of a step that is not clipped."""
    return float(np.float32(1.0 / loss_scale))


def decide_step(sq_norms: Sequence[float], *, loss_scale: float, max_norm: float) -> StepDecision:
    """Decide from the squared norms of the scaled gradients of all parameters; their order does not matter.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: min(1, max_norm / (norm + 1e-6)); `max_norm` 0
    switches clipping off. A norm that is not finite means that some gradient is not: apply is False then.
    """
    norm = math.sqrt(math.fsum(sq_norms)) / loss_scale if all(map(math.isfinite, sq_norms)) else math.nan
    if not math.isfinite(norm):
        return StepDecision(apply=False, grad_scale=0.0, grad_norm=norm)
    factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    return StepDecision(apply=True, grad_scale=float(np.float32(factor / loss_scale)), grad_norm=norm)


NUM_STEPS_SEEN = 8  # and the first pause of trials, which doubles
MAX_PAUSE = 512


@dataclass(frozen=True)
class TrialPolicy:
    """Whether the next step's updates are tried: [Note: versions] in update/pipeline.py.

    A trial that comes to nothing costs the drive's time in backward, and the end of the unit that is at it; one that is
    adopted saves that time. So nothing is tried while most of the last steps were clipped. Where trials come to nothing
    for another reason (a script edits gradients or states, or accumulates by hand), they pause for ever more steps.
    """

    were_plain: tuple[bool, ...] = ()  # whether the last steps were neither skipped nor clipped
    pause: int = 0  # steps that are left without trials
    next_pause: int = NUM_STEPS_SEEN

    @property
    def tries(self) -> bool:
        """Whether the next step's updates are tried."""
        return not self.pause and 2 * sum(self.were_plain) >= len(self.were_plain)

    def after_step(self, *, is_plain: bool, num_begun: int, num_adopted: int) -> TrialPolicy:
        """The policy after a step in which so many trials began, and so many were adopted."""
        pause, next_pause = max(0, self.pause - 1), self.next_pause
        if is_plain and 2 * num_adopted < num_begun:
            pause, next_pause = next_pause, min(2 * next_pause, MAX_PAUSE)
        elif num_adopted:
            next_pause = NUM_STEPS_SEEN
        return TrialPolicy((*self.were_plain, is_plain)[-NUM_STEPS_SEEN:], pause, next_pause)


@dataclass(frozen=True)
class LossScale:
    """The state of loss scaling (Micikevicius et al. 2018, section 3.2; hysteresis as in Megatron-LM).

    Static when `config.static` is not 0. Dynamic: a non-finite step uses one unit of hysteresis and, when none
    is left, halves the scale. Good steps in a row double it and restore the hysteresis at those steps where DeepSpeed
    does: when `window` of them, or a multiple, are past, so with the step after them. With `consecutive_hysteresis`
    each good step restores the hysteresis.
    """

    config: LossScaleConfig
    scale: float
    good_steps: int  # since the last non-finite one, or the start
    hysteresis_left: int

    @staticmethod
    def initial(config: LossScaleConfig | None) -> LossScale:
        """The state before the first step; None without scaling."""
        if config is None:
            config = LossScaleConfig(static=1.0)
        scale = config.static or 2.0**config.initial_scale_power
        return LossScale(config, scale, good_steps=0, hysteresis_left=config.hysteresis)

    def after_step(self, *, finite: bool) -> LossScale:
        """The state after one step."""
        if self.config.static:
            return self
        if not finite:
            if self.hysteresis_left > 1:
                return replace(self, good_steps=0, hysteresis_left=self.hysteresis_left - 1)
            scale = max(self.scale / 2, self.config.min_scale)
            return replace(self, scale=scale, good_steps=0)
        doubles = self.good_steps % self.config.window == 0 and self.good_steps > 0
        restores = self.config.consecutive_hysteresis or doubles
        return replace(
            self,
            scale=self.scale * 2 if doubles else self.scale,
            good_steps=self.good_steps + 1,
            hysteresis_left=self.config.hysteresis if restores else self.hysteresis_left,
        )
