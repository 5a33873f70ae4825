"""The bytes of a step of one of two ranks as they are forecast, against its lanes and its collectives."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.config import load_config
from offloadzero.engine.planned_model import ModelPlanner, uses_of
from offloadzero.observe.collectives import CollectiveCount, since
from offloadzero.observe.timeline import COLLECTIVES, COMPUTE, WAIT
from offloadzero.planning.model.shapes import ModelSource
from offloadzero.planning.step.forecast import plan_step
from offloadzero.planning.step.work import OF_TENSORS, ORDERS, StepTraffic
from tests.cli.test_plan_model import PLENTY
from tests.support.ranks import run_ranks
from tests.support.tiny import TinyModel, tokens
from tests.support.training import Config, make_config, merge

NUM_RANKS, NUM_STEPS = 2, 3
CODED = {"zero_quantized_weights": True}
NEAR = {"zero_hpz_partition_size": 2}
REDUCED = {"zero_quantized_gradients": True}
ON_HOST = {"offloadzero": {"placement": {"states": "host"}}}

# Stage, placement, micro batches, what is laid over the configuration, LOCAL_WORLD_SIZE.
CASES: Mapping[str, tuple[int, str, int, Config, int]] = {
    "stage 0, host": (0, "host", 2, {}, 2),
    "stage 1": (1, "resident", 1, ON_HOST, 2),
    "stage 2, accumulated": (2, "resident", 3, ON_HOST, 2),
    "stage 3, device": (3, "resident", 2, {}, 2),
    "stage 3, nvme": (3, "nvme", 1, {}, 2),
    "gradients in fp32": (3, "nvme", 2, {"communication_data_type": "fp32"}, 2),
    "near copies, host": (3, "host", 2, {"zero_optimization": NEAR}, 2),
    "all of ZeRO++": (3, "nvme", 2, {"zero_optimization": {**CODED, **NEAR, **REDUCED}}, 2),
    "codes across machines": (3, "resident", 1, {"zero_optimization": {**CODED, **REDUCED}}, 1),
}


def build() -> nn.Module:
    torch.manual_seed(1)
    model = TinyModel()
    model.blocks[0].requires_grad_(False)
    return model


def config_of(case: str, directory: Path | str) -> Config:
    stage, placement, num_micro, over, _ = CASES[case]
    base = make_config(placement, directory, clipping=1.0, accumulation=num_micro)
    return merge(merge(base, {"zero_optimization": {"stage": stage}}), over)


def measure(rank: int, directory: str) -> dict[str, Any]:
    """By case: the bytes of the lanes of the last step, and its collectives."""
    found = {}
    for case, (*_, num_local) in CASES.items():
        os.environ["LOCAL_WORLD_SIZE"] = str(num_local)
        run_dir = {"offloadzero": {"observe": {"run_dir": f"{directory}/{case}"}}}
        engine, *_ = offloadzero.initialize(model=build(), config=merge(config_of(case, directory), run_dir))
        runtime = engine._runtime
        timeline, spans = runtime.monitor.timeline, list[Any]()
        take = timeline.take

        def keep(
            *args: Any, take: Any = take, spans: list[Any] = spans, **given: Any
        ) -> tuple[list[Any], bool]:
            taken = take(*args, **given)
            spans.extend(taken[0])
            return taken  # type: ignore[no-any-return]

        timeline.take = keep
        for step in range(NUM_STEPS):
            spans.clear()
            before = engine.collectives()
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(tokens(100 * step + 10 * rank + micro)))
                engine.step()
            engine.synchronize()
            for unit in runtime.executor.units:
                runtime.executor.leases.wait_arrived(unit)
            timeline.take(step)
        moved: Counter[str] = Counter()
        for span in spans:
            moved[span.lane] += span.num_bytes
        lanes = {lane: size for lane, size in moved.items() if size and lane not in (COMPUTE, WAIT)}
        found[case] = {"lanes": lanes, "sent": since(before, engine.collectives())}
        engine.close()
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    directory = tmp_path_factory.mktemp("traffic")
    return run_ranks(measure, NUM_RANKS, directory / "ranks", str(directory), timeout_s=240)


def forecast(case: str) -> StepTraffic:
    config = load_config(config_of(case, "/tmp"), world_size=NUM_RANKS)
    found = ModelPlanner(ModelSource("", build).on_meta()).plan(config, available=PLENTY)
    num_local = CASES[case][-1]
    return plan_step(
        found.records,
        found.plan,
        found.config,
        uses=uses_of(found.cut),
        trace=None,
        num_local_ranks=num_local,
    ).traffic


@pytest.mark.parametrize("case", CASES)
def test_a_rank_sends_and_moves_what_is_forecast(by_rank: list[dict[str, Any]], case: str) -> None:
    expected = forecast(case)
    counts: dict[str, CollectiveCount] = {}
    for of_phase in expected.collectives.values():
        for key, (num_calls, num_bytes) in of_phase.items():
            calls_before, bytes_before = counts.get(key, (0, 0))
            counts[key] = CollectiveCount(calls_before + num_calls, bytes_before + num_bytes)
    for found in by_rank:
        sent = {
            key: CollectiveCount(*count)
            for key, count in found[case]["sent"].items()
            if key.partition(" ")[0] in (*OF_TENSORS, ORDERS)
        }
        assert sent == counts
    assert by_rank[0][case]["lanes"] == expected.lanes
    assert expected.lane(COLLECTIVES) > 0
    assert expected.delivered_bytes == 0 or case.startswith("stage 0")
