"""Streams, events and who runs what when.

[Note: a schedule]
Nothing runs when it is launched. One thread, the device, takes the head of some stream that may run, at random and by
the seed, when someone waits for it, when a look at an event gave it a little time, or when much is outstanding. So a
kernel runs as late as can be, or early, or after everything of another stream; a seed gives that again as far as the
host's threads do.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

AUTOGRAD_THREAD = "autograd's thread"
MAX_OUTSTANDING = 300  # launches; a real driver's queues end somewhere too


class WrongDeviceError(AssertionError):
    """A stream, an event or memory of one device is used on another."""


class SimulatedEvent:
    """Reached when the device gets to it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.is_reached = False
        self.num_waiting = 0  # threads of the host
        self.at_s = 0.0
        self.clock: Any = None  # what happened before it, for the checker

    @property
    def point(self) -> SimulatedEvent:
        return self

    def query(self) -> bool:
        return self.machine.look(self)

    def synchronize(self) -> None:
        self.machine.wait(self)


class SimulatedStream:
    """A queue of the device's."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.tasks: deque[Callable[[], None] | SimulatedEvent] = deque()  # an event: wait for it
        self.weight = 1e-9 if name in machine.slow else 10.0 ** machine.random.uniform(-1.5, 0)

    def launch(self, task: Callable[[], None]) -> None:
        self.machine.launch(self, task)

    def wait_event(self, event: Any) -> None:
        """For what `event` stands for now: recorded again later, it is another's."""
        self.machine.order(self, event.point)

    def record(self) -> SimulatedEvent:
        return self.machine.record(self)

    def synchronize(self) -> None:
        self.machine.wait(self.record())

    def __repr__(self) -> str:
        return f"stream {self.name}"


class Machine:
    """One device: its streams, and the thread that runs them."""

    def __init__(self, seed: int = 0, *, slow: Collection[str] = ()) -> None:
        self.random = random.Random(seed)
        self.slow = slow  # names of streams that run when nothing else can
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._lock = threading.RLock()  # a finalizer may record an event anywhere
        # Who waits is woken by what it waits for, and by nothing else: a thread's change took as long as a kernel.
        self._may_run = threading.Condition(self._lock)  # the device waits for it
        self._has_reached = threading.Condition(self._lock)  # the host's threads do
        self._streams: list[SimulatedStream] = []
        self._num_outstanding = 0
        self._num_waiting = 0  # threads that wait for the device
        self._credit = 0  # tasks that may run though nobody waits
        self._eagerness = 0.0 if slow else self.random.choice((0.0, 0.2, 1.0))
        self.idle_s: float | None = None  # after so long all may run though nobody here waits; None: never
        self._now_s = 0.0
        self._closed = False
        self.default_stream = self.new_stream("default")
        self._here = threading.local()
        self._thread = threading.Thread(target=self._run, name="simulated device", daemon=True)
        self._thread.start()

    # --- what a host thread calls ---

    def new_stream(self, name: str) -> SimulatedStream:
        with self._lock:
            stream = SimulatedStream(self, name)
            self._streams.append(stream)
        return stream

    @property
    def current_stream(self) -> SimulatedStream:
        """Of the calling thread."""
        stream: SimulatedStream | None = getattr(self._here, "stream", None)
        return stream or self.default_stream

    @contextmanager
    def launching_on(self, stream: SimulatedStream) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        self._here.stream = self.own(stream)
        try:
            yield
        finally:
            self._here.stream = before

    def set_stream(self, stream: SimulatedStream) -> None:
        """The calling thread launches there from now on, up to the end of a `launching_on`."""
        self._here.stream = self.own(stream)

    def own(self, stream: SimulatedStream) -> SimulatedStream:
        """WrongDeviceError if it is another device's."""
        if stream.machine is not self:
            raise WrongDeviceError(f"{stream!r} is another device's")
        return stream

    def launch(self, stream: SimulatedStream, task: Callable[[], None]) -> None:
        self._put(stream, task)
        self.counts["launches"] += 1

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        self.own(stream)
        event = SimulatedEvent(self)
        self._put(stream, partial(self.reach, event))
        self.counts["events"] += 1
        return event

    def reach(self, event: SimulatedEvent) -> None:
        """Have an event come now; one of a stream by the device itself."""
        with self._lock:
            self._now_s += 1e-6
            event.at_s = self._now_s
            event.is_reached = True
            if event.num_waiting:
                # From here on nobody waits: until these threads go on, nothing else may run for them.
                self._num_waiting -= event.num_waiting
                event.num_waiting = 0
                self._has_reached.notify_all()
            self._may_run.notify()  # a stream may have waited for it

    def fail(self, error: BaseException) -> None:
        """Raise `error` in all who wait for the device from now on."""
        with self._lock:
            self.error = error
            self._has_reached.notify_all()

    def order(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        if event.machine is not self:
            raise WrongDeviceError(f"{stream!r} is to wait for an event of another device")
        self._put(stream, event)
        self.counts["event waits"] += 1

    def wait(self, event: SimulatedEvent) -> None:
        """Block the calling thread until the device has reached an event."""
        self.counts[f"host waits of {_kind_of_thread()}"] += not event.is_reached
        with self._lock:
            if not event.is_reached:
                event.num_waiting += 1
                self._num_waiting += 1
                self._may_run.notify()
            while not event.is_reached and self.error is None:
                self._has_reached.wait()
        self._raise()

    def look(self, event: SimulatedEvent) -> bool:
        """Whether an event has been reached; who asks again and again will see it reached."""
        with self._lock:
            self._credit += 1
            self._may_run.notify()
        self._raise()
        return event.is_reached

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()

    def close(self) -> None:
        """Run what is outstanding and end."""
        self.synchronize()
        with self._lock:
            self._closed = True
            self._may_run.notify()
        self._thread.join()

    def _put(self, stream: SimulatedStream, task: Callable[[], None] | SimulatedEvent) -> None:
        with self._lock:
            stream.tasks.append(task)
            self._num_outstanding += 1
            if self.random.random() < self._eagerness:
                self._credit += 1
            if self._is_wanted() or self.idle_s is not None:
                self._may_run.notify()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    # --- the device ---

    def _run(self) -> None:
        # Kernels run below autograd: what was dispatched has been recorded there already.
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            while (task := self._next()) is not None:
                try:
                    task()
                except BaseException as error:
                    self.fail(error)
                    break
                del task  # what it holds goes back now

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            while True:
                if self._closed:
                    return None
                if self._is_wanted():
                    ready = [stream for stream in self._streams if self._is_ready(stream)]
                    if ready:
                        stream = self.random.choices(ready, [stream.weight for stream in ready])[0]
                        task = stream.tasks.popleft()
                        self._num_outstanding -= 1
                        self._credit = max(0, self._credit - 1)
                        assert not isinstance(task, SimulatedEvent)
                        return task
                    self._credit = 0
                if not self._may_run.wait(self.idle_s):
                    self._credit = self._num_outstanding

    def _is_wanted(self) -> bool:
        """Whether something may run now."""
        return bool(self._num_waiting or self._credit or self._num_outstanding > MAX_OUTSTANDING)

    def _is_ready(self, stream: SimulatedStream) -> bool:
        tasks = stream.tasks
        while tasks and isinstance(event := tasks[0], SimulatedEvent):
            if not event.is_reached:
                return False
            tasks.popleft()
            self._num_outstanding -= 1
        return bool(tasks)


def _kind_of_thread() -> str:
    thread = threading.current_thread()
    launches = thread is threading.main_thread() or thread.name == AUTOGRAD_THREAD
    return "the launching thread" if launches else thread.name
