"""The param groups of an offloaded optimizer as the configuration gives them (floor 6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offloadzero.config import UNRESOLVED, OptimizerConfig
from offloadzero.errors import ConfigError


def group_defaults(config: OptimizerConfig) -> dict[str, Any]:
    """A param group's options from the JSON's optimizer block."""
    return dict(config.params)


def expect_rates(param_groups: Iterable[Mapping[str, Any]]) -> None:
    """A rate that the configuration leaves at "auto" has to come with the groups."""
    if any(group["lr"] is None for group in param_groups):
        raise ConfigError("optimizer.params.lr", "auto", f"{UNRESOLVED}; or pass an optimizer")
