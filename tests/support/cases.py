"""Many small cases in one test; a failure says in which case it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

Check = Callable[..., None]


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
