"""The bytes of a step as they are forecast against what the lanes of an engine have moved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.cli.plan.answer import step_of
from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import ModelPlanner, uses_of
from offloadzero.errors import BudgetError
from offloadzero.observe.timeline import COMPUTE, D2H, DEVICE_UPDATE, H2D, NVME_READ, NVME_WRITE, UPDATE, WAIT
from offloadzero.planning.engine_plan import with_keys
from offloadzero.planning.model.shapes import ModelSource, read_model
from offloadzero.planning.step.forecast import plan_step
from offloadzero.planning.step.work import AFTER, StepTraffic, work_of_step
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_leases import UnitLeases
from tests.cli.test_plan_model import CONFIGS, PLENTY
from tests.planning.planners import planner_of
from tests.support import models
from tests.support.tiny import TinyModel, settings, tokens
from tests.support.training import make_config, merge

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
NUM_STEPS = 4
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "tied": (TinyModel, tokens),
    "stack": (models.Stack, models.features),
}
LEASES = {
    "nvme, three leases": lambda path: merge(
        make_config("nvme", path, clipping=1.0), {"zero_optimization": {"stage3_max_live_parameters": 45_000}}
    ),
    "host, all fit": lambda path: merge(
        make_config("host", path), {"zero_optimization": {"stage3_max_live_parameters": 10**9}}
    ),
}


def forecast(build: Callable[[], nn.Module], config: dict[str, Any]) -> StepTraffic:
    found = ModelPlanner(ModelSource("", build).on_meta()).plan(load_config(config), available=PLENTY)
    return plan_step(found.records, found.plan, found.config, uses=uses_of(found.cut), trace=None).traffic


def measured(
    build: Callable[[], nn.Module], inputs: Callable[[int], torch.Tensor], config: dict[str, Any], path: Path
) -> list[dict[str, int]]:
    """Bytes by lane of each step but the first; a step ends when all that it has started is over."""
    torch.manual_seed(1)
    config = merge(config, {"offloadzero": {"observe": {"run_dir": str(path / "run")}}})
    engine, *_ = offloadzero.initialize(model=build(), config=config)
    runtime = engine.optimizer.runtime
    timeline, spans = runtime.monitor.timeline, list[Any]()
    take = timeline.take

    def keep(*args: Any, **given: Any) -> Any:
        taken = take(*args, **given)
        spans.extend(taken[0])
        return taken

    timeline.take = keep
    found = []
    try:
        for step in range(NUM_STEPS):
            spans.clear()
            for micro in range(config.get("gradient_accumulation_steps", 1)):
                engine.backward(engine(inputs(10 * step + micro)))
                engine.step()
            runtime.changes.wait_updates()
            for unit in runtime.executor.units:
                runtime.executor.leases.wait_arrived(unit)
            timeline.take(step)
            total: Counter[str] = Counter()
            for span in spans:
                total[span.lane] += span.num_bytes
            found.append({lane: size for lane, size in total.items() if size and lane not in (COMPUTE, WAIT)})
    finally:
        engine.close()
    return found[1:]


@pytest.mark.parametrize("name", [name for name in (*CONFIGS, *LEASES) if name != "checkpoints"])
@pytest.mark.parametrize("model", MODELS)
def test_lanes_move_what_is_forecast(model: str, name: str, tmp_path: Path) -> None:
    config = {**CONFIGS, **LEASES}[name](tmp_path)
    build, inputs = MODELS[model]
    expected = forecast(build, config)
    for lanes in measured(build, inputs, config, tmp_path):
        reads = lanes.pop(NVME_READ, 0)
        most = expected.lane(NVME_READ)
        assert lanes == {lane: size for lane, size in expected.lanes.items() if lane != NVME_READ}
        assert most - expected.delivered_bytes <= reads <= most


def half_frozen() -> nn.Module:
    model = models.Stack()
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


def test_no_update_delivers_a_unit_that_is_frozen_in_part(tmp_path: Path) -> None:
    """It has the trained part alone, and a copy of that would be one more."""
    large = {"offloadzero": {"units": {"min_leaf_elements": 10**6}}}
    config = merge(LEASES["nvme, three leases"](tmp_path), large)
    expected = forecast(half_frozen, config)
    assert expected.delivered_bytes == 0
    assert expected.lane(H2D) > 0
    for lanes in measured(half_frozen, models.features, config, tmp_path):
        assert lanes == expected.lanes


def test_an_update_on_the_device_moves_no_frozen_parameters(tmp_path: Path) -> None:
    config = make_config(
        "resident", tmp_path, offloadzero={"placement": "device", "units": {"min_leaf_elements": 10**6}}
    )
    expected = forecast(half_frozen, config)
    assert expected.lane(DEVICE_UPDATE) > 0
    for lanes in measured(half_frozen, models.features, config, tmp_path):
        assert lanes == expected.lanes


@pytest.mark.parametrize(("layout", "column"), [("fp32", 0), ("compact", 1)])
def test_the_architecture_has_the_bytes_of_a_step(layout: str, column: int, tmp_path: Path) -> None:
    """Its table of the bound: what an update reads, the parameter among it, what it writes, and its own traffic."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    config = make_config("nvme", tmp_path, offloadzero={"state_layout": layout})
    traffic = forecast(build, config)
    for name, lane in (
        ("NVMe read", NVME_READ),
        ("NVMe write", NVME_WRITE),
        ("update, traffic of the memory", UPDATE),
    ):
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", ARCHITECTURE.read_text(), re.MULTILINE)
        said = float(row.split(" | ")[column].partition(" P")[0])
        assert traffic.by_phase[AFTER][lane] / (4 * 512 * 512) == pytest.approx(said, rel=0.02), name


