"""Handles of asynchronous work: only `wait()` blocks.

[Note: waits look up]
A ticket is fulfilled by another thread. When that thread is gone (the process has forked) or was never given the work
(an interrupt came between a ticket's birth and its submission) it never is, and a wait for it must still end. So every
wait checks now and then whether its work can still come: inside `Failures.handed_over()` it raises the engine's first
failure, on a background thread it ends when the engine has been given up.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from offloadzero.core import interrupts
from offloadzero.core.interrupts import is_interrupt, is_kept_by_another, put_on_record
from offloadzero.errors import OffloadError, StateError

LOOK_UP_S = 0.5  # between two checks of a wait


class Ticket(Protocol):
    """The handle of one asynchronous transfer or task."""

    def wait(self) -> None:
        """Block until the work is done; raise what made it fail."""

    def done(self) -> bool:
        """Whether `wait()` would return (or raise) at once."""


class _Here(threading.local):
    """The check of a wait of the calling thread, which raises when the awaited work will not come."""

    look_up: Callable[[], None] | None = None
    outside: Callable[[], None] | None = None  # the check outside of `handed_over`


_here = _Here()


class Latch:
    """A flag that is set once and waited for by many: a bare lock, made on the first wait. A threading.Event costs 20
    times as much, and one whose wait is interrupted at the wrong place can keep its lock for good.
    """

    _setting = threading.Lock()
    # A latch begins as its class has them: most are made, set and gone without a wait.
    is_set = False
    _closed: threading.Lock | None = None  # held until the flag is set

    def set(self) -> None:
        """Set the flag and let all waits end. A second call does nothing."""
        with self._setting:
            if not self.is_set:
                self.is_set = True
                if self._closed is not None:
                    self._closed.release()

    def wait(self) -> None:
        """Block until the flag is set: [Note: waits look up]. Where it is, nothing waits, and no interrupt comes."""
        while not self.is_set:
            closed = self._closed_until_set()
            # A thread interrupted while it holds the lock stops no other for long: the others see `is_set`.
            if interrupts.wait(closed.acquire, True, LOOK_UP_S):
                closed.release()  # the next one's turn
            elif not self.is_set and _here.look_up is not None:
                _here.look_up()

    def _closed_until_set(self) -> threading.Lock:
        with self._setting:
            if self._closed is None:
                closed = threading.Lock()
                if not self.is_set:
                    closed.acquire()
                self._closed = closed
            return self._closed


class Finished:
    """A ticket of work that needs no waiting."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


FINISHED = Finished()


def unfinished(ticket: Ticket) -> Ticket:
    """Return `ticket`, or FINISHED if its work has been done without an error.

    Of a thousand tickets that each wait for the one before, only those in flight stay in memory and are waited for.
    """
    if not ticket.done():
        return ticket
    try:
        ticket.wait()
    except Exception as error:
        if is_interrupt(error):
            raise
        return ticket
    return FINISHED


class AllOf:
    """A ticket that is done when all of `tickets` are; raises the first failure, after all have come to an end.

    Waiting for every ticket even when one has failed keeps buffers alive under transfers still in flight. An interrupt
    ends the wait at once.
    """

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self.tickets = tuple(tickets)

    def wait(self) -> None:
        """Block until all are done; raise the first failure."""
        failure: BaseException | None = None
        for ticket in self.tickets:
            try:
                ticket.wait()
            except Exception as error:
                if is_interrupt(error):
                    raise
                failure = failure or error
        if failure is not None:
            raise failure

    def done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)


class Promise:
    """A ticket that another thread fulfils, once: with further tickets to wait for, or with an error."""

    _then: Ticket = FINISHED
    _error: BaseException | None = None

    def __init__(self) -> None:
        self._latch = Latch()

    def fulfil(self, then: Ticket = FINISHED) -> None:
        """Mark the work as done, or as handed on to `then`."""
        self._then = then
        self._latch.set()

    def fail(self, error: BaseException) -> None:
        """Mark the work as failed."""
        self._error = error
        self._latch.set()

    @property
    def is_fulfilled(self) -> bool:
        """Whether it is fulfilled, or has failed."""
        return self._latch.is_set

    def wait_fulfilled(self) -> None:
        """Block until fulfilled, or raise what made it fail; not for the tickets that the work was handed on to."""
        self._latch.wait()
        if self._error is not None:
            raise self._error

    def wait_handed_on(self) -> Ticket:
        """Block until fulfilled; return the tickets that the work was handed on to."""
        self.wait_fulfilled()
        return self._then

    def wait(self) -> None:
        """Block until fulfilled, then for the tickets that the work was handed on to."""
        self.wait_fulfilled()
        self._then.wait()

    def done(self) -> bool:
        return self._latch.is_set and (self._error is not None or self._then.done())


