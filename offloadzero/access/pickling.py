"""Tensors without memory of their own go elsewhere by their value: into copies, files, texts and other processes.

torch sends a tensor's memory to another process as a file descriptor, which must stay open until that has taken it. A
copy made for the message is gone by then. So the bytes are sent, in the message itself.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offloadzero.core.torch_private import skip_methods
from offloadzero.errors import OffloadError


def _reduce(tensor: Any) -> Any:
    plain: Tensor = tensor._value()
    with torch.no_grad():
        flat = plain.detach().to("cpu").contiguous().reshape(-1)
    requires_grad = plain.requires_grad if isinstance(plain, nn.Parameter) else None
    bytes_ = flat.view(torch.uint8).numpy().tobytes()
    return _rebuild, (bytes_, plain.dtype, tuple(plain.shape), str(plain.device), requires_grad)


def _rebuild(
    bytes_: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str, requires_grad: bool | None
) -> Tensor:
    """Rebuild a tensor, as a parameter with that `requires_grad` unless it is None."""
    empty = torch.empty(0, dtype=dtype, device="cpu")
    flat = torch.frombuffer(bytearray(bytes_), dtype=dtype) if bytes_ else empty
    tensor = flat.view(shape).to(device)
    return tensor if requires_grad is None else nn.Parameter(tensor, requires_grad=requires_grad)


class ByValue:
    """The methods of a tensor that stands for a value."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        ForkingPickler.register(cls, _reduce)  # for objects of exactly this class
        skip_methods(cls)

    def _value(self) -> Tensor:
        """Return the present value as an ordinary tensor, or an ordinary parameter."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        value = memo[id(self)] = self._value()
        return value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        try:
            return repr(self._value())
        except OffloadError as error:  # a debugger may show objects that an error has left behind
            return f"<{error}>"

    def __format__(self, spec: str) -> str:
        return format(self._value(), spec)


skip_methods(ByValue)


class ArrayByValue(ByValue):
    """The same with arrays, which are read-only: writes into them would not be seen."""

    __slots__ = ()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return a read-only array of the present value."""
        array: np.ndarray[Any, Any] = self._value().numpy(force=force).view()
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if dtype is None or array.dtype == dtype:
            return array.copy() if copy else array
        return array.astype(dtype)
