"""The forecast against the formulas of the design, and what must hold of it whatever the figures are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import ModelPlanner, uses_of
from offloadzero.observe.bound import CORES
from offloadzero.observe.forecast import PYTHON
from offloadzero.observe.timeline import (
    COMPUTE,
    D2H,
    DEVICE_UPDATE,
    H2D,
    LANDING,
    NVME_READ,
    NVME_WRITE,
    UPDATE,
)
from offloadzero.planning.model.shapes import read_model
from offloadzero.planning.model.trace import MicroBatchTrace
from offloadzero.planning.step.advice import FASTER, faster, forecast_run
from offloadzero.planning.step.forecast import (
    COPY,
    DRIVE,
    OVERLAP,
    Forecast,
    Rates,
    Step,
    compute_seconds,
    forecast,
    plan_step,
)
from offloadzero.planning.step.simulation import SimulatedStep
from offloadzero.planning.step.work import AFTER, BACKWARD, FORWARD, NVME_MIXED, StepTraffic
from tests.support.tiny import settings

LANES = (H2D, D2H, UPDATE, DEVICE_UPDATE, LANDING, NVME_READ, NVME_WRITE)
KNOWN = Rates(
    flops={"bf16": 100e12},
    update={"fp32": 200e9, "compact": 150e9},
    device_update={"fp32": 2e12, "compact": 2e12},
    copy=10e9,
    landing=100e9,
    h2d=50e9,
    d2h=40e9,
    nvme_read=6e9,
    nvme_write=5e9,
    nvme_mixed=7e9,
    nvme_cpu_s_per_byte=5e-11,
    unit_s=3e-4,
)
TRACE = MicroBatchTrace(
    num_tokens=4096,
    forward_flops=10**15,
    backward_flops=3 * 10**15,
    kept_bytes=1,
    peak_bytes=2,
)


def traffic_of(model: str, **keys: Any) -> tuple[int, StepTraffic]:
    source = read_model(model)
    config = load_config(settings("/tmp", **keys))
    found = ModelPlanner(source.on_meta()).plan(config, available={TierName.HOST: 1 << 50})
    return found.num_parameters, plan_step(
        found.records, found.plan, found.config, uses=uses_of(found.cut), trace=None
    ).traffic


def step_of(by_phase: dict[str, dict[str, int]], **keys: Any) -> Step:
    traffic = StepTraffic({phase: by_phase.get(phase, {}) for phase in (FORWARD, BACKWARD, AFTER)}, 0, 100)
    given = {"trace": TRACE, "num_micro": 1, "update_in_backward": False, "dtype": "bf16", "layout": "fp32"}
    return Step(traffic, **{**given, **keys})


def seconds(step: Step, rates: Rates = KNOWN, *, device_is_cpu: bool = False) -> float:
    found = forecast(step, rates, num_cores=2, device_is_cpu=device_is_cpu)
    assert found.seconds is not None, found.unknown
    return found.seconds


def test_updates_hide_behind_one_forward_or_behind_a_backward() -> None:
    update = {AFTER: {UPDATE: int(20 * 200e9)}}  # 20 s; the forward takes 10, the backward 30
    assert seconds(step_of(update)) == pytest.approx((20 + 30) / OVERLAP)
    assert seconds(step_of(update, update_in_backward=True)) == pytest.approx((10 + 30) / OVERLAP)
    found = forecast(step_of(update), KNOWN, num_cores=2, device_is_cpu=False)
    assert (found.bound_s, found.lane) == (pytest.approx(40), COMPUTE)
    assert found.tokens_per_s == pytest.approx(4096 * OVERLAP / 50)
    # Of four micro batches the last forward is the only one that updates hide behind.
    assert seconds(step_of(update, num_micro=4)) == pytest.approx((20 + 3 * 10 + 4 * 30) / OVERLAP)


def test_gradients_are_computed_at_their_own_rate() -> None:
    """Of 3e15 operations of backward 1e15 are the forward again, at its rate."""
    slow = replace(KNOWN, gradient_flops={"bf16": 1e12})
    assert TRACE.recomputed_flops == 10**15
    assert seconds(step_of({}), slow) == pytest.approx((10 + 10 + 2000) / OVERLAP)
    assert compute_seconds(step_of({}, num_micro=2), slow) == pytest.approx(2 * 2020)
    kept = replace(TRACE, backward_flops=2 * 10**15)
    assert kept.recomputed_flops == 0
    assert seconds(step_of({}, trace=kept), slow) == pytest.approx((10 + 2000) / OVERLAP)
    assert seconds(step_of({}, dtype="fp32"), replace(slow, flops={"fp32": 1e15})) == pytest.approx(
        4 / OVERLAP
    )


def test_without_overlap_all_lanes_follow_one_another() -> None:
    """Their own seconds, and no share for what overlaps badly: nothing does."""
    moved = {FORWARD: {H2D: int(50e9), NVME_READ: int(60e9)}, AFTER: {NVME_WRITE: int(50e9)}}
    found = forecast(step_of(moved), KNOWN, num_cores=2, device_is_cpu=False)
    assert found.alone_s == pytest.approx(40 + 1 + 10 + 10 + 100 * 3e-4)
    assert found.alone_s == pytest.approx(sum(s for lane, s in found.lanes_s.items() if lane != "nvme"))
    alone = forecast(step_of({}), KNOWN, num_cores=2, device_is_cpu=False)
    assert alone.alone_s == alone.seconds == pytest.approx(40 / OVERLAP), "one lane, whose ends nothing hides"


def test_on_the_cpu_everything_shares_the_cores() -> None:
    moved = {FORWARD: {H2D: int(10e9)}, AFTER: {UPDATE: int(200e9), NVME_READ: int(60e9)}}
    found = forecast(step_of(moved), KNOWN, num_cores=2, device_is_cpu=True)
    python = 100 * 3e-4 / 2
    assert found.lanes_s[CORES] == pytest.approx(40 + python + 0.5 + 1 + 60e9 * 5e-11 / 2)
    assert set(found.lanes_s) == {CORES, NVME_READ}


def test_computation_on_the_cpu_takes_its_time_though_it_leaves_cores_idle() -> None:
    """40 s of all cores' work in 50 s on a clock; an update of 5 s of theirs and 0.03 s of Python hold it up."""
    half_idle = replace(KNOWN, core_shares={"bf16": 0.8})
    found = forecast(step_of({AFTER: {UPDATE: int(5 * 200e9)}}), half_idle, num_cores=2, device_is_cpu=True)
    python = 100 * 3e-4
    assert found.lanes_s == {CORES: pytest.approx(40 + python / 2 + 5), COMPUTE: pytest.approx(50)}
    assert (found.bound_s, found.lane) == (pytest.approx(50), COMPUTE), "a schedule might have neither wait"
    assert found.seconds == pytest.approx((50 + python + 5) / OVERLAP)
    assert sum(phase.seconds for phase in found.phases) == pytest.approx(found.seconds)
    assert found.alone_s == pytest.approx(max(found.seconds, 40 + python + 5 + 10))
    known = forecast(step_of({}), replace(half_idle, core_shares={}), num_cores=2, device_is_cpu=True)
    assert set(known.lanes_s) == {CORES}, "rates that were kept before"


