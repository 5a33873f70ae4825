"""Hyperparameters of Adagrad, and the scalars of one step."""

from __future__ import annotations

from dataclasses import dataclass

from offloadzero.errors import ConfigError
from offloadzero.kernel_arguments.scalars import StepScalars, check_at_least_0, round_scalars


@dataclass(frozen=True)
class AdagradHyper:
    """Hyperparameters of one Adagrad step as torch.optim.Adagrad does it (Duchi et al. 2011).

    The learning rate of step k (from 1) is lr / (1 + (k - 1) * lr_decay); `weight_decay` is added to the
    gradient (L2). Raises ConfigError for one that is negative or not finite.
    """

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "eps", "weight_decay"):
            check_at_least_0(name, getattr(self, name))

    def scalars(self, *, step: int, grad_scale: float = 1.0) -> StepScalars:
        """Return the fp32 scalars of step number `step`, from 1. Raises ConfigError for 0, and where one overflows."""
        if step < 1:
            raise ConfigError("step", step, "allowed integers >= 1")
        lr = self.lr / (1.0 + (step - 1) * self.lr_decay)
        exact = (grad_scale, 0.0, 0.0, 0.0, 0.0, self.eps, lr, 0.0, 1.0, self.weight_decay, 0.0, 0.0)
        return round_scalars(exact, decoupled=False, given=(self, grad_scale))
