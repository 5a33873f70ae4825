"""The rates of this machine, as `offloadzero plan` has measured and kept them.

Rates are kept by facts that tell one machine from another: its processor, its device, the drives of a configuration,
and the versions of the software. What was measured elsewhere, or before one of them changed, is not found.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offloadzero.memory.device import Device
from offloadzero.planning.hardware import FORMAT, FORMAT_VERSION, Hardware, hardware_from_json
from offloadzero.planning.machine import describe_machine, describe_path, describe_versions
from offloadzero.planning.probe import nearest_directory, usable_cores
from offloadzero.planning.result_file import load_json

KEY = "--hardware"


def read_hardware(path: str) -> Hardware:
    """Read a file that `--hardware-out` has written, or one by hand. Raises ConfigError."""
    value = load_json(KEY, path, format_name=FORMAT, format_version=FORMAT_VERSION)
    return hardware_from_json(KEY, value)


def describe(device: Device, paths: Sequence[Path]) -> dict[str, Any]:
    """Return the facts that tell this machine, its drives and its software from others."""
    machine = {key: value for key, value in describe_machine().items() if key != "load_average"}
    drives = []
    for path in paths:
        found = describe_path(str(nearest_directory(path)))
        drives.append(
            {"filesystem": found["filesystem"], "source": found["source"], "device": found["device"]}
        )
    return {
        "machine": machine,
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "device": device.name(),
        "drives": drives,
        "versions": describe_versions("offloadzero", "torch"),
    }


def cache_file(identity: Mapping[str, Any]) -> Path:
    """Return the file for the rates of such a machine: below XDG_CACHE_HOME, or ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return base / "offloadzero" / f"hardware-{digest}.json"


def kept_hardware(identity: Mapping[str, Any]) -> Hardware | None:
    """Return this machine as it was measured; None where it was not. Raises ConfigError for a file that is damaged."""
    path = cache_file(identity)
    if not path.is_file():
        return None
    found = read_hardware(str(path))
    return found if found.identity == identity else None
