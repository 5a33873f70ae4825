"""Ctrl-C and other signals of a script, and the boundary of the code that they must not interrupt.

[Note: interrupts]
Python calls the handlers of signals in the main thread at almost any call: also between "the ticket is made" and "the
work is submitted". Its own of SIGINT raises KeyboardInterrupt, and a script's may raise as well: a timeout by SIGALRM,
SystemExit at SIGTERM, the error of a DataLoader's worker that has died at SIGCHLD. A change of state that must be whole
is a function marked `uninterrupted`, one that torch or the script enters; what it calls knows nothing of signals:

    @uninterrupted
    def step(self) -> None:
        ...

A handler looks at the stack that it interrupts. From the innermost frame outwards the first of these decides: in an
`uninterrupted` function it waits, and is called where that function ends, also with an error; in `call_script`, by
which our code calls the script's, it is called at once, as it is where there is neither. A blocking wait is made by
`wait`: there it is called all the same, so that a wait that never ends can always be left. Code that changes state
around such a wait must be right when the wait raises; all other code need not be. In a function marked
`uninterrupted_throughout`, whose waits end on their own, an interrupt that comes in one of them waits too; a second one
is raised there.

Some changes begin in one call and end in another (a backward that updates weights, hook by hook). `hold_until` holds
them together: it refers weakly to an object, and as long as that lives an interrupt waits, in a blocking wait and in
the script's code too. A second one of the same signal does not wait, so that a wait that never ends can be left there.

`install()` puts an `_Asking` in the place of each handler that is in force: one that asks first. A script may set
handlers later, so it is called again where a model's forward, a save or a load begins. A signal that has no handler in
Python is not concerned, nor are real-time signals. `Failures.whole()` marks an engine in whose midst something was
raised all the same.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar, cast

_Handler = Callable[[int, FrameType | None], Any]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Held:
    """The handlers that wait; one for all, as only the main thread is ever interrupted."""

    __slots__ = ("calling", "late", "pending", "until")

    def __init__(self) -> None:
        self.calling: tuple[int, FrameType | None] | None = None  # the arguments of the handler that runs
        self.clear()

    def clear(self) -> None:
        self.late: dict[int, _Handler] = {}  # handlers to be called, by signal
        self.pending = False  # whether there are any
        self.until: Callable[[], object] = _nothing  # weak: interrupts wait as long as it lives


def _nothing() -> None:
    return None


held = _Held()


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark a function that handlers do not interrupt: they are called where it ends, or in a wait inside."""

    @functools.wraps(function)
    def entry(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        finally:
            # Again: where torch's compiler evaluates frames Python looks for signals behind each call, this one too.
            while held.pending and call_late(sys._getframe().f_back):
                pass

    return entry


def uninterrupted_itself(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark an `uninterrupted` function that does at its end what `uninterrupted` would: a call the less."""
    _entries.add(function.__code__)
    return function


def uninterrupted_throughout(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark an `uninterrupted` function in whose waits an interrupt waits, too, but not a second one."""

    @functools.wraps(function)
    def throughout(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(*args, **kwargs)

    return uninterrupted(throughout)


def call_script(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function of the script's, which may be interrupted in the midst of an `uninterrupted` one of ours."""
    while held.pending and call_late(sys._getframe()):
        pass
    return function(*args, **kwargs)


def wait(block: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call `block`, a function in C that waits; a handler may raise here in the midst of an `uninterrupted` function.

    It is not called when one has: a caller that waits for long comes back now and then.
    """
    if held.pending and threading.get_ident() == threading.main_thread().ident:
        call_late(sys._getframe())
    return block(*args, **kwargs)


def hold_until(reference: Callable[[], object] | None) -> None:
    """Let interrupts wait as long as the weak `reference` has its object. None: for nothing."""
    held.until = reference or _nothing


def call_late(frame: FrameType | None) -> bool:
    """Call the handlers that wait, unless they still must at `frame`, the caller's; return whether.

    On a thread that autograd has made there may be no caller. Raises what handlers raise.
    """
    main = threading.main_thread().ident
    is_main = threading.get_ident() == main
    if held.until() is not None or _is_uninterrupted(
        frame if is_main else sys._current_frames().get(main or 0)
    ):
        return False
    # Nothing is called between a look at `late` and what is put into `pending`: Python looks for signals at calls.
    while held.late:
        number, handler = held.late.popitem()
        held.pending = False
        if held.late:
            held.pending = True  # the handler may raise
        if is_main:
            _call(handler, number, frame)
        else:
            _thread.interrupt_main(cast(signal.Signals, number))  # which asks there
    return True


def _call(handler: _Handler, number: int, frame: FrameType | None) -> None:
    """Call a handler, and mark the error that it raises."""
    outer, held.calling = held.calling, (number, frame)
    try:
        handler(number, frame)
    except Exception as error:
        if _ON_RECORD not in error.__dict__:
            error.__dict__[_MARK] = True
        raise
    finally:
        held.calling = outer


_entries = {uninterrupted(_nothing).__code__}
_THROUGHOUT = uninterrupted_throughout(_nothing).__wrapped__.__code__  # type: ignore[attr-defined]
_OPEN = (call_script.__code__, _call.__code__)


def _is_uninterrupted(at: FrameType | None, *, is_second: bool = False) -> bool:
    """Whether a handler must wait in the frame `at`; `is_second`: one of the signal waits already."""
    frame = at
    is_wait = at is not None and at.f_code is wait.__code__
    while frame is not None and frame.f_code not in _OPEN:
        if frame.f_code in _entries and not is_wait:
            return True
        if frame.f_code is _THROUGHOUT and not is_second:
            return True
        frame = frame.f_back
    return False


class _Asking:
    """A handler in the place of another, which it calls where nothing forbids it, and else later."""

    __slots__ = ("handler",)

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        calling = held.calling
        if calling is not None and calling[0] == number and (frame is None or frame is calling[1]):
            self.handler(number, frame)  # one that was set later calls this one, and was asked for
            return
        at = frame if frame is not None else sys._getframe(1)
        if at.f_code in _OPEN:  # the script's code has not begun, or is over
            at = cast(FrameType, at.f_back)
        if sys.version_info < (3, 11) and at.f_code in _entries:  # it may have looked for the last time
            _thread.interrupt_main(cast(signal.Signals, number))
            return
        is_second = number in held.late
        if (held.until() is not None and not is_second) or _is_uninterrupted(at, is_second=is_second):
            held.late[number] = self.handler
            held.pending = True
            return
        held.late.pop(number, None)
        if not held.late:
            held.pending = False
        _call(self.handler, number, frame)


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
    """Let the handlers in force wait where code is `uninterrupted`. On another thread than the main one: nothing."""
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


# Signals that wait were the parent's.
os.register_at_fork(after_in_child=held.clear)
