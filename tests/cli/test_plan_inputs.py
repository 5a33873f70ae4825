"""The inputs of checkpointed units as they are planned against those that an engine keeps and moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.cli.plan.answer import Planner, Question
from offloadzero.cli.plan.report import step_of
from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.errors import BudgetError
from offloadzero.observe.timeline import D2H, H2D, NVME_READ, NVME_WRITE
from offloadzero.planning.engine_plan import with_keys
from offloadzero.planning.hardware import Memory
from offloadzero.planning.model.shapes import ModelSource, read_model
from offloadzero.update.spec import UpdateForm
from tests.cli.test_plan_traffic import measured
from tests.support.tiny import settings

LENGTH, VOCABULARY = 96, 101
PLENTY = Memory(host=1 << 44, nvme=1 << 44)
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


def planner(model: ModelSource) -> Planner:
    question = Question(model, lambda _: PLENTY, lambda _: UpdateForm.NATIVE, sequence=LENGTH)
    return Planner(question)


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
    beside = planner(model).answer(source).beside
    taken = train_and_look(model.build(), source)
    assert taken[TierName.HOST] == beside.host
    assert taken.get(TierName.NVME, 0) == beside.nvme
    assert taken[TierName(tier)] == 5 * LENGTH * 128 * 2 + 2 * 8192, "by hand: five inputs, two tables"


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_inputs_move_as_is_forecast(tier: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, tier, gradient_accumulation_steps=2)
    answer = planner(LLAMA).answer(source)
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
    asked = planner(LLAMA)
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
        answer = planner(model).answer(source_of(tmp_path, tier))
        assert answer.trace is not None
        found.append(answer.beside.device)
        assert answer.beside.device <= answer.trace.peak_bytes
    assert found == sorted(found)
    assert found[2] <= 1.05 * found[1], "inputs are away"
