"""The spans of work on each lane: their times, and the bytes that they moved.

[Note: lanes of the timeline]
compute      the training thread: forward and backward of the units, without its named waits
wait         the named waits of that thread
             both on a device with streams: the streams that compute, [Note: the device's time]
h2d, d2h     copies of parameters, gradients and states between host and device
update       the optimizer's kernels on the host; bytes are those read and written in memory
device update   the same on the device
nvme read, nvme write   transfers of the file engine, from their first block to their last
landing      gradients that are added up and measured on the host
collectives  parameters and gradients between ranks, from the begin of a collective on this rank, which may wait for the
             others; bytes as [Note: bytes of a collective] weighs them

Recording an interval appends one tuple to a bounded deque, from any thread; nothing is formatted, sorted or
added up before the step has ended. A transfer that is still under way is asked for its times then.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

COMPUTE = "compute"
WAIT = "wait"
H2D = "h2d"
D2H = "d2h"
UPDATE = "update"
DEVICE_UPDATE = "device update"
NVME_READ = "nvme read"
NVME_WRITE = "nvme write"
LANDING = "landing"
COLLECTIVES = "collectives"

LANES = (COMPUTE, WAIT, H2D, D2H, UPDATE, DEVICE_UPDATE, LANDING, NVME_READ, NVME_WRITE, COLLECTIVES)

MAX_SPANS = 200_000  # of one step: some 60 MB, and far beyond what a step of a large model records

Times = tuple[float, float]
_NOTHING = nullcontext()


class Span(NamedTuple):
    """One interval on time.perf_counter(); it ended in step `step`."""

    lane: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    step: int = 0


class Laps(Protocol):
    """The account of the streams that compute, where there are any: [Note: the device's time]."""

    def end(self, name: str, *, is_part: bool = False) -> None:
        """Name the work launched since the last mark `name`."""


class _Running:
    """Records the time from its entry to its exit."""

    __slots__ = ("_lane", "_name", "_num_bytes", "_start_s", "_timeline")

    def __init__(self, timeline: Timeline, lane: str, name: str, num_bytes: int) -> None:
        self._timeline = timeline
        self._lane = lane
        self._name = name
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._timeline.add(self._lane, self._name, self._start_s, time.perf_counter(), self._num_bytes)


class _Launching:
    """Adds the time from its entry to its exit, less the named waits inside, to `launch_s`, or takes it off."""

    __slots__ = ("_sign", "_start_s", "_timeline", "_waited_s")

    def __init__(self, timeline: Timeline, sign: int) -> None:
        self._timeline = timeline
        self._sign = sign

    def __enter__(self) -> None:
        self._waited_s = self._timeline.waited_s
        self._start_s = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        waited_s = self._timeline.waited_s - self._waited_s
        self._timeline.launch_s += self._sign * (time.perf_counter() - self._start_s - waited_s)


class Timeline:
    """Records spans from any thread when `is_on`, and nothing otherwise."""

    def __init__(self, *, is_on: bool = False, max_spans: int = MAX_SPANS) -> None:
        self.is_on = is_on
        self.launch_s = 0.0  # Python of the hooks on the training thread, since it was last taken
        self.waited_s = 0.0  # in all named waits of that thread so far
        self.stream: Laps | None = None
        self._spans: deque[tuple[str, str, float, float, int]] = deque(maxlen=max_spans)
        self._unfinished: deque[tuple[str, str, Callable[[], Times | None], int]] = deque(maxlen=max_spans)
        self._lap_start_s = time.perf_counter()
        self._lap_waits: list[Times] = []
        self._is_outside = True

    # --- any thread ---

    def span(self, lane: str, name: str, num_bytes: int = 0) -> AbstractContextManager[None]:
        return _Running(self, lane, name, num_bytes) if self.is_on else _NOTHING

    def add(self, lane: str, name: str, start_s: float, end_s: float, num_bytes: int = 0) -> None:
        """Record an interval whose times are known."""
        if self.is_on:
            self._spans.append((lane, name, start_s, end_s, num_bytes))

    def add_unfinished(
        self, lane: str, name: str, times: Callable[[], Times | None], num_bytes: int = 0
    ) -> None:
        """Record work that is under way: `times()` returns (start, end) once it has ended, before that None."""
        if self.is_on:
            self._unfinished.append((lane, name, times, num_bytes))

    # --- the training thread ---

    def waited(self, name: str, start_s: float, end_s: float) -> None:
        if self.is_on:
            self.add(WAIT, name, start_s, end_s)
            self.waited_s += end_s - start_s
            self._lap_waits.append((start_s, end_s))

    def lap(self, name: str, *, leaves_model: bool = False, is_part: bool = False) -> None:
        """Name the training thread's work since the last lap, without its waits, `name`.

        `leaves_model`: the work up to the next `enter_model` belongs to the training loop. `is_part`: the lap is a part
        of the work of a unit that has begun on a stream.
        """
        if not self.is_on:
            return
        self._is_outside = leaves_model
        if self.stream is not None:
            self.stream.end(name, is_part=is_part)
            return
        now_s, position_s = time.perf_counter(), self._lap_start_s
        self._lap_start_s = now_s
        if self._lap_waits:
            waits, self._lap_waits = self._lap_waits, []
            for start_s, end_s in waits:
                if start_s > position_s:
                    self.add(COMPUTE, name, position_s, start_s)
                position_s = max(position_s, end_s)
        if now_s > position_s:
            self.add(COMPUTE, name, position_s, now_s)

    def enter_model(self) -> None:
        """Note that a forward begins, or goes on in another module."""
        if self.is_on and self._is_outside:
            self.lap("training loop")

    def launching(self) -> AbstractContextManager[None]:
        """Count the time inside the block as Python of the hooks; to be nested only inside `elsewhere`."""
        return _Launching(self, 1) if self.is_on else _NOTHING

    def elsewhere(self) -> AbstractContextManager[None]:
        """Leave out a block inside of `launching` in which code runs that is no hook, and may run others."""
        return _Launching(self, -1) if self.is_on else _NOTHING

    # --- when a step has ended ---

    def take(self, step: int, *, until_s: float = math.inf) -> tuple[list[Span], bool]:
        """Return the spans that have ended since the last call, by `until_s`, and whether some were lost."""
        is_full = len(self._spans) == self._spans.maxlen or len(self._unfinished) == self._unfinished.maxlen
        ended = [self._spans.popleft() for _ in range(len(self._spans))]
        for _ in range(len(self._unfinished)):
            lane, name, times, num_bytes = self._unfinished.popleft()
            found = times()
            if found is None:
                self._unfinished.append((lane, name, times, num_bytes))
            else:
                ended.append((lane, name, *found, num_bytes))
        spans = [Span(*span, step) for span in ended if span[3] <= until_s]
        self._spans.extend(span for span in ended if span[3] > until_s)
        return spans, is_full

    def take_launch_s(self) -> float:
        """Return the seconds of Python in the hooks since the last call."""
        launch_s, self.launch_s = self.launch_s, 0.0
        return launch_s


OFF = Timeline()
