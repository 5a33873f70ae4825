"""The base of the CPU optimizers: parameters, fp32 master weights, state_dicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from offloadzero.arithmetic.device_math import split_master
from offloadzero.arithmetic.remainders import MASTER_DTYPES, REMAINDER_DTYPE
from offloadzero.core.torch_private import DisableTorchFunctionSubclass
from offloadzero.errors import ConfigError

_MASTER_KEY = {torch.bfloat16: "master_remainder", torch.float16: "master", torch.float32: None}
_MASTER_DTYPES = {key: MASTER_DTYPES[dtype] for dtype, key in _MASTER_KEY.items() if key is not None}


class CPUOptimizer(Optimizer, ABC):
    """Base of the optimizers for parameters in host memory; see CPUAdam for parameters and state.

    [Note: CPU optimizer state_dict]
    The state_dict has the layout of torch's optimizer of the same name, so it loads there and torch's loads
    here: fp32 parameters continue with the same state either way. Loading keeps fp32 moments and the
    remainders as they are, where torch would cast them to the parameter's dtype. An absent remainder starts at
    0, an absent fp16 master as the parameter's value. maximize is honoured; torch's implementation choices
    (foreach, fused, ...) are carried along unused.
    """

    # Names of the fp32 tensors of one parameter's state, in the parameter's shape.
    MOMENTS: ClassVar[tuple[str, ...]]
    # True if the state counts its steps, as torch does: "step", an fp32 scalar on the CPU.
    COUNTS_STEPS: ClassVar[bool] = True
    # The step of `native.kernels` on flat tensors in memory order: parameter, gradient, moments.
    KERNEL: ClassVar[Callable[..., None]]

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        num_threads: int | None,
    ) -> None:
        self.num_threads = num_threads
        self._restored_state: list[dict[str, Tensor]] | None = None
        super().__init__(params, defaults)

    @abstractmethod
    def _hyper(self, group: dict[str, Any]) -> Any:
        """Return the hyperparameters of a group. Raises ConfigError for one that is not allowed."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ConfigError if the options of a group are not allowed."""
        self._hyper(group)

    def _initial_moment(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:  # noqa: ARG002
        """Return a moment before the first step, in the parameter's shape and memory order."""
        return torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ConfigError for an option, or a parameter that is no dense CPU tensor in bf16, fp16 or fp32."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for index, param in enumerate(group["params"]):
                self._check_param(f"param_groups[{len(self.param_groups) - 1}].params[{index}]", param)
        except ConfigError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; `closure` runs the model again and returns the loss.

        Raises ConfigError for an option or a gradient that it cannot train with, and for a parameter whose value has
        left memory; the parameters before it are updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group_index, group in enumerate(self.param_groups):
            self._check_group(group)
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    name = f"param_groups[{group_index}].params[{index}]"
                    if _is_placeholder(param):
                        message = (
                            "its value has left memory: give this optimizer to offload() or initialize()"
                        )
                        raise ConfigError(name, tuple(param.shape), message)
                    self._step_param(param, self._in_order_of(param, param.grad, name=name), group)
        return loss

    def _step_param(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(param, group)
        master_key = _MASTER_KEY[param.dtype]
        count = {"step": int(state["step"].item()) + 1} if self.COUNTS_STEPS else {}
        type(self).KERNEL(
            _flat(param),
            _flat(grad),
            *(_flat(state[name]) for name in self.MOMENTS),
            **self._step_arguments(group),
            **count,
            master=None if master_key is None else _flat(state[master_key]),
        )
        if self.COUNTS_STEPS:
            state["step"] += 1

    def _step_arguments(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "hyper": self._hyper(group),
            "grad_scale": -1.0 if group["maximize"] else 1.0,
            "num_threads": self.num_threads,
        }

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the parameter's state, with missing tensors added."""
        state: dict[str, Any] = self.state[param]
        if self.COUNTS_STEPS and "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        for name in self.MOMENTS:
            if name not in state:
                state[name] = self._initial_moment(name, param, group)
        if param.dtype == torch.bfloat16 and "master_remainder" not in state:
            state["master_remainder"] = torch.zeros_like(param, dtype=REMAINDER_DTYPE)
        if param.dtype == torch.float16 and "master" not in state:
            state["master"] = param.detach().float()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict by copy: [Note: CPU optimizer state_dict].

        Raises ConfigError, and changes nothing, for a state or a group that cannot be continued from.
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
        """Return the attributes that pickle and deepcopy keep."""
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
                    self.state[param] = restored

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Check a state_dict and copy its tensors, parameter by parameter in the order of the groups."""
        for group in state_dict["param_groups"]:
            self._check_group({**self.defaults, **group})
        params = [param for group in self.param_groups for param in group["params"]]
        saved_keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        # torch reports differing numbers of groups and parameters right after this.
        self._restored_state = [
            self._restored(f"state[{key}]", param, state_dict["state"].get(key, {}))
            for param, key in zip(params, saved_keys, strict=False)
        ]

    def _restored(self, name: str, param: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Return copies of the saved tensors in the parameter's shape and memory order, in the state's dtypes."""
        restored: dict[str, Tensor] = {}
        dtypes = {**dict.fromkeys(self.MOMENTS, torch.float32), **_MASTER_DTYPES}
        for key, value in saved.items():
            if key not in dtypes and key != "step" and isinstance(value, Tensor):
                has = ", ".join((*self.MOMENTS, *(["step"] if self.COUNTS_STEPS else [])))
                raise ConfigError(
                    f"{name}.{key}",
                    tuple(value.shape),
                    f"a state of {type(self).__name__} has {has}: this is another optimizer's",
                )
        if param.dtype == torch.bfloat16 and "master" in saved and "master_remainder" not in saved:
            remainder = remainder_of(name, param, saved["master"], REMAINDER_DTYPE)
            saved = {**saved, "master_remainder": remainder}
        for key, dtype in dtypes.items():
            if key not in saved or (key == "master" and param.dtype == torch.bfloat16):
                continue
            value = saved[key]
            if value.shape != param.shape:
                raise ConfigError(
                    f"{name}.{key}", tuple(value.shape), f"must have shape {tuple(param.shape)}"
                )
            if key == "master_remainder" and value.dtype != REMAINDER_DTYPE:
                raise ConfigError(f"{name}.{key}", value.dtype, f"must be {REMAINDER_DTYPE}")
            copied = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)
            restored[key] = copied.copy_(value)
        if self.COUNTS_STEPS and "step" in saved:
            restored["step"] = torch.tensor(float(saved["step"]), dtype=torch.float32, device="cpu")
        return restored

    def _check_param(self, name: str, param: Tensor) -> None:
        what = f"{param.dtype} on {param.device}"
        if param.dtype not in _MASTER_KEY:
            raise ConfigError(name, what, "allowed torch.bfloat16, torch.float16, torch.float32")
        if not param.is_cpu:
            raise ConfigError(name, what, f"{type(self).__name__} trains parameters on the CPU")
        if param.layout != torch.strided or not (_is_dense(param) or _is_placeholder(param)):
            raise ConfigError(name, what, "must be dense in memory (no gaps, no element twice)")

    def _in_order_of(self, param: Tensor, grad: Tensor, *, name: str) -> Tensor:
        """Return the gradient in the memory order of the parameter; a copy where they differ."""
        if grad.layout != torch.strided:
            message = f"{type(self).__name__} takes dense gradients only"
            raise ConfigError(f"{name}.grad", str(grad.layout), message)
        if param.is_contiguous():
            return grad.contiguous()
        if grad.stride() == param.stride():
            return grad
        return torch.empty_like(param, dtype=grad.dtype, memory_format=torch.preserve_format).copy_(grad)


def remainder_of(name: str, param: Tensor, master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the part of saved fp32 master weights that a bf16 parameter lacks, as remainders of `dtype`.

    Raises ConfigError for another shape, and unless the parameter is these weights rounded.
    """
    if master.shape != param.shape:
        raise ConfigError(f"{name}.master", tuple(master.shape), f"must have shape {tuple(param.shape)}")
    rounded = torch.empty(param.shape, dtype=param.dtype, device="cpu")
    remainder = torch.empty(param.shape, dtype=dtype, device="cpu")
    split_master(master.to("cpu", torch.float32).contiguous(), rounded, remainder)
    if not torch.equal(rounded.view(torch.int16), param.detach().contiguous().view(torch.int16)):
        message = "the parameter has other weights: load those of the model before the optimizer's state"
        raise ConfigError(f"{name}.master", "master weights", message)
    return remainder


def _is_placeholder(tensor: Tensor) -> bool:
    """Whether a tensor is one NaN expanded to a shape: a parameter whose value is elsewhere holds that."""
    with DisableTorchFunctionSubclass():
        is_expanded = tensor.numel() > 1 and not any(tensor.stride())
        return is_expanded and bool(torch.detach(tensor).as_strided((), ()).isnan())


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, each once, in any order of the strides."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as a vector, in memory order."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))
