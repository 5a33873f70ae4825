"""Random models and budgets: a run is refused before it starts, with budgets that are enough, or stays within them.

OFFLOADZERO_TEST_BUDGETS is the number of cases; from 50 on every twentieth runs in a process of its own as well, whose
resident memory is measured.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.core.segments import TierName
from offloadzero.errors import BudgetError
from offloadzero.memory.arena import ALIGN_BYTES
from offloadzero.memory.swap_file import MARK_BYTES
from offloadzero.planning.engine_plan import ENOUGH, with_keys
from offloadzero.planning.model.shapes import ModelSource, read_model
from tests.planning.planners import planner_of
from tests.support.tiny import run_script, settings

NUM_CASES = int(os.environ.get("OFFLOADZERO_TEST_BUDGETS", "5"))
NUM_STEPS = 10
LARGE = 50  # cases from which on processes of their own are measured
KERNELS_BYTES = 128 << 20  # what torch's kernels and allocators keep for themselves
OPTIMIZERS = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Lion": {"lr": 1e-4},
    "SGD": {"lr": 1e-3, "momentum": 0.9},
    "Adagrad": {"lr": 1e-3},
    "Muon": {"lr": 1e-3, "weight_decay": 0.1},
}


@dataclass(frozen=True)
class Case:
    """A model, what it is trained with, and the shape of its micro batches."""

    model: ModelSource
    vocabulary: int
    source: dict[str, Any]
    micro_batch: int
    sequence: int
    num_micro: int


def random_model(draw: random.Random) -> tuple[ModelSource, int]:
    kind, heads = draw.choice(["llama", "gpt"]), draw.choice([1, 2, 4])
    width, vocabulary = heads * draw.choice([8, 12, 32, 40]), draw.randrange(17, 900)
    shape = read_model(f"{kind}:{width}/{draw.randrange(1, 7)}/{heads}/{vocabulary}")
    frozen = draw.random() < 0.25

    def build() -> nn.Module:
        model = shape.build()
        if frozen:  # the embedding, which a tied head shares, and the first block
            for name, param in model.named_parameters():
                param.requires_grad_(not any(part in name for part in ("embed", "wte", ".0.")))
        return model

    return ModelSource(shape.text, build, shape.shape), vocabulary


def random_placement(draw: random.Random) -> Any:
    tiers = [tier.value for tier in TierName]
    rules = {"param": draw.choice(tiers), "states": draw.choice(tiers), "grad": draw.choice(tiers)}
    named = dict(draw.sample(list(rules.items()), draw.randrange(1, 4)))
    return draw.choice(["device", "host", "nvme", "auto", "auto", named, named])


def random_case(seed: int, directory: Path) -> Case:
    """Everything but budgets, then budgets near what is needed without any."""
    draw = random.Random(seed)
    model, vocabulary = random_model(draw)
    micro_batch, sequence, num_micro = (
        draw.randrange(1, 4),
        draw.choice([5, 16, 40]),
        draw.choice([1, 1, 2, 3]),
    )
    dtype = draw.choice(["bf16", "bf16", "fp16", "fp32"])
    optimizer = draw.choice(list(OPTIMIZERS))
    keys: dict[str, Any] = {
        "placement": random_placement(draw),
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": num_micro,
        "gradient_clipping": draw.choice([0.0, 1.0]),
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 4},
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        "update": {"chunk_elements": draw.choice([65_536, 1 << 20])},
        "units": {"min_leaf_elements": draw.choice([1000, 1 << 20]), "prefetch_units": draw.randrange(1, 4)},
        "aio": {"checksums": draw.random() < 0.5},
    }
    if dtype == "bf16" and optimizer == "AdamW" and draw.random() < 0.5:
        keys["state_layout"] = "compact"
    source = settings(directory, **keys)
    if draw.random() < 0.4:
        source = with_checkpoints(source, draw.choice([tier.value for tier in TierName]), model, sequence)
    planned, _ = planner_of(model, sequence=sequence).plan(source)
    budgets = {}
    for tier in TierName:
        if draw.random() < 0.6:
            near = planned.plan.tier_bytes(tier) * draw.choice([1.0, draw.uniform(0.2, 1.3)])
            budgets[tier.value] = max(0, int(near) + draw.randrange(-1, 2))
    if budgets:
        source = with_keys(source, {"offloadzero.budgets": budgets})
    return Case(model, vocabulary, source, micro_batch, sequence, num_micro)


def with_checkpoints(source: dict[str, Any], tier: str, model: ModelSource, sequence: int) -> dict[str, Any]:
    """Inputs have a place in the plan: those whose size is not said are counted from the first step on."""
    source = with_keys(source, {"offloadzero.activation_checkpoints": {"tier": tier}})
    if tier == TierName.DEVICE.value:
        return source
    trace = planner_of(model, sequence=sequence).answer(source).trace
    assert trace is not None
    return with_keys(source, {"offloadzero.activation_checkpoints.input_bytes": max(4096, trace.input_bytes)})


def named_budgets(error: BudgetError) -> dict[str, int]:
    """The keys that the error says are enough, with their values."""
    (line,) = [line for line in str(error).splitlines() if line.startswith(ENOUGH)]
    found = {key: int(value) for key, value in re.findall(r"(offloadzero\.budgets\.\w+) = (\d+)", line)}
    assert found, line
    return found


def start(case: Case, source: dict[str, Any]) -> offloadzero.Engine:
    engine, *_ = offloadzero.initialize(model=case.model.build(), config=source)
    return engine


def expect_within(engine: offloadzero.Engine, source: dict[str, Any], directory: Path) -> None:
    """What the tiers hold, counted where it lies, is no byte more than their budgets."""
    runtime = engine.optimizer.runtime
    inputs = runtime.plan.inputs
    sums = sum(line.num_bytes for line in runtime.plan.lines if line.what == "checksums of nvme")
    files = [path.stat().st_size - MARK_BYTES for path in directory.rglob("*") if path.is_file()]
    held = {
        "device": runtime.store.device.num_bytes + (0 if inputs is None else inputs.device),
        "host": runtime.store.host.num_bytes + sums,
        "nvme": sum(files),
    }
    for tier, num_bytes in held.items():
        assert num_bytes <= runtime.reserved_bytes(TierName(tier)), tier
        budget = source["offloadzero"].get("budgets", {}).get(tier)
        assert budget is None or max(num_bytes, runtime.reserved_bytes(TierName(tier))) <= budget, tier


def train(engine: offloadzero.Engine, case: Case, *, num_steps: int = NUM_STEPS) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps * case.num_micro):
        ids = torch.randint(case.vocabulary, (case.micro_batch, case.sequence), generator=generator)
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        assert torch.isfinite(loss)


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_a_run_is_refused_with_budgets_that_are_enough_or_stays_within_its_own(
    seed: int, tmp_path: Path
) -> None:
    case = random_case(seed, tmp_path)
    source = case.source
    try:
        engine = start(case, source)
    except BudgetError as error:
        enough = named_budgets(error)
        budgets = source["offloadzero"]["budgets"]
        for key, value in enough.items():
            assert value > budgets[key.rpartition(".")[2]], "no budget that was enough is named"
        source = with_keys(source, enough)
        for key, value in enough.items():
            if value - ALIGN_BYTES > budgets[key.rpartition(".")[2]]:
                with pytest.raises(BudgetError):
                    start(case, with_keys(source, {key: value - ALIGN_BYTES}))
        engine = start(case, source)
    try:
        expect_within(engine, source, tmp_path)
        train(engine, case)
        expect_within(engine, source, tmp_path)
        assert engine.global_steps == NUM_STEPS
    finally:
        engine.close()


RESIDENT = """
import sys
from pathlib import Path
import torch
import offloadzero
from tests.planning import test_random_budgets as budgets

