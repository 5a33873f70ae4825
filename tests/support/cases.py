"""Many small cases in one test, whose failure says in which case it is; and a few cases for all of a matrix."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

Check = Callable[..., None]
IN_FULL = "OFFLOADZERO_TEST_EXHAUSTIVE" in os.environ


@contextmanager
def case(*names: object) -> Iterator[None]:
    """A failure inside is raised with these names before its own message."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {error}") from error


def loop_over(cases: Mapping[str, tuple[Any, ...]]) -> Callable[[Check], Callable[[], None]]:
    """Makes one test of a check: it is called with the arguments of each case in turn."""
    assert cases, "a loop over nothing tests nothing"

    def loop(check: Check) -> Callable[[], None]:
        def test() -> None:
            for name, arguments in cases.items():
                with case(name):
                    check(*arguments)

        # functools.wraps would show pytest the arguments of the check, which it would take for fixtures.
        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        return test

    return loop


def each_pair(*axes: Iterable[Any], in_full: bool = IN_FULL) -> list[tuple[Any, ...]]:
    """Cells of the matrix of `axes`, in its order, in which each two values of different axes meet; `in_full`: all.

    What goes wrong for two settings together is found so, by about as many cells as the two longest axes have. Chosen
    greedily, the first of the best.
    """
    values = [list(axis) for axis in axes]
    cells = list(itertools.product(*(range(len(axis)) for axis in values)))
    pairs_of = {cell: set(itertools.combinations(enumerate(cell), min(2, len(cell)))) for cell in cells}
    chosen = set(cells if in_full else ())
    missing = set().union(*(pairs_of[cell] for cell in cells if not in_full))
    while missing:
        best = max(cells, key=lambda cell: len(pairs_of[cell] & missing))
        chosen.add(best)
        missing -= pairs_of[best]
    return [tuple(map(list.__getitem__, values, cell)) for cell in cells if cell in chosen]
