"""The fetches of a step and where they start."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offloadzero.planning.step import fetches
from offloadzero.planning.step.fetches import StartedFetch, UseOfUnit, fetches_in_order, uses_of_micro_batch
from offloadzero.schedule import prefetch


def there_and_back(num_units: int, num_micro: int = 1, *, in_backward: bool = False) -> list[UseOfUnit]:
    there = [UseOfUnit(unit) for unit in range(num_units)]
    uses = []
    for micro in range(num_micro):
        stale = in_backward and micro == num_micro - 1
        uses += [*there, *(UseOfUnit(use.unit, completes=True, makes_stale=stale) for use in reversed(there))]
    return uses


def test_one_lease_is_fetched_into_when_its_unit_has_been_used() -> None:
    found = fetches_in_order(there_and_back(2), {0: 10, 1: 10}, arena_bytes=10)
    # The second unit stays at the turn. In backward a lease is free as soon as all gradients are there.
    assert found == [StartedFetch(0, 0), StartedFetch(1, 1), StartedFetch(3, 0)]


def test_leases_are_filled_at_the_end_of_a_step_and_then_as_units_are_done() -> None:
    found = fetches_in_order(there_and_back(4), dict.fromkeys(range(4), 10), arena_bytes=20)
    starts = {(fetch.unit, fetch.start) for fetch in found}
    assert starts == {(0, 0), (1, 0), (2, 1), (3, 2), (1, 5), (0, 6)}
    assert fetches_in_order([], {}, arena_bytes=0) == []


def test_a_lease_of_another_size_does_not_cut_the_room_of_blocks() -> None:
    """An embedding of 4, five blocks of 10: three of these fit, or two and the embedding.

    A block that is used gives its lease to the next one that is not there: none is fetched when it is used.
    """
    found = fetches_in_order(there_and_back(6), {0: 4, **dict.fromkeys(range(1, 6), 10)}, arena_bytes=30)
    starts = [fetch for fetch in found if fetch.start < 6]
    assert starts == [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5)]


def test_blocks_of_two_sizes_are_fetched_ahead_though_holes_are_too_small() -> None:
    """Blocks of 6 lie at the end, one beside the other, and leave holes that are no room for one of 10."""
    sizes = {0: 6, 1: 10, 2: 6, 3: 10, 4: 6, 5: 10}
    found = fetches_in_order(there_and_back(6), sizes, arena_bytes=26)
    on_demand = [fetch for fetch in found if fetch.start < 6 and fetch.unit == fetch.start]
    assert on_demand == [(0, 0)]


@given(st.integers(2, 12), st.integers(1, 12), st.integers(1, 3))
@hypothesis_settings(max_examples=60, deadline=None)
def test_there_and_back_costs_twice_all_but_what_stays(
    num_units: int, num_leases: int, num_micro: int
) -> None:
    """Equal units: each way needs all of them but those that have stayed from the way before."""
    sizes = dict.fromkeys(range(num_units), 10)
    uses = there_and_back(num_units)
    fetched = fetches_in_order(uses, sizes, arena_bytes=10 * num_leases, times=num_micro)
    stays = min(num_leases, num_units)
    assert len(fetched) == num_units + (2 * num_micro - 1) * (num_units - stays)


@given(st.data(), st.integers(1, 6), st.integers(1, 12), st.booleans())
@hypothesis_settings(max_examples=150, deadline=None)
def test_many_micro_batches_fetch_as_if_each_were_gone_through(
    data: st.DataObject, num_units: int, num_micro: int, in_backward: bool
) -> None:
    units = st.integers(0, num_units - 1)
    there, back = (data.draw(st.lists(units, max_size=2 * num_units)) for _ in range(2))
    sizes = {unit: data.draw(st.integers(1, 9)) for unit in range(num_units)}
    kept = data.draw(st.sets(units))
    arena_bytes = max(sizes.values()) + data.draw(st.integers(0, 20))
    uses = uses_of_micro_batch(
        there, back, trained=set(range(num_units)) - kept, update_in_backward=in_backward
    )
    before = [use._replace(makes_stale=False) for use in uses]
    whole = before * (num_micro - 1) + uses
    found = fetches_in_order(uses, sizes, arena_bytes=arena_bytes, kept=kept, times=num_micro)
    assert found == fetches_in_order(whole, sizes, arena_bytes=arena_bytes, kept=kept)
    present: set[int] = set()
    by_start = {start: [f.unit for f in found if f.start == start] for start in range(len(whole) + 1)}
    for place, use in enumerate(whole):  # each unit has been fetched before its first use
        present.update(by_start[place])
        assert use.unit in present | kept
    assert all(0 <= fetch.start < len(whole) for fetch in found)


def test_many_micro_batches_are_not_gone_through_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for "auto" would go through those of a thousand units for minutes, at the start of a training."""
    planned: list[None] = []

    def plan_prefetch(*given: Any, **keys: Any) -> Any:
        planned.append(None)
        return prefetch.plan_prefetch(*given, **keys)

    monkeypatch.setattr(fetches, "plan_prefetch", plan_prefetch)
    uses = there_and_back(20)
    for num_micro in (20, 2000):
        assert fetches_in_order(uses, dict.fromkeys(range(20), 10), arena_bytes=50, times=num_micro)
    assert len(planned) < 40 * len(uses)


def test_what_no_update_makes_stale_stays_from_step_to_step() -> None:
    uses, sizes = there_and_back(2), {0: 10, 1: 10}
    for kept, units in ((set[int](), [0, 1]), ({0}, [1]), ({0, 1}, [])):
        found = fetches_in_order(uses, sizes, arena_bytes=20, kept=kept)
        assert [fetch.unit for fetch in found] == units


@pytest.mark.parametrize(
    ("pages", "room", "kept", "settled"),
    [
        ((5, 3, 3, 3, 4, 2, 3), 12, {0, 1, 2}, 23),  # the second step moves 26
        ((4, 4, 1, 3, 5, 4), 13, {0, 1, 5}, 22),  # three kinds of steps take turns: 17, 22 and 21
    ],
)
def test_leases_that_last_settle_after_some_steps(
    pages: tuple[int, ...], room: int, kept: set[int], settled: int
) -> None:
    """Where one lies decides which holes are left, and so which of them lie where in the step after it."""
    units = range(len(pages))
    uses = uses_of_micro_batch(
        units, units[::-1], trained=set(units) - kept, update_in_backward=settled == 22
    )
    found = fetches_in_order(uses, dict(enumerate(pages)), arena_bytes=room, kept=kept)
    assert sum(pages[fetch.unit] for fetch in found) == settled
