"""Hyperparameters of Lion, and the scalars of one step."""

from __future__ import annotations

from dataclasses import dataclass

from offloadzero.errors import ConfigError
from offloadzero.kernel_arguments.scalars import StepScalars, check_at_least_0, round_scalars


@dataclass(frozen=True)
class LionHyper:
    """Hyperparameters of one Lion step (Chen et al. 2023, arXiv 2302.06675); weight decay is decoupled.

    Raises ConfigError for one that is negative or not finite, and for a beta outside of [0, 1).
    """

    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            check_at_least_0(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(name, value, "allowed numbers in [0, 1)")

    def scalars(self, *, grad_scale: float = 1.0) -> StepScalars:
        """Return the fp32 scalars of a step. Raises ConfigError where one overflows."""
        decay = 1.0 - self.lr * self.weight_decay
        exact = (
            grad_scale,
            *(self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2),
            *(0.0, self.lr, 0.0, decay, self.weight_decay, 0.0, 0.0),
        )
        return round_scalars(exact, decoupled=True, given=(self, grad_scale))
