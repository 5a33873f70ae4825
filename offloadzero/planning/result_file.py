"""The files of results of this package, read strictly: a format, its version, and no number that is none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offloadzero.errors import ConfigError

_MAX_INT_DIGITS = 30
_MAX = 1e24


def parse_json(text: str) -> Any:
    """Parse JSON of this package: no NaN, no infinity, no number that a float cannot hold. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite_float, parse_int=_small_int)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _small_int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def load_json(
    key: str, path: str, *, format_name: str, format_version: int, other: str = ""
) -> dict[str, Any]:
    """Read a result of this package. Raises ConfigError when the file has none, or one of another version.

    `other` is what else the caller would have read.
    """
    try:
        value = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(key, path, f"is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != format_name:
        raise ConfigError(key, path, f"is not a result of this command (format {format_name}){other}")
    if value.get("format_version") != format_version:
        raise ConfigError(
            key, path, f"has format_version {value.get('format_version')!r:.40}, not {format_version}"
        )
    return value


class Reader:
    """Reads the numbers of an object in JSON. A value of another kind raises ConfigError with the dotted name."""

    def __init__(self, name: str, value: Mapping[str, Any]) -> None:
        self.name = name
        self.value = value

    def expect(self, *known: str) -> None:
        """Raise ConfigError for another name than these."""
        for name in self.value:
            if name not in known:
                raise ConfigError(f"{self.name}.{name}", self.value[name], "no such entry", known_keys=known)

    def table(self, name: str) -> Reader:
        """Return an object; an empty one where it is absent. Raises ConfigError for anything else."""
        found = self.value.get(name)
        if found is None:
            found = {}
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self.name}.{name}", found, "an object")
        return Reader(f"{self.name}.{name}", found)

    def number(self, name: str) -> float | None:
        """Return a positive number, or None: not known. Raises ConfigError for anything else."""
        found = self.value.get(name)
        if found is None:
            return None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not math.isfinite(found) or not 0 < found < _MAX:
            raise ConfigError(
                f"{self.name}.{name}",
                found,
                f"a positive number below {_MAX:g}, or null for one that is not known",
            )
        return float(found)

    def count(self, name: str) -> int | None:
        """Return a whole number, 0 included, or None. Raises ConfigError for anything else."""
        found = self.value.get(name)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < _MAX:
            raise ConfigError(f"{self.name}.{name}", found, "a whole number, or null")
        return found

    def required(self, name: str) -> float:
        """Return a positive number. Raises ConfigError for anything else, and where it is absent."""
        found = self.number(name)
        if found is None:
            raise ConfigError(f"{self.name}.{name}", None, "a positive number")
        return found

    def numbers(self, name: str) -> dict[str, float]:
        table = self.table(name)
        found = {key: table.number(key) for key in table.value}
        return {key: number for key, number in found.items() if number is not None}
