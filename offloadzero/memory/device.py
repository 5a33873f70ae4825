"""The asynchronous parts of a device: streams, events, memory, copies. No other file names torch.cuda.

[Note: devices]
Work on a device is launched on a stream and runs later, in the stream's order. An event recorded on a stream is
reached when everything launched there before has run; another stream or the host waits for it. The CPU as a device has
no streams: launched work has run, and there is nothing to wait for. All other code asks a `Device`, so another
one can take its place: a CUDA device, any that torch.accelerator knows, the simulated one of the tests.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from contextlib import AbstractContextManager, suppress
from typing import Protocol, cast

import torch

from offloadzero.errors import ConfigError, OffloadError, StateError
from offloadzero.memory.pages import map_pages, populate

log = logging.getLogger("offloadzero.device")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
# Of the segments of torch's allocator: all bytes, those in use, and the unused ones beside these in a segment.
_OF_SEGMENTS = ("reserved", "active", "inactive_split")


class Event(Protocol):
    """A point in a stream's order."""

    def query(self) -> bool:
        """Whether the point has been reached."""

    def synchronize(self) -> None:
        """Block the host until the point is reached."""


class Stream(Protocol):
    """Runs the work that is launched on it in order; equal objects are the same stream."""

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream run behind `event`."""

    def synchronize(self) -> None:
        """Block the host until the stream is idle."""


class Device:
    """Everything that the engine asks of a device. What is said here holds where all launched work has run."""

    torch_device: torch.device

    def name(self) -> str | None:
        """The maker's name of the device; None for the CPU."""
        return None

    def new_stream(self, name: str) -> Stream | None:  # noqa: ARG002
        """Make a stream for one lane, by name; None if the device has no streams."""
        return None

    def current_stream(self) -> Stream | None:
        """Return the stream on which the calling thread launches."""
        return None

    def launching_on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside the block the calling thread launches on `stream`, and this device is its current one."""
        raise AssertionError(f"a device without streams, and {stream}")

    def record(self, stream: Stream, *, timed: bool = False, again: Event | None = None) -> Event:  # noqa: ARG002
        """Record an event at the end of the work launched on `stream`. Waiting for it on the host does not spin.

        `again`: an event that is no longer used, timed as this one. It may be recorded instead of a new one.
        """
        raise AssertionError(f"a device without streams, and {stream}")

    def elapsed_s(self, first: Event, last: Event) -> float:
        """Return the seconds between two timed events that have been reached."""
        raise AssertionError(f"a device without events, and {first}, {last}")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate device memory: uint8, shape (num_bytes,). It belongs to the calling thread's current stream.

        Before the memory is dropped no other stream may use it any more.
        """
        raise NotImplementedError

    def pin(self, buffer: torch.Tensor, *, label: str) -> None:
        """Page-lock host memory for the copy engines. `label` is for errors. OffloadError if the system refuses."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin`."""

    def new_pinned(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocate one element of pinned host memory, shape ()."""
        raise NotImplementedError

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch the copy of equal bytes between host and device on the calling thread's current stream."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Block until the device is idle."""

    def free_bytes(self) -> int | None:
        """The bytes that can be taken now; None if they are the host's."""
        return None

    def random_state(self) -> torch.Tensor | None:
        """The state of the device's generator, uint8 in host memory; None for the CPU, whose is torch's default one."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the generator to a state of `random_state`."""

    def check_not_capturing(self) -> None:
        """Raise StateError while the calling thread's stream records a graph: a graph cannot hold transfers."""


class CpuDevice(Device):
    """The CPU as the device: the same engine with real threads, where every kernel has run when its launch returns."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate ordinary memory, zero, touched when first used."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(map_pages(num_bytes), dtype=torch.uint8)

    def new_pinned(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocate ordinary memory, as all memory is the host's."""
        return torch.empty((), dtype=dtype, device="cpu")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy with a memcpy outside the GIL: torch's own copy would start a second OpenMP team on the lane."""
        from offloadzero.native import kernels

        kernels.copy(target, source)


class StreamDevice(Device):
    """A device that torch.accelerator knows."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def name(self) -> str | None:
        """The name that torch has for the device: torch.accelerator knows no other."""
        return str(self.torch_device)

    def new_stream(self, name: str) -> Stream | None:  # noqa: ARG002
        return cast("Stream", torch.Stream(self.torch_device))

    def current_stream(self) -> Stream | None:
        return cast("Stream", torch.accelerator.current_stream(self.torch_device))

    def launching_on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return the stream itself: torch's streams are context managers."""
        return cast("torch.Stream", stream)

    def record(self, stream: Stream, *, timed: bool = False, again: Event | None = None) -> Event:
        event = cast("torch.Event | None", again) or torch.Event(self.torch_device, enable_timing=timed)
        event.record(cast("torch.Stream", stream))
        return event

    def elapsed_s(self, first: Event, last: Event) -> float:
        """Return the difference by the device's own clock: an fp32 number of milliseconds, here in seconds."""
        return cast("torch.Event", first).elapsed_time(cast("torch.Event", last)) / 1e3

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate from torch's caching allocator."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def pin(self, buffer: torch.Tensor, *, label: str) -> None:
        """Do nothing: torch has no general way to register memory, and copies go through the driver's own buffers."""
        device = self.torch_device.type
        log.warning("%s: %d bytes stay unpinned, torch registers none for %s", label, buffer.nbytes, device)

    def new_pinned(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocate from torch's pinned allocator."""
        return torch.empty((), dtype=dtype, pin_memory=True, device="cpu")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy as torch does: asynchronously where the host memory is pinned."""
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def free_bytes(self) -> int | None:
        """The free bytes by torch's count, which before torch 2.10 is asked of the device's own module."""
        ask = getattr(torch.accelerator, "get_memory_info", None)
        if ask is None:
            ask = torch.get_device_module(self.torch_device).mem_get_info
        free, _ = ask(self.torch_device)
        return int(free)

    def random_state(self) -> torch.Tensor | None:
        state: torch.Tensor = torch.get_device_module(self.torch_device).get_rng_state(self.torch_device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.get_device_module(self.torch_device).set_rng_state(state, self.torch_device)


class CudaDevice(StreamDevice):
    """A CUDA device, with the functions that torch.accelerator lacks."""

    def name(self) -> str | None:
        """The driver's name of the device."""
        return torch.cuda.get_device_name(self.torch_device)

    def new_stream(self, name: str) -> Stream | None:  # noqa: ARG002
        return cast("Stream", torch.cuda.Stream(self.torch_device))

    def current_stream(self) -> Stream | None:
        return cast("Stream", torch.cuda.current_stream(self.torch_device))

    def launching_on(self, stream: Stream) -> AbstractContextManager[object]:
        """Launch on `stream` inside the block, with the device set as well."""
        return torch.cuda.stream(cast("torch.cuda.Stream", stream))

    def record(self, stream: Stream, *, timed: bool = False, again: Event | None = None) -> Event:
        """Record an event whose waits sleep: threads that spin would take the cores from the launching thread."""
        event = cast("torch.cuda.Event | None", again) or torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(cast("torch.cuda.Stream", stream))
        return event

    def pin(self, buffer: torch.Tensor, *, label: str) -> None:
        """Pin with cudaHostRegister at the exact size: torch's pinned allocator rounds up to powers of two.

        Raises OffloadError where the system does not lock so much.
        """
        if buffer.numel():
            begun_s = time.perf_counter()
            populate(buffer, num_threads=len(os.sched_getaffinity(0)))
            with torch.cuda.device(self.torch_device):
                cudart = torch.cuda.cudart()
                status = cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), _PORTABLE)
            if int(status) != 0:
                reason = f"{cudart.cudaGetErrorString(status)}, error {int(status)}"
                self._take_last_error()
                raise OffloadError(_refused(label, buffer.numel(), reason))
            took_s = time.perf_counter() - begun_s
            per_100_gb_s = took_s / buffer.numel() * 100e9
            log.info(
                "%s: pinned %.1f GB in %.1f s, %.0f s per 100 GB",
                label,
                buffer.numel() / 1e9,
                took_s,
                per_100_gb_s,
            )

    def unpin(self, buffer: torch.Tensor) -> None:
        """Unpin with cudaHostUnregister. Raises OffloadError where that fails."""
        if buffer.numel():
            with torch.cuda.device(self.torch_device):
                status = torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
            if int(status) != 0:
                self._take_last_error()
                raise OffloadError(f"cudaHostUnregister failed: error {int(status)}")

    def _take_last_error(self) -> None:
        """Take the error that the runtime keeps for this thread, which the next launch would raise as its own."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device).add_(1)

    def free_bytes(self) -> int | None:
        """The free bytes by the driver's count, and whole segments that torch's allocator keeps unused.

        It gives those back when memory is short: a closed engine's arena is such a segment.
        """
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        stats: dict[str, int] = torch.cuda.memory_stats(self.torch_device)
        kept, *in_use = (stats.get(f"{name}_bytes.all.current", 0) for name in _OF_SEGMENTS)
        return free + kept - sum(in_use)

    def check_not_capturing(self) -> None:
        """Raise StateError in a capture: a replayed graph would use leases that hold other units by then."""
        with torch.cuda.device(self.torch_device):  # the current stream of this device is asked for
            is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing:
            raise StateError(
                "a CUDA graph is being captured: it would replay with leases that hold other weights by then. "
                "Capture nothing that runs an offloaded model (torch.compile: mode 'default', not 'reduce-overhead')"
            )


def _refused(label: str, num_bytes: int, reason: str) -> str:
    """Make the message about memory that the system does not lock."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    return (
        f"{label}: {num_bytes:,} bytes could not be page-locked (cudaHostRegister: {reason}; RLIMIT_MEMLOCK, "
        f"`ulimit -l`, is {shown}). Raise the limit (of a container: --ulimit memlock=-1), keep less in host memory "
        '(offloadzero.placement, offloadzero.budgets.host), or do without: "pin_memory": false in offload_param and '
        "offload_optimizer of zero_optimization, with which copies are slower"
    )


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Whether host code may touch a tensor's bytes, once the work that writes them is complete."""
    return tensor.device.type == "cpu"


