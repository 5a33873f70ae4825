"""The directories of the nvme tier: joined in order, each checked before anything is built on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offloadzero.config.parse import read_str_list
from offloadzero.errors import ConfigError


@dataclass(frozen=True)
class NvmePath:
    """One directory and the dotted key that asked for it."""

    key: str
    path: Path


def read_nvme_paths(key: str, value: object) -> tuple[NvmePath, ...]:
    """One path or a list of them, `~` expanded; an empty list is a ConfigError."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif isinstance(value, (list, tuple)):
        value = [os.fspath(entry) if isinstance(entry, os.PathLike) else entry for entry in value]
    texts = read_str_list(key, value)
    if not texts:
        raise ConfigError(key, value, "at least one directory")
    return tuple(NvmePath(key, Path(text).expanduser()) for text in texts)


def unite_nvme_paths(paths: Iterable[NvmePath]) -> tuple[Path, ...]:
    """Distinct usable directories in order of first mention; ConfigError for one that cannot be used."""
    united: dict[str, Path] = {}
    for entry in paths:
        _check_directory(entry)
        united.setdefault(os.path.realpath(entry.path), entry.path)
    return tuple(united.values())


def _check_directory(entry: NvmePath) -> None:
    text = str(entry.path)
    if not os.path.lexists(text):
        raise ConfigError(entry.key, text, "there is no such directory: create it, or mount the drive there")
    if not os.path.isdir(text):
        raise ConfigError(entry.key, text, "is not a directory")
    # access() answers for this process, root included; a read-only mount shows in the flags everywhere.
    if os.statvfs(text).f_flag & os.ST_RDONLY:
        raise ConfigError(entry.key, text, "is not writable: the filesystem is mounted read-only")
    if not os.access(text, os.W_OK | os.X_OK):
        raise ConfigError(entry.key, text, "is not writable: this process lacks the permission")
