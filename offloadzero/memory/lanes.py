"""Threads that transfer in order, and the tickets and fences that order transfers with the computation.

[Note: lanes]
A lane runs transfers in the order of their submission, on a thread of its own. The thread first waits (on the
host) for the tickets a transfer depends on, such as a file read or another unit's update. On a device with streams
it then launches the copy on the lane's stream and records an event; the ticket's `wait()` blocks the host on that
event and `order_compute()` makes the calling thread's current stream wait for it instead. With the CPU as the device
the thread copies by itself, so a missing wait is a real race there too.

A fence marks the work launched so far on the streams that compute with the model, [Note: streams that compute]:
a lane that overwrites memory which those kernels read waits for the fence first. On the CPU launched work has been
executed already, so fences are empty.

[Note: streams that compute]
Usually one stream computes, in backward as in forward. A script may use more. Then a unit that has arrived for one
stream has not arrived for another, and it leaves when all streams have done with it. So each stream on which a unit is
used is noted: it waits for the unit's arrival, and fences lie on all streams that this step and the one before used,
and on earlier ones that are not idle yet.

[Note: timing on a lane]
A copy is recorded on the timeline by itself, without what its task waited for. On a device with streams two events
enclose it; when they happened is asked when the step has ended: [Note: the device's clock].
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from offloadzero.core.fail_points import through
from offloadzero.errors import StateError
from offloadzero.memory.device import CpuDevice, Device, Event, Stream
from offloadzero.memory.device_clock import DeviceClock, StreamMarks, note_awaited
from offloadzero.memory.tickets import FINISHED, AllOf, Failures, Latch, Promise, Ticket
from offloadzero.observe import timeline
from offloadzero.observe.clock import Marks
from offloadzero.observe.timeline import Timeline

Fence = Sequence[Event]
NO_FENCE: Fence = ()


class LaneTicket:
    """The ticket of one task of a lane."""

    _error: BaseException | None = None
    _event: Event | None = None
    _is_timed = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._launched = Latch()

    @classmethod
    def of(cls, device: Device, event: Event, *, timed: bool = False) -> LaneTicket:
        """Make the ticket of the work launched before `event`."""
        ticket = cls(device)
        ticket._finish(event, timed=timed)
        return ticket

    def _finish(
        self, event: Event | None, error: BaseException | None = None, *, timed: bool = False
    ) -> None:
        self._event = event
        self._is_timed = timed
        self._error = error
        self._launched.set()

    def _wait_launched(self) -> None:
        self._launched.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Block the host until the transfer is complete."""
        self._wait_launched()
        if self._event is not None:
            self._event.synchronize()

    def order_compute(self, stream: Stream | None = None) -> None:
        """Order later work of `stream` (None: the calling thread's current one) behind the transfer."""
        self._wait_launched()
        if self._event is not None:
            stream = stream or self._device.current_stream()
            if stream is None:
                raise AssertionError("a device with events has streams")
            stream.wait_event(self._event)
            if self._is_timed:
                note_awaited(self._event)

    def done(self) -> bool:
        if not self._launched.is_set:
            return False
        return self._error is not None or self._event is None or self._event.query()


def order_compute_after(ticket: Ticket) -> None:
    """Order later work of the calling thread behind `ticket`: on the stream where that is enough."""
    if isinstance(ticket, LaneTicket):
        ticket.order_compute()
    elif isinstance(ticket, AllOf):
        for each in ticket.tickets:
            order_compute_after(each)
    elif isinstance(ticket, Promise):
        order_compute_after(ticket.wait_handed_on())
    else:
        ticket.wait()


Task = Callable[[], None]
HOST = CpuDevice()  # for lanes that launch nothing

# The timeline's name for the copies of each lane.
COPY_LANES = {
    "fetch": timeline.H2D,
    "state-h2d": timeline.H2D,
    "gradient-d2h": timeline.D2H,
    "state-d2h": timeline.D2H,
    "activation-h2d": timeline.H2D,
    "activation-d2h": timeline.D2H,
}


class _Here(threading.local):
    """The calling thread's present work: the lane it belongs to and the label of its task."""

    lane = timeline.COMPUTE
    label = "copy"


