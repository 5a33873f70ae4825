"""What is known of torch's operations: asked for each call of one, so kept by operation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_ALIASES = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten._reshape_alias.default,
}
_RUNNING_STATISTICS = {torch.ops.aten.native_batch_norm.default: (3, 4)}  # written, and not in the schema
_NEEDS_HOST = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)


@functools.cache
def has_own_dispatch(kind: type) -> bool:
    """Whether a kind of tensor sees operations before a mode may."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not torch._C._disabled_torch_dispatch_impl and kind is not torch.Tensor


@functools.cache
def is_view(func: Any) -> bool:
    """Whether the results share memory with an argument, and nothing is written."""
    if func in _ALIASES:
        return True
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


@functools.cache
def needs_host(func: Any) -> bool:
    """Whether the host must know a value for it."""
    return any(tag in func.tags for tag in _NEEDS_HOST)


@functools.cache
def num_returns(func: Any) -> int:
    """How many results it has."""
    return len(func._schema.returns)


@functools.cache
def looks_at_shapes(func: Any) -> bool:
    """Whether it reads no argument's bytes."""
    name = func._schema.name.split("::")[1]
    return name.endswith("_like") or name.startswith("new_")


@functools.cache
def name_of(func: Any) -> str:
    """For messages."""
    return str(func)


@functools.cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that it writes."""
    running = _RUNNING_STATISTICS.get(func, ())
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if place in running or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that a call writes, each of a list by itself."""
    return [
        tensor
        for place, name in _written_places(func)
        for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(name))
    ]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of arguments or results, in their order, one that is there twice twice."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list):
        for each in value:
            if isinstance(each, torch.Tensor):
                yield each
            elif each is not None and type(each) not in _PLAIN:
                yield from tensors_in(each)
    elif type(value) is dict:
        for each in value.values():
            yield from tensors_in(each)
    elif type(value) not in _PLAIN:
        for each in tree_leaves(value):
            if isinstance(each, torch.Tensor):
                yield each


_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout))
