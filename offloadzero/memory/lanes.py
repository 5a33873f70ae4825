"""Streams, events and pinning: the only file in which CUDA and the CPU as a device differ (floor 3).

[Note: lanes]
A lane runs transfers in the order of their submission, on a thread of its own. The thread first waits (on the
host) for the tickets a transfer depends on, such as a file read or another unit's update. With CUDA it then
launches the copy on the lane's stream and records an event; the ticket's `wait()` blocks the host on that event
and `order_compute()` makes the calling thread's current stream wait for it instead. With the CPU as the device
the thread copies by itself, so a missing wait is a real race there too.

A fence marks what the calling thread has launched so far on its current stream (autograd's threads have
streams of their own): a lane that overwrites memory which those kernels read waits for the fence first. On the
CPU everything launched has been executed already, so fences are None.

[Note: timing on a lane]
A copy is recorded on the timeline by itself, without what its task waited for. With CUDA two events on the
stream enclose it; how long after a reference event they happened is asked when the step has ended. The reference
is an event on a stream that is never busy, so the host knows its time without waiting for anything.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from offloadzero.errors import ConfigError, OffloadError
from offloadzero.memory.tickets import FINISHED, Failures, Latch, Ticket
from offloadzero.observe import timeline
from offloadzero.observe.timeline import Timeline

Fence = torch.cuda.Event | None


class LaneTicket:
    """The ticket of one task of a lane."""

    def __init__(self) -> None:
        self._launched = Latch()
        self._error: BaseException | None = None
        self._event: torch.cuda.Event | None = None

    def _finish(self, event: torch.cuda.Event | None, error: BaseException | None = None) -> None:
        self._event = event
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

    def order_compute(self) -> None:
        """What the calling thread launches from now on runs after the transfer."""
        self._wait_launched()
        if self._event is not None:
            # Of the event's device: the calling thread's current one may be another.
            torch.cuda.current_stream(self._event.device).wait_event(self._event)

    def done(self) -> bool:
        """Whether the transfer is complete."""
        if not self._launched.is_set:
            return False
        return self._error is not None or self._event is None or self._event.query()


def order_compute_after(ticket: Ticket) -> None:
    """What the calling thread launches from now on runs after `ticket`: on the stream where that is enough."""
    if isinstance(ticket, LaneTicket):
        ticket.order_compute()
    else:
        ticket.wait()


Task = Callable[[], None]

# The timeline's lane of the copies on each lane of ours.
COPY_LANES = {
    "fetch": timeline.H2D,
    "state-h2d": timeline.H2D,
    "gradient-d2h": timeline.D2H,
    "state-d2h": timeline.D2H,
    "activation-h2d": timeline.H2D,
    "activation-d2h": timeline.D2H,
}


class _Here(threading.local):
    """What the calling thread is doing: the lane it belongs to and the label of its task."""

    lane = timeline.COMPUTE
    label = "copy"


_here = _Here()


class Lane:
    """Runs tasks in order on one thread, and with CUDA on one stream."""

    def __init__(self, name: str, failures: Failures, stream: torch.cuda.Stream | None = None) -> None:
        self.name = name
        self._failures = failures
        self._stream = stream
        self._tasks: queue.SimpleQueue[tuple[Task, Sequence[Ticket], Fence, str, LaneTicket] | None]
        self._tasks = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"offloadzero-{name}", daemon=True)
        failures.threads.append(self)
        self._thread.start()

    def submit(
        self, task: Task, *, after: Sequence[Ticket] = (), fence: Fence = None, label: str = "copy"
    ) -> LaneTicket:
        """Run `task` once every ticket of `after` is done and, on the stream, behind `fence`.

        `label` names its copies on the timeline.
        """
        if self._closed:
            raise OffloadError(f"lane {self.name} is closed")
        ticket = LaneTicket()
        self._tasks.put((task, after, fence, label, ticket))
        return ticket

    def close(self) -> None:
        """Finish what was submitted and stop the thread. One that was interrupted may be repeated."""
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
            try:
                for dependency in after:
                    dependency.wait()
                ticket._finish(self._launch(task, fence))
            except BaseException as error:
                self._failures.record(error)
                ticket._finish(None, error)
            # Nothing of the task may outlive it: its buffers go back to their owners.
            del item, task, after, fence, ticket

    def _launch(self, task: Task, fence: Fence) -> torch.cuda.Event | None:
        if self._stream is None:
            task()
            return None
        with torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            task()
            event = torch.cuda.Event()
            event.record(self._stream)
        return event


class Accelerator(Protocol):
    """The device as the engine sees it."""

    device: torch.device
    timeline: Timeline

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """One allocation of device memory: uint8, shape (num_bytes,)."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Page-lock host memory for the copy engines."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin`."""

    def lane(self, name: str, failures: Failures) -> Lane:
        """A new lane."""

    def fence(self) -> Fence:
        """Marks what the calling thread has launched so far."""

    def launched(self) -> Ticket:
        """Done when what the calling thread has launched so far on its current stream is complete."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy equal bytes between host and device; called on a lane."""

    def span(self, lane: str, name: str, num_bytes: int) -> AbstractContextManager[None]:
        """Record what the device does of the work launched inside: [Note: timing on a lane]."""

    def read_later(self, scalar: torch.Tensor) -> Callable[[], float]:
        """A call that gives the value which `scalar` (one element) has now; blocks until it is computed."""

    def synchronize(self) -> None:
        """Block until the device is idle."""


class CpuAccelerator:
    """The CPU as the device: the same code with real threads and no GPU."""

    def __init__(self, recorder: Timeline = timeline.OFF) -> None:
        self.device = torch.device("cpu")
        self.timeline = recorder

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Ordinary memory, touched when first used."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, buffer: torch.Tensor) -> None:
        """Nothing to do."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Nothing to do."""

    def lane(self, name: str, failures: Failures) -> Lane:
        """A thread."""
        return Lane(name, failures)

    def fence(self) -> Fence:
        """What was launched has run already."""
        return None

    def launched(self) -> Ticket:
        """What was launched has run already."""
        return FINISHED

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A memcpy outside the GIL: torch's own copy would start a second OpenMP team on the lane."""
        from offloadzero.native import cpu_adam

        with self.timeline.span(_here.lane, _here.label, target.nbytes):
            cpu_adam.copy(target, source)

    def span(self, lane: str, name: str, num_bytes: int) -> AbstractContextManager[None]:
        """What the calling thread does inside."""
        return self.timeline.span(lane, name, num_bytes)

    def read_later(self, scalar: torch.Tensor) -> Callable[[], float]:
        """The value itself."""
        value = scalar.item()
        return lambda: value

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


class CudaAccelerator:
    """A CUDA device."""

    def __init__(self, device: torch.device, recorder: Timeline = timeline.OFF) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.timeline = recorder
        self._reference: _Reference | None = None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """One allocation through torch's allocator, kept for the life of the engine."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pin(self, buffer: torch.Tensor) -> None:
        """cudaHostRegister at the exact size: torch's pinned allocator rounds up to powers of two."""
        if buffer.numel():
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
            if int(status) != 0:
                raise OffloadError(f"cudaHostRegister of {buffer.numel()} bytes failed: error {int(status)}")

    def unpin(self, buffer: torch.Tensor) -> None:
        """cudaHostUnregister."""
        if buffer.numel():
            status = torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
            if int(status) != 0:
                raise OffloadError(f"cudaHostUnregister failed: error {int(status)}")

    def lane(self, name: str, failures: Failures) -> Lane:
        """A thread with a stream of its own."""
        return Lane(name, failures, torch.cuda.Stream(self.device))

    def fence(self) -> Fence:
        """An event on the calling thread's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def launched(self) -> Ticket:
        """An event on the calling thread's current stream."""
        ticket = LaneTicket()
        ticket._finish(self.fence())
        return ticket

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous on the lane's stream."""
        with self.span(_here.lane, _here.label, target.nbytes):
            target.copy_(source, non_blocking=True)

    @contextmanager
    def span(self, lane: str, name: str, num_bytes: int) -> Iterator[None]:
        """Two events on the current stream."""
        if not self.timeline.is_on:
            yield
            return
        reference = self._reference
        if reference is None or reference.is_old():
            reference = self._reference = _Reference(self.device)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(torch.cuda.current_stream(self.device))
        yield
        last.record(torch.cuda.current_stream(self.device))
        self.timeline.add_unfinished(lane, name, lambda: reference.times(first, last), num_bytes)

    def read_later(self, scalar: torch.Tensor) -> Callable[[], float]:
        """A copy to pinned memory behind the kernels launched so far."""
        value = torch.empty((), dtype=scalar.dtype, pin_memory=True)
        value.copy_(scalar.detach().reshape(()), non_blocking=True)
        arrived = self.launched()

        def read() -> float:
            arrived.wait()
            return float(value)

        return read

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)


class _Reference:
    """An event whose time on time.perf_counter() is known."""

    # elapsed_time() is an fp32 of milliseconds: within this time it resolves 2 us.
    MAX_AGE_S = 30.0

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.Stream(device))
        self._event.synchronize()
        self._at_s = time.perf_counter()

    def is_old(self) -> bool:
        return time.perf_counter() - self._at_s > self.MAX_AGE_S

    def times(self, first: torch.cuda.Event, last: torch.cuda.Event) -> tuple[float, float] | None:
        """When the device reached two events; None while it has not."""
        if not last.query():
            return None
        return (
            self._at_s + self._event.elapsed_time(first) / 1e3,
            self._at_s + self._event.elapsed_time(last) / 1e3,
        )


def make_accelerator(device: str | None, recorder: Timeline = timeline.OFF) -> Accelerator:
    """The accelerator of `device` ("cpu", "cuda", "cuda:N"); None takes CUDA where there is one.

    Raises:
        ConfigError: there is no such CUDA device.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type != "cuda":
        return CpuAccelerator(recorder)
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (chosen.index or 0) >= num_cuda:
        raise ConfigError("offloadzero.device", device, f"CUDA devices that torch finds here: {num_cuda}")
    return CudaAccelerator(chosen, recorder)
