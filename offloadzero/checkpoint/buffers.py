"""The persistent buffers of a model, in any form of memory.

[Note: buffers that overlap]
A buffer may be a view in which several elements are one in memory: `torch.zeros(1).expand(4)`. It is saved with the
elements that it shows, four here; torch refuses to copy four elements back into one, and its own load_state_dict()
fails there. The value is written through the view's distinct elements instead, so that other views of the same memory
see it too. A value whose elements differ where the memory is one cannot be held: `can_hold` is asked before anything is
written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import nn

from offloadzero.errors import CheckpointError


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
