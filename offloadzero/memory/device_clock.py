"""The times of a device's events on time.perf_counter(), read when the events are reached.

[Note: the device's clock]
The device tells how long after one event another was reached. So the host's time of one event, the reference, gives
that of all. The reference lies on a stream that is never busy, where it is reached as soon as it is recorded: a few
looks find out when. Where they do not (the driver is busy) the reference before it is used for longer. Only the first
one is waited for, when the engine is made. The difference of two events is an fp32 number of milliseconds, so a new
reference is taken now and then.

Events that have been read are recorded again: making one takes longer than recording it.

[Note: the end of a wait]
The mark at the end of a wait costs no event. The stream goes on when the events are reached that it waits for, and
those events, of copies and updates on their lanes, are timed anyway; and it does not go on before the host, which
launches the work that comes next. The last of these times is the end. None of them is after the beginning where
nothing stood still.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import cast

from offloadzero.memory.device import Device, Event, Stream
from offloadzero.observe.clock import Mark

MAX_REFERENCE_AGE_S = 30.0  # within it the device's clock resolves 2 us
NUM_LOOKS = 50  # at a new reference, each of about a microsecond
LOOK_EVERY = 256  # marks: without steps no other code looks
MAX_POOL = 1024  # events that wait to be recorded again


class DeviceClock:
    """The times of a device's events: [Note: the device's clock]. The device has streams; any thread may ask."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream("clock")  # a single one: torch's streams come from a pool of 32
        if self._stream is None:
            raise AssertionError("a device without streams has no events")
        self._pool: deque[Event] = deque(maxlen=MAX_POOL)
        self._reference = device.record(self._stream, timed=True)
        self._reference.synchronize()
        self._reference_s = time.perf_counter()
        self._lock = threading.Lock()

    def record(self, stream: Stream) -> Event:
        """Record an event at the end of the work launched on `stream`."""
        try:
            again = self._pool.popleft()
        except IndexError:
            again = None
        return self._device.record(stream, timed=True, again=again)

    def recycle(self, event: Event) -> None:
        """Keep an event that is no longer used, to record it again."""
        self._pool.append(event)

    def at_s(self, event: Event) -> float | None:
        """The time at which the device reached it, on time.perf_counter(); None before. Waits for nothing."""
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
    """The events that the calling thread's stream waits for since its named wait began; None outside of one."""

    events: list[Event] | None = None


_awaited = _Awaited()


def note_awaited(event: Event) -> None:
    """Note that the calling thread's stream has been told to wait for a timed event."""
    if _awaited.events is not None:
        _awaited.events.append(event)


class EventMark(Mark):
    """A mark whose time is that of an event."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event

    def find(self, clock: DeviceClock) -> bool:
        """Set the mark's time; return whether the event has been reached."""
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
        """Set the mark's time; return whether all events of the wait have been reached."""
        times_s = [self.first.at_s, *(clock.at_s(event) for event in self.events)]
        reached_s = [at_s for at_s in times_s if at_s is not None]
        if len(reached_s) == len(times_s):
            self.at_s = max(self.host_s, *reached_s)
            self.events = []
        return self.at_s is not None


class StreamMarks:
    """Marks in the computation, on any stream, read in the order in which they were made."""

    def __init__(self, device: Device, clock: DeviceClock) -> None:
        self._device = device
        self._clock = clock
        self._lock = threading.Lock()  # taken by the thread that looks
        self._pending: deque[EventMark | WaitEnd] = deque()

    def record(self) -> Mark:
        """Make a mark behind the work that the calling thread has launched on its current stream."""
        stream = self._device.current_stream()
        if stream is None:
            raise AssertionError("a device with events has streams")
        return self._add(EventMark(self._clock.record(stream)))

    def begin_wait(self) -> object:
        """Begin to note the events that the stream waits for; the result goes to `end_wait`."""
        before, _awaited.events = _awaited.events, []
        return before

    def end_wait(self, first: Mark, before: object) -> Mark:
        """Make a mark where the stream goes on after the wait since `first`, a mark that it has reached before."""
        events, _awaited.events = _awaited.events or [], cast("list[Event] | None", before)
        return self._add(WaitEnd(first, events, time.perf_counter()))

    def _add(self, mark: EventMark | WaitEnd) -> Mark:
        self._pending.append(mark)
        if len(self._pending) % LOOK_EVERY == 0:
            self.look()
        return mark

    def look(self) -> None:
        """Set the time of the marks that the device has reached. Waits for nothing."""
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