def test_work_beside_the_computation_costs_what_was_measured() -> None:
    """A forward of 10 s with 1 s of copies, each of which costs 2 s, and 60 GB of the drive at 0.02 s for each GB."""
    holds = {"copy": 2e-10, "drive": 2e-11, "fp32": 1e-11}
    measured = replace(KNOWN, core_shares={"bf16": 1.0}, holds=holds, nvme_beside=0.75)
    moved = {FORWARD: {H2D: int(10e9), NVME_READ: int(60e9)}, BACKWARD: {UPDATE: int(200e9)}}
    found = forecast(step_of(moved), measured, num_cores=2, device_is_cpu=True)
    python, file_engine = 100 * 3e-4, 60 * 0.05
    forward, backward = found.phases
    assert backward.lanes_s[COMPUTE] == pytest.approx(30 + python / 2 + 200 * 0.01), "1 s of updates alone"
    assert forward.lanes_s[COMPUTE] == pytest.approx(10 + python / 2 + 2 + 60 * 0.02)
    # 10 s at 6 GB/s, of which it has three quarters as long as the cores work: 7.5 s of its work in 10 s.
    cores_s = 10 + (python / 2 + 1 + file_engine) / 2
    assert cores_s < 10 / 0.75
    assert forward.lanes_s[NVME_READ] == pytest.approx(10 + 0.25 * cores_s)
    assert found.bound_s == pytest.approx(41 + (python + 1 + file_engine) / 2), (
        "a schedule might keep them apart"
    )
    short = forecast(
        step_of({FORWARD: {NVME_READ: int(6e9)}}), measured, num_cores=2, device_is_cpu=True
    ).phases[0]
    assert short.lanes_s[NVME_READ] == pytest.approx(1 / 0.75), "the whole of it beside the computation"


