"""The account of a step's time: each blocking wait of the training thread has a name.

On a device that runs behind that thread the account is of the streams that compute: [Note: the device's time].
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from offloadzero.observe.step_report import StepReport
from offloadzero.observe.stream_clock import Mark, Marks, StreamClock, StreamWaiting
from offloadzero.observe.timeline import OFF, Timeline


class _Waiting:
    """Counts the time from its entry to its exit, at each use of a unit: a generator takes four times as long."""

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
        self,
        timeline: Timeline = OFF,
        *,
        on_end: Callable[[], None] | None = None,
        on_step: Callable[[StepReport], StepReport] | None = None,
    ) -> None:
        """Make the clock. Both calls come on the training thread: `on_end` when a step ends there, `on_step` with its
        report, to which it may add.

        On the CPU one follows the other; on a device with streams the report comes later.
        """
        self.timeline = timeline
        self._on_end = on_end
        self._on_step = on_step
        self._lock = threading.Lock()
        self._waits_s: dict[str, float] = {}
        self._started_s = time.perf_counter()
        self._last = StepReport(step=0, step_s=0.0)
        self._stream: StreamClock | None = None

    def follow(self, marks: Marks) -> None:
        """Count the time of the streams that compute from now on."""
        self._stream = StreamClock(marks, self.timeline)
        if self.timeline.is_on:
            self.timeline.stream = self._stream

    def begin(self, what: str, name: str) -> Mark | None:
        """Name the work launched from now on, the unit's forward say; None where it is not recorded, or on the CPU."""
        if self._stream is None or not self.timeline.is_on:
            return None
        return self._stream.begin(f"{what} {name}")

    def waiting(self, name: str, *, since: Mark | None = None) -> AbstractContextManager[None]:
        """Count the time inside the block under `name`. `since`: a mark after which nothing was launched."""
        if self._stream is not None:
            return StreamWaiting(self._stream, self.timeline, name, since)
        return _Waiting(self, name)

    def _waited(self, name: str, start_s: float, end_s: float) -> None:
        self.timeline.waited(name, start_s, end_s)
        with self._lock:
            self._waits_s[name] = self._waits_s.get(name, 0.0) + end_s - start_s

    def restart(self) -> None:
        """Begin the first step now."""
        self._started_s = time.perf_counter()
        if self._stream is not None:
            self._stream.restart()

    def finish_step(self, step: int) -> None:
        """Close the account of this step."""
        if self._on_end is not None:
            self._on_end()
        if self._stream is not None:
            self._stream.finish_step(step)
            self.settle()
            return
        now_s = time.perf_counter()  # after the thread's last piece of work, which belongs to the step
        with self._lock:
            report = StepReport(step, now_s - self._started_s, dict(self._waits_s), self._started_s)
            self._waits_s.clear()
            self._started_s = now_s
        self._report(report)

    def settle(self, *, wait: bool = False) -> None:
        """Report the steps that the device has finished by now; with `wait` all of them."""
        if self._stream is not None:
            for report in self._stream.settle(wait=wait):
                self._report(report)

    def _report(self, report: StepReport) -> None:
        self._last = report
        if self._on_step is not None:
            self._last = self._on_step(report)

    @property
    def last(self) -> StepReport:
        """The last step that has run."""
        self.settle()
        return self._last
