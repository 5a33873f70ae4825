"""The rates of this machine, as `offloadzero plan` has measured and kept them.

Rates are kept by facts that tell one machine from another: its processor, its device, the drives of a configuration,
and the versions of the software. What was measured elsewhere, or before one of them changed, is not found.

The file is replaced as a whole: an engine that starts while a plan keeps something reads the old one or the new one.
Plans that add a model at the same time do so one after the other, each to what is there by then.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offloadzero.errors import ConfigError
from offloadzero.memory.device import Device
from offloadzero.planning.hardware import FORMAT, FORMAT_VERSION, Hardware, hardware_from_json, share_of
from offloadzero.planning.machine import describe_machine, describe_path, describe_versions
from offloadzero.planning.probe import nearest_directory, usable_cores
from offloadzero.planning.result_file import load_json
from offloadzero.planning.step.rates import Computation

KEY = "--hardware"
MOST_MODELS = 64  # whose rates are kept; the oldest are forgotten


def read_hardware(path: str, *, other: str = "") -> Hardware:
    """Read a file that `--hardware-out` has written, or one by hand. Raises ConfigError, which names `other`."""
    value = load_json(KEY, path, format_name=FORMAT, format_version=FORMAT_VERSION, other=other)
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


def keep(found: Hardware) -> None:
    """Keep a machine for the next time. Raises OSError, or RuntimeError where there is no home."""
    with _file_alone(found) as path:
        _replace(path, found)


def keep_model(found: Hardware, key: str, computed: Computation) -> None:
    """Keep the rates of a model of a machine beside those of others. Raises what `keep` does."""
    with _file_alone(found) as path:
        with suppress(ConfigError):  # damaged: it is written anew
            found = kept_hardware(found.identity) or found
        _replace(path, with_rates_of(found, key, computed))


def with_rates_of(found: Hardware, key: str, computed: Computation) -> Hardware:
    """Return a machine with the rates of one more model, the latest at the end."""
    others = [(other, rates) for other, rates in found.of_models.items() if other != key]
    return replace(found, of_models=dict([*others, (key, computed)][-MOST_MODELS:]))


@contextmanager
def _file_alone(found: Hardware) -> Iterator[Path]:
    path = cache_file(found.identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system that does not lock directories
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(directory)


def _replace(path: Path, found: Hardware) -> None:
    written = path.with_suffix(f".{os.getpid()}")
    try:
        written.write_text(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


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
