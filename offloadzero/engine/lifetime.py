"""The ends of an engine: closed, collected by Python, interrupted, or forked away from.

[Note: the end of an engine]
`Resources` has what an engine holds of the machine: threads, files, memory. It knows nothing of the model, the hooks
or the optimizer, and neither does any thread of an engine while it waits for work. So an engine that can no longer be
reached, with its model, is collected like any other object, and its resources are closed then. The collector may run on
any thread and at any allocation: therefore the closing runs on a thread of its own.

Nothing here may hold an object that holds a model's parameters or its hooks. And a parameter must not hold the engine
in a way that Python's collector does not see: hooks on gradients, `grad` and `data` live in C++.
"""

from __future__ import annotations

import _thread
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from typing import TypeVar

from offloadzero.core.interrupts import is_interrupt
from offloadzero.errors import StateError
from offloadzero.memory.tickets import Closable, Failures, Latch

Part = TypeVar("Part", bound=Closable)


class EngineState(Enum):
    """The states of an engine, by what can be done with it."""

    OPEN = "open"
    FAILED = "failed"  # it does not go on, or not yet: any use that trains raises the reason
    CLOSED = "closed"  # its weights are gone
    RESTORED = "restored"  # its weights are the model's own again


class Resources:
    """The threads, files and memory that one engine holds: [Note: the end of an engine]."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self._others_wait = False  # other ranks, for what was begun
        self._abort: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._parts: list[Callable[[], None]] = []
        self._closed = Latch()
        self._is_left = False  # it was collected, and no thread closes it
        self._collected = Latch()  # set when the closing thread no longer holds anything of the engine
        self._finalizer: weakref.finalize[..., object] | None = None

    def add(self, close: Callable[[], None]) -> None:
        """Add a part and the call that closes it. The call may come twice, and uses only parts added before."""
        self._parts.append(close)

    def make(self, make: Callable[[], Part]) -> Part:
        """Return the part that `make` makes, which is added first: no error can come between the two."""
        made: list[Part] = []

        def close() -> None:
            for part in made:
                part.close()

        self.add(close)
        made.append(make())
        return made[0]

    def wait_with_others(self, abort: Callable[[], None]) -> None:
        """Note that other ranks wait for what was begun.

        `abort` ends work of the device that waits for them. It may be called again.
        """
        self._others_wait = True
        self._abort = abort

    @property
    def is_open(self) -> bool:
        """Whether there is anything to close. A forked child has nothing: all of it is the parent's."""
        return not self._closed.is_set and os.getpid() == self._pid

    def close(self, *, has_failed: bool = False) -> None:
        """Stop the threads, then close the parts, the last first; each even when another fails, whose error is raised.

        An interrupt makes it hurry: what waits for something in the background is told that it will not come. It may
        be called again.

        Args:
            has_failed: other ranks may not do their part of what was begun, though no failure is recorded.
        """
        if not self.is_open:
            return
        failures = self.failures
        # After a failure some work never comes: no wait for it may block.
        if failures.first is not None:
            failures.give_up()
        first: BaseException | None = None
        threads = [thread.close for thread in reversed(failures.threads)]
        abort = [self._abort] if has_failed or failures.given_up else []
        for close in (*abort, *threads, *reversed(self._parts)):
            first = self._close_part(close) or first
        if failures.unseen() is None:  # else close() may be interrupted before it tells it
            self.forget_owner()
        failures.threads_have_ended()
        self._parts = []
        self._closed.set()
        if first is not None:
            raise first

    def _close_part(self, close: Callable[[], None]) -> BaseException | None:
        try:
            close()
        except BaseException as error:
            if not is_interrupt(error):
                return error
            self.failures.spoil(StateError("the engine was interrupted while it closed"))
            self.failures.give_up()
            self._abort()
            close()
            return error
        return None

    # --- an engine that is collected ---

    def close_when_collected(self, owner: object) -> None:
        """Close the resources when `owner` is gone."""
        self._finalizer = weakref.finalize(owner, self._close_in_background)
        self._finalizer.atexit = False  # the exit has a handler of its own

    def forget_owner(self) -> None:
        """Do nothing when the owner is gone: that would keep a failure and its traceback alive until then."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _close_in_background(self) -> None:
        if not self.is_open:
            self.failures.raise_unseen()  # to sys.unraisablehook, as below
        else:
            _closing.add(self)
            try:
                # Not threading.Thread, whose start takes locks that the thread which is collecting here may hold.
                _thread.start_new_thread(self._close_collected, ())
            except RuntimeError:  # Python 3.12 starts none when it ends: `wait_for_collected` does it
                self._is_left = True

    def _close_collected(self) -> None:
        unseen = self.failures.unseen()
        collected = StateError("the engine was collected")
        if not self._others_wait:  # updates still under way would write weights that can no longer be read
            self.failures.end(collected)
        try:
            with ExitStack() as ends:
                ends.callback(self.close)
                self.failures.begin_thread()  # the device's work is waited for here
        finally:
            self.failures.end(collected)
            _closing.discard(self)
            self._collected.set()
        if unseen is not None:
            raise unseen  # to sys.unraisablehook, which prints it

    def wait_collected(self) -> None:
        """Block until the engine is closed, and all that it held is given back."""
        if self._is_left:
            self._close_collected()
        self._collected.wait()


_closing: set[Resources] = set()


def wait_for_collected() -> None:
    """Block until the engines that were collected are closed, their files gone and their memory given back.

    The exit of the process calls this, too: a thread that is still in C++ then would end it with SIGABRT.
    """
    for resources in list(_closing):
        resources.wait_collected()
