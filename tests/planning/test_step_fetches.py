"""The fetches of a step and where they start, by hand and beside those that the traffic counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offloadzero.planning.step_fetches import StartedFetch, UseOfUnit, fetches_in_order
from offloadzero.planning.traffic import fetches_of_step


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


@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 300),
    st.booleans(),
    st.sets(st.integers(0, 7)),
    st.data(),
)
@hypothesis_settings(max_examples=150, deadline=None)
def test_the_fetches_are_those_that_the_traffic_counts(
    num_units: int, num_micro: int, more: int, in_backward: bool, kept: set[int], data: st.DataObject
) -> None:
    units = range(num_units)
    sizes = dict.fromkeys(units, 10)
    if data.draw(st.booleans()):
        sizes = {unit: data.draw(st.integers(1, 10)) for unit in units}
    uses = there_and_back(num_units, num_micro, in_backward=in_backward)
    uses = [use._replace(completes=False, makes_stale=False) if use.unit in kept else use for use in uses]
    arena_bytes = 10 + more
    found = fetches_in_order(uses, sizes, arena_bytes=arena_bytes, kept=kept)
    counted = fetches_of_step(
        [(place // num_units % 2 == 0, use.unit) for place, use in enumerate(uses)],
        sizes,
        arena_bytes=arena_bytes,
        kept=kept,
    )
    if len(set(sizes.values())) == 1 and not kept:
        assert sorted(fetch.unit for fetch in found) == sorted(unit for _, unit in counted)
    present: set[int] = set()
    by_start = {start: [f.unit for f in found if f.start == start] for start in range(len(uses) + 1)}
    for place, use in enumerate(uses):  # each unit has been fetched before its first use
        present.update(by_start[place])
        assert use.unit in present | kept
    assert all(0 <= fetch.start < len(uses) for fetch in found)
