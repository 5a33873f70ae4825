"""Frozen parameters whose bytes are codes, as libraries for quantised weights have them.

[Note: coded parameters]
A 4-bit weight of bitsandbytes is a parameter of a class of its own: its bytes are codes, and its attributes have what
their module needs to read them (scales, a table). It streams as any other, as bytes that no precision of the
configuration changes, and its module decodes them where it computes. The parameter keeps its class and its attributes.
Their tensors go to the device with the model's buffers, and stay there.

What would not leave its place is refused: a tensor without memory of its own, made of others (torchao), and memory that
something else than the parameter holds as well (the int8 weights of bitsandbytes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offloadzero.access.parameter import original_of
from offloadzero.core.torch_private import DisableTorchFunctionSubclass, has_storage
from offloadzero.errors import ConfigError


class Attached(NamedTuple):
    """A tensor in an attribute: `name` of `holder`, a parameter or an object in an attribute of it."""

    holder: Any
    name: str
    tensor: Tensor


def attached_tensors(param: nn.Parameter) -> list[Attached]:
    """Return the tensors that a parameter of a class of its own keeps beside its bytes: [Note: coded parameters].

    They are in its attributes, and in those of objects that move between devices (`to`) as tensors do.
    """
    found: list[Attached] = []
    pending: list[Any] = [param] if original_of(type(param)) is not nn.Parameter else []
    seen: set[int] = set()
    while pending:
        holder = pending.pop()
        seen.add(id(holder))
        for name, value in vars(holder).items():
            if isinstance(value, Tensor):
                found.append(Attached(holder, name, value))
            elif _moves_as_a_tensor(value) and id(value) not in seen:
                pending.append(value)
    return found


def _moves_as_a_tensor(value: Any) -> bool:
    return hasattr(value, "__dict__") and hasattr(value, "to") and not isinstance(value, nn.Module)


def is_coded(param: nn.Parameter) -> bool:
    """Whether the parameter's bytes are codes, and no values: [Note: coded parameters]."""
    return not param.requires_grad and bool(attached_tensors(param))


def num_weights(param: nn.Parameter) -> int:
    """Return how many weights a parameter stands for: of codes in 4 bits twice its bytes."""
    shape = getattr(getattr(param, "quant_state", None), "shape", None)
    return param.numel() if shape is None else math.prod(shape)


def attached_in(model: nn.Module) -> Iterator[tuple[str, Attached]]:
    """Yield the tensors beside all coded parameters of the model, in one order on all ranks, with names for errors."""
    for name, param in model.named_parameters():
        for each in attached_tensors(param):
            yield f"{name}.{each.name}", each


def attached_bytes(model: nn.Module) -> int:
    """Return the bytes of the tensors beside coded parameters, which lie on the device as buffers do."""
    return sum(each.tensor.nbytes for _, each in attached_in(model))


def move_attached(model: nn.Module, device: torch.device) -> None:
    """Bring the tensors beside coded parameters to the device, where no module changes their layout: see below."""
    for _, (holder, name, tensor) in attached_in(model):
        if tensor.device != device:
            setattr(holder, name, tensor.to(device))
    for module in model.modules():
        if getattr(module, _LAYS_OUT_ANEW, False):
            setattr(module, _LAYS_OUT_ANEW, False)


# bitsandbytes/nn/modules.py, Linear4bit.forward: an evaluation on a CPU with AVX512-BF16 replaces codes and scales by
# those of another layout, of which no gradient can be taken. This switches it off.
_LAYS_OUT_ANEW = "support_avx512bf16_for_cpu"
_IS_LAID_OUT_ANEW = "packing_format_for_cpu"
_DO = "Load the base in 4 bits by bitsandbytes (load_in_4bit), or without quantisation"


def expect_own_memory(model: nn.Module) -> None:
    """Refuse a parameter whose memory cannot leave its place: [Note: coded parameters].

    Raises:
        ConfigError: a parameter has no memory of its own, or an attribute of it, or of its module, has the same memory;
            codes are in a layout for evaluations alone.
    """
    for module_name, module in model.named_modules():
        for own_name, param in module.named_parameters(recurse=False):
            kind = original_of(type(param))
            if kind is nn.Parameter or param.is_meta or not param.numel():
                continue
            if getattr(getattr(param, "quant_state", None), _IS_LAID_OUT_ANEW, False):
                allowed = "codes as they were loaded: an evaluation on this CPU has laid them out anew, and they have "
                allowed += f"no gradients now. Set {_LAYS_OUT_ANEW} = False on the modules before"
            elif not _address(param):
                allowed = f"memory of its own: it is made of other tensors ({kind.__module__})"
            elif other := next(_other_holders(module, param), None):
                allowed = f"memory that nothing else has: {other} has it as well, and it would stay"
            else:
                continue
            name = f"{module_name}.{own_name}" if module_name else own_name
            raise ConfigError(name, f"{kind.__name__} of {type(module).__name__}", f"{allowed}. {_DO}")


def _other_holders(module: nn.Module, param: nn.Parameter) -> Iterator[str]:
    """Yield attributes with the parameter's memory: its own, its module's, and those of objects in the latter's."""
    places: dict[str, Any] = {"its attribute ": param, "its module's ": module}
    places |= {f"its module's {name}.": one for name, one in vars(module).items() if hasattr(one, "__dict__")}
    memory = _address(param)
    for place, holder in places.items():
        for name, value in vars(holder).items():
            if isinstance(value, Tensor) and _address(value) == memory:
                yield f"{place}{name}"


def _address(tensor: Tensor) -> int:
    """The address of the tensor's first element; 0 where it has no memory of its own."""
    with DisableTorchFunctionSubclass():
        return tensor.data_ptr() if tensor.layout is torch.strided and has_storage(tensor) else 0
