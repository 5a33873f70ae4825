"""What the inputs of checkpointed units take is what the plan says, or what the tables say beside it."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.activations import memory as activation_memory
from offloadzero.activations import store as activations
from offloadzero.config import load_config
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.memory import arena, device
from offloadzero.memory.lanes import Accelerator
from offloadzero.planning.checkpointed_inputs import INPUTS_AHEAD, NUM_INPUT_STAGING
from tests.simulated.checked import checked
from tests.simulated.counting import TEMPORARY_BYTES, counting
from tests.simulated.device import SimulatedDevice, simulated
from tests.streaming.checkpointed import NUM_STEPS, config_with, features, loop, make_engine
from tests.support import models
from tests.support.models import NUM_BLOCKS, Stack
from tests.support.training import assert_same, merge, run_engine

AWAY = ("host", "nvme")
NUM_BATCHES = int(os.environ.get("OFFLOADZERO_TEST_RAGGED_BATCHES", "10"))
EACH = 8192  # what an input takes: 97 rows of 24 in bf16, to whole pages


def planned(tier: str, directory: Path, *, input_bytes: int | str = EACH, **options: Any) -> dict[str, Any]:
    block = {"activation_checkpoints": {"tier": tier, "input_bytes": input_bytes}}
    return merge(config_with(tier, directory, **options), {"offloadzero": block})


def make_planned(
    tier: str, directory: Path, make_model: Callable[[], nn.Module] = Stack, **options: Any
) -> Any:
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=make_model(), config=planned(tier, directory, **options))
    return engine


class Taken:
    """Bytes that are taken of each kind, now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host: list[int] = []
        self.device: list[int] = []
        for module in (arena, activation_memory, offloadzero.memory.store):
            monkeypatch.setattr(module, "allocate_host", self._noting(module.allocate_host, self.host))
        monkeypatch.setattr(device.CpuDevice, "allocate", self._noting_method(device.CpuDevice.allocate))

    @staticmethod
    def _noting(take: Any, notes: list[int]) -> Any:
        def noting(num_bytes: int) -> Any:
            notes.append(num_bytes)
            return take(num_bytes)

        return noting

    def _noting_method(self, take: Any) -> Any:
        def noting(of: Any, num_bytes: int) -> Any:
            self.device.append(num_bytes)
            return take(of, num_bytes)

        return noting


