"""CPUAdam: Adam and AdamW for parameters in host memory, as a torch optimizer (floor 4).

It stands alone: no engine, no offload, any model on the CPU. bf16 and fp16 parameters are trained with exact
fp32 master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from offloadzero.errors import ConfigError
from offloadzero.native import cpu_adam
from offloadzero.native.cpu_adam import AdamHyper

# Keys of a torch.optim.AdamW parameter group that CPUAdam carries along, so that a state_dict of either loads
# into the other: [Note: CPUAdam state_dict].
_TORCH_GROUP_DEFAULTS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}

# Tensors of one parameter's state and their dtypes. "step" is torch's: an fp32 scalar on the CPU.
_STATE_DTYPES = {
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "master_remainder": torch.int16,
    "master": torch.float32,
}
_MASTER_KEY = {torch.bfloat16: "master_remainder", torch.float16: "master", torch.float32: None}


class CPUAdam(Optimizer):
    """Adam (Kingma & Ba 2015) or, with `adamw_mode`, AdamW (Loshchilov & Hutter 2019) on the CPU.

    Parameters are bf16, fp16 or fp32, dense, on the CPU; their gradients may be of any of the three dtypes.
    State per parameter, in the parameter's shape: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq` (fp32),
    and what completes the fp32 master weight: `master_remainder` (int16) for bf16, `master` (fp32) for fp16.
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
        num_threads: threads of one update; None is `native.cpu_adam.get_default_num_threads()`.

    Raises ConfigError for a parameter or an option it cannot train with.

    [Note: CPUAdam state_dict]
    The state_dict has torch.optim.AdamW's layout, so it loads there and AdamW's loads here: fp32 parameters
    continue with the same moments and step either way. Loading keeps fp32 moments and int16 remainders as
    they are, where torch would cast them to the parameter's dtype. An absent remainder starts at 0, an
    absent fp16 master as the parameter's value. A group with amsgrad is refused; maximize is honoured;
    torch's implementation choices (foreach, fused, ...) are carried along unused.
    """

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
        num_threads: int | None = None,
    ) -> None:
        self.num_threads = num_threads
        self._restored_state: list[dict[str, Tensor]] | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": adamw_mode,
            **_TORCH_GROUP_DEFAULTS,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuses parameters that are not dense CPU tensors in bf16, fp16 or fp32."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            for index, param in enumerate(group["params"]):
                _check_param(f"param_groups[{len(self.param_groups) - 1}].params[{index}]", param)
        except ConfigError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; `closure` runs the model again and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group_index, group in enumerate(self.param_groups):
            hyper = _hyper_of(group)
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    name = f"param_groups[{group_index}].params[{index}]"
                    grad = _in_order_of(param, param.grad, name=name)
                    self._update(param, grad, hyper, maximize=group["maximize"])
        return loss

    def _update(self, param: Tensor, grad: Tensor, hyper: AdamHyper, *, maximize: bool) -> None:
        state = self._state_of(param)
        master_key = _MASTER_KEY[param.dtype]
        cpu_adam.adam_step(
            _flat(param),
            _flat(grad),
            _flat(state["exp_avg"]),
            _flat(state["exp_avg_sq"]),
            hyper=hyper,
            step=int(state["step"].item()) + 1,
            grad_scale=-1.0 if maximize else 1.0,
            master=None if master_key is None else _flat(state[master_key]),
            num_threads=self.num_threads,
        )
        state["step"] += 1

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        """The parameter's state, with what is missing added."""
        state: dict[str, Any] = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
        if param.dtype == torch.bfloat16 and "master_remainder" not in state:
            state["master_remainder"] = torch.zeros_like(param, dtype=torch.int16)
        if param.dtype == torch.float16 and "master" not in state:
            state["master"] = param.detach().float()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of CPUAdam or torch.optim.AdamW, by copy: [Note: CPUAdam state_dict].

        Raises ConfigError, and changes nothing, for a state or a group that CPUAdam cannot continue from.
        """
        # torch casts floating-point state to the parameter's dtype on the way to __setstate__. So the last
        # pre-hook copies the originals, and __setstate__ puts them in place before the post-hooks run.
        hook = self.register_load_state_dict_pre_hook(lambda _, saved: self._restore(saved))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self._restored_state = None

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy keep."""
        return {**super().__getstate__(), "num_threads": self.num_threads, "_restored_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded, unpickled or copied state."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        if self._restored_state is not None:
            params = [param for group in self.param_groups for param in group["params"]]
            for param, restored in zip(params, self._restored_state, strict=True):
                if restored:
                    self.state[param].update(restored)

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Check a state_dict and copy its tensors, parameter by parameter in the order of the groups."""
        for group in state_dict["param_groups"]:
            _check_group({**self.defaults, **group})
        params = [param for group in self.param_groups for param in group["params"]]
        saved_keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        # Numbers of groups and parameters that differ are torch's to report, right after this.
        self._restored_state = [
            _restored(f"state[{key}]", param, state_dict["state"].get(key, {}))
            for param, key in zip(params, saved_keys, strict=False)
        ]


def _restored(name: str, param: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of the saved tensors in the parameter's shape and memory order, in the dtypes of CPUAdam."""
    restored: dict[str, Tensor] = {}
    for key, dtype in _STATE_DTYPES.items():
        if key not in saved:
            continue
        value = saved[key]
        if value.shape != param.shape:
            raise ConfigError(f"{name}.{key}", tuple(value.shape), f"must have shape {tuple(param.shape)}")
        if key == "master_remainder" and value.dtype != torch.int16:
            raise ConfigError(f"{name}.{key}", value.dtype, "must be torch.int16")
        restored[key] = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).copy_(value)
    if "step" in saved:
        restored["step"] = torch.tensor(float(saved["step"]), dtype=torch.float32)
    return restored


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


def _check_group(group: dict[str, Any]) -> None:
    _hyper_of(group)
    if group["amsgrad"]:
        raise ConfigError("amsgrad", True, "CPUAdam does not keep the maximum of the second moment")


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one block of memory, each once, whatever the order of the strides."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _check_param(name: str, param: Tensor) -> None:
    what = f"{param.dtype} on {param.device}"
    if param.dtype not in _MASTER_KEY:
        raise ConfigError(name, what, "allowed torch.bfloat16, torch.float16, torch.float32")
    if not param.is_cpu:
        raise ConfigError(name, what, "CPUAdam trains parameters on the CPU")
    if param.layout != torch.strided or not _is_dense(param):
        raise ConfigError(name, what, "must be dense in memory (no gaps, no element twice)")


def _in_order_of(param: Tensor, grad: Tensor, *, name: str) -> Tensor:
    """The gradient in the memory order of the parameter; a copy where they differ."""
    if grad.layout != torch.strided:
        raise ConfigError(f"{name}.grad", str(grad.layout), "CPUAdam takes dense gradients only")
    if param.is_contiguous():
        return grad.contiguous()
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=grad.dtype, memory_format=torch.preserve_format).copy_(grad)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a vector, in memory order."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))
