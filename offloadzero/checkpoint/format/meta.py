"""meta.json of a checkpoint: the mark of this package, the counters, and other values that are no tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from offloadzero.checkpoint.format.json_file import decode_plain, encode_plain, parse_json
from offloadzero.checkpoint.format.manifest import read_bytes
from offloadzero.checkpoint.format.names import META
from offloadzero.errors import CheckpointError, ConfigError

FORMAT = "offloadzero-checkpoint"
VERSION = 2
MAX_META_BYTES = 256 * 1024 * 1024
_MAX_COUNT = 2**53

T = TypeVar("T")


@dataclass(frozen=True)
class LossScaleState:
    """The state of dynamic loss scaling."""

    scale: float
    good_steps: int
    hysteresis_left: int


@dataclass(frozen=True)
class PartOfModel:
    """The place of one part of a model whose parts are saved by themselves, and the save that it is of."""

    pipeline_rank: int
    tensor_rank: int
    num_parts: int
    save_number: int  # the same in all parts of one save, and in no other


@dataclass(frozen=True)
class Meta:
    """The content of meta.json beside the format."""

    global_steps: int
    micro_steps: int
    skipped_steps: int
    param_groups: list[dict[str, Any]]
    client_state: dict[str, Any] = field(default_factory=dict)
    loss_scale: LossScaleState | None = None
    lr_scheduler: dict[str, Any] | None = None
    lr_scheduler_type: str | None = None
    optimizer: str = "Adam"  # the name of the spec whose states it holds
    partial_step: str | None = None  # updates in the states beyond `global_steps`, in words
    steps: dict[str, int] = field(default_factory=dict)  # updates so far of each trainable parameter
    extra_states: dict[str, Any] = field(default_factory=dict)  # [Note: extra state]
    excluded: list[str] = field(default_factory=list)  # frozen parameters that it was saved without
    part: PartOfModel | None = None  # None: the whole model
    saved_unix_ns: int = 0
    global_samples: int | None = None  # None: of a save before this was kept
    batch: list[int] | None = None  # micro batch and accumulation steps that the script has set


def client_dict(client_state: object) -> dict[str, Any]:
    """Return the state that a caller gave; None is an empty one. Raises ConfigError unless it is a mapping."""
    if client_state is not None and not isinstance(client_state, Mapping):
        raise ConfigError("client_state", type(client_state).__name__, "a dict")
    return dict(client_state or {})


_PLAIN = ("client_state", "lr_scheduler", "param_groups", "extra_states")


def encode_meta(meta: Meta) -> bytes:
    """Return the file's bytes. ConfigError names values that JSON cannot keep."""
    values = {"format": FORMAT, "version": VERSION, **_as_dict(meta)}
    for key in _PLAIN:
        # A rate may be a tensor that the script changes in place. A caller's own value is kept exactly, or refused.
        values[key] = encode_plain(values[key], key, scalars=key != "client_state")
    try:
        encoded = json.dumps(values, indent=1).encode()
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError("client_state", "…", f"JSON cannot keep it: {error}") from error
    if len(encoded) > MAX_META_BYTES:
        allowed = f"at most {MAX_META_BYTES:,} bytes of JSON, beside the checkpoint's own"
        raise ConfigError("client_state", f"{len(encoded):,} bytes", allowed)
    return encoded


def _as_dict(meta: Meta) -> dict[str, Any]:
    """Return the fields by name; the loss scale and the part as dicts."""
    values = {name: getattr(meta, name) for name in meta.__dataclass_fields__}
    for name, value in (("loss_scale", meta.loss_scale), ("part", meta.part)):
        values[name] = None if value is None else asdict(value)
    return values


def read_meta(checkpoint: Path) -> Meta:
    """Read meta.json, with every field of the right type; CheckpointError otherwise."""
    path = checkpoint / META
    values = read_mark(checkpoint)
    for key in filter(values.__contains__, _PLAIN):
        values[key] = _decode(values, key, path)

    def get(key: str, parse: Callable[[Any], T]) -> T:
        if key not in values:
            raise CheckpointError(f"{path}: {key} is missing")
        try:
            return parse(values[key])
        except _WrongTypeError as error:
            raise CheckpointError(f"{path}: {key} = {_short(values[key])}: {error}") from None

    return Meta(
        global_steps=get("global_steps", _count),
        micro_steps=get("micro_steps", _count),
        skipped_steps=get("skipped_steps", _count),
        param_groups=get("param_groups", _list_of_dicts),
        client_state=get("client_state", _dict),
        loss_scale=get("loss_scale", _optional(_loss_scale)),
        lr_scheduler=get("lr_scheduler", _optional(_dict)),
        lr_scheduler_type=get("lr_scheduler_type", _optional(_text)),
        optimizer=get("optimizer", _text),
        partial_step=get("partial_step", _optional(_text)),
        steps=get("steps", _counts),
        extra_states=get("extra_states", _dict),
        excluded=get("excluded", _texts) if "excluded" in values else [],
        part=get("part", _optional(_part)),
        saved_unix_ns=get("saved_unix_ns", _whole),
        global_samples=get("global_samples", _optional(_count)) if "global_samples" in values else None,
        batch=get("batch", _optional(_batch)) if "batch" in values else None,
    )


def read_mark(checkpoint: Path) -> dict[str, Any]:
    """Return the fields of meta.json as they are; CheckpointError when it is not of a checkpoint of this package."""
    path = checkpoint / META
    values = parse_json(read_bytes(path, max_bytes=MAX_META_BYTES), path)
    name, version = values.get("format"), values.get("version")
    if name != FORMAT or type(version) is not int or version < VERSION:
        raise CheckpointError(f"{path}: format {_short(name)} instead of {FORMAT!r}")
    if version > VERSION:
        raise CheckpointError(f"{path}: version {_short(version)}; this package reads up to {VERSION}")
    return values


def _decode(values: Mapping[str, Any], key: str, path: Path) -> Any:
    try:
        return decode_plain(values.get(key))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {key} is not what was saved: {error}") from error


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class _WrongTypeError(Exception):
    """A field has the wrong type."""


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise _WrongTypeError("not a whole number of 64 bits")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise _WrongTypeError("not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongTypeError("not a text")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongTypeError("not an object")
    return value


def _list_of_dicts(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _WrongTypeError("not a list")
    return [_dict(item) for item in value]


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise _WrongTypeError("not a list")
    return [_text(item) for item in value]


def _counts(value: Any) -> dict[str, int]:
    return {key: _count(item) for key, item in _dict(value).items()}


def _batch(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) != 2:
        raise _WrongTypeError("not two counts")
    return [_count(item) for item in value]


def _loss_scale(value: Any) -> LossScaleState:
    values = _dict(value)
    scale = values.get("scale")
    if type(scale) is not float or not math.isfinite(scale) or scale <= 0:
        raise _WrongTypeError("scale is not a positive number")
    return LossScaleState(scale, _whole(values.get("good_steps")), _whole(values.get("hysteresis_left")))


def _part(value: Any) -> PartOfModel:
    values = _dict(value)
    names = PartOfModel.__dataclass_fields__
    return PartOfModel(**{name: _whole(values.get(name)) for name in names})


def _optional(parse: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else parse(value)
