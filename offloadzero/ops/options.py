"""A check for arguments of DeepSpeed's optimizers that can have only one value here."""

from __future__ import annotations

from offloadzero.errors import ConfigError


def expect_only(name: str, value: object, *, allowed: object, hint: str = "") -> None:
    """Raise ConfigError for any value but `allowed`."""
    if value != allowed:
        raise ConfigError(name, value, f"allowed: {allowed}{hint}")
