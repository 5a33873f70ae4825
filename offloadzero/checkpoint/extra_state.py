"""The states of modules beside parameters and buffers: torch's get_extra_state() and set_extra_state().

[Note: extra state]
torch puts the result of a module's get_extra_state() into its state_dict, as `MODULE._extra_state`, and torch.save
pickles it. A checkpoint has no pickle: numbers, texts, None, lists, tuples and dicts go to meta.json ([Note: what JSON
changes] in format/json_file.py), the tensors among them to extra_state.safetensors, and anything else
is refused by its place when saving. A tensor is called after its place, `MODULE._extra_state:3.0`: item 0 of item 3,
counted in lists, tuples and dicts alike; meta.json has None there.

As in torch, a state that only the model or only the checkpoint has is an error of a strict load. Whether
set_extra_state() takes a value is only known by calling it. So each module is tried before anything is written, and
gets its own state back; the value is set for good when the module's parameters and buffers are there, as in torch.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offloadzero.checkpoint.format.json_file import MAX_DEPTH, encode_plain
from offloadzero.core.interrupts import is_interrupt
from offloadzero.errors import CheckpointError, ConfigError

KEY = "_extra_state"  # torch's
_VALUE, _TENSORS = "value", "tensors"


@dataclass(frozen=True)
class ExtraStates:
    """The extra states. `described`, by the module's key: value without tensors, and their places. `tensors`: named."""

    described: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def read_extra_states(model: nn.Module) -> ExtraStates:
    """Return copies of the extra states of all modules; CheckpointError names values that cannot be kept."""
    described: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, module in _modules(model, "get_extra_state"):
        own: dict[str, torch.Tensor] = {}
        value = _without_tensors(module.get_extra_state(), "", own)
        try:
            encode_plain(value, key)
        except ConfigError as error:
            raise CheckpointError(
                f"{error.key}: get_extra_state() of {type(module).__name__} gives {error.value!r}; "
                f"{error.allowed}, and tensors"
            ) from error
        described[key] = {_VALUE: copy.deepcopy(value), _TENSORS: list(own)}
        tensors.update({tensor_name(key, place): tensor for place, tensor in own.items()})
    return ExtraStates(described, tensors)


def _modules(model: nn.Module, method: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose class has a method of its own, by the key of their state."""
    for name, module in model.named_modules():
        if not _keeps_default(module, method):
            yield f"{name}.{KEY}" if name else KEY, module


def _keeps_default(module: nn.Module, method: str) -> bool:
    return getattr(type(module), method) is getattr(nn.Module, method)


def tensor_name(key: str, place: str) -> str:
    """Return the name of a tensor of an extra state in the file."""
    return f"{key}:{place}"


def _without_tensors(value: Any, place: str, tensors: dict[str, torch.Tensor], *, depth: int = 0) -> Any:
    """Return the value with None in the place of each tensor, which goes to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors[place] = value.detach().to("cpu", copy=True)
        return None
    if depth > MAX_DEPTH:
        return value  # for the encoder to refuse

    def inside(index: int, item: Any) -> Any:
        return _without_tensors(item, _inner(place, index), tensors, depth=depth + 1)

    if isinstance(value, list | tuple):
        items = [inside(*pair) for pair in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {key: inside(index, item) for index, (key, item) in enumerate(value.items())}
    return value


def _inner(place: str, index: int) -> str:
    return f"{place}.{index}" if place else str(index)


# --- loading ---


def described_tensors(described: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Map names in the file to (key, place). ValueError unless `described` is a result of `read_extra_states`."""
    found = {}
    for key, entry in described.items():
        if not isinstance(entry, dict) or entry.keys() != {_VALUE, _TENSORS}:
            raise ValueError(f"{key} is not a value and the places of its tensors")
        places = entry[_TENSORS]
        if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
            raise ValueError(f"{key}: the places of its tensors are not texts")
        free = set(_places_of_none(entry[_VALUE], ""))
        for place in places:
            if place not in free:
                raise ValueError(f"{key} has no place {place!r} for a tensor")
            found[tensor_name(key, place)] = (key, place)
    return found


def _places_of_none(value: Any, place: str) -> Iterator[str]:
    if value is None:
        yield place
    for index, item in enumerate(_items(value)):
        yield from _places_of_none(item, _inner(place, index))


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def whole_value(entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the result of get_extra_state(), with its tensors in their places."""
    return _with_tensors(entry[_VALUE], "", tensors)


def _with_tensors(value: Any, place: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    if place in tensors:
        return tensors[place]
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        pairs = enumerate(value.items())
        return {key: _with_tensors(item, _inner(place, index), tensors) for index, (key, item) in pairs}
    if not isinstance(value, list | tuple):
        return copy.copy(value)
    items = [_with_tensors(item, _inner(place, index), tensors) for index, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def settable(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that take a state, by its key."""
    return dict(_modules(model, "set_extra_state"))


def try_extra_state(key: str, module: nn.Module, value: Any) -> None:
    """Raise CheckpointError unless the module takes the value. Afterwards it has its own state, as before."""
    if _keeps_default(module, "get_extra_state"):
        return  # it takes states and returns none: a trial could not be undone
    before = _copy_of(module.get_extra_state())
    try:
        module.set_extra_state(_copy_of(before))
    except Exception as error:
        if is_interrupt(error):
            raise
        return  # it does not take its own, None at first say: a trial could not be undone
    try:
        module.set_extra_state(_copy_of(value))
    except Exception as error:
        if is_interrupt(error):
            raise
        raise CheckpointError(
            f"set_extra_state() of {type(module).__name__} refuses {key}: {type(error).__name__}: {error}"
        ) from error
    finally:
        module.set_extra_state(before)


def _copy_of(value: Any) -> Any:
    """Return a deep copy, also of tensors that torch does not copy deeply, the results of operations with gradients."""
    return copy.deepcopy(value, {id(tensor): tensor.detach().clone() for tensor in _tensors_in(value)})


def _tensors_in(value: Any, *, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    if depth <= MAX_DEPTH:
        for item in _items(value):
            yield from _tensors_in(item, depth=depth + 1)