_here = _Here()


class Lane:
    """Runs tasks in order on one thread, and on one stream of `device` where that has any."""

    def __init__(self, name: str, failures: Failures, device: Device = HOST) -> None:
        self.name = name
        self._failures = failures
        self._device = device
        self._stream = device.new_stream(name)
        self._tasks: queue.SimpleQueue[tuple[Task, Sequence[Ticket], Fence, str, LaneTicket] | None]
        self._tasks = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"offloadzero-{name}", daemon=True)
        failures.add_thread(self)
        self._thread.start()

    def submit(
        self, task: Task, *, after: Sequence[Ticket] = (), fence: Fence = NO_FENCE, label: str = "copy"
    ) -> LaneTicket:
        """Run `task` once every ticket of `after` is done and, on the stream, behind `fence`.
        `label` names the task's copies on the timeline. Raises StateError where the lane is closed.
        """
        if self._closed:
            raise StateError(f"{label}: the engine of this model is closed (lane {self.name})")
        ticket = LaneTicket(self._device)
        self._tasks.put((task, after, fence, label, ticket))
        return ticket

    def start(self, begin: Callable[[], Ticket], *, label: str) -> Promise:
        """Run `begin`, which starts work that other threads finish: done when the ticket that it returns is."""
        started = Promise()

        def task() -> None:
            try:
                started.fulfil(begin())
            except BaseException as error:
                self._failures.record(error)  # before any waiting thread can see it
                started.fail(error)
                raise

        self.submit(task, label=label)
        return started

    def close(self) -> None:
        """Finish the submitted tasks and stop the thread. After an interrupt it may be called again."""
        self._closed = True
        self._tasks.put(None)
        if self._thread.is_alive():
            self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()  # or memory would be given back under its copies
            self._stream = None

    def _run(self) -> None:
        _here.lane = COPY_LANES.get(self.name, self.name)
        self._failures.in_background()
        while (item := self._tasks.get()) is not None:
            task, after, fence, _here.label, ticket = item
            event, failure = None, None
            try:
                for dependency in after:
                    dependency.wait()
                event = through("lane.launch", self._launch, self.name)(task, fence)
            except BaseException as error:
                self._failures.record(error)
                failure = error
            # Nothing of the task may outlive it, as its buffers go back to their owners. A thread that sees the ticket
            # finished and drops memory that the copy has read must be the last to hold it.
            del item, task, after, fence
            ticket._finish(event, failure, timed=failure is None)
            del ticket, event, failure

    def _launch(self, task: Task, fence: Fence) -> Event | None:
        if self._stream is None:
            task()
            return None
        with self._device.launching_on(self._stream):
            for event in fence:
                self._stream.wait_event(event)
            task()
            return self._device.record(self._stream, timed=True)


