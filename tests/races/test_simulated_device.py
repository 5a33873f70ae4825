"""The engine on a device where everything runs later than it was launched: bitwise what the CPU computes."""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offloadzero.errors import StateError
from tests.simulated.backward import Backward
from tests.simulated.checked import checked
from tests.simulated.device import simulated
from tests.streaming.loops import MODELS, NUM_STEPS
from tests.streaming.loops import take_inputs as take_all_inputs
from tests.support import parity
from tests.support.cases import each_pair
from tests.support.models import PartlyUnusedBlock, Stack, features
from tests.support.schedules import draw_schedule, reference
from tests.support.training import PLACEMENTS, Loop, Outcome, assert_same, make_config, merge, run_engine

NUM_SCHEDULES = int(os.environ.get("OFFLOADZERO_TEST_SCHEDULES", "9"))  # more to soak


IN_FULL = "OFFLOADZERO_TEST_SIMULATED" in os.environ  # each cell in every way of running backward, not in one
NUM_PARITY_STEPS = parity.NUM_STEPS if IN_FULL else 2
# In the first one the order of the units is not known yet; the third comes behind one in which it was.
NUM_LOOP_STEPS = NUM_STEPS if IN_FULL else 3


def take_inputs(make_input: Callable[[int], Tensor]) -> Loop:
    """The plain training loop."""
    return take_all_inputs(make_input, NUM_LOOP_STEPS)


def each_way(cells: Iterable[Any]) -> list[Any]:
    """Every cell of a matrix with every way of running backward, or with one of them in turn."""
    ways = list(Backward)
    return [
        pytest.param(*cell, way, id="-".join(map(str, (*cell, way.value))))
        for number, cell in enumerate(cells)
        for place, way in enumerate(ways)
        if IN_FULL or place == (number + number // len(ways)) % len(ways)
    ]


class Reentrant(Stack):
    """torch's older checkpointing: a backward inside the backward runs each pair of blocks again."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = checkpoint(lambda h, f=first, s=second: s(f(h)), x, use_reentrant=True)
        return x


CELL_MODELS = {**MODELS, "reentrant checkpointing": (Reentrant, features, {})}
# Each model in each placement, with and without clipping, or in two of the placements, of which one has clipping.
CELLS = [
    (name, place, clipping)
    for (at, name), (turn, place) in itertools.product(enumerate(CELL_MODELS), enumerate(PLACEMENTS))
    for clipping in (0.0, 0.5)
    if IN_FULL or ((at + turn) % len(PLACEMENTS) < 2 and (clipping > 0) == bool((at + turn) % 2))
]


@pytest.mark.parametrize(("name", "placement", "clipping", "way"), each_way(CELLS))
def test_model(
    name: str,
    placement: str,
    clipping: float,
    way: Backward,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_model, make_input, over = CELL_MODELS[name]
    config = make_config(placement, tmp_path, clipping=clipping, **over)
    expected = run_engine(make_model, take_inputs(make_input), config)
    with checked(), simulated(monkeypatch, seed=len(name), backward=way):
        found = run_engine(make_model, take_inputs(make_input), config)
    assert_same(found, expected)


@pytest.mark.parametrize(("placement", "way"), each_way([(name,) for name in PLACEMENTS]))
def test_muon(placement: str, way: Backward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices go to the device for their update, and back."""
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}}
    loop = take_inputs(features)
    expected = run_engine(Stack, loop, merge(make_config("resident", tmp_path, clipping=0.5), muon))
    with checked(), simulated(monkeypatch, backward=way):
        config = merge(make_config(placement, tmp_path, clipping=0.5), muon)
        found = run_engine(Stack, loop, config)
    assert_same_but_for_the_norm(found, expected)


@functools.cache
def resident_run(case: parity.Case) -> Outcome:
    """Of the matrix of docs/how-it-works.md."""
    with tempfile.TemporaryDirectory() as directory:
        return parity.run_case(case, "resident", directory, num_steps=NUM_PARITY_STEPS)


def assert_same_but_for_the_norm(found: Outcome, expected: Outcome) -> None:
    """The norm is taken in fp64, of gradients on the device in another order of summation."""
    if found.norm is not None and expected.norm is not None:
        assert found.norm == pytest.approx(expected.norm, rel=1e-14)
        found.norm = expected.norm
    assert_same(found, expected)


# Each case in each placement, or in one of those that move things in turn.
PARITY_CELLS = (
    list(itertools.product(parity.CASES, PLACEMENTS))
    if IN_FULL
    else list(zip(parity.CASES, itertools.cycle(["mixed", "nvme", "host"])))
)


