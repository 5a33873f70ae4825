"""The description of a machine, memory and rates, as a file, and that of this machine, which `offloadzero plan` keeps.

[Note: rates of one model]
How fast a model computes depends on its width, its heads and the tokens of a micro batch: a standard block's rate is up
to a third off. So the plan of a model measures that model's micro batch as well, and its rates are kept beside the
machine's, by the dtype of its products, the tokens of a micro batch and the number of its parameters, which the plan,
the search for "auto" and an engine know alike. A model that was not measured has the standard block's.

[Note: kept rates]
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from offloadzero.errors import ConfigError
from offloadzero.memory.device import Device
from offloadzero.memory.nvme import STRIPE_BYTES
from offloadzero.memory.swap_file import MARK_BYTES, stale_bytes
from offloadzero.observe.forecast import FILE_ENGINE, PYTHON
from offloadzero.observe.timeline import COMPUTE, D2H, DEVICE_UPDATE, H2D, NVME_READ, NVME_WRITE
from offloadzero.planning.machine import (
    describe_machine,
    describe_path,
    describe_versions,
    free_disk_bytes,
    nearest_directory,
    usable_cores,
)
from offloadzero.planning.result_file import Reader, load_json
from offloadzero.planning.step.forecast import (
    COMPACT,
    COPY,
    DRIVE,
    DTYPE_NAMES,
    FP32,
    Computation,
    Forecast,
    Rates,
    Step,
    forecast,
    simulated,
)
from offloadzero.planning.step.simulation import SimulatedStep
from offloadzero.update.spec import UpdateForm

FORMAT = "offloadzero.hardware"
FORMAT_VERSION = 1
KEY = "--hardware"
MOST_MODELS = 64  # whose rates are kept; the oldest are forgotten
# The rates of lanes that are not called as the lane is.
_RATE_OF_LANE = {COMPUTE: "flops", PYTHON: "unit_s", FILE_ENGINE: "nvme_cpu_s_per_byte"}
_DTYPES, _LAYOUTS = tuple(DTYPE_NAMES.values()), (FP32, COMPACT)
_TABLES = {  # tables of Rates, and the names in them: dtypes, layouts or kinds of work
    **dict.fromkeys(("flops", "gradient_flops", "core_shares"), _DTYPES),
    **dict.fromkeys(("update", "device_update"), _LAYOUTS),
    "holds": (COPY, DRIVE, *_LAYOUTS),
}


@dataclass(frozen=True)
class Memory:
    """Free bytes by tier, before Python and torch are loaded.

    `device` None: its memory is the host's. `nvme` None: nothing is known of drives.
    """

    host: int
    device: int | None = None
    nvme: int | None = None


@dataclass(frozen=True)
class Hardware:
    """One machine. `memory.nvme` has the bytes of the measured drives; `process_bytes` are a part of `memory.host`."""

    memory: Memory
    rates: Rates
    num_cores: int
    device: str | None = None  # its name; None: the CPU is the device
    adam_form: UpdateForm = UpdateForm.NATIVE  # the form of Adam's updates on the device
    process_bytes: int = 0  # of Python and torch, before there is a model
    identity: Mapping[str, Any] = field(default_factory=dict)  # facts that tell it from other machines
    # By `model_key`: [Note: rates of one model].
    of_models: Mapping[str, Computation] = field(default_factory=dict)

    @property
    def device_is_cpu(self) -> bool:
        return self.memory.device is None

    def rates_of(self, step: Step) -> Rates:
        """Return the rates for a step, with its model's own computation if that was measured."""
        num_tokens = step.trace.num_tokens if step.trace is not None else 0
        found = self.of_models.get(model_key(step.dtype, num_tokens, step.num_params))
        if found is None:
            return self.rates
        shares = {step.dtype: found.core_share} if self.device_is_cpu else {}
        return replace(
            self.rates,
            flops={**self.rates.flops, step.dtype: found.forward},
            gradient_flops={**self.rates.gradient_flops, step.dtype: found.backward},
            core_shares={**self.rates.core_shares, **shares},
        )

    def forecast(self, step: Step) -> Forecast:
        return forecast(step, self.rates_of(step), **self._kind)

    def simulated(self, step: Step) -> SimulatedStep | None:
        """Simulate a step on this machine; None: a rate, the operations or the work by unit are not known."""
        return simulated(step, self.rates_of(step), **self._kind)

    def unknown_rate(self, lane: str) -> str:
        """Return a lane with the key of the rate that it lacks, where a rate is what lacks."""
        on_cpu = {H2D: "copy", D2H: "copy", DEVICE_UPDATE: "update"} if self.device_is_cpu else {}
        name = (_RATE_OF_LANE | on_cpu).get(lane, lane.replace(" ", "_"))
        return lane if getattr(self.rates, name, None) else f"{lane} (rates.{name})"

    def unknown_of_drive(self, lanes: Collection[str]) -> Iterator[str]:
        """Yield what a forecast of a step that moves bytes on `lanes` leaves out without a mixed rate."""
        if {NVME_READ, NVME_WRITE} <= set(lanes) and self.rates.nvme_mixed is None:
            yield (
                "what the drive loses with reads and writes at once: no mixed rate is known (mixed_gb_per_s of a "
                "cluster's drives, nvme_mixed of rates), which `offloadzero bench nvme` measures"
            )

    @property
    def _kind(self) -> dict[str, Any]:
        return {"num_cores": self.num_cores, "device_is_cpu": self.device_is_cpu}

    def to_json(self) -> dict[str, Any]:
        """Return the object that `hardware_from_json` reads."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "adam_form": self.adam_form.value,
            "of_models": {key: found._asdict() for key, found in self.of_models.items()},
        }


def hardware_from_json(key: str, value: Mapping[str, Any]) -> Hardware:
    """Read the machine that a file describes, for a command's argument `key`. Raises ConfigError."""
    reader = Reader(key, value)
    reader.expect(*_names(Hardware), "format", "format_version")
    memory = _memory(key, reader)
    usual = UpdateForm.NATIVE if memory.device is None else UpdateForm.TRITON
    form = reader.value.get("adam_form", usual.value)
    forms = [one.value for one in UpdateForm]
    if form not in forms:
        raise ConfigError(f"{key}.adam_form", form, f"one of {', '.join(forms)}", known_values=forms)
    device = reader.value.get("device")
    if device is not None and not isinstance(device, str):
        raise ConfigError(f"{key}.device", device, "a name, or null where the CPU is the device")
    rates = reader.table("rates")
    rates.expect(*_names(Rates))
    for name, known in _TABLES.items():
        rates.table(name).expect(*known)
    found: dict[str, Any] = {name: rates.numbers(name) for name in _TABLES}
    found |= {one.name: rates.number(one.name) for one in fields(Rates) if one.name not in _TABLES}
    for dtype, share in found["core_shares"].items():
        _expect_share(f"{key}.rates.core_shares.{dtype}", share)
    if found["nvme_beside"] is not None:
        _expect_share(f"{key}.rates.nvme_beside", found["nvme_beside"], "the drive's rate")
    return Hardware(
        memory=memory,
        rates=Rates(**found),
        num_cores=reader.count("num_cores") or 1,
        device=device or (None if memory.device is None else "GPU"),
        adam_form=UpdateForm(form),
        process_bytes=reader.count("process_bytes") or 0,
        identity=reader.table("identity").value,
        of_models=_computations(reader.table("of_models")),
    )


