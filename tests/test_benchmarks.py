"""The benchmark scripts run and do the work they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_large_model_trains_the_same_in_every_placement(tmp_path: Path) -> None:
    losses = []
    for placement in ("device", "host", "nvme"):
        command = [sys.executable, str(ROOT / "benchmarks/large_model.py"), "--model", "micro"]
        command += ["--placement", placement, "--nvme-dir", str(tmp_path), "--batch-size", "2"]
        command += ["--seq-len", "16", "--steps", "4", "--accumulation", "2"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert run.returncode == 0, run.stderr
        result = json.loads(run.stdout)
        assert result["reserved_bytes"]["nvme" if placement == "nvme" else "device"] > 0
        assert result["tokens_per_s"] > 0
        losses.append(result["losses"])
    assert losses[0] == losses[1] == losses[2]
    assert list(tmp_path.iterdir()) == []
