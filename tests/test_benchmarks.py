"""The benchmark scripts run and do the work they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


def test_large_model_trains_the_same_in_every_placement(tmp_path: Path) -> None:
    losses = []
    budget = ("--device-budget", "1000KiB")
    for options in (("device",), ("host", "--host-update-ratio", "0.6"), ("auto", *budget), ("nvme",)):
        command = [sys.executable, str(ROOT / "benchmarks/large_model.py"), "--model", "micro"]
        command += ["--device", "cpu", "--nvme-dir", str(tmp_path), "--batch-size", "2"]
        command += ["--seq-len", "16", "--steps", "4", "--accumulation", "2", "--placement", *options]
        run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert run.returncode == 0, run.stderr
        result = json.loads(run.stdout)
        placement = options[0]
        for tier, num_bytes in result["reserved_bytes"].items():
            assert (num_bytes > 0) == (tier in TIERS[placement]), f"{placement}: {tier}"
        updated = {lane for lane in ("update", "device update") if result["lane_bytes"].get(lane)}
        assert updated == UPDATED[placement], placement
        assert result["tokens_per_s"] > 0
        assert 0 < result["bound_s"] <= max(result["step_s"])
        losses.append(result["losses"])
    assert losses[1:] == losses[:1] * 3
    assert list(tmp_path.iterdir()) == []
