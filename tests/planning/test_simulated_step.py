"""The simulated step: small cases by hand, the bytes of the traffic, and the bound."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import ModelPlanner, uses_of
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
from offloadzero.planning.step.discrete_events import Choice, Queue, Tasks, simulate
from offloadzero.planning.step.forecast import Rates, Step, forecast, plan_step, simulated
from offloadzero.planning.step.simulation import LaneRates, SimulatedStep, simulate_step
from offloadzero.planning.step.work import StepWork, UnitUse, UnitWork, work_of_step
from tests.planning.test_time_model import KNOWN, TRACE
from tests.support.tiny import settings

NOT_SHARED = replace(KNOWN, nvme_mixed=None)
LANES = (H2D, D2H, UPDATE, DEVICE_UPDATE, LANDING, NVME_READ, NVME_WRITE)
SECONDS = LaneRates(dict.fromkeys(LANES, 1.0))  # a byte is a second on any lane


def stack(units: Sequence[UnitWork], *, leases: int = 0, **keys: Any) -> StepWork:
    """Units there and back, each with an equal share of the operations; a lease is one byte."""
    share = 1.0 / len(units)
    forward = [UnitUse(number, share) for number in range(len(units))]
    return StepWork(list(units), forward, forward[::-1], leases, **keys)


def seconds(work: StepWork, *, forward_s: float = 0.0, backward_s: float = 0.0, **keys: Any) -> float:
    return simulate_step(work, replace(SECONDS, forward_s=forward_s, backward_s=backward_s, **keys)).seconds


def on_device(update_s: float) -> UnitWork:
    return UnitWork("unit", update={DEVICE_UPDATE: update_s})


def on_host(fetch_s: float = 1.0, **keys: Any) -> UnitWork:
    return UnitWork("unit", lease_bytes=1, fetch={H2D: fetch_s}, **keys)


def on_file(fetch_s: float = 1.0, **keys: Any) -> UnitWork:
    return UnitWork("unit", lease_bytes=1, fetch={H2D: fetch_s, NVME_READ: fetch_s}, **keys)


# --- by hand ---


def test_the_first_forward_waits_for_the_last_update() -> None:
    """Three units on the device: 1 s each there, 2 s back, and 1 s of update, the last one after backward."""
    found = simulate_step(stack([on_device(1.0)] * 3), replace(SECONDS, forward_s=3.0, backward_s=6.0))
    assert found.seconds == pytest.approx(10)
    assert found.busy_s == pytest.approx({COMPUTE: 9, DEVICE_UPDATE: 3})
    assert found.critical_s == pytest.approx({COMPUTE: 9, DEVICE_UPDATE: 1})
    assert found.lane == COMPUTE


def test_updates_after_the_norm_are_made_in_the_order_of_the_forward() -> None:
    """The first unit waits for its update of 1 s; the others hide behind the forward."""
    work = stack([on_device(1.0)] * 3, update_in_backward=False)
    assert seconds(work, forward_s=3.0, backward_s=6.0) == pytest.approx(10)
    assert seconds(work, forward_s=0.3, backward_s=6.0) == pytest.approx(9.1)  # all three are waited for


@pytest.mark.parametrize("core_share", [1.0, 0.5])
@pytest.mark.parametrize(("hold", "expected"), [(0.0, 7), (1.0, 8), (2.0, 9)])
def test_a_copy_holds_computation_up(hold: float, expected: float, core_share: float) -> None:
    """Two units, 1 s there and 2 s back. The first fetch of 1 s has the cores to itself; beside the other is a unit."""
    rates = replace(
        SECONDS, forward_s=2.0, backward_s=4.0, num_cores=2, holds={H2D: hold}, core_share=core_share
    )
    assert simulate_step(stack([on_host()] * 2, leases=2), rates).seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "expected"), [({}, 6), ({"drive_beside": 0.5}, 6.5), ({"drive_hold_s": 0.25}, 6.25)]
)
def test_the_drive_and_computation_hold_each_other_up(keys: dict[str, float], expected: float) -> None:
    """A read of 1 s begins beside a unit's forward of 1 s, and the other's update delivers. It has half of its rate as
    long as that lasts, and 0.5 s of it are left; or the forward takes 1.25 s.
    """
    unit = UnitWork("unit", lease_bytes=1, fetch={NVME_READ: 1.0})
    rates = replace(SECONDS, forward_s=2.0, backward_s=4.0, num_cores=2, **keys)
    assert simulate_step(stack([unit] * 2, leases=2), rates).seconds == pytest.approx(expected)


@pytest.mark.parametrize(("leases", "expected"), [(1, 9), (2, 7)])
def test_leases_limit_how_far_ahead_a_fetch_goes(leases: int, expected: float) -> None:
    """Two units, a fetch of 1 s each, 1 s there, 2 s back. With one lease each way fetches in the computation's way.

    1 lease: fetch A 1, A 1, fetch B 1, B 1, back B 2, fetch A 1, back A 2. With 2 the second fetch hides behind A.
    """
    assert seconds(stack([on_host()] * 2, leases=leases), forward_s=2.0, backward_s=4.0) == pytest.approx(
        expected
    )


def test_a_fetch_waits_for_its_update_and_the_forward_for_that() -> None:
    """Updates of 5 s: both follow the norm, the second fetch comes after 10 s, then 0.5, 1 there, and 2 back."""
    work = stack([on_host(0.5, update={UPDATE: 5.0})] * 2, leases=2, update_in_backward=False)
    assert seconds(work, forward_s=2.0, backward_s=2.0) == pytest.approx(13.5)


def test_backward_waits_for_a_gradient_lease() -> None:
    """Three gradients of 10 s each: with two leases the third unit's backward waits for the first gradient.

    There 3 s, back 1 s, gradients until 34. With one lease each backward waits for the gradient before it.
    """
    unit = on_host(0.0, gradient={D2H: 10.0}, shares_leases=True)
    for num_leases, expected in ((2, 34), (1, 36)):
        work = stack([unit] * 3, leases=3, num_grad_leases=num_leases)
        assert seconds(work, forward_s=3.0, backward_s=3.0) == pytest.approx(expected)


def test_a_gradient_in_passing_waits_for_the_update_before() -> None:
    """One buffer: the next gradient comes to the host when the update has read the one before it."""
    unit = on_host(0.0, gradient={D2H: 1.0}, update={UPDATE: 4.0}, passes=True)
    work = stack([unit] * 3, leases=3, num_passing=1)
    # Each gradient and its update 5 s in turn; the last update ends before the forward of its unit.
    assert seconds(work, forward_s=0.0, backward_s=0.0) == pytest.approx(15)


def test_an_update_delivers_where_the_fetch_is_there_first() -> None:
    """After the norm the fetch asks first: no read of the parameters. In backward the update has begun by then."""
    unit = on_file(1.0, update={UPDATE: 2.0, NVME_READ: 1.0, NVME_WRITE: 1.0})
    rates = replace(SECONDS, forward_s=2.0, backward_s=2.0)
    late = simulate_step(stack([unit] * 2, leases=2, update_in_backward=False), rates)
    early = simulate_step(stack([unit] * 2, leases=2), rates)
    assert late.busy_s[NVME_READ] == pytest.approx(2)  # of states alone
    assert early.busy_s[NVME_READ] > 2
    in_part = stack([replace(unit, trains_whole=False)] * 2, leases=2, update_in_backward=False)
    assert simulate_step(in_part, rates).busy_s[NVME_READ] > 2  # the update has no frozen parameters


def test_inputs_of_checkpointed_units_go_out_and_come_back() -> None:
    """Two units: inputs of 3 s out and 3 s back; those of the first unit come while the second computes."""
    uses = [UnitUse(0, 0.5, 3.0), UnitUse(1, 0.5, 3.0)]
    work = StepWork([on_device(0.0)] * 2, uses, uses[::-1], 0)
    found = simulate_step(work, replace(SECONDS, forward_s=2.0, backward_s=2.0))
    # There 1 and 1; the second's are out at 4 + 3 = 7 and back at 10; the first's, out at 4, wait for their turn.
    assert found.seconds == pytest.approx(14)
    assert found.busy_s == pytest.approx({COMPUTE: 4, D2H: 6, H2D: 6})
    on_drive = replace(work, inputs_on_file=True)
    assert simulate_step(on_drive, replace(SECONDS, forward_s=2.0, backward_s=2.0)).busy_s[NVME_READ] == 6


def test_micro_batches_between_the_first_and_the_last_are_alike() -> None:
    work = stack([on_device(1.0)] * 3, num_micro=3, update_in_backward=False)
    three = seconds(work, forward_s=3.0, backward_s=6.0)
    assert three == pytest.approx(28)
    assert seconds(replace(work, num_micro=50), forward_s=3.0, backward_s=6.0) == pytest.approx(28 + 47 * 9)


def test_python_launches_ahead_of_a_device_and_takes_turns_with_a_cpu() -> None:
    work = stack([on_device(0.0)] * 2)
    assert seconds(work, forward_s=2.0, backward_s=2.0, launch_s=0.1) == pytest.approx(4)
    assert seconds(work, forward_s=2.0, backward_s=2.0, launch_s=2.0) == pytest.approx(8)
    assert seconds(work, forward_s=2.0, backward_s=2.0, launch_s=0.1, num_cores=2) == pytest.approx(4.4)


def test_matrices_that_are_updated_whole_are_so_on_the_device() -> None:
    """From host memory, of a model with nothing else: the lane of the host's updates has no rate then."""
    work = stack([on_host(0.0, update={D2H: 0.5, H2D: 0.5, DEVICE_UPDATE: 2.0})] * 2, leases=2)
    rates = {lane: rate for lane, rate in SECONDS.bytes_per_s.items() if lane != UPDATE}
    found = simulate_step(work, replace(SECONDS, bytes_per_s=rates, num_cores=4, holds={UPDATE: 1.0}))
    assert found.busy_s[DEVICE_UPDATE] >= 4  # beside copies, which share the cores
    assert UPDATE not in found.busy_s


