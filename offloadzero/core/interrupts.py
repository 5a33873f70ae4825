"""Ctrl-C and other signals of a script, and the sections of code that they must not interrupt.

[Note: interrupts]
Python calls the handlers of signals in the main thread at almost any call: also between "the ticket is made" and "the
work is submitted". Its own of SIGINT raises KeyboardInterrupt, and a script's may raise as well: a timeout by SIGALRM,
SystemExit at SIGTERM, the error of a DataLoader's worker that has died at SIGCHLD. A change of state that must be whole
runs under `uninterrupted`: the handler of a signal that comes inside is called where the section ends, or in a blocking
wait inside it (a function marked `interruptible`), so that a wait that never ends can always be left. Code that changes
state around such a wait must be right when the wait raises; all other code in the section need not be.

    with uninterrupted:
        ticket = UpdateTicket()
        self._tickets[index] = ticket
        pipeline.submit(...)

A function may be interrupted where it begins, before its `with`. Where that would be too late, in a `finally` say, or
in a hook whose caller has done its part, the function is marked `uninterrupted_from_start`. A function that returns
something which has to be taken back later uses `held` in the place of `uninterrupted`: `held` does not raise at its
end, and the caller calls `raise_held()` where it can take the thing back. Both are marked, too: where torch's compiler
evaluates frames Python looks for signals behind the call of each Python function, the end of `held` among them.

`UninterruptedThroughout()` is such a section whose waits end on their own: an interrupt that comes in one of them waits
too; a second interrupt is raised there.

Some changes begin in one call and end in another (a backward that updates weights, hook by hook). `uninterrupted.until`
holds them together: it refers weakly to an object, and as long as that lives an interrupt waits, in a blocking wait
too. A second one of the same signal does not wait, so that a wait that never ends can be left there as well.

`install()` puts an `_Asking` in the place of each handler that is in force: one that asks first. A script may set
handlers later, so it is called again where a model's forward, a save or a load begins. A signal that has no handler in
Python is not concerned, nor are real-time signals. `Failures.whole()` marks an engine in whose midst something was
raised all the same.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

_Handler = Callable[[int, FrameType | None], Any]


class _Uninterrupted:
    """The context in which handlers wait; one for all, as only the main thread is ever interrupted."""

    __slots__ = ("calling", "depth", "late", "pending", "until")

    def __init__(self) -> None:
        self.calling: tuple[int, FrameType | None] | None = None  # the arguments of the handler that runs
        self.depth = 0
        self.late: dict[int, _Handler] = {}  # handlers to be called, by signal
        self.pending = False  # whether there are any
        self.until: Callable[[], object] | None = None  # weak: interrupts wait as long as it lives

    # Neither method calls anything before it has done its work: Python looks for signals at calls. For the same reason
    # nothing is called between a look at `late` and what is put into `pending`.

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        self.depth -= self.depth > 0  # in a forked child no section was left over
        if self.pending and self.depth <= 0:
            self.raise_unless_waiting()

    def hold(self, number: int, handler: _Handler) -> None:
        """Let a handler wait; of one signal one alone."""
        self.late[number] = handler
        self.pending = True

    def raise_unless_waiting(self) -> None:
        """Call the handlers that were held back, unless they wait for the end of `until`. Raises what they raise."""
        if self.until is None or self.until() is None:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Call the handlers that were held back, in the main thread."""
        is_main = threading.get_ident() == threading.main_thread().ident
        self.pending = False
        while self.late:
            number, handler = self.late.popitem()
            self.pending = False
            if self.late:
                self.pending = True  # the handler may raise
            if is_main:
                _call(handler, number, sys._getframe(1))
            else:
                _thread.interrupt_main(cast(signal.Signals, number))


class _Held:
    """A section like `uninterrupted` that does not raise at its end: the next section does, or `raise_held`."""

    __slots__ = ()

    def __enter__(self) -> None:
        uninterrupted.depth += 1

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        uninterrupted.depth -= uninterrupted.depth > 0


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
        uninterrupted.depth -= uninterrupted.depth > 0
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
    """Mark a function: an interrupt in its own frame, before its section say, waits like one inside of a section."""
    _beginnings.add(function.__code__)
    return function


