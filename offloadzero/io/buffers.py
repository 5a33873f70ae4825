"""The places of the caller's buffers in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from offloadzero.errors import ConfigError


class Memory(NamedTuple):
    """The place of a buffer in memory, and the object that keeps it there."""

    address: int
    num_bytes: int
    owner: object


def memory_of(buffer: Any, *, must_be_writable: bool) -> Memory:
    """Return the memory of a contiguous CPU tensor, numpy array or buffer. Raises ConfigError."""
    if hasattr(buffer, "data_ptr"):
        return _memory_of_tensor(buffer)
    import numpy as np

    if hasattr(buffer, "__array_interface__"):
        array = buffer
        if not array.flags.c_contiguous:
            raise ConfigError("buffer", f"array with strides {array.strides}", "must be contiguous")
    else:
        try:
            view = memoryview(buffer)
        except TypeError:
            raise ConfigError(
                "buffer", type(buffer).__name__, "must be a tensor, an array or a buffer"
            ) from None
        if not view.c_contiguous:
            raise ConfigError("buffer", f"memoryview with strides {view.strides}", "must be contiguous")
        if view.nbytes == 0:
            return Memory(0, 0, view)
        array = np.frombuffer(view.cast("B"), dtype=np.uint8)
    if must_be_writable and not array.flags.writeable:
        raise ConfigError("buffer", type(buffer).__name__, "must be writable to be read into")
    return Memory(array.__array_interface__["data"][0], array.nbytes, array)


def _memory_of_tensor(tensor: Any) -> Memory:
    device = getattr(tensor, "device", None)
    if device is not None and device.type != "cpu":
        raise ConfigError("buffer", f"tensor on {device}", "must be in host memory (cpu)")
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        raise ConfigError("buffer", f"tensor with layout {tensor.layout}", "must be dense")
    if not tensor.is_contiguous():
        raise ConfigError("buffer", f"tensor with strides {tuple(tensor.stride())}", "must be contiguous")
    return Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
