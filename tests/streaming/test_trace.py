"""The trace as a pure function: what it predicts of a step, and what a step that differs costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadzero.schedule.prefetch import Evict, choose_victims, next_uses, plan_prefetch
from offloadzero.schedule.trace import MAX_USES, NUM_REMEMBERED, Trace
from tests.streaming.test_schedule import there_and_back


def followed(trace: Trace, count: int) -> list[int]:
    return list(itertools.islice(trace.upcoming(), count))


def run_step(trace: Trace, uses: Sequence[int]) -> Iterator[list[int]]:
    """Use units in order; yields what the trace expects after each use, to the end of the step."""
    for unit in uses:
        trace.advance(unit)
        yield list(trace.upcoming_in_step())
    trace.finish_step()


def test_the_first_guess_is_forward_and_back() -> None:
    trace = Trace([4, 7, 9])
    assert followed(trace, 6) == [4, 7, 9, 9, 7, 4]
    assert list(trace.upcoming_in_step()) == [4, 7, 9, 9, 7, 4]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=15))
@settings(max_examples=100)
def test_a_repeated_step_is_predicted_exactly(uses: list[int]) -> None:
    """Whatever the first step was, the second of the same order holds no surprise."""
    runs = [unit for unit, _ in itertools.groupby(uses)]  # staying in a unit is one use
    trace = Trace(range(6))
    for _ in run_step(trace, uses):
        pass
    assert followed(trace, len(runs)) == runs
    # A unit that occurs twice must not send the cursor to its other occurrence.
    for position, expected in enumerate(run_step(trace, runs)):
        assert expected == runs[position + 1 :]
    assert followed(trace, len(runs)) == runs


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), st.lists(st.integers(0, 8), max_size=12))
@settings(max_examples=100)
def test_a_changed_order_costs_one_step(before: list[int], after: list[int]) -> None:
    trace = Trace(range(6))
    for uses in (before, after):
        for _ in run_step(trace, uses):
            pass
    expected = [unit for unit, _ in itertools.groupby(after or before)]
    assert list(trace.upcoming_in_step()) == expected


def test_an_unknown_unit_leaves_the_cursor_where_it_was() -> None:
    trace = Trace([0, 1, 2])
    trace.advance(0)
    trace.advance(17)
    assert followed(trace, 6) == [1, 2, 2, 1, 0, 0]
    trace.advance(1)
    trace.finish_step()
    assert followed(trace, 3) == [0, 17, 1]


def test_a_skipped_unit_is_jumped_over() -> None:
    trace = Trace([0, 1, 2, 3])
    trace.advance(0)
    trace.advance(3)
    assert followed(trace, 4) == [3, 2, 1, 0]


class Counted(int):
    """A unit that counts how often it is compared or looked up."""

    num_looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_looks += 1
        return int(self) == other

    def __hash__(self) -> int:
        Counted.num_looks += 1
        return int(self)


def looks_of_departures(num_units: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """In a step all of whose uses depart from the one before it."""
    units = [Counted(index) for index in range(num_units)]
    trace = Trace(units)
    for uses in (units, [*units[1::2], *units[::2]]):
        monkeypatch.setattr(Counted, "num_looks", 0)
        for unit in reversed(uses):
            trace.advance(unit)
        trace.finish_step()
    return Counted.num_looks


def test_departures_take_time_in_proportion_to_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (looks_of_departures(num_units, monkeypatch) for num_units in (200, 800))
    assert 0 < many <= 5 * few


@given(
    st.lists(st.integers(0, 4), max_size=12),
    st.lists(st.tuples(st.integers(-1, 12), st.integers(0, 6)), min_size=1, max_size=12),
)
@settings(max_examples=150)
def test_a_departure_goes_on_at_the_first_place_there_is(
    order: list[int], uses: list[tuple[int, int]]
) -> None:
    """After the same two uses, else at the next use; from here on, and else from the beginning."""
    trace = Trace(order, there_and_back=False)
    previous = None
    for sure, unit in uses:
        trace._sure = sure = min(sure, len(order) - 1)
        ahead = [*range(sure + 1, len(order)), *range(sure + 1)]
        again = [place for place in ahead if order[place] == unit]
        after_previous = [place for place in again if place and order[place - 1] == previous]
        places = after_previous or [place for place in again if place > sure or sure + 1 == len(order)]
        trace._depart(previous, unit)
        assert trace.cursor == [*places, sure][0]
        assert trace._sure == (trace.cursor if after_previous else sure)
        previous = unit


def misses_of_step(trace: Trace, uses: Sequence[int], held: set[int], capacity: int) -> int:
    """Uses of one step that found their unit missing, when the trace says what comes; all sizes are one.

    `held` is carried on from step to step.
    """
    num_misses = 0
    for unit in uses:
        trace.advance(unit)
        sizes = dict.fromkeys(range(100), 1)
        if unit not in held:
            num_misses += 1
            distances = next_uses((*trace.upcoming_in_step(), *trace.order))
            wanted = 1 - (capacity - len(held))
            held -= set(choose_victims(held, distances, num_bytes=sizes, wanted=wanted))
            held.add(unit)
        for operation in plan_prefetch(
            trace.upcoming_in_step(),
            later=trace.order,
            num_bytes=sizes,
            present=set(held),
            protected={unit},
            in_use=unit,
            free_bytes=capacity - len(held),
        ):
            if isinstance(operation, Evict):
                held.remove(operation.unit)
            else:
                held.add(operation.unit)
    trace.finish_step()
    return num_misses


@given(st.integers(3, 12), st.integers(2, 6), st.data())
@settings(max_examples=100)
def test_a_step_that_differs_costs_a_few_stalls_there(
    num_units: int, capacity: int, data: st.DataObject
) -> None:
    """Units skipped, units used once more, in a random place; the steps after it have lost nothing."""
    usual = there_and_back(range(num_units))
    trace, held = Trace(range(num_units)), set[int]()
    misses_of_step(trace, usual, held, capacity)
    known = misses_of_step(trace, usual, held, capacity)
    differs = list(usual)
    num_changes = data.draw(st.integers(1, 3))
    for _ in range(num_changes):
        position = data.draw(st.integers(1, len(differs) - 2))
        if data.draw(st.booleans()):
            del differs[position]
        else:
            differs.insert(position, data.draw(st.integers(0, num_units - 1)))
    assert misses_of_step(trace, differs, held, capacity) <= known + 3 * num_changes
    assert misses_of_step(trace, usual, held, capacity) <= known + 1


@given(st.integers(3, 10), st.integers(3, 5), st.integers(2, 4), st.data())
@settings(max_examples=60)
def test_what_differs_every_few_steps_costs_one_stall_each_time(
    num_units: int, capacity: int, period: int, data: st.DataObject
) -> None:
    """A unit that is left out every few steps: from its third time on both orders are known."""
    skipped = data.draw(st.integers(1, num_units - 2))
    usual = there_and_back(range(num_units))
    shorter = there_and_back([unit for unit in range(num_units) if unit != skipped])
    trace, held = Trace(range(num_units)), set[int]()
    misses_of_step(trace, usual, held, capacity)
    known = misses_of_step(trace, usual, held, capacity)
    for step in range(1, 6 * period):
        uses = shorter if step % period == 0 else usual
        num_misses = misses_of_step(trace, uses, held, capacity)
        if step > 2 * period:
            assert num_misses <= known + 1


def test_an_order_that_changed_for_good_is_followed_soon() -> None:
    trace = Trace(range(4))
    for uses, count in (([0, 1, 2, 3], 20), ([3, 1, 2, 0], NUM_REMEMBERED // 2)):
        for _ in range(count):
            for _ in run_step(trace, uses):
                pass
    assert list(trace.upcoming_in_step()) == [3, 1, 2, 0]


def test_a_known_order_is_taken_up_where_the_step_departs_into_it() -> None:
    trace = Trace(range(4))
    for uses in ([0, 1, 2, 3, 2, 1, 0], [0, 1, 3, 1, 0], [0, 1, 2, 3, 2, 1, 0]):
        for _ in run_step(trace, uses):
            pass
    trace.advance(0)
    trace.advance(1)
    assert list(trace.upcoming_in_step()) == [2, 3, 2, 1, 0]
    trace.advance(3)
    assert list(trace.upcoming_in_step()) == [1, 0]


@given(st.integers(3, 12), st.integers(2, 6), st.data())
@settings(max_examples=60)
def test_a_step_that_turns_back_early_costs_two_stalls(
    num_units: int, capacity: int, data: st.DataObject
) -> None:
    trace, held = Trace(range(num_units)), set[int]()
    usual = there_and_back(range(num_units))
    misses_of_step(trace, usual, held, capacity)
    known = misses_of_step(trace, usual, held, capacity)
    early = there_and_back(range(data.draw(st.integers(1, num_units - 1))))
    assert misses_of_step(trace, early, held, capacity) <= known + 2


def test_more_micro_batches_than_before_begin_anew() -> None:
    trace = Trace(range(3))
    for _ in run_step(trace, [0, 1, 2, 1, 0]):
        pass
    for unit in (0, 1, 2, 1, 0, 1):
        trace.advance(unit)
    assert list(trace.upcoming_in_step()) == [2, 1, 0]


def test_a_loop_that_never_steps_does_not_fill_memory() -> None:
    trace = Trace(range(2))
    for _ in range(MAX_USES):
        trace.advance(0)
        trace.advance(1)
    trace.finish_step()
    assert len(trace.order) == MAX_USES
