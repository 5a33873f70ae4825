"""Activation checkpoints by configuration: the numbers stay, budgets and errors are told, and what is late shows."""

from __future__ import annotations

import contextlib
import errno
import inspect
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.activations import store as activations
from offloadzero.core.segments import TierName
from offloadzero.core.torch_private import top_saved_tensors_default_hooks
from offloadzero.errors import AioError, BudgetError, ConfigError, StateError
from offloadzero.memory.swap_file import MARK_BYTES
from offloadzero.planning.checkpointed_inputs import INPUTS_AHEAD, NUM_INPUT_STAGING
from offloadzero.streaming import hooks
from tests.streaming.checkpointed import (
    AWAY,
    FORMS,
    NUM_STEPS,
    TIERS,
    config_with,
    features,
    loop,
    make_engine,
)
from tests.streaming.loops import take_inputs
from tests.support import models
from tests.support.cases import each_pair
from tests.support.faults import delays
from tests.support.models import WIDTH, CheckpointedStack, Stack
from tests.support.schedules import Slowness
from tests.support.training import PLACEMENTS, Outcome, assert_same, differences, merge, run_engine


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of any size move."""
    monkeypatch.setattr(activations, "MIN_BYTES", 1)


# --- the numbers


OPTIONS: list[dict[str, Any]] = [
    {"dtype": "bf16", "clipping": 0.0},
    {"dtype": "bf16", "clipping": 0.5},
    {"dtype": "fp16", "clipping": 0.5},
    {"dtype": None, "clipping": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses_weights_and_moments_are_those_without(options: dict[str, Any], tmp_path: Path) -> None:
    plain = run_engine(Stack, loop, config_with(None, tmp_path, "resident", **options))
    by_the_user = run_engine(CheckpointedStack, loop, config_with(None, tmp_path, "host", **options))
    assert_same(by_the_user, plain)
    for among, tier, placement in each_pair(OPTIONS, TIERS, PLACEMENTS):
        if among == options:
            assert_same(run_engine(Stack, loop, config_with(tier, tmp_path, placement, **options)), plain)


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("name", FORMS)
def test_form_of_model(name: str, tmp_path: Path) -> None:
    live = {"zero_optimization": {"stage3_max_live_parameters": 12_000}}
    plain = run_engine(FORMS[name], loop, config_with(None, tmp_path, "resident", **live))
    is_planned = [*FORMS].index(name) % 2  # the memory on the host, else that on files; the other grows
    for tier, placement, clipping in (("device", "nvme", 1e9), ("host", "nvme", 0.0), ("nvme", "host", 0.0)):
        # Clipping that never bites moves the updates behind backward, and changes no number but that of the norm.
        config = config_with(tier, tmp_path, placement, clipping=clipping, **live)
        if tier == AWAY[1 - is_planned]:
            config["offloadzero"]["activation_checkpoints"]["input_bytes"] = 12 * 8192
        found = run_engine(FORMS[name], loop, config)
        assert found.norm == pytest.approx(plain.norm, rel=1e-5)
        found.norm = plain.norm
        assert_same(found, plain)


def test_compiled_blocks(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        model = Stack(num_blocks=3)
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager")
        return model

    plain = run_engine(compiled, loop, config_with("device", tmp_path, "resident"))
    assert_same(run_engine(compiled, loop, config_with("nvme", tmp_path, "host")), plain)
    torch.compiler.reset()


@pytest.mark.parametrize("tier", TIERS)
def test_two_graphs_alive_and_a_graph_used_twice(tier: str, tmp_path: Path) -> None:
    def two_graphs(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            first, second = engine(features(seed)), engine(features(seed + 50))
            engine.backward(first)  # the older graph first: not the reverse of the forwards
            engine.step()
            engine.optimizer.scale(second / 2).backward(retain_graph=True)
            engine.step()
            losses += [first.item(), second.item()]
        return losses

    def twice(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            loss = engine(features(seed))
            (loss / 2).backward(retain_graph=True)
            engine.step()
            (loss / 2).backward()
            engine.step()
            losses.append(loss.item())
        return losses

    for run in (two_graphs, twice):
        options = {"accumulation": 2, "clipping": 0.5}
        plain = run_engine(Stack, run, config_with(None, tmp_path, "resident", **options))
        assert_same(run_engine(Stack, run, config_with(tier, tmp_path, "nvme", **options)), plain)


@pytest.mark.parametrize("tier", TIERS)
def test_lengths_that_change(tier: str, tmp_path: Path) -> None:
    """Buffers and ranges of the file are taken again for other sizes, and do not pile up."""
    reserved: list[dict[str, int]] = []

    def changing(engine: Any) -> list[float]:
        losses = []
        reserved.append(engine.reserved_bytes())
        for seed, rows in enumerate((97, 200, 511, 97, 300, 511, 400, 511, 120, 511)):
            loss = engine(models.features(seed, rows=rows))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            reserved.append(engine.reserved_bytes())
        return losses

    plain = run_engine(Stack, changing, config_with(None, tmp_path, "resident"))
    base = run_engine(Stack, changing, config_with(None, tmp_path))
    assert_same(base, plain)
    without = reserved[-1]
    reserved.clear()
    assert_same(run_engine(Stack, changing, config_with(tier, tmp_path)), plain)
    largest = -(-511 * WIDTH * 2 // 4096) * 4096
    taken = {name: reserved[-1][name] - reserved[0][name] for name in reserved[0]}
    # How many have come back at once depends on the time that fetches take.
    num_present = 0 if tier == "device" else 1 + INPUTS_AHEAD[TierName(tier)]
    assert taken.pop("device") <= num_present * largest
    assert taken == {name: reserved[6][name] - reserved[0][name] for name in taken}
    if tier == "host":
        assert reserved[-1]["host"] - without["host"] == models.NUM_BLOCKS * largest


# --- budgets, files, errors


@pytest.mark.parametrize("tier", AWAY)
def test_budgets_hold_for_the_checkpoints_too(tier: str, tmp_path: Path) -> None:
    def engine_with(budget: int | None) -> Any:
        budgets = {} if budget is None else {"budgets": {tier: budget}}
        config = merge(config_with(tier, tmp_path, "nvme"), {"offloadzero": budgets})
        engine, *_ = offloadzero.initialize(model=Stack(), config=config)
        return engine

    engine = engine_with(None)
    before = engine.reserved_bytes()[tier]
    loop(engine)
    needed = engine.reserved_bytes()[tier]
    assert needed - before == models.NUM_BLOCKS * 8192
    assert "activation checkpoints so far" in engine.memory_table()
    engine.close()
    engine = engine_with(needed)
    loop(engine)
    engine.close()
    engine = engine_with(needed - 1)
    with pytest.raises(
        BudgetError, match=rf"blocks\.3: offloadzero\.budgets\.{tier}: .* 24\.00 KiB of activation"
    ):
        engine(features(0))
    engine.close()


def test_a_batch_that_does_not_fit_takes_nothing_from_the_next(tmp_path: Path) -> None:
    """Who is refused and tries a smaller batch finds the buffers and the file as they were."""

    def engine_with(**budgets: int) -> Any:
        torch.manual_seed(0)
        config = merge(config_with("nvme", tmp_path, "nvme"), {"offloadzero": {"budgets": budgets}})
        engine, *_ = offloadzero.initialize(model=Stack(), config=config)
        return engine

    engine = engine_with()
    losses = loop(engine)
    needed = engine.reserved_bytes()
    engine.close()
    engine = engine_with(host=needed["host"])
    large = torch.cat([features(0)] * 16)
    for _ in range(NUM_INPUT_STAGING):
        with pytest.raises(BudgetError, match=r"blocks\.0: staging: offloadzero\.budgets\.host"):
            engine(large)
    assert (
        len(engine.optimizer.runtime.activations._home.sender._files.staging._pool._free) == NUM_INPUT_STAGING
    )
    assert loop(engine) == losses
    assert engine.reserved_bytes() == needed
    engine.close()


def test_the_file_goes_with_the_engine(tmp_path: Path) -> None:
    engine = make_engine("nvme", tmp_path)
    before = set(tmp_path.iterdir())
    loss = engine(features(0))
    (file,) = set(tmp_path.iterdir()) - before
    assert file.stat().st_size == MARK_BYTES + models.NUM_BLOCKS * 8192
    engine.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StateError, match="closed"):
        loss.backward()


@pytest.mark.parametrize("operation", ["pwrite", "pread"])
def test_an_error_of_the_drive_has_a_name(operation: str, tmp_path: Path) -> None:
    engine = make_engine("nvme", tmp_path)
    loop(engine)
    home = engine.optimizer.runtime.activations._home
    loss = None
    if operation == "pread":
        loss = engine(features(0))
        for lane in (home.sender._lane, home.sender._files.lane):
            lane.submit(lambda: None).wait()
    home.space.files.engine.inject("errno", 1, errno.EIO)
    expected = rf"blocks\.\d activation \(nvme\): {operation} .*offloadzero-.* bytes: Input/output error"
    with pytest.raises(AioError, match=expected):
        engine.backward(engine(features(0)) if loss is None else loss)
    engine.close()


def checkpoint_as_in_torch_2_8(function: Any, *args: Any, use_reentrant: bool) -> Any:
    """It leaves its generator, and so its saved-tensor hooks, to whoever holds the error of `function`."""
    assert not use_reentrant
    make = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    options = [True, torch.utils.checkpoint.noop_context_fn, "default", False]
    if "early_stop" in inspect.signature(make).parameters:
        options.append(True)
    generator = make(function, *options, *args)
    next(generator)
    result = function(*args)
    with contextlib.suppress(StopIteration):
        next(generator)
    return result


@pytest.mark.parametrize("form", [checkpoint, checkpoint_as_in_torch_2_8])
def test_a_forward_that_fails_leaves_no_hooks_in_force(
    form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "checkpoint", form)
    engine, other = make_engine("host", tmp_path), make_engine("host", tmp_path)
    assert loop(engine) == loop(other)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    inner = next(iter(engine.module.blocks[2].children()))
    handle = inner.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="no room") as caught:
        engine(features(0))
    handle.remove()
    assert caught.tb is not None  # held, with the frames that it has left
    assert top_saved_tensors_default_hooks(False) is None
    kept = []
    keep = activations.ActivationStore.keep
    monkeypatch.setattr(
        activations.ActivationStore, "keep", lambda *given: kept.append(given[2].shape) or keep(*given)
    )
    assert loop(engine) == loop(other)
    assert len(kept) == 2 * NUM_STEPS * len(engine.module.blocks)
    engine.close()
    other.close()


def test_units_are_chosen_by_name(tmp_path: Path) -> None:
    def reserved(units: Any) -> int:
        config = merge(
            config_with("host", tmp_path, "resident"),
            {"offloadzero": {"activation_checkpoints": {"units": units}}},
        )
        engine, *_ = offloadzero.initialize(model=Stack(), config=config)
        before = engine.reserved_bytes()["host"]
        loop(engine)
        taken = engine.reserved_bytes()["host"] - before
        engine.close()
        return int(taken)

    assert reserved(["blocks.1", "blocks.3"]) == 2 * 8192
    assert reserved("blocks.*") == 4 * 8192
    with pytest.raises(
        ConfigError, match=r"activation_checkpoints\.units = 'block\.\*': .*blocks\.0, blocks\.1"
    ):
        reserved(["block.*"])
    with pytest.raises(ConfigError, match="no repeated blocks"):
        offloadzero.initialize(model=models.NoModuleList(), config=config_with("host", tmp_path))


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("tier", TIERS)
def test_a_unit_whose_inputs_are_indices(tier: str, tmp_path: Path) -> None:
    """The embedding is a unit, and the head reads its weight from outside."""

    lm_loop = take_inputs(models.tokens)
    plain = run_engine(models.TiedLM, lm_loop, config_with(None, tmp_path, "resident"))
    config = merge(
        config_with(tier, tmp_path, "nvme"), {"offloadzero": {"activation_checkpoints": {"units": "*"}}}
    )
    assert_same(run_engine(models.TiedLM, lm_loop, config), plain)


def test_nvme_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match=r"nvme_path.*activation_checkpoints uses nvme"):
        offloadzero.config.load_config({"offloadzero": {"activation_checkpoints": {"tier": "nvme"}}})


# --- missing waits

SLOW_S = 0.02


@pytest.mark.parametrize("seed", range(6))
def test_random_delays_change_nothing(seed: int, tmp_path: Path, faults: ExitStack) -> None:
    options = {"accumulation": 1 + seed % 2, "clipping": (0.0, 0.5)[seed // 2 % 2]}
    plain = run_engine(Stack, loop, config_with(None, tmp_path, "resident", **options))
    faults.enter_context(Slowness(seed).everywhere())
    placement = ("host", "nvme", "mixed")[seed % 3]
    assert_same(
        run_engine(Stack, loop, config_with(AWAY[seed // 3 % 2], tmp_path, placement, **options)), plain
    )


def outcome_of(tier: str, directory: Path, expected: Outcome) -> list[str]:
    """How a run with a bug in it differs, or the error it stopped with."""
    try:
        return differences(run_engine(Stack, loop, config_with(tier, directory, "resident")), expected)
    except offloadzero.errors.NonFiniteError as error:  # poison that was trained on
        return [str(error)]


def give_up_at_once(store: Any) -> None:
    """Let device memory go before its copy has run (a lane's task still holds it)."""
    while store._sending:
        cell = store._sending.popleft()()
        if cell is not None:
            cell.give_up_source()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("tier", AWAY)
def test_slow_lanes_change_nothing_and_a_use_that_does_not_wait_is_caught(
    tier: str, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: ExitStack
) -> None:
    """Nor does a fetch that waits for the copy alone: the wait before device memory is given up would hide it."""
    expected = run_engine(Stack, loop, config_with(None, tmp_path, "resident"))
    for lane in ("activation-d2h", "activation-h2d", "activation-write", "activation-read"):
        faults.enter_context(delays("lane.launch", SLOW_S, about=lane))
    if at_once:
        monkeypatch.setattr(activations.ActivationStore, "_give_up_sources", give_up_at_once)
    assert outcome_of(tier, tmp_path, expected) == []
    monkeypatch.setattr(activations, "order_compute_after", lambda _: None)
    assert outcome_of(tier, tmp_path, expected) != []
