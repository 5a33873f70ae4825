"""The tensors of state dicts for weights and optimizer states that are away: copies that write through.

A state dict of an ordinary model shares memory with its parameters, so `model.state_dict()[name].mul_(2)` changes the
model. Files are written from state dicts, so their tensors must have memory: these are copies in host memory, and a
write into one is committed to the weight. They do not follow later updates; a write into a copy that is older than the
last update is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offloadzero.access.pickling import ArrayByValue
from offloadzero.access.script_collectives import (
    OverCopies,
    is_function_of_ranks,
    is_taken_untold,
    refuse_untold,
)
from offloadzero.access.tensor import RemoteValue
from offloadzero.access.weight_value import Look, Weight
from offloadzero.core.interrupts import uninterrupted_throughout
from offloadzero.core.torch_private import DisableTorchFunctionSubclass, has_storage
from offloadzero.errors import StateError


class _Copy:
    """The copy of one value, and the version at that time."""

    def __init__(self, copied: Tensor, value: RemoteValue, taken_with: str) -> None:
        self.copied = copied
        self.name = value.name
        self._value = value
        self._version = value.version
        self._taken_with = taken_with

    def is_current_copy_of(self, weight: Weight) -> bool:
        """Whether it holds the present value of `weight`."""
        value = self._value
        return isinstance(value, Look) and value.weight is weight and value.version == self._version

    def commit(self) -> None:
        """Write the copy home, after an operation has written into it."""
        value = self._value
        if value.version != self._version:
            raise StateError(
                f"{value.name}: was changed since {self._taken_with}, whose copy of it is written now: take a new "
                "one, or use load_state_dict()"
            )
        value.write(self.copied.clone())
        self._version = value.version


class StateTensor(ArrayByValue, torch.Tensor):  # type: ignore[misc]
    """The copy, or a view of it. Other results of operations are ordinary tensors."""

    _copy: _Copy

    @classmethod
    @uninterrupted_throughout  # an interrupt must not leave the copy written and the weight not
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if is_taken_untold(func):
            refuse_untold(args[0]._copy.name, "a copy of state_dict()")
        with DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in pytree.tree_leaves((args, keywords)) if isinstance(leaf, StateTensor)]
            versions = [tensor._version for tensor in tensors]
            collective = OverCopies(func, tensors) if is_function_of_ranks(func) else None
        if len(types) == 1:
            with DisableTorchFunctionSubclass():
                result = func(*args, **keywords)
        else:  # a weight that is away, say: it answers for its value itself
            result = _beside_others(func, args, keywords)
        with DisableTorchFunctionSubclass():
            if collective is not None:
                collective.end(result)
            # Beside a weight that is away torch counts no version for the tensors of a list.
            listed = args[0] if len(types) > 1 and _writes_list(func) else ()
            for tensor, version in zip(tensors, versions, strict=True):
                if tensor._version != version or any(tensor is one for one in listed):
                    tensor._copy.commit()
            return pytree.tree_map_only(Tensor, lambda one: _view_of(tensors, one), result)

    def _value(self) -> Tensor:
        with DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self._value().clone()
        return copied


def is_copy_of(tensor: object, weight: Weight) -> bool:
    """Whether a tensor is a copy of all of `weight` with its present value."""
    if not isinstance(tensor, StateTensor):
        return False
    return tensor._copy.is_current_copy_of(weight) and tensor.shape == weight.shape


def state_tensor(copied: Tensor, value: RemoteValue, *, taken_with: str = "state_dict()") -> Tensor:
    """Make `copied` a copy of a weight or of an optimizer's state, for a state dict; `taken_with` is for errors."""
    with torch.inference_mode(False):  # the state dict may be used outside of inference mode
        copied = copied.clone() if copied.is_inference() else copied
        return _made(copied, _Copy(copied, value, taken_with))


def _made(tensor: Tensor, copy: _Copy) -> StateTensor:
    made = tensor.as_subclass(StateTensor)
    made._copy = copy
    return made


def _writes_list(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_")


def _beside_others(func: Callable[..., Any], args: Any, keywords: Any) -> Any:
    """Run an operation with ordinary tensors in the place of copies."""
    standing: list[tuple[Tensor, StateTensor]] = []

    def ordinary(copied: StateTensor) -> Tensor:
        with DisableTorchFunctionSubclass():
            standing.append((copied.as_subclass(Tensor), copied))  # of one version
        return standing[-1][0]

    def original(result: Any) -> Any:
        return next((copied for stand_in, copied in standing if stand_in is result), result)

    args, keywords = pytree.tree_map_only(StateTensor, ordinary, (args, keywords))
    return pytree.tree_map(original, func(*args, **keywords))


def _view_of(tensors: list[StateTensor], result: Tensor) -> Tensor:
    """Make a result that shares memory with a copy a view of it."""
    if isinstance(result, StateTensor) or result.device.type == "meta" or not has_storage(result):
        return result
    for tensor in tensors:
        if result.untyped_storage()._cdata == tensor._copy.copied.untyped_storage()._cdata:
            return _made(result, tensor._copy)
    return result
