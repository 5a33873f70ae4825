"""offloadzero: train models whose states fit in no GPU. See README.md.

Importing the package loads no CUDA, no native module and no optional dependency: names resolve on first use.
The table of packages in docs/architecture.md shows what each of them may import: what stands lower, never higher.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offloadzero import ops, optim, zero
    from offloadzero.config import OffloadConfig, load_config
    from offloadzero.engine import Engine
    from offloadzero.engine import Engine as DeepSpeedEngine
    from offloadzero.errors import (
        AioError,
        AioTimeoutError,
        BudgetError,
        CheckpointError,
        ConfigError,
        NonFiniteError,
        OffloadError,
        RankError,
        StateError,
    )
    from offloadzero.estimates import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from offloadzero.initialization import initialize
    from offloadzero.launch import add_config_arguments, init_distributed
    from offloadzero.optimizer import OffloadedOptimizer, offload

__version__ = "0.1.0"

_HOMES = {
    "AioError": "errors",
    "AioTimeoutError": "errors",
    "BudgetError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "Engine": "engine",
    "NonFiniteError": "errors",
    "OffloadConfig": "config",
    "OffloadError": "errors",
    "OffloadedOptimizer": "optimizer",
    "RankError": "errors",
    "StateError": "errors",
    "add_config_arguments": "launch",
    "estimate_zero2_model_states_mem_needs_all_cold": "estimates",
    "estimate_zero2_model_states_mem_needs_all_live": "estimates",
    "estimate_zero3_model_states_mem_needs_all_cold": "estimates",
    "estimate_zero3_model_states_mem_needs_all_live": "estimates",
    "init_distributed": "launch",
    "initialize": "initialization",
    "load_config": "config",
    "offload": "optimizer",
}
_MODULES = ("ops", "optim", "zero")
_ALIASES = {"DeepSpeedEngine": "Engine"}  # scripts ask isinstance(model, deepspeed.DeepSpeedEngine)

__all__ = [
    "AioError",
    "AioTimeoutError",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DeepSpeedEngine",
    "Engine",
    "NonFiniteError",
    "OffloadConfig",
    "OffloadError",
    "OffloadedOptimizer",
    "RankError",
    "StateError",
    "add_config_arguments",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "init_distributed",
    "initialize",
    "load_config",
    "offload",
    "ops",
    "optim",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _ALIASES:
        value = __getattr__(_ALIASES[name])
    else:
        absent = importlib.import_module(f"{__name__}.absent")
        raise absent.no_attribute(f"module {__name__!r}", name, known=__all__, reasons=absent.PACKAGE_NAMES)
    globals()[name] = value
    return value
