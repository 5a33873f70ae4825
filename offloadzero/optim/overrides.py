"""What an optimizer does differently from the class whose update is computed here (floor 4).

The states of an optimizer are taken over and its groups are followed; none of its methods is ever called. One that a
script has written (in a subclass, or set on the optimizer itself) would be dropped in silence, and other numbers come
out. torch sets some itself: a wrapper that profiles, on the class; one that notes a call, on the optimizer that a
learning-rate scheduler is made on. They are looked through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from offloadzero.optim.cpu_adam import CPUAdam

KNOWN_CLASSES = (torch.optim.AdamW, torch.optim.Adam, CPUAdam)

# What a class may have of its own without computing anything else.
_HARMLESS = (
    "__abstractmethods__ __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __dict__ __doc__ __eq__ "
    "__firstlineno__ __getstate__ __hash__ __init__ __init_subclass__ __module__ __parameters__ __qualname__ "
    "__reduce__ __reduce_ex__ __repr__ __slots__ __static_attributes__ __str__ __weakref__ _abc_impl"
)


def overridden_methods(optimizer: torch.optim.Optimizer) -> list[str]:
    """What `optimizer` has in the place of a known class's own, sorted; [] of an ordinary one."""
    known = next(cls for cls in type(optimizer).__mro__ if cls in KNOWN_CLASSES)
    own: dict[str, Any] = {}
    for cls in reversed(type(optimizer).__mro__):
        if not issubclass(known, cls):
            own.update(vars(cls))
    own.update((name, value) for name, value in vars(optimizer).items() if callable(value))
    return sorted(
        name for name, value in own.items() if name not in _HARMLESS.split() and _differs(known, name, value)
    )


def _differs(known: type, name: str, value: Any) -> bool:
    original = inspect.getattr_static(known, name, None)
    return original is not None and _without_torchs(value) is not _without_torchs(original)


def _without_torchs(method: Any) -> Any:
    """Inside the wrappers that torch.optim puts around an optimizer's methods."""
    return inspect.unwrap(method, stop=lambda one: not _is_torchs(one)) if callable(method) else method


def _is_torchs(method: Callable[..., Any]) -> bool:
    module: str = getattr(method, "__globals__", {}).get("__name__", "")
    return module.startswith("torch.optim.")
