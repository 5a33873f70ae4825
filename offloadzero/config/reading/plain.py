"""The object given as a configuration, copied into plain dicts and lists of bounded size (or refused).

The code after this works on JSON values alone: no cycles, no depth at which recursion ends, no numbers that
cannot be printed, no keys that are not text, and each key once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from offloadzero.config.reading.json_text import LongNumber, Pairs
from offloadzero.errors import ConfigError, abbreviated

MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_INTEGER_BITS = 1024  # about the range of a double
# The arguments of a torch schedule may be anything (a function, say): they go to its constructor as they are.
_OPAQUE_BELOW = "scheduler.params."


def plain_values(source: Mapping[Any, Any] | Pairs) -> dict[str, Any]:
    """Return a copy of `source`: dicts, lists, texts, paths, numbers, true, false, null. Raises ConfigError."""
    return _Copier().copy_object("", source, depth=0)


class _Copier:
    """Copies one source; counts its values and remembers the containers that it is inside of."""

    def __init__(self) -> None:
        self._num_values = 0
        self._open: set[int] = set()

    def copy_object(self, key: str, source: Mapping[Any, Any] | Pairs, *, depth: int) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        for name, value in self._members(source):
            if not isinstance(name, str):
                raise ConfigError(key or "the configuration", name, "keys must be text")
            dotted = f"{key}.{name}" if key else name
            entry = self._copy(dotted, value, depth=depth + 1)
            if name in copied:
                raise ConfigError(
                    dotted, entry, f"duplicate key, given before as {abbreviated(copied[name])}"
                )
            copied[name] = entry
        return copied

    @staticmethod
    def _members(source: Mapping[Any, Any] | Pairs) -> Iterable[tuple[Any, Any]]:
        return source if isinstance(source, Pairs) else source.items()

    def _copy(self, key: str, value: Any, *, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ConfigError(key, value, f"the configuration has more than {MAX_VALUES} values")
        if isinstance(value, (Mapping, list, tuple)):
            return self._copy_container(key, value, depth=depth)
        _check_scalar(key, value)
        return value

    def _copy_container(self, key: str, value: Any, *, depth: int) -> Any:
        if id(value) in self._open:
            raise ConfigError(key, value, "contains itself")
        if depth > MAX_DEPTH:
            raise ConfigError(key, value, f"nested too deeply: at most {MAX_DEPTH} levels")
        self._open.add(id(value))
        try:
            if isinstance(value, (Mapping, Pairs)):
                return self.copy_object(key, value, depth=depth)
            return [
                self._copy(f"{key}[{index}]", entry, depth=depth + 1) for index, entry in enumerate(value)
            ]
        finally:
            self._open.discard(id(value))


def _check_scalar(key: str, value: object) -> None:
    if isinstance(value, LongNumber) or (isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS):
        raise ConfigError(key, value, "a number of at most 308 digits")
    if value is None or isinstance(value, (str, int, float, os.PathLike)) or key.startswith(_OPAQUE_BELOW):
        return
    raise ConfigError(key, value, "a JSON value: an object, a list, text, a number, true, false or null")
