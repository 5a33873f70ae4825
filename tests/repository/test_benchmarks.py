"""The benchmark scripts run and do the work they say."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIERS = {
    "device": ["device"],
    "host": ["device", "host"],
    "auto": ["device", "host"],
    "nvme": ["device", "host", "nvme"],
}
UPDATED = {
    "device": {"device update"},
    "host": {"update", "device update"},
    "auto": {"update", "device update"},
    "nvme": {"update"},
}


def test_large_model_trains_the_same_in_every_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    large_model: Any = importlib.import_module("large_model")
    losses = []
    budget = ("--device-budget", "1000KiB")
    for options in (("device",), ("host", "--host-update-ratio", "0.6"), ("auto", *budget), ("nvme",)):
        arguments = ["--model", "micro", "--device", "cpu", "--batch-size", "2", "--seq-len", "16"]
        arguments += ["--steps", "4", "--accumulation", "2", "--placement", *options]
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            result = large_model.run(large_model.parse_arguments(arguments), folder)
            assert os.listdir(folder) == ["run"]
        json.dumps(result)
        placement = options[0]
        for tier, num_bytes in result["reserved_bytes"].items():
            assert (num_bytes > 0) == (tier in TIERS[placement]), f"{placement}: {tier}"
        updated = {lane for lane in ("update", "device update") if result["lane_bytes"].get(lane)}
        assert updated == UPDATED[placement], placement
        assert result["tokens_per_s"] > 0
        assert 0 < result["own_bound_s"] <= max(result["step_s"])
        losses.append(result["losses"])
    assert losses[1:] == losses[:1] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif("OFFLOADZERO_TEST_EXHAUSTIVE" not in os.environ, reason="in make campaign")
def test_contenders_on_two_ranks_train_the_same(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "ranks_side_by_side.py"), "--model", "tiny"]
    command += ["--contenders", "fsdp2-cpu", "offloadzero-nvme", "--seq-len", "16"]
    command += ["--rounds", "2", "--steps", "2", "--warmup", "1"]
    command += ["--nvme-path", str(tmp_path / "files"), "--output", str(tmp_path / "report.md")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    report = (tmp_path / "report.md").read_text()
    rows = dict(re.findall(r"^\| (fsdp2-cpu|offloadzero-nvme) \| (.*) \|$", report, re.MULTILINE))
    assert list(rows) == ["fsdp2-cpu", "offloadzero-nvme"]
    losses = [[float(loss) for loss in row.split("|")[-1].split()] for row in rows.values()]
    assert all(len(each) == 4 for each in losses)
    for each in losses:
        assert each == pytest.approx(losses[0], abs=0.02)
    assert "agree (same seed" in report
    assert os.listdir(tmp_path / "files") == []