def test_lanes_share_the_cores_and_the_drive() -> None:
    """Update and computation want all cores; reads and writes want the one drive."""
    work = stack([on_host(0.0, update={UPDATE: 2.0})] * 2, leases=2)
    assert seconds(work, forward_s=2.0, backward_s=2.0, num_cores=4) == pytest.approx(8)
    unit = on_host(0.0, update={NVME_READ: 8.0, NVME_WRITE: 8.0}, num_chunks=8)
    apart = seconds(stack([unit] * 4, leases=4))
    assert seconds(stack([unit] * 4, leases=4), drive_bytes_per_s=1.0) == pytest.approx(64)
    assert 32 <= apart < 40


# --- beside the bytes and the bound ---

PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": "host",
    "nvme": "nvme",
    "states on nvme": {"param": "host", "states": "nvme"},
    "partly": [
        {"units": "*", "param": "nvme", "states": "host"},
        {"units": "model.layers.1", "param": "device", "states": "device"},
    ],
    "some on the device": {"param": "device", "master": "host", "exp_avg": "device", "exp_avg_sq": "nvme"},
}


@functools.cache
def step_of(placement: str, clipping: float, num_micro: int, num_blocks: int = 3) -> Step:
    source = settings("/tmp", placement=PLACEMENTS[placement], gradient_accumulation_steps=num_micro)
    config = load_config(source | {"gradient_clipping": clipping})
    model = read_model(f"llama:64/{num_blocks}/4/101").on_meta()
    found = ModelPlanner(model).plan(config, available={TierName.HOST: 1 << 50})
    return plan_step(found.records, found.plan, found.config, uses=uses_of(found.cut), trace=TRACE)


