"""offloadzero: train models whose states fit in no GPU. See README.md.

Importing the package loads no CUDA, no native module and no optional dependency: names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offloadzero import optim, zero
    from offloadzero.config import OffloadConfig, load_config
    from offloadzero.engine import Engine, initialize
    from offloadzero.errors import (
        AioError,
        BudgetError,
        ConfigError,
        NonFiniteError,
        OffloadError,
        StateError,
    )
    from offloadzero.optimizer import OffloadedOptimizer, offload

__version__ = "0.1.0"

_HOMES = {
    "AioError": "errors",
    "BudgetError": "errors",
    "ConfigError": "errors",
    "Engine": "engine",
    "NonFiniteError": "errors",
    "OffloadConfig": "config",
    "OffloadError": "errors",
    "OffloadedOptimizer": "optimizer",
    "StateError": "errors",
    "initialize": "engine",
    "load_config": "config",
    "offload": "optimizer",
}
_MODULES = ("optim", "zero")

__all__ = [
    "AioError",
    "BudgetError",
    "ConfigError",
    "Engine",
    "NonFiniteError",
    "OffloadConfig",
    "OffloadError",
    "OffloadedOptimizer",
    "StateError",
    "initialize",
    "load_config",
    "offload",
    "optim",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
