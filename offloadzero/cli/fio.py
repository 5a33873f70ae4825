"""Measurements of the same points by fio's io_uring, as an independent witness."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from offloadzero.cli.nvme_sweep import Point, Traffic
from offloadzero.cli.nvme_traffic import Sample, WriteAllowance
from offloadzero.cli.scratch import ScratchFile
from offloadzero.errors import ConfigError, OffloadError

_RW = {Traffic.READ: "read", Traffic.WRITE: "write", Traffic.MIXED: "rw"}
_READ_PERCENT = 50  # [Note: step traffic]


class FioError(OffloadError):
    """fio failed; the message is fio's own."""


def fio_version() -> str:
    """Return fio's version. Raises ConfigError when fio is not installed or has no io_uring."""
    if shutil.which("fio") is None:
        raise ConfigError("--verify-with-fio", True, "fio is not installed (apt-get install fio)")
    engines = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=False).stdout
    if "io_uring" not in engines.split():
        raise ConfigError("--verify-with-fio", True, "this fio was built without io_uring")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()


class Window(NamedTuple):
    """The part of each file that one sample goes through."""

    offset: int
    num_bytes: int


def next_window(files: Sequence[ScratchFile], max_bytes: int, *, alignment: int) -> Window:
    """Return the part after the last one used, as the package's own samples go on where the last one ended.

    A tool that reads the same part each time finds it in the caches below: the drive's, a hypervisor's.
    """
    whole = min(file.num_bytes for file in files) // alignment * alignment
    num_bytes = min(-(-max_bytes // len(files) // alignment) * alignment, whole)
    offset = min(file.cursor for file in files) // alignment * alignment
    if offset + num_bytes > whole:
        offset = 0
    return Window(offset, num_bytes)


def fio_command(
    point: Point,
    traffic: Traffic,
    files: Sequence[ScratchFile],
    *,
    window: Window,
    seconds: float,
    max_bytes: int,
) -> list[str]:
    """Return a command on existing files that are written already: fio creates, grows and removes none.

    One job per thread of the point, each on its own part of the files, the depth shared among them. Mixed
    traffic is one stream of reads and one of writes in a job, at the byte ratio of an optimizer step.
    """
    num_jobs = point.num_threads
    per_job = window.num_bytes // num_jobs // point.block_size * point.block_size
    return [
        "fio",
        "--name=verify",
        "--filename=" + ":".join(_escaped(file.path) for file in files),
        f"--rw={_RW[traffic]}",
        f"--rwmixread={_READ_PERCENT}",
        f"--bs={point.block_size}",
        f"--iodepth={max(point.queue_depth // num_jobs, 1)}",
        f"--numjobs={num_jobs}",
        f"--offset={window.offset}",
        f"--offset_increment={per_job}",
        f"--size={per_job * len(files)}",
        f"--io_size={max(max_bytes // num_jobs, point.block_size)}",
        f"--runtime={max(int(seconds * 1e3), 1)}ms",
        "--ioengine=io_uring",
        "--direct=1",
        "--thread",
        "--group_reporting",
        "--allow_file_create=0",
        "--overwrite=1",
        "--refill_buffers=0",
        "--scramble_buffers=0",
        "--randrepeat=0",
        "--file_service_type=roundrobin",
        "--output-format=json",
    ]


def _escaped(path: str) -> str:
    """Escape a file name: fio separates names by colons."""
    return os.path.abspath(path).replace("\\", r"\\").replace(":", r"\:")


def run_fio(
    point: Point,
    traffic: Traffic,
    files: Sequence[ScratchFile],
    *,
    paths: tuple[int, ...],
    seconds: float,
    rate_bps: float,
    allowance: WriteAllowance,
    run_started_s: float,
) -> Sample | None:
    """Take one sample with fio; None when no more may be written. Raises FioError.

    The bytes that it may write are reserved first, and the rest is given back.
    """
    max_bytes = int(rate_bps * seconds * 1.5) + point.in_flight_bytes * 2
    reserved = 0 if traffic is Traffic.READ else max_bytes
    if not allowance.take(reserved):
        return None
    for file in files:
        file.check()
    window = next_window(files, max_bytes, alignment=point.block_size * point.num_threads)
    command = fio_command(point, traffic, files, window=window, seconds=seconds, max_bytes=max_bytes)
    started_s = time.monotonic() - run_started_s
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        allowance.give_back(0)
        raise FioError(f"fio ended with status {done.returncode}: {_last_line(done.stderr or done.stdout)}")
    sample = parse_fio(done.stdout, point, traffic, paths=paths, started_s=started_s)
    allowance.give_back(reserved - sample.bytes_written)
    for file in files:
        file.cursor = min(window.offset + sample.num_bytes // len(files), file.num_bytes)
    return sample


def parse_fio(
    text: str, point: Point, traffic: Traffic, *, paths: tuple[int, ...], started_s: float
) -> Sample:
    """Read fio's JSON as a Sample. Raises FioError when it is not the output of fio 3."""
    try:
        # Warnings may stand before the object.
        job = json.loads(text[text.index("{") :])["jobs"][0]
        directions = [job["read"], job["write"]]
        seconds = max(direction["runtime"] for direction in directions) / 1e3
        latencies = [direction["clat_ns"] for direction in directions if direction["io_bytes"]]
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        read_bytes, written_bytes = (int(direction["io_bytes"]) for direction in directions)
        num_operations = sum(int(direction["total_ios"]) for direction in directions)
        p50, p99 = (max(_percentile(entry, rank) for entry in latencies) for rank in (50, 99))
        slowest = max(entry["max"] for entry in latencies)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise FioError(f"fio's output is not understood: {error!r}; {_last_line(text)}") from error
    if job.get("error") or seconds <= 0.0:
        raise FioError(f"fio measured nothing: error {job.get('error')}")
    return Sample(
        phase="verify",
        tool="fio",
        traffic=traffic.value,
        point=point,
        paths=paths,
        direct=True,
        started_s=started_s,
        seconds=seconds,
        bytes_read=read_bytes,
        bytes_written=written_bytes,
        operation_bytes=point.block_size,
        num_operations=num_operations,
        latency_p50_s=p50 / 1e9,
        latency_p99_s=p99 / 1e9,
        latency_max_s=slowest / 1e9,
        cpu_s=cpu_s,
    )


def _percentile(latency: dict[str, Any], rank: int) -> float:
    return float(latency["percentile"][f"{rank}.000000"])


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
