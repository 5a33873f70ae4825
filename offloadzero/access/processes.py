"""The package's tensors on their way to another process: their values, in the message itself.

torch sends a tensor's memory as a file descriptor, which must stay open until the other process has taken it. A tensor
that stands for a value has no memory of its own, and a copy made for the message is gone by then. So the bytes are
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn

Value = Callable[[Any], Tensor]


def send_by_value(kind: type[Tensor], value: Value) -> None:
    """Have multiprocessing send a tensor of exactly this class as the result of `value`, an ordinary tensor."""
    ForkingPickler.register(kind, partial(_reduce, value))


def _reduce(value: Value, tensor: Tensor) -> Any:
    plain = value(tensor)
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
