"""What `model.state_dict()` holds of weights that are away: copies in host memory that write through.

A state dict of an ordinary model shares memory with its parameters, so `model.state_dict()[name].mul_(2)` changes the
model. Files are written from state dicts, so their tensors must have memory: these are copies, and what an operation
writes into one is committed to the weight. They do not follow later updates; to write into one that an update has
passed by is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offloadzero.errors import StateError
from offloadzero.parameters.weight import Weight
from offloadzero.torch_private import DisableTorchFunctionSubclass


class StateTensor(torch.Tensor):
    """The copy, or a view of it. Other results of operations are ordinary tensors."""

    _weight: Weight
    _history: tuple[int, int]  # of the weight when the copy was taken
    _whole: Tensor  # the copy as an ordinary tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        with DisableTorchFunctionSubclass():
            copies = [leaf for leaf in pytree.tree_leaves((args, keywords)) if isinstance(leaf, StateTensor)]
            versions = [copy._version for copy in copies]
            result = func(*args, **keywords)
            for copy, version in zip(copies, versions, strict=True):
                if copy._version != version:
                    copy._commit()
            return pytree.tree_map_only(Tensor, lambda tensor: _view_of(copies, tensor), result)

    def _commit(self) -> None:
        weight = self._weight
        if weight.history != self._history:
            raise StateError(
                f"{weight.name}: was changed since state_dict(), whose copy of it is written now: take a new one, "
                "or use load_state_dict()"
            )
        weight.write(self._whole.clone())
        self._history = weight.history

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with DisableTorchFunctionSubclass():
            copied = memo[id(self)] = self._plain().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def _plain(self) -> Tensor:
        with DisableTorchFunctionSubclass():
            return self._whole.as_strided(self.size(), self.stride(), self.storage_offset())


def state_tensor(value: Tensor, weight: Weight) -> Tensor:
    """A new copy of a weight, for a state dict."""
    return _made(value, value, weight, weight.history)


def _made(tensor: Tensor, whole: Tensor, weight: Weight, history: tuple[int, int]) -> StateTensor:
    made = tensor.as_subclass(StateTensor)
    made._weight, made._whole, made._history = weight, whole, history
    return made


def _view_of(copies: list[StateTensor], result: Tensor) -> Tensor:
    """A result that shares memory with a copy is a view of it."""
    if isinstance(result, StateTensor) or result.device.type == "meta":
        return result
    for copy in copies:
        if result.untyped_storage()._cdata == copy._whole.untyped_storage()._cdata:
            return _made(result, copy._whole, copy._weight, copy._history)
    return result
