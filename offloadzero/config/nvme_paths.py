"""The directories of the nvme tier: joined in order, each checked before anything is built on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offloadzero.config.readers import read_path
from offloadzero.errors import ConfigError, abbreviated

log = logging.getLogger("offloadzero.nvme")


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
