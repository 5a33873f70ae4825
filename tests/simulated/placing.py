"""Where tensors are: what the package makes on the simulated device is there, and what it computes with is together.

[Note: one device]
The simulated device is the CPU to torch, so an operation on a tensor of the host and one of the device would simply
work; on CUDA it is an error. So a factory or a `to()` that is given the device, by the very object that names it, gives
device memory, and an operation of the package (not of a script's model, whose inputs are the host's here) on memory of
both is an error, but for copies and for numbers of no dimension, which CUDA takes too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import offloadzero

PACKAGE = offloadzero.__path__[0] + "/"
FACTORIES = (
    "arange",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
)
_MAY_MIX = {"copy_", "_to_copy", "_foreach_copy_"}


class MixedDevicesError(AssertionError):
    """An operation of the package on memory of the host and of the device."""


def expect_together(
    func: Any, tensors: Sequence[torch.Tensor], holds: Callable[[torch.Tensor], bool]
) -> None:
    """[Note: one device]."""
    others = [tensor for tensor in tensors if tensor.dim() and tensor.numel() and not holds(tensor)]
    if not others or func._schema.name.partition("::")[2] in _MAY_MIX:
        return
    place = asked_by()
    if place is not None:
        raise MixedDevicesError(
            f"{place}: {func} of device memory and {[tuple(one.shape) for one in others]} on the host"
        )


def asked_by() -> str | None:
    """Where in the package the calling thread is; None where a script or torch's backward asks.

    The innermost Python function on the stack that is neither torch's nor the simulation's says whose it is. Between
    the package and what it runs on behalf of the script (a module's forward, torch's backward) there are torch's own
    functions for that, `torch/nn` and `torch/autograd`.
    """
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path.removeprefix(PACKAGE)} {frame.f_code.co_name}"
        if "/torch/" in path:
            if "/torch/nn/" in path or "/torch/autograd/" in path or path.endswith("/utils/checkpoint.py"):
                return None
        elif "/tests/simulated/" not in path and "/contextlib.py" not in path:
            return None
        frame = frame.f_back
    return None


def make_there(
    named: torch.device,
    patch: pytest.MonkeyPatch,
    *,
    holds: Callable[[torch.Tensor], bool],
    move: Callable[..., torch.Tensor],
) -> None:
    """Until `patch` is undone, tensors there have the device `named`, and what factories make for that one is there.

    `move` brings a tensor of the host's there.
    """

    def making(name: str) -> Callable[..., torch.Tensor]:
        make: Callable[..., torch.Tensor] = getattr(torch, name)

        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = make(*args, **kwargs)
            return move(result, is_empty="empty" in name) if kwargs.get("device") is named else result

        return made

    device_of = torch.Tensor.device.__get__  # type: ignore[attr-defined]

    def device(tensor: torch.Tensor) -> torch.device:
        found: torch.device = device_of(tensor)
        if found.type != "cpu" or tensor.layout is not torch.strided:
            return found
        return named if holds(tensor) else found

    for name in FACTORIES:
        patch.setattr(torch, name, making(name))
    patch.setattr(torch.Tensor, "device", property(device))
