"""Loops over cases inside one test: each case runs, and a failure names its own."""

from __future__ import annotations

import pytest

from tests.support.cases import case, loop_over


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
