"""CPUAdam: Adam and AdamW for parameters in host memory, as a torch optimizer.

It stands alone: no engine, no offload, any model on the CPU. bf16 and fp16 parameters are trained with exact
fp32 master weights; bf16 parameters can be trained with a compact state instead.
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
from offloadzero.native.compact import compact_adam_step
from offloadzero.native.hyper import AdamHyper
from offloadzero.optim import compact_tensors
from offloadzero.optim.cpu_optimizer import CPUOptimizer, remainder_of

# Keys of a torch.optim.AdamW parameter group that CPUAdam carries along, so that a state_dict of either loads
# into the other: [Note: CPU optimizer state_dict].
_TORCH_GROUP_DEFAULTS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


class CPUAdam(CPUOptimizer):
    """Adam (Kingma & Ba 2015) or, with `adamw_mode`, AdamW (Loshchilov & Hutter 2019) on the CPU.

    Parameters are bf16, fp16 or fp32, dense, on the CPU; their gradients may be of any of the three dtypes.
    State per parameter, in the parameter's shape: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq` (fp32),
    and what completes the fp32 master weight: `master_remainder` for bf16, of [Note: bf16 split] in
    csrc/cpu_adam/remainders.h, and `master` (fp32) for fp16.
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
            instead of 12, and are updated nearly as exactly (docs/compact.md); others keep the fp32 layout. Their
            state has the tensors of `optim.compact_tensors` in the place of exp_avg and exp_avg_sq.
        num_threads: threads of one update; None is `native.kernels.DEFAULT_NUM_THREADS`.

    The state_dict is torch.optim.AdamW's: [Note: CPU optimizer state_dict]; a group with amsgrad is refused. That of
    a compact state has tensors of its own. Either layout loads the other's, and AdamW's.
    Raises ConfigError for a parameter or an option it cannot train with.
    """

    MOMENTS = ("exp_avg", "exp_avg_sq")

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
            **_TORCH_GROUP_DEFAULTS,
        }
        super().__init__(params, defaults, num_threads=num_threads)

    def _check_group(self, group: dict[str, Any]) -> None:
        _hyper_of(group)
        if group["amsgrad"]:
            raise ConfigError("amsgrad", True, "CPUAdam does not keep the maximum of the second moment")

    def _update(
        self, param: Tensor, grad: Tensor, master: Tensor | None, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        kernels.adam_step(
            param,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            hyper=_hyper_of(group),
            step=state["step"],
            grad_scale=_grad_scale(group),
            master=master,
            num_threads=self.num_threads,
        )

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
            hyper=_hyper_of(group),
            step=int(state["step"].item()) + 1,
            grad_scale=_grad_scale(group),
            num_threads=self.num_threads,
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


def _grad_scale(group: dict[str, Any]) -> float:
    return -1.0 if group["maximize"] else 1.0


def _hyper_of(group: dict[str, Any]) -> AdamHyper:
    beta1, beta2 = group["betas"]
    return AdamHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        bias_correction=bool(group["bias_correction"]),
    )