@pytest.mark.parametrize(("case", "placement", "way"), each_way(PARITY_CELLS))
def test_parity(
    case: parity.Case, placement: str, way: Backward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulating, clipping, checkpointing and tied: the matrix of docs/how-it-works.md."""
    expected = resident_run(case)
    with checked(), simulated(monkeypatch, backward=way):
        found = parity.run_case(case, placement, tmp_path, num_steps=NUM_PARITY_STEPS)
    assert_same_but_for_the_norm(found, expected)


class UsedBlock(PartlyUnusedBlock):
    """Of the same shape, with all of its parameters in use but for those of the last blocks of a model."""

    is_last = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.is_last else y + self.unused(x) * self.scale.sum()


class LastBlocksPartlyUnused(Stack):
    """In backward the last two blocks, some of whose parameters take no part, keep all gradient leases to the end."""

    def __init__(self) -> None:
        super().__init__(UsedBlock, num_blocks=6)
        for block in list(self.blocks)[-2:]:
            block.is_last = True


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_a_gradient_without_a_lease(clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is the allocator's, which must not give it to another while its copy home is under way."""
    config = make_config("host", tmp_path, clipping=clipping)
    expected = run_engine(LastBlocksPartlyUnused, take_inputs(features), config)
    with checked(), simulated(monkeypatch, slow=["gradient-d2h"]):
        found = run_engine(LastBlocksPartlyUnused, take_inputs(features), config)
    assert_same(found, expected)


class Branches(Stack):
    """Each block runs on a second stream as well, beside the computation; the two meet at the end."""

    machine: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x.to(self.out_dtype()))
        if self.machine is None:
            start, beside = x, []
            for block in self.blocks:
                x = block(x)
                beside.append(block(start))
            return self.loss(x + sum(beside))
        computing, side = self.machine.current_stream, self.machine.new_stream("side")
        side.wait_event(computing.record())
        start, beside = x, []
        for block in self.blocks:
            x = block(x)
            with self.machine.launching_on(side):
                beside.append(block(start))
        computing.wait_event(side.record())
        return self.loss(x + sum(beside))


@pytest.mark.parametrize(
    ("placement", "slow", "poison"),
    each_pair(["host", "nvme", "mixed"], ["fetch", "side", "default"], [False, True], in_full=IN_FULL),
)
def test_two_streams_compute(
    slow: str, placement: str, poison: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that has arrived for one stream has not for the other, and leaves when both have done with it."""
    own = {"poison_released_leases": poison}
    config = make_config(placement, tmp_path, clipping=0.5, offloadzero=own)
    expected = run_engine(Branches, take_inputs(features), config)
    with simulated(monkeypatch, slow=[slow]) as device:
        monkeypatch.setattr(Branches, "machine", device.machine)
        found = run_engine(Branches, take_inputs(features), config)
    assert_same(found, expected)


def test_a_captured_graph_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would replay with leases that hold other units; what comes after the capture trains as if it had not been."""
    own = {"observe": {"run_dir": str(tmp_path / "run")}}  # marks are no part of the capture either
    config = make_config("host", tmp_path, clipping=0.5, offloadzero=own)
    expected = run_engine(Stack, take_inputs(features), config)

    def loop(engine: Any) -> list[float]:
        device.is_capturing = True
        before = device.machine.counts["events"]
        with pytest.raises(StateError, match="captured"):
            engine(features(0))
        assert device.machine.counts["events"] == before
        device.is_capturing = False
        return take_inputs(features)(engine)

    with checked(), simulated(monkeypatch) as device:
        assert_same(run_engine(Stack, loop, config), expected)


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_random_schedule(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, placement, budgets, updates and loop are drawn from the seed, and what runs on the device when."""
    schedule = draw_schedule(seed)
    own = {**schedule.placed["offloadzero"], "nvme_path": str(tmp_path)}
    way = list(Backward)[seed % len(Backward)]
    with checked(), simulated(monkeypatch, seed=seed, backward=way):
        found = run_engine(schedule.make_model, schedule.loop, {**schedule.placed, "offloadzero": own})
    assert_same_but_for_the_norm(found, reference(seed))


def test_a_resident_units_update_does_not_hold_up_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream waits for it, not the thread that launches: with all on the device the only waits are for losses."""
    config = make_config("resident", tmp_path, clipping=0.0)

    def loop(engine: Any) -> list[float]:
        for seed in range(4):
            engine.backward(engine(features(seed)))
            engine.step()
        return []

    expected = run_engine(Stack, loop, config)
    with checked(), simulated(monkeypatch, slow=["update-device"]) as device:
        waits = device.machine.counts
        counted = []

        def counting(engine: Any) -> list[float]:
            before = waits["host waits of the launching thread"]
            loop(engine)
            counted.append(waits["host waits of the launching thread"] - before)
            return []

        found = run_engine(Stack, counting, config)
    found.norm = expected.norm = None
    assert_same(found, expected)
    assert counted == [0]
