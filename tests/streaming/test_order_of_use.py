"""What is fetched over a step, counted; and steps that differ: a stall where they do, never another number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.memory.arena import Lease, align_up
from offloadzero.schedule.prefetch import Fetch, Move, plan_prefetch
from offloadzero.streaming import residency
from offloadzero.streaming.leased_unit import HOME, RELEASED
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_leases import UnitLeases
from tests.streaming.loops import steps
from tests.streaming.test_schedule import fewest_fetches_without_misses, there_and_back
from tests.support import models
from tests.support.cases import IN_FULL, each_pair
from tests.support.models import Stack, features
from tests.support.training import Config, Loop, assert_same, make_config, merge, run_engine

NUM_BLOCKS = 5
BLOCK_BYTES = 8192  # of a models.Block in bf16, with padding


class Counter:
    """The fetches of an engine's units, by number of the block; `stalled` are those that a use had to start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetched: list[int] = []
        self.stalled: list[int] = []
        start_fetch, on_demand = UnitLeases.start_fetch, UnitLeases.lease_on_demand

        def counted_fetch(leases: UnitLeases, unit: Any, lease: Lease) -> None:
            self.fetched.append(_number(unit))
            start_fetch(leases, unit, lease)

        def counted_stall(leases: UnitLeases, unit: Any, **options: bool) -> Lease:
            self.stalled.append(_number(unit))
            return on_demand(leases, unit, **options)

        monkeypatch.setattr(UnitLeases, "start_fetch", counted_fetch)
        monkeypatch.setattr(UnitLeases, "lease_on_demand", counted_stall)

    def take(self) -> tuple[list[int], list[int]]:
        """(fetched, stalled) since the last call."""
        taken = self.fetched, self.stalled
        self.fetched, self.stalled = [], []
        return taken


def _number(unit: Any) -> int:
    return int(unit.record.name.rsplit(".", 1)[1])


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def config_with_room(num_units: int, directory: Path, **over: Any) -> Config:
    """Only the blocks are streamed, and room for `num_units` of them is on the device."""
    config = make_config("host", directory, **over)
    live = {"stage3_max_live_parameters": num_units * BLOCK_BYTES // 2}
    return merge(config, {"zero_optimization": live, "offloadzero": {"units": {"min_leaf_elements": 10**6}}})


def start(make_model: Callable[[], nn.Module], config: Config) -> offloadzero.Engine:
    torch.manual_seed(0)
    return offloadzero.initialize(model=make_model(), config=config)[0]


def train_step(engine: Any, seed: int, *arguments: Any) -> None:
    for micro_batch in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(features(100 * seed + micro_batch), *arguments))
        engine.step()


