"""The views of a weight's memory that a script keeps become tensors that know where the weight is."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from offloadzero.access.parameter import KeptView
from offloadzero.access.tensor import RemoteTensor, WholeView
from offloadzero.access.weight import weight_of
from offloadzero.core.torch_private import has_storage, set_data
from offloadzero.errors import StateError


def tensors_over(storage: int) -> Iterator[list[Tensor]]:
    """Yield Python's ordinary tensors over a storage, which is given by its address, in lists: the youngest first.

    Most are views that a forward has just made, among the few thousand objects of the collector's young generations;
    a look at all takes 20 ms. Objects set aside by `gc.freeze()` are not even among all: `show_frozen`.
    """
    for generation in (0, 1, None):
        # An object of another class than torch.Tensor may lie about its class, or have no storage.
        tensors = [one for one in gc.get_objects(generation) if type(one) is Tensor]
        yield [one for one in tensors if _storage_of(one) == storage]


def show_frozen() -> bool:
    """Undo `gc.freeze()`; return whether there was something to undo.

    Freezing saves the collector time, and forked children memory. To freeze again would also freeze present garbage.
    """
    if not gc.get_freeze_count():
        return False
    gc.unfreeze()
    return True


def _storage_of(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or not has_storage(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def keep_view(tensor: Tensor, param: nn.Parameter, byte_offset: int) -> None:
    """Turn `tensor`, which looks at the memory of `param` from `byte_offset` on, into a view of the parameter.

    For operations that do not look at the class (autograd's own, in C++) it holds a copy of the present value.
    Raises StateError for a view that goes beyond the parameter's end.
    """
    weight = weight_of(param)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if byte_offset + span * tensor.itemsize > weight.shape.numel() * weight.dtype.itemsize:
        raise StateError(
            f"{weight.name}: a view that is kept goes beyond the parameter's end: keep a clone()"
        )
    size, stride = tensor.size(), tensor.stride()
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.as_strided(torch.detach(tensor), (span,), (1,)).clone()
        view = WholeView(tensor.dtype, size, stride, byte_offset // tensor.itemsize)
        like = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        value = RemoteTensor(weight.alias(), (view,), like, storage_offset=int(tensor.storage_offset()))
        set_data(tensor, flat.as_strided(size, stride))
    tensor.__class__ = KeptView
    setattr(tensor, KeptView.VALUE, value)
