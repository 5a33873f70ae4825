"""The engine on a device where everything runs later than it was launched: bitwise what the CPU computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import Stack, features
from tests.simulated.device import simulated
from tests.test_streaming import MODELS, take_inputs
from tests.training import assert_same, make_config, run_engine


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_model(
    name: str, placement: str, clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model, make_input, over = MODELS[name]
    config = make_config(placement, tmp_path, clipping=clipping, **over)
    expected = run_engine(make_model, take_inputs(make_input), config)
    with simulated(monkeypatch, seed=len(name)):
        found = run_engine(make_model, take_inputs(make_input), config)
    assert_same(found, expected)
