"""The happens-before checker around a test, on the CPU's lanes, on the simulated device, or on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offloadzero.memory import lanes
from tests.simulated.clock_reads import reads_clock, watch_clock_reads
from tests.simulated.collectives import Communicator
from tests.simulated.cuda_edges import add_cuda_edges
from tests.simulated.device import SimulatedDevice
from tests.simulated.dispatch import Dispatch
from tests.simulated.edges import Recording, add_host_edges, record_operation, touched
from tests.simulated.machine import Machine, SimulatedEvent, SimulatedStream
from tests.simulated.memory import DeviceMemory
from tests.simulated.operations import name_of, tensors_in
from tests.simulated.order import Agent, Holder, Order


@contextmanager
def checked() -> Iterator[Order]:
    """Inside, accesses that nothing orders are collected; at the end they are an error.

    To be entered before `simulated`.
    """
    order = Order()
    with pytest.MonkeyPatch.context() as patch:
        add_host_edges(order, patch)
        watch_clock_reads(patch)
        _device_edges(order, patch)
        _device_accesses(order, patch)
        _collective_accesses(order, patch)
        if torch.cuda.is_available():
            add_cuda_edges(order, patch)
        try:
            with Recording(order):
                yield order
        except Exception as error:
            order.check(cause=error)
            raise
    order.check()


def _agent_of(order: Order, stream: SimulatedStream) -> Agent:
    agent: Agent | None = getattr(stream, "agent", None)
    if agent is None:
        agent = order.agent(f"stream {stream.name}")
        stream.agent = agent  # type: ignore[attr-defined]
    return agent


def _launching(order: Order, stream: SimulatedStream) -> Agent:
    """The stream, after what the calling thread has done."""
    with order.lock:
        agent = _agent_of(order, stream)
        agent.acquire(order.release())
        return agent


def _device_edges(order: Order, patch: pytest.MonkeyPatch) -> None:
    launch, record, wait_event = Machine.launch, Machine.record, Machine.order
    wait, look = Machine.wait, Machine.look

    def launching(machine: Machine, stream: SimulatedStream, task: Any) -> None:
        _launching(order, stream)
        launch(machine, stream, task)

    def recording(machine: Machine, stream: SimulatedStream) -> SimulatedEvent:
        event = record(machine, stream)
        with order.lock:
            event.clock = _launching(order, stream).release()
        return event

    def ordering(machine: Machine, stream: SimulatedStream, event: SimulatedEvent) -> None:
        wait_event(machine, stream, event)
        with order.lock:
            _launching(order, stream).acquire(event.clock)

    def waiting(machine: Machine, event: SimulatedEvent) -> None:
        wait(machine, event)
        order.acquire(event.clock)

    def looking(machine: Machine, event: SimulatedEvent) -> bool:
        is_reached = look(machine, event)
        if is_reached and not reads_clock():
            order.acquire(event.clock)
        return is_reached

    for name, method in (
        ("launch", launching),
        ("record", recording),
        ("order", ordering),
        ("wait", waiting),
        ("look", looking),
    ):
        patch.setattr(Machine, name, method)


def _device_accesses(order: Order, patch: pytest.MonkeyPatch) -> None:
    take, give_back, also_used_on = DeviceMemory.take, DeviceMemory._give_back, DeviceMemory.also_used_on
    copy, new_pinned = SimulatedDevice.copy, SimulatedDevice.new_pinned
    on_device, on_host = Dispatch._on_device, Dispatch._on_host

    def giving_back(memory: DeviceMemory, block: Any) -> None:
        order.free(block.start, block.bytes.nbytes, _agent_of(order, block.stream))
        give_back(memory, block)

    def also_using(memory: DeviceMemory, tensor: torch.Tensor, streams: Any) -> None:
        also_used_on(memory, tensor, streams)
        for stream in streams:
            holder = Holder()
            holder.begin(_agent_of(order, stream))
            order.hold(holder, tensor.untyped_storage().data_ptr())

    def taking(memory: DeviceMemory, num_bytes: int) -> torch.Tensor:
        taken = take(memory, num_bytes)
        block = memory._block(taken)
        if block is not None:
            size = block.bytes.nbytes
            if not order.tracks(block.start):
                order.track(block.start, size, "device memory")
            agent = _launching(order, memory._machine.current_stream)
            order.access(agent, block.start, size, writes=True, label="allocated")
        return taken

    def copying(device: SimulatedDevice, target: torch.Tensor, source: torch.Tensor) -> None:
        agent = _launching(order, device.machine.current_stream)
        label = f"copy of {lanes._here.label}"
        order.access_tensor(agent, source, writes=False, label=label)
        order.access_tensor(agent, target, writes=True, label=label)
        copy(device, target, source)

    def pinned(device: SimulatedDevice, dtype: torch.dtype) -> torch.Tensor:
        scalar = new_pinned(device, dtype)
        order.track_storage(scalar, "a pinned scalar")
        return scalar

    def kernel(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        agent = _launching(order, mode._machine.current_stream)
        for tensor, writes in touched(func, args, kwargs):  # those in host memory are copied now
            by = agent if mode._memory.holds(tensor) else order.here()
            order.access_tensor(by, tensor, writes=writes, label=name_of(func))
        result = on_device(mode, func, args, kwargs)
        known = set(map(id, tensors_in((args, kwargs))))
        for tensor in tensors_in(result):
            if id(tensor) not in known:
                order.access_tensor(agent, tensor, writes=True, label=name_of(func))
        return result

    def at_once(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        result = on_host(mode, func, args, kwargs)
        record_operation(order, order.here(), func, args, kwargs)
        return result

    patch.setattr(DeviceMemory, "_give_back", giving_back)
    patch.setattr(DeviceMemory, "also_used_on", also_using)
    patch.setattr(DeviceMemory, "take", taking)
    patch.setattr(SimulatedDevice, "copy", copying)
    patch.setattr(SimulatedDevice, "new_pinned", pinned)
    patch.setattr(Dispatch, "_on_device", kernel)
    patch.setattr(Dispatch, "_on_host", at_once)


def _collective_accesses(order: Order, patch: pytest.MonkeyPatch) -> None:
    """By the stream of the group: what is written first among the tensors, and what is read."""
    launch = Communicator.launch

    def launching(communicator: Communicator, collective: Any, tensors: Any) -> None:
        agent = _launching(order, communicator.stream)
        label = f"{collective.func.__name__} of {lanes._here.label}"
        written, *read = tensors
        for tensor in read:
            order.access_tensor(agent, tensor, writes=False, label=label)
        for tensor in _without(written, read):
            order.access_tensor(agent, tensor, writes=True, label=label)
        launch(communicator, collective, tensors)

    patch.setattr(Communicator, "launch", launching)


def _without(whole: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a collective in place writes: a gather leaves this rank's own part as it is."""
    for part in parts:
        start = part.data_ptr() - whole.data_ptr()
        if 0 <= start < start + part.nbytes <= whole.nbytes:
            written = whole.view(-1).view(torch.uint8)
            return [written[:start], written[start + part.nbytes :]]
    return [whole]
