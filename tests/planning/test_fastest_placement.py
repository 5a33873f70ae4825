""" "auto" by time: made times and made rates under which another order is faster, the budgets, and the engine."""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.cli.plan.answer import Planner
from offloadzero.config import BudgetConfig, OffloadConfig
from offloadzero.core.segments import SegmentKind
from offloadzero.memory.device import find_device
from offloadzero.planning import placement as module
from offloadzero.planning.engine_plan import memory_with, with_keys
from offloadzero.planning.hardware import Hardware, Memory, cache_file, describe
from offloadzero.planning.memory_plan import MemoryPlan, plan_memory
from offloadzero.planning.placement import (
    BY_BYTES,
    Filling,
    FoundPlacement,
    choose_placement,
    fastest_placement,
    filling_text,
    trace_by_size,
)
from offloadzero.planning.step.forecast import Rates, plan_step
from offloadzero.planning.step.work import Uses
from offloadzero.update.records import Record
from offloadzero.update.spec import UpdateForm
from tests.planning.planners import planner_of
from tests.planning.test_auto_placement import (
    COUNT,
    DEVICE,
    GIB,
    GRAD,
    HOST,
    M1,
    M2,
    MASTER,
    NVME,
    PARAM,
    PLENTY,
    auto,
    unbounded,
)
from tests.planning.test_memory_plan import records
from tests.planning.test_time_model import KNOWN
from tests.support.tiny import TinyModel, settings, tokens

NUM = 12
MIB = 1 << 20
STATE_KINDS = (MASTER, M1, M2)
SLOW_DRIVE = replace(KNOWN, nvme_read=1e9, nvme_write=1e9, nvme_mixed=1e9, flops={"bf16": 1e15}, unit_s=1e-9)


def in_host(found: FoundPlacement, *kinds: Any) -> int:
    return sum(tier is HOST and kind in kinds for (_, kind), tier in found.placement.items())


def away(plan: MemoryPlan, *kinds: Any) -> int:
    return sum(tier is NVME and kind in kinds for (_, kind), tier in plan.placement.items())


def room_for_some(units: list[Record], **keys: Any) -> OffloadConfig:
    """A host budget with room for half of the states, and no record on the device."""
    config = auto(10 * COUNT, 0, **keys)
    nothing = {(unit.index, kind): NVME for unit in units for kind in (*unit.layout, GRAD)}
    needed = plan_memory(units, unbounded(config), placement=nothing).tier_bytes(HOST)
    return replace(config, budgets=BudgetConfig(10 * COUNT, needed + 5 * NUM * (COUNT + 4096)))


@pytest.mark.parametrize("kinds", [STATE_KINDS, (GRAD,), (PARAM,)], ids=["states", "gradients", "parameters"])
def test_what_costs_time_moves_up_first(kinds: tuple[SegmentKind, ...]) -> None:
    """Made times: segments of these kinds cost time where they are on the drive, and nothing else does."""
    units = list(records(*[COUNT] * NUM))
    config = room_for_some(units, gradient_clipping=1.0)
    found = fastest_placement(units, config, PLENTY, seconds_of=lambda plan: 1.0 + away(plan, *kinds))
    by_bytes = FoundPlacement(choose_placement(units, config, PLENTY), ())
    assert in_host(found, *kinds) >= max(NUM, in_host(by_bytes, *kinds))
    if kinds == STATE_KINDS:  # the last ones by bytes
        assert in_host(found, *kinds) > in_host(by_bytes, *kinds)
    plan = plan_memory(units, config, placement=found.placement)  # raises where a budget is exceeded
    assert found.tried[0].seconds == 1.0 + away(plan, *kinds) == min(one.seconds for one in found.tried)
    assert [one.seconds for one in found.tried] == sorted(one.seconds for one in found.tried)


