"""An engine that ends while the device still computes with its memory: nobody gets that before the work has run."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.engine.lifetime import wait_for_collected
from tests.simulated.checked import checked
from tests.simulated.device import SimulatedDevice, simulated
from tests.support.cases import each_pair
from tests.support.models import Stack, features
from tests.support.training import Config, make_config


def started(config: Config) -> offloadzero.Engine:
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    engine.backward(engine(features(0)))
    engine.step()
    engine.synchronize()
    return engine


def plainly_evaluated(config: Config) -> float:
    engine = started(config)
    with torch.no_grad():
        value = float(engine(features(1)))
    engine.close()
    return value


def evaluate_on(device: SimulatedDevice, name: str, engine: offloadzero.Engine) -> torch.Tensor:
    """Nobody waits for the stream."""
    with torch.no_grad(), device.machine.launching_on(device.machine.new_stream(name)):
        return engine(features(1))


def write_all(memory: torch.Tensor) -> None:
    """As the one that gets it next does."""
    memory.view(torch.float32).fill_(3.0)


@pytest.mark.parametrize(
    ("home", "placement", "end"), each_pair(["default", "own"], ["host", "resident"], ["closed", "collected"])
)
def test_an_evaluation_that_still_runs(
    home: str, placement: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator gives memory to the next one on the stream to which it belongs, and knows of no other stream.

    `home` is the stream on which the engine was made.
    """
    own: dict[str, Any] = {"poison_released_leases": False}  # else leases wait for each other
    config = make_config(placement, tmp_path, offloadzero=own)
    expected = plainly_evaluated(config)
    with checked(), simulated(monkeypatch, slow=["side"]) as device:
        machine = device.machine
        stream = machine.default_stream if home == "default" else machine.new_stream(home)
        with machine.launching_on(stream):
            engine = started(config)
            arena = engine._runtime.store.device.buffer
            num_bytes, address = arena.nbytes, arena.data_ptr()
            del arena
            output = evaluate_on(device, "side", engine)
            if end == "closed":
                engine.close()
            del engine
            gc.collect()
            wait_for_collected()
            taken = device.allocate(num_bytes)
            assert taken.data_ptr() == address
            write_all(taken)
        machine.synchronize()
        found = float(output)
    assert found == expected