def test_gradients_on_a_device_do_not_land_on_the_host() -> None:
    _, moved = traffic_of("llama:64/3/4/101", placement="device")
    step = Step(moved, TRACE, 1, True, "bf16", "fp32")
    rates = replace(KNOWN, landing=1.0)
    found = forecast(step, rates, num_cores=2, device_is_cpu=False)
    assert set(found.lanes_s) == {COMPUTE, PYTHON, DEVICE_UPDATE}
    assert forecast(step, rates, num_cores=2, device_is_cpu=True).parts_s[LANDING] == moved.lane(LANDING)


def test_a_drive_for_both_directions_is_one_lane() -> None:
    moved = {AFTER: {NVME_READ: int(600e9), NVME_WRITE: int(500e9)}}
    found = forecast(step_of(moved), KNOWN, num_cores=2, device_is_cpu=False)
    assert found.lane == "nvme"
    assert found.bound_s == pytest.approx(1100 / 7)
    both = forecast(step_of(moved), replace(KNOWN, nvme_mixed=None), num_cores=2, device_is_cpu=False)
    assert both.bound_s == pytest.approx(100)


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_drive_with_one_limit_is_shared_by_phases_that_run_together(in_backward: bool) -> None:
    """Fetches of the forward and writes of the updates are of two phases, and on the drive at the same time."""
    one_limit = replace(KNOWN, nvme_read=2e9, nvme_write=2e9, nvme_mixed=2e9)
    read, written, fetched = int(30e9), int(34e9), int(14e9)
    moved = {
        BACKWARD if in_backward else FORWARD: {NVME_READ: fetched},
        AFTER: {NVME_READ: read, NVME_WRITE: written},
    }
    step = step_of(
        moved, update_in_backward=in_backward, trace=replace(TRACE, forward_flops=1, backward_flops=1)
    )
    found = forecast(step, one_limit, num_cores=2, device_is_cpu=False)
    all_of_it = (read + written + fetched) / 2e9
    assert (found.lane, found.bound_s) == ("nvme", pytest.approx(all_of_it))
    assert found.seconds == pytest.approx(all_of_it / OVERLAP, rel=1e-3)


def test_a_drive_that_mixes_badly_is_bound_by_what_it_does_best() -> None:
    bad = replace(KNOWN, nvme_read=3e9, nvme_write=3e9, nvme_mixed=2e9)
    moved = {FORWARD: {NVME_READ: int(30e9)}, AFTER: {NVME_READ: int(30e9), NVME_WRITE: int(30e9)}}
    step = step_of(moved, trace=replace(TRACE, forward_flops=1, backward_flops=1))
    found = forecast(step, bad, num_cores=2, device_is_cpu=False)
    assert found.bound_s == pytest.approx(90 / 3), "first all reads, then all writes"
    assert found.seconds == pytest.approx(90 / 2 / OVERLAP, rel=1e-3), "the engine mixes them"
    assert found.alone_s is not None
    assert found.alone_s >= found.seconds


