"""The tensors of state dicts for weights and optimizer states that are away: copies that write through.

A state dict of an ordinary model shares memory with its parameters, so `model.state_dict()[name].mul_(2)` changes the
model. Files are written from state dicts, so their tensors must have memory: these are copies in host memory, and a
write into one is committed to the weight. They do not follow later updates; a write into a copy that is older than the
last update is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offloadzero.core.interrupts import uninterrupted_throughout
from offloadzero.core.torch_private import DisableTorchFunctionSubclass, has_storage
from offloadzero.errors import StateError
from offloadzero.parameters.collectives import (
    OverCopies,
    is_function_of_ranks,
    is_taken_untold,
    refuse_untold,
)
from offloadzero.parameters.processes import send_by_value
from offloadzero.parameters.weight import Weight


class Written(Protocol):
    """The original of a copy: a weight, or a state of the optimizer."""

    name: str
    taken_with: str  # where scripts get such copies

    @property
    def history(self) -> tuple[int, ...]:
        """Numbers that differ after each change of the value."""

    def write(self, value: Tensor) -> None:
        """Write a value to its home."""


class WrittenWeight:
    """A weight of the model."""

    taken_with = "state_dict()"

    def __init__(self, weight: Weight) -> None:
        self.name = weight.name
        self.weight = weight

    @property
    def history(self) -> tuple[int, ...]:
        """The history of the weight."""
        return self.weight.history

    def write(self, value: Tensor) -> None:
        """Write a value to its home."""
        self.weight.write(value)
        self.weight.count_write()


class _Copy:
    """The copy of one value, and the history at that time."""

    def __init__(self, value: Tensor, weight: Written) -> None:
        self.value = value
        self.name = weight.name
        self._weight = weight
        self._history = weight.history

    def is_current_copy_of(self, weight: Weight) -> bool:
        """Whether it holds the present value of `weight`."""
        target = self._weight
        return (
            isinstance(target, WrittenWeight) and target.weight is weight and weight.history == self._history
        )

    def commit(self) -> None:
        """Write the copy home, after an operation has written into it."""
        weight = self._weight
        if weight.history != self._history:
            raise StateError(
                f"{weight.name}: was changed since {weight.taken_with}, whose copy of it is written now: take a new "
                "one, or use load_state_dict()"
            )
        weight.write(self.value.clone())
        self._history = weight.history


class StateTensor(torch.Tensor):
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

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return a read-only array: writes into it would not be seen."""
        array: np.ndarray[Any, Any] = self._plain().numpy(force=force)
        array = array.view()
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if dtype is None or array.dtype == dtype:
            return array.copy() if copy else array
        return array.astype(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self._plain().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def _plain(self) -> Tensor:
        with DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)


send_by_value(StateTensor, StateTensor._plain)


def is_copy_of(tensor: object, weight: Weight) -> bool:
    """Whether a tensor is a copy of all of `weight` with its present value."""
    if not isinstance(tensor, StateTensor):
        return False
    return tensor._copy.is_current_copy_of(weight) and tensor.shape == weight.shape


def state_tensor(value: Tensor, weight: Written) -> Tensor:
    """Make a copy of a weight or of an optimizer's state, for a state dict."""
    with torch.inference_mode(False):  # the state dict may be used outside of inference mode
        value = value.clone() if value.is_inference() else value
        return _made(value, _Copy(value, weight))


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
        if result.untyped_storage()._cdata == tensor._copy.value.untyped_storage()._cdata:
            return _made(result, tensor._copy)
    return result
