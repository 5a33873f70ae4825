"""Hyperparameters of the optimizers, and the scalars of one step, rounded as the kernels take them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

from offloadzero.errors import ConfigError


class StepScalars(NamedTuple):
    """The scalars of one step, each computed in double and rounded to fp32 once.

    The fields are those of the struct in csrc/cpu_adam/cpu_adam.h, in its order; the notes on arithmetic there
    say how they are used. An optimizer leaves the fields that it does not use at 0.
    """

    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float
    inv_sqrt_bias_correction2: float
    decay: float
    weight_decay: float
    sqrt_beta2: float
    sqrt_one_minus_beta2: float
    decoupled: bool

    @property
    def with_l2(self) -> bool:
        """Whether the weight decay is added to the gradient (L2)."""
        return not self.decoupled and self.weight_decay != 0.0


_FLOATS = struct.Struct("<12f")  # the standard sizes: native "f" does not report overflow


@dataclass(frozen=True)
class _Hyper:
    """Hyperparameters of one step. Raises ConfigError for one that is out of its range."""

    lr: float

    def _expect_at_least_0(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise ConfigError(name, value, "allowed finite numbers >= 0")

    def _expect_betas(self, **betas: float) -> None:
        for name, value in betas.items():
            if not 0.0 <= value < 1.0:
                raise ConfigError(name, value, "allowed numbers in [0, 1)")

    def _rounded(
        self,
        grad_scale: float,
        *,
        step_size: float,
        betas: tuple[float, float, float, float] = (
            0.0,
            0.0,
            0.0,
            0.0,
        ),  # those of both moments, and 1 minus each
        eps: float = 0.0,
        inv_sqrt_bias_correction2: float = 0.0,
        decay: float = 1.0,
        weight_decay: float,
        roots: tuple[float, float] = (0.0, 0.0),
        decoupled: bool = False,
    ) -> StepScalars:
        """Round the fields of StepScalars to fp32. Raises ConfigError where one overflows."""
        exact = (grad_scale, *betas, eps, step_size, inv_sqrt_bias_correction2, decay, weight_decay, *roots)
        try:
            rounded = _FLOATS.unpack(_FLOATS.pack(*exact))
        except OverflowError:
            raise ConfigError("hyper", (self, grad_scale), "every number must fit fp32") from None
        return StepScalars._make((*rounded, decoupled))


def _expect_step(step: int) -> None:
    if step < 1:
        raise ConfigError("step", step, "allowed integers >= 1")


@dataclass(frozen=True)
class AdamHyper(_Hyper):
    """Hyperparameters of one Adam step (Kingma & Ba 2015; `decoupled`: AdamW, Loshchilov & Hutter 2019)."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    bias_correction: bool = True

    def __post_init__(self) -> None:
        self._expect_at_least_0("lr", "eps", "weight_decay")
        self._expect_betas(beta1=self.beta1, beta2=self.beta2)

    def scalars(self, *, step: int, grad_scale: float = 1.0) -> StepScalars:
        """Return the fp32 scalars of step number `step` (the first is 1), for any device that repeats the arithmetic.

        `decay` is 1 - lr * weight_decay when decoupled and 1 otherwise. Raises ConfigError for a step below 1, and
        where a scalar overflows fp32.
        """
        _expect_step(step)
        bias_correction1 = 1.0 - self.beta1**step if self.bias_correction else 1.0
        bias_correction2 = 1.0 - self.beta2**step if self.bias_correction else 1.0
        return self._rounded(
            grad_scale,
            betas=(self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2),
            eps=self.eps,
            step_size=self.lr / bias_correction1,
            inv_sqrt_bias_correction2=1.0 / math.sqrt(bias_correction2),
            decay=1.0 - self.lr * self.weight_decay if self.decoupled else 1.0,
            weight_decay=self.weight_decay,
            roots=(math.sqrt(self.beta2), math.sqrt(1.0 - self.beta2)),
            decoupled=self.decoupled,
        )


