"""The fewest moves that are enough, beside a search that tries all of them."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from offloadzero.planning.memory_plan import first_enough

MOVES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=40
)  # bytes freed, and of new buffers


@given(MOVES, st.integers(0, 900))
def test_it_is_the_one_that_a_search_of_all_finds(moves: list[tuple[int, int]], enough: int) -> None:
    freed = list(accumulate((one for one, _ in moves), initial=0))
    added = list(accumulate((more for _, more in moves), initial=0))
    sizes = [800 - less + more for less, more in zip(freed, added, strict=True)]
    fitting = [number for number, size in enumerate(sizes) if size <= enough]
    expected = fitting[0] if fitting else sizes.index(min(sizes))
    assert first_enough(sizes.__getitem__, freed, enough) == expected


def test_equal_units_take_a_few_plans_whether_or_not_they_fit() -> None:
    asked: list[int] = []

    def size_after(number: int) -> int:
        asked.append(number)
        return 20_000 - number + (5 if number else 0)

    freed = list(range(10_001))
    assert first_enough(size_after, freed, 12_345) == 7_660
    assert len(asked) <= 3
    asked.clear()
    assert first_enough(size_after, freed, 9_000) == 10_000
    assert len(asked) <= 30
