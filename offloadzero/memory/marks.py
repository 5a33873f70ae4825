"""When a device did what: times of its events on time.perf_counter(), read when they are reached (floor 3).

[Note: the device's clock]
The device tells how long after one event another was reached. So the host's time of one event gives that of all: the
reference. It lies on a stream that is never busy, where it is reached as soon as it is recorded: a few looks at it find
out when, and where they do not (the driver is busy) the reference before it does for longer. Only the first one is
waited for, when the engine is made. The difference of two events is an fp32 of milliseconds, so the reference is a new
one now and then.

Events that have been read are recorded again: making one takes longer than recording it.

[Note: the end of a wait]
The mark at the end of a wait costs no event. The stream goes on when what it was told to wait for is reached, and those
events, of copies and updates on their lanes, are timed anyway; and not before the host goes on, which launches what
comes next. The last of these times is the end; none of them is after the beginning where nothing stood still.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import cast

from offloadzero.memory.device import Device, Event, Stream
from offloadzero.observe.stream_clock import Mark

MAX_REFERENCE_AGE_S = 30.0  # within it the device's clock resolves 2 us
NUM_LOOKS = 50  # at a new reference, each of about a microsecond
LOOK_EVERY = 256  # marks: without steps nobody else looks
MAX_POOL = 1024  # events that wait to be recorded again


class DeviceClock:
    """Times of events: [Note: the device's clock]. Of a device that has streams; from any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream("clock")  # one for good: torch's streams come from a pool of 32
        if self._stream is None:
            raise AssertionError("a device without streams has no events")
        self._pool: deque[Event] = deque(maxlen=MAX_POOL)
        self._reference = device.record(self._stream, timed=True)
        self._reference.synchronize()
        self._reference_s = time.perf_counter()
        self._lock = threading.Lock()

    def record(self, stream: Stream) -> Event:
        """At the end of what was launched on `stream`."""
        try:
            again = self._pool.popleft()
        except IndexError:
            again = None
        return self._device.record(stream, timed=True, again=again)

    def recycle(self, event: Event) -> None:
        """Nobody uses it any more."""
        self._pool.append(event)

    def at_s(self, event: Event) -> float | None:
        """When the device reached it, on time.perf_counter(); None while it has not. Waits for nothing."""
        if not event.query():
            return None
        with self._lock:
            reference, reference_s = self._reference, self._reference_s
        return reference_s + self._device.elapsed_s(reference, event)

    def renew(self) -> None:
        """Take a new reference if it is time to."""
        if time.perf_counter() - self._reference_s < MAX_REFERENCE_AGE_S or self._stream is None:
            return
        event = self._device.record(self._stream, timed=True)
        for _ in range(NUM_LOOKS):
            if event.query():
                with self._lock:
                    self._reference, self._reference_s = event, time.perf_counter()
                return


class _Awaited(threading.local):
    """What the calling thread has told its stream to wait for since its named wait began; None outside of one."""

    events: list[Event] | None = None


_awaited = _Awaited()


def note_awaited(event: Event) -> None:
    """The calling thread has told its stream to wait for a timed event."""
    if _awaited.events is not None:
        _awaited.events.append(event)


class EventMark(Mark):
    """One whose time is that of an event."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event

    def find(self, clock: DeviceClock) -> bool:
        """Give it its time; whether it has been reached."""
        self.at_s = clock.at_s(self.event)
        if self.at_s is not None:
            clock.recycle(self.event)
        return self.at_s is not None


class WaitEnd(Mark):
    """The end of a wait: [Note: the end of a wait]."""

    __slots__ = ("events", "first", "host_s")

    def __init__(self, first: Mark, events: list[Event], host_s: float) -> None:
        super().__init__()
        self.first = first
        self.events = events
        self.host_s = host_s

    def find(self, clock: DeviceClock) -> bool:
        """The same."""
        times_s = [self.first.at_s, *(clock.at_s(event) for event in self.events)]
        reached_s = [at_s for at_s in times_s if at_s is not None]
        if len(reached_s) == len(times_s):
            self.at_s = max(self.host_s, *reached_s)
            self.events = []
        return self.at_s is not None


class StreamMarks:
    """Marks in what is computed, on whatever stream that is; read in the order in which they were made."""

    def __init__(self, device: Device, clock: DeviceClock) -> None:
        self._device = device
        self._clock = clock
        self._lock = threading.Lock()  # of those who look
        self._pending: deque[EventMark | WaitEnd] = deque()

    def record(self) -> Mark:
        """Behind what the calling thread has launched on its current stream."""
        stream = self._device.current_stream()
        if stream is None:
            raise AssertionError("a device with events has streams")
        return self._add(EventMark(self._clock.record(stream)))

    def begin_wait(self) -> object:
        """What the stream is told to wait for counts from now on; gives what `end_wait` takes."""
        before, _awaited.events = _awaited.events, []
        return before

    def end_wait(self, first: Mark, before: object) -> Mark:
        """Where the stream goes on that has stood still since `first`, which it has reached before."""
        events, _awaited.events = _awaited.events or [], cast("list[Event] | None", before)
        return self._add(WaitEnd(first, events, time.perf_counter()))

    def _add(self, mark: EventMark | WaitEnd) -> Mark:
        self._pending.append(mark)
        if len(self._pending) % LOOK_EVERY == 0:
            self.look()
        return mark

    def look(self) -> None:
        """Give those marks their time that the device has reached. Waits for nothing."""
        self._clock.renew()
        with self._lock:
            while self._pending and self._pending[0].find(self._clock):
                self._pending.popleft()

    def wait(self) -> None:
        """Block until the device has reached all marks."""
        for mark in list(self._pending):
            for event in [mark.event] if isinstance(mark, EventMark) else mark.events:
                event.synchronize()
        self.look()
