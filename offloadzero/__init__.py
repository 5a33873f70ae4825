"""offloadzero: train models whose states fit in no GPU. See README.md.

Importing the package loads no CUDA, no native module and no optional dependency: names resolve on first use.
The table of packages in docs/architecture.md shows what each of them may import: what stands lower, never higher.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offloadzero import ops, optim, zero
    from offloadzero.api.deepspeed.estimators import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from offloadzero.api.engine import Engine
    from offloadzero.api.engine import Engine as DeepSpeedEngine
    from offloadzero.api.initialize import initialize
    from offloadzero.api.optimizer import OffloadedOptimizer, offload
    from offloadzero.config import OffloadConfig, load_config
    from offloadzero.core.launch import add_config_arguments, init_distributed
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

__version__ = "0.1.0"

_HOMES = {
    "AioError": "errors",
    "AioTimeoutError": "errors",
    "BudgetError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "Engine": "api.engine",
    "NonFiniteError": "errors",
    "OffloadConfig": "config",
    "OffloadError": "errors",
    "OffloadedOptimizer": "api.optimizer",
    "RankError": "errors",
    "StateError": "errors",
    "add_config_arguments": "core.launch",
    "estimate_zero2_model_states_mem_needs_all_cold": "api.deepspeed.estimators",
    "estimate_zero2_model_states_mem_needs_all_live": "api.deepspeed.estimators",
    "estimate_zero3_model_states_mem_needs_all_cold": "api.deepspeed.estimators",
    "estimate_zero3_model_states_mem_needs_all_live": "api.deepspeed.estimators",
    "init_distributed": "core.launch",
    "initialize": "api.initialize",
    "load_config": "config",
    "offload": "api.optimizer",
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
        missing = importlib.import_module(f"{__name__}.api.deepspeed.missing_names")
        raise missing.no_attribute(f"module {__name__!r}", name, known=__all__, reasons=missing.PACKAGE_NAMES)
    globals()[name] = value
    return value