class _Asking:
    """A handler in the place of another, which it calls where nothing forbids it, and else later."""

    __slots__ = ("handler",)

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        calling = uninterrupted.calling
        if calling is not None and calling[0] == number and (frame is None or frame is calling[1]):
            self.handler(number, frame)  # one that was set later calls this one, and was asked for
            return
        code = None if frame is None else frame.f_code
        if code in _beginnings or (uninterrupted.depth > 0 and code not in _waits):
            uninterrupted.hold(number, self.handler)
            return
        until = uninterrupted.until
        if until is not None and until() is not None and number not in uninterrupted.late:
            uninterrupted.hold(number, self.handler)
            return
        uninterrupted.late.pop(number, None)
        if not uninterrupted.late:
            uninterrupted.pending = False
        _call(self.handler, number, frame)


def _call(handler: _Handler, number: int, frame: FrameType | None) -> None:
    """Call a handler, and mark the error that it raises."""
    outer, uninterrupted.calling = uninterrupted.calling, (number, frame)
    try:
        handler(number, frame)
    except Exception as error:
        if _ON_RECORD not in error.__dict__:
            error.__dict__[_MARK] = True
        raise
    finally:
        uninterrupted.calling = outer


def is_interrupt(error: BaseException) -> bool:
    """Whether an error says nothing of the work that it left: what a handler has raised, or no `Exception`."""
    return not isinstance(error, Exception) or _MARK in error.__dict__


def put_on_record(error: BaseException, keeper: int) -> None:
    """Note which engine keeps `error`: a handler that uses that engine raises it, and has not made it."""
    error.__dict__[_ON_RECORD] = keeper


def is_kept_by_another(error: BaseException, own: int) -> bool:
    """Whether `error` was put on record, and not by the one of the number `own`."""
    return bool(error.__dict__.get(_ON_RECORD, own) != own)


_MARK = "_is_of_signal_handler"
_ON_RECORD = "_is_of_engine"
# Not the real-time ones: a look at all takes 15 us as it is, in each forward.
_SIGNALS = sorted({*range(1, signal.SIGRTMIN)} & signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def install() -> None:
    """Hold the handlers in force back where `uninterrupted` says so. On another thread than the main one: nothing."""
    if threading.get_ident() != threading.main_thread().ident:
        return
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler) and type(handler) is not _Asking:
            _set(number, _Asking(handler))


def uninstall() -> None:
    """Put the handlers back that asking ones stand for. On another thread than the main one these stay."""
    if threading.get_ident() != threading.main_thread().ident:
        return
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if type(handler) is _Asking:
            _set(number, handler.handler)


def _set(number: int, handler: _Handler) -> None:
    """Set a handler, and leave as it is whether the signal breaks off system calls: `signal.signal` has it do so."""
    restarts = _restarts_calls(number)
    signal.signal(number, handler)
    if restarts:
        signal.siginterrupt(number, False)


class _SigAction(ctypes.Structure):
    """struct sigaction of the C library; no function of Python's tells its flags."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_SA_RESTART = 0x10000000


def _restarts_calls(number: int) -> bool:
    action = _SigAction()
    if ctypes.CDLL(None, use_errno=True).sigaction(number, None, ctypes.byref(action)):
        raise OSError(ctypes.get_errno(), f"sigaction({number})")
    return bool(action.flags & _SA_RESTART)


def _in_forked_child() -> None:
    """End the sections of threads that the child lacks, and drop the signals that were the parent's.

    Nothing tells whose a section was: one in whose midst its own thread has forked is over, too, and not counted twice.
    """
    uninterrupted.depth = 0
    uninterrupted.until = None
    uninterrupted.late.clear()
    uninterrupted.pending = False


os.register_at_fork(after_in_child=_in_forked_child)
