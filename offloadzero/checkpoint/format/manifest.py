"""manifest.json: the files of a checkpoint, their sizes, and their digests.

The manifest holds a digest of itself, and must equal the bytes that `encode_manifest` writes: no changed bit is missed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offloadzero.checkpoint.format.hashing import PIECE_BYTES, FileEntry, read_bytes
from offloadzero.checkpoint.format.json_file import parse_json
from offloadzero.checkpoint.format.names import MANIFEST, is_data_file
from offloadzero.errors import CheckpointError

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
_FORMAT = "offloadzero-manifest-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def encode_manifest(files: Mapping[str, FileEntry]) -> bytes:
    """Return the file's bytes."""
    listed = {name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in files.items()}
    return _encode({"format": _FORMAT, "piece_bytes": PIECE_BYTES, "files": listed})


def _encode(body: Mapping[str, Any]) -> bytes:
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": own}, indent=1, sort_keys=True).encode()


def read_manifest(checkpoint: Path) -> dict[str, FileEntry]:
    """Return size and digest by file name. CheckpointError when the file is missing or has been changed."""
    path = checkpoint / MANIFEST
    raw = read_bytes(path, max_bytes=MAX_MANIFEST_BYTES)
    values = parse_json(raw, path)
    body = {key: value for key, value in values.items() if key != "sha256"}
    if not _is_own(body, raw):
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")
    if body.get("format") != _FORMAT or body.get("piece_bytes") != PIECE_BYTES:
        raise CheckpointError(f"{path}: its format is not {_FORMAT!r}")
    files = body.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: files is not an object")
    return {name: _entry(path, name, values) for name, values in files.items()}


def _is_own(body: Mapping[str, Any], raw: bytes) -> bool:
    try:
        return _encode(body) == raw
    except (ValueError, RecursionError):  # numbers that JSON reads but does not write
        return False


def _entry(path: Path, name: str, values: Any) -> FileEntry:
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: {name} is not an object")
    num_bytes, sha256 = values.get("bytes"), values.get("sha256")
    if type(num_bytes) is not int or num_bytes < 0:
        raise CheckpointError(f"{path}: the size of {name} is not a count")
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        raise CheckpointError(f"{path}: the digest of {name} is not one")
    if not is_data_file(name):
        raise CheckpointError(f"{path}: {name!r} is no file of a checkpoint")
    return FileEntry(num_bytes, sha256)
