"""The param groups of an offloaded optimizer as the configuration gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offloadzero.config import UNRESOLVED, OptimizerConfig
from offloadzero.errors import ConfigError


def group_defaults(config: OptimizerConfig) -> dict[str, Any]:
    """A param group's options from the JSON's optimizer block."""
    return dict(config.params)


def expect_rates(param_groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError for a group without a rate where the configuration leaves the rate at "auto"."""
    if any(group["lr"] is None for group in param_groups):
        raise ConfigError("optimizer.params.lr", "auto", f"{UNRESOLVED}; or pass an optimizer")
