"""Ranks that are slow at different places come to the same numbers by the same collectives; what goes by time shows.

OFFLOADZERO_TEST_SCHEDULES random runs (200 and more for the campaign), many in one set of processes.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.ranks import process_groups
from offloadzero.ranks.channel import Channel
from offloadzero.schedule.prefetch import Evict
from offloadzero.step.coordinator import StepCoordinator
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.unit_leases import UnitLeases
from tests.support import faults
from tests.support.ranks import run_ranks
from tests.support.schedules import Slowness
from tests.support.sharded import WIDTH, config_of, digest, engine_of, global_losses, micro_batch
from tests.support.training import merge, one_step

WORLD_SIZE = 3
NUM_STEPS = 3
NUM_SCHEDULES = int(os.environ.get("OFFLOADZERO_TEST_SCHEDULES", "2"))
SCHEDULES_PER_START = 20
PLANTED_TIMEOUT_S = 10.0  # of the process groups
PATIENCE_S = 0.2  # of a planted prefetch
SLOW_UPDATE_S = 0.1  # of each chunk, on one rank
MAX_PLANTED = 8  # schedules within which a planted order must show
ROOM_FOR_ALL = {"stage3_max_live_parameters": 10**6}
TIERS = ("device", "host", "nvme")

Orders = dict[str, str]  # by channel: a digest of its collectives in their order


@dataclass(frozen=True)
class Schedule:
    """A random run, the same on all ranks; only the delays are each rank's own."""

    config: dict[str, Any]
    evaluates: bool
    reads: bool


def draw_schedule(seed: int, directory: str, **over: Any) -> Schedule:
    """The run number `seed`; `over` is laid over its configuration."""
    draw = random.Random(seed)
    stage, placement = (3, 3, 1)[seed % 3], ("host", "nvme")[seed // 3 % 2]
    update = {"chunk_elements": draw.choice((4096, 8192)), "num_threads": draw.choice((1, 2))}
    own: dict[str, Any] = {"update": update, "units": {"prefetch_units": draw.randint(1, 3)}}
    if stage == 3 and draw.random() < 0.3:
        own["placement"] = {"param": draw.choice(TIERS), "states": placement}
    config = config_of(
        placement,
        stage,
        Path(directory),
        world_size=WORLD_SIZE,
        accumulation=draw.choice((1, 1, 2, 3)),
        gradient_clipping=draw.choice((0.0, 1.0)),
        zero_optimization={"stage3_max_live_parameters": draw.choice((1, 2_000, 6_000, 10**6))},
        offloadzero=own,
        **draw.choice(({}, {"bf16": {"enabled": True}})),
    )
    return Schedule(merge(config, over), evaluates=draw.random() < 0.4, reads=draw.random() < 0.4)


def play(schedule: Schedule, rank: int) -> tuple[dict[str, Any], Orders]:
    """What a run comes to, and by which collectives."""
    with noted_collectives() as noted:
        engine = engine_of(schedule.config)
        try:
            numbers = _train(engine, schedule, rank)
            orders = {
                name: hashlib.sha256("\n".join(noted.get(id(part), ())).encode()).hexdigest()[:16]
                for name, part in vars(engine._runtime.group).items()
                if isinstance(part, Channel)
            }
        finally:
            engine.close()
    return numbers, orders


def _train(engine: offloadzero.Engine, schedule: Schedule, rank: int) -> dict[str, Any]:
    losses = []
    for number in range(NUM_STEPS * engine.gradient_accumulation_steps()):
        losses.append(one_step(engine, micro_batch(number, rank, WORLD_SIZE)))
        if schedule.evaluates:
            with torch.no_grad():
                losses.append(engine(micro_batch(1000 + number, rank, WORLD_SIZE)).item())
        if schedule.reads:
            losses.append(float(engine.module.wide.weight.detach().float().sum()))
    states = engine.optimizer.state_dict()["state"]
    named = {f"{number} {key}": value for number, one in states.items() for key, value in one.items()}
    bits = digest({**engine.module.state_dict(), **named})
    return {"losses": losses, "norm": engine.get_global_grad_norm(), **bits}


@contextmanager
def noted_collectives() -> Iterator[dict[int, list[str]]]:
    """By channel: what its collectives are for, in their order."""
    noted: dict[int, list[str]] = {}
    run = Channel._run

    def note(channel: Channel, kind: str, label: str, *given: Any) -> None:
        noted.setdefault(id(channel), []).append(f"{label}: {kind}")
        run(channel, kind, label, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "_run", note)
        yield noted


@contextmanager
def delays(seed: int, rank: int) -> Iterator[None]:
    """Lanes, files, landings, updates, decisions, collectives and Python are slow, on each rank others."""
    slowness = Slowness(WORLD_SIZE * seed + rank)
    with pytest.MonkeyPatch.context() as patch, slowness.everywhere():
        for owner, method, part in (
            (Channel, "_run", "collective"),
            (Executor, "pin", "python"),
            (UnitLeases, "prefetch", "python"),
            (StepCoordinator, "discard_gradients", "python"),
        ):
            patch.setattr(owner, method, slowness.around(getattr(owner, method), part))
        yield


# --- random schedules ---


def play_all(rank: int, seeds: list[int], directory: str) -> dict[str, Any]:
    """By seed: where the delayed run differs from the undelayed one, and what both come to."""
    found = {}
    for seed in seeds:
        schedule = draw_schedule(seed, directory)
        expected, orders = play(schedule, rank)
        with delays(seed, rank):
            numbers, delayed_orders = play(schedule, rank)
        different = [key for key in expected if numbers[key] != expected[key]]
        different += [f"order of {name}" for name in orders if delayed_orders[name] != orders[name]]
        alike = {key: value for key, value in expected.items() if key != "losses"}
        found[str(seed)] = {"different": different, "alike": alike, "orders": orders}
    return found


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, SCHEDULES_PER_START))
def test_delays_that_differ_between_ranks_change_nothing(first: int, tmp_path: Path) -> None:
    """Neither the numbers nor the order of any channel's collectives, which is one on all ranks."""
    seeds = list(range(first, min(first + SCHEDULES_PER_START, NUM_SCHEDULES)))
    by_rank = run_ranks(
        play_all, WORLD_SIZE, tmp_path / "ranks", seeds, str(tmp_path), timeout_s=30 + 4.0 * len(seeds)
    )
    for seed in map(str, seeds):
        for of_rank in by_rank:
            assert of_rank[seed]["different"] == [], f"seed {seed}"
            assert of_rank[seed]["alike"] == by_rank[0][seed]["alike"], f"seed {seed}"
            assert of_rank[seed]["orders"] == by_rank[0][seed]["orders"], f"seed {seed}"
    assert not list(tmp_path.glob("*.bin")), "swap files are left"