@pytest.mark.parametrize("tier", AWAY)
def test_nothing_is_taken_beside_the_plan(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Taken(monkeypatch)
    engine = make_planned(tier, tmp_path)
    reserved = engine.reserved_bytes()
    loop(engine)
    assert engine.reserved_bytes() == reserved
    assert (sum(taken.device), sum(taken.host)) == (reserved["device"], reserved["host"])
    files = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert files == reserved["nvme"] + 4096 * len(list(tmp_path.iterdir()))
    without = make_engine(tier, tmp_path)
    of_states = without.reserved_bytes()
    in_plan = {name: reserved[name] - of_states[name] for name in reserved}
    assert in_plan == {
        "device": (1 + INPUTS_AHEAD[engine.optimizer.runtime.plan.inputs.tier]) * EACH,
        "host": NUM_BLOCKS * EACH if tier == "host" else 2 * NUM_INPUT_STAGING * EACH,
        "nvme": NUM_BLOCKS * EACH if tier == "nvme" else 0,
    }
    without.close()
    table = engine.memory_table()
    assert "activation fetches" in table
    assert "activation checkpoints" in table
    assert "beside the plan" not in table
    engine.close()


@pytest.mark.parametrize("tier", AWAY)
def test_what_is_taken_beside_the_plan_is_told(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Taken(monkeypatch)
    engine = make_engine(tier, tmp_path)
    before = engine.reserved_bytes()
    assert (sum(taken.device), sum(taken.host)) == (before["device"], before["host"])
    loop(engine)
    reserved = engine.reserved_bytes()
    assert (sum(taken.device), sum(taken.host)) == (reserved["device"], reserved["host"])
    assert 0 < reserved["device"] - before["device"] <= (1 + activations_ahead(engine)) * EACH
    assert engine.memory_table().count("activation checkpoints so far, beside the plan") == (
        2 if tier == "host" else 3
    )
    engine.close()


def test_each_file_engine_says_what_it_is_of(tmp_path: Path) -> None:
    engine = make_planned("nvme", tmp_path, placement="nvme")

    def lines() -> list[str]:
        return [line.strip() for line in engine.memory_table().splitlines() if "file engine" in line]

    of_states, of_inputs = lines()
    assert of_states.startswith("file engine of parameters and states: ")
    assert of_inputs.startswith("file engine of activation checkpoints: ")
    assert of_inputs.endswith("; no buffers so far")
    loop(engine)
    assert lines()[0] == of_states
    assert lines()[1].startswith("file engine of activation checkpoints: ")
    assert "no buffers" not in lines()[1]
    engine.close()


def activations_ahead(engine: Any) -> int:
    return int(engine.optimizer.runtime.activations._home.num_ahead)


@pytest.mark.parametrize("tier", AWAY)
def test_the_device_and_what_is_pinned_hold_no_more_than_the_plan(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_engine(Stack, loop, planned(tier, tmp_path))

    def looking(engine: Any) -> list[float]:
        assert sum(simulation.pinned.values()) == engine.reserved_bytes()["host"]
        assert counts.of[TEMPORARY_BYTES] == engine.reserved_bytes()["device"]
        losses = loop(engine)
        engine.synchronize()
        assert sum(simulation.pinned.values()) == engine.reserved_bytes()["host"]
        assert counts.of[TEMPORARY_BYTES] == engine.reserved_bytes()["device"]
        return losses

    with counting() as counts, checked(), simulated(monkeypatch, slow=["activation-h2d"]) as simulation:
        assert_same(run_engine(Stack, looking, planned(tier, tmp_path)), expected)


@pytest.mark.parametrize("tier", AWAY)
def test_an_input_that_the_plan_has_no_room_for_is_refused(tier: str, tmp_path: Path) -> None:
    engine = make_planned(tier, tmp_path, input_bytes=4096)
    expected = (
        r"^blocks\.0: offloadzero\.activation_checkpoints\.input_bytes: 8,192 bytes do not fit in what is planned on "
        rf"{tier} for the inputs of checkpointed units \(16,384 of 16,384 bytes are free, at most 4,096 in one "
        r"piece\)\. Set the key to the bytes of all inputs of one unit's call, each rounded up to 4,096, "
    )
    with pytest.raises(BudgetError, match=expected):
        engine(features(0))
    engine.close()


def test_graphs_that_live_at_once_need_a_multiple(tmp_path: Path) -> None:
    """Who is refused goes on with one at a time."""
    engine = make_planned("host", tmp_path)
    expected = loop(engine)
    engine.close()
    engine = make_planned("host", tmp_path)
    first = engine(features(0))
    with pytest.raises(BudgetError, match=r"blocks\.0: .*input_bytes: 8,192 bytes do not fit .* on host"):
        engine(features(1))
    del first
    assert loop(engine) == expected
    engine.close()


@pytest.mark.parametrize("tier", AWAY)
def test_the_plan_is_within_the_budgets(tier: str, tmp_path: Path) -> None:
    engine = make_planned(tier, tmp_path, placement="nvme")
    reserved = engine.reserved_bytes()
    engine.close()
    for of, line in (("host", "activation"), ("nvme", "activation checkpoints")):
        if of == "nvme" and tier == "host":
            continue
        config = planned(tier, tmp_path, placement="nvme")
        tight = merge(config, {"offloadzero": {"budgets": {of: reserved[of] - 1}}})
        with pytest.raises(BudgetError, match=rf"offloadzero\.budgets\.{of}: [\s\S]*{line}"):
            offloadzero.initialize(model=Stack(), config=tight)
        fitting = merge(config, {"offloadzero": {"budgets": {of: reserved[of]}}})
        engine, *_ = offloadzero.initialize(model=Stack(), config=fitting)
        engine.close()


ADVICE = (
    "What would make it fit: a smaller offloadzero.activation_checkpoints.input_bytes ({} of this are for inputs), "
    "another offloadzero.activation_checkpoints.tier, "
)


@pytest.mark.parametrize(
    ("tier", "of", "inputs"),
    [
        ("nvme", "host", "4.00 MiB"),
        ("nvme", "device", "3.00 MiB"),
        ("nvme", "nvme", f"{NUM_BLOCKS}.00 MiB"),
        ("host", "host", f"{NUM_BLOCKS}.00 MiB"),
        ("host", "device", "2.00 MiB"),
    ],
)
def test_a_start_that_does_not_fit_names_the_key(tier: str, of: str, inputs: str, tmp_path: Path) -> None:
    config = planned(tier, tmp_path, input_bytes="1MiB", placement="nvme")
    config = merge(config, {"offloadzero": {"budgets": {of: "64KiB"}}})
    with pytest.raises(BudgetError) as caught:
        offloadzero.initialize(model=Stack(), config=config)
    assert f"offloadzero.budgets.{of}: " in str(caught.value)
    assert ADVICE.format(inputs) in str(caught.value)


def test_a_start_that_the_machine_cannot_hold_says_what_was_added_up(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        offloadzero.initialize(model=Stack(), config=planned("host", tmp_path, input_bytes="1TiB"))
    text = str(caught.value)
    assert text.startswith(
        f"host: {NUM_BLOCKS + 2}.00 TiB are needed (host {NUM_BLOCKS}.00 TiB and device 2.00 TiB: the memory of this "
        "device is the host's), "
    )
    assert ADVICE.format(f"{NUM_BLOCKS + 2}.00 TiB") in text


@pytest.mark.parametrize("of", ["device", "host", "nvme"])
def test_a_start_without_the_key_does_not_name_it(of: str, tmp_path: Path) -> None:
    config = config_with("nvme", tmp_path, placement="nvme")
    with pytest.raises(BudgetError, match="What would make it fit: ") as caught:
        offloadzero.initialize(
            model=Stack(), config=merge(config, {"offloadzero": {"budgets": {of: "4KiB"}}})
        )
    assert "input_bytes" not in str(caught.value)


def test_the_key_is_for_inputs_that_move() -> None:
    block = {"activation_checkpoints": {"input_bytes": "1MiB"}}
    with pytest.raises(ConfigError, match=r'activation_checkpoints\.input_bytes .*"tier" is device'):
        load_config({"offloadzero": block})


class KeepingBlock(models.Block):
    """Keeps its inputs, as a script that looks at activations does."""

    kept: list[tuple[Tensor, Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append((x.detach()[1:], x.detach()[1:].clone()))
        return super().forward(x)


@pytest.mark.parametrize("tier", AWAY)
def test_an_input_that_a_script_keeps_stays_as_it_is(tier: str, tmp_path: Path) -> None:
    engine = make_engine(tier, tmp_path, lambda: Stack(KeepingBlock))
    kept: list[tuple[Tensor, Tensor]] = []
    for block in engine.module.blocks:
        block.kept = kept
    loop(engine)
    assert len(kept) == 2 * NUM_BLOCKS * NUM_STEPS
    assert all(torch.equal(view, copy) for view, copy in kept)
    engine.close()


def test_what_is_too_small_goes_before_something_larger_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, taken = Accelerator(device.CpuDevice()), list[weakref.ref[Tensor]]()
    alive: list[list[bool]] = []

    def allocate(num_bytes: int) -> Tensor:
        alive.append([reference() is not None for reference in taken])
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(accelerator, "allocate", allocate)
    memory = activation_memory.GrowingFetchMemory(accelerator)
    for num_bytes in (4096, 8192, 16384):
        memory.take(num_bytes, "x", call=0)
    assert alive == [[], [False], [False, False]]


def test_what_goes_back_to_the_allocator_is_read_by_no_stream() -> None:
    """Taken on one stream, lent on another that is slow: the first one's next allocation is that memory."""
    simulation = SimulatedDevice(slow=["other"])
    accelerator, other = Accelerator(simulation), simulation.new_stream("other")
    memory = activation_memory.GrowingFetchMemory(accelerator)
    with simulation.dispatching():
        lent = memory.take(4096, "x", call=0).fill_(7)
        with simulation.launching_on(other):
            accelerator.join_streams()
            accelerator.note_stream()
            read = lent.clone()
        address = lent.data_ptr()
        del lent
        memory.take(8192, "y", call=1)
        again = simulation.allocate(4096).fill_(8)
        assert again.data_ptr() == address
        simulation.synchronize()
        assert set(read.tolist()) == {7}
    simulation.close()


class GatedBlock(models.Block):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate.mean().sigmoid()


NUM_PAGES = 10  # of all inputs of one call


class RaggedStack(Stack):
    """Inputs of every block and batch are of other sizes, up to `NUM_PAGES` together."""

    def __init__(self) -> None:
        super().__init__(GatedBlock)

    def forward(self, x: Tensor, batch: int) -> Tensor:  # type: ignore[override]
        draws = random.Random(batch)
        x = self.front(x.to(self.out_dtype()))
        for block in self.blocks:
            pages = draws.randint(1, NUM_PAGES - 1)
            rest = NUM_PAGES - pages
            x = self.resized(x, pages)
            x = block(x, self.resized(x, draws.choice((rest, draws.randint(1, rest)))))
        return self.loss(x)

    @staticmethod
    def resized(x: Tensor, num_pages: int) -> Tensor:
        """As many rows as fit in there."""
        num_rows = num_pages * 4096 // (x.itemsize * models.WIDTH)
        return x[torch.arange(num_rows) % len(x)]


def ragged_loop(engine: Any, num_batches: int = NUM_BATCHES) -> list[float]:
    losses = []
    for batch in range(num_batches):
        loss = engine(features(batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_simulated", [False, True])
@pytest.mark.parametrize("tier", AWAY)
def test_no_sizes_within_what_is_planned_are_refused(
    tier: str, is_simulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 1)
    run = partial(ragged_loop, num_batches=NUM_BATCHES // 2) if is_simulated else ragged_loop
    plain = run_engine(RaggedStack, run, config_with(None, tmp_path, "resident"))
    config = planned(tier, tmp_path, input_bytes=NUM_PAGES * 4096)
    with ExitStack() as modes:
        if is_simulated:
            modes.enter_context(checked())
            modes.enter_context(simulated(monkeypatch, slow=["activation-h2d"]))
        assert_same(run_engine(RaggedStack, run, config), plain)