@pytest.fixture
def told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation that tells smaller differences apart: those of small models."""
    monkeypatch.setattr(module, "WORTH", 0.005)


def test_of_equally_fast_placements_the_order_by_bytes_is_taken() -> None:
    units = list(records(*[COUNT] * NUM))
    config = room_for_some(units)
    found = fastest_placement(units, config, PLENTY, seconds_of=lambda _: 1.0)
    assert found.placement == choose_placement(units, config, PLENTY)
    barely = fastest_placement(
        units, config, PLENTY, seconds_of=lambda plan: 1.0 + away(plan, *STATE_KINDS) * 1e-4
    )
    assert barely.placement == found.placement, "no simulation tells so little apart"
    chosen, others = barely.lines(4096)
    assert barely.tried[0].seconds > barely.tried[1].seconds, "another one is faster, by less than that"
    assert chosen.endswith(f"no more than 5.0% above the shortest of {len(barely.tried)} placements.")
    assert others.startswith("others: ")


def test_where_nothing_fits_the_refusal_is_that_of_the_order_by_bytes() -> None:
    units = list(records(*[COUNT] * NUM))
    config = auto(0, 0)
    found = fastest_placement(units, config, PLENTY, seconds_of=lambda _: 1.0)
    assert found == FoundPlacement(choose_placement(units, config, PLENTY), ())
    assert list(found.lines(8)) == []


def timed(units: list[Record], config: OffloadConfig, rates: Rates, num_tokens: int) -> FoundPlacement:
    uses = Uses(tuple(range(len(units))), tuple(reversed(range(len(units)))))
    hardware = Hardware(memory=Memory(host=GIB, device=GIB, nvme=GIB), rates=rates, num_cores=8)
    trace = trace_by_size(units, config, uses=uses, num_tokens=num_tokens)

    def seconds_of(plan: MemoryPlan) -> float:
        found = hardware.simulated(plan_step(units, plan, config, uses=uses, trace=trace))
        return inf if found is None else found.seconds

    return fastest_placement(units, config, PLENTY, seconds_of=seconds_of)


@pytest.mark.usefixtures("told_apart")
def test_states_come_before_gradients_where_backward_hides_those() -> None:
    """With clipping a forward has all states to hide, and backward only the gradients' writes: it is long enough."""
    units = list(records(*[64 * COUNT] * NUM))
    config = room_for_some(units, gradient_clipping=1.0)
    config = replace(
        config, budgets=BudgetConfig(10 * 64 * COUNT, (config.budgets.host or 0) + 220 * NUM * COUNT)
    )
    tokens_that_hide = 30_000  # backward computes for about a millisecond a unit, the drive writes 5 MB in 5
    found = timed(units, config, SLOW_DRIVE, tokens_that_hide * 200)
    by_bytes = choose_placement(units, config, PLENTY)
    first = next(one for one in found.tried if one.homes == frozenset(by_bytes.items()))
    assert found.tried[0].seconds < 0.985 * first.seconds
    assert in_host(found, *STATE_KINDS) > in_host(FoundPlacement(by_bytes, ()), *STATE_KINDS)
    assert in_host(found, GRAD) < in_host(FoundPlacement(by_bytes, ()), GRAD)
    plan = plan_memory(units, config, placement=found.placement)
    assert plan.tier_bytes(HOST) <= (config.budgets.host or 0)
    assert plan.tier_bytes(DEVICE) <= (config.budgets.device or 0)


def test_a_device_that_updates_slowly_is_left_alone() -> None:
    units = list(records(*[COUNT] * NUM))
    config = auto(70 * COUNT, GIB)
    slow, fast = (
        timed(units, config, replace(KNOWN, device_update={"fp32": rate}), num_tokens=1)
        for rate in (1e8, 1e13)
    )
    assert choose_placement(units, config, PLENTY) == fast.placement
    num = [sum(found.placement[u.index, M1] is DEVICE for u in units) for found in (slow, fast)]
    assert num[0] < num[1]
    assert (
        "updates on the host alone" in slow.tried[0].text()
        or "of those that have room" in slow.tried[0].text()
    )


def test_a_rate_that_is_not_known_leaves_the_order_by_bytes() -> None:
    units = list(records(*[COUNT] * NUM))
    config = room_for_some(units)
    found = timed(units, config, replace(KNOWN, nvme_read=None), num_tokens=1)
    assert found == FoundPlacement(choose_placement(units, config, PLENTY), ())


def test_the_words_name_what_was_chosen_and_what_was_slower() -> None:
    units = list(records(*[COUNT] * NUM))
    config = room_for_some(units, gradient_clipping=1.0)
    found = fastest_placement(units, config, PLENTY, seconds_of=lambda plan: 1.0 + away(plan, *STATE_KINDS))
    chosen, slower = found.lines(4096)
    assert chosen.startswith(
        "auto, by the simulated step with 4,096 tokens in a micro batch, without attention: to the host states"
    )
    assert filling_text(found.tried[0].filling) in chosen
    assert f", the shortest of {len(found.tried)} placements" in chosen
    assert slower.startswith("slower: ")
    assert filling_text(found.tried[1].filling) in slower
    turned = Filling(to_host=BY_BYTES.to_host, last_on_device=True, last_in_host=True, device_share=0.5)
    assert filling_text(turned) == (
        "to the host parameters, then gradients, then states, the last units first; updates on the device of the last "
        "units, 50% of those that have room"
    )


# --- what the machine has ---


def planner_on(memory: Memory, rates: Rates, **question: Any) -> Planner:
    """Of a small model on a machine with a device."""
    hardware = Hardware(memory=memory, rates=rates, num_cores=8, device="a card")
    return planner_of("gpt:192/8/4/500", memory, form=UpdateForm.TORCH, hardware=hardware, **question)


