"""A device whose work takes no time to compute and a stated time on its own clock: what a step costs is known by hand.

[Note: virtual time]
What is launched is computed at once, so every order is right; what is late is its time. A stream has the time at which
it will have done all that was launched on it: a kernel or a copy begins then, or when its thread launched it, and takes
the seconds it is given. An event has the time of its stream; who waits for it, stream or thread, goes on no earlier.

Each host thread has a time of its own, which passes only while it waits: for an event, a latch, a task, a buffer, a
file transfer. Whether something is done is asked at the asking thread's time, however far the others have really come.
What threads compute takes no time, nor does launching, so nothing depends on how fast or how loaded the machine is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadzero.memory import arena, nvme, tickets
from offloadzero.memory import device as devices
from offloadzero.native import kernels
from offloadzero.observe.timeline import NVME_READ, NVME_WRITE, OFF
from offloadzero.update import adam_form

MEMORY_BYTES = 4 << 30
_TIMED_MODULES = ("memory.device_clock", "observe.clock", "observe.timeline")


class Hosts(threading.local):
    """The calling thread's time."""

    now_s = 0.0
    is_blocking = False  # in a wait: what has really happened counts, and its time is waited for

    def advance(self, at_s: float) -> None:
        """The thread has waited for something that was so at `at_s`."""
        self.now_s = max(self.now_s, at_s)

    @contextmanager
    def blocking(self) -> Iterator[None]:
        before, self.is_blocking = self.is_blocking, True
        try:
            yield
        finally:
            self.is_blocking = before


class VirtualEvent:
    def __init__(self, hosts: Hosts, at_s: float) -> None:
        self._hosts = hosts
        self.at_s = at_s

    def query(self) -> bool:
        return self.at_s <= self._hosts.now_s

    def synchronize(self) -> None:
        self._hosts.advance(self.at_s)


class VirtualStream:
    def __init__(self, hosts: Hosts, name: str) -> None:
        self._hosts = hosts
        self._lock = threading.Lock()
        self.name = name
        self.done_at_s = 0.0

    def launch(self, seconds: float) -> None:
        with self._lock:
            self.done_at_s = max(self.done_at_s, self._hosts.now_s) + seconds

    def wait_event(self, event: Any) -> None:
        with self._lock:
            self.done_at_s = max(self.done_at_s, event.at_s)

    def record(self) -> VirtualEvent:
        return VirtualEvent(self._hosts, max(self.done_at_s, self._hosts.now_s))

    def synchronize(self) -> None:
        self._hosts.advance(self.done_at_s)


class VirtualDevice:
    """Its memory is the host's, its time its own: [Note: virtual time]."""

    def __init__(self, bytes_per_s: Mapping[str, float]) -> None:
        """`bytes_per_s`: of copies, by the lane's name; the others take no time. "nvme read" and "nvme write", too."""
        self.torch_device = torch.device("cpu")
        self.bytes_per_s = bytes_per_s
        self.hosts = Hosts()
        self.num_records = 0  # of timed events on the stream that computes
        self.num_events = 0  # timed ones that were made anew for it
        self.num_blocked = 0  # times that a thread has waited for a buffer
        self._default = VirtualStream(self.hosts, "default")
        self._here = threading.local()
        self._memory: list[tuple[int, int]] = []

    def compute(self, seconds: float) -> None:
        """A kernel on the calling thread's current stream."""
        self.current_stream().launch(seconds)

    def spend(self, seconds: float) -> None:
        """The calling thread is busy with something else."""
        self.hosts.now_s += seconds

    def seconds_of(self, name: str, num_bytes: int) -> float:
        rate = self.bytes_per_s.get(name)
        return num_bytes / rate if rate else 0.0

    def holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(start <= address < end for start, end in self._memory)

    # --- offloadzero.memory.device.Device ---

    def name(self) -> str | None:
        return "virtual"

    def new_stream(self, name: str) -> Any:
        return VirtualStream(self.hosts, name)

    def current_stream(self) -> Any:
        return getattr(self._here, "stream", None) or self._default

    @contextmanager
    def launching_on(self, stream: Any) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def record(self, stream: Any, *, timed: bool = False, again: Any = None) -> Any:
        if timed and stream is self._default:
            self.num_records += 1
            self.num_events += again is None
        event = stream.record()
        if again is None:
            return event
        again.at_s = event.at_s
        return again

    def elapsed_s(self, first: Any, last: Any) -> float:
        return float(last.at_s - first.at_s)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self._memory.append((memory.data_ptr(), memory.data_ptr() + num_bytes))
        return memory

    def pin(self, buffer: torch.Tensor, *, label: str) -> None:
        pass

    def unpin(self, buffer: torch.Tensor) -> None:
        pass

    def new_pinned(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((), dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        kernels.copy(target, source)
        stream = self.current_stream()
        stream.launch(self.seconds_of(stream.name, target.nbytes))

    def synchronize(self) -> None:
        self._default.synchronize()

    def free_bytes(self) -> int | None:
        return MEMORY_BYTES

    def check_not_capturing(self) -> None:
        pass


@contextmanager
def virtual_time(
    patch: pytest.MonkeyPatch, bytes_per_s: Mapping[str, float], *, update_s: float = 0.0
) -> Iterator[VirtualDevice]:
    """Engines made inside run on such a device; each update of a record on the host takes `update_s`."""
    device = VirtualDevice(bytes_per_s)
    with patch.context() as inside:
        is_host_memory = devices.is_host_memory
        inside.setattr("offloadzero.engine.runtime.find_device", lambda _name: device)
        inside.setattr(
            devices, "is_host_memory", lambda tensor: is_host_memory(tensor) and not device.holds(tensor)
        )
        clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: device.hosts.now_s})
        for module in _TIMED_MODULES:
            inside.setattr(f"offloadzero.{module}.time", clock)
        _latches(device.hosts, inside)
        _queues(device.hosts, inside)
        _pools(device, inside)
        _files(device, inside)
        _updates(device.hosts, inside, update_s)
        yield device


