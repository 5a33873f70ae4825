"""The checker's edges and accesses on a CUDA device: torch's own streams and events, recorded as they are used.

What the caching allocator does is not seen, nor the events by which autograd joins the streams of a graph: memory is
watched where the engine has allocated it, and scripts are to compute on one stream.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from offloadzero.memory.device import StreamDevice
from tests.simulated.clock_reads import reads_clock
from tests.simulated.edges import Recording, touched
from tests.simulated.order import Agent, Order


def add_cuda_edges(order: Order, patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    agents: dict[int, Agent] = {}  # by the driver's handle of a stream
    event_kind, stream_kind = torch.cuda.Event, torch.cuda.Stream
    record_event, query, wait = event_kind.record, event_kind.query, event_kind.synchronize
    wait_event, wait_stream_idle = stream_kind.wait_event, stream_kind.synchronize
    wait_idle, allocate, record = torch.cuda.synchronize, StreamDevice.allocate, Recording.record

    def agent_of(stream: Any) -> Agent:
        """The stream, after what the calling thread has done."""
        with order.lock:
            handle = stream.cuda_stream
            agent = agents.get(handle) or order.agent(f"stream {handle:#x}")
            agents[handle] = agent
            agent.acquire(order.release())
            return agent

    def recording(event: Any, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        record_event(event, stream)
        event.clock = agent_of(stream).release()

    def looking(event: Any) -> bool:
        is_reached: bool = query(event)
        if is_reached and not reads_clock():
            order.acquire(getattr(event, "clock", None))
        return is_reached

    def waiting(event: Any) -> None:
        wait(event)
        order.acquire(getattr(event, "clock", None))

    def ordering(stream: Any, event: Any) -> None:
        wait_event(stream, event)
        agent_of(stream).acquire(getattr(event, "clock", None))

    def waiting_for_stream(stream: Any) -> None:
        wait_stream_idle(stream)
        order.acquire(agent_of(stream).release())

    def waiting_for_all(device: Any = None) -> None:
        wait_idle(device)
        for agent in list(agents.values()):
            order.acquire(agent.release())

    def allocating(device: StreamDevice, num_bytes: int) -> torch.Tensor:
        memory = allocate(device, num_bytes)
        start, agent = memory.data_ptr(), agent_of(torch.cuda.current_stream())
        order.track(start, num_bytes, "device memory")
        weakref.finalize(memory.untyped_storage(), order.free, start, num_bytes, agent)
        return memory

    def recorded(mode: Recording, func: Any, args: Any, kwargs: Any) -> None:
        given = list(touched(func, args, kwargs))
        if all(tensor.device.type == "cpu" for tensor, _ in given):
            record(mode, func, args, kwargs)
            return
        agent = agent_of(torch.cuda.current_stream())
        for tensor, writes in given:
            order.access_tensor(agent, tensor, writes=writes, label=str(func))
        is_mixed = len({tensor.device.type for tensor, _ in given}) > 1
        if torch.Tag.data_dependent_output in func.tags or (
            is_mixed and not _is_asynchronous(func, args, kwargs)
        ):
            order.acquire(agent.release())  # the call returns when it has run

    for kind, name, method in (
        (event_kind, "record", recording),
        (event_kind, "query", looking),
        (event_kind, "synchronize", waiting),
        (stream_kind, "wait_event", ordering),
        (stream_kind, "synchronize", waiting_for_stream),
        (torch.cuda, "synchronize", waiting_for_all),
        (torch.accelerator, "synchronize", waiting_for_all),
        (StreamDevice, "allocate", allocating),
        (Recording, "record", recorded),
    ):
        patch.setattr(kind, name, method)


def _is_asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.ops.aten.copy_.default:
        return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return bool(kwargs.get("non_blocking"))
