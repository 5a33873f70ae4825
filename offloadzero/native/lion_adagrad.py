"""The Lion and Adagrad kernels as typed calls; see `native.kernels` for the rules that all kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from offloadzero.kernel_arguments.adagrad import AdagradHyper
from offloadzero.kernel_arguments.lion import LionHyper
from offloadzero.kernel_arguments.scalars import StepScalars
from offloadzero.kernel_arguments.tensors import address, float_code, layout_code, typed_address
from offloadzero.native import _kernels
from offloadzero.native.kernels import GradCheck, Isa, check_num_threads, checked_step, isa_code

_Arguments = tuple[int, int, int, int, int, int, int, int, int, StepScalars]


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
    """One Lion step in place, in one pass over memory; dtypes and result are those of `kernels.adam_step`."""
    scalars = hyper.scalars(grad_scale=grad_scale)
    arguments = moment_arguments(param, grad, ("exp_avg", exp_avg), master, scalars, num_threads, isa)
    return checked_step(
        lambda with_sq_norm: _kernels.lion_step(*arguments, with_sq_norm),
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
    """One Adagrad step in place, in one pass over memory; dtypes and result are those of `kernels.adam_step`.

    `square_sum` (fp32) is the sum of the squared gradients; `step` counts from 1.
    """
    scalars = hyper.scalars(step=step, grad_scale=grad_scale)
    arguments = moment_arguments(param, grad, ("square_sum", square_sum), master, scalars, num_threads, isa)
    return checked_step(
        lambda with_sq_norm: _kernels.adagrad_step(*arguments, with_sq_norm),
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
    scalars: StepScalars,
    num_threads: int | None,
    isa: Isa | None,
) -> _Arguments:
    """The arguments of the kernels with one fp32 moment, here `moment`; its name is used in errors."""
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
