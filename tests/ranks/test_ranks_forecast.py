"""The forecast that the first of two ranks makes of its own step, and what it says of the run after ten steps."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offloadzero
from offloadzero.memory.device import find_device
from offloadzero.observe.forecast import MIN_STEPS
from offloadzero.planning.hardware import cache_file, describe, kept_share
from tests.cli.planned import MACHINE
from tests.support.ranks import run_ranks
from tests.support.tiny import TinyModel, tokens
from tests.support.training import make_config, merge

NUM_RANKS = 2
SLEEP_S = 0.05


class Sending(TinyModel):
    """Its own code asks the other ranks."""

    def forward(self, tokens: Tensor) -> Tensor:
        numbers = torch.ones(3)
        dist.all_reduce(numbers)
        return super().forward(tokens) * (numbers.mean() / NUM_RANKS)


def train(rank: int, name: str, directory: str) -> dict[str, Any]:
    """The losses, and what is said of the forecast."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("offloadzero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(1)
    model = Sending() if name == "sends itself" else TinyModel()
    own = {"observe": {"run_dir": f"{directory}/{name}"}, "placement": {"param": "host", "states": "nvme"}}
    others = {"wall_clock_breakdown": True}  # of which a notice says that it changes nothing
    config = merge(make_config("host", directory, clipping=1.0), {**others, "offloadzero": own})
    os.environ["XDG_CACHE_HOME"] = f"{directory}/nowhere" if name == "not measured" else directory
    engine, *_ = offloadzero.initialize(model=model, config=config)
    losses = []
    for step in range(MIN_STEPS):
        loss = engine(tokens(10 * step + rank))
        if name == "a slow rank" and rank:
            time.sleep(SLEEP_S)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    logger.removeHandler(handler)
    return {"losses": losses, "said": [line for line in said if "forecast" in line], "all": said}


def work(rank: int, directory: str) -> dict[str, Any]:
    return {
        name: train(rank, name, directory)
        for name in ("plain", "a slow rank", "sends itself", "not measured")
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forecast")


@pytest.fixture(scope="module")
def by_rank(directory: Path) -> list[dict[str, Any]]:
    """What each rank has found. The machine has been measured, with other threads of torch than the ranks have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        identity = {**describe(find_device("cpu"), [directory]), "torch_threads": 7}
        path = cache_file(identity)
        path.parent.mkdir()
        path.write_text(json.dumps(replace(MACHINE, identity=identity).to_json()))
        (path.parent / "hardware-damaged.json").write_text("{")
        measured = kept_share({**identity, "torch_threads": 1}, NUM_RANKS)
    assert measured is not None
    assert measured.rates.flops["bf16"] == pytest.approx(MACHINE.rates.flops["bf16"] / 7)
    return run_ranks(work, NUM_RANKS, directory / "ranks", str(directory), timeout_s=240)


def test_the_first_rank_says_it_after_ten_steps(by_rank: list[dict[str, Any]], directory: Path) -> None:
    """Its own bytes, and those of the collectives, are those that it has moved."""
    (line,) = by_rank[0]["plain"]["said"]
    assert line.startswith("forecast ")
    assert " (median of 8 steps), ratio " in line
    assert by_rank[1]["plain"]["said"] == []
    planned = json.loads((directory / "plain" / "forecast.json").read_text())
    records = [json.loads(line) for line in (directory / "plain" / "steps.jsonl").read_text().splitlines()]
    for lane in ("collectives", "h2d", "d2h", "update", "nvme write"):
        moved = sum(record["bytes"][lane] for record in records[2:]) / len(records[2:])
        assert moved == pytest.approx(planned["num_bytes"][lane], rel=0.15), lane
    assert planned["lanes_s"]["collectives"] > 0
    run = json.loads((directory / "plain" / "run.json").read_text())
    assert run["num_cores"] == len(os.sched_getaffinity(0)) / NUM_RANKS


def test_the_first_rank_alone_logs_notices_and_steps(by_rank: list[dict[str, Any]]) -> None:
    for begin, count in (("step ", MIN_STEPS), ("wall_clock_breakdown", 1)):
        said = [[line for line in found["plain"]["all"] if line.startswith(begin)] for found in by_rank]
        assert [len(lines) for lines in said] == [count, 0], begin


def test_a_rank_that_others_wait_for_shows_in_the_collectives(by_rank: list[dict[str, Any]]) -> None:
    (line,) = by_rank[0]["a slow rank"]["said"]
    assert "The lane that departs most is collectives: " in line
    assert "measured collectives." in line


def test_a_model_that_sends_itself_is_not_counted(by_rank: list[dict[str, Any]]) -> None:
    """Alone in a collective the first rank would wait for ever."""
    (line,) = by_rank[0]["sends itself"]["said"]
    assert "its operations are not counted: its own code sends between ranks: c10d" in line
    assert by_rank[0]["sends itself"]["losses"] == by_rank[0]["plain"]["losses"]


def test_a_machine_that_was_not_measured_is_said_by_one_rank(by_rank: list[dict[str, Any]]) -> None:
    (line,) = by_rank[0]["not measured"]["said"]
    assert "this machine has not been measured" in line
    assert by_rank[1]["not measured"]["said"] == []
    assert by_rank[0]["not measured"]["losses"] == by_rank[0]["plain"]["losses"]