def model_key(dtype: str, num_tokens: int, num_params: int) -> str:
    """Return the key of a model's rates: [Note: rates of one model]. `dtype` is that of its products."""
    return f"{num_params} parameters, {num_tokens} tokens, {dtype}"


def _computations(reader: Reader) -> dict[str, Computation]:
    found = {}
    for key in reader.value:
        table = reader.table(key)
        table.expect(*Computation._fields)
        found[key] = Computation(**{name: table.required(name) for name in Computation._fields})
        _expect_share(f"{reader.name}.{key}.core_share", found[key].core_share)
    return found


def _expect_share(key: str, share: float, whole: str = "the cores' time") -> None:
    """Raise ConfigError for a part that is more than the whole."""
    if share > 1:
        raise ConfigError(key, share, f"a part of {whole}, at most 1")


def _memory(key: str, reader: Reader) -> Memory:
    """Read the memory. A device that is named and has no memory of its own would be planned as the CPU."""
    table = reader.table("memory")
    table.expect(*_names(Memory))
    host, device, nvme = (table.count(name) for name in ("host", "device", "nvme"))
    if host is None:
        raise ConfigError(f"{key}.memory.host", None, "the bytes of the host's memory")
    named = reader.value.get("device")
    if isinstance(named, str) and device is None:
        allowed = f"the bytes of {named}; where the CPU is the device, device = null"
        raise ConfigError(f"{key}.memory.device", None, allowed)
    return Memory(host=host, device=device, nvme=nvme)