def test_the_mixed_rate_counts_in_the_bound_and_where_nothing_overlaps() -> None:
    """All bytes went at the rate of reads, the fastest one; and without overlap the drive was as if it never mixed."""
    uneven = replace(KNOWN, nvme_read=6e9, nvme_write=2e9, nvme_mixed=3e9)
    step = step_of({AFTER: {NVME_READ: int(60e9), NVME_WRITE: int(60e9)}})
    found = forecast(step, uneven, num_cores=2, device_is_cpu=False)
    assert found.lanes_s[NVME_MIXED] == pytest.approx(60 / 6 + 60 / 3), "writes are never faster than that"
    bad = forecast(step, replace(uneven, nvme_mixed=1e9), num_cores=2, device_is_cpu=False)
    others = sum(s for lane, s in bad.lanes_s.items() if not lane.startswith("nvme"))
    assert bad.alone_s == pytest.approx(max(120 / 1 + others, 120 / 1 / OVERLAP))


@pytest.mark.parametrize("lane", [*LANES, COMPUTE, PYTHON])
def test_a_rate_that_is_not_known_is_said(lane: str) -> None:
    names = {UPDATE: "update", DEVICE_UPDATE: "device_update", COMPUTE: "flops", PYTHON: "unit_s"}
    name = names.get(lane, lane.replace(" ", "_"))
    rates = replace(KNOWN, **{name: {} if lane in (UPDATE, DEVICE_UPDATE, COMPUTE) else None})
    found = forecast(step_of({AFTER: dict.fromkeys(LANES, 1)}), rates, num_cores=2, device_is_cpu=False)
    assert found.unknown == (lane,)
    assert (found.seconds, found.bound_s) == (None, None)
    unused = forecast(step_of({}, trace=TRACE), rates, num_cores=2, device_is_cpu=False)
    assert bool(unused.seconds) == (lane not in (COMPUTE, PYTHON)), "what is not used need not be known"


def test_without_a_trace_there_are_no_seconds() -> None:
    found = forecast(step_of({}, trace=None), KNOWN, num_cores=2, device_is_cpu=True)
    assert found.unknown == (COMPUTE,)
    assert found.tokens_per_s is None
    assert forecast_run(found, step_of({}, trace=None), num_tokens=10) is None


def test_operations_that_are_not_all_counted_are_not_known() -> None:
    step = step_of({}, trace=replace(TRACE, uncounted=("aten.strange_mm",)))
    found = forecast(step, KNOWN, num_cores=2, device_is_cpu=True)
    assert (found.unknown, found.seconds) == ((COMPUTE,), None)


sizes = st.dictionaries(st.sampled_from(LANES), st.integers(0, 10**13), max_size=7)


