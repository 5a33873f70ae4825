"""The choice of inputs of checkpointed units that leave the device: one rule for the engine and for its plan."""

from __future__ import annotations

import torch

MIN_BYTES = 4096  # smaller inputs stay on the device: a copy costs more than their memory


def may_leave(tensor: torch.Tensor, *, min_bytes: int = MIN_BYTES) -> bool:
    """Whether an input moves; parameters, masks, indices, small and strided inputs do not."""
    return (
        tensor.is_floating_point()
        and tensor.nbytes >= min_bytes
        and not (tensor.is_leaf and tensor.requires_grad)
        and _is_dense(tensor)
    )


def input_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two inputs of a graph share if they are the same tensor, as long as both of them live."""
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, in any order: empty_like then keeps the strides."""
    return (
        tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )
