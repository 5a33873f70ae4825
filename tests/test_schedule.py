"""The trace and the prefetch decisions as pure functions: properties, and a brute-force oracle on small cases."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadzero.schedule.prefetch import Evict, Fetch, eviction_order, next_uses, plan_prefetch
from offloadzero.schedule.trace import Trace

NEVER = 10**9


def distance(upcoming: Sequence[int], unit: int) -> int:
    """An independent spelling of "uses until the next one"."""
    return upcoming.index(unit) if unit in upcoming else NEVER


@dataclass(frozen=True)
class Situation:
    upcoming: tuple[int, ...]
    num_bytes: dict[int, int]
    present: frozenset[int]
    protected: frozenset[int]
    free_bytes: int


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    num_units = draw(st.integers(1, 7))
    units = range(num_units)
    present = draw(st.frozensets(st.sampled_from(units)))
    return Situation(
        upcoming=tuple(draw(st.lists(st.sampled_from(units), max_size=20))),
        num_bytes={unit: draw(st.integers(1, 6)) for unit in units},
        present=present,
        protected=draw(st.frozensets(st.sampled_from(sorted(present)))) if present else frozenset(),
        free_bytes=draw(st.integers(0, 12)),
    )


def plan(case: Situation) -> list[Evict | Fetch]:
    return plan_prefetch(
        iter(case.upcoming),
        num_bytes=case.num_bytes,
        present=case.present,
        protected=case.protected,
        free_bytes=case.free_bytes,
    )


@given(situations())
@settings(max_examples=400, deadline=None)
def test_operations_are_possible_one_after_the_other(case: Situation) -> None:
    held, free = set(case.present), case.free_bytes
    for operation in plan(case):
        size = case.num_bytes[operation.unit]
        if isinstance(operation, Evict):
            assert operation.unit in held, "what is not there cannot leave"
            held.remove(operation.unit)
            free += size
        else:
            assert operation.unit not in held, "what is there is not fetched"
            held.add(operation.unit)
            free -= size
        assert free >= 0, "over budget"


@given(situations())
@settings(max_examples=400, deadline=None)
def test_protected_units_and_units_needed_earlier_stay(case: Situation) -> None:
    leaving: list[int] = []
    for operation in plan(case):
        if isinstance(operation, Evict):
            assert operation.unit not in case.protected
            leaving.append(operation.unit)
            continue
        for victim in leaving:
            assert distance(case.upcoming, victim) > distance(case.upcoming, operation.unit)
        leaving = []
    assert not leaving, "an eviction that makes room for nothing"


@given(situations())
@settings(max_examples=400, deadline=None)
def test_fetches_come_in_the_order_of_use_and_skip_nobody(case: Situation) -> None:
    fetched = [operation.unit for operation in plan(case) if isinstance(operation, Fetch)]
    order = [unit for unit in dict.fromkeys(case.upcoming) if unit not in case.present]
    assert fetched == order[: len(fetched)]
    assert len(set(fetched)) == len(fetched)


@given(situations())
@settings(max_examples=400, deadline=None)
def test_it_stops_only_where_nothing_more_is_possible(case: Situation) -> None:
    held, free = set(case.present), case.free_bytes
    for operation in plan(case):
        size = case.num_bytes[operation.unit]
        if isinstance(operation, Evict):
            held.remove(operation.unit)
            free += size
        else:
            held.add(operation.unit)
            free -= size
    missing = [unit for unit in dict.fromkeys(case.upcoming) if unit not in held]
    if not missing:
        return
    movable = {
        unit
        for unit in held - case.protected
        if distance(case.upcoming, unit) > distance(case.upcoming, missing[0])
    }
    assert free + sum(case.num_bytes[unit] for unit in movable) < case.num_bytes[missing[0]]


@given(situations())
@settings(max_examples=400, deadline=None)
def test_who_leaves_is_needed_later_than_who_stays(case: Situation) -> None:
    for operation in plan(case):
        if not isinstance(operation, Evict):
            return
        stays = case.present - case.protected - {operation.unit}
        leaving = {op.unit for op in plan(case) if isinstance(op, Evict)}
        for unit in stays - leaving:
            assert distance(case.upcoming, operation.unit) >= distance(case.upcoming, unit)


def test_next_uses_are_the_first_ones() -> None:
    assert next_uses([3, 1, 3, 2, 1]) == {3: 0, 1: 1, 2: 3}
    assert next_uses([]) == {}


def test_eviction_order_is_furthest_first_and_never_used_before_all() -> None:
    assert eviction_order({1, 2, 3, 4}, {1: 5, 2: 0, 3: 9}) == [4, 3, 1, 2]
    assert eviction_order(set(), {}) == []


# --- the number of fetches ---


def fewest_fetches(uses: Sequence[int], capacity: int) -> int:
    """The minimum over all choices of whom to give up, for units of one size, starting with nothing."""

    @functools.cache
    def search(position: int, held: frozenset[int]) -> int:
        if position == len(uses):
            return 0
        unit = uses[position]
        if unit in held:
            return search(position + 1, held)
        if len(held) < capacity:
            return 1 + search(position + 1, held | {unit})
        return 1 + min(search(position + 1, held - {victim} | {unit}) for victim in held)

    return search(0, frozenset())


def fetches_on_demand(uses: Sequence[int], capacity: int) -> int:
    held: set[int] = set()
    num_fetches = 0
    for position, unit in enumerate(uses):
        if unit in held:
            continue
        num_fetches += 1
        if len(held) == capacity:
            held.remove(eviction_order(held, next_uses(uses[position + 1 :]))[0])
        held.add(unit)
    return num_fetches


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_eviction_on_demand_is_optimal_on_cyclic_traces(
    units: list[int], capacity: int, num_turns: int, there_and_back: bool
) -> None:
    turn = [*units, *reversed(units)] if there_and_back else units
    uses = turn * num_turns
    assert fetches_on_demand(uses, capacity) == fewest_fetches(tuple(uses), capacity)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_eviction_on_demand_is_optimal_on_any_trace(uses: list[int], capacity: int) -> None:
    assert fetches_on_demand(uses, capacity) == fewest_fetches(tuple(uses), capacity)


def prefetched(turn: Sequence[int], capacity: int, num_turns: int) -> tuple[int, int]:
    """Fetches, and uses that found their unit missing, when the plan is carried out after every use."""
    num_fetches = num_misses = 0
    held: set[int] = set()
    uses = list(turn) * num_turns
    for position, unit in enumerate(uses):
        upcoming = uses[position + 1 :]
        if unit not in held:
            num_misses += 1
            num_fetches += 1
            if len(held) == capacity:
                held.remove(eviction_order(held, next_uses(upcoming))[0])
            held.add(unit)
        for operation in plan_prefetch(
            upcoming,
            num_bytes=dict.fromkeys(turn, 1),
            present=set(held),
            protected={unit},
            free_bytes=capacity - len(held),
        ):
            if isinstance(operation, Evict):
                held.remove(operation.unit)
            else:
                held.add(operation.unit)
                num_fetches += 1
        assert unit in held
        assert len(held) <= capacity
    return num_fetches, num_misses


def fewest_fetches_without_misses(uses: Sequence[int], capacity: int) -> int:
    """The minimum when every unit but the first must arrive during the use before its own.

    The unit in use stays meanwhile, so a use holds two places when the next unit is missing.
    """

    @functools.cache
    def search(position: int, held: frozenset[int]) -> int:
        """`uses[position]` is there and in use."""
        if position + 1 == len(uses):
            return 0
        unit, following = uses[position], uses[position + 1]
        if following in held:
            return search(position + 1, held)
        if len(held) < capacity:
            return 1 + search(position + 1, held | {following})
        return 1 + min(search(position + 1, held - {v} | {following}) for v in held - {unit})

    return 1 + search(0, frozenset({uses[0]}))


@pytest.mark.parametrize("num_units", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("capacity", [2, 3, 4])
@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_prefetch_misses_nothing_and_fetches_no_more_than_needed(
    num_units: int, capacity: int, num_turns: int
) -> None:
    """Forward and backward over the units: what training does."""
    turn = (*range(num_units), *reversed(range(num_units)))
    num_fetches, num_misses = prefetched(turn, capacity, num_turns)
    assert num_misses == 1, "only the very first use has nobody before it"
    assert num_fetches == fewest_fetches_without_misses(turn * num_turns, capacity)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(2, 4))
@settings(max_examples=200, deadline=None)
def test_prefetch_misses_nothing_on_any_trace(uses: list[int], capacity: int) -> None:
    assert prefetched(uses, capacity, 1)[1] == 1


# --- the trace ---


def followed(trace: Trace, count: int) -> list[int]:
    return list(itertools.islice(trace.upcoming(), count))


def run_step(trace: Trace, uses: Sequence[int]) -> Iterator[list[int]]:
    """Use units in order; yields what the trace expects after each use, to the end of the step."""
    for unit in uses:
        trace.advance(unit, record=True)
        yield list(trace.upcoming_in_step())
    trace.finish_step()


def test_the_first_guess_is_forward_and_back() -> None:
    trace = Trace([4, 7, 9])
    assert followed(trace, 6) == [4, 7, 9, 9, 7, 4]
    assert list(trace.upcoming_in_step()) == [4, 7, 9, 9, 7, 4]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=15))
@settings(max_examples=200, deadline=None)
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
@settings(max_examples=200, deadline=None)
def test_a_changed_order_costs_one_step(before: list[int], after: list[int]) -> None:
    trace = Trace(range(6))
    for uses in (before, after):
        for _ in run_step(trace, uses):
            pass
    expected = [unit for unit, _ in itertools.groupby(after or before)]
    assert list(trace.upcoming_in_step()) == expected


def test_an_unknown_unit_leaves_the_cursor_where_it_was() -> None:
    trace = Trace([0, 1, 2])
    trace.advance(0, record=True)
    trace.advance(17, record=True)
    assert followed(trace, 6) == [1, 2, 2, 1, 0, 0]
    trace.advance(1, record=True)
    trace.finish_step()
    assert followed(trace, 3) == [0, 17, 1]


def test_a_skipped_unit_is_jumped_over() -> None:
    trace = Trace([0, 1, 2, 3])
    trace.advance(0, record=True)
    trace.advance(3, record=True)
    assert followed(trace, 4) == [3, 2, 1, 0]


def test_evaluation_between_steps_is_not_recorded() -> None:
    trace = Trace([0, 1])
    for _ in run_step(trace, [0, 1, 1, 0]):
        pass
    order = followed(trace, 3)
    for unit in (1, 0, 1):
        trace.advance(unit, record=False)
    trace.finish_step()
    assert followed(trace, 3) == order == [0, 1, 0]
