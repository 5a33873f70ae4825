"""The typed face of the Lion and Adagrad kernels; see `native.cpu_adam` for what all kernels share (floor 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offloadzero.errors import ConfigError
from offloadzero.native import _cpu_adam
from offloadzero.native.arguments import address, float_code, layout_code, typed_address
from offloadzero.native.cpu_adam import (
    AdamScalars,
    GradCheck,
    Isa,
    check_num_threads,
    checked_step,
    isa_code,
    round_scalars,
)

_Arguments = tuple[int, int, int, int, int, int, int, int, int, AdamScalars]


@dataclass(frozen=True)
class LionHyper:
    """Hyperparameters of one Lion step (Chen et al. 2023, arXiv 2302.06675); weight decay is decoupled."""

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

    def scalars(self, *, grad_scale: float = 1.0) -> AdamScalars:
        """The fp32 scalars of a step."""
        decay = 1.0 - self.lr * self.weight_decay
        exact = (
            grad_scale,
            *(self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2),
            *(0.0, self.lr, 0.0, decay, self.weight_decay, 0.0, 0.0),
        )
        return round_scalars(exact, decoupled=True, given=(self, grad_scale))


@dataclass(frozen=True)
class AdagradHyper:
    """Hyperparameters of one Adagrad step as torch.optim.Adagrad does it (Duchi et al. 2011).

    The learning rate of step k (from 1) is lr / (1 + (k - 1) * lr_decay); `weight_decay` is added to the
    gradient (L2).
    """

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "eps", "weight_decay"):
            check_at_least_0(name, getattr(self, name))

    def scalars(self, *, step: int, grad_scale: float = 1.0) -> AdamScalars:
        """The fp32 scalars of step number `step`, from 1."""
        if step < 1:
            raise ConfigError("step", step, "allowed integers >= 1")
        lr = self.lr / (1.0 + (step - 1) * self.lr_decay)
        exact = (grad_scale, 0.0, 0.0, 0.0, 0.0, self.eps, lr, 0.0, 1.0, self.weight_decay, 0.0, 0.0)
        return round_scalars(exact, decoupled=False, given=(self, grad_scale))


def check_at_least_0(name: str, value: float) -> None:
    """Raise ConfigError for a hyperparameter that is negative or not finite."""
    if not (value >= 0.0 and math.isfinite(value)):
        raise ConfigError(name, value, "allowed finite numbers >= 0")


def lion_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    *,
    hyper: LionHyper,
    grad_scale: float = 1.0,
    master: Tensor | None = None,
    grad_check: GradCheck = GradCheck.OFF,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> float | None:
    """One Lion step in place, in one pass over memory; dtypes and result as of `cpu_adam.adam_step`."""
    scalars = hyper.scalars(grad_scale=grad_scale)
    arguments = moment_arguments(param, grad, ("exp_avg", exp_avg), master, scalars, num_threads, isa)
    return checked_step(
        lambda with_sq_norm: _cpu_adam.lion_step(*arguments, with_sq_norm),
        grad,
        grad_check=grad_check,
        num_threads=num_threads,
        isa=isa,
    )


def adagrad_step(
    param: Tensor,
    grad: Tensor,
    square_sum: Tensor,
    *,
    hyper: AdagradHyper,
    step: int,
    grad_scale: float = 1.0,
    master: Tensor | None = None,
    grad_check: GradCheck = GradCheck.OFF,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> float | None:
    """One Adagrad step in place, in one pass over memory; dtypes and result as of `cpu_adam.adam_step`.

    `square_sum` (fp32) is the sum of the squared gradients; `step` counts from 1.
    """
    scalars = hyper.scalars(step=step, grad_scale=grad_scale)
    arguments = moment_arguments(param, grad, ("square_sum", square_sum), master, scalars, num_threads, isa)
    return checked_step(
        lambda with_sq_norm: _cpu_adam.adagrad_step(*arguments, with_sq_norm),
        grad,
        grad_check=grad_check,
        num_threads=num_threads,
        isa=isa,
    )


def moment_arguments(
    param: Tensor,
    grad: Tensor,
    moment: tuple[str, Tensor],
    master: Tensor | None,
    scalars: AdamScalars,
    num_threads: int | None,
    isa: Isa | None,
) -> _Arguments:
    """What the kernels of optimizers with one fp32 moment take; `moment` is its name, for errors, and it."""
    num_elements = param.numel()
    return (
        layout_code(param, master),
        float_code("grad", grad),
        address("param", param, num_elements),
        0 if master is None else address("master", master, num_elements),
        typed_address(*moment, num_elements, torch.float32),
        address("grad", grad, num_elements),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
        scalars,
    )