# --- planted orders that go by time ---


def prefetch_that_passes_over_what_is_not_updated_yet(patch: pytest.MonkeyPatch) -> None:
    def impatient(leases: UnitLeases) -> None:
        until_s = time.monotonic() + PATIENCE_S
        for move in leases._residency.plan(leases.arena.free_bytes):
            unit = leases._units[move.unit]
            if isinstance(move, Evict):
                leases.release(unit)
                continue
            while not unit.updated.done() and time.monotonic() < until_s:
                time.sleep(0.002)
            if unit.updated.done():
                lease = leases.arena.try_lease(unit.num_bytes, unit.record.name)
                if lease is None:
                    return
                leases.start_fetch(unit, lease)

    patch.setattr(UnitLeases, "prefetch", impatient)


def play_planted(rank: int, directory: str) -> dict[str, list[str]]:
    """By seed: what a delayed run with the plant says, and where it differs from one without both."""
    found = {}
    for seed in range(MAX_PLANTED):
        schedule = draw_schedule(3 * seed, directory, zero_optimization={"stage": 3, **ROOM_FOR_ALL})
        expected, _ = play(schedule, rank)
        said, different = "", []
        begun_s = time.monotonic()
        slow_updates = faults.delays("update.compute", SLOW_UPDATE_S) if rank == 1 else nullcontext()
        with pytest.MonkeyPatch.context() as patch, delays(seed, rank), slow_updates:
            patch.setattr(
                process_groups, "timeout_of_process_group", lambda: timedelta(seconds=PLANTED_TIMEOUT_S)
            )
            prefetch_that_passes_over_what_is_not_updated_yet(patch)
            try:
                numbers, _ = play(schedule, rank)
                different = [key for key in expected if numbers[key] != expected[key]]
            except offloadzero.OffloadError as error:
                said = f"{type(error).__name__}: {error}"
        found[str(seed)] = [said, str(time.monotonic() - begun_s), *different]
        if said:
            break
    return found


def test_an_order_that_goes_by_time_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    by_rank = run_ranks(play_planted, WORLD_SIZE, tmp_path / "ranks", str(tmp_path), timeout_s=90.0)
    for seed in by_rank[0]:
        said = [of_rank[seed][0] for of_rank in by_rank]
        assert all(said) or not any(said), f"seed {seed}: {said}"
        for text, took_s, *different in (of_rank[seed] for of_rank in by_rank):
            assert different == [], f"seed {seed}: a silent mixture"
            assert not text or text.startswith(("StateError: ", "RankError: "))
            assert float(took_s) < PLANTED_TIMEOUT_S + 20
    assert any(text for text, *_ in by_rank[0].values()), "it does not show"


# --- a first gradient that comes at another place on each rank ---


class RoutedBlock(nn.Module):
    """A frozen layer, and an expert that an input may not take."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, takes_expert: bool) -> Tensor:
        x = torch.tanh(self.frozen(x))
        return x + self.expert(x) if takes_expert else x


class Routed(nn.Module):
    """The first block's expert is for all inputs; which have the others says `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(4))

    def forward(self, x: Tensor, takes_experts: bool) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, takes_experts or not number)
        return x.pow(2).mean()


def train_routed(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """The losses of this rank's inputs, of which those of the last rank alone take all experts, and the weights."""
    torch.manual_seed(0)
    config = config_of("host", 3, Path(directory), world_size=world_size)
    engine, *_ = offloadzero.initialize(model=Routed(), config=config)
    losses = []
    for seed in range(NUM_STEPS):
        inputs = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed))
        parts = [rank] if world_size > 1 else [0, 1]
        loss = torch.stack([engine(inputs[part], part == 1) for part in parts]).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = digest(engine.module.state_dict())
    engine.close()
    return {"losses": losses, "weights": weights}


def test_the_first_gradients_may_come_at_another_place_on_each_rank(tmp_path: Path) -> None:
    """One has it before it fetches the block before, for which the other waits before it has any."""
    by_rank = run_ranks(train_routed, 2, tmp_path, 2, str(tmp_path), timeout_s=PLANTED_TIMEOUT_S)
    expected = train_routed(0, 1, str(tmp_path))["losses"]
    assert global_losses([found["losses"] for found in by_rank]) == pytest.approx(expected, rel=1e-5)
    assert by_rank[0]["weights"] == by_rank[1]["weights"]
