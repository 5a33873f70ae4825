"""The errors that offloadzero raises on purpose."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Iterable, Mapping

MAX_SHOWN_CHARS = 240
_MAX_COMPARED_CHARS = 80  # of a word that is compared with the known ones


class _ShortRepr(reprlib.Repr):
    """A repr for messages: it takes any value, its length is bounded, and it never raises."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 16
        self.maxstring = self.maxother = self.maxlong = 120

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print an integer of more than some thousand digits.
        return f"<integer of {x.bit_length()} bits>" if x.bit_length() > 512 else super().repr_int(x, level)


_short_repr = _ShortRepr()


def abbreviated(value: object) -> str:
    """`repr(value)`, cut in the middle where it is long."""
    return _cut(_short_repr.repr(value))


def _printable(key: str) -> str:
    """A dotted key as it can be printed anywhere: no control characters, no lone surrogates."""
    return _cut(key if key.isprintable() else repr(key)[1:-1])


def _cut(text: str) -> str:
    half = MAX_SHOWN_CHARS // 2 - 2
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:half]}...{text[-half:]}"


def nearest(word: object, known: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """The known word that is most like this one, by difflib; none where all are less alike than `cutoff`."""
    if not isinstance(word, str) or len(word) > _MAX_COMPARED_CHARS:
        return []
    return difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)


class OffloadError(Exception):
    """Base class of all errors of this package."""


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
        near = nearest(key.rsplit(".", 1)[-1], known_keys) + nearest(value, known_values)
        self.nearest = near[0] if near else None
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest else ""
        super().__init__(f"{_printable(key)} = {abbreviated(value)}: {allowed}{hint}")


class BudgetError(OffloadError, MemoryError):
    """A request does not fit a tier; the message holds the table of bytes.

    `needed` has the bytes that the refused plan takes, by the name of the tier, where a budget is too small for it.
    """

    def __init__(self, message: str = "", *, needed: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.needed = dict(needed or {})


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


class AioTimeoutError(AioError, TimeoutError):
    """An operation was not complete within the configuration's `transfer_timeout_s` (errno ETIMEDOUT).

    Blocks that were in the kernel then may still move bytes: the file engine keeps the buffer until they are over.
    """


class CheckpointError(OffloadError, ValueError):
    """A checkpoint is missing, not whole, of another program, or does not fit the model: names file and reason."""


class NonFiniteError(OffloadError, ArithmeticError):
    """A gradient holds NaN or Inf and the configuration says to stop."""


class StateError(OffloadError, RuntimeError):
    """An object was used in a state that does not allow it."""


class RankError(OffloadError, RuntimeError):
    """A collective of several ranks did not come to its end: names its purpose, and the error of another rank."""
