"""The trainings that `benchmarks/gpu.sh first` compares on a GPU, on the simulated device: bitwise those of the CPU."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulated.backward import Backward
from tests.simulated.checked import checked
from tests.simulated.device import simulated
from tests.support.small_gpt import SmallGpt
from tests.support.training import assert_same, run_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_right

IN_FULL = "OFFLOADZERO_TEST_SIMULATED" in os.environ
CPU = torch.device("cpu")
CASES = gpu_right.CASES if IN_FULL else gpu_right.CASES[::5]  # each placement and each variant is among them


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = case.config(tmp_path, "cpu")
    short = partial(gpu_right.loop, case, CPU, num_steps=3 if IN_FULL else 2)
    expected = run_engine(SmallGpt, short, config)
    with checked(), simulated(monkeypatch, backward=Backward.OTHER_STREAM):
        assert_same(run_engine(SmallGpt, short, config), expected)
