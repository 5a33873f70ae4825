"""Host memory for the runs of `benchmarks/gpu.py` where a machine shows less than it gives."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def test_memory_that_a_machine_does_not_show_is_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A virtual machine may get its memory as it uses it; an engine goes by what it shows."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu, machine = importlib.import_module("gpu"), importlib.import_module("gpu_machine")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shown = iter([8 * MIB, 8 * MIB, 72 * MIB, 80 * MIB, 80 * MIB])
    monkeypatch.setattr(machine, "available_memory", lambda: next(shown))
    args = argparse.Namespace(out=tmp_path, part_time_s=100.0, device="cpu", memory=64 * MIB)
    part = gpu.Part("host", args)  # looks, too
    gpu.take_memory(part)
    said = capsys.readouterr().out
    assert said == "host memory available: 0.0 GiB, 0.1 GiB once 0.1 GiB were taken (ok)\n"
    assert part.found["taken"] == {
        "status": "ok",
        "available_before": 8 * MIB,
        "available_then": 72 * MIB,
    }
    assert f"gpu_machine.py {64 * MIB}" in part.log.read_text()
    again = gpu.Part("auto", args)
    gpu.take_memory(again)  # it is there now
    assert "taken" not in again.found
    assert next(shown, None) is None
    args.memory = None
    monkeypatch.setattr(machine, "available_memory", lambda: 0)
    gpu.take_memory(part)
    assert capsys.readouterr().out == ""


def test_memory_is_counted_as_engines_count_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's page cache, after reads of tests and of torch, counts as used by its group: it is given back."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    machine = importlib.import_module("gpu_machine")
    monkeypatch.setattr("offloadzero.planning.machine.available_host_bytes", lambda: 7 * MIB)
    assert machine.available_memory() == 7 * MIB
    limits = machine.limits(ROOT, memory=None, disk=0, on_cuda=False)
    assert limits.host == int(7 * MIB * machine.HOST_SHARE)


TAKING = """
import mmap
from pathlib import Path

import gpu_machine
from offloadzero.memory import pages
from tests.memory.test_pinning import num_present_pages

populate = pages.populate

def populate_and_look(buffer, *, num_threads):
    populate(buffer, num_threads=num_threads)
    print(num_present_pages(buffer.data_ptr(), buffer.nbytes) * mmap.PAGESIZE)

pages.populate = populate_and_look
gpu_machine.take_memory(64 << 20)
print(Path("/proc/self/oom_score_adj").read_text())
"""


def test_memory_is_taken_by_a_process_that_would_be_ended_first(tmp_path: Path) -> None:
    """It has every page, and where there are too few the kernel ends it before any other."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [sys.executable, "-c", TAKING],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == [str(64 * MIB), "1000"], done.stderr
