"""The text of a configuration file: JSON, with the comments and trailing commas that DeepSpeed's files may have.

DeepSpeed reads its file as Hjson. Of Hjson's additions, comments (`#`, `//`, `/* */`) and a comma after the last member
are read here. Keys and texts without quotes and missing commas are refused: with them a typo would be another value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from offloadzero.errors import ConfigError

_TOKEN = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"?'  # a text, without its end where the file ends first
    r"|(?://|\#)[^\n]*"
    r"|/\*.*?(?:\*/|\Z)"
    r"|,"
    r'|[^"/\#,]+'
    r"|/",
    re.DOTALL,
)
# Python reads no integer of more than 4300 digits; a longer one than any number in use is kept as text.
MAX_INTEGER_CHARS = 400


class Pairs(list[tuple[str, Any]]):
    """The members of a JSON object as written, duplicates included."""


class LongNumber(str):
    """The digits of an integer that is too long to be read as one."""


def parse_json(text: str, *, name: str) -> Any:
    """Return the values of `text`, objects as Pairs; `name` is the file's, for errors. Raises ConfigError."""
    try:
        return json.loads(_plain_json(text, name=name), object_pairs_hook=Pairs, parse_int=_read_integer)
    except json.JSONDecodeError as error:
        lines = text.split("\n")[error.lineno - 1 : error.lineno]
        allowed = f"not valid JSON (comments and trailing commas are read): {error.msg}"
        raise ConfigError(f"{name}:{error.lineno}:{error.colno}", "".join(lines).strip(), allowed) from error
    except RecursionError as error:
        raise ConfigError("config", name, "nested too deeply") from error


def _read_integer(digits: str) -> int | LongNumber:
    return int(digits) if len(digits) <= MAX_INTEGER_CHARS else LongNumber(digits)


def _plain_json(text: str, *, name: str) -> str:
    """Return `text` with spaces for comments and trailing commas: every other character keeps its line and column."""
    pieces = list(_without_comments(text, name=name))
    for index in _trailing_commas(pieces):
        pieces[index] = " "
    return "".join(pieces)


def _without_comments(text: str, *, name: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        token = match[0]
        if not token.startswith(("//", "#", "/*")):
            yield token
            continue
        if token.startswith("/*") and (len(token) < 4 or not token.endswith("*/")):
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"{name}:{line}", token, "a comment without its */")
        yield re.sub(r"[^\n]", " ", token)


def _trailing_commas(pieces: list[str]) -> Iterator[int]:
    """Indices of the commas between a value and the end of its object or list."""
    comma: int | None = None
    before = "["  # the last character that is not space or comment; no comma follows an opening bracket
    for index, piece in enumerate(pieces):
        if piece == ",":
            comma = index if before not in "[{,:" else None
            before = ","
        elif stripped := piece.strip():
            if comma is not None and stripped[0] in "]}":
                yield comma
            comma, before = None, stripped[-1]
