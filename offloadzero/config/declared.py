"""Fields of the configuration that declare the key which sets them.

[Note: a key is its field]
A field that is made by `own_key` says all there is of its key: default, sentence, reader and bounds. The loader's table
(`config/keys.py`), the reading (`Block.read_fields`) and the tables of docs/config.md (`make docs`) follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from typing import Any

_KEY = "key"


@dataclass(frozen=True)
class OwnKey:
    """A key: its sentence, and the reader and bounds of its value; `read` None: the block's reader has it by name.

    In the sentence `{default}` stands for the field's, and the name of a bound in braces for that bound.
    `auto_is_absent` is KeySpec's.
    """

    name: str
    note: str
    read: Callable[..., Any] | None
    bounds: Mapping[str, Any]
    auto_is_absent: bool


def own_key(
    default: object,
    note: str,
    read: Callable[..., Any] | None = None,
    *,
    name: str = "",
    auto_is_absent: bool = True,
    **bounds: object,
) -> Any:
    """Declare a field of value `read(dotted key, value, **bounds)`, else `default`; `name` is the key's, if another."""
    return field(default=default, metadata={_KEY: OwnKey(name, note, read, bounds, auto_is_absent)})


def own_block(make: Callable[[], object], note: str, *, auto_is_absent: bool = True) -> Any:
    """Declare a field that holds a block of keys; `make()` is the one without any."""
    return field(default_factory=make, metadata={_KEY: OwnKey("", note, None, {}, auto_is_absent)})


def own_keys(config_class: type) -> Iterator[tuple[str, OwnKey]]:
    """Yield the name of each declared field and its key, whose sentence has the default in it."""
    for each in fields(config_class):
        key: OwnKey | None = each.metadata.get(_KEY)
        if key is not None:
            note = key.note
            values = key.bounds if each.default is MISSING else {**key.bounds, "default": each.default}
            for name, value in values.items():
                note = note.replace(f"{{{name}}}", shown(value))
            yield each.name, replace(key, name=key.name or each.name, note=note)


def shown(default: object) -> str:
    """Return a default as the sentences of keys have it: as JSON, without quotes or brackets."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ", ".join(map(shown, default))
    if isinstance(default, Enum):
        return str(default.value)
    return str(default).removesuffix(".0").replace("e-0", "e-")