def simulated_step(step: Step, rates: Rates = KNOWN, *, device_is_cpu: bool = False) -> SimulatedStep:
    found = simulated(step, rates, num_cores=2, device_is_cpu=device_is_cpu)
    assert found is not None
    return found


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_lanes_move_the_bytes_of_the_traffic(placement: str, clipping: float, num_micro: int) -> None:
    """All but the drive's reads of parameters, some of which updates spare."""
    step = step_of(placement, clipping, num_micro, num_blocks=5)
    moved = dict(simulated_step(step, NOT_SHARED).busy_s)
    expected = dict(forecast(step, NOT_SHARED, num_cores=2, device_is_cpu=False).lanes_s)
    assert moved.pop(NVME_READ, 0.0) <= expected.pop(NVME_READ, 0.0) * (1 + 1e-9)
    assert moved.pop(PYTHON) > 0  # up to a step ahead, and so of another one
    del expected[PYTHON]
    assert moved == pytest.approx(expected, rel=1e-6)


@given(
    st.sampled_from(sorted(PLACEMENTS)),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.sampled_from([0.001, 0.1, 1.0, 10.0]), min_size=7, max_size=7),
)
@example("partly", 1.0, 4, True, [1.0, 0.001, 0.1, 0.001, 0.001, 0.1, 0.001])
@example("nvme", 1.0, 1, False, [0.1, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001])
@hypothesis_settings(max_examples=40, deadline=None)
def test_no_faster_than_the_bound_and_no_slower_than_without_overlap(
    placement: str, clipping: float, num_micro: int, on_cpu: bool, factors: list[float]
) -> None:
    step = step_of(placement, clipping, num_micro)
    rates = scaled(factors)
    found = simulated_step(step, rates, device_is_cpu=on_cpu)
    said = forecast(step, rates, num_cores=2, device_is_cpu=on_cpu)
    spared = step.traffic.by_phase["forward"].get(NVME_READ, 0)
    lanes = {lane: s for lane, s in said.lanes_s.items() if lane != "nvme"}
    if NVME_READ in lanes and rates.nvme_read:
        lanes[NVME_READ] -= spared / rates.nvme_read
    assert found.seconds >= max(lanes.values()) * (1 - 0.005)
    alone = simulated_step(step, replace(rates, nvme_mixed=None))
    assert (
        alone.seconds <= sum(forecast(step, rates, num_cores=2, device_is_cpu=False).lanes_s.values()) * 1.005
    )


