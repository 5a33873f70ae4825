"""DeepSpeedCPUAdam and FusedAdam: CPUAdam with DeepSpeed's arguments in DeepSpeed's order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from offloadzero.errors import ConfigError
from offloadzero.optim import CPUAdam


class DeepSpeedCPUAdam(CPUAdam):
    """CPUAdam under DeepSpeed's name; `initialize()` and `offload()` take it as they take CPUAdam.

    Raises ConfigError for `amsgrad`, which DeepSpeed does not compute either, and without `fp32_optimizer_states`.
    """

    def __init__(
        self,
        model_params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        expect_only("amsgrad", amsgrad, allowed=False)
        smaller = '; smaller states are CPUAdam(state_layout="compact")'
        expect_only("fp32_optimizer_states", fp32_optimizer_states, allowed=True, hint=smaller)
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            adamw_mode=adamw_mode,
            bias_correction=bias_correction,
        )


class FusedAdam(CPUAdam):
    """CPUAdam under the name and with the arguments of DeepSpeed's Adam for GPUs, for `initialize()` and `offload()`.

    There the update runs where the states live. On its own it is CPUAdam, for parameters in host memory. Gradients are
    dropped, not set to zero, as `set_grad_none` says. Raises ConfigError for `amsgrad`, and without `set_grad_none`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        expect_only("amsgrad", amsgrad, allowed=False)
        expect_only("set_grad_none", set_grad_none, allowed=True)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            adamw_mode=adam_w_mode,
            bias_correction=bias_correction,
        )


def expect_only(name: str, value: object, *, allowed: object, hint: str = "") -> None:
    """Raise ConfigError for any value but `allowed`, the one that an argument of DeepSpeed's can have here."""
    if value != allowed:
        raise ConfigError(name, value, f"allowed: {allowed}{hint}")
