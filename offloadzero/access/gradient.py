"""`param.grad` of an offloaded parameter: a tensor that stands for the gradient wherever it is.

[Note: gradients as tensors]
After backward `param.grad` is a `GradientTensor`. Like any remote tensor ([Note: remote tensors]) it reads, computes
and writes back. The usual operations of scripts on the gradients of a whole model are answered without moving a byte:

- the 2-norm, from the squares that were summed up when the gradient landed;
- `mul_` by one number, and `div_` by a power of two, by a factor that the update's kernel multiplies by. In fp32 that
  gives torch's bits. In bf16 and fp16 torch rounds the product to the gradient's dtype, the kept factor does not; a
  later read of the gradient is rounded as torch rounds it. Two factors become one only where the product is exact;
- `zero_`, and torch.amp.GradScaler's check and unscaling in one.

`torch.nn.utils.clip_grad_norm_`, `get_total_norm` and `GradScaler` need no other operations.

[Note: a gradient's device]
When a tensor becomes `param.grad` torch asks it for its device three times. A remote tensor answers in Python, in
3 us each; a gradient tensor has its device in C++, and like any remote tensor the keys of the meta backend. autocast
goes by keys and would not see it: in an operation under autocast, and beside tensors of other classes that intercept
operations, a remote tensor of the same value, which it does see, takes its place (`_Seen`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from offloadzero.access.tensor import (
    META,
    RemoteTensor,
    RemoteValue,
    StandIn,
    TorchOp,
    asking_for_device,
)
from offloadzero.access.trees import map_leaves
from offloadzero.core.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunctionSubclass,
    disabled_torch_function_impl,
    is_any_autocast_enabled,
    make_subclass,
    make_wrapper_subclass,
)
from offloadzero.errors import StateError

aten = torch.ops.aten


class GradientValue(RemoteValue):
    """One parameter's gradient, in a home, on its way there, or gone."""

    num_tensors = 0  # tensors that have been made of it

    def norm(self) -> float | None:
        """The 2-norm; None where only a read would tell it."""
        raise NotImplementedError

    def scale(self, factor: float) -> bool:
        """Multiply by a number of fp32 without moving anything; return False where that would give other numbers."""
        raise NotImplementedError

    def clear(self) -> None:
        """Make the gradient zero."""
        raise NotImplementedError

    def accept(self, contribution: Tensor) -> bool:
        """Take a gradient that autograd adds; return False where the addition is by other code."""
        raise NotImplementedError

    def is_worn(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the parameter's `grad`."""
        raise NotImplementedError


class GradientTensor(RemoteTensor):
    """The tensor in `param.grad`: [Note: gradients as tensors]."""

    _source: GradientValue

    @staticmethod
    def __new__(cls, source: GradientValue, *arguments: Any, **options: Any) -> GradientTensor:
        """Make the tensor of a view, as `RemoteTensor` does."""
        source.num_tensors += 1
        return cast(GradientTensor, RemoteTensor.__new__(cls, source, *arguments, **options))

    @classmethod
    def _without_memory(cls, like: Tensor, device: torch.device, storage_offset: int) -> RemoteTensor:
        """Make a tensor without memory: [Note: a gradient's device]."""
        with_keys_of_device = make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=storage_offset,
            dtype=like.dtype,
            device=device,
        )
        with DisableTorchDispatch():
            tensor: RemoteTensor = make_subclass(
                cls, with_keys_of_device, False, device_for_backend_keys=META
            )
        return tensor

    @property
    def source(self) -> GradientValue:
        return self._source

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Let the parameter's gradient take the value over."""
        if not self._source.is_worn(self):
            self._refuse_data(value)
        if (value.shape, value.dtype, value.device.type) != (self.shape, self.dtype, self.device.type):
            given, own = (f"{one.dtype} {tuple(one.shape)}" for one in (value, self))
            raise StateError(
                f"{self._source.name}: data of {given} is assigned where {own} on {self.device} is"
            )
        with torch.no_grad():
            self.detach().copy_(value)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if len(types) == 1 and not is_any_autocast_enabled():
            with DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        given: list[tuple[Any, GradientTensor]] = []

        def seen(leaf: Any) -> Any:
            if not isinstance(leaf, GradientTensor):
                return leaf
            with DisableTorchFunctionSubclass():
                twin = StandIn.apply(leaf, _seen) if leaf.requires_grad else _seen(leaf)  # type: ignore[no-untyped-call]
            given.append((twin, leaf))
            return twin

        def original(leaf: Any) -> Any:
            return next((tensor for twin, tensor in given if twin is leaf), leaf)

        return map_leaves(original, func(*map_leaves(seen, args), **map_leaves(seen, keywords)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: TorchOp,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        shortcut = _SHORTCUTS.get(func)
        if shortcut is not None:
            answer = shortcut(*args, **(kwargs or {}))
            if answer is not _NONE:
                return answer
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _refuse(self, what: str) -> NoReturn:
        raise StateError(
            f"{self._source.name}: {what} needs the gradient in memory, and it lives elsewhere: take a copy with "
            "clone()"
        )


class _Seen(GradientTensor):
    """The tensor that stands for a gradient in one operation: [Note: a gradient's device]."""

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    def _without_memory(cls, like: Tensor, device: torch.device, storage_offset: int) -> RemoteTensor:
        return asking_for_device(cls, like, device, storage_offset)


def _seen(gradient: GradientTensor) -> RemoteTensor:
    return gradient.with_source(gradient.source, kind=_Seen)


def in_graph_of(grad: Tensor, source: GradientValue) -> GradientTensor:
    """Make a gradient tensor that is differentiated as `grad`, the result of a backward with create_graph=True."""
    tensor: GradientTensor = StandIn.apply(grad, lambda _: GradientTensor(source))  # type: ignore[no-untyped-call]
    return tensor


def as_fp32(value: float) -> float:
    """Return the number of fp32 nearest to `value`."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def product_is_exact(one: float, other: float) -> bool:
    """Whether multiplying by `one` and then by `other` (numbers of fp32) equals multiplying by their product.

    It does where one of them is a power of two: then only one of the multiplications rounds.
    """
    product = one * other
    return (_is_power_of_two(one) or _is_power_of_two(other)) and (
        product == 0.0 or 2.0**-100 <= abs(product) <= 2.0**100
    )


def _is_power_of_two(value: float) -> bool:
    return math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


# --- operations that need no value ---

_NONE = object()  # no shortcut: the value is needed


def _whole(gradient: Any) -> GradientValue | None:
    """Return the source of a gradient tensor that is no view."""
    return gradient.source if isinstance(gradient, GradientTensor) and gradient.is_whole else None


def _only(gradients: Sequence[Any]) -> GradientValue | None:
    """Return the source of the one element of a list: longer lists come element by element."""
    return _whole(gradients[0]) if len(gradients) == 1 else None


def _number(value: Any) -> float | None:
    """Return the present value of a number or of a 0-dim tensor; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not Tensor or value.dim() or not value.is_floating_point():
        return None
    return float(value)


def _norm(source: GradientValue, dtype: torch.dtype | None) -> Any:
    norm = source.norm()
    return _NONE if norm is None else torch.full((), norm, dtype=dtype or source.dtype, device=source.device)


def _scale(source: GradientValue | None, factor: float | None) -> bool:
    return source is not None and factor is not None and source.scale(as_fp32(factor))


# The functions below have the signatures of the operations in _SHORTCUTS.


def _vector_norm(
    gradient: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    source = _whole(gradient)
    if source is None or ord != 2 or dim is not None or keepdim:
        return _NONE
    return _norm(source, dtype)


def _list_norm(gradients: Sequence[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    source = _only(gradients)
    if source is None or ord != 2:
        return _NONE
    norm = _norm(source, dtype)
    return norm if norm is _NONE else [norm]


def _multiply(gradient: Any, factor: Any) -> Any:
    return gradient if _scale(_whole(gradient), _number(factor)) else _NONE


def _divide(gradient: Any, divisor: Any) -> Any:
    number = _number(divisor)
    if number is None or not _is_power_of_two(number):
        return _NONE  # multiplying by the inverse rounds differently
    return gradient if _scale(_whole(gradient), 1.0 / number) else _NONE


def _multiply_list(gradients: Sequence[Any], factors: Any) -> Any:
    factor = factors[0] if isinstance(factors, list | tuple) and len(factors) == 1 else factors
    return None if _scale(_only(gradients), _number(factor)) else _NONE


def _clear(gradient: Any) -> Any:
    source = _whole(gradient)
    if source is None:
        return _NONE
    source.clear()
    return gradient


def _clear_list(gradients: Sequence[Any]) -> Any:
    source = _only(gradients)
    return _NONE if source is None else source.clear()


def _add(gradient: Any, other: Any, *, alpha: Any = 1) -> Any:
    source = _whole(gradient)
    accepted = source is not None and alpha == 1 and type(other) is Tensor and source.accept(other)
    return gradient if accepted else _NONE


def _check_and_unscale(gradients: Sequence[Any], found_inf: Tensor, inverse_scale: Tensor) -> Any:
    """Do GradScaler.unscale_: `found_inf` becomes 1 if an element of the gradients is not finite; all are scaled."""
    if len(gradients) > 1:
        for gradient in gradients:
            aten._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, inverse_scale)
        return None
    source = _only(gradients)
    norm = source.norm() if source is not None else None
    if norm is None:
        return _NONE
    if not math.isfinite(norm):
        found_inf.fill_(1.0)
    if not _scale(source, _number(inverse_scale)):
        gradients[0].mul_(inverse_scale.reshape(()))
    return None


_SHORTCUTS: Mapping[TorchOp, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _list_norm,
    aten.mul_.Tensor: _multiply,
    aten.mul_.Scalar: _multiply,
    aten.div_.Tensor: _divide,
    aten.div_.Scalar: _divide,
    aten._foreach_mul_.Scalar: _multiply_list,
    aten._foreach_mul_.Tensor: _multiply_list,
    aten._foreach_mul_.ScalarList: _multiply_list,
    aten.zero_.default: _clear,
    aten._foreach_zero_.default: _clear_list,
    aten.add_.Tensor: _add,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
}
