"""The HTML pages of the commands.

[Note: the page]
A page is its template with the common style (page_style.css) and tools (page_tools.js); the data go into it as one JSON
object. The script sets text through textContent only, and `<` is escaped in the JSON, so no name of a module, file or
wait can become markup. Nothing is loaded from anywhere: the page can be mailed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def page_template(name: str) -> str:
    """Return the page `name` without its data."""
    text = _read(name)
    return text.replace("/*STYLE*/", _read("page_style.css"), 1).replace(
        "/*TOOLS*/", _read("page_tools.js"), 1
    )


def make_page(name: str, data: Mapping[str, Any]) -> str:
    """Return the page `name` with its data in it: [Note: the page]."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
    return page_template(name).replace("/*DATA*/", text, 1)


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
