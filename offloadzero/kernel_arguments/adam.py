"""Hyperparameters of Adam and AdamW, and the scalars of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offloadzero.errors import ConfigError
from offloadzero.kernel_arguments.scalars import StepScalars, round_scalars


@dataclass(frozen=True)
class AdamHyper:
    """Hyperparameters of one Adam step (Kingma & Ba 2015; `decoupled`: AdamW, Loshchilov & Hutter 2019).

    Raises ConfigError for one that is negative or not finite, and for a beta outside of [0, 1).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    bias_correction: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise ConfigError(name, value, "allowed finite numbers >= 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(name, value, "allowed numbers in [0, 1)")


def adam_scalars(hyper: AdamHyper, *, step: int, grad_scale: float = 1.0) -> StepScalars:
    """Return the fp32 scalars of step number `step` (the first is 1), for any device that repeats the arithmetic.

    `decay` is 1 - lr * weight_decay when decoupled and 1 otherwise. Raises ConfigError for a step below 1, and where a
    scalar overflows fp32.
    """
    if step < 1:
        raise ConfigError("step", step, "allowed integers >= 1")
    bias_correction1 = 1.0 - hyper.beta1**step if hyper.bias_correction else 1.0
    bias_correction2 = 1.0 - hyper.beta2**step if hyper.bias_correction else 1.0
    exact = (
        grad_scale,
        hyper.beta1,
        1.0 - hyper.beta1,
        hyper.beta2,
        1.0 - hyper.beta2,
        hyper.eps,
        hyper.lr / bias_correction1,
        1.0 / math.sqrt(bias_correction2),
        1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0,
        hyper.weight_decay,
        math.sqrt(hyper.beta2),
        math.sqrt(1.0 - hyper.beta2),
    )
    return round_scalars(exact, decoupled=hyper.decoupled, given=(hyper, grad_scale))
