"""CPUAdam, CPULion and CPUAdagrad: optimizers for parameters in host memory, as torch optimizers.

They stand alone: no engine, no offload, any model on the CPU. bf16 and fp16 parameters are trained with exact
fp32 master weights; with CPUAdam bf16 parameters can be trained with a compact state instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from offloadzero.arithmetic.remainders import COMPACT_REMAINDER_DTYPE
from offloadzero.config.schema import STATE_LAYOUTS
from offloadzero.errors import ConfigError
from offloadzero.native import kernels
from offloadzero.native.hyper import AdagradHyper, AdamHyper, LionHyper
from offloadzero.native.kernels import compact_adam_step
from offloadzero.optim import compact_tensors
from offloadzero.optim.cpu_optimizer import CPUOptimizer, remainder_of

# Keys of torch's parameter groups that are carried along, so that a state_dict of either loads into the other: [Note:
# CPU optimizer state_dict].
_TORCH_GROUP_DEFAULTS = {"foreach": None, "maximize": False, "differentiable": False, "fused": None}


class CPUAdam(CPUOptimizer):
    """Adam (Kingma & Ba 2015) or, with `adamw_mode`, AdamW (Loshchilov & Hutter 2019) on the CPU.

    Parameters are bf16, fp16 or fp32, dense, on the CPU; their gradients may be of any of the three dtypes.
    State per parameter, in the parameter's shape: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq` (fp32),
    and what completes the fp32 master weight: `master_remainder` for bf16, the low 16 bits of its pattern as a signed
    number, and `master` (fp32) for fp16.
    The master decides: after the first step, writing to an fp16 parameter from outside has no effect unless
    its state is dropped, and writing to a bf16 parameter keeps the old remainder (at most half a unit in the
    last place).

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a 0-dim tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the square root of the second moment.
        weight_decay: decoupled with `adamw_mode`, otherwise added to the gradient (L2).
        bias_correction: divide the moments by 1 - beta**step.
        state_layout: "fp32", or "compact": contiguous bf16 parameters take 5.06 bytes with all of their state
            instead of 12, and are updated nearly as exactly; others keep the fp32 layout. Their
            state has the tensors of `optim.compact_tensors` in the place of exp_avg and exp_avg_sq.
        num_threads: threads of one update; None is `native.kernels.DEFAULT_NUM_THREADS`.

    The state_dict is torch.optim.AdamW's, and is loaded by copy; a group with amsgrad is refused. That of a compact
    state has tensors of its own. Either layout loads the other's, and AdamW's.
    Raises ConfigError for a parameter or an option it cannot train with.
    """

    MOMENTS = ("exp_avg", "exp_avg_sq")
    KERNEL = staticmethod(kernels.adam_step)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        state_layout: str = "fp32",
        num_threads: int | None = None,
    ) -> None:
        if state_layout not in STATE_LAYOUTS:
            raise ConfigError("state_layout", state_layout, f"allowed: {', '.join(STATE_LAYOUTS)}")
        self.state_layout = state_layout
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": adamw_mode,
            "amsgrad": False,
            "capturable": False,
            **_TORCH_GROUP_DEFAULTS,
        }
        super().__init__(params, defaults, num_threads=num_threads)

    def _hyper(self, group: dict[str, Any]) -> AdamHyper:
        return AdamHyper(
            **_numbers(group, "lr", "eps", "weight_decay"),
            **_betas(group),
            decoupled=bool(group["decoupled_weight_decay"]),
            bias_correction=bool(group["bias_correction"]),
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["amsgrad"]:
            raise ConfigError("amsgrad", True, "CPUAdam does not keep the maximum of the second moment")

    def _is_compact(self, param: Tensor) -> bool:
        return self.state_layout == "compact" and param.dtype == torch.bfloat16 and param.is_contiguous()

    def _step_param(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not self._is_compact(param):
            super()._step_param(param, grad, group)
            return
        state: dict[str, Tensor] = self.state[param]
        if not state:
            step = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state.update(step=step, **compact_tensors.zeros(param))
        flat_param, *record = compact_tensors.flat_record(param, state)
        compact_adam_step(
            flat_param,
            grad.view(-1),
            *record,
            **self._step_arguments(group),
            step=int(state["step"].item()) + 1,
        )
        state["step"] += 1

    def _restored(self, name: str, param: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        was_compact, is_compact = compact_tensors.is_compact(saved), self._is_compact(param)
        if not was_compact:
            exact = super()._restored(name, param, saved)
            if not exact or not is_compact:
                return exact
            step = exact.pop("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
            return {"step": step, **compact_tensors.encoded(param, exact)}
        if "master" in saved and "master_remainder" not in saved:  # an offloaded optimizer has saved it
            saved = {
                **saved,
                "master_remainder": remainder_of(name, param, saved["master"], COMPACT_REMAINDER_DTYPE),
            }
        copies = compact_tensors.checked(name, param, saved)
        step = torch.tensor(float(saved.get("step", 0.0)), dtype=torch.float32, device="cpu")
        if is_compact:
            return {"step": step, **copies}
        return super()._restored(name, param, {"step": step, **compact_tensors.decoded(param, copies)})

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that pickle and deepcopy keep."""
        return {**super().__getstate__(), "state_layout": self.state_layout}


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
    KERNEL = staticmethod(kernels.lion_step)

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

    def _hyper(self, group: dict[str, Any]) -> LionHyper:
        return LionHyper(**_numbers(group, "lr", "weight_decay"), **_betas(group))


class CPUAdagrad(CPUOptimizer):
    """Adagrad (Duchi et al. 2011) as torch.optim.Adagrad does it, on the CPU.

    Parameters and master weights as for CPUAdam; the state is `step` (fp32 scalar) and `sum` (fp32), the sum of
    the squared gradients. The state_dict is torch.optim.Adagrad's.

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
    KERNEL = staticmethod(kernels.adagrad_step)

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

    def _hyper(self, group: dict[str, Any]) -> AdagradHyper:
        return AdagradHyper(**_numbers(group, "lr", "lr_decay", "eps", "weight_decay"))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
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


def _numbers(group: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: float(group[name]) for name in names}


def _betas(group: dict[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2)}
