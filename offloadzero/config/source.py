"""The configuration as it is given, a dict or a file, into plain values of bounded size.

The code after this works on JSON values alone: no cycles, no depth at which recursion ends, no numbers that cannot be
printed, no keys that are not text, and each key once.

DeepSpeed reads its file as Hjson. Of Hjson's additions, comments (`#`, `//`, `/* */`) and a comma after the last member
are read here. Keys and texts without quotes and missing commas are refused: with them a typo would be another value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offloadzero.config.readers import read_path
from offloadzero.errors import ConfigError, abbreviated

MAX_FILE_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_INTEGER_BITS = 1024  # about the range of a double
# The arguments of a torch schedule may be anything (a function, say): they go to its constructor as they are.
_OPAQUE_BELOW = "scheduler.params."
_TOKEN = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"?'  # a text, without its end where the file ends first
    r"|(?://|\#)[^\n]*"
    r"|/\*.*?(?:\*/|\Z)"
    r"|,"
    r'|[^"/\#,]+'
    r"|/",
    re.DOTALL,
)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file, read as `load_config` reads it, comments and all. Raises ConfigError."""
    return plain_values(_read_json_file(path))


def read_source(source: object) -> Mapping[Any, Any] | Pairs:
    """Return the members of a dict, or of the object in a file. Raises ConfigError for another source."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _read_json_file(source)
    raise ConfigError("config", source, "a dict, the path of a JSON file, or an OffloadConfig")


def _read_json_file(source: str | os.PathLike[str]) -> Pairs:
    path = read_path("config", source)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError("config", str(path), f"the file cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError("config", str(path), f"the file has more than {MAX_FILE_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError("config", str(path), f"the file is not UTF-8 text: {error}") from error
    values = parse_json(text, name=str(path))
    if not isinstance(values, Pairs):
        raise ConfigError("config", str(path), "the file must hold one JSON object {...}")
    return values


# --- text ---


class Pairs(list[tuple[str, Any]]):
    """The members of a JSON object as written, duplicates included."""


def parse_json(text: str, *, name: str) -> Any:
    """Return the values of `text`, objects as Pairs; `name` is the file's, for errors. Raises ConfigError."""
    try:
        return json.loads(_plain_json(text, name=name), object_pairs_hook=Pairs)
    except json.JSONDecodeError as error:
        lines = text.split("\n")[error.lineno - 1 : error.lineno]
        allowed = f"not valid JSON (comments and trailing commas are read): {error.msg}"
        raise ConfigError(f"{name}:{error.lineno}:{error.colno}", "".join(lines).strip(), allowed) from error
    except RecursionError as error:
        raise ConfigError("config", name, "nested too deeply") from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise ConfigError("config", name, f"not valid JSON: {error}") from error


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


# --- values ---


def plain_values(source: Mapping[Any, Any] | Pairs) -> dict[str, Any]:
    """Return a copy of `source`: dicts, lists, texts, paths, numbers, true, false, null. Raises ConfigError."""
    return _Copier().copy_object("", source, depth=0)


class _Copier:
    """Copies one source and counts its values."""

    def __init__(self) -> None:
        self._num_values = 0

    def copy_object(self, key: str, source: Mapping[Any, Any] | Pairs, *, depth: int) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        for name, value in source if isinstance(source, Pairs) else source.items():
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

    def _copy(self, key: str, value: Any, *, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ConfigError(key, value, f"the configuration has more than {MAX_VALUES} values")
        if isinstance(value, (Mapping, list, tuple)):
            return self._copy_container(key, value, depth=depth)
        _check_scalar(key, value)
        return value

    def _copy_container(self, key: str, value: Any, *, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ConfigError(key, value, f"nested too deeply: at most {MAX_DEPTH} levels")
        if isinstance(value, (Mapping, Pairs)):
            return self.copy_object(key, value, depth=depth)
        return [self._copy(f"{key}[{index}]", entry, depth=depth + 1) for index, entry in enumerate(value)]


def _check_scalar(key: str, value: object) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise ConfigError(key, value, "a number of at most 308 digits")
    if value is None or isinstance(value, (str, int, float, os.PathLike)) or key.startswith(_OPAQUE_BELOW):
        return
    raise ConfigError(key, value, "a JSON value: an object, a list, text, a number, true, false or null")
