"""Progress on standard error: a bar on a terminal where tqdm is installed, lines otherwise."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

_LINE_EVERY_S = 5.0


class Progress:
    """Counts seconds up to `total_s`."""

    def __init__(self, total_s: float) -> None:
        self._started_s = time.monotonic()
        self._total_s = total_s
        self._phase = ""
        self._last_line_s = 0.0
        self._bar = _make_bar(total_s)

    def phase(self, name: str) -> None:
        """Begin a new phase."""
        self._phase = name
        if self._bar is not None:
            self._bar.set_description(name)
        else:
            self._line("")

    def tick(self, text: str) -> None:
        """Note that a sample was measured."""
        elapsed_s = time.monotonic() - self._started_s
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.n = round(min(elapsed_s, self._total_s), 1)
            self._bar.refresh()
        elif elapsed_s - self._last_line_s >= _LINE_EVERY_S:
            self._line(text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()

    def _line(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self._last_line_s = elapsed_s
        tail = f": {text}" if text else ""
        print(f"[{elapsed_s:4.0f} s of {self._total_s:.0f}] {self._phase}{tail}", file=sys.stderr, flush=True)


def _make_bar(total_s: float) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    form = "{desc}: {bar} {n:.0f}/{total:.0f} s {postfix}"
    return tqdm(total=round(total_s, 1), bar_format=form, file=sys.stderr, leave=False)
