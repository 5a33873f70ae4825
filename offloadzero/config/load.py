"""`load_config`: a DeepSpeed JSON, with or without an `offloadzero` block, into one frozen OffloadConfig.

Below it are the directories of the nvme tier, joined in order, each checked before anything is built on it; and what
`initialize()` and `offload()` give to settings that a configuration leaves open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offloadzero.config.deepspeed import Reading, read_deepspeed
from offloadzero.config.own_block import PARTITION_KEY, read_own_block
from offloadzero.config.readers import AUTO, MAX_COUNT, UNRESOLVED, NvmePath, read_int
from offloadzero.config.schema import (
    ACCUMULATION_STEPS,
    DEFAULT_GRADIENT_CLIPPING,
    MICRO_BATCH,
    TRAIN_BATCH,
    OffloadConfig,
)
from offloadzero.config.source import plain_values, read_source
from offloadzero.core.segments import TierName
from offloadzero.errors import ConfigError, abbreviated

log = logging.getLogger("offloadzero.nvme")


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
    top = reading.top(plain_values(read_source(source)))
    config = read_deepspeed(top, world_size=world_size, reading=reading)
    config = read_own_block(top, config, reading=reading)
    config = replace(
        config,
        nvme_paths=unite_nvme_paths(reading.nvme_paths, elsewhere=elsewhere),
        notices=tuple(reading.notices),
        warnings=tuple(reading.warnings),
    )
    _check_nvme_paths(config, reading)
    return config


def _check_nvme_paths(config: OffloadConfig, reading: Reading) -> None:
    users = []
    if any(TierName.NVME in rule.tiers.values() for rule in config.placement.rules):
        users.append("the placement")
    if config.activation_checkpoints is not None and config.activation_checkpoints.tier.is_file:
        users.append("offloadzero.activation_checkpoints")
    if config.durable:
        users.append("offloadzero.durable")
    if users and not config.nvme_paths:
        key = (*reading.nvme_path_wanted, "offloadzero.nvme_path")[0]
        raise ConfigError(
            key, None, f"{users[0]} uses nvme: name a directory, or a list of them to stripe over"
        )


# --- directories ---


def unite_nvme_paths(paths: Iterable[NvmePath], *, elsewhere: bool = False) -> tuple[Path, ...]:
    """Return the distinct usable directories, absolute, in order of first mention; ConfigError for an unusable one.

    A directory that does not exist yet is usable where the directory above it exists: `create_nvme_directories`. Those
    of a machine that is `elsewhere` are taken as they are named.
    """
    united: dict[str, Path] = {}
    for entry in paths:
        try:
            if not elsewhere:
                _check_directory(entry)
            path = entry.path.absolute()  # used later, perhaps in another directory
        except OSError as error:
            raise ConfigError(entry.key, str(entry.path), f"cannot be used: {error.strerror}") from error
        united.setdefault(os.path.realpath(entry.path), path)
    return tuple(united.values())


def create_nvme_directories(paths: Iterable[Path]) -> None:
    """Create the directories that do not exist yet, and say so in the log. The directory above must exist.

    Raises ConfigError where one cannot be created.
    """
    for path in paths:
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError("nvme_path", str(path), f"cannot be created: {error.strerror}") from error
        log.info("nvme_path %s: there was no such directory, it is created", path)


def _check_directory(entry: NvmePath) -> None:
    if os.path.lexists(entry.path):
        _check_usable(entry, entry.path)
        return
    above = entry.path.parent
    if not os.path.isdir(above):
        raise ConfigError(
            entry.key,
            str(entry.path),
            f"there is no such directory, nor {abbreviated(str(above))} to create it in: create it, or mount the drive",
        )
    _check_usable(entry, above)


def _check_usable(entry: NvmePath, directory: Path) -> None:
    text = str(directory)
    if not os.path.isdir(text):
        raise ConfigError(entry.key, text, "is not a directory")
    # access() answers for this process, root included; a read-only mount shows in the flags everywhere.
    if os.statvfs(text).f_flag & os.ST_RDONLY:
        raise ConfigError(entry.key, text, "is not writable: the filesystem is mounted read-only")
    if not os.access(text, os.W_OK | os.X_OK):
        raise ConfigError(entry.key, text, "is not writable: this process lacks the permission")


# --- settings that are left open ---


def settle_partition(config: OffloadConfig) -> OffloadConfig:
    """Leave inputs of checkpointed units whole, and warn of it, where no ranks have the same ones.

    Raises ConfigError where `mpu` does not say how many have.
    """
    mesh = config.mesh
    if not config.partition_activations or (mesh is not None and (mesh.tensor_size or 0) > 1):
        return config
    if mesh is not None and mesh.tensor_size is None:
        raise ConfigError(
            PARTITION_KEY, True, "needs get_tensor_model_parallel_world_size() of initialize(mpu=...)"
        )
    warning = (
        f"{PARTITION_KEY} = true has no effect: it divides what offloadzero.activation_checkpoints keeps among the "
        f"ranks along the axis tp of initialize(mpu=...), and here is {'one' if mesh is not None else 'none'}"
    )
    return replace(config, partition_activations=False, warnings=(*config.warnings, warning))


def settle_for_initialize(
    config: OffloadConfig, *, unresolved: Mapping[str, str] | None = None
) -> OffloadConfig:
    """Fill in DeepSpeed's defaults, and warn of those that change the training.

    Args:
        unresolved: keys whose "auto" is not taken, with what to give in their place ("" for nothing else).

    Raises:
        ConfigError: there are such keys, or the number of micro batches per step is "auto" and does not follow from
            the batch sizes. It names all of them.
    """
    wanted = dict(unresolved or {})
    if ACCUMULATION_STEPS in config.batch.unresolved and config.batch.managed:
        sizes = f"{TRAIN_BATCH} and {MICRO_BATCH}"
        wanted = {ACCUMULATION_STEPS: f"; or give {sizes}, from which it follows", **wanted}
    if wanted:
        (key, instead), *others = wanted.items()
        also = f". So it is with {', '.join(other for other, _ in others)}" if others else ""
        raise ConfigError(key, AUTO, f"{UNRESOLVED}{instead}{also}")
    if config.gradient_clipping is not None:
        return config
    warning = (
        f"The configuration has no gradient_clipping: gradients are clipped at a norm of "
        f"{DEFAULT_GRADIENT_CLIPPING}, DeepSpeed's default. Write the key, {DEFAULT_GRADIENT_CLIPPING} or any other "
        "number or 0 for no clipping, and this warning is gone."
    )
    return replace(config, gradient_clipping=DEFAULT_GRADIENT_CLIPPING, warnings=(*config.warnings, warning))


def settle_for_offload(config: OffloadConfig) -> OffloadConfig:
    """Leave gradients alone unless the configuration says otherwise, as in torch; the script does the rest."""
    why = "offload() trains with the optimizer that it is given"
    if config.durable:
        raise ConfigError("offloadzero.durable", True, "offload() has no durable runs: use initialize()")
    clipping = config.gradient_clipping
    warnings = config.warnings
    if (num_steps := config.batch.gradient_accumulation_steps) > 1:
        warning = (
            f"{ACCUMULATION_STEPS} = {num_steps} has no effect: with offload() the loop decides after how many "
            "backward() it calls step(), and what each loss is divided by"
        )
        warnings = (*warnings, warning)
    settled = replace(config, gradient_clipping=0.0 if clipping is None else clipping, warnings=warnings)
    return with_unused_blocks(settled, optimizer=why, scheduler=why)


def with_unused_blocks(
    config: OffloadConfig, *, optimizer: str | None = None, scheduler: str | None = None
) -> OffloadConfig:
    """Note for the log why the blocks of optimizer and schedule are not used, where the configuration has them."""
    blocks = (("optimizer", config.optimizer, optimizer), ("scheduler", config.scheduler, scheduler))
    unused = [f"{key}: not used: {why}" for key, block, why in blocks if block and why is not None]
    return replace(config, notices=(*config.notices, *unused))
