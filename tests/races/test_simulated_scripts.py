"""Random scripts on the simulated device: bitwise the resident run on the CPU, and no race."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offloadzero.activations import store as activations
from tests.simulated.backward import Backward
from tests.simulated.checked import checked
from tests.simulated.device import simulated
from tests.simulated.random_scripts import draw_script, in_directory
from tests.support.training import assert_same

NUM_SCRIPTS = int(os.environ.get("OFFLOADZERO_TEST_SCHEDULES", "8"))  # more to soak


@pytest.mark.parametrize("seed", range(NUM_SCRIPTS))
def test_random_script(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 1)
    drawn = draw_script(seed)
    expected = drawn.outcome(in_directory(drawn.resident, tmp_path))
    way = list(Backward)[seed % len(Backward)]
    with checked(), simulated(monkeypatch, seed=seed, backward=way):
        found = drawn.outcome(in_directory(drawn.placed, tmp_path))
    assert_same(found, expected)


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_lanes_that_share_streams(num_streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32 of them, and three engines have more lanes: no lane may wait for what comes behind it."""
    monkeypatch.setattr(activations, "MIN_BYTES", 1)
    drawn = draw_script(num_streams)
    expected = drawn.outcome(in_directory(drawn.resident, tmp_path))
    way = list(Backward)[num_streams % len(Backward)]
    with (
        checked(),
        simulated(monkeypatch, seed=num_streams, backward=way, num_streams=num_streams) as device,
    ):
        found = drawn.outcome(in_directory(drawn.placed, tmp_path))
        assert next(device._taken) > 2 * num_streams
    assert_same(found, expected)
