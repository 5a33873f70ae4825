"""A pool of threads for work that must be done where no thread takes it, too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CallerRunsThreadPool(ThreadPoolExecutor):
    """Runs calls on threads, and on the caller's own where Python starts no more.

    So it is when the interpreter ends (a last save or write in atexit), and past the system's limit of threads. There
    the call may be in the queue all the same, where a thread that runs already takes it: it is run once.
    """

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the call; its future is done when it has run."""
        call = _Call(partial(function, *args, **kwargs))
        try:
            super().submit(call)
        except RuntimeError:
            call()
        return call.future


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        # Until it is taken: a call that stays in the queue holds nothing of what it worked on.
        self._work = [work]

    def __call__(self) -> None:
        try:
            work = self._work.pop()
        except IndexError:
            return
        try:
            self.future.set_result(work())
        except BaseException as error:
            self.future.set_exception(error)
