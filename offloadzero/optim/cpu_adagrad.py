"""CPUAdagrad: Adagrad for parameters in host memory, as a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from offloadzero.errors import ConfigError
from offloadzero.native.hyper import AdagradHyper
from offloadzero.native.kernels import adagrad_step
from offloadzero.optim.cpu_optimizer import CPUOptimizer

# Keys of a torch.optim.Adagrad parameter group that are carried along: [Note: CPU optimizer state_dict].
_TORCH_GROUP_DEFAULTS = {"foreach": None, "maximize": False, "differentiable": False, "fused": None}


class CPUAdagrad(CPUOptimizer):
    """Adagrad (Duchi et al. 2011) as torch.optim.Adagrad does it, on the CPU.

    Parameters and master weights as for CPUAdam; the state is `step` (fp32 scalar) and `sum` (fp32), the sum of
    the squared gradients. The state_dict is torch.optim.Adagrad's: [Note: CPU optimizer state_dict].

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a 0-dim tensor.
        lr_decay: the rate of step k is lr / (1 + (k - 1) * lr_decay).
        weight_decay: added to the gradient (L2).
        initial_accumulator_value: `sum` before the first step.
        eps: added to the square root of `sum`.
        num_threads: threads of one update; None is `native.kernels.DEFAULT_NUM_THREADS`.

    Raises ConfigError for a parameter or an option it cannot train with.
    """

    MOMENTS = ("sum",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        num_threads: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            **_TORCH_GROUP_DEFAULTS,
        }
        super().__init__(params, defaults, num_threads=num_threads)

    def _check_group(self, group: dict[str, Any]) -> None:
        _hyper_of(group)
        initial = group["initial_accumulator_value"]
        if not initial >= 0.0:
            raise ConfigError("initial_accumulator_value", initial, "allowed numbers >= 0")

    def _initial_moment(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:  # noqa: ARG002
        return torch.full_like(
            param,
            group["initial_accumulator_value"],
            dtype=torch.float32,
            memory_format=torch.preserve_format,
        )

    def _update(
        self, param: Tensor, grad: Tensor, master: Tensor | None, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        adagrad_step(
            param,
            grad,
            state["sum"],
            hyper=_hyper_of(group),
            step=state["step"],
            grad_scale=-1.0 if group["maximize"] else 1.0,
            master=master,
            num_threads=self.num_threads,
        )


def _hyper_of(group: dict[str, Any]) -> AdagradHyper:
    return AdagradHyper(
        lr=float(group["lr"]),
        lr_decay=float(group["lr_decay"]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )
