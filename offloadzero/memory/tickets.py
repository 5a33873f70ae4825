"""Handles of asynchronous work: only `wait()` blocks (floor 3)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol


class Ticket(Protocol):
    """The handle of one asynchronous transfer or task."""

    def wait(self) -> None:
        """Block until the work is done; raise what made it fail."""

    def done(self) -> bool:
        """Whether `wait()` would return (or raise) at once."""


class Latch:
    """Set once, waited for by many: a bare lock, made when someone waits. A threading.Event costs 20 times as much."""

    __slots__ = ("_closed", "is_set")
    _setting = threading.Lock()

    def __init__(self) -> None:
        self.is_set = False
        self._closed: threading.Lock | None = None  # taken until it is set

    def set(self) -> None:
        """Let everyone through; once more does nothing."""
        with self._setting:
            if not self.is_set:
                self.is_set = True
                if self._closed is not None:
                    self._closed.release()

    def wait(self) -> None:
        """Block until it is set."""
        if not self.is_set:
            with self._closed_until_set():
                pass  # the next one's turn

    def _closed_until_set(self) -> threading.Lock:
        with self._setting:
            if self._closed is None:
                self._closed = threading.Lock()
                if not self.is_set:
                    self._closed.acquire()
            return self._closed


def _renew_setting() -> None:
    Latch._setting = threading.Lock()


# A thread that the child does not have may have held it in the moment of the fork.
os.register_at_fork(after_in_child=_renew_setting)


class Finished:
    """A ticket of work that needs no waiting."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Always."""
        return True


FINISHED = Finished()


class AllOf:
    """Done when all of `tickets` are; raises the first failure, after all have come to an end.

    Waiting for every ticket even when one has failed keeps buffers alive under transfers still in flight.
    """

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self._tickets = tuple(tickets)

    def wait(self) -> None:
        """Block until all are done."""
        failure: BaseException | None = None
        for ticket in self._tickets:
            try:
                ticket.wait()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def done(self) -> bool:
        """Whether all are done."""
        return all(ticket.done() for ticket in self._tickets)


class Promise:
    """A ticket that another thread fulfils, once: with further tickets to wait for, or with an error."""

    def __init__(self) -> None:
        self._latch = Latch()
        self._then: Ticket = FINISHED
        self._error: BaseException | None = None

    def fulfil(self, then: Ticket = FINISHED) -> None:
        """The work was done, or was handed on to `then`."""
        self._then = then
        self._latch.set()

    def fail(self, error: BaseException) -> None:
        """The work failed."""
        self._error = error
        self._latch.set()

    def wait_fulfilled(self) -> None:
        """Block until fulfilled, and not for what it was handed on to."""
        self._latch.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Block until fulfilled, then for what it was handed on to."""
        self.wait_fulfilled()
        self._then.wait()

    def done(self) -> bool:
        """Whether `wait()` would not block."""
        return self._latch.is_set and (self._error is not None or self._then.done())


class Failures:
    """The first failure of any background thread; every later use of the engine raises it.

    A failed write must stop the step even when nobody waits for that very write.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.first: BaseException | None = None
        self.was_raised = False  # whether the caller has seen it

    def record(self, error: BaseException) -> None:
        """Remember `error` unless another came first."""
        with self._lock:
            if self.first is None:
                self.first = error

    def handed_over(self) -> AbstractContextManager[None]:
        """A wait whose failure reaches the caller: what failed first is raised, and counts as seen."""
        return _HandedOver(self)

    def check(self) -> None:
        """Raise the first failure, if there was one."""
        if self.first is not None:
            self.was_raised = True
            raise self.first


class _HandedOver:
    __slots__ = ("_failures",)

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception):
            failures = self._failures
            failures.record(error)
            failures.was_raised = True
            if failures.first is not None and failures.first is not error:
                raise failures.first from None
