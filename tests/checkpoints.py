"""Checkpoints for tests: small ones, and edits that their manifest agrees to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offloadzero.checkpoint.hashing import FileEntry, HashedFile, hashing_pool
from offloadzero.checkpoint.manifest import encode_manifest
from offloadzero.checkpoint.names import MANIFEST, META, is_data_file


def reseal(checkpoint: Path) -> None:
    """Write a manifest of the files as they are now: what is wrong inside of them has to be seen by itself."""
    files: dict[str, FileEntry] = {}
    with hashing_pool() as pool:
        for path in sorted(checkpoint.iterdir()):
            if is_data_file(path.name):
                data = path.read_bytes()
                path.unlink()
                file = HashedFile(path, pool)
                file.write(data)
                files[path.name] = file.close()
    (checkpoint / MANIFEST).write_bytes(encode_manifest(files))


def edit_meta(checkpoint: Path, **changes: Any) -> None:
    """Set fields of meta.json (None of them: `...` removes one), and reseal."""
    values = json.loads((checkpoint / META).read_text())
    values.update(changes)
    values = {key: value for key, value in values.items() if value is not ...}
    (checkpoint / META).write_text(json.dumps(values))
    reseal(checkpoint)


def to_version_1(checkpoint: Path) -> None:
    """As the version before wrote it."""
    values = json.loads((checkpoint / META).read_text())
    for key in ("version", "saved_unix_ns", "lr_scheduler_type"):
        del values[key]
    for group in values["param_groups"]:
        group["betas"] = group["betas"]["__tuple__"]
    values["format"] = "offloadzero-1"
    values["loss_scale"] = {"scale": 1.0, "good_steps": 0, "hysteresis_left": 2}
    (checkpoint / META).write_text(json.dumps(values, indent=1))
    (checkpoint / MANIFEST).unlink()
    (checkpoint / "is_latest").unlink(missing_ok=True)
