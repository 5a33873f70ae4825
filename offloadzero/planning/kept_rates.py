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

from offloadzero.errors import ConfigError
from offloadzero.memory.device import Device
from offloadzero.planning.hardware import FORMAT, FORMAT_VERSION, Hardware, hardware_from_json, share_of
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
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return _directory() / f"hardware-{digest}.json"


def _directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offloadzero"


def kept_hardware(identity: Mapping[str, Any]) -> Hardware | None:
    """Return this machine as it was measured; None where it was not. Raises ConfigError for a file that is damaged."""
    path = cache_file(identity)
    if not path.is_file():
        return None
    found = read_hardware(str(path))
    return found if found.identity == identity else None


def kept_share(identity: Mapping[str, Any], num_local_ranks: int) -> Hardware | None:
    """Return what each of some ranks of this machine has of it; None where it was not measured. Raises ConfigError.

    Launchers give each rank fewer threads of torch than the process had that measured: its rates are taken all the
    same, for so many threads.
    """
    found = kept_hardware(identity) or _with_other_threads(identity)
    if found is None:
        return None
    return share_of(found, num_local_ranks, num_threads=identity["torch_threads"])


def _with_other_threads(identity: Mapping[str, Any]) -> Hardware | None:
    """Return this machine as it was measured with the most threads of torch."""
    wanted, fitting = {**identity, "torch_threads": None}, list[Hardware]()
    for path in sorted(_directory().glob("hardware-*.json")):
        try:
            found = read_hardware(str(path))
        except (
            ConfigError
        ):  # of another version of this package, or cut short: it says nothing of this machine
            continue
        if {**found.identity, "torch_threads": None} == wanted:
            fitting.append(found)
    return max(fitting, key=lambda one: one.identity.get("torch_threads") or 0, default=None)
