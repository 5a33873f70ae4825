"""`load_config`: a DeepSpeed JSON, with or without our own block, into one frozen OffloadConfig."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offloadzero.config.deepspeed import Reading, read_deepspeed
from offloadzero.config.nvme_paths import unite_nvme_paths
from offloadzero.config.own_block import read_own_block
from offloadzero.config.parse import read_int
from offloadzero.config.schema import OffloadConfig, TierName
from offloadzero.errors import ConfigError


def load_config(
    source: Mapping[str, Any] | str | Path | OffloadConfig, *, world_size: int = 1
) -> OffloadConfig:
    """Read and validate a configuration.

    Args:
        source: a DeepSpeed-shaped dict, the path of a JSON file that holds one, or an OffloadConfig, which is
            returned as it is. A dict is not changed.
        world_size: ranks the batch is spread over.

    Raises:
        ConfigError: naming the full dotted key, the value, what is allowed and the nearest known key.
    """
    if isinstance(source, OffloadConfig):
        return source
    read_int("world_size", world_size, minimum=1)
    reading = Reading()
    top = reading.block("", _read_source(source))
    config = read_deepspeed(top, world_size=world_size, reading=reading)
    config = read_own_block(top, config, reading=reading)
    config = replace(config, nvme_paths=unite_nvme_paths(reading.nvme_paths), notices=tuple(reading.notices))
    _check_nvme_paths(config, reading)
    return config


def _check_nvme_paths(config: OffloadConfig, reading: Reading) -> None:
    users = []
    if any(TierName.NVME in rule.tiers.values() for rule in config.placement.rules):
        users.append("the placement")
    if config.activation_checkpoints is not None and config.activation_checkpoints.tier is TierName.NVME:
        users.append("offloadzero.activation_checkpoints")
    if users and not config.nvme_paths:
        key = (*reading.nvme_path_wanted, "offloadzero.nvme_path")[0]
        raise ConfigError(
            key, None, f"{users[0]} uses nvme: name a directory, or a list of them to stripe over"
        )


def _read_source(source: object) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _read_json_file(Path(source))
    raise ConfigError("config", source, "a dict, the path of a JSON file, or an OffloadConfig")


def _read_json_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError("config", str(path), f"the file cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("config", str(path), f"the file is not UTF-8 text: {error}") from error
    try:
        parsed = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1 : error.lineno]
        where = f"{path}:{error.lineno}:{error.colno}"
        raise ConfigError(where, "".join(line).strip(), f"not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise ConfigError("config", str(path), "nested too deeply") from error
    values = _without_duplicates("", parsed)
    if not isinstance(values, dict):
        raise ConfigError("config", str(path), "the file must hold one JSON object {...}")
    return values


class _Pairs(list[tuple[str, Any]]):
    """The members of a JSON object as written, duplicates included."""


def _without_duplicates(path: str, value: Any) -> Any:
    """Pairs to dicts; the json module keeps the last of two equal keys silently, this does not."""
    if isinstance(value, _Pairs):
        members: dict[str, Any] = {}
        for key, entry in value:
            dotted = f"{path}.{key}" if path else key
            if key in members:
                raise ConfigError(dotted, _plain(entry), f"duplicate key, given before as {members[key]!r}")
            members[key] = _without_duplicates(dotted, entry)
        return members
    if isinstance(value, list):
        return [_without_duplicates(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
    return value


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, _Pairs) else value
