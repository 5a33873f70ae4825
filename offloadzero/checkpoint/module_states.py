"""What modules keep beside parameters: persistent buffers in any form of memory, and what torch calls extra state.

[Note: buffers that overlap]
A buffer may be a view in which several elements are one in memory: `torch.zeros(1).expand(4)`. It is saved with the
elements that it shows, four here; torch refuses to copy four elements back into one, and its own load_state_dict()
fails there. The value is written through the view's distinct elements instead, so that other views of the same memory
see it too. A value whose elements differ where the memory is one cannot be held: `can_hold` is asked before anything is
written.

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

import contextlib
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


# --- buffers ---


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name."""
    buffers: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{module_name}.{name}" if module_name else name] = buffer
    return buffers


def expect_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError for a buffer that is no array of values in memory."""
    for name, tensor in tensors.items():
        is_meta = tensor.device.type == "meta"
        if tensor.layout is torch.strided and not tensor.is_nested and not is_meta:
            continue
        what = "on the meta device, without values" if is_meta else f"of layout {tensor.layout}"
        raise CheckpointError(
            f"{name} is {what}: a checkpoint keeps dense tensors only. Keep it as such, or register the buffer with "
            "persistent=False"
        )


def may_overlap(buffer: torch.Tensor) -> bool:
    """Whether two elements may be one in memory. Never False for a buffer in which two are."""
    extent = 0
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size > 1 and stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def can_hold(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the buffer can show `value`: [Note: buffers that overlap]."""
    trial = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu")
    write_buffer(trial, value)
    return _bits(trial) == _bits(value.to(buffer.dtype))


def _bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Set a buffer in place. One that was made in inference mode is written in inference mode."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 1:
            buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    with torch.inference_mode() if buffer.is_inference() else contextlib.nullcontext():
        buffer.copy_(value)


# --- extra states ---


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
        whole = module.get_extra_state()
        own = {
            place: leaf.detach().to("cpu", copy=True)
            for place, leaf in _leaves(whole)
            if isinstance(leaf, torch.Tensor)
        }
        value = _with_leaves(whole, dict.fromkeys(own))
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


def _leaves(value: Any, place: str = "", *, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield what stands in the lists, tuples and dicts of a value, by its place; nothing that is nested too deeply."""
    items = _items(value)
    if items is None:
        yield place, value
    elif depth <= MAX_DEPTH:
        for index, item in enumerate(items):
            yield from _leaves(item, _inner(place, index), depth=depth + 1)


def _with_leaves(value: Any, leaves: Mapping[str, Any], place: str = "", *, depth: int = 0) -> Any:
    """Return the value with those of `leaves`, by place; its lists, tuples and dicts are new ones."""
    items = _items(value)
    if items is None or depth > MAX_DEPTH:
        return leaves.get(place, value)
    new = [
        _with_leaves(item, leaves, _inner(place, index), depth=depth + 1) for index, item in enumerate(items)
    ]
    if isinstance(value, Mapping):
        return dict(zip(value, new, strict=True))
    return tuple(new) if isinstance(value, tuple) else new


def _items(value: Any) -> Collection[Any] | None:
    """The items of a value in which tensors have a place; None for another."""
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return value.values()
    return value if isinstance(value, list | tuple) else None


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
        free = {place for place, leaf in _leaves(entry[_VALUE]) if leaf is None}
        for place in places:
            if place not in free:
                raise ValueError(f"{key} has no place {place!r} for a tensor")
            found[tensor_name(key, place)] = (key, place)
    return found


def whole_value(entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the result of get_extra_state(), with its tensors in their places."""
    return _with_leaves(copy.deepcopy(entry[_VALUE]), tensors)


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
    return copy.deepcopy(
        value,
        {id(leaf): leaf.detach().clone() for _, leaf in _leaves(value) if isinstance(leaf, torch.Tensor)},
    )
