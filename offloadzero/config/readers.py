"""Typed readers of JSON values: each names the full dotted key in its ConfigError.

JSON writers print large counts as floats (`5e8`, `0.9 * h * h`), so an integral float is an integer here;
true and false are never numbers, but 0 and 1 are booleans where a boolean is expected, as in DeepSpeed.

[Note: a key is its field]
A field of the configuration that is made by `own_key` says all there is of its key: default, sentence, reader and
bounds. The loader's table (`config/keys.py`), the reading (`Block.read_fields`) and the tables of docs/config.md (`make
docs`) follow.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from offloadzero.core.segments import TierName
from offloadzero.errors import ConfigError

TIERS = tuple(tier.value for tier in TierName)
# What scripts call tiers and devices of offloading, and the names for it in the JSON.
_OTHER_NAMES = {
    "cpu": ("host",),
    "gpu": ("device", "none"),
    "cuda": ("device", "none"),
    "disk": ("nvme",),
    "ssd": ("nvme",),
}

_STEPS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?", re.ASCII)
BYTE_UNITS: Mapping[str, int] = MappingProxyType(
    {
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }
)

AUTO = "auto"  # the Hugging Face Trainer resolves it before us
UNRESOLVED = 'write a number: "auto" is for the Hugging Face Trainer to fill in, and nobody has'

# The largest count of samples, micro batches or threads: a larger one is a mistake, and no counter gets there.
MAX_COUNT = 2**31 - 1
_BYTE_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?) *([A-Za-z]*)", re.ASCII)
_BYTE_SIZE_ALLOWED = 'a whole number of bytes, or text such as "16GiB" (2**30 each) or "512MB" (10**6 each)'


def is_auto(value: object) -> bool:
    """Whether a value is the word "auto"."""
    return isinstance(value, str) and value == AUTO


def _range_text(what: str, minimum: float | None, maximum: float | None) -> str:
    bounds = [
        f"{word} {bound}"
        for word, bound in (("at least", minimum), ("at most", maximum))
        if bound is not None
    ]
    return " ".join([what, " and ".join(bounds)]).strip()


def _unlike_text(value: object) -> str:
    """What is added to "a number" where a text was written, "1e-3" say."""
    return ", without quotes" if isinstance(value, str) else ""


def _is_whole(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return value.is_integer()  # false for infinity and NaN as well
    return isinstance(value, int) and not isinstance(value, bool)


def read_bool(key: str, value: object) -> bool:
    """Read true, false, or the numbers 1 and 0. Raises ConfigError for anything else."""
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise ConfigError(key, value, "allowed true, false")
    return bool(value)


def read_int(key: str, value: object, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Read an integer or an integral float within the bounds (both inclusive). Raises ConfigError for anything else."""
    allowed = _range_text("a whole number", minimum, maximum) + _unlike_text(value)
    if not _is_whole(value):
        raise ConfigError(key, value, allowed)
    number = int(value)
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ConfigError(key, value, allowed)
    return number


