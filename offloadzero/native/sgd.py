"""The SGD kernel as typed calls; see `native.kernels` for the rules that all kernels share."""

from __future__ import annotations

from torch import Tensor

from offloadzero.kernel_arguments.sgd import SgdHyper
from offloadzero.native import _kernels
from offloadzero.native.kernels import GradCheck, Isa, checked_step
from offloadzero.native.lion_adagrad import moment_arguments


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
    """One step of SGD in place, in one pass over memory; dtypes and result are those of `kernels.adam_step`.

    Without momentum `momentum_buffer` (fp32) is not changed; `step` counts from 1.
    """
    scalars = hyper.scalars(step=step, grad_scale=grad_scale)
    moment = ("momentum_buffer", momentum_buffer)
    arguments = moment_arguments(param, grad, moment, master, scalars, num_threads, isa)
    return checked_step(
        lambda with_sq_norm: _kernels.sgd_step(*arguments, with_sq_norm),
        grad,
        grad_check=grad_check,
        num_threads=num_threads,
        isa=isa,
    )