@dataclass(frozen=True)
class AdagradHyper(_Hyper):
    """Hyperparameters of one Adagrad step as torch.optim.Adagrad does it (Duchi et al. 2011).

    The learning rate of step k (from 1) is lr / (1 + (k - 1) * lr_decay); `weight_decay` is added to the gradient (L2).
    """

    lr_decay: float
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        self._expect_at_least_0("lr", "lr_decay", "eps", "weight_decay")

    def scalars(self, *, step: int, grad_scale: float = 1.0) -> StepScalars:
        """Return the fp32 scalars of step number `step`, from 1. Raises ConfigError for 0, and where one overflows."""
        _expect_step(step)
        rate = self.lr / (1.0 + (step - 1) * self.lr_decay)
        return self._rounded(grad_scale, eps=self.eps, step_size=rate, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class LionHyper(_Hyper):
    """Hyperparameters of one Lion step (Chen et al. 2023, arXiv 2302.06675); weight decay is decoupled."""

    beta1: float
    beta2: float
    weight_decay: float

    def __post_init__(self) -> None:
        self._expect_at_least_0("lr", "weight_decay")
        self._expect_betas(beta1=self.beta1, beta2=self.beta2)

    def scalars(self, *, grad_scale: float = 1.0) -> StepScalars:
        """Return the fp32 scalars of a step. Raises ConfigError where one overflows."""
        return self._rounded(
            grad_scale,
            betas=(self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2),
            step_size=self.lr,
            decay=1.0 - self.lr * self.weight_decay,
            weight_decay=self.weight_decay,
            decoupled=True,
        )


@dataclass(frozen=True)
class SgdHyper(_Hyper):
    """Hyperparameters of one step of SGD as torch.optim.SGD does it; `weight_decay` is added to the gradient (L2).

    `nesterov` needs a momentum, and no dampening.
    """

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool = False

    def __post_init__(self) -> None:
        self._expect_at_least_0("lr", "momentum", "dampening", "weight_decay")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigError("nesterov", True, "needs a momentum above 0 and a dampening of 0")

    def scalars(self, *, step: int, grad_scale: float = 1.0) -> StepScalars:
        """Return the fp32 scalars of step number `step`, from 1: the first gradient is not dampened.

        Raises ConfigError for a step below 1, and where a scalar overflows.
        """
        _expect_step(step)
        return self._rounded(
            grad_scale, betas=self._factors(step), step_size=self.lr, weight_decay=self.weight_decay
        )

    def _factors(self, step: int) -> tuple[float, float, float, float]:
        """The factors of the buffer and of the gradient: two for the new buffer, then two for the update."""
        if self.momentum == 0.0:
            return 1.0, 0.0, 0.0, 1.0
        if self.nesterov:
            return self.momentum, 1.0, self.momentum, 1.0
        return self.momentum, 1.0 if step == 1 else 1.0 - self.dampening, 1.0, 0.0


MAX_NS_STEPS = 99  # torch's
LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class MuonHyper(_Hyper):
    """Hyperparameters of one Muon step as torch.optim.Muon does it (Jordan et al. 2024); no kernel takes them."""

    momentum: float
    weight_decay: float
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None

    def __post_init__(self) -> None:
        self._expect_at_least_0("lr", "momentum", "weight_decay", "eps")
        if len(self.ns_coefficients) != 3:
            raise ConfigError("ns_coefficients", self.ns_coefficients, "three numbers")
        if not 0 <= self.ns_steps <= MAX_NS_STEPS:
            raise ConfigError("ns_steps", self.ns_steps, f"0 to {MAX_NS_STEPS}")
        if self.adjust_lr_fn not in LR_ADJUSTMENTS:
            allowed = ", ".join(map(str, LR_ADJUSTMENTS))
            raise ConfigError("adjust_lr_fn", self.adjust_lr_fn, allowed)

    def adjusted_lr(self, num_rows: int, num_columns: int) -> float:
        """The rate of a matrix's orthogonal update: "original" is Jordan's, the other Moonshot's (arXiv 2502.16982)."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(num_rows, num_columns)))
        return self.lr * math.sqrt(max(1, num_rows / num_columns))
