"""Everything offloadzero raises on purpose (floor 0: imports nothing of ours)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


class OffloadError(Exception):
    """Base of all errors of this package."""


class ConfigError(OffloadError, ValueError):
    """A mistake in the configuration or in a call: names key, value, what is allowed, the nearest match."""

    def __init__(
        self,
        key: str,
        value: object,
        allowed: str,
        *,
        known_keys: Iterable[str] = (),
        known_values: Iterable[str] = (),
    ) -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        near = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(known_keys), n=1, cutoff=0.5)
        near += difflib.get_close_matches(str(value), list(known_values), n=1, cutoff=0.5)
        self.nearest = near[0] if near else None
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest else ""
        super().__init__(f"{key} = {value!r}: {allowed}{hint}")


class BudgetError(OffloadError, MemoryError):
    """What was asked for does not fit a tier; the message holds the table of bytes."""


class AioError(OffloadError, OSError):
    """A file operation failed: names tensor, tier, file, offset and length."""

    def __init__(
        self,
        *,
        operation: str,
        path: str,
        offset: int,
        num_bytes: int,
        errno: int,
        label: str = "",
        detail: str = "",
    ) -> None:
        self.operation = operation
        self.path = path
        self.offset = offset
        self.num_bytes = num_bytes
        self.label = label
        what = f"{label} (nvme): " if label else ""
        why = os.strerror(errno) + (f", {detail}" if detail else "")
        text = f"{what}{operation} {path}+{offset:#x}, {num_bytes} bytes: {why}"
        super().__init__(errno, text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class NonFiniteError(OffloadError, ArithmeticError):
    """A gradient holds NaN or Inf and the configuration says to stop."""


class StateError(OffloadError, RuntimeError):
    """An object was used in a state that does not allow it."""
