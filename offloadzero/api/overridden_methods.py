"""The methods of an optimizer that differ from the class whose update is computed here.

The states of an optimizer are taken over and its groups are followed; none of its methods is ever called. A method that
a script has written (in a subclass, on the optimizer itself, or in the place of the known class's own) would be
silently dropped, and the numbers would change. torch sets some methods itself: a profiling wrapper on the class, and a
wrapper that counts calls on the optimizer that a learning-rate scheduler is made on. The check looks inside of these
wrappers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offloadzero.update.specs import KNOWN_CLASSES

# Attributes that a class may have of its own without computing anything else.
_HARMLESS = (
    "__abstractmethods__ __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __dict__ __doc__ __eq__ "
    "__firstlineno__ __getstate__ __hash__ __init__ __init_subclass__ __module__ __parameters__ __qualname__ "
    "__reduce__ __reduce_ex__ __repr__ __slots__ __static_attributes__ __str__ __weakref__ _abc_impl"
)


# The methods that a loop calls. A class whose own method was replaced has nothing else to be compared with.
_CALLED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


def overrides_text(optimizer: torch.optim.Optimizer) -> str:
    """Name the methods that would never run, and where they were put; "" for an ordinary optimizer."""
    known = next(cls for cls in type(optimizer).__mro__ if cls in KNOWN_CLASSES)
    own: dict[str, Any] = {}
    for cls in reversed(type(optimizer).__mro__):
        if not issubclass(known, cls):
            own.update(vars(cls))
    on_itself = {
        name: value
        for name, value in vars(optimizer).items()
        if callable(value) and _differs(type(optimizer), name, value)
    }
    replaced = [name for name in _CALLED if _is_replaced(known, name)]
    found = {
        "its own {}": _overriding(known, own),
        "{}, set on this very object,": _overriding(known, on_itself),
        f"{{}}, replaced on the class {known.__name__} itself,": replaced,
    }
    texts = [text.format(", ".join(names)) for text, names in found.items() if names]
    return f"{' and '.join(texts)} would never run" if texts else ""


def _overriding(known: type, methods: Mapping[str, Any]) -> list[str]:
    harmless = _HARMLESS.split()
    return sorted(
        name for name, value in methods.items() if name not in harmless and _differs(known, name, value)
    )


def _is_replaced(known: type, name: str) -> bool:
    """Whether the class's method, inside of torch's wrappers, is from another module than the class and its bases."""
    method = inspect.unwrap(
        inspect.getattr_static(known, name), stop=lambda one: not _module_of(one).startswith("torch.")
    )
    # torch.optim.Muon says that it is of torch.optim, where its module only puts it.
    homes = {_module_of(vars(cls).get("__init__")) for cls in known.__mro__}
    return _module_of(method) not in {*homes, *(cls.__module__ for cls in known.__mro__)}


def _differs(known: type, name: str, value: Any) -> bool:
    original = inspect.getattr_static(known, name, None)
    return original is not None and _without_torchs(value) is not _without_torchs(original)


def _without_torchs(method: Any) -> Any:
    """Return the method inside the wrappers that torch.optim puts around an optimizer's methods."""
    return inspect.unwrap(method, stop=lambda one: not _is_torchs(one)) if callable(method) else method


def _is_torchs(method: Callable[..., Any]) -> bool:
    return _module_of(method).startswith("torch.optim.")


def _module_of(method: Any) -> str:
    """Return the module of the code: `__module__` is copied by wrappers."""
    module: str = getattr(method, "__globals__", {}).get("__name__", "")
    return module
