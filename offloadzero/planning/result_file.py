"""The files of results of this package, read strictly: a format, its version, and no number that is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from offloadzero.errors import ConfigError

_MAX_INT_DIGITS = 30


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


def load_json(key: str, path: str, *, format_name: str, format_version: int) -> dict[str, Any]:
    """Read a result of this package. Raises ConfigError when the file has none, or one of another version."""
    try:
        value = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(key, path, f"is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != format_name:
        raise ConfigError(key, path, f"is not a result of this command (format {format_name})")
    if value.get("format_version") != format_version:
        raise ConfigError(
            key, path, f"has format_version {value.get('format_version')!r:.40}, not {format_version}"
        )
    return value
