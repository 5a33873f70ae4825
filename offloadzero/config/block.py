"""One JSON object, checked against its table of known keys, with typed access to its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS, Action, KeySpec, KeyTable, Kind
from offloadzero.config.readers import (
    any_enabled,
    is_auto,
    own_keys,
    read_bool,
    read_float,
    read_mapping,
    read_str,
)
from offloadzero.errors import ConfigError, abbreviated, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D")
C = TypeVar("C", bound="DataclassInstance")

_SLIP = 0.8  # how alike two keys are, by difflib, of which one is taken for a slip of the other
_FEW_KEYS = 20  # an object of no more is named whole where no key is near


class Block:
    """The values of one JSON object under the names of its table.

    Building one raises ConfigError for an unknown key, a refused value, or two spellings of one key that
    disagree; it appends one line per accepted key to `notices`. null counts as absent. So does "auto", with a notice,
    except for keys that have an "auto" of their own, or whose "auto" is resolved by their reader.

    With `warnings`, to which each adds a line, unknown keys are passed over, but for those that may be a slip: keys of
    another object, and those within two edits of a known one.
    """

    def __init__(
        self,
        path: str,
        value: object,
        *,
        table: KeyTable,
        notices: list[str],
        warnings: list[str] | None = None,
    ) -> None:
        self.path = path  # dotted; empty at the top level
        self._values: dict[str, Any] = {}
        self._written: dict[str, str] = {}
        for key, entry in read_mapping(path or "the configuration", value).items():
            if warnings is not None and _is_foreign(key, table):
                warnings.append(_passed_over(key, table))
            else:
                self._take(key, entry, table, notices)

    def _take(self, key: str, value: Any, table: KeyTable, notices: list[str]) -> None:
        spec = table.get(key)
        if spec is None:
            raise _unknown_key(self._dotted(key), key, value, table)
        name = key
        if spec.action is Action.ALIAS:
            name = spec.note
            spec = table[name]
        if value is None:
            return
        if is_auto(value) and spec.auto_is_absent:
            if spec.action in (Action.USE, Action.MAP):
                notices.append(
                    f'{self._dotted(key)}: "auto", which nobody has resolved: as if it were absent ({spec.note})'
                )
            return
        if name in self._values and self._values[name] != value:
            other = self._dotted(self._written[name])
            raise ConfigError(
                self._dotted(key), value, f"contradicts {other} = {abbreviated(self._values[name])}"
            )
        if spec.action in (Action.ACCEPT, Action.REFUSE):
            self._dismiss(key, value, spec, notices)
        self._values[name] = value
        self._written[name] = key

    def _dismiss(self, key: str, value: Any, spec: KeySpec, notices: list[str]) -> None:
        dotted = self._dotted(key)
        _check_kind(dotted, value, spec.kind)
        is_off = not any_enabled(value) if spec.kind is Kind.SWITCHED else value in spec.off
        if is_off:
            return
        if spec.action is Action.REFUSE:
            raise ConfigError(dotted, value, spec.note)
        notices.append(f"{dotted}: accepted, changes nothing: {spec.note}")

    def _dotted(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def dotted(self, name: str) -> str:
        """The full path of a key as the user spelled it."""
        return self._dotted(self._written.get(name, name))

    def written(self) -> dict[str, Any]:
        """The values as the user spelled their keys."""
        return {key: self._values[name] for name, key in self._written.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def raw(self, name: str) -> Any:
        """The value as written; None when absent."""
        return self._values.get(name)

    def read(self, name: str, reader: Callable[..., T], default: D, **bounds: Any) -> T | D:
        """Return `reader(dotted key, value, **bounds)`, or `default` when the key is absent."""
        if name not in self._values:
            return default
        return reader(self.dotted(name), self._values[name], **bounds)

    def read_fields(self, base: C) -> C:
        """Return `base` with the fields whose keys this object has: [Note: a key is its field]."""
        values = {
            name: self.read(key.name, key.read, getattr(base, name), **key.bounds)
            for name, key in own_keys(type(base))
            if key.read is not None
        }
        return replace(base, **values)

    def sub_block(self, name: str, *, table: KeyTable, notices: list[str]) -> Block:
        """Return the nested object `name`, or an empty one when it is absent."""
        value: Mapping[str, Any] = self._values.get(name, {})
        return Block(self.dotted(name), value, table=table, notices=notices)


def _homes(key: str) -> list[str]:
    """The objects that have the key."""
    tables = (*DEEPSPEED_KEYS.items(), *OWN_KEYS.items())
    return [path or "the top level" for path, known in tables if key in known]


def _is_foreign(key: str, table: KeyTable) -> bool:
    """Whether a key is that of another program, and no slip."""
    return not _homes(key) and not any(_is_within_two_edits(key, known) for known in table)


def _is_within_two_edits(one: str, other: str) -> bool:
    """Whether two letters that are added, left out or changed make one text the other (Levenshtein's distance)."""
    if abs(len(one) - len(other)) > 2:
        return False
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        above, row = row, [number]
        for column, known in enumerate(other, 1):
            row.append(min(above[column] + 1, row[-1] + 1, above[column - 1] + (letter != known)))
    return row[-1] <= 2


def _passed_over(key: str, table: KeyTable) -> str:
    near = nearest(key, table, cutoff=_SLIP)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"the key {abbreviated(key)} has no effect{hint}: neither DeepSpeed nor offloadzero has it, and DeepSpeed "
        "passes over it in silence"
    )


def _unknown_key(dotted: str, key: str, value: object, table: KeyTable) -> ConfigError:
    homes = _homes(key) if key != "enabled" else ()  # a switch is at home in each block that has one
    if homes:
        # "params" in a placement is a slip of "param" rather than the optimizer's: a key that near is said as well.
        near = nearest(key, table, cutoff=_SLIP)
        return ConfigError(
            dotted, value, f"unknown key here; it belongs in {' or '.join(homes)}", known_keys=near
        )
    error = ConfigError(dotted, value, "unknown key", known_keys=table)
    if error.nearest is None and len(table) <= _FEW_KEYS:
        allowed = [known for known, spec in table.items() if spec.action is not Action.REFUSE]
        return ConfigError(dotted, value, f"unknown key: allowed {', '.join(allowed)}")
    return error


def _check_kind(key: str, value: object, kind: Kind) -> None:
    if kind is Kind.BOOL:
        read_bool(key, value)
    elif kind is Kind.NUMBER:
        read_float(key, value)
    elif kind is Kind.TEXT:
        read_str(key, value)
    elif kind is Kind.SWITCHED:
        read_mapping(key, value)
