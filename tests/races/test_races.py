"""A missing wait shows: everything asynchronous is slowed down at random, and the bits stay the same.

tests/races/test_planted_races.py plants bugs, each a wait left out, and asserts that these comparisons catch them.
"""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.access.parameter import get_data
from offloadzero.core.torch_private import DisableTorchFunctionSubclass
from offloadzero.errors import OffloadError
from offloadzero.memory.arena import Arena
from tests.support import models
from tests.support.faults import replaced
from tests.support.models import Stack, TiedLM, features, tokens
from tests.support.schedules import Slowness, disturbed, reference
from tests.support.training import (
    Config,
    Loop,
    Outcome,
    assert_same,
    make_config,
    merge,
    one_step,
    run_engine,
)

NUM_STEPS = 4
NUM_SCENARIO_RUNS = 27  # each scenario in each placement
NUM_SCHEDULES = int(os.environ.get("OFFLOADZERO_TEST_SCHEDULES", "20"))  # more to soak


def loop_over(make_input: Callable[[int], Any], *, with_evaluation: bool = False) -> Loop:
    """Training steps; with evaluation also a forward without gradients after each, and a read of a weight."""

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS * engine.gradient_accumulation_steps()):
            losses.append(one_step(engine, make_input(seed)))
            if with_evaluation:
                with torch.no_grad():
                    losses.append(engine(make_input(seed + 100)).item())
                losses.append(float(engine.module.blocks[1].state_dict()["down.weight"].float().sum()))
        return losses

    return loop


def loop_with_edits(engine: Any) -> list[float]:
    """Optimizer states and weights change between backward and step."""
    losses = []
    for seed in range(NUM_STEPS):
        loss = engine(features(seed))
        engine.backward(loss)
        time.sleep(0.005)  # states are read ahead now
        state = engine.optimizer.state_dict()
        for values in state["state"].values():
            values["exp_avg"] = values["exp_avg"] * 0.5 + 0.01
        engine.optimizer.load_state_dict(state)
        weights = engine.module.blocks[0].state_dict()
        engine.module.blocks[0].load_state_dict({name: value * 0.75 for name, value in weights.items()})
        engine.step()
        losses.append(loss.item())
    return losses


SCENARIOS: dict[str, tuple[Callable[[], nn.Module], Loop, dict[str, Any]]] = {
    "in backward": (Stack, loop_over(features), {}),
    "at the step": (Stack, loop_over(features), {"clipping": 0.5}),
    "accumulation": (TiedLM, loop_over(tokens), {"accumulation": 3, "clipping": 0.5}),
    "accumulation, in backward": (TiedLM, loop_over(tokens), {"accumulation": 2}),
    "checkpointing": (models.CheckpointedStack, loop_over(features), {"clipping": 0.5}),
    "evaluation": (Stack, loop_over(features, with_evaluation=True), {"clipping": 0.5}),
    "lora": (lambda: Stack(models.LoraBlock), loop_over(features), {}),
    "edited before the step": (Stack, loop_with_edits, {"clipping": 0.5}),
    "fp16": (Stack, loop_over(features), {"dtype": "fp16", "clipping": 0.5}),
}
PLACEMENTS = ("host", "nvme", "mixed")
LIVE_PARAMETERS = (1, 8_000, 10**6)


def make_reference(directory: Path) -> Callable[[str], Outcome]:
    """Gives the undisturbed resident run of a scenario."""

    @functools.cache
    def reference_of(name: str) -> Outcome:
        make_model, loop, options = SCENARIOS[name]
        return run_engine(make_model, loop, make_config("resident", directory, **options))

    return reference_of


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    return make_reference(tmp_path_factory.mktemp("references"))


def scenario_config(name: str, placement: str, directory: Path, *, live: int = 1) -> Config:
    """Small chunks, so that one record's update has several."""
    config = make_config(placement, directory, **SCENARIOS[name][2])
    zero = {"stage3_max_live_parameters": live}
    return merge(config, {"zero_optimization": zero, "offloadzero": {"update": {"chunk_elements": 4096}}})


@pytest.mark.parametrize("seed", range(NUM_SCENARIO_RUNS))
def test_random_delays_change_nothing(
    seed: int,
    references: Callable[[str], Outcome],
    tmp_path: Path,
    faults: ExitStack,
) -> None:
    names = list(SCENARIOS)
    name, draw = names[seed % len(names)], random.Random(seed)
    placement = PLACEMENTS[seed // len(names) % len(PLACEMENTS)]
    expected = references(name)
    config = scenario_config(name, placement, tmp_path, live=draw.choice(LIVE_PARAMETERS))
    faults.enter_context(Slowness(seed).everywhere())
    make_model, loop, _ = SCENARIOS[name]
    assert_same(run_engine(make_model, loop, config), expected)


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_random_schedule(seed: int) -> None:
    """Model, placement, budgets, updates, loop and delays are drawn from the seed."""
    assert_same(disturbed(seed), reference(seed))


def test_poison_is_what_a_released_lease_holds(tmp_path: Path) -> None:
    """Without it a stale read could go unnoticed."""
    arena = Arena("test", torch.zeros(8192, dtype=torch.uint8), poison=True)
    lease = arena.try_lease(4096, "a")
    assert lease is not None
    lease.bytes.fill_(7)
    lease.release()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert bool(arena.buffer[:4096].view(dtype).isnan().all())
    engine, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path))
    engine(features(0))
    engine.backward(engine(features(0)))
    engine.step()
    with DisableTorchFunctionSubclass():  # what the parameters themselves point at
        released = [p for p in engine.module.blocks.parameters() if bool(get_data(p).isnan().all())]
    assert released
    engine.close()
    with pytest.raises(OffloadError, match="closed"):
        engine(features(0))


class HalfUsed(nn.Module):
    """The parameters at the end of its record get no gradient: an update does not touch them."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(63, 63)
        self.unused = nn.Linear(63, 65)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.used(x)


class HalfUsedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HalfUsed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def test_a_delivery_in_part_ends_before_its_lease_goes_on(tmp_path: Path, faults: ExitStack) -> None:
    """An update that delivers only some chunks has the file read instead: its copies must not come later still."""

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(3):
            x = torch.randn(2, 63, generator=torch.Generator().manual_seed(seed))
            losses.append(one_step(engine, x.bfloat16()))
        return losses

    expected = run_engine(HalfUsedStack, loop, make_config("resident", tmp_path, clipping=1.0))
    fetched, copied = threading.Event(), threading.Event()
    num_copies = 0

    def late(launch: Callable[..., Any], *task: Any) -> Any:
        nonlocal num_copies
        num_copies += 1
        fetched.wait(0.2)
        try:
            return launch(*task)
        finally:
            copied.set()

    def in_forward(_module: nn.Module, _inputs: Any) -> None:
        """Its weights have been fetched by now."""
        if num_copies:
            fetched.set()
            copied.wait(0.2)

    def make_model() -> nn.Module:
        model = HalfUsedStack()
        model.blocks[1].used.register_forward_pre_hook(in_forward)
        return model

    faults.enter_context(replaced("lane.launch", late, about="state-h2d"))
    config = make_config("nvme", tmp_path, clipping=1.0, offloadzero={"update": {"chunk_elements": 4096}})
    outcome = run_engine(make_model, loop, config)
    assert num_copies
    assert_same(expected, outcome)
