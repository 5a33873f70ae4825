"""Loops over cases inside one test: each case runs, and a failure names its own."""

from __future__ import annotations

import itertools

import pytest

from tests.support.cases import case, each_pair, loop_over


def test_each_case_runs_and_a_failure_names_its_own() -> None:
    seen: list[int] = []

    @loop_over({"one": (1, 1), "two": (2, 4), "three": (3, 8), "four": (4, 16)})
    def test_squares(number: int, square: int) -> None:
        """Of small numbers."""
        seen.append(number)
        assert number**2 == square

    assert (test_squares.__name__, test_squares.__doc__) == ("test_squares", "Of small numbers.")
    with pytest.raises(AssertionError, match=r"^three: assert \(3 \*\* 2\) == 8"):
        test_squares()
    assert seen == [1, 2, 3]


def test_what_pytest_itself_reports_is_named_too() -> None:
    refused = pytest.raises(AssertionError, match=r"^nvme, 3: DID NOT RAISE")
    with refused, case("nvme", 3), pytest.raises(ValueError):
        pass


def test_a_loop_over_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        loop_over({})


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 3), (2, 2, 2), (3, 4, 2, 3), (2, 1, 5, 2, 2)])
def test_each_two_values_meet_in_few_cells(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}.{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    cells = each_pair(*axes, in_full=False)
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(one, other):
            assert any(set(pair) <= set(cell) for cell in cells)
    largest = sorted((1, *sizes))
    assert len(cells) <= largest[-1] * largest[-2] + 3
    everything = list(itertools.product(*axes))
    assert each_pair(*axes, in_full=True) == everything
    assert [cell for cell in everything if cell in cells] == cells


def test_a_single_axis_is_taken_whole() -> None:
    assert each_pair("abc", in_full=False) == [("a",), ("b",), ("c",)]
