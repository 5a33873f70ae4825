"""What the plan advises is left to be done: nothing that the step does already, or that its configuration rules out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import plan_model, uses_of
from offloadzero.observe.bound import CORES
from offloadzero.observe.timeline import COMPUTE, D2H, NVME_READ, UPDATE
from offloadzero.planning.model.shapes import read_model
from offloadzero.planning.step.advice import FASTER, faster
from offloadzero.planning.step.forecast import plan_step
from offloadzero.planning.step.work import NVME_MIXED
from tests.planning.test_time_model import TRACE, step_of

BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("lane", FASTER)
@pytest.mark.parametrize("trace", [TRACE, replace(TRACE, backward_flops=2 * 10**15), None])
def test_each_lane_has_a_remedy(lane: str, trace: Any) -> None:
    bound, remedies = faster(lane, step_of({}, trace=trace))
    assert bound.endswith((" is the bound", " are the bound"))
    assert remedies


def test_the_compact_layout_where_states_can_be_smaller_in_it() -> None:
    assert faster(UPDATE, step_of({}, can_be_compact=True))[1].endswith(
        ", more micro batches per step, or the compact layout, which moves half the bytes"
    )
    for lane in (UPDATE, NVME_READ, NVME_MIXED):
        assert "compact" not in faster(lane, step_of({}))[1]


def test_a_budget_where_it_decides_what_lives_on_the_drive() -> None:
    assert faster(NVME_READ, step_of({}, can_be_compact=True, homes_by_budget=True)) == (
        "reads of the drive are the bound",
        "a larger host budget, the compact layout, a second drive, or more micro batches per step",
    )
    assert faster(NVME_READ, step_of({}))[1].startswith("homes in host memory (offloadzero.placement, ")


def test_fewer_recomputations_where_there_are_some() -> None:
    """That of TRACE is all of the forward; the backward of an attention without its matrix has a little more."""
    assert faster(COMPUTE, step_of({}))[1] == "a faster device, fewer recomputations, or a shorter sequence"
    without = step_of({}, trace=replace(TRACE, backward_flops=int(2.05e15)))
    assert faster(COMPUTE, without)[1] == "a faster device or a shorter sequence"
    assert faster(CORES, without)[1] == "a shorter sequence or a device that computes beside them"


def test_a_single_remedy_has_no_or() -> None:
    assert faster(D2H, step_of({}))[1] == "a larger micro batch, which sends them less often per token"


@pytest.mark.parametrize(
    ("keys", "own", "expected"),
    [
        (BF16, {}, (True, False)),
        (BF16, {"state_layout": "compact"}, (False, False)),
        ({}, {}, (False, False)),  # fp32 parameters
        ({**BF16, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, {}, (False, False)),
        (BF16, {"placement": "auto"}, (True, True)),
    ],
)
def test_what_a_planned_step_has_left(
    keys: dict[str, Any], own: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    config = load_config({**keys, "offloadzero": {"placement": "host", **own}})
    model = read_model("llama:64/2/4/101").on_meta()
    found = plan_model(model, config, available={TierName.HOST: 1 << 50})
    step = plan_step(found.records, found.plan, found.config, uses=uses_of(found.cut), trace=TRACE)
    assert (step.can_be_compact, step.homes_by_budget) == expected
