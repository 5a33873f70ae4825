"""The simulated device behind the interface of offloadzero.memory.device.

[Note: host code]
Its memory has addresses of the host's, and is the CPU's to torch. A kernel of csrc/ or a file transfer that is given
some of it would work here, and end the process on CUDA. So what these ask a tensor before they take its address is
answered for the device: it is no memory of the host's.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from offloadzero.engine import runtime
from offloadzero.errors import ConfigError, StateError
from offloadzero.io import registration
from offloadzero.memory import device as devices
from offloadzero.memory.tickets import Failures
from offloadzero.native import kernels
from offloadzero.planning import engine_plan
from offloadzero.update.spec import UpdateForm
from tests.simulated.backward import AutogradThread, Backward, call_on_another_stream, run_backward_on
from tests.simulated.collectives import Communicator, run_on_streams
from tests.simulated.dispatch import Dispatch
from tests.simulated.graph_streams import NotedStreams
from tests.simulated.machine import Machine, SimulatedEvent
from tests.simulated.memory import DeviceMemory, is_own_work, no_modes, results_on_the_host
from tests.simulated.order import DEVICE_THREAD
from tests.simulated.placing import make_there

MEMORY_BYTES = 4 << 30


class DeviceEvent:
    """An event as a driver has them: of what was recorded last, for those too who have kept it from before."""

    def __init__(self, point: SimulatedEvent, *, is_timed: bool) -> None:
        self.point = point
        self.is_timed = is_timed

    def query(self) -> bool:
        return self.point.query()

    def synchronize(self) -> None:
        self.point.synchronize()


class SimulatedDevice:
    """Its tensors are the CPU's to torch; what is done with them runs later."""

    def __init__(self, seed: int = 0, *, slow: Collection[str] = (), num_streams: int | None = None) -> None:
        """Make the device. `num_streams`: of the pool that gives them, as torch has one; None: each is a new one."""
        self.torch_device = torch.device("cpu")
        self.machine = Machine(seed, slow=slow)
        self._pool = (
            None if num_streams is None else [self.machine.new_stream(f"{i}") for i in range(num_streams)]
        )
        self._taken = itertools.count()
        self.memory = DeviceMemory(self.machine)
        self.pinned: dict[int, int] = {}
        self.communicators: list[Communicator] = []
        self.is_capturing = False

    def name(self) -> str | None:
        return "simulated"

    def new_stream(self, name: str) -> Any:
        if self._pool is None:
            return self.machine.new_stream(name)
        return self._pool[next(self._taken) % len(self._pool)]

    def current_stream(self) -> Any:
        return self.machine.current_stream

    @contextmanager
    def launching_on(self, stream: Any) -> Iterator[None]:
        with self.machine.launching_on(stream), self.dispatching():
            yield

    def dispatching(self) -> AbstractContextManager[Any]:
        """Inside, what the calling thread does with device memory is launched."""
        return Dispatch(self.machine, self.memory)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Those under which a thread launches what a script does."""
        with self.dispatching(), NotedStreams(self.machine):
            yield

    def record(self, stream: Any, *, timed: bool = False, again: Any = None) -> Any:
        point = self.machine.own(stream).record()
        if again is None:
            return DeviceEvent(point, is_timed=timed)
        if again.is_timed != timed:
            raise AssertionError("an event with times and one without are not made alike")
        again.point = point
        return again

    def elapsed_s(self, first: Any, last: Any) -> float:
        if not (first.is_timed and last.is_timed):
            raise AssertionError("the time of an event that was made without")
        if not (first.point.is_reached and last.point.is_reached):
            raise AssertionError("the time of an event that was not reached")
        return float(last.point.at_s - first.point.at_s)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self.memory.take(num_bytes)

    def pin(self, buffer: torch.Tensor, *, label: str) -> None:
        del label
        self.pinned[buffer.data_ptr()] = buffer.nbytes

    def unpin(self, buffer: torch.Tensor) -> None:
        del self.pinned[buffer.data_ptr()]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """In two halves, between which other streams run: a transfer takes its time."""
        self.memory.expect_no_other((target, source))
        with no_modes():
            target, source = (
                (self.memory.unowned(t) if self.memory.holds(t) else t.detach()).view(-1).view(torch.uint8)
                for t in (target, source)
            )
            half = target.numel() // 2
            parts = [(target[part], source[part]) for part in (slice(half), slice(half, None))]
        self.machine.counts["copies"] += 1
        for to, origin in parts:
            self.machine.current_stream.launch(partial(kernels.copy, to, origin))

    def new_pinned(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((), dtype=dtype)

    def synchronize(self) -> None:
        self.machine.synchronize()

    def free_bytes(self) -> int | None:
        return MEMORY_BYTES

    def check_not_capturing(self) -> None:
        if self.is_capturing:
            raise StateError("a graph is being captured")

    def close(self) -> None:
        self.machine.close()
        for communicator in self.communicators:
            communicator.close()


@contextmanager
def simulated(
    patch: pytest.MonkeyPatch,
    seed: int = 0,
    *,
    slow: Collection[str] = (),
    backward: Backward = Backward.CALLER,
    name: str | None = None,
    num_streams: int | None = None,
) -> Iterator[SimulatedDevice]:
    """Engines made inside run on a simulated device; so does what the calling thread does with its memory.

    `name`: only those whose configuration asks for it; further devices may be simulated inside.
    """
    device = SimulatedDevice(seed, slow=slow, num_streams=num_streams)
    with patch.context() as inside, ExitStack() as threads:
        _install(device, inside, name)
        if backward is not Backward.CALLER:
            thread = AutogradThread(device.machine, device.memory, device.modes)
            threads.callback(thread.close)
            run_backward_on(thread, inside)
            threads.enter_context(NotedStreams(device.machine))
        if backward is Backward.OTHER_STREAM:
            call_on_another_stream(device.machine, inside)
        with device.dispatching():
            yield device
    device.close()


def _install(device: SimulatedDevice, patch: pytest.MonkeyPatch, name: str | None) -> None:
    is_host_memory, begin_thread = devices.is_host_memory, Failures.in_background
    find_other = runtime.find_device

    def find(wanted: str | None) -> Any:
        return device if name is None or wanted == name else find_other(wanted)

    def in_background(failures: Failures) -> None:
        begin_thread(failures)
        device.dispatching().__enter__()  # for the thread's life

    patch.setattr(runtime, "find_device", find)
    patch.setattr(engine_plan, "device_form", lambda *_: UpdateForm.TORCH)
    patch.setattr(
        devices, "is_host_memory", lambda tensor: is_host_memory(tensor) and not device.memory.holds(tensor)
    )
    patch.setattr(Failures, "in_background", in_background)
    run_on_streams(device, patch)
    # Of a tensor on the CPU it reads the memory without a dispatch.
    patch.setattr(torch.Tensor, "tolist", _reading(device, torch.Tensor.tolist))
    _keep_the_host_out(device, patch)
    for method in ("to", "cpu"):  # it is there, to torch
        patch.setattr(torch.Tensor, method, _moving(device, getattr(torch.Tensor, method)))
    moved = Dispatch(device.machine, device.memory).moved
    make_there(device.torch_device, patch, holds=device.memory.holds, move=moved)


def _reading(device: SimulatedDevice, method: Any) -> Any:
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if device.memory.holds(tensor):
            device.machine.current_stream.synchronize()
        return method(tensor, *args, **kwargs)

    return read


def _keep_the_host_out(device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
    """Host code that is given device memory refuses it, as it would any other device's: [Note: host code]."""
    is_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
    to_numpy, memory_of = torch.Tensor.numpy, registration._memory_of_tensor

    def is_of_device(tensor: torch.Tensor) -> bool:
        is_kernel = is_own_work() or threading.current_thread().name == DEVICE_THREAD
        return not is_kernel and device.memory.holds(tensor)

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        if not is_of_device(tensor):
            return to_numpy(tensor, force=force)
        if not force:
            raise TypeError(
                "can't convert a tensor of the simulated device to numpy: copy it with Tensor.cpu()"
            )
        return to_numpy(tensor.cpu(), force=True)

    def memory(tensor: torch.Tensor) -> Any:
        if is_of_device(tensor):
            raise ConfigError("buffer", "tensor on the simulated device", "must be in host memory (cpu)")
        return memory_of(tensor)

    patch.setattr(
        torch.Tensor, "is_cpu", property(lambda tensor: bool(is_cpu(tensor)) and not is_of_device(tensor))
    )
    patch.setattr(torch.Tensor, "numpy", numpy)
    patch.setattr(registration, "_memory_of_tensor", memory)


def _moving(device: SimulatedDevice, method: Any) -> Any:
    """`to("cpu")` and `cpu()`: a device is named by an object, the host by its name."""

    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = method(tensor, *args, **kwargs)
        to = kwargs.get("device", args[0] if args else None)
        if to is device.torch_device and type(result) is torch.Tensor and not device.memory.holds(result):
            return Dispatch(device.machine, device.memory).moved(result)
        goes_home = method.__name__ == "cpu" or (isinstance(to, str) and to == "cpu")
        if not goes_home or type(result) is not torch.Tensor or not device.memory.holds(result):
            return result
        with results_on_the_host():
            return result.clone()

    return move