def device_of_rank(name: str | None, local_rank: int | None) -> str | None:
    """The device's name for one of several ranks of a machine, where `name` does not say which device it is.

    Without a `local_rank` that is the one that the script has made current: ranks that it has spawned have no launcher.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or name not in (None, there.type):
        return name
    if local_rank is None:
        return f"{there.type}:{torch.accelerator.current_device_index()}"
    return f"{there.type}:{local_rank % torch.accelerator.device_count()}"


def find_device(name: str | None) -> Device:
    """Return the device called "cpu", "cuda", "cuda:N" or as torch.accelerator calls it; None: CUDA if there is one.

    Raises:
        ConfigError: there is no such device.
    """
    chosen = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cpu":
        return CpuDevice()
    there = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if there is not None and there.type == chosen.type else 0
    if (chosen.index or 0) >= count:
        kind = "CUDA" if chosen.type == "cuda" else chosen.type
        raise ConfigError("offloadzero.device", name, f"{kind} devices that torch finds here: {count}")
    index = chosen.index if chosen.index is not None else torch.accelerator.current_device_index()
    found = torch.device(chosen.type, index)
    return CudaDevice(found) if chosen.type == "cuda" else StreamDevice(found)


def make_current(device: torch.device) -> None:
    """Make this the calling thread's device for work that names none; torch's collectives use it, too."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def pci_address(device: torch.device) -> str | None:
    """The address of a CUDA device in /sys; None for other devices, and where torch does not know it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return None
    domain, bus, place = (int(getattr(properties, name)) for name in names)
    return f"{domain:04x}:{bus:02x}:{place:02x}.0"