@given(
    st.dictionaries(st.sampled_from([FORWARD, BACKWARD, AFTER]), sizes),
    st.booleans(),
    st.booleans(),
    st.integers(1, 8),
    st.sampled_from(["copy", "landing", "h2d", "d2h", "nvme_read", "nvme_write", "nvme_mixed"]),
    st.tuples(*[st.floats(1e8, 1e11)] * 3),
    st.dictionaries(st.sampled_from([COPY, DRIVE, "fp32"]), st.floats(1e-15, 1e-8)),
    st.none() | st.floats(0.01, 1.0),
)
@hypothesis_settings(max_examples=100, deadline=None)
def test_no_faster_than_the_bound_and_no_slower_than_without_overlap(
    by_phase: dict[str, dict[str, int]],
    in_backward: bool,
    on_cpu: bool,
    num_micro: int,
    faster: str,
    drive: tuple[float, float, float],
    holds: dict[str, float],
    beside: float | None,
) -> None:
    step = step_of(by_phase, update_in_backward=in_backward, num_micro=num_micro)
    rates = replace(KNOWN, nvme_read=drive[0], nvme_write=drive[1], nvme_mixed=drive[2])
    rates = replace(rates, holds=holds, nvme_beside=beside)
    found = forecast(step, rates, num_cores=2, device_is_cpu=on_cpu)
    assert found.bound_s is not None
    assert found.seconds is not None
    assert found.alone_s is not None
    assert found.bound_s <= found.seconds * (1 + 1e-9)
    assert found.seconds <= found.alone_s * (1 + 1e-9)
    assert found.bound_s == max(found.lanes_s.values())
    assert found.lane in FASTER
    twice = replace(rates, **{faster: 2 * getattr(rates, faster)})
    assert seconds(step, twice, device_is_cpu=on_cpu) <= found.seconds * (1 + 1e-9)


def test_a_run_of_tokens() -> None:
    step = step_of({AFTER: {NVME_WRITE: 10**12}})
    found = forecast(step, KNOWN, num_cores=2, device_is_cpu=False)
    assert found.seconds is not None
    run = forecast_run(found, step, num_tokens=4096 * 1000 - 1, endurance_bytes=600 * 10**12)
    assert run is not None
    assert (run.num_steps, run.written_bytes) == (1000, 10**15)
    assert run.days == pytest.approx(1000 * found.seconds / 86_400)
    assert run.drive_years == pytest.approx(600 * found.seconds / (365.25 * 86_400))


def test_a_step_that_is_simulated_longer_waits_for_the_lane_of_its_chain() -> None:
    """The advice went by the bound, and said that nothing which moves bytes would help where reads were waited for."""
    chain = SimulatedStep(5.0, {}, {NVME_READ: 3.0, COMPUTE: 2.0}, ())
    found = Forecast({CORES: 4.0}, (), bound_s=4.0, lane=CORES, seconds=5.0 / OVERLAP, simulated=chain)
    assert found.waits_for == NVME_READ
    assert replace(found, seconds=6.0).waits_for == CORES
    assert replace(found, simulated=None).waits_for == CORES


@pytest.mark.parametrize(
    ("lane", "critical_s", "expected"),
    [
        (CORES, {COMPUTE: 3.8, NVME_READ: 1.2}, (NVME_READ, 0.24)),
        (CORES, {COMPUTE: 4.6, NVME_READ: 0.4}, None),  # too little
        (COMPUTE, {COMPUTE: 5.0}, None),
        (NVME_MIXED, {NVME_READ: 2.0, NVME_WRITE: 2.0, COMPUTE: 1.0}, (COMPUTE, 0.2)),
        (H2D, {H2D: 2.0, UPDATE: 2.0, D2H: 1.0}, (UPDATE, 0.4)),
    ],
)
def test_what_the_step_waits_for_next(
    lane: str, critical_s: dict[str, float], expected: tuple[str, float] | None
) -> None:
    """The computation's advice was that nothing else would help, where reads had a quarter of the chain."""
    chain = SimulatedStep(5.0, {}, critical_s, ())
    found = Forecast({lane: 6.0}, (), bound_s=6.0, lane=lane, seconds=6.3, simulated=chain)
    assert found.waits_for == lane
    assert found.waits_for_next == expected
    assert replace(found, simulated=None).waits_for_next is None


# --- what is advised: nothing that the step does already, or that its configuration rules out ---

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
    found = ModelPlanner(model).plan(config, available={TierName.HOST: 1 << 50})
    step = plan_step(found.records, found.plan, found.config, uses=uses_of(found.cut), trace=TRACE)
    assert (step.can_be_compact, step.homes_by_budget) == expected
