"""The largest Llama-shaped models that memory, and a drive in some time, hold."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from llama_model import Llama, size_with

from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import ModelPlanner
from offloadzero.errors import BudgetError
from offloadzero.io.engine import AioEngine
from offloadzero.planning.machine import available_host_bytes
from offloadzero.update.spec import UpdateForm

GIB, PIECE = 1 << 30, 64 << 20

# Shares of the free bytes: activations, the process itself, torch's allocator and the page cache need the rest.
HOST_SHARE = 0.85
NVME_SHARE = 0.9
DEVICE_SHARE = 0.7


def budgets(directory: Path, *, on_cuda: bool) -> dict[str, int]:
    """Return the bytes that a model's states may take of each tier. A device that is the CPU has half of its memory."""
    space = os.statvfs(directory)
    host = int(available_host_bytes() * HOST_SHARE)
    found = {"host": host, "device": host // 2, "nvme": int(space.f_bavail * space.f_frsize * NVME_SHARE)}
    if on_cuda:
        free, _ = torch.cuda.mem_get_info()
        found["device"] = int(free * DEVICE_SHARE)
    else:
        found["host"] -= found["device"]
    return found


def largest_that_fits(settings: dict[str, Any], *, at_most: int) -> int:
    """Return the most parameters, in steps of 3 %, that the library's plan allows with the budgets of `settings`.

    Raises ValueError when not even the smallest model fits.
    """
    if _fits(settings, at_most):
        return at_most
    too_many, enough = at_most, at_most // 2
    while not _fits(settings, enough):
        too_many, enough = enough, enough // 2
    while too_many / enough > 1.03:
        middle = int((too_many * enough) ** 0.5)
        too_many, enough = (too_many, middle) if _fits(settings, middle) else (middle, enough)
    return enough


def _fits(settings: dict[str, Any], num_parameters: int) -> bool:
    config = load_config(settings)
    with torch.device("meta"):
        model = Llama(size_with(num_parameters))
    limits = settings["offloadzero"]["budgets"]
    try:
        ModelPlanner(model).plan(
            config,
            available={TierName(tier): num_bytes for tier, num_bytes in limits.items()},
            # Triton's form of the update takes less than that of torch.
            form=UpdateForm.NATIVE if config.device == "cpu" else UpdateForm.TORCH,
        )
    except BudgetError:
        return False
    return True


def largest_in_time(
    *, bytes_per_param: float, read_gbps: float, write_gbps: float, num_steps: int, seconds: float
) -> int:
    """Return the parameters whose states a drive can read and write so often, and once more to build the model.

    Reads and writes are taken one after the other, as a drive with one limit for both does them.
    """
    per_param_s = (num_steps + 1) * bytes_per_param * (1 / read_gbps + 1 / write_gbps) / 1e9
    return int(seconds / per_param_s)


def drive_gbps(directory: Path, *, num_bytes: int | None = None) -> tuple[float, float]:
    """Read and write one file of 1 GiB once, past the page cache where the filesystem can; return the rates."""
    if num_bytes is None:
        num_bytes = min(GIB, shutil.disk_usage(directory).free // 4 // PIECE * PIECE)
    data = torch.zeros(PIECE, dtype=torch.uint8)
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
