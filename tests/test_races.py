"""A missing wait shows: everything asynchronous is slowed down at random, and the bits stay the same.

The second half plants bugs, each a wait left out, and asserts that the comparison of the first half catches it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.errors import NonFiniteError, OffloadError
from offloadzero.memory.arena import Arena, Lease
from offloadzero.memory.lanes import Lane, LaneTicket
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED
from offloadzero.native.aio import AioEngine
from offloadzero.optim.staging import ChunkStager, StagedChunk
from offloadzero.optim.update import UpdatePipeline
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.gradients import GradientCollector
from offloadzero.streaming.stepping import Stepper
from tests import models
from tests.models import Stack, TiedLM, features, tokens
from tests.training import (
    Config,
    Loop,
    Outcome,
    assert_same,
    differences,
    make_config,
    merge,
    run_engine,
)

NUM_STEPS = 4
MAX_DELAY_S = 0.003
NUM_SCHEDULES = int(os.environ.get("OFFLOADZERO_TEST_SCHEDULES", "36"))  # more to soak


class Slowness:
    """Sleeps drawn from a seed, in every thread; which parts are slow is drawn too."""

    PARTS = ("lane", "read", "write", "compute", "land", "decide")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        # Some parts are fast, some slow: uniform noise everywhere keeps the order of things.
        self._factors = {part: self._random.choice((0.0, 0.2, 1.0)) for part in self.PARTS}

    def draw_s(self, part: str) -> float:
        with self._lock:
            chance, amount = self._random.random(), self._random.random()
        return MAX_DELAY_S * self._factors[part] * amount if chance < 0.5 else 0.0

    def sleep(self, part: str) -> None:
        duration_s = self.draw_s(part)
        if duration_s:
            time.sleep(duration_s)

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`function` with a sleep before and one after."""

        def slow(*arguments: Any, **options: Any) -> Any:
            self.sleep(part)
            result = function(*arguments, **options)
            self.sleep(part)
            return result

        return slow

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lanes' tasks, file operations, chunks of Adam and landings."""
        launch = Lane._launch

        def slow_launch(lane: Lane, task: Callable[[], None], fence: Any) -> Any:
            self.sleep("lane")
            return launch(lane, self.around(task, "lane"), fence)

        monkeypatch.setattr(Lane, "_launch", slow_launch)
        for name in ("read", "write"):
            monkeypatch.setattr(AioEngine, name, self._slow_file_operation(getattr(AioEngine, name), name))
        for owner, method, part in (
            (UpdatePipeline, "_compute", "compute"),
            (UpdatePipeline, "_start_reads", "compute"),
            (GradientCollector, "_merge", "land"),
            (GradientCollector, "_measure", "land"),
            (Stepper, "_decide", "decide"),
        ):
            monkeypatch.setattr(owner, method, self.around(getattr(owner, method), part))

    def _slow_file_operation(self, submit: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The engine's own fault: the completion is seen late, other operations overtake."""

        def slow(engine: AioEngine, *arguments: Any, **options: Any) -> Any:
            delay_ms = int(1000 * self.draw_s(part) + 0.5)
            if delay_ms:
                engine.inject("delay", 1, delay_ms)
            return submit(engine, *arguments, **options)

        return slow


def loop_over(make_input: Callable[[int], Any], *, with_evaluation: bool = False) -> Loop:
    """Training steps; with evaluation also a forward without gradients after each, and a read of a weight."""

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS * engine.gradient_accumulation_steps()):
            loss = engine(make_input(seed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
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


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The undisturbed resident run of a scenario."""
    known: dict[str, Outcome] = {}
    directory = tmp_path_factory.mktemp("references")

    def reference(name: str) -> Outcome:
        if name not in known:
            make_model, loop, options = SCENARIOS[name]
            known[name] = run_engine(make_model, loop, make_config("resident", directory, **options))
        return known[name]

    return reference


def scenario_config(name: str, placement: str, directory: Path, *, live: int = 1) -> Config:
    """Small chunks, so that one record's update has several."""
    config = make_config(placement, directory, **SCENARIOS[name][2])
    zero = {"stage3_max_live_parameters": live}
    return merge(config, {"zero_optimization": zero, "offloadzero": {"update": {"chunk_elements": 4096}}})


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_random_delays_change_nothing(
    seed: int,
    references: Callable[[str], Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = list(SCENARIOS)
    name, draw = names[seed % len(names)], random.Random(seed)
    placement = PLACEMENTS[seed // len(names) % len(PLACEMENTS)]
    expected = references(name)
    config = scenario_config(name, placement, tmp_path, live=draw.choice(LIVE_PARAMETERS))
    Slowness(seed).install(monkeypatch)
    make_model, loop, _ = SCENARIOS[name]
    assert_same(run_engine(make_model, loop, config), expected)


# --- the suite catches what it is for


def planted(name: str, placement: str, directory: Path, expected: Outcome, *, live: int = 1) -> list[str]:
    """How a run with a bug in it differs: the differences, or the failure it stopped with."""
    make_model, loop, _ = SCENARIOS[name]
    try:
        outcome = run_engine(make_model, loop, scenario_config(name, placement, directory, live=live))
    except NonFiniteError as error:  # poison that was trained on
        return [str(error)]
    return differences(outcome, expected)


@pytest.fixture
def expect_caught(references: Callable[[str], Outcome], tmp_path: Path) -> Callable[..., None]:
    """Asserts that a scenario passes; `plant()` puts the bug in; then that it does not."""

    def check(name: str, placement: str, plant: Callable[[], None], *, live: int = 1) -> None:
        expected = references(name)
        assert planted(name, placement, tmp_path, expected, live=live) == []
        plant()
        assert planted(name, placement, tmp_path, expected, live=live) != []

    return check


def slow_updates(monkeypatch: pytest.MonkeyPatch, duration_s: float = 0.005) -> None:
    compute = UpdatePipeline._compute

    def slow(pipeline: UpdatePipeline, chunk: Any) -> None:
        time.sleep(duration_s)
        compute(pipeline, chunk)

    monkeypatch.setattr(UpdatePipeline, "_compute", slow)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("name", ["in backward", "at the step"])
def test_fetch_that_does_not_wait_for_the_update_is_caught(
    name: str, placement: str, expect_caught: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_updates(monkeypatch)
    start_fetch = Executor._start_fetch

    def impatient(executor: Executor, unit: Any, lease: Lease) -> None:
        updated, unit.updated = unit.updated, FINISHED
        try:
            start_fetch(executor, unit, lease)
        finally:
            unit.updated = updated

    expect_caught(name, placement, lambda: monkeypatch.setattr(Executor, "_start_fetch", impatient))


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_use_that_does_not_wait_for_the_fetch_is_caught(
    placement: str, expect_caught: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Lane._launch

    def slow_launch(lane: Lane, task: Callable[[], None], fence: Any) -> Any:
        if lane.name == "fetch":
            time.sleep(0.005)
        return launch(lane, task, fence)

    monkeypatch.setattr(Lane, "_launch", slow_launch)

    def plant() -> None:
        monkeypatch.setattr(LaneTicket, "order_compute", lambda _: None)

    expect_caught("at the step", placement, plant)


def test_lease_released_while_in_use_is_caught(
    expect_caught: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is protected: the next fetch takes the lease of the unit that is computing."""

    def plant() -> None:
        pin = Executor.pin

        def pin_and_forget(executor: Executor, index: int, **options: Any) -> None:
            pin(executor, index, **options)
            unit = executor._units[index]
            if unit.lease is not None:
                unit.lease.release()  # poisons
                unit.lease = executor._arena.try_lease(unit.record.param_bytes, "again")

        monkeypatch.setattr(Executor, "pin", pin_and_forget)

    expect_caught("at the step", "host", plant)


def test_lease_given_to_the_next_before_its_copy_has_left_is_caught(
    expect_caught: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient lease that is handed on before its copy to the host has run."""
    copy_to_host = GradientCollector._copy_to_host

    def plant() -> None:
        def early(
            collector: GradientCollector, state: Any, flat: Any, lease: Any, target: Any, before: Any
        ) -> Any:
            give_back = collector._device_leases.give_back
            give_back(lease)
            lease.temporary = True  # the copy does not give it back again
            submit = collector._d2h.submit

            def slow_submit(task: Callable[[], None], **options: Any) -> Any:
                def slow() -> None:
                    time.sleep(0.005)
                    task()

                return submit(slow, **options)

            monkeypatch.setattr(collector._d2h, "submit", slow_submit)
            try:
                return copy_to_host(collector, state, flat, lease, target, before)
            finally:
                monkeypatch.setattr(collector._d2h, "submit", submit)
                lease.temporary = False

        monkeypatch.setattr(GradientCollector, "_copy_to_host", early)

    expect_caught("at the step", "host", plant)


@pytest.mark.parametrize("name", ["in backward", "at the step"])
def test_update_that_starts_before_the_gradient_has_landed_is_caught(
    name: str, expect_caught: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Lane._launch

    def slow_launch(lane: Lane, task: Callable[[], None], fence: Any) -> Any:
        if lane.name == "gradient-d2h":
            time.sleep(0.005)
        return launch(lane, task, fence)

    monkeypatch.setattr(Lane, "_launch", slow_launch)
    land = GradientCollector._land

    def impatient(collector: GradientCollector, state: Any, done: Any, _after: Any, merge_: Any) -> None:
        land(collector, state, done, [], merge_)

    expect_caught(name, "host", lambda: monkeypatch.setattr(GradientCollector, "_land", impatient))


def test_write_that_is_not_awaited_before_the_next_read_is_caught(
    expect_caught: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update whose ticket is done before its data is on the drive."""
    write = TieredStore.write

    def slow_write(store: TieredStore, segment: Any, source: torch.Tensor, **options: Any) -> Any:
        if store.nvme is not None and segment.extent is not None:
            store.nvme.engine.inject("delay", 1, 3)
        return write(store, segment, source, **options)

    monkeypatch.setattr(TieredStore, "write", slow_write)

    def plant() -> None:
        late: list[tuple[TieredStore, Any, torch.Tensor, dict[str, Any]]] = []

        def held_back(store: TieredStore, segment: Any, source: torch.Tensor, **options: Any) -> Any:
            late.append((store, segment, source.clone(), options))
            if len(late) > 3:
                write(late[0][0], late[0][1], late[0][2], **late[0][3]).wait()
                del late[0]
            return FINISHED

        monkeypatch.setattr(TieredStore, "write", held_back)

    expect_caught("in backward", "nvme", plant)


def test_staging_slot_used_again_before_its_writes_is_caught(
    expect_caught: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reads of the next chunk land in memory that is still being written to the drive."""

    def plant() -> None:
        write_back = ChunkStager.write_back
        write = TieredStore.write

        def forgetful(stager: ChunkStager, chunk: StagedChunk, **options: Any) -> Any:
            slot = chunk.slot
            writes = write_back(stager, chunk, **options)
            if slot is not None:
                slot.users = FINISHED
            return writes

        class Late:
            """A write whose source is read when somebody waits for it."""

            def __init__(self, submit: Callable[[], Any]) -> None:
                self._submit = submit
                self._ticket: Any = None
                self._lock = threading.Lock()

            def wait(self) -> None:
                with self._lock:
                    if self._ticket is None:
                        time.sleep(0.02)
                        self._ticket = self._submit()
                self._ticket.wait()

            def done(self) -> bool:
                return self._ticket is not None and self._ticket.done()

        def late_write(store: TieredStore, segment: Any, source: torch.Tensor, **options: Any) -> Any:
            if segment.extent is None:
                return write(store, segment, source, **options)
            return Late(lambda: write(store, segment, source, **options))

        monkeypatch.setattr(ChunkStager, "write_back", forgetful)
        monkeypatch.setattr(TieredStore, "write", late_write)

    expect_caught("at the step", "nvme", plant)


def test_states_read_ahead_and_edited_since_are_caught(
    expect_caught: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update would start from the states as they were during backward."""

    def same_chunk(chunk: StagedChunk, record: Any, start: int, stop: int) -> bool:
        return (chunk.record, chunk.start, chunk.stop) == (record, start, stop)

    expect_caught(
        "edited before the step", "nvme", lambda: monkeypatch.setattr(StagedChunk, "matches", same_chunk)
    )


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
    released = [p for p in engine.module.blocks.parameters() if bool(p.data.isnan().all())]
    assert released
    engine.close()
    with pytest.raises(OffloadError, match="closed"):
        engine(features(0))
