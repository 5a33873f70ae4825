"""The prefetch decisions as pure functions: properties, and a brute-force oracle on small cases."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadzero.schedule.prefetch import (
    Evict,
    Fetch,
    choose_victims,
    eviction_order,
    next_uses,
    plan_prefetch,
)

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
        case.upcoming,
        num_bytes=case.num_bytes,
        present=case.present,
        protected=case.protected,
        free_bytes=case.free_bytes,
    )


@given(situations())
@settings(max_examples=200)
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
@settings(max_examples=200)
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
@settings(max_examples=200)
def test_fetches_come_in_the_order_of_use_and_skip_nobody(case: Situation) -> None:
    fetched = [operation.unit for operation in plan(case) if isinstance(operation, Fetch)]
    order = [unit for unit in dict.fromkeys(case.upcoming) if unit not in case.present]
    assert fetched == order[: len(fetched)]
    assert len(set(fetched)) == len(fetched)


@given(situations())
@settings(max_examples=200)
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
    first = case.upcoming.index(missing[0])
    movable = {
        unit
        for unit in held - case.protected
        if unit not in case.upcoming[:first]  # needed no more before
    }
    if free + sum(case.num_bytes[unit] for unit in movable) < case.num_bytes[missing[0]]:
        return
    # It waits for one that is needed before, but no more, or later, after: a better victim then.
    after = case.upcoming[first:]
    assert any(
        unit in case.upcoming[: max(first - 1, 0)]
        and distance(after, unit) > min(distance(after, u) for u in movable)
        for unit in held
    )


@given(situations())
@settings(max_examples=200)
def test_who_leaves_is_needed_later_than_who_stays(case: Situation) -> None:
    for operation in plan(case):
        if not isinstance(operation, Evict):
            return
        stays = case.present - case.protected - {operation.unit}
        leaving = {op.unit for op in plan(case) if isinstance(op, Evict)}
        for unit in stays - leaving:
            if (
                case.num_bytes[unit] >= case.num_bytes[operation.unit]
            ):  # smaller ones may not make room enough
                assert distance(case.upcoming, operation.unit) >= distance(case.upcoming, unit)


def test_next_uses_are_the_first_ones() -> None:
    assert next_uses([3, 1, 3, 2, 1]) == {3: 0, 1: 1, 2: 3}
    assert next_uses([]) == {}


def test_eviction_order_is_furthest_first_and_never_used_before_all() -> None:
    assert eviction_order({1, 2, 3, 4}, {1: 5, 2: 0, 3: 9}) == [4, 3, 1, 2]
    assert eviction_order(set(), {}) == []


@given(situations(), st.integers(0, 12))
@settings(max_examples=150)
def test_victims_are_the_furthest_but_for_those_not_needed(case: Situation, wanted: int) -> None:
    candidates = case.present - case.protected
    sizes = case.num_bytes
    victims = choose_victims(candidates, next_uses(case.upcoming), num_bytes=sizes, wanted=wanted)
    gained = sum(sizes[victim] for victim in victims)
    if gained < wanted:
        assert set(victims) == candidates
    for victim in victims:
        assert gained < wanted or gained - sizes[victim] < wanted, "it need not leave"
        for unit in candidates.difference(victims):
            nearer = distance(case.upcoming, unit) <= distance(case.upcoming, victim)
            assert nearer or sizes[unit] < sizes[victim]


def test_who_is_used_after_the_step_stays_longer_than_who_is_not() -> None:
    """Nothing is fetched for later uses; a present unit with one leaves after those without."""
    sizes = dict.fromkeys(range(5), 1)
    kwargs: dict[str, Any] = {"num_bytes": sizes, "present": {0, 1, 2}, "protected": (), "free_bytes": 0}
    assert plan_prefetch([3], later=[4, 0, 1], **kwargs) == [Evict(2), Fetch(3)]
    assert plan_prefetch([3], later=[2, 1, 4, 0], **kwargs) == [Evict(0), Fetch(3)]
    assert plan_prefetch([0, 1, 3], later=[2, 1], **kwargs) == [], "0 is needed before, and no more after"
    assert plan_prefetch([], later=[4], **{**kwargs, "free_bytes": 9}) == []


def test_of_units_without_a_next_use_those_needed_before_leave_last() -> None:
    """Else the fetch would wait for 0 and 1, which are used before it, and would come late."""
    sizes = dict.fromkeys(range(4), 1)
    found = plan_prefetch([1, 3], num_bytes=sizes, present={0, 1, 2}, protected={0}, in_use=0, free_bytes=0)
    assert found == [Evict(2), Fetch(3)]


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


@dataclass
class Carried:
    """What came of carrying out the plan after every use, as the executor does."""

    fetched: list[tuple[int, int]]  # (position of the use during which it began, unit)
    missed: list[int]  # positions of uses that found their unit missing
    num_bytes: int  # fetched


def carry_out(
    uses: Sequence[int], sizes: Mapping[int, int], budget: int, *, planner: Callable[..., list[Evict | Fetch]]
) -> Carried:
    """A use that finds its unit missing makes room as the executor does; then what `planner` says is done."""
    result = Carried([], [], 0)
    held: set[int] = set()

    def free() -> int:
        return budget - sum(sizes[unit] for unit in held)

    def fetch(position: int, unit: int) -> None:
        held.add(unit)
        assert free() >= 0, "over budget"
        result.fetched.append((position, unit))
        result.num_bytes += sizes[unit]

    for position, unit in enumerate(uses):
        upcoming = uses[position + 1 :]
        if unit not in held:
            result.missed.append(position)
            wanted = sizes[unit] - free()
            held -= set(choose_victims(held, next_uses(upcoming), num_bytes=sizes, wanted=wanted))
            fetch(position, unit)
        operations = planner(
            upcoming, num_bytes=sizes, present=set(held), protected={unit}, in_use=unit, free_bytes=free()
        )
        for operation in operations:
            if isinstance(operation, Evict):
                held.remove(operation.unit)
            else:
                fetch(position, operation.unit)
        assert unit in held
    return result


def no_plan(_upcoming: Iterable[int], **_: Any) -> list[Evict | Fetch]:
    """Everything on demand."""
    return []


def next_that_fit(
    upcoming: Iterable[int], *, num_bytes: Mapping[int, int], present: set[int], free_bytes: int, **_: Any
) -> list[Evict | Fetch]:
    """The naive order: the next units, as long as they fit beside what is there."""
    operations: list[Evict | Fetch] = []
    for unit in dict.fromkeys(upcoming):
        if unit in present:
            continue
        free_bytes -= num_bytes[unit]
        if free_bytes < 0:
            break
        operations.append(Fetch(unit))
    return operations


def equal_sizes(uses: Sequence[int]) -> dict[int, int]:
    return dict.fromkeys(uses, 1)


def prefetched(turn: Sequence[int], capacity: int, num_turns: int) -> tuple[int, int]:
    """Fetches, and uses that found their unit missing, of units of one size."""
    uses = list(turn) * num_turns
    result = carry_out(uses, equal_sizes(turn), capacity, planner=plan_prefetch)
    return len(result.fetched), len(result.missed)


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


def all_traces(max_length: int, num_units: int = 4) -> Iterator[tuple[int, ...]]:
    """Every trace up to the names of its units: a unit that is new has the next number."""
    stack: list[tuple[int, ...]] = [(0,)]
    while stack:
        uses = stack.pop()
        yield uses
        if len(uses) < max_length:
            stack += [(*uses, unit) for unit in range(min(max(uses) + 2, num_units))]


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_on_all_small_traces_there_are_no_fewer_fetches(capacity: int) -> None:
    """Of those on demand, and of those with which no use waits; there a place is taken by the unit in use."""
    for uses in all_traces(7):
        sizes = equal_sizes(uses)
        on_demand = carry_out(uses, sizes, capacity, planner=no_plan)
        assert len(on_demand.fetched) == fewest_fetches(uses, capacity)
        ahead = carry_out(uses, sizes, capacity, planner=plan_prefetch)
        if capacity == 1:
            assert ahead.fetched == on_demand.fetched, "nothing can be fetched while a unit is in use"
        else:
            assert ahead.missed == [0]
            assert len(ahead.fetched) == fewest_fetches_without_misses(uses, capacity)


def fewest_bytes(uses: Sequence[int], sizes: Mapping[int, int], budget: int) -> int:
    """The minimum over all choices of whom to give up, on demand, for units of any size."""

    @functools.cache
    def search(position: int, held: frozenset[int]) -> int:
        if position == len(uses):
            return 0
        unit = uses[position]
        if unit in held:
            return search(position + 1, held)
        kept = itertools.chain.from_iterable(
            itertools.combinations(sorted(held), count) for count in range(len(held) + 1)
        )
        room = budget - sizes[unit]
        return sizes[unit] + min(
            search(position + 1, frozenset({*keep, unit}))
            for keep in kept
            if sum(sizes[other] for other in keep) <= room
        )

    return search(0, frozenset())


def test_units_of_different_sizes_cost_at_most_a_third_more_bytes() -> None:
    """With sizes an optimal choice is NP-hard; furthest first is exact in most small cases, and near in all."""
    num_cases = num_exact = total = fewest = 0
    for sizes in ((1, 2, 3, 1), (3, 1, 2, 2), (1, 3, 1, 2), (2, 1, 1, 3), (3, 1, 1, 1)):
        known = dict(enumerate(sizes))
        for budget in (3, 4, 5):
            for uses in all_traces(7):
                if len(uses) < 7:
                    continue
                spent = carry_out(uses, known, budget, planner=no_plan).num_bytes
                least = fewest_bytes(uses, known, budget)
                assert 3 * spent <= 4 * least, (uses, sizes, budget)
                num_cases, num_exact = num_cases + 1, num_exact + (spent == least)
                total, fewest = total + spent, fewest + least
    assert num_exact > 0.95 * num_cases
    assert total < 1.01 * fewest


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=14),
    st.lists(st.integers(1, 3), min_size=5, max_size=5),
    st.integers(3, 8),
)
@settings(max_examples=150)
def test_no_use_waits_longer_than_in_the_naive_order(uses: list[int], sizes: list[int], budget: int) -> None:
    """What the naive order has in place for a use is in place here too."""
    known = dict(enumerate(sizes))
    planned = carry_out(uses, known, budget, planner=plan_prefetch)
    naive = carry_out(uses, known, budget, planner=next_that_fit)
    assert set(planned.missed) <= set(naive.missed)


def there_and_back(units: Sequence[int]) -> list[int]:
    return [*units, *reversed(units)]
