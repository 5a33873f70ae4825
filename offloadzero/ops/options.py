"""Arguments of DeepSpeed's optimizers that have one value here (floor 5)."""

from __future__ import annotations

from offloadzero.errors import ConfigError


def expect_only(name: str, value: object, *, allowed: object, hint: str = "") -> None:
    """Raises ConfigError for any value but `allowed`."""
    if value != allowed:
        raise ConfigError(name, value, f"allowed: {allowed}{hint}")
