"""The account of a step's time: each blocking wait of the training thread has a name.

On a device that runs behind that thread the account is of the streams that compute: [Note: the device's time].

[Note: the device's time]
On a device with streams the clock of the training thread tells when it launched work, not when the work ran. So a step,
the computation of each unit and each wait begin and end at a *mark*: an event behind the work launched so far on the
stream that computes. A wait begins at the mark before the stream is told to wait and ends when the awaited work is
done: nothing else lies between, so this is how long the stream stood still. A wait of the host counts in the same way:
for the time in which the stream has work it costs nothing and does not count.

A mark is an event on the stream, except at the end of a wait, whose time other events tell: [Note: the end of a wait].
A unit that is fetched begins at the mark before its wait, which ends the computation before it; in backward its
gradient's lease may be waited for, too. That is one event for each unit in forward and two in backward, where the run
is observed, and only those before a wait where it is not. A unit that stays on the device has one in each pass, at its
end.

Marks are read, in their order, when the device has reached them; no thread waits for that. So the report of a step
comes one or a few steps late, on the training thread, with the same words and the same meaning as on the CPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from offloadzero.observe.bound import StepReport
from offloadzero.observe.timeline import COMPUTE, OFF, WAIT, Timeline


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
        self._started_s = time.perf_counter()
        if self._stream is not None:
            self._stream.restart()

    def finish_step(self, step: int) -> None:
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


_STEP = "step"  # a kind of entry beside the lanes
BETWEEN = "between units"  # computed where no unit has begun
SETTLE_EVERY = 256  # entries: without steps no other call settles them


class Mark:
    """A point in the device's work; `at_s`: the time at which it was reached, on time.perf_counter(), once known."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s: float | None = None


class Marks(Protocol):
    """Makes marks, and finds out when they were reached."""

    def record(self) -> Mark:
        """Make a mark behind the work that the calling thread has launched on its current stream."""

    def look(self) -> None:
        """Set the time of the marks that the device has reached. Waits for nothing."""

    def begin_wait(self) -> object:
        """Announce a wait of the calling thread's stream; the result goes to `end_wait`."""

    def end_wait(self, first: Mark, before: object) -> Mark:
        """Make a mark where the stream goes on; `first` is the mark before the wait."""

    def wait(self) -> None:
        """Block until the device has reached all marks."""


@dataclass(slots=True)
class _Entry:
    lane: str
    name: str
    first: Mark
    last: Mark
    step: int = 0


class StreamClock:
    """Keeps the account of the streams that compute: [Note: the device's time]."""

    def __init__(self, marks: Marks, timeline: Timeline) -> None:
        self._marks = marks
        self._timeline = timeline
        self._lock = threading.RLock()
        self._entries: deque[_Entry] = deque()
        self._waits_s: dict[str, float] = {}  # of the step that is read
        self._reports: list[StepReport] = []  # of steps that have run, for `settle`
        self._open = self._began = marks.record()  # of the present computation; of the present step
        self._begun: str | None = None  # a unit's name, if it has begun with a mark
        self._unnamed: list[_Entry] = []  # parts of the present computation, cut by waits

    def restart(self) -> None:
        with self._lock:
            self._entries.clear()
            self._waits_s.clear()
            self._reports.clear()
            self._unnamed.clear()
            self._begun = None
            self._open = self._began = self._marks.record()

    # --- launched work ---

    def begin(self, name: str) -> Mark:
        """Name the work launched from now on `name`: a unit that may still have to be waited for."""
        with self._lock:
            mark = self._close(BETWEEN)
            self._begun = name
            return mark

    def end(self, name: str, *, is_part: bool = False) -> None:
        """Name the work launched since the last mark `name`, or after the unit that has begun.

        `is_part`: the unit that has begun goes on.
        """
        with self._lock:
            if not is_part or self._begun is None:
                self._close(name)

    def begin_wait(self, first: Mark | None) -> tuple[Mark, object]:
        """Announce a wait of the stream, or of the thread that launches. `first`: a mark after which nothing was
        launched.

        Returns the argument of `end_wait`.
        """
        if first is None:
            with self._lock:
                first = self._cut() if self._timeline.is_on else self._marks.record()
        return first, self._marks.begin_wait()

    def end_wait(self, name: str, begun: tuple[Mark, object]) -> None:
        """Note that the stream has been told to wait, or that the thread has done so."""
        with self._lock:
            first, before = begun
            self._open = last = self._marks.end_wait(first, before)
            self._append(_Entry(WAIT, name, first, last))

    def finish_step(self, step: int) -> None:
        with self._lock:
            last = self._close("step")
            self._append(_Entry(_STEP, "", self._began, last, step))
            self._began = last

    def _close(self, name: str) -> Mark:
        """Close the present computation: that of the unit that has begun, else of `name`."""
        last = self._cut()
        for entry in self._unnamed:
            entry.name = self._begun or name
        self._unnamed.clear()
        self._begun = None
        return last

    def _cut(self) -> Mark:
        first, self._open = self._open, self._marks.record()
        if self._timeline.is_on:
            entry = _Entry(COMPUTE, self._begun or BETWEEN, first, self._open)
            self._unnamed.append(entry)
            self._append(entry)
        return self._open

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) % SETTLE_EVERY == 0:
            self._read()

    # --- work that has run ---

    def settle(self, *, wait: bool = False) -> list[StepReport]:
        """Return the steps that the device has finished since the last call; with `wait` all of them."""
        with self._lock:
            if wait:
                self._marks.wait()
            self._read()
            reports, self._reports = self._reports, []
            return reports

    def _read(self) -> None:
        self._marks.look()
        while self._entries and self._entries[0].last.at_s is not None:
            self._take(self._entries.popleft())

    def _take(self, entry: _Entry) -> None:
        start_s, end_s = entry.first.at_s, entry.last.at_s
        if start_s is None or end_s is None:
            raise AssertionError("a mark is reached before an earlier one was read")
        seconds = max(end_s - start_s, 0.0)  # negative where another stream was ahead
        if entry.lane == _STEP:
            waits_s, self._waits_s = self._waits_s, {}
            self._reports.append(StepReport(entry.step, seconds, waits_s, start_s))
            return
        if entry.lane == WAIT:
            self._waits_s[entry.name] = self._waits_s.get(entry.name, 0.0) + seconds
        if seconds > 0.0:
            self._timeline.add(entry.lane, entry.name, start_s, end_s)


class StreamWaiting:
    """Counts the time for which the stream stands still from its entry to its exit."""

    __slots__ = ("_begun", "_clock", "_name", "_since", "_start_s", "_timeline")

    def __init__(self, clock: StreamClock, timeline: Timeline, name: str, since: Mark | None) -> None:
        self._clock = clock
        self._timeline = timeline
        self._name = name
        self._since = since

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()
        self._begun = self._clock.begin_wait(self._since)

    def __exit__(self, *exception: object) -> None:
        self._clock.end_wait(self._name, self._begun)
        # Of the thread: no Python of the hooks.
        self._timeline.waited_s += time.perf_counter() - self._start_s
