"""The typed face of the SGD kernel; see `native.cpu_adam` for what all kernels share (floor 2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offloadzero.errors import ConfigError
from offloadzero.native import _cpu_adam
from offloadzero.native.cpu_adam import AdamScalars, GradCheck, Isa, checked_step, round_scalars
from offloadzero.native.lion_adagrad import check_at_least_0, moment_arguments


@dataclass(frozen=True)
class SgdHyper:
    """Hyperparameters of one step of SGD as torch.optim.SGD does it; `weight_decay` is added to the gradient (L2)."""

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

    def scalars(self, *, step: int, grad_scale: float = 1.0) -> AdamScalars:
        """The fp32 scalars of step number `step`, from 1: the first gradient is not dampened."""
        if step < 1:
            raise ConfigError("step", step, "allowed integers >= 1")
        exact = (
            grad_scale,
            *self._factors(step),
            *(0.0, self.lr, 0.0, 1.0, self.weight_decay, 0.0, 0.0),
        )
        return round_scalars(exact, decoupled=False, given=(self, grad_scale))

    def _factors(self, step: int) -> tuple[float, float, float, float]:
        """Of the buffer and of the gradient: first in the new buffer, then in the update."""
        if self.momentum == 0.0:
            return 1.0, 0.0, 0.0, 1.0
        if self.nesterov:
            return self.momentum, 1.0, self.momentum, 1.0
        return self.momentum, 1.0 if step == 1 else 1.0 - self.dampening, 1.0, 0.0


def sgd_step(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    hyper: SgdHyper,
    step: int,
    grad_scale: float = 1.0,
    master: Tensor | None = None,
    grad_check: GradCheck = GradCheck.OFF,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> float | None:
    """One step of SGD in place, in one pass over memory; dtypes and result as of `cpu_adam.adam_step`.

    Without momentum `momentum_buffer` (fp32) stays what it is; `step` counts from 1.
    """
    scalars = hyper.scalars(step=step, grad_scale=grad_scale)
    moment = ("momentum_buffer", momentum_buffer)
    arguments = moment_arguments(param, grad, moment, master, scalars, num_threads, isa)
    return checked_step(
        lambda with_sq_norm: _cpu_adam.sgd_step(*arguments, with_sq_norm),
        grad,
        grad_check=grad_check,
        num_threads=num_threads,
        isa=isa,
    )
