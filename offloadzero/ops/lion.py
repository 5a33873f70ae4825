"""DeepSpeedCPULion: CPULion with DeepSpeed's arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from offloadzero.ops.adam import expect_only
from offloadzero.optim import CPULion


class DeepSpeedCPULion(CPULion):
    """CPULion under DeepSpeed's name. Raises ConfigError as DeepSpeedCPUAdam does."""

    def __init__(
        self,
        model_params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        expect_only("fp32_optimizer_states", fp32_optimizer_states, allowed=True)
        super().__init__(model_params, lr, betas, weight_decay)
