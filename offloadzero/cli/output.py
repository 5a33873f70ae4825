"""The output of results, to standard output and to files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offloadzero.errors import AioError, ConfigError


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
