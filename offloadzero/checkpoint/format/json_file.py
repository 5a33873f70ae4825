"""JSON files of a checkpoint: read strictly, and with an encoding for values that JSON by itself would change.

[Note: what JSON changes]
A tuple comes back as a list and the key 30 as "30": a MultiStepLR whose milestones are texts never decays again. In
meta.json a tuple is {"__tuple__": [...]}, a dict with keys that are no texts {"__dict__": [[key, value], ...]}, a
Counter likewise; the loaded value equals the saved one. Other values are refused when saving.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offloadzero.errors import CheckpointError, ConfigError

MAX_DEPTH = 100
_TUPLE, _DICT, _COUNTER = "__tuple__", "__dict__", "__counter__"
_KINDS = (_TUPLE, _DICT, _COUNTER)


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """Return the object that `raw` holds; CheckpointError for everything else, whatever the bytes."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise CheckpointError(f"{path}: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError("a key is there twice")
    return items


def plain_scalar(value: Any) -> Any:
    """Return the number in a tensor of one element or a scalar of numpy; everything else as it is."""
    is_scalar = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return value.item() if is_scalar else value


def encode_plain(value: Any, where: str, *, depth: int = 0, scalars: bool = False) -> Any:
    """Return `value` in a form that JSON keeps: [Note: what JSON changes]. `where` names it in the ConfigError.

    `scalars`: numbers may be tensors of one element or numpy's; they come back as plain ones.
    """
    value = plain_scalar(value) if scalars else value
    if depth > MAX_DEPTH:
        raise ConfigError(where.split("[")[0], type(value).__name__, f"nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        items = [
            encode_plain(item, f"{where}[{i}]", depth=depth + 1, scalars=scalars)
            for i, item in enumerate(value)
        ]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, depth=depth, scalars=scalars)
    kind = type(value).__name__
    raise ConfigError(where, kind, "a checkpoint keeps numbers, texts, None, lists, tuples and dicts of them")


def _encode_mapping(value: Mapping[Any, Any], where: str, *, depth: int, scalars: bool) -> Any:
    pairs = [
        (key, encode_plain(item, f"{where}[{key!r}]", depth=depth + 1, scalars=scalars))
        for key, item in value.items()
    ]
    plain = all(type(key) is str for key, _ in pairs) and not any(kind in value for kind in _KINDS)
    if plain and not isinstance(value, Counter):
        return dict(pairs)
    listed = [[encode_plain(key, f"{where} key {key!r}", depth=depth + 1), item] for key, item in pairs]
    return {_COUNTER if isinstance(value, Counter) else _DICT: listed}


def decode_plain(value: Any) -> Any:
    """Return the argument of `encode_plain`; ValueError or TypeError for a text that it never writes."""
    if isinstance(value, list):
        return [decode_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kinds = [kind for kind in _KINDS if kind in value]
    if not kinds:
        return {key: decode_plain(item) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{kinds[0]} with other keys beside it")
    items = value[kinds[0]]
    if not isinstance(items, list):
        raise ValueError(f"{kinds[0]} without a list")
    if kinds[0] == _TUPLE:
        return tuple(decode_plain(item) for item in items)
    pairs = {decode_plain(key): decode_plain(item) for key, item in items}
    return Counter(pairs) if kinds[0] == _COUNTER else pairs