def resident(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024

case = budgets.large_case(int(sys.argv[1]), Path(sys.argv[2]))
answer = budgets.planner_of(case.model, sequence=case.sequence).answer(case.source)
a = torch.randn(512, 512, requires_grad=True)
(a.bfloat16() @ a.bfloat16()).float().sum().backward()
before = resident("VmRSS")
engine = budgets.start(case, case.source)
budgets.train(engine, case, num_steps=2)
Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
budgets.train(engine, case, num_steps=8)
plan = engine.optimizer.runtime.plan
planned = sum(plan.tier_bytes(tier) for tier in (budgets.TierName.DEVICE, budgets.TierName.HOST))
print(resident("VmHWM") - before, planned, answer.trace.peak_bytes)
engine.close()
"""


def large_case(seed: int, directory: Path) -> Case:
    """A model of 30 million parameters whose budgets are what its plan needs, to the byte."""
    draw = random.Random(seed)
    model = read_model("gpt:512/8/8/9000")
    keys = {"gradient_clipping": 1.0, "state_layout": draw.choice(["fp32", "compact"])}
    source = settings(directory, placement=draw.choice(["host", "nvme", "auto", {"states": "nvme"}]), **keys)
    planned, _ = planner_of(model, sequence=64).plan(source)
    budgets = {tier.value: planned.plan.tier_bytes(tier) for tier in TierName}
    return Case(model, 9000, with_keys(source, {"offloadzero.budgets": budgets}), 2, 64, 1)


@pytest.mark.skipif(NUM_CASES < LARGE, reason="a large model in a process of its own")
@pytest.mark.parametrize("seed", range(0, NUM_CASES, 20))
def test_resident_memory_is_the_plan_and_the_activations(seed: int, tmp_path: Path) -> None:
    done = run_script(RESIDENT, seed, tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    taken, planned, activations = map(int, done.stdout.split())
    assert taken <= planned + activations + KERNELS_BYTES, f"{taken:,} of {planned:,} and {activations:,}"
