"""Delays and faults at the fail points of the package: [Note: fail points] in offloadzero/core/fail_points.py.

Each is a context manager. A test that needs one until its end enters it in the fixture `faults`.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from offloadzero.core.fail_points import Point, listening
from offloadzero.memory.tickets import Promise, Ticket


@contextmanager
def replaced(point: Point, replacement: Callable[..., Any], *, about: object = None) -> Iterator[None]:
    """Call `replacement(work, *arguments, **options)` in place of the work at a point: all of it, or `about` one."""

    def listener(reached: Point, work: Callable[..., Any], whose: object) -> Callable[..., Any]:
        if reached != point or (about is not None and about != whose):
            return work
        return functools.partial(replacement, work)

    with listening(listener):
        yield


@contextmanager
def observes(
    point: Point,
    *,
    before: Callable[[Any], object] | None = None,
    after: Callable[[Any], object] | None = None,
    about: object = None,
) -> Iterator[None]:
    """Tell `before` and `after` each time whose work it is."""

    def listener(reached: Point, work: Callable[..., Any], whose: object) -> Callable[..., Any]:
        if reached != point or (about is not None and about != whose):
            return work

        def observed(*arguments: Any, **options: Any) -> Any:
            if before is not None:
                before(whose)
            result = work(*arguments, **options)
            if after is not None:
                after(whose)
            return result

        return observed

    with listening(listener):
        yield


def delays(point: Point, duration_s: float, *, about: object = None) -> AbstractContextManager[None]:
    """Let the work begin that much later."""
    return observes(point, before=lambda _: time.sleep(duration_s), about=about)


def fails(
    point: Point, error: BaseException, *, at: int | None = 1, about: object = None
) -> AbstractContextManager[None]:
    """Raise `error` in place of the piece of work number `at`, from 1, or of each: None."""
    numbers = itertools.count(1)

    def failing(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if at in (None, next(numbers)):
            raise error
        return work(*arguments, **options)

    return replaced(point, failing, about=about)


def begun_later(begin: Callable[[], Ticket], delay_s: float) -> Ticket:
    """Return the ticket of work that another thread begins after a while."""
    promise = Promise()

    def later() -> None:
        time.sleep(delay_s)
        try:
            promise.fulfil(begin())
        except BaseException as error:
            promise.fail(error)

    threading.Thread(target=later, name="begins late", daemon=True).start()
    return promise
