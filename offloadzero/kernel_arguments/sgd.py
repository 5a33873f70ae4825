"""Hyperparameters of SGD with momentum, and the scalars of one step."""

from __future__ import annotations

from dataclasses import dataclass

from offloadzero.errors import ConfigError
from offloadzero.kernel_arguments.scalars import StepScalars, check_at_least_0, round_scalars


@dataclass(frozen=True)
class SgdHyper:
    """Hyperparameters of one step of SGD as torch.optim.SGD does it; `weight_decay` is added to the gradient (L2).

    Raises ConfigError for one that is negative or not finite, and for `nesterov` without momentum or with dampening.
    """

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "dampening", "weight_decay"):
            check_at_least_0(name, getattr(self, name))
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigError("nesterov", True, "needs a momentum above 0 and a dampening of 0")

    def scalars(self, *, step: int, grad_scale: float = 1.0) -> StepScalars:
        """Return the fp32 scalars of step number `step`, from 1: the first gradient is not dampened.

        Raises ConfigError for a step below 1, and where a scalar overflows.
        """
        if step < 1:
            raise ConfigError("step", step, "allowed integers >= 1")
        exact = (
            grad_scale,
            *self._factors(step),
            *(0.0, self.lr, 0.0, 1.0, self.weight_decay, 0.0, 0.0),
        )
        return round_scalars(exact, decoupled=False, given=(self, grad_scale))

    def _factors(self, step: int) -> tuple[float, float, float, float]:
        """The factors of the buffer and of the gradient: two for the new buffer, then two for the update."""
        if self.momentum == 0.0:
            return 1.0, 0.0, 0.0, 1.0
        if self.nesterov:
            return self.momentum, 1.0, self.momentum, 1.0
        return self.momentum, 1.0 if step == 1 else 1.0 - self.dampening, 1.0, 0.0
