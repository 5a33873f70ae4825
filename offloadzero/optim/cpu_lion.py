"""CPULion: Lion for parameters in host memory, as a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from offloadzero.native.hyper import LionHyper
from offloadzero.native.kernels import lion_step
from offloadzero.optim.cpu_optimizer import CPUOptimizer


class CPULion(CPUOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2) on the CPU; weight decay is decoupled.

    Parameters and master weights as for CPUAdam; the state's one moment is `exp_avg` (fp32). The state_dict is
    that of the other Lions (lr, betas, weight_decay; exp_avg).

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a 0-dim tensor; about a tenth of AdamW's.
        betas: weight of the moment in the update, decay rate of the moment; each in [0, 1).
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        num_threads: threads of one update; None is `native.kernels.DEFAULT_NUM_THREADS`.

    Raises ConfigError for a parameter or an option it cannot train with.
    """

    MOMENTS = ("exp_avg",)
    COUNTS_STEPS = False

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        num_threads: int | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, num_threads=num_threads)

    def _check_group(self, group: dict[str, Any]) -> None:
        _hyper_of(group)

    def _update(
        self, param: Tensor, grad: Tensor, master: Tensor | None, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        lion_step(
            param,
            grad,
            state["exp_avg"],
            hyper=_hyper_of(group),
            grad_scale=-1.0 if group["maximize"] else 1.0,
            master=master,
            num_threads=self.num_threads,
        )


def _hyper_of(group: dict[str, Any]) -> LionHyper:
    beta1, beta2 = group["betas"]
    return LionHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(group["weight_decay"]),
    )
