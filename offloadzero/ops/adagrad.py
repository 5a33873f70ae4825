"""DeepSpeedCPUAdagrad: CPUAdagrad with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from offloadzero.ops.adam import expect_only
from offloadzero.optim import CPUAdagrad


class DeepSpeedCPUAdagrad(CPUAdagrad):
    """CPUAdagrad under DeepSpeed's name. Raises ConfigError as DeepSpeedCPUAdam does."""

    def __init__(
        self,
        model_params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        expect_only("amsgrad", amsgrad, allowed=False)
        expect_only("fp32_optimizer_states", fp32_optimizer_states, allowed=True)
        super().__init__(model_params, lr, eps=eps, weight_decay=weight_decay)