@functools.cache
def fuller_by_time(*, has_inputs: bool = False) -> tuple[dict[str, Any], Rates, int, int]:
    """A configuration whose placement by time takes more of the host than that by bytes; both, in bytes.

    `has_inputs`: it sends inputs of checkpointed units to the host, which come beside both.
    """
    plenty = Memory(host=GIB, device=GIB, nvme=GIB)
    rates = replace(KNOWN, nvme_read=1e8, nvme_write=1e8, nvme_mixed=None, flops={"bf16": 1e12}, unit_s=1e-6)
    inputs = {"activation_checkpoints": {"tier": "host"}} if has_inputs else {}
    for budget in range(8 << 20, 60 << 20, 1 << 20):
        config = settings(
            "/tmp",
            placement="auto",
            placement_tokens=256,
            update={"chunk_elements": 65_536, "num_chunks_in_flight": 3},
            budgets={"device": 8 << 20, "host": budget},
            **inputs,
        )
        taken = [
            planner_on(plenty, rates).answer(config, by_time=by_time).planned.plan.tier_bytes(HOST)
            for by_time in (False, True)
        ]
        if taken[0] < taken[1]:
            return config, rates, taken[0], taken[1]
    raise AssertionError("no budget that both fill differently")


@pytest.mark.usefixtures("told_apart")
def test_of_a_machine_that_has_less_than_the_budgets_no_more_is_taken() -> None:
    """The budget has room for the faster placement, and the machine for the other one: the engine would refuse it."""
    config, rates, by_bytes, by_time = fuller_by_time()
    for has in (by_time, by_time - 1):
        found = planner_on(Memory(host=has, device=GIB, nvme=GIB), rates).answer(config, by_time=True)
        assert found.verdict.fits
        assert (found.planned.plan.tier_bytes(HOST) == by_time) == (has == by_time)
    assert by_bytes < by_time


def test_a_change_is_judged_by_the_placement_that_the_engine_takes() -> None:
    """By bytes it fits as it is, and by time, with inputs beside it, it does not: no change was named."""
    config, rates, by_bytes, by_time = fuller_by_time(has_inputs=True)
    plenty = Memory(host=GIB, device=GIB, nvme=GIB)
    inputs = planner_on(plenty, rates, sequence=16).answer(config).beside.host
    assert inputs > 0
    small = Memory(host=inputs + by_time - 1, device=GIB, nvme=GIB)
    asked = planner_on(small, rates, sequence=16)
    assert asked.answer(config).verdict.fits
    assert not asked.answer(config, by_time=True).verdict.fits
    assert not asked.verdict(config).fits
    change = asked.smallest_change(config)
    assert change.keys or change.more
    asked = planner_on(memory_with(small, change.more), rates, sequence=16)
    assert asked.answer(with_keys(config, change.keys), by_time=True).verdict.fits
    assert by_bytes < by_time


@pytest.mark.usefixtures("told_apart")
def test_python_is_there_before_auto_looks_at_what_is_free() -> None:
    """With room for the faster placement and for Python it is taken, with a byte less another one that fits."""
    config, rates, _, by_time = fuller_by_time()
    for more in (0, -1):
        memory = Memory(host=by_time + 60 * MIB + more, device=GIB, nvme=GIB)
        found = planner_on(memory, rates, process_bytes=60 * MIB).answer(config, by_time=True)
        assert found.verdict.fits
        assert (found.planned.plan.tier_bytes(HOST) == by_time) == (more == 0)


# --- the engine ---


def trained(config: dict[str, Any]) -> tuple[list[float], str]:
    torch.manual_seed(1)
    engine, *_ = offloadzero.initialize(model=TinyModel(), config=config)
    try:
        losses = []
        for step in range(3):
            loss = engine(tokens(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, engine.memory_table()
    finally:
        engine.close()


def test_an_engine_goes_by_what_was_measured_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drive = tmp_path / "drive"
    drive.mkdir()
    config = settings(
        drive,
        placement="auto",
        budgets={"device": "200KiB", "host": "800KiB"},
        update={"num_chunks_in_flight": 3},
    )
    by_bytes, table = trained(config)
    assert "by the simulated step" not in table
    config["offloadzero"]["placement_tokens"] = 18
    with caplog.at_level(logging.WARNING):
        assert trained(config)[0] == by_bytes
    command = "`offloadzero plan --model SPEC --config FILE --hardware probe`"
    assert f"goes by bytes: this machine has not been measured. {command} does that once" in caplog.text
    identity = describe(find_device("cpu"), [drive])
    kept = Hardware(memory=Memory(host=GIB), rates=SLOW_DRIVE, num_cores=2, identity=identity)
    path = cache_file(identity)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(replace(kept, rates=replace(SLOW_DRIVE, flops={}, copy=None)).to_json()))
    with caplog.at_level(logging.WARNING):
        losses, table = trained(config)
    assert losses == by_bytes
    said = "goes by bytes: no rate of compute, d2h, h2d is known of this machine"
    assert said in caplog.text
    assert said in table
    path.write_text(json.dumps(kept.to_json()))
    by_time, table = trained(config)
    assert "goes by bytes" not in table
    assert by_time == by_bytes
    assert "auto, by the simulated step with 18 tokens in a micro batch" in table
