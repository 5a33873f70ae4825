"""Tasks in processes of their own, forked from one that has imported what they share."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

Say = Callable[[Any], None]  # one JSON value to the parent


class Task(Protocol):
    """What a child does, and what its parent makes of it."""

    def work(self, say: Say) -> None:
        """In the child."""

    def hear(self, said: Any) -> None:
        """In the parent: something the child has said."""

    def goes_on(self, *, was_killed: bool) -> bool:
        """In the parent, when the child is gone: whether another one is to be forked."""


AnyTask = TypeVar("AnyTask", bound=Task)


class _Child:
    """A process that works, and the parent's end of the pipe into which it speaks."""

    def __init__(self, work: Callable[[Say], None]) -> None:
        self.pipe, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.pipe)
            os.setpgid(0, 0)

            def say(value: Any) -> None:
                os.write(writing, json.dumps(value).encode() + b"\n")

            work(say)
            os._exit(0)
        os.close(writing)
        self._text = b""
        self.heard_at_s = time.monotonic()

    def read(self) -> list[Any] | None:
        """What it has said since; None: it is gone."""
        more = os.read(self.pipe, 1 << 16)
        self.heard_at_s = time.monotonic()
        *lines, self._text = (self._text + more).split(b"\n")
        return [json.loads(line) for line in lines] if more else None

    def end(self) -> None:
        os.close(self.pipe)
        os.waitpid(self.pid, 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def forked(tasks: Iterable[AnyTask], *, at_once: int, silence_s: float) -> Iterator[AnyTask]:
    """Run tasks, a few at once; gives each that is over. A child that is silent for so long is killed."""
    waiting = deque(tasks)
    running: dict[int, tuple[_Child, AnyTask]] = {}
    killed: set[int] = set()
    while waiting or running:
        while waiting and len(running) < at_once:
            task = waiting.popleft()
            child = _Child(task.work)
            running[child.pipe] = child, task
        for pipe in select.select(list(running), [], [], 1.0)[0]:
            child, task = running[pipe]
            said = child.read()
            if said is not None:
                for value in said:
                    task.hear(value)
                continue
            del running[pipe]
            child.end()
            if task.goes_on(was_killed=child.pid in killed):
                waiting.appendleft(task)
            else:
                yield task
        for child, _ in running.values():
            if time.monotonic() - child.heard_at_s > silence_s and child.pid not in killed:
                killed.add(child.pid)
                child.kill()