def scaled(factors: Sequence[float]) -> Rates:
    flops, update, h2d, d2h, landing, read, write = factors
    return replace(
        KNOWN,
        flops={"bf16": 1e18 * flops},
        update={"fp32": 200e9 * update},
        h2d=50e9 * h2d,
        d2h=40e9 * d2h,
        copy=10e9 * h2d,
        landing=100e9 * landing,
        nvme_read=6e9 * read,
        nvme_write=5e9 * write,
        nvme_mixed=None,
        unit_s=1e-7,
    )


@given(
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 3),
    st.sampled_from(["device", "host"]),
    st.lists(st.sampled_from([0.01, 0.1, 1.0, 10.0]), min_size=7, max_size=7),
    st.integers(0, 6),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_a_higher_rate_makes_no_step_slower(
    clipping: float, num_micro: int, placement: str, factors: list[float], lane: int
) -> None:
    step = step_of(placement, clipping, num_micro)
    faster = [2 * factor if number == lane else factor for number, factor in enumerate(factors)]
    before, after = (simulated_step(step, scaled(each)).seconds for each in (factors, faster))
    assert after <= before * 1.005


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("slow", [H2D, D2H, UPDATE, COMPUTE, NVME_WRITE])
def test_a_lane_that_dominates_is_the_bound_where_fetches_are_deep(slow: str, clipping: float) -> None:
    """Equal units: what else there is hides behind it, but for one unit's way at a turn."""
    num_units = 24
    lanes = {H2D: 0.1, D2H: 0.1, UPDATE: 0.1, NVME_WRITE: 0.1} | ({slow: 10.0} if slow != COMPUTE else {})
    unit = on_host(
        lanes[H2D],
        gradient={D2H: lanes[D2H], LANDING: 0.1},
        update={UPDATE: lanes[UPDATE], NVME_READ: 0.1, NVME_WRITE: lanes[NVME_WRITE]},
        shares_leases=True,
        passes=not clipping,
    )
    work = stack([unit] * num_units, leases=6, update_in_backward=not clipping)
    phase_s = 10.0 * num_units if slow == COMPUTE else 0.1 * num_units
    found = simulate_step(work, replace(SECONDS, forward_s=phase_s, backward_s=2 * phase_s))
    bound_s = found.busy_s[slow]
    assert bound_s <= found.seconds * (1 + 1e-9)
    assert found.seconds <= bound_s * 1.06
    assert found.lane == slow


def test_shares_of_operations_are_those_of_parameters() -> None:
    source = read_model("gpt:64/3/4/101")
    config = load_config(settings("/tmp", placement="host"))
    found = ModelPlanner(source.on_meta()).plan(config, available={TierName.HOST: 1 << 50})
    work = work_of_step(found.records, found.plan, found.config, uses=uses_of(found.cut))
    for uses in (work.forward, work.backward):
        assert sum(use.share for use in uses) == pytest.approx(1)
    blocks = [use for use in work.forward if ".h." in work.units[use.unit].name]
    assert len({use.share for use in blocks}) == 1
    tied = [use.share for use in work.forward if "wte" in work.units[use.unit].name]
    assert sorted(map(bool, tied)) in ([True], [False, True]), "looked up, then multiplied by"


def test_a_step_of_a_hundred_units_is_simulated_at_once() -> None:
    import time

    unit = on_file(
        1.0, gradient={D2H: 1.0, LANDING: 1.0}, update={UPDATE: 1.0, NVME_READ: 2.0, NVME_WRITE: 2.0}
    )
    work = stack([unit] * 100, leases=4)
    rates = replace(SECONDS, forward_s=100.0, backward_s=200.0, launch_s=0.1)
    begun_s = time.process_time()
    simulate_step(work, rates)
    assert time.process_time() - begun_s < 0.5, "some 50 ms on an idle core"


