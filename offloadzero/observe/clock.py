"""Where a step's time goes: each blocking wait of the training thread has a name (floor 1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from offloadzero.observe.timeline import OFF, Timeline


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: its wall time and the seconds the training thread lost, by the wait's name.

    It began at `start_s` on time.perf_counter().
    """

    step: int
    step_s: float
    waits_s: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0

    @property
    def total_wait_s(self) -> float:
        """Seconds lost in all waits of the step."""
        return sum(self.waits_s.values())


class _Waiting:
    """Counts the time from its entry to its exit, each unit in each step: a generator takes four times as long."""

    __slots__ = ("_clock", "_name", "_start_s")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._clock._waited(self._name, self._start_s, time.perf_counter())


class StepClock:
    """Collects named waits; `finish_step` closes the step's account and opens the next."""

    def __init__(
        self, timeline: Timeline = OFF, *, on_step: Callable[[StepReport], None] | None = None
    ) -> None:
        """`on_step` is called with each step's report, on the training thread."""
        self.timeline = timeline
        self._on_step = on_step
        self._lock = threading.Lock()
        self._waits_s: dict[str, float] = {}
        self._started_s = time.perf_counter()
        self.last = StepReport(step=0, step_s=0.0)

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Count the time spent inside under `name`."""
        return _Waiting(self, name)

    def _waited(self, name: str, start_s: float, end_s: float) -> None:
        self.timeline.waited(name, start_s, end_s)
        with self._lock:
            self._waits_s[name] = self._waits_s.get(name, 0.0) + end_s - start_s

    def restart(self) -> None:
        """The first step begins now."""
        self._started_s = time.perf_counter()

    def finish_step(self, step: int) -> StepReport:
        """Close the account of this step."""
        now_s = time.perf_counter()
        with self._lock:
            self.last = StepReport(step, now_s - self._started_s, dict(self._waits_s), self._started_s)
            self._waits_s.clear()
            self._started_s = now_s
        if self._on_step is not None:
            self._on_step(self.last)
        return self.last