class Accelerator:
    """The device as the engine sees it: lanes, fences and copies that are recorded."""

    def __init__(self, device: Device, recorder: Timeline = timeline.OFF) -> None:
        self.device = device.torch_device
        self.timeline = recorder
        self.asynchronous = device
        self._computing: list[Stream] = []  # in this step
        # In the last step, and earlier ones that may not be idle: then with the event of their last work.
        self._computed: dict[Stream, Event | None] = {}
        self.has_streams = device.current_stream() is not None  # launched work may run later
        self._clock: DeviceClock | None = None  # made on first use
        self._making_clock = threading.Lock()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate device memory at once: uint8, shape (num_bytes,)."""
        return self.asynchronous.allocate(num_bytes)

    def pin(self, buffer: torch.Tensor, *, label: str) -> None:
        """Page-lock host memory for the copy engines. `label` is for errors. OffloadError if the system refuses."""
        self.asynchronous.pin(buffer, label=label)

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin`."""
        self.asynchronous.unpin(buffer)

    def lane(self, name: str, failures: Failures) -> Lane:
        """Make a thread, with a stream of its own where the device has streams."""
        return Lane(name, failures, self.asynchronous)

    def note_stream(self) -> Stream | None:
        """Note that the calling thread's current stream computes: [Note: streams that compute]. None on the CPU."""
        stream = self.asynchronous.current_stream()
        if stream is not None and stream not in self._computing:
            self._computing.append(stream)
        return stream

    def end_step(self) -> None:
        """Forget the streams on which the last two steps did not compute, as soon as they have done what was launched.

        A step waits for all that was computed with the weights, but one that takes no gradient does not.
        """
        kept: dict[Stream, Event | None] = dict.fromkeys(self._computing)
        for stream, last in self._computed.items():
            if stream not in kept and (last is None or not last.query()):
                kept[stream] = last or self.asynchronous.record(stream)
        self._computed, self._computing = kept, []

    def fence(self) -> Fence:
        """Mark the work launched so far on the calling thread's current stream and on the streams that compute."""
        stream = self.asynchronous.current_stream() if self.has_streams else None
        if stream is None:
            return NO_FENCE
        streams = [stream]
        for other in (*self._computing, *self._computed):
            if other not in streams:
                streams.append(other)
        return [self.asynchronous.record(stream) for stream in streams]

    def join_streams(self, stream: Stream | None = None) -> None:
        """Order later work of `stream` (None: the calling thread's) behind all that `fence` marks."""
        stream = stream or self.asynchronous.current_stream()
        if stream is not None:
            for event in self.fence():
                stream.wait_event(event)

    def computed(self) -> Ticket:
        """A ticket that is done when all that `fence` marks is complete."""
        tickets = [LaneTicket.of(self.asynchronous, event) for event in self.fence()]
        return tickets[0] if len(tickets) == 1 else AllOf(tickets)

    def launched(self) -> Ticket:
        """A ticket, for lanes, of the work that the calling thread has launched so far on its current stream."""
        stream = self.asynchronous.current_stream()
        if stream is None:
            return FINISHED
        event = self.asynchronous.record(stream, timed=True)
        return LaneTicket.of(self.asynchronous, event, timed=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, lane: str | None = None) -> None:
        """Copy equal bytes between host and device; called on a lane, where it may end later than this returns.

        `lane` names the direction on the timeline where it is not that of the thread's lane.
        """
        with self.span(lane or _here.lane, _here.label, target.nbytes):
            self.asynchronous.copy(target, source)

    def copy_inside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy equal bytes inside the device, as `copy` does; it takes no link and is on no lane of the timeline."""
        self.asynchronous.copy(target, source)

    def span(self, lane: str, name: str, num_bytes: int) -> AbstractContextManager[None]:
        """Record the device's time for the work launched inside the block: [Note: timing on a lane]."""
        stream = self.asynchronous.current_stream() if self.timeline.is_on else None
        if stream is None:
            return self.timeline.span(lane, name, num_bytes)
        return self._span_between_events(self._device_clock(), stream, lane, name, num_bytes)

    @contextmanager
    def _span_between_events(
        self, clock: DeviceClock, stream: Stream, lane: str, name: str, num_bytes: int
    ) -> Iterator[None]:
        clock.renew()
        first = clock.record(stream)
        yield
        last = clock.record(stream)

        def times() -> tuple[float, float] | None:
            start_s, end_s = clock.at_s(first), clock.at_s(last)
            if start_s is None or end_s is None:
                return None
            clock.recycle(first)
            clock.recycle(last)
            return start_s, end_s

        self.timeline.add_unfinished(lane, name, times, num_bytes)

    def marks(self) -> Marks | None:
        """The marks for the clock of the steps; None where nothing runs later than it is launched."""
        return StreamMarks(self.asynchronous, self._device_clock()) if self.has_streams else None

    def _device_clock(self) -> DeviceClock:
        with self._making_clock:
            if self._clock is None:
                self._clock = DeviceClock(self.asynchronous)
            return self._clock

    def read_later(self, scalar: torch.Tensor) -> Callable[[], float]:
        """Return a call for the present value of `scalar` (one element); the call blocks until it is computed."""
        if self.asynchronous.current_stream() is None:
            value = scalar.item()
            return lambda: value
        copy = self.asynchronous.new_pinned(scalar.dtype)
        self.asynchronous.copy(copy, scalar.detach().reshape(()))
        arrived = self.launched()

        def read() -> float:
            arrived.wait()
            return float(copy)

        return read