def _names(kind: Any) -> list[str]:
    return [one.name for one in fields(kind)]


def share_of(hardware: Hardware, num_local_ranks: int, *, num_threads: int | None = None) -> Hardware:
    """Return the cores and rates that each of some ranks of a machine has of it. Memory stays that of the machine.

    Cores, the host's memory and the drives are shared evenly; each rank has a device and a link of its own, unless the
    CPU is the device. `num_threads`: those of torch in a rank, where the machine was measured with another number.
    """
    if num_local_ranks == 1:
        return hardware
    rates, num_cores = hardware.rates, hardware.num_cores
    flops, of_gradients = dict(rates.flops), dict(rates.gradient_flops)
    core_shares = rates.core_shares
    if hardware.device_is_cpu:
        said = hardware.identity.get("torch_threads")
        measured_with = said if isinstance(said, int) and said > 0 else num_cores
        threads = min(num_threads or measured_with, num_cores / num_local_ranks)
        flops, of_gradients = (
            {dtype: rate * threads / measured_with for dtype, rate in table.items()}
            for table in (flops, of_gradients)
        )
        if threads <= 1:  # one thread waits for no other
            core_shares, rates = {}, replace(rates, holds={})
    of_machine = ("landing", "nvme_read", "nvme_write", "nvme_mixed", "host_memory")
    shared = {name: getattr(rates, name) for name in of_machine}
    divided: dict[str, Any] = {
        name: None if rate is None else rate / num_local_ranks for name, rate in shared.items()
    }
    update = {layout: rate / num_local_ranks for layout, rate in rates.update.items()}
    of_rank = replace(
        rates, flops=flops, gradient_flops=of_gradients, core_shares=core_shares, update=update, **divided
    )
    # The whole model on all cores was measured, and a rank has a part of both.
    return replace(hardware, rates=of_rank, num_cores=max(1, num_cores // num_local_ranks), of_models={})


# --- kept for the next time: [Note: kept rates] ---


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


def keep(found: Hardware, key: str = "", computed: Computation | None = None) -> None:
    """Keep a machine for the next time, or the rates of one more model beside those of others.

    Raises OSError, or RuntimeError where there is no home.
    """
    path = cache_file(found.identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    directory, written = os.open(path.parent, os.O_RDONLY), path.with_suffix(f".{os.getpid()}")
    try:
        with suppress(OSError):  # a file system that does not lock directories
            fcntl.flock(directory, fcntl.LOCK_EX)
        if computed is not None:
            with suppress(ConfigError):  # damaged: it is written anew
                found = kept_hardware(found.identity) or found
            found = with_rates_of(found, key, computed)
        written.write_text(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
        os.close(directory)


def with_rates_of(found: Hardware, key: str, computed: Computation) -> Hardware:
    """Return a machine with the rates of one more model, the latest at the end."""
    others = [(other, rates) for other, rates in found.of_models.items() if other != key]
    return replace(found, of_models=dict([*others, (key, computed)][-MOST_MODELS:]))


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
        except ConfigError:  # of another version, or cut short: it says nothing of this machine
            continue
        if {**found.identity, "torch_threads": None} == wanted:
            fitting.append(found)
    return max(fitting, key=lambda one: one.identity.get("torch_threads") or 0, default=None)


def drive_bytes(paths: Sequence[Path], *, free: Callable[[Path], int] = free_disk_bytes) -> int | None:
    """Return the bytes that the swap files in these directories can hold together; None without any.

    The files are of equal size, and directories on one filesystem share its space. What killed runs left there is
    removed by the next start, so it counts as free.
    """
    if not paths:
        return None
    drives: dict[int, list[Path]] = {}
    for path in paths:
        drives.setdefault(drive_of(path), []).append(path)
    per_file = min(
        # A directory may have two names here.
        (free(members[0]) + sum(map(stale_bytes, {path.resolve() for path in members}))) // len(members)
        for members in drives.values()
    )
    per_file -= MARK_BYTES
    if len(paths) > 1:
        per_file = per_file // STRIPE_BYTES * STRIPE_BYTES
    return max(0, per_file) * len(paths)


def drive_of(path: Path) -> int:
    """Return the filesystem of a directory, or the one that it would be made on, by `st_dev`."""
    return os.stat(nearest_directory(path)).st_dev
