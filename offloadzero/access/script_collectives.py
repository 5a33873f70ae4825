"""Collectives of torch.distributed on tensors whose value lives elsewhere.

[Note: collectives of a script]
The schemas of torch's collectives do not say which argument they write, and a collective goes on after its call has
returned. So a remote tensor ([Note: remote tensors]) knows here what is written, and the call ends with the collective:
only then is there a value to write back. What a collective reads is memory of its own, which no unit gets meanwhile.
A receive from one rank may wait for what this rank sends after it, and is an error.

torch tells `__torch_function__` of one argument of each function, as a rule one that is read; older versions tell it of
few functions at all. Then C++ takes the memory of a parameter that is only written; that of a parameter that is away
has one element. But before that the functions ask for the dtype, all but a reduce-scatter of one tensor:
this is an error here. Lists of tensors are copied into one by C++, so what they hold is read and written as ever, but
for those of a scatter, whose memory is taken. Before that it asks each of them whether it is complex: an error, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from offloadzero.access.trees import leaves_of
from offloadzero.core.torch_private import end_traced_collective
from offloadzero.errors import StateError

TorchOp = Any  # torch._ops.OpOverload: its class has no public name

_EAGER, _TRACED = "c10d", "_c10d_functional"  # torch's namespaces of collectives
_FUNCTIONS = "torch.distributed.distributed_c10d"  # and the module of its functions


def is_collective(func: TorchOp) -> bool:
    """Whether an operation sends or receives between ranks."""
    return func.namespace in (_EAGER, _TRACED)


def written_places(func: TorchOp) -> set[int]:
    """The places of arguments that a collective writes, and its schema does not name."""
    return {0} if func.namespace == _EAGER and func._schema.name.endswith("_") else set()


def expect_an_end(func: TorchOp, name: str) -> None:
    """Raise StateError for a receive into the tensor of that name, whose end cannot be waited for."""
    operation = func._schema.name.rpartition("::")[2]
    if operation in ("recv_", "recv_any_source_"):
        raise StateError(
            f"{name}: the value is away, and a receive may wait for what this rank sends later: receive into a tensor "
            "of its own, and copy_() it"
        )


def wait_for(func: TorchOp, result: Any) -> None:
    """Wait until a collective has written what it writes."""
    for leaf in leaves_of(result):
        if func.namespace == _TRACED:
            end_traced_collective(leaf)
        elif not isinstance(leaf, Tensor):
            torch.distributed.Work.unbox(leaf).wait()


_ASKED_BEFORE: frozenset[Any] = frozenset((Tensor.dtype.__get__, Tensor.is_complex))  # type: ignore[attr-defined]


def is_taken_untold(func: Callable[..., Any]) -> bool:
    """Whether `func` is asked by a function between ranks that will take the memory of what it asks for a dtype."""
    return func in _ASKED_BEFORE and _asking_frame().f_globals.get("__name__") == _FUNCTIONS


def _asking_frame() -> FrameType:
    """The frame that called the package."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("offloadzero.") and frame.f_back is not None:
        frame = frame.f_back
    return frame


def refuse_untold(name: str, what: str) -> NoReturn:
    """Raise StateError: torch does not tell of the collective."""
    raise StateError(
        f"{name}: {what} is an argument that a collective does not tell of, and would take for ordinary memory: "
        "give it a tensor of its own, and copy_() the result"
    )


def expect_not_scattered(tensor: Tensor, name: str) -> None:
    """Raise StateError where a scatter asks, of which the tensor of that name is a source."""
    frame = _asking_frame()
    if frame.f_globals.get("__name__") != _FUNCTIONS:
        return
    # Before Python 3.12 a comprehension has a frame of its own.
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name == "scatter" and frame.f_locals.get("tensor") is not tensor:
        raise StateError(
            f"{name}: a scatter would take the memory of its sources, which a value that lives elsewhere has not: give "
            "it clones"
        )
