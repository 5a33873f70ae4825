"""Whole runs of `benchmarks/gpu.sh first` with the CPU as the device: all well, held up, failing, killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
IN_FULL = "OFFLOADZERO_TEST_EXHAUSTIVE" in os.environ
NUM_KILLS = 20

SMALL = ("--device", "cpu", "--parameters", "900K", "--seq-len", "16")


def start(*arguments: str, out: Path, files: Path, **environment: str) -> subprocess.Popen[str]:
    """Begin a run of a small model."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments, *SMALL, "--out", str(out), "--nvme-dir", str(files)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


FIRST = ("modules", "memory", "right", "rates", "fast", "where")


@pytest.mark.alone
def test_slices_run_with_the_cpu_as_the_device(tmp_path: Path) -> None:
    """Its slices have their times: beside other tests they may take longer."""
    files, out = tmp_path / "drive", tmp_path / "out"
    files.mkdir()
    names = FIRST if IN_FULL else ("modules", "rates", "nvme", "where")
    process = start(*(("first",) if IN_FULL else names[1:]), out=out, files=files)
    said, _ = process.communicate(timeout=320)
    assert process.returncode == 0, said
    found: dict[str, Any] = {}
    for path in out.glob("*.json"):
        found |= json.loads(path.read_text()).get("slices", {})
    assert sorted(found) == sorted(names)
    assert {name: one["status"] for name, one in found.items() if one["status"] != "ok"} == (
        {"memory": "skipped"} if IN_FULL else {}
    )
    runs = {name: run for one in found.values() for name, run in one.get("runs", {}).items()}
    assert sorted(runs) == sorted(
        ["host, clipping", "computation alone", "host, no clipping"] if IN_FULL else ["nvme"]
    )
    for name, run in runs.items():
        assert len(run["step_s"]) > 1
        assert ("seconds" in run.get("forecast", {})) == (name != "computation alone"), run.get("forecast")
    assert found["where"]["hooks"]["_SiteForward._enter"]["calls"] > 0
    assert len(said.partition("machine: ")[2].splitlines()) <= 40
    assert os.listdir(files) == []


# Of a process of each slice: the module and the function in which it is held up, and the calls that go well before.
PLACES = {
    "modules": ("gpu_machine.py", "platform", "python_version", 0),
    "right": ("gpu_right.py", "offloadzero.memory.device", "CpuDevice.copy", 40),
    "rates": ("gpu_rates.py", "offloadzero.memory.device", "CpuDevice.copy", 6),
    "fast": ("large_model.py", "offloadzero.memory.device", "CpuDevice.copy", 40),
    "where": ("gpu_where.py", "offloadzero.memory.device", "CpuDevice.copy", 12),
}
SITE = """
import importlib, sys, threading, time

SCRIPT, MODULE, NAME, NUM_GOOD, WHAT = {fault!r}

def spoil():
    while MODULE not in sys.modules or not hasattr(sys.modules[MODULE], NAME.split(".")[0]):
        time.sleep(0.01)
    *owners, last = NAME.split(".")
    owner = sys.modules[MODULE]
    for one in owners:
        owner = getattr(owner, one)
    original, calls = getattr(owner, last), []

    def spoiled(*arguments, **keys):
        calls.append(None)
        if len(calls) > NUM_GOOD:
            if WHAT == "stalls":
                time.sleep(1000)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return original(*arguments, **keys)

    setattr(owner, last, spoiled)

if any(one.endswith(SCRIPT) for one in sys.orig_argv):
    threading.Thread(target=spoil, daemon=True).start()
"""


def ended_first(process: subprocess.Popen[str], begun_s: float, out: Path) -> tuple[str, dict[str, Any]]:
    """Wait for its end, which is in time, and return what it said and found."""
    said, _ = process.communicate(timeout=400)
    assert time.monotonic() - begun_s < 305
    assert len(said.partition("machine: ")[2].splitlines()) <= 40
    return said, json.loads((out / "first.json").read_text())["slices"]


@pytest.mark.slow
@pytest.mark.skipif(not IN_FULL, reason="in make campaign")
@pytest.mark.parametrize("what", ["stalls", "fails"])
@pytest.mark.parametrize("name", list(PLACES))
def test_a_device_that_stalls_or_fails_in_a_slice(name: str, what: str, tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(fault=(*PLACES[name], what)))
    begun_s = time.monotonic()
    process = start("first", out=out, files=tmp_path, PYTHONPATH=str(site))
    said, found = ended_first(process, begun_s, out)
    assert process.returncode == 1
    assert [one for one in FIRST if found[one]["status"] not in ("ok", "skipped")] == [name], said
    assert f"FAILED {name}: " in said
    if what == "fails":
        parts = [found[name], *found[name].get("runs", {}).values()]
        assert any("CUDA error" in part.get("error", "") for part in parts)


@pytest.mark.slow
@pytest.mark.skipif(not IN_FULL, reason="in make campaign")
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_process_that_is_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    out, drawn = tmp_path / "out", random.Random(seed)
    begun_s = time.monotonic()
    process = start("first", out=out, files=tmp_path)
    killed: list[str] = []

    def kill_one() -> None:
        time.sleep(drawn.uniform(1.0, 60.0))
        for children in Path("/proc").glob(f"{process.pid}/task/*/children"):
            for pid in children.read_text().split():
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(int(pid), signal.SIGKILL)
                    killed.append(pid)

    killer = threading.Thread(target=kill_one)
    killer.start()
    said, found = ended_first(process, begun_s, out)
    killer.join()
    assert list(found) == list(FIRST)
    bad = [name for name in FIRST if found[name]["status"] not in ("ok", "skipped")]
    assert len(bad) == len(killed) <= 1, said
    if bad:
        assert "killed by signal 9" in found[bad[0]]["status"]
        assert process.returncode == 1