def read_float(
    key: str, value: object, *, minimum: float | None = None, maximum: float | None = None
) -> float:
    """Read a finite number within the bounds (both inclusive). Raises ConfigError for anything else."""
    allowed = _range_text("a finite number", minimum, maximum) + _unlike_text(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(key, value, allowed)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a float
        raise ConfigError(key, value, allowed) from None
    if not math.isfinite(number):
        raise ConfigError(key, value, allowed)
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ConfigError(key, value, allowed)
    return number


def read_str(key: str, value: object) -> str:
    """Read a text that is not empty. Raises ConfigError for anything else."""
    if not isinstance(value, str) or not value:
        raise ConfigError(key, value, "text that is not empty")
    return value


def read_enum(key: str, value: object, allowed: Iterable[str]) -> str:
    """Read one of the words `allowed`, compared exactly. Raises ConfigError for anything else."""
    words = list(allowed)
    if not isinstance(value, str) or value not in words:
        meant = next((word for word in _OTHER_NAMES.get(str(value), ()) if word in words), None)
        if meant is not None:
            raise ConfigError(key, value, f"allowed {', '.join(words)}: {value} is {meant!r} here")
        raise ConfigError(key, value, "allowed " + ", ".join(words), known_values=words)
    return value


def read_num_bytes(key: str, value: object, *, minimum: int = 0, maximum: int | None = None) -> int:
    """Read a byte size: a whole number, or a number with a unit of `BYTE_UNITS` ("16GiB", "1.5 GB").

    A bare "16G" is refused: tools disagree whether it means 10**9 or 2**30. A fraction of a byte is refused.
    """
    if isinstance(value, str):
        match = _BYTE_SIZE.fullmatch(value.strip())
        unit = BYTE_UNITS.get((match[2] or "B") if match else "")
        if match is None or unit is None:
            raise ConfigError(key, value, _BYTE_SIZE_ALLOWED)
        exact = Fraction(match[1]) * unit  # decimal arithmetic: "0.1GB" is 10**8, not a binary neighbour
        if exact.denominator != 1:
            raise ConfigError(key, value, f"a whole number of bytes, and this is {float(exact):.15g}")
        num_bytes = exact.numerator
    elif _is_whole(value):
        num_bytes = int(value)
    else:
        raise ConfigError(key, value, _BYTE_SIZE_ALLOWED)
    if num_bytes < minimum or (maximum is not None and num_bytes > maximum):
        raise ConfigError(key, value, _range_text("bytes,", minimum, maximum))
    return num_bytes


def read_path(key: str, value: object) -> Path:
    """Read a path of a file or directory that the system accepts, and expand `~`. Raises ConfigError for others."""
    text = read_str(key, os.fspath(value) if isinstance(value, os.PathLike) else value)
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise ConfigError(
            key, value, "a path: this text has no form as a file name (lone surrogates)"
        ) from None
    if b"\0" in encoded:
        raise ConfigError(key, value, "a path: it must not contain a NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # `~name` of a user that does not exist
        raise ConfigError(key, value, f"a path: {error}") from error


def read_str_list(key: str, value: object) -> tuple[str, ...]:
    """Read a list of texts, or one text alone. Raises ConfigError for anything else."""
    if isinstance(value, str):
        return (read_str(key, value),)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(key, value, "a text or a list of texts")
    return tuple(read_str(f"{key}[{index}]", entry) for index, entry in enumerate(value))


def read_mapping(key: str, value: object) -> Mapping[str, Any]:
    """Read a JSON object; its keys must be text. Raises ConfigError for anything else."""
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "a JSON object {...}")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(key, name, "keys must be text")
    return value


def any_enabled(value: object) -> bool:
    """Whether an `"enabled": true` (or anything truthy) stands anywhere in this JSON value."""
    if isinstance(value, Mapping):
        own = value.get("enabled")
        return (own not in (None, "auto") and bool(own)) or any(
            any_enabled(entry) for entry in value.values()
        )
    if isinstance(value, (list, tuple)):
        return any(any_enabled(entry) for entry in value)
    return False


# --- values that the `offloadzero` block alone has ---


def read_tier(key: str, value: object) -> TierName:
    """Read the name of a tier. Raises ConfigError."""
    return TierName(read_enum(key, value, TIERS))


def read_bool_or_auto(key: str, value: object) -> bool | None:
    """Read a boolean, or "auto" as None. Raises ConfigError."""
    if is_auto(value):
        return None
    try:
        return read_bool(key, value)
    except ConfigError as error:
        raise ConfigError(key, value, f"{error.allowed}, auto") from None


def read_durable(key: str, value: object) -> int:
    """Read after how many steps a commit is made: true is 1, and false 0. Raises ConfigError."""
    if isinstance(value, bool):
        return int(value)
    try:
        return read_int(key, value, minimum=1)
    except ConfigError as error:
        raise ConfigError(key, value, f"true, false, {error.allowed}") from None


def read_multiple(key: str, value: object, *, of: int) -> int:
    """Read a positive multiple of a number. Raises ConfigError."""
    number = read_int(key, value, minimum=of)
    if number % of:
        raise ConfigError(key, value, f"a multiple of {of}")
    return number


def read_cores(key: str, value: object) -> tuple[int, ...]:
    """Read a list of CPUs that this process may use, sorted. Raises ConfigError."""
    usable = os.sched_getaffinity(0)
    if not isinstance(value, list) or not value:
        raise ConfigError(key, value, "a list of at least one CPU number")
    cores = {read_int(f"{key}[{index}]", core, minimum=0) for index, core in enumerate(value)}
    if not usable.issuperset(cores):
        raise ConfigError(key, value, f"some of the CPUs this process may use: {sorted(usable)}")
    return tuple(sorted(cores))


def read_steps(key: str, value: object) -> tuple[tuple[int, int], ...]:
    """Read one step, a range such as "3-5", or a list of them, as first and last steps. Raises ConfigError."""
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_read_step_range(key, entry) for entry in entries)


def _read_step_range(key: str, value: object) -> tuple[int, int]:
    allowed = 'steps from 1 on: [3, 4], "10-12"'
    if isinstance(value, str):
        match = _STEPS.fullmatch(value)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(key, value, allowed)
        return first, last
    step = read_int(key, value, minimum=1)
    return step, step


def read_device(key: str, value: object) -> str:
    """Read the name of a device. Raises ConfigError."""
    text = read_str(key, value)
    if _DEVICE.fullmatch(text) is None:
        raise ConfigError(key, value, "allowed cpu, cuda, cuda:N")
    return text


@dataclass(frozen=True)
class NvmePath:
    """One directory and the dotted key that asked for it."""

    key: str
    path: Path


def read_nvme_paths(key: str, value: object) -> tuple[NvmePath, ...]:
    """Read one path or a list of them, `~` expanded; an empty list is a ConfigError."""
    if isinstance(value, (str, os.PathLike)):
        return (NvmePath(key, read_path(key, value)),)
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(key, value, "a directory, or a list of at least one")
    keys = [f"{key}[{index}]" for index in range(len(value))]
    return tuple(NvmePath(name, read_path(name, entry)) for name, entry in zip(keys, value, strict=True))


# --- fields that declare their key ---

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
