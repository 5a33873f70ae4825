"""`load_config`: a DeepSpeed JSON, with or without an `offloadzero` block, into one frozen OffloadConfig."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offloadzero.config.deepspeed import Reading, read_deepspeed
from offloadzero.config.nvme_paths import unite_nvme_paths
from offloadzero.config.own_block import read_own_block
from offloadzero.config.reading.json_text import Pairs, parse_json
from offloadzero.config.reading.parse import MAX_COUNT, read_int, read_path
from offloadzero.config.reading.plain import plain_values
from offloadzero.config.schema import OffloadConfig
from offloadzero.config.settle import PARTITION_KEY
from offloadzero.core.segments import TierName
from offloadzero.errors import ConfigError

MAX_FILE_BYTES = 2**20


def load_config(
    source: Mapping[str, Any] | str | Path | OffloadConfig, *, world_size: int = 1, elsewhere: bool = False
) -> OffloadConfig:
    """Read and validate a configuration.

    Args:
        source: a DeepSpeed-shaped dict, the path of a JSON file that holds one, or an OffloadConfig, which is
            returned as it is. A dict is not changed.
        world_size: ranks the batch is spread over.
        elsewhere: it is for another machine, so its directories are not looked for on this one.

    Raises:
        ConfigError: naming the full dotted key, the value, what is allowed and the nearest known key.
    """
    if isinstance(source, OffloadConfig):
        return source
    read_int("world_size", world_size, minimum=1, maximum=MAX_COUNT)
    reading = Reading()
    top = reading.block("", plain_values(_read_source(source)))
    config = read_deepspeed(top, world_size=world_size, reading=reading)
    config = read_own_block(top, config, reading=reading)
    config = replace(
        config,
        nvme_paths=unite_nvme_paths(reading.nvme_paths, elsewhere=elsewhere),
        notices=tuple(reading.notices),
        warnings=tuple(reading.warnings),
    )
    _check_nvme_paths(config, reading)
    if config.partition_activations and config.activation_checkpoints is None:
        allowed = 'needs "offloadzero": {"activation_checkpoints": {}}: of these the inputs are divided'
        raise ConfigError(PARTITION_KEY, True, allowed)
    return config


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file, read as `load_config` reads it, comments and all. Raises ConfigError."""
    return plain_values(_read_json_file(path))


def _check_nvme_paths(config: OffloadConfig, reading: Reading) -> None:
    users = []
    if any(TierName.NVME in rule.tiers.values() for rule in config.placement.rules):
        users.append("the placement")
    if config.activation_checkpoints is not None and config.activation_checkpoints.tier.is_file:
        users.append("offloadzero.activation_checkpoints")
    if users and not config.nvme_paths:
        key = (*reading.nvme_path_wanted, "offloadzero.nvme_path")[0]
        raise ConfigError(
            key, None, f"{users[0]} uses nvme: name a directory, or a list of them to stripe over"
        )


def _read_source(source: object) -> Mapping[Any, Any] | Pairs:
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
