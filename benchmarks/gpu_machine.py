"""The prerequisites of `gpu.py`, and the largest models that memory and drive hold. No torch at import."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_TORCH = (2, 8)
COMPILERS = ("c++", "g++", "clang++")
GIB = 1 << 30
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Missing:
    """A missing prerequisite, and its purpose."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def missing_to_build() -> list[Missing]:
    """Return what is missing of a C++ compiler and Python's headers."""
    missing = []
    if compiler() is None:
        missing.append(
            Missing("a C++17 compiler", f"none of {', '.join(COMPILERS)} is on the PATH (or set CXX)")
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        missing.append(
            Missing("Python.h", f"the headers of this Python (python3-dev), {header} is not there")
        )
    return missing


def missing_to_test() -> list[Missing]:
    """Return pytest if it is missing."""
    return _missing_module("pytest", "runs the tests")


def missing_native_modules() -> list[Missing]:
    """Return the native modules that are missing: they are built here first."""
    package = ROOT / "offloadzero"
    names = ("io._aio", "native._kernels", "native._termination")
    absent = [name for name in names if not any(package.glob(f"{name.replace('.', '/')}.*so"))]
    return [Missing(f"offloadzero.{name}", "run the part build first") for name in absent]


def missing_to_run() -> list[Missing]:
    """Return those of torch and numpy that are missing."""
    missing = _missing_module("numpy", "torch's tensors and files meet in it")
    missing += _missing_module("torch", "is what all of this is for")
    if not any(found.name == "torch" for found in missing):
        version = importlib.import_module("torch").__version__
        if tuple(map(int, version.split(".")[:2])) < MIN_TORCH:
            missing.append(Missing("torch 2.8 or later", f"{sys.executable} has {version}"))
    return missing


def _missing_module(name: str, why: str) -> list[Missing]:
    if importlib.util.find_spec(name) is not None:
        return []
    return [Missing(name, f"{why}; {sys.executable} does not have it")]


def compiler() -> str | None:
    """Return the C++ compiler to build with."""
    wanted = [os.environ.get("CXX", ""), str(sysconfig.get_config_var("CXX") or ""), *COMPILERS]
    return next((name for name in wanted if name.strip() and shutil.which(name.split()[0])), None)


def why_no_cuda() -> str | None:
    """Return why there is no CUDA device; None when there is one."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__} finds none: {str(error).splitlines()[0]}"
    return f"torch {torch.__version__} finds none"


def cuda_name() -> str:
    """Return the name of the CUDA device."""
    return str(importlib.import_module("torch").cuda.get_device_name())


def link() -> dict[str, str]:
    """Return nvidia-smi's description of the link to the device, where it is installed."""
    fields = "pcie.link.gen.max,pcie.link.width.max,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return {}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return {fields: done.stdout.strip()} if done.returncode == 0 else {}


def available_memory() -> int:
    """Return the bytes of host memory that an engine takes to be free; it needs none of the native modules."""
    from offloadzero.planning.probe import available_host_bytes

    return available_host_bytes()


def take_memory(num_bytes: int) -> None:
    """Take host memory once, in a process that ends with it: some virtual machines get theirs as they use it.

    Until then they show little as available, and an engine is refused what the machine does not show.
    """
    from offloadzero.memory.arena import allocate_host
    from offloadzero.memory.pages import populate

    Path("/proc/self/oom_score_adj").write_text(
        "1000"
    )  # where there is too little, no other process is to end
    populate(allocate_host(num_bytes), num_threads=len(os.sched_getaffinity(0)))


def available_disk(directory: Path) -> int:
    """Return the bytes that are free in a directory."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


@dataclass(frozen=True)
class Limits:
    """Bytes that a run may reserve. `device` is None where the device's memory is the host's."""

    host: int
    nvme: int
    device: int | None


# Shares of the free bytes: activations, the process itself, torch's allocator and the page cache need the rest.
HOST_SHARE = 0.85
NVME_SHARE = 0.95
DEVICE_SHARE = 0.7


def limits(directory: Path, *, memory: int | None, disk: int | None, on_cuda: bool) -> Limits:
    """Return the limits from the free bytes, or from the user's options."""
    device = None
    if on_cuda:
        free, _ = importlib.import_module("torch").cuda.mem_get_info()
        device = int(free * DEVICE_SHARE)
    host = available_memory() if memory is None else memory
    nvme = available_disk(directory) if disk is None else disk
    return Limits(int(host * HOST_SHARE), int(nvme * NVME_SHARE), device)


def planned_bytes(settings: dict[str, Any], num_parameters: int) -> dict[str, int]:
    """Return the bytes by tier of a Llama with at most so many parameters, from the library's own plan."""
    import torch
    from llama_model import Llama, size_with

    from offloadzero.config import load_config, settle_for_initialize
    from offloadzero.planning.engine_plan import DTYPES
    from offloadzero.planning.memory_plan import keeps_gradients, plan_memory
    from offloadzero.segments import TierName
    from offloadzero.streaming.units import cut_units
    from offloadzero.update.spec import UpdateForm
    from offloadzero.update.specs import spec_of_type
    from offloadzero.update.specs.adam import ADAM

    config = settle_for_initialize(load_config(settings))
    with torch.device("meta"):
        model = Llama(size_with(num_parameters))
    cut = cut_units(
        model,
        config.units,
        group_of={id(param): 0 for param in model.parameters()},
        param_dtype=DTYPES[config.precision.param_dtype],
        spec=spec_of_type(config.optimizer.type) if config.optimizer is not None else ADAM,
        compact=config.state_layout == "compact",
    )
    for record in cut.records:
        record.grad_dtype = (
            DTYPES[config.precision.grad_accum_dtype] or record.dtype
            if keeps_gradients(config)
            else record.dtype
        )
    # Triton's form of the update takes less than that of torch.
    form = UpdateForm.NATIVE if config.device == "cpu" else UpdateForm.TORCH
    plan = plan_memory(cut.records, config, together=cut.together, form=form)
    return {tier.value: plan.tier_bytes(tier) for tier in TierName}


def fits(planned: dict[str, int], allowed: Limits) -> bool:
    """Whether every tier holds a plan."""
    host, device = planned["host"], planned["device"]
    if allowed.device is None:
        host, device = host + device, 0
    return host <= allowed.host and device <= (allowed.device or 0) and planned["nvme"] <= allowed.nvme


def largest_that_fits(settings: dict[str, Any], allowed: Limits, *, at_most: int) -> int:
    """Return a number of parameters for `--parameters`. Raises ValueError when not even the smallest fits."""
    wanted = at_most
    while True:
        planned = planned_bytes(settings, wanted)
        if fits(planned, allowed):
            return wanted
        wanted = int(wanted * 0.95)


def largest_in_time(
    *, bytes_per_param: float, read_gbps: float, write_gbps: float, num_steps: int, seconds: float
) -> int:
    """Return the parameters whose states a drive can read and write so often, and once more to build the model.

    Reads and writes are taken one after the other, as a drive with one limit for both does them.
    """
    per_param_s = (num_steps + 1) * bytes_per_param * (1 / read_gbps + 1 / write_gbps) / 1e9
    return int(seconds / per_param_s)


def drive_gbps(directory: Path, *, num_bytes: int = GIB) -> tuple[float, float]:
    """Read and write one file of `num_bytes` once, past the page cache where the filesystem can; return the rates."""
    import torch

    from offloadzero.io.engine import AioEngine

    data = torch.zeros(64 << 20, dtype=torch.uint8)
    data.random_()
    starts = range(0, num_bytes, data.numel())
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="drive-") as folder,
        AioEngine() as engine,
        engine.open(Path(folder) / "data", create=True) as file,
    ):
        file.preallocate(num_bytes)

        def seconds(submit: Any) -> float:
            start_s = time.perf_counter()
            for ticket in [submit(file, data, offset=start) for start in starts]:
                ticket.wait()
            file.sync()
            return time.perf_counter() - start_s

        write_s, read_s = seconds(engine.write), seconds(engine.read)
    return num_bytes / read_s / 1e9, num_bytes / write_s / 1e9


if __name__ == "__main__":
    take_memory(int(sys.argv[1]))