# --- the schedule ---


@pytest.mark.parametrize(("clipping", "num_micro"), [(1.0, 1), (0.0, 2)])
@pytest.mark.parametrize("num_live", [1, 4_000])
def test_a_step_fetches_in_the_simulated_order(
    clipping: float, num_micro: int, num_live: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation begins a step with the fetches that the engine starts behind the last use of the one before."""
    config = merge(
        make_config("host", tmp_path, clipping=clipping),
        {
            "gradient_accumulation_steps": num_micro,
            "zero_optimization": {"stage3_max_live_parameters": num_live},
        },
    )
    planned = ModelPlanner(ModelSource("", models.Stack).on_meta()).plan(
        load_config(config), available=PLENTY
    )
    work = work_of_step(planned.records, planned.plan, planned.config, uses=uses_of(planned.cut))
    simulated = [planned.records[unit].index for _, unit in work.fetches(num_micro)]
    log: list[tuple[bool, int]] = []  # whether it is a use, and of which unit
    submit, begin_use = UnitLeases.submit, ResidencyPolicy.begin_use

    def submitted(fetches: UnitLeases, unit: Any, target: torch.Tensor) -> Any:
        log.append((False, unit.record.index))
        return submit(fetches, unit, target)

    def used(policy: ResidencyPolicy, index: int, *, evaluating: bool = False) -> None:
        log.append((True, index))
        begin_use(policy, index, evaluating=evaluating)

    monkeypatch.setattr(UnitLeases, "submit", submitted)
    monkeypatch.setattr(ResidencyPolicy, "begin_use", used)
    torch.manual_seed(1)
    engine, *_ = offloadzero.initialize(model=models.Stack(), config=config)
    fetched: list[int] = []
    try:
        for step in range(NUM_STEPS):
            begun = max((place for place, (is_use, _) in enumerate(log) if is_use), default=-1) + 1
            for _ in range(num_micro):
                engine.backward(engine(models.features(step)))
                engine.step()
            ended = max(place for place, (is_use, _) in enumerate(log) if is_use) + 1
            fetched = [unit for is_use, unit in log[begun:ended] if not is_use]
    finally:
        engine.close()
    assert len(simulated) > len(set(simulated)), "there are too few leases for all units"
    assert fetched == simulated


# --- the inputs of checkpointed units ---


LENGTH, VOCABULARY = 96, 101
LLAMA = read_model(f"llama:128/5/4/{VOCABULARY}")


def mistral() -> nn.Module:
    """Each layer gets the same mask of booleans, positions of integers, and both tables of rotary positions."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.MistralConfig(
        **sizes, num_hidden_layers=5, vocab_size=VOCABULARY, sliding_window=32, use_cache=False
    )
    model: nn.Module = transformers.MistralForCausalLM(config)
    return model