class Closable(Protocol):
    """A background thread of an engine, or anything else of the machine that it holds."""

    def close(self) -> None:
        """Finish the submitted work, and give it back. May be called again, after an interrupt say."""


_numbers = itertools.count()  # of the engines of this process


class Failures:
    """The facts that all parts of one engine share: its first failure, its background threads, and its process.

    The first failure of any background thread is raised by every later use of the engine: a failed write must stop the
    step even when no caller waits for that very write.

    An error that stops the training but has damaged nothing (a gradient that is not finite) is no failure: every use
    that trains raises it, states can be read and saved, and it can be `resolved`.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._lock = threading.Lock()
        self.first: BaseException | None = None
        self.was_raised = False  # to the caller
        self.stop: OffloadError | None = None  # stops the training, while states can be read
        self.stop_was_raised = False
        self.is_foreign = False  # this process is a forked child of the engine's
        self.given_up = False  # the engine will not be used any more: background threads wait for nothing
        self.threads: list[Closable] = []  # in the order of their making: a later one may use earlier ones
        # Called with the first failure, and whether it is one.
        self._tell: Callable[[BaseException, bool], None] | None = None
        self._begin_thread: Callable[[], None] | None = None  # called first on each background thread
        _known.add(self)

    def tell_others(self, tell: Callable[[BaseException, bool], None]) -> None:
        """Call `tell` with the first failure, and whether it is one: the end of an engine is none."""
        self._tell = tell

    def begin_threads_by(self, begin: Callable[[], None]) -> None:
        """Let each background thread begin with `begin`."""
        self._begin_thread = begin

    def begin_thread(self) -> None:
        """Begin a background thread, the present one."""
        if self._begin_thread is not None:
            self._begin_thread()

    def give_up(self) -> None:
        """Let no background thread wait: the engine will not be used any more."""
        self.given_up = True

    def add_thread(self, thread: Closable) -> None:
        """Add a thread, which may use those that were added before it."""
        self.threads.append(thread)

    def threads_have_ended(self) -> None:
        """Forget the threads."""
        self.threads = []

    def record(self, error: BaseException) -> None:
        """Remember `error` as the engine's failure unless another came first."""
        self._set_first(error, cause=error, has_failed=True, was_raised=False)

    def end(
        self, error: BaseException, *, cause: BaseException | None = None, has_failed: bool = False
    ) -> None:
        """Remember that the engine has ended, as `error` says, unless a failure came first. No call has to raise it.

        Args:
            cause: the error that the other ranks are told in its place.
            has_failed: whether the other ranks are told that this one has failed.
        """
        self._set_first(
            error, cause=error if cause is None else cause, has_failed=has_failed, was_raised=True
        )

    def _set_first(
        self, error: BaseException, *, cause: BaseException, has_failed: bool, was_raised: bool
    ) -> None:
        with self._lock:
            is_first = self.first is None
            if is_first:
                put_on_record(error, self._number)
                self.was_raised |= was_raised
                self.first = error
        if is_first and self._tell is not None:
            self._tell(cause, has_failed)

    def spoil(self, error: BaseException) -> None:
        """Record an error that the caller sees anyway. A failure that came before it is still to be told."""
        self._set_first(error, cause=error, has_failed=True, was_raised=True)
        if self.first is error:  # of a thread that had recorded it
            self.was_raised = True

    def tell_first(self, error: BaseException) -> BaseException:
        """Record `error`, and return the first failure, which reaches the caller now."""
        self.record(error)
        self.was_raised = True
        return error if self.first is None else self.first

    def stop_training(self, error: OffloadError) -> None:
        """Let every use that trains raise `error` until it is resolved."""
        with self._lock:
            if self.stop is None:
                put_on_record(error, self._number)
                self.stop, self.stop_was_raised = error, False

    def resolve(self) -> None:
        """Let training go on after an error that has stopped it."""
        self.stop = None

    def handed_over(self) -> AbstractContextManager[None]:
        """A block with a wait whose failure reaches the caller: the first failure is raised, and counts as seen.

        In a forked child the block raises at once: the thread that would fulfil the ticket is in the parent.
        """
        return _HandedOver(self)

    def whole(self, what: str) -> AbstractContextManager[None]:
        """A block that changes the engine's state as a whole: an interruption makes the engine unusable.

        Errors of this package are no interruption: they are raised before a change has begun, or are on record. One on
        another engine's record is: a signal handler that uses that engine raises it anywhere.
        """
        return _Whole(self, what)

    def leave_half_done(self, what: str, error: BaseException) -> None:
        """Note that `error` leaves a change of state, as `whole` describes it, before its end."""
        is_own = isinstance(error, OffloadError) and not is_interrupt(error)
        if (is_own and not is_kept_by_another(error, self._number)) or self.first is not None:
            return
        why = str(error) or type(error).__name__
        lost = StateError(f"{what} was interrupted half-way ({why}): the engine cannot go on")
        lost.__cause__ = error
        self.spoil(lost)

    def in_background(self) -> None:
        """Mark the calling thread as the engine's: its waits end when the engine has been given up."""
        _here.look_up = _here.outside = self._check_given_up
        self.begin_thread()

    def check(self) -> None:
        """Raise the first failure or what has stopped the training, if there was one."""
        self.check_readable()
        if self.stop is not None:
            self.stop_was_raised = True
            raise self.stop

    def check_readable(self) -> None:
        """Raise the first failure, if there was one: states may be lost."""
        if self.first is not None:
            self.was_raised = True
            raise self.first

    def unseen(self) -> BaseException | None:
        """The failure that the caller has not been told."""
        if self.first is not None and not self.was_raised:
            return self.first
        return self.stop if not self.stop_was_raised else None

    def raise_unseen(self) -> None:
        """Raise the failure that the caller has not been told, if there is one."""
        unseen = self.unseen()
        if unseen is not None:
            self.was_raised = self.stop_was_raised = True
            raise unseen

    def _check_given_up(self) -> None:
        if self.given_up:
            raise StateError("the engine was given up before this came") from self.first

    def expect_own(self) -> None:
        """Raise StateError in a forked child."""
        if self.is_foreign and self.first is not None:
            raise self.first

    def _leave_to_parent(self) -> None:
        """Adapt to a forked child: the threads and the host memory are the parent's."""
        self._lock = threading.Lock()  # a thread that the child lacks may have held it
        self.is_foreign = True
        self.was_raised = self.stop_was_raised = True
        self.threads = []
        self.first = StateError(
            f"the engine of this model belongs to process {os.getppid()}, from which this one was forked: its threads "
            "and its memory stay there. Use the model in that process, or load the weights into a model of this one"
        )


_known: weakref.WeakSet[Failures] = weakref.WeakSet()


def _in_forked_child() -> None:
    Latch._setting = threading.Lock()  # a thread that the child lacks may have held it
    _here.look_up = _here.outside = None
    for failures in list(_known):
        failures._leave_to_parent()


os.register_at_fork(after_in_child=_in_forked_child)


class _HandedOver:
    __slots__ = ("_failures",)

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    def __enter__(self) -> None:
        failures = self._failures
        if failures.is_foreign:
            failures.check()
        _here.look_up = failures.check_readable

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        # The check from outside, and not the one before: an interrupt may have left another engine's there.
        _here.look_up = _here.outside
        failures = self._failures
        if error is not None and not is_interrupt(error) and error is not failures.stop:
            first = failures.tell_first(error)
            if first is not error:
                raise first from None


class _Whole:
    __slots__ = ("_failures", "_what")

    def __init__(self, failures: Failures, what: str) -> None:
        self._failures = failures
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._failures.leave_half_done(self._what, error)