def stack() -> Stack:
    return Stack(num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize(("room", "accumulation", "clipping"), each_pair([2, 3, 4], [1, 3], [0.0, 0.5]))
def test_a_step_fetches_as_little_as_is_possible_and_waits_for_none(
    room: int, accumulation: int, clipping: float, counter: Counter, tmp_path: Path
) -> None:
    """Every weight changes at the step, so each step begins with nothing; what the turn and the next micro batch
    need soon stays.
    """
    engine = start(stack, config_with_room(room, tmp_path, accumulation=accumulation, clipping=clipping))
    uses = there_and_back(range(NUM_BLOCKS)) * accumulation
    for seed in range(2):
        train_step(engine, seed)
    counter.take()
    # From here on the order is known. The fetches between two steps are those of the next.
    for seed in range(2, 5):
        train_step(engine, seed)
        fetched, stalled = counter.take()
        assert stalled == []
        assert len(fetched) == fewest_fetches_without_misses(tuple(uses), room)
    engine.close()


def test_the_first_step_guesses(counter: Counter, tmp_path: Path) -> None:
    engine = start(stack, config_with_room(3, tmp_path))
    train_step(engine, 0)
    assert counter.stalled == [0]
    engine.close()


class FrozenEnds(Stack):
    """The middle block trains; gradients flow back to it only."""

    def __init__(self) -> None:
        super().__init__(num_blocks=NUM_BLOCKS)
        self.requires_grad_(False)
        self.blocks[2].requires_grad_(True)


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("room", [2, 3, 4, 5])
def test_frozen_units_stay_over_the_end_of_the_step(
    room: int, clipping: float, counter: Counter, tmp_path: Path
) -> None:
    """As many as an optimal choice keeps that knows which unit the step makes stale."""
    engine = start(FrozenEnds, config_with_room(room, tmp_path, clipping=clipping))
    num_steps = 4
    for seed in range(3):
        train_step(engine, seed)
    counter.take()
    for seed in range(3, 3 + num_steps):
        train_step(engine, seed)
    fetched, stalled = counter.take()
    assert stalled == []

    def fewest(steps: int) -> int:
        """What is trained is another unit after each step."""
        uses = [(10 + step if unit == 2 else unit) for step in range(steps) for unit in (0, 1, 2, 3, 4, 3, 2)]
        return fewest_fetches_without_misses(uses, room)

    assert len(fetched) <= fewest(num_steps + 2) - fewest(2)
    engine.close()


def evaluate(engine: Any) -> float:
    with torch.no_grad():
        return float(engine(features(1000)).item())


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_evaluation_leaves_the_order_of_the_steps_alone(
    clipping: float, counter: Counter, tmp_path: Path
) -> None:
    """It has an order of its own, which is learnt as well; a step after it waits for its first unit at most."""
    room = 3
    engine = start(stack, config_with_room(room, tmp_path, clipping=clipping))
    per_step = fewest_fetches_without_misses(tuple(there_and_back(range(NUM_BLOCKS))), room)
    for seed in range(3):
        train_step(engine, seed)
    counter.take()
    for seed in range(3, 6):
        for _ in range(2):
            evaluate(engine)
        fetched, stalled = counter.take()
        assert stalled == []
        assert len(fetched) <= 3 * NUM_BLOCKS
        train_step(engine, seed)
        fetched, stalled = counter.take()
        assert stalled == []
        assert len(fetched) <= per_step + 1
    engine.close()


def test_a_skipped_block_costs_a_stall_where_it_is_skipped(counter: Counter, tmp_path: Path) -> None:
    engine = start(lambda: models.SometimesStack(num_blocks=NUM_BLOCKS), config_with_room(3, tmp_path))
    for seed in range(12):
        skips = seed % 3 == 2
        train_step(engine, seed, (0, 1, 3, 4) if skips else (0, 1, 2, 3, 4))
        _, stalled = counter.take()
        if seed > 1:
            assert len(stalled) <= skips, f"step {seed}"
    engine.close()


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_plans_that_are_kept_are_what_planning_gives(
    clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over skipped blocks, evaluations and changes of the order."""
    plan = ResidencyPolicy.plan
    num_kept = 0

    def compared(policy: ResidencyPolicy, free_bytes: int) -> Sequence[Move]:
        nonlocal num_kept
        protected = policy.protected()  # a fetch may arrive at any time
        with monkeypatch.context() as fixed:
            fixed.setattr(policy, "protected", lambda: protected)
            num_plans = len(policy._plans)
            moves = plan(policy, free_bytes)
            num_kept += len(policy._plans) == num_plans and len(policy.present) < len(policy.streamed)
            fixed.setattr(policy, "_plans", {})
            assert plan(policy, free_bytes) == moves
        return moves

    monkeypatch.setattr(ResidencyPolicy, "plan", compared)
    config = config_with_room(3, tmp_path, clipping=clipping)
    engine = start(lambda: models.SometimesStack(num_blocks=NUM_BLOCKS), config)
    for seed in range(12):
        train_step(engine, seed, (0, 1, 3, 4) if seed % 5 == 4 else (0, 1, 2, 3, 4))
        if seed % 4 == 3:
            with torch.no_grad():
                engine(features(1000), (0, 1, 2, 3, 4))
    engine.close()
    assert num_kept > 50


class Wide(nn.Module):
    """A residual layer of some hidden width, of BLOCK_BYTES or of the half with padding."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.WIDTH, hidden), nn.Linear(hidden, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def small_first() -> Stack:
    """A first unit of half the bytes, like an embedding, before blocks of the same size."""
    widths = iter([40, *[70] * (NUM_BLOCKS - 1)])
    return Stack(lambda: Wide(next(widths)), NUM_BLOCKS)


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_no_use_waits_since_free_bytes_lie_in_two_holes(
    clipping: float, counter: Counter, tmp_path: Path
) -> None:
    """The small unit and two blocks leave the room of half a block; with that of the small one a block fits."""
    engine = start(small_first, config_with_room(3, tmp_path, clipping=clipping))
    executor = engine.optimizer.runtime.executor
    sizes = [align_up(unit.num_bytes) for unit in executor.units if unit.residency is not HOME]
    assert sizes == [BLOCK_BYTES // 2, *[BLOCK_BYTES] * (NUM_BLOCKS - 1)]
    assert executor.leases.arena.num_bytes == 3 * BLOCK_BYTES
    for seed in range(5):
        train_step(engine, seed)
        fetched, stalled = counter.take()
        assert len(fetched) >= NUM_BLOCKS
        assert seed < 2 or stalled == []
    offsets = [unit.lease.offset for unit in executor.units if unit.lease]
    assert offsets == [5 * BLOCK_BYTES // 2, 0, BLOCK_BYTES], "blocks from the begin, others from the end"
    engine.close()


def test_of_reads_outside_of_backward_the_last_two_are_protected() -> None:
    """An operation takes its first weight and its second, of another unit; whatever was read before may leave."""
    policy = ResidencyPolicy(some_units(4), arena_bytes=4 * BLOCK_BYTES)
    for index in range(4):
        policy.entered(index)
        policy.note_read(index, guard=True)
    assert policy.protected() == {2, 3}
    policy.note_read(2, guard=True)
    policy.note_read(0, guard=True)
    assert policy.protected() == {2, 0}


def some_units(number: int) -> list[Any]:
    return [
        SimpleNamespace(
            residency=RELEASED,
            num_bytes=BLOCK_BYTES,
            record=SimpleNamespace(index=index, num_trainable=1, unit_name=str(index)),
        )
        for index in range(number)
    ]


def plans_made_by_step(
    monkeypatch: pytest.MonkeyPatch, *, num_units: int, room: int, num_steps: int = 4
) -> list[int]:
    """How often each of some equal steps plans its moves, with all of them done at once."""
    num_made, by_step = 0, []

    def counted(*arguments: Any, **options: Any) -> list[Move]:
        nonlocal num_made
        num_made += 1
        return plan_prefetch(*arguments, **options)

    monkeypatch.setattr(residency, "plan_prefetch", counted)
    policy = ResidencyPolicy(some_units(num_units), arena_bytes=room * BLOCK_BYTES)

    def move() -> None:
        for one in policy.plan((room - len(policy.present)) * BLOCK_BYTES):
            (policy.entered if isinstance(one, Fetch) else policy.left)(one.unit)

    for _ in range(num_steps):
        num_made = 0
        for index in there_and_back(range(num_units)):
            policy.begin_use(index, evaluating=False)
            if index not in policy.present:
                for victim in policy.victims(BLOCK_BYTES) if len(policy.present) == room else ():
                    policy.left(victim)
                policy.entered(index)
            move()
        policy.finish_step()
        move()
        by_step.append(num_made)
    return by_step


def test_an_order_of_many_uses_has_room_for_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MAX_PLANS", 16)
    assert plans_made_by_step(monkeypatch, num_units=40, room=3)[-1] == 0
    # They have so much memory and no more.
    monkeypatch.setattr(residency, "MAX_BYTES_OF_PLANS", 30 * 2 * (40 // 7 + 28))
    assert plans_made_by_step(monkeypatch, num_units=40, room=30)[-1] > 0


def test_so_have_the_plans_of_many_units_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of each plan must not grow with the units on the device as a set of them does."""
    assert plans_made_by_step(monkeypatch, num_units=1100, room=500, num_steps=3)[-1] == 0


# --- steps that differ, bit for bit


class Branching(Stack):
    """Which of its two halves runs depends on the data."""

    def run_blocks(self, x: Tensor) -> Tensor:
        half = self.blocks[:2] if bool(x.float().sum() > 0) else self.blocks[2:]
        for block in half:
            x = block(x)
        return x


class Routed(Stack):
    """Like a mixture of experts: in each of three layers each row goes to the block it chooses."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for layer in range(3):
            chosen = (x.float()[:, layer] * 10).long().remainder(len(self.blocks))
            parts = torch.zeros_like(x)
            for index in chosen.unique().tolist():
                rows = (chosen == index).nonzero()[:, 0]
                parts = parts.index_add(0, rows, self.blocks[index](x[rows]))
            x = x + parts
        return x


def evaluate_at_times(engine: Any, seed: int) -> list[float]:
    return [evaluate(engine)] if seed % 2 else []


def ragged(engine: Any, seed: int) -> Any:
    return engine(features(seed, rows=5))


def skipping(engine: Any, seed: int) -> Any:
    return engine(features(seed, rows=5), (0, 1, 3) if seed % 3 == 2 else (0, 1, 2, 3))


NUM_DIFFERING = 9 if IN_FULL else 6
DIFFERING: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "branch": (Branching, steps(ragged, NUM_DIFFERING)),
    "skipped": (models.SometimesStack, steps(skipping, NUM_DIFFERING)),
    "routed": (Routed, steps(ragged, NUM_DIFFERING)),
    "evaluated": (Stack, steps(ragged, NUM_DIFFERING, after=evaluate_at_times)),
    "routed, evaluated": (Routed, steps(ragged, NUM_DIFFERING, after=evaluate_at_times)),
}
ROOMS = [("host", 1), ("host", 3), ("nvme", 2), ("mixed", 3)]
DIFFERING_CELLS = each_pair(DIFFERING, [0.0, 0.5], ROOMS)


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("name", DIFFERING)
def test_steps_that_differ_train_the_same_everywhere(name: str, clipping: float, tmp_path: Path) -> None:
    make_model, loop = DIFFERING[name]
    expected = run_engine(make_model, loop, make_config("resident", tmp_path, clipping=clipping))
    for placement, room in (place for *cell, place in DIFFERING_CELLS if cell == [name, clipping]):
        config = make_config(placement, tmp_path, clipping=clipping)
        live = {"stage3_max_live_parameters": room * BLOCK_BYTES // 2}
        assert_same(run_engine(make_model, loop, merge(config, {"zero_optimization": live})), expected)


# --- what protects a lease ends in time


class CheckpointedPartly(models.WithUnusedBlock):
    """Its blocks' gradients never all arrive, and each is recomputed for a node of its own."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_a_recomputation_does_not_need_room_beside_the_unit_before_it(tmp_path: Path) -> None:
    loop = steps(ragged, 3)
    expected = run_engine(CheckpointedPartly, loop, make_config("resident", tmp_path))
    assert_same(run_engine(CheckpointedPartly, loop, make_config("host", tmp_path)), expected)


def test_a_forward_after_backward_does_not_need_room_beside_a_frozen_unit(tmp_path: Path) -> None:
    """What backward touched last is frozen, so no gradient says that it is done with."""

    class FrozenFirst(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].requires_grad_(False)

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(6):
            loss = engine(features(seed))
            engine.backward(loss)
            with torch.no_grad():
                losses.append(float(engine.module.blocks[3](torch.ones(1, 24, dtype=torch.bfloat16)).sum()))
            engine.step()
        return losses

    keep = {"accumulation": 2, "offloadzero": {"update": {"in_backward": False}}}
    expected = run_engine(FrozenFirst, loop, make_config("resident", tmp_path, **keep))
    assert_same(run_engine(FrozenFirst, loop, make_config("host", tmp_path, **keep)), expected)
