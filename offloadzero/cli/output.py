"""The output of results, to standard output and to files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offloadzero.errors import AioError, ConfigError

_MAX_INT_DIGITS = 30


def print_lines(lines: Iterable[str]) -> None:
    print("\n".join(lines), flush=True)


def check_output(key: str, path: str | None) -> None:
    """Raise ConfigError when a result could not be written there: now rather than after the measurement."""
    if path is None:
        return
    parent = Path(path).parent
    if Path(path).is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(key, path, "not a file that can be written")


def save_json(path: str, value: Mapping[str, Any]) -> None:
    """Write a result as JSON. Raises AioError."""
    save_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def save_text(path: str, text: str) -> None:
    """Write a text. Raises AioError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise AioError(
            operation="write", path=path, offset=0, num_bytes=len(text), errno=error.errno or 0
        ) from error


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


def text_table(header: Iterable[str], rows: Iterable[Iterable[str]], *, num_left: int = 1) -> list[str]:
    """Return a table of aligned columns, the first `num_left` to the left."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
