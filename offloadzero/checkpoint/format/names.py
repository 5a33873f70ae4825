"""The names of a checkpoint's files and directories, the allowed tags, and the names of unfinished ones.

[Note: names that are marks]
While a checkpoint is written, it is `.TAG.TOKEN.partial`; while one is replaced, the old one is `.TAG.TOKEN.replaced`.
A kill leaves such names behind, and the next save removes them. They must not be mistaken for another program's: half
of TOKEN is random and the other half a digest of that half and the tag, so that the name by itself is our mark. It is
there from the first instant on, before anything could be written inside.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from offloadzero.errors import ConfigError

# The files of a checkpoint.
META = "meta.json"  # our mark: a directory without it is not ours
MANIFEST = "manifest.json"
BUFFERS = "buffers.safetensors"
EXTRA_STATE = "extra_state.safetensors"  # only where there are tensors for it
COMMIT = "commit.json"  # these two of a commit of a durable run alone
MEMORY = "memory.safetensors"
IS_LATEST = "is_latest"  # empty: the file `latest` may name this checkpoint
LOCK = ".lock"  # held by the process that writes the checkpoint

LATEST = "latest"
PARTIAL = "partial"
REPLACED = "replaced"
MAX_TAG_BYTES = 200  # together with the rest of an unfinished one's name, a file name: 255 bytes

_UNFINISHED = re.compile(rf"\.(.+)\.([0-9a-f]{{16}})([0-9a-f]{{16}})\.({PARTIAL}|{REPLACED})", re.DOTALL)

_UNIT = re.compile(r"unit-\d{4,}\.safetensors", re.ASCII)
_PART = re.compile(r"mp_rank_\d{2,}", re.ASCII)


def unit_file(index: int) -> str:
    """Return the name of the file of the record with this index."""
    return f"unit-{index:04}.safetensors"


def is_unit_file(name: str) -> bool:
    """Whether `unit_file` may have made the name."""
    return _UNIT.fullmatch(name) is not None


def part_directory(index: int) -> str:
    """Return the name of the directory that has the checkpoints of one part of a model."""
    return f"mp_rank_{index:02}"


def is_part_directory(name: str) -> bool:
    """Whether `part_directory` may have made the name."""
    return _PART.fullmatch(name) is not None


def is_data_file(name: str) -> bool:
    """Whether a manifest may list the name."""
    return name in (META, BUFFERS, EXTRA_STATE, COMMIT, MEMORY) or is_unit_file(name)


def is_own_file(name: str) -> bool:
    """Whether a file of this name in a checkpoint is ours."""
    return is_data_file(name) or name in (MANIFEST, IS_LATEST, LOCK)


@dataclass(frozen=True)
class Unfinished:
    """The parts of a name `.STEM.TOKEN.KIND`."""

    stem: str
    token: str
    kind: str

    @property
    def name(self) -> str:
        """The file name."""
        return f".{self.stem}.{self.token}.{self.kind}"


def new_unfinished(stem: str) -> Unfinished:
    """Return a name that no other process has."""
    random = secrets.token_hex(8)
    return Unfinished(stem, random + _digest(stem, random), PARTIAL)


def parse_unfinished(name: str) -> Unfinished | None:
    """Parse a name; None for one that is not ours: [Note: names that are marks]."""
    match = _UNFINISHED.fullmatch(name)
    if match is None:
        return None
    stem, random, digest, kind = match.groups()
    return Unfinished(stem, random + digest, kind) if _digest(stem, random) == digest else None


def _digest(stem: str, random: str) -> str:
    text = f"offloadzero {random} {stem}".encode(errors="surrogateescape")
    return hashlib.sha256(text).hexdigest()[:16]


def directory_of(key: str, path: object) -> Path:
    """Return the directory that a caller named, absolute; ConfigError with `key` when it cannot be one."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ConfigError(key, path, "the path of a directory")
    if "\0" in os.fspath(path):
        raise ConfigError(key, path, "a path without NUL")
    try:
        return Path(path).absolute()
    except OSError as error:  # the working directory is gone
        raise ConfigError(key, path, f"the working directory cannot be named: {error.strerror}") from error


def tag_text(tag: object) -> str:
    """Return the tag that a caller gave: a text, or a number as DeepSpeed takes it; ConfigError for another."""
    if not isinstance(tag, str | int):
        raise ConfigError("tag", tag, "a text")
    return str(tag)


def tag_problem(tag: str) -> str | None:
    """Return why a tag cannot be used; None if it can."""
    problem = name_problem(tag)
    if problem is not None:
        return problem
    if tag != tag.strip():
        return "no spaces at its ends: they would be lost in the file 'latest'"
    if tag.startswith("."):
        return "must not begin with '.', as unfinished checkpoints do"
    if tag.lower() == LATEST:
        return "is the name of the file that names the newest checkpoint"
    if tag.endswith((f".{PARTIAL}", f".{REPLACED}")):
        return f"must not end in '.{PARTIAL}' or '.{REPLACED}', as unfinished checkpoints do"
    if any(ord(character) < 32 or ord(character) == 127 for character in tag):
        return "no control characters"
    if len(tag.encode()) > MAX_TAG_BYTES:
        return f"at most {MAX_TAG_BYTES} bytes"
    return None


def name_problem(tag: str) -> str | None:
    """Return why there can be no directory of this name in the given one; None if there can."""
    if not tag:
        return "must not be empty"
    if "/" in tag or tag in (".", ".."):
        return "must be a plain name, without '/', and not '..'"
    if "\0" in tag:
        return "no NUL"
    try:
        tag.encode()
    except UnicodeEncodeError:
        return "must be text that UTF-8 can encode"
    return None
