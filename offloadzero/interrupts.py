"""Ctrl-C, and the sections of code that it must not interrupt.

[Note: interrupts]
Python raises KeyboardInterrupt in the main thread at almost any call: also between "the ticket is made" and "the work
is submitted". A change of state that must be whole runs under `uninterrupted`: an interrupt that comes inside is
raised where the section ends, or in a blocking wait inside it (a function marked `interruptible`), so that a wait that
never ends can always be left. Code that changes state around such a wait must be right when the wait raises; all other
code in the section need not be.

    with uninterrupted:
        ticket = UpdateTicket()
        self._tickets[index] = ticket
        pipeline.submit(...)

A function may be interrupted where it begins, before its `with`. Where that would be too late, in a `finally` say, or
in a hook whose caller has done its part, the function is marked `uninterrupted_from_start`. A function that returns
something which has to be taken back later uses `held` in the place of `uninterrupted`: `held` does not raise at its
end, and the caller calls `raise_held()` where it can take the thing back.

`UninterruptedThroughout()` is such a section whose waits end on their own: an interrupt that comes in one of them waits
too; a second interrupt is raised there.

Some changes begin in one call and end in another (a backward that updates weights, hook by hook). `uninterrupted.until`
holds them together: it refers weakly to an object, and as long as that lives an interrupt waits, in a blocking wait
too. A second interrupt does not wait, so that a wait that never ends can be left there as well.

This works where Python's own handler of SIGINT is in force: `install()` puts one in its place that asks first. A
handler of the user's own is left alone. What it raises, or a handler of another signal, is not held back:
`Failures.whole()` marks the engine in whose midst that happened.
"""

from __future__ import annotations

import _thread
import signal
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar


class _Uninterrupted:
    """The context in which KeyboardInterrupt waits; one for all, as only the main thread is ever interrupted."""

    __slots__ = ("depth", "pending", "until")

    def __init__(self) -> None:
        self.depth = 0
        self.pending = False
        self.until: Callable[[], object] | None = None  # weak: interrupts wait as long as it lives

    # Neither method calls anything before it has done its work: Python looks for signals at calls.

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        self.depth -= 1
        if self.pending and self.depth <= 0:
            self.raise_unless_waiting()

    def raise_unless_waiting(self) -> None:
        """Raise an interrupt that was held back, unless it waits for the end of `until`."""
        if self.until is None or self.until() is None:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise an interrupt that was held back, in the main thread."""
        self.pending = False
        if threading.get_ident() == threading.main_thread().ident:
            raise KeyboardInterrupt
        _thread.interrupt_main()


class _Held:
    """A section like `uninterrupted` that does not raise at its end: the next section does, or `raise_held`."""

    __slots__ = ()

    def __enter__(self) -> None:
        uninterrupted.depth += 1

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        uninterrupted.depth -= 1


uninterrupted = _Uninterrupted()
held = _Held()


class UninterruptedThroughout:
    """A section like `uninterrupted` whose waits hold an interrupt back, too, but not a second one. Used once."""

    __slots__ = ("__weakref__", "_around")

    def __enter__(self) -> None:
        until = weakref.ref(self)  # a call, at which Python looks for signals: before anything has changed
        uninterrupted.depth += 1
        self._around = uninterrupted.until
        uninterrupted.until = until

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        uninterrupted.until = self._around
        uninterrupted.depth -= 1
        if uninterrupted.pending and uninterrupted.depth <= 0:
            uninterrupted.raise_unless_waiting()


def raise_held() -> None:
    """Raise the interrupt that came in a section `held`, unless an outer one holds it back."""
    if uninterrupted.pending and uninterrupted.depth <= 0:
        uninterrupted.raise_unless_waiting()


_waits: set[CodeType] = set()
# Functions that are about to begin a section.
_beginnings: set[CodeType] = {
    _Uninterrupted.__enter__.__code__,
    _Held.__enter__.__code__,
    UninterruptedThroughout.__enter__.__code__,
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def interruptible(function: _Function) -> _Function:
    """Mark a blocking wait: an interrupt that comes in its own frame is raised there, under `uninterrupted` too.

    The function must be right wherever that happens, and must look at `uninterrupted.pending` before it blocks.
    """
    _waits.add(function.__code__)
    return function


def uninterrupted_from_start(function: _Function) -> _Function:
    """Mark a function whose body is one section: an interrupt before its `with` waits like one inside it."""
    _beginnings.add(function.__code__)
    return function


def _on_sigint(_signal: int, frame: FrameType | None) -> None:
    code = None if frame is None else frame.f_code
    if code in _beginnings or (uninterrupted.depth > 0 and code not in _waits):
        uninterrupted.pending = True
        return
    until = uninterrupted.until
    if until is not None and until() is not None and not uninterrupted.pending:
        uninterrupted.pending = True
        return
    uninterrupted.pending = False
    raise KeyboardInterrupt


def install() -> None:
    """Hold KeyboardInterrupt back where `uninterrupted` says so, unless SIGINT has a handler of the user's."""
    is_main = threading.get_ident() == threading.main_thread().ident
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_sigint)


def uninstall() -> None:
    """Put Python's own handler back, if ours is in force. On another thread than the main one ours stays."""
    is_main = threading.get_ident() == threading.main_thread().ident
    if is_main and signal.getsignal(signal.SIGINT) is _on_sigint:
        signal.signal(signal.SIGINT, signal.default_int_handler)
