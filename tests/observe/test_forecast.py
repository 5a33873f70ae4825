"""A run beside its forecast, from figures: what is compared, and the lane that is named as the cause."""

from __future__ import annotations

from typing import Any

import pytest

from offloadzero.observe.forecast import (
    MIN_STEPS,
    NUM_FIRST,
    ForecastCheck,
    NoForecastError,
    PlannedStep,
    compare,
)

REST = "or other work had the cores"


def records(step_s: float, lanes_s: dict[str, float], **keys: Any) -> list[dict[str, Any]]:
    """Ten steps, of which the first ones were slow."""
    steady = {"step_s": step_s, "lanes_s": lanes_s, "busy_s": {}, "bytes": {}, "waits_s": {}, **keys}
    first = {**steady, "step_s": 100.0, "lanes_s": dict.fromkeys(lanes_s, 100.0)}
    return [first] * NUM_FIRST + [steady] * (MIN_STEPS - NUM_FIRST)


def planned(seconds: float, lanes_s: dict[str, float], **keys: Any) -> PlannedStep:
    return PlannedStep(seconds, lanes_s, {}, **keys)


def test_the_first_steps_are_left_out() -> None:
    found = compare(planned(1.0, {"compute": 0.9}, lane="compute"), records(1.1, {"compute": 1.0}))
    assert found.line == (
        "forecast 1 s per step, measured 1.1 s (median of 8 steps), ratio 1.10; longest lane: forecast compute, "
        "measured compute."
    )


@pytest.mark.parametrize(("step_s", "is_told"), [(1.19, False), (1.21, True), (0.81, False), (0.79, True)])
def test_a_cause_is_named_from_a_fifth_on(step_s: float, is_told: bool) -> None:
    found = compare(planned(1.0, {"compute": 1.0}), records(step_s, {"compute": step_s}))
    assert bool(found.cause) is is_told


def test_the_cause_departs_as_the_step_does() -> None:
    """The drive was faster than its forecast by more than the link was slower."""
    lanes_s = {"h2d": 0.1, "nvme read": 1.0}
    found = compare(planned(1.0, lanes_s), records(1.4, {"h2d": 0.5, "nvme read": 0.2}))
    assert found.cause == "The lane that departs most is h2d: 500 ms, 100 ms were forecast."
    found = compare(planned(1.0, lanes_s), records(0.5, {"h2d": 0.3, "nvme read": 0.6}))
    assert found.cause == "The lane that departs most is nvme read: 600 ms, 1 s were forecast."


def test_what_no_lane_explains_is_said_with_the_longest_wait() -> None:
    waits_s = {"fetch": 0.1, "gradient lease": 0.7}
    found = compare(planned(1.0, {"compute": 0.9}), records(2.0, {"compute": 0.9}, waits_s=waits_s))
    assert (
        found.cause
        == f"The lanes overlapped less than was forecast, {REST}; the longest wait is gradient lease, 700 ms."
    )
    found = compare(planned(1.0, {"compute": 0.9}), records(2.0, {"compute": 1.3}))
    assert found.cause == (
        "The lane that departs most is compute: 1.3 s, 900 ms were forecast. That is less than half of it: the lanes "
        f"overlapped less than was forecast, {REST}."
    )
    found = compare(planned(1.0, {"compute": 0.5}), records(0.6, {"compute": 0.5}))
    assert found.cause == "The lanes overlapped more than was forecast."
    found = compare(planned(1.0, {"h2d": 0.5}), records(0.6, {"compute": 0.5}))
    assert found.cause == "No lane of the forecast was measured."


def test_a_part_of_the_cores_is_the_cause_where_their_time_is_not() -> None:
    """A copy that sleeps takes no time of the cores."""
    plan = planned(1.0, {"cores": 0.9}, parts_s={"h2d": 0.1, "compute": 0.5, "python": 0.0})
    slow = {"cores": 0.9, "compute": 1.9}
    found = compare(plan, records(2.0, slow, busy_s={"h2d": 1.0}))
    assert found.cause == "The lane that departs most is h2d: 1 s, 100 ms were forecast."
    found = compare(plan, records(2.0, {"cores": 1.8, "compute": 1.9}, busy_s={"h2d": 1.0}))
    assert found.cause == "The lane that departs most is cores: 1.8 s, 900 ms were forecast."
    found = compare(plan, records(2.0, slow, busy_s={"h2d": 0.1}, launch_s=1.0))
    assert found.cause.startswith("The lanes overlapped less than was forecast"), (
        "others had the cores meanwhile"
    )


def test_the_forecast_is_made_with_the_first_step_and_checked_once() -> None:
    made: list[Any] = []

    def make(rates: Any) -> PlannedStep:
        made.append(rates)
        return planned(1.0, {"compute": 1.0})

    check = ForecastCheck(make)
    assert made == []
    steps = records(1.0, {"compute": 1.0})
    shown = [{"h2d": float(number)} for number in range(MIN_STEPS)]
    done = [check.add(step, rates) for step, rates in zip(steps, shown, strict=True)]
    assert done == [False] * (MIN_STEPS - 1) + [True]
    assert made == [{"h2d": 0.0}], "once, from what the first step has shown"
    assert check.found is not None
    assert check.found.ratio == 1.0


def test_steps_that_update_nothing_are_left_out() -> None:
    """fp16 skips steps until it has found its loss scale: a forecast of half of the time was as measured by them."""
    lanes_s = {"update": 0.5}
    plan = PlannedStep(1.0, lanes_s, {"update": 100, "d2h": 10})
    skipped = records(1.0, {"update": 0.0}, bytes={"d2h": 10})
    taken = records(2.0, lanes_s, bytes={"update": 90, "d2h": 10})
    found = compare(plan, [*skipped, *taken[NUM_FIRST:]])
    assert (found.ratio, found.num_steps) == (2.0, MIN_STEPS - NUM_FIRST)
    assert found.num_bytes["update"] == 90
    on_device = compare(plan, [*skipped, {**taken[-1], "bytes": {"device update": 5}}])
    assert (on_device.ratio, on_device.num_steps) == (2.0, 1)
    frozen = compare(PlannedStep(1.0, {}, {"d2h": 10}), skipped)
    assert (frozen.ratio, frozen.num_steps) == (1.0, MIN_STEPS - NUM_FIRST)

    check = ForecastCheck(lambda _: plan)
    assert not any(check.add(step, {}) for step in [*skipped, *skipped])
    assert [check.add(step, {}) for step in taken[NUM_FIRST:]] == [False] * 7 + [True]
    assert check.found is not None
    assert check.found.ratio == 2.0


def test_without_a_forecast_the_reason_is_kept() -> None:
    def make(_: object) -> PlannedStep:
        raise NoForecastError("no rates")

    check = ForecastCheck(make)
    assert [check.add(step, {}) for step in records(1.0, {})][-1]
    assert (check.found, check.planned, check.unknown) == (None, None, "no rates")
