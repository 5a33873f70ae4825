"""A rank that fails in the midst of a backward: the others end soon, and do not wait for the groups' timeout.

On the simulated device they wait as on a device with NCCL, where nobody looks up and nothing ends by itself: lanes for
events behind collectives of which the failed rank takes no part, and the end of a group for all of its ranks.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from tests.simulated.device import simulated
from tests.simulated.ranks_scripts import Here, train
from tests.support.models import Stack
from tests.support.ranks import run_ranks
from tests.support.sharded import said_of
from tests.support.training import make_config

TIMEOUT_S = 60.0
SOON_S = 30.0


def fail_late(*_: Any) -> None:
    """When the other rank has begun what it does not share with this one."""
    time.sleep(2.0)
    raise ZeroDivisionError


def fail_in_a_backward(rank: int, directory: str, on: str, stage: int) -> dict[str, Any]:
    """What each rank is told, and the seconds in which its engine closed. The second one has an error."""
    here = Here(rank, 2, Path(directory))
    said: dict[str, Any] = {}
    with ExitStack() as stack:
        if on == "a device":
            stack.enter_context(simulated(stack.enter_context(pytest.MonkeyPatch.context()), rank))
        torch.manual_seed(0)
        config = make_config("host", directory, clipping=0.5)
        config["zero_optimization"]["stage"] = stage
        if stage == 2:
            config["offloadzero"]["placement"] = {"states": "host"}
        engine, *_ = offloadzero.initialize(model=Stack(), config=config)
        train(engine, here)
        if rank == 1:
            engine.module.blocks[1].register_full_backward_pre_hook(fail_late)
        try:
            train(engine, here)
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
            begun_s = time.monotonic()
            said["close"] = said_of(engine.close)
            said["close_s"] = time.monotonic() - begun_s
        (here.directory / f"{rank} is closed").touch()
        # A process that ends closes its connections, and with them ends what the other waits for.
        until_s = time.monotonic() + TIMEOUT_S
        while not (here.directory / f"{1 - rank} is closed").exists() and time.monotonic() < until_s:
            time.sleep(0.1)
    return said


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("on", ["a device", "the host"])
def test_the_others_close_soon(on: str, stage: int, tmp_path: Path) -> None:
    """In stage 3 they wait for weights, which ranks compare before, and in stage 2 behind gradients that never come."""
    first, second = run_ranks(
        fail_in_a_backward, 2, tmp_path / "ranks", str(tmp_path), on, stage, timeout_s=TIMEOUT_S
    )
    assert second["error"].startswith("ZeroDivisionError")
    assert first["error"].startswith("RankError")
    assert "rank 1: ZeroDivisionError" in first["error"]
    assert second["close"] == "nothing"
    # A lane that has waited on the host may have an error that no call has raised.
    assert first["close"] == "nothing" or "rank 1: ZeroDivisionError" in first["close"]
    assert first["close_s"] < SOON_S
    assert second["close_s"] < SOON_S