def source_of(path: Path, tier: str, **keys: Any) -> dict[str, Any]:
    given = {"placement": "host", "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 1}
    return settings(path, **{**given, "activation_checkpoints": {"tier": tier}, **keys})


def tokens(_: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, LENGTH))


def train_and_look(model: nn.Module, source: dict[str, Any], num_steps: int = 2) -> dict[TierName, int]:
    """What the engine has taken beside its plan."""
    engine, *_ = offloadzero.initialize(model=model, config=source)
    try:
        for step in range(num_steps):
            ids = tokens(step)
            found = engine(ids, labels=ids) if hasattr(model, "config") else engine(ids)
            engine.backward(getattr(found, "loss", found))
            engine.step()
        taken: dict[TierName, int] = engine.optimizer.runtime.activations.reserved()
        return taken
    finally:
        engine.close()


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("model", [LLAMA, ModelSource("mistral", mistral)], ids=["llama", "mistral"])
def test_inputs_take_what_is_planned(model: ModelSource, tier: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, tier)
    beside = planner_of(model, sequence=LENGTH).answer(source).beside
    taken = train_and_look(model.build(), source)
    assert taken[TierName.HOST] == beside.host
    assert taken.get(TierName.NVME, 0) == beside.nvme
    assert taken[TierName(tier)] == 5 * LENGTH * 128 * 2 + 2 * 8192, "by hand: five inputs, two tables"


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_inputs_move_as_is_forecast(tier: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, tier, gradient_accumulation_steps=2)
    answer = planner_of(LLAMA, sequence=LENGTH).answer(source)
    expected = step_of(answer).traffic
    assert answer.trace is not None
    kept = 2 * sum(call.own for call in answer.trace.inputs[-2:])  # what backward may find where it is
    for lanes in measured(LLAMA.build, tokens, source, tmp_path):
        for lane in (D2H, NVME_WRITE):
            assert lanes.get(lane, 0) == expected.lane(lane), lane
        for lane in (H2D, *([NVME_READ] if tier == "nvme" else [])):
            assert expected.lane(lane) - kept <= lanes[lane] <= expected.lane(lane), lane


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_budget_counts_inputs_as_the_engine_does(tier: str, tmp_path: Path) -> None:
    """The budget that is named is enough for the first step, and a page less is refused by both."""
    key = f"offloadzero.budgets.{tier}"
    source = source_of(tmp_path, tier, budgets={tier: "1KiB"})
    asked = planner_of(LLAMA, sequence=LENGTH)
    change = asked.smallest_change(source)
    assert list(change.keys) == [key]
    enough = change.keys[key]
    assert isinstance(enough, int)
    train_and_look(LLAMA.build(), with_keys(source, change.keys))
    less = with_keys(source, {key: enough - 4096})
    assert load_config(less).activation_checkpoints is not None
    with pytest.raises(BudgetError, match=f"{key}: ") as planned:
        asked.answer(less)
    assert "of checkpointed units take" in str(planned.value)
    with pytest.raises(BudgetError, match=f"{key}: "):
        train_and_look(LLAMA.build(), less)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_more_blocks_leave_no_less_on_the_device(tier: str, tmp_path: Path) -> None:
    """Inputs are away when the gradients of a tied embedding, not the logits, are the most that is alive."""
    found = []
    for num_blocks in (2, 8, 40):
        model = read_model(f"gpt:512/{num_blocks}/4/3000")
        answer = planner_of(model, sequence=LENGTH).answer(source_of(tmp_path, tier))
        assert answer.trace is not None
        found.append(answer.beside.device)
        assert answer.beside.device <= answer.trace.peak_bytes
    assert found == sorted(found)
    assert found[2] <= 1.05 * found[1], "inputs are away"