def _latches(hosts: Hosts, patch: pytest.MonkeyPatch) -> None:
    """The flag keeps when it was set, as a tuple: for who asks before that time it is not, though it be in truth."""
    wait, set_now = tickets.Latch.wait, tickets.Latch.set

    def is_set(latch: tickets.Latch) -> bool:
        known = vars(latch).get("is_set", False)
        is_timed = isinstance(known, tuple)  # else it is another engine's
        return bool(known) and (not is_timed or hosts.is_blocking or known[0] <= hosts.now_s)

    def put(latch: tickets.Latch, value: bool) -> None:
        vars(latch)["is_set"] = (hosts.now_s,) if value else False

    def waiting(latch: tickets.Latch) -> None:
        with hosts.blocking():
            wait(latch)
        hosts.advance(vars(latch)["is_set"][0])

    def setting(latch: tickets.Latch) -> None:
        with hosts.blocking():
            set_now(latch)

    patch.setattr(tickets.Latch, "is_set", property(is_set, put))
    patch.setattr(tickets.Latch, "wait", waiting)
    patch.setattr(tickets.Latch, "set", setting)


def _queues(hosts: Hosts, patch: pytest.MonkeyPatch) -> None:
    class TimedQueue(queue.SimpleQueue[Any]):
        _seen: tuple[float, Any] | None = None  # taken out, and put in later than who looked could see

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put((hosts.now_s, item), block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            entry, self._seen = self._seen or super().get(block, timeout), None
            at_s, item = entry
            if at_s > hosts.now_s and not block:
                self._seen = entry
                raise queue.Empty
            hosts.advance(at_s)
            return item

        def get_nowait(self) -> Any:
            return self.get(False)

    patch.setattr(queue, "SimpleQueue", TimedQueue)


def _pools(device: VirtualDevice, patch: pytest.MonkeyPatch) -> None:
    hosts = device.hosts

    class TimedDeque(deque[Any]):
        def __init__(self, items: Iterable[Any]) -> None:
            super().__init__((0.0, item) for item in items)

        def append(self, item: Any) -> None:
            super().append((hosts.now_s, item))

        def popleft(self) -> Any:
            at_s, item = super().popleft()
            if at_s > hosts.now_s and not hosts.is_blocking:
                super().appendleft((at_s, item))
                raise IndexError
            hosts.advance(at_s)
            return item

    init, take = arena.BufferPool.__init__, arena.BufferPool.take

    def made(pool: arena.BufferPool, *args: Any, **kwargs: Any) -> None:
        init(pool, *args, **kwargs)
        pool._free = TimedDeque(pool._free)

    def taking(pool: arena.BufferPool) -> arena.PooledBuffer:
        device.num_blocked += 1
        with hosts.blocking():
            return take(pool)

    patch.setattr(arena.BufferPool, "__init__", made)
    patch.setattr(arena.BufferPool, "take", taking)


class _Transfer:
    """The ticket of a file transfer that has ended, in truth, when it is waited for, and on the drive's clock later."""

    def __init__(self, hosts: Hosts, ticket: tickets.Ticket, end_s: float) -> None:
        self._hosts = hosts
        self._ticket = ticket
        self._end_s = end_s

    def wait(self) -> None:
        self._ticket.wait()
        self._hosts.advance(self._end_s)

    def done(self) -> bool:
        return self._end_s <= self._hosts.now_s and self._ticket.done()


def _files(device: VirtualDevice, patch: pytest.MonkeyPatch) -> None:
    """A drive does one transfer after the other in each direction."""
    drives = {name: VirtualStream(device.hosts, name) for name in (NVME_READ, NVME_WRITE)}
    init, submit = nvme.NvmeTier.__init__, nvme.NvmeTier._submit

    def made(tier: Any, *args: Any, **kwargs: Any) -> None:
        init(tier, *args, **kwargs)
        tier.virtual_timeline, tier._timeline = tier._timeline, OFF

    def submitting(tier: Any, verb: str, start: int, data: torch.Tensor, **given: Any) -> Any:
        lane = NVME_READ if verb == "read" else NVME_WRITE
        ticket = submit(tier, verb, start, data, **given)
        seconds = device.seconds_of(lane, data.nbytes)
        drives[lane].launch(seconds)
        end = drives[lane].record()
        times = (end.at_s - seconds, end.at_s)
        tier.virtual_timeline.add_unfinished(
            lane, given["label"], lambda: times if end.query() else None, data.nbytes
        )
        return _Transfer(device.hosts, ticket, end.at_s)

    patch.setattr(nvme.NvmeTier, "__init__", made)
    patch.setattr(nvme.NvmeTier, "_submit", submitting)


def _updates(hosts: Hosts, patch: pytest.MonkeyPatch, seconds: float) -> None:
    step = adam_form.adam_step

    def stepping(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        hosts.now_s += seconds

    patch.setattr(adam_form, "adam_step", stepping)
