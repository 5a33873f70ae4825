"""Tensors as arguments of compiled code: checked, then an address and a number."""

from __future__ import annotations

import torch
from torch import Tensor

from offloadzero.errors import ConfigError

# The values of DType in csrc/cpu_adam/cpu_adam.h.
DTYPE_CODE = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# The values of Layout there, by the dtypes of parameter and master.
LAYOUT_CODE: dict[tuple[torch.dtype, torch.dtype | None], int] = {
    (torch.bfloat16, torch.int16): 0,
    (torch.float32, None): 1,
    (torch.float16, torch.float32): 2,
    (torch.bfloat16, torch.float32): 3,
}


def describe(tensor: Tensor) -> str:
    """Return the description of a tensor for an error message."""
    layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{layout} {tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}"


def address(name: str, tensor: Tensor, num_elements: int) -> int:
    """Return the address of a dense CPU tensor of `num_elements` elements; raises ConfigError for any other."""
    if not tensor.is_cpu or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ConfigError(name, describe(tensor), "must be a contiguous CPU tensor")
    if tensor.numel() != num_elements:
        raise ConfigError(
            name, describe(tensor), f"must have {num_elements} elements like the first argument"
        )
    place = tensor.data_ptr()
    if place % tensor.element_size():
        raise ConfigError(name, f"{describe(tensor)}, at {place:#x}", "must be aligned to its elements")
    return place


def typed_address(name: str, tensor: Tensor, num_elements: int, dtype: torch.dtype) -> int:
    """Return the `address` of a tensor; raises ConfigError for one of another dtype, too."""
    if tensor.dtype != dtype:
        raise ConfigError(name, describe(tensor), f"must be {dtype}")
    return address(name, tensor, num_elements)


def float_code(name: str, tensor: Tensor) -> int:
    """The kernels' number of a tensor's dtype; raises ConfigError for any but bf16, fp16 and fp32."""
    code = DTYPE_CODE.get(tensor.dtype)
    if code is None:
        raise ConfigError(name, describe(tensor), "allowed torch.bfloat16, torch.float16, torch.float32")
    return code


def layout_code(param: Tensor, master: Tensor | None) -> int:
    """The kernels' number of a parameter with its master; raises ConfigError for dtypes that do not go together."""
    layout = LAYOUT_CODE.get((param.dtype, None if master is None else master.dtype))
    if layout is None:
        given = "no master" if master is None else f"a {master.dtype} master"
        raise ConfigError(
            "param",
            f"{param.dtype} with {given}",
            "allowed bfloat16 with int16 or float32, float16 with float32, float32 with none",
        )
    return layout