# --- tasks on lanes: small cases by hand, and what must hold of any ---


A, B = Queue("a"), Queue("b")


def test_a_lane_does_one_task_at_a_time_and_waits() -> None:
    tasks = Tasks()
    one = tasks.add(A, 2.0, [])
    two = tasks.add(B, 3.0, [one])
    three = tasks.add(A, 1.0, [])
    both = tasks.join([two, three])
    found = simulate(tasks)
    assert found.starts_s == [0, 2, 2, 5]
    assert found.ends_s == [2, 5, 3, 5]
    assert found.critical_s(both) == {"a": 2, "b": 3}
    assert found.critical_s(both, since_s=1.0) == {"a": 1, "b": 3}


def test_a_queue_keeps_its_order_and_ranks_go_first() -> None:
    tasks = Tasks()
    late = tasks.add(B, 5.0, [])
    head = tasks.add(A, 1.0, [late])
    behind = tasks.add(A, 1.0, [])  # could begin, but stands behind one that cannot
    other = tasks.add(Queue("a", 1), 7.0, [])
    found = simulate(tasks)
    assert [found.starts_s[task] for task in (other, head, behind)] == [0, 7, 8]
    assert found.critical_s(behind) == {"a": 9}


@pytest.mark.parametrize(("asks_after", "ends_s"), [(1.0, 6.0), (3.0, 11.0)])
def test_a_choice_is_made_by_what_has_begun(asks_after: float, ends_s: float) -> None:
    """The update begins after 2 s, has its values after 6, and is home after 10; reading it takes 1."""
    tasks = Tasks()
    asked = tasks.add(Queue("asks"), asks_after, [])
    before = tasks.add(B, 2.0, [])
    update = tasks.add(B, 4.0, [before])
    home = tasks.add(Queue("drive"), 4.0, [update])
    read = tasks.add(A, 1.0, [asked], choice=Choice(asked, update, update, home))
    assert simulate(tasks).ends_s[read] == ends_s


def test_lanes_that_share_slow_each_other_down() -> None:
    def speeds(lanes: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(lanes, 1.0 / len(lanes))

    tasks = Tasks()
    short, long = tasks.add(A, 1.0, []), tasks.add(B, 3.0, [])
    found = simulate(tasks, speeds)
    assert found.ends_s[short] == pytest.approx(2)
    assert found.ends_s[long] == pytest.approx(4)


def test_tasks_that_wait_for_each_other_are_named() -> None:
    tasks = Tasks()
    tasks.add(A, 1.0, [1], "the first")
    tasks.add(A, 1.0, [], "the second")
    with pytest.raises(AssertionError, match="2 tasks wait for each other: the first"):
        simulate(tasks)


def test_a_task_waits_for_earlier_ones_only_once() -> None:
    tasks = Tasks()
    one = tasks.add(A, 1.0, [])
    two = tasks.add(B, 1.0, [one, one, None])
    assert simulate(tasks).ends_s[two] == 2


# Each task: its lane, its seconds, and how far back are those that it waits for.
task = st.tuples(st.integers(0, 3), st.floats(0.0, 10.0), st.lists(st.integers(1, 8), max_size=3))


@given(st.lists(task, min_size=1, max_size=40), st.integers(0, 3), st.floats(0.1, 1.0))
@hypothesis_settings(max_examples=100, deadline=None)
def test_no_faster_than_a_lane_and_no_slower_with_a_faster_one(
    given_tasks: list[tuple[int, float, list[int]]], lane: int, factor: float
) -> None:
    def ends(factors: dict[int, float]) -> list[float]:
        tasks = Tasks()
        for number, (on, seconds, back) in enumerate(given_tasks):
            after = [number - distance for distance in back if distance <= number]
            tasks.add(Queue(str(on)), seconds * factors.get(on, 1.0), after)
        return list(simulate(tasks).ends_s)

    before, after = ends({}), ends({lane: factor})
    busy = [sum(seconds for on, seconds, _ in given_tasks if on == name) for name in range(4)]
    assert max(before) >= max(busy) * (1 - 1e-9)
    assert max(before) <= sum(busy) * (1 + 1e-9)
    for slow_s, fast_s in zip(before, after, strict=True):
        assert fast_s <= slow_s + 1e-9
