"""The output of the commands: lines, tables, sizes and times, files, pages, and progress on standard error.

[Note: the page]
A page is the template (page.html) with the common style (page_style.css) and tools (page_tools.js), and with a body and
a script of its own, which are one file; the data go into it as one JSON object. The script sets text through
textContent only, and `<` is escaped in the JSON, so no name of a module, file or wait can become markup. Nothing is
loaded from anywhere: the page can be mailed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from offloadzero.errors import AioError, ConfigError
from offloadzero.observe.texts import format_bytes

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(s|sec|min|h)?", re.ASCII)
_UNIT_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, None: 1.0}
_LINE_EVERY_S = 5.0


def print_lines(lines: Iterable[str]) -> None:
    print("\n".join(lines), flush=True)


def text_table(header: Iterable[str], rows: Iterable[Iterable[str]], *, num_left: int = 1) -> list[str]:
    """Return a table of aligned columns, the first `num_left` to the left."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def line(row: list[str]) -> str:
        pairs = list(zip(row, widths, strict=True))
        left = [cell.ljust(width) for cell, width in pairs[:num_left]]
        return "  ".join([*left, *(cell.rjust(width) for cell, width in pairs[num_left:])]).rstrip()

    return [line(row) for row in cells]


def read_seconds(key: str, text: str, *, minimum: float) -> float:
    """Read "90", "60s", "1.5min" or "1h". Raises ConfigError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(key, text, 'a time such as "60s" or "2min"')
    seconds = float(match[1]) * _UNIT_S[match[2]]
    if seconds < minimum:
        raise ConfigError(key, text, f"at least {minimum:g} s")
    return seconds


# --- files ---


def check_output(key: str, path: str | None) -> None:
    """Raise ConfigError when a result could not be written there: now rather than after the measurement."""
    if path is None or (key, path) == ("--json", "-"):
        return
    parent = Path(path).parent
    if Path(path).is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(key, path, "not a file that can be written")


def show_result(lines: Iterable[str], json_path: str | None, result: Mapping[str, Any]) -> None:
    """Print lines for people, and save all of it where `--json` names a file; with - that is printed in their place."""
    if json_path == "-":
        print_lines([json.dumps(result, indent=1, allow_nan=False)])
        return
    print_lines(lines)
    if json_path:
        save_json(json_path, result)


def save_json(path: str, value: Mapping[str, Any]) -> None:
    save_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def save_text(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise AioError(
            operation="write", path=path, offset=0, num_bytes=len(text), errno=error.errno or 0
        ) from error


def page_template(name: str) -> str:
    """Return the page `name` without its data."""
    body, _, script = _part(name).partition("<script>\n")
    parts = {"STYLE": _part("page_style.css"), "BODY": body, "TOOLS": _part("page_tools.js")}
    page = _part("page.html")
    for mark, text in {**parts, "SCRIPT": script.partition("</script>")[0]}.items():
        page = page.replace(f"/*{mark}*/", text, 1)
    return page


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def make_page(name: str, data: Mapping[str, Any]) -> str:
    """Return the page `name` with its data in it: [Note: the page]."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
    return page_template(name).replace("/*DATA*/", text, 1)


# --- progress ---


class Progress:
    """Counts seconds up to `total_s`, in lines on standard error."""

    def __init__(self, total_s: float) -> None:
        self._started_s = time.monotonic()
        self._total_s = total_s
        self._phase = ""
        self._last_line_s = 0.0

    def phase(self, name: str) -> None:
        self._phase = name
        self._line("")

    def tick(self, text: str) -> None:
        """Note that a sample was measured."""
        if time.monotonic() - self._started_s - self._last_line_s >= _LINE_EVERY_S:
            self._line(f": {text}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _line(self, tail: str) -> None:
        self._last_line_s = time.monotonic() - self._started_s
        self.say(f"[{self._last_line_s:4.0f} s of {self._total_s:.0f}] {self._phase}{tail}")


class ProgressBar:
    """Counts bytes on standard error up to a total: a bar on a terminal, and else a line every five seconds."""

    _WIDTH = 30
    _DRAW_EVERY_S = 0.1

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = max(1, total_bytes)
        self._is_terminal = sys.stderr.isatty()
        self._started_s = self._last_s = time.monotonic()
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        every_s = self._DRAW_EVERY_S if self._is_terminal else _LINE_EVERY_S
        if time.monotonic() - self._last_s >= every_s:
            self._draw()

    def _draw(self) -> None:
        self._last_s = time.monotonic()
        share = self._num_bytes / self._total_bytes
        rate = self._num_bytes / max(self._last_s - self._started_s, 1e-9)
        left_s = (self._total_bytes - self._num_bytes) / max(rate, 1e-9)
        text = (
            f"{share:4.0%} of {format_bytes(self._total_bytes)}, {rate / 1e9:.2f} GB/s, {left_s:,.0f} s left"
        )
        if self._is_terminal:
            print(
                f"\r[{'#' * int(share * self._WIDTH):{self._WIDTH}}] {text} ",
                end="",
                file=sys.stderr,
                flush=True,
            )
        else:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            self._draw()
            print(file=sys.stderr)
