"""Collectives of several ranks on the simulated device: launched like all else, and done when the device comes to them.

[Note: collectives that run later]
As with NCCL each process group has a stream of its own. A collective runs there behind what the caller's stream has
been given so far, and neither the caller nor its stream waits: the `wait()` of its work makes the stream wait that is
current then. Its memory is kept until that call. Between the processes gloo moves the bytes, on a thread of the group's
that is part of the device: it gets the memory when the stream comes to the collective.

A group is aborted as NCCL does it: the kernels that wait for other ranks end, with anything in their memory, and so do
all that come behind them.

What nobody on this rank waits for another rank may: so a device with collectives goes on by itself where nothing
happens for IDLE_S.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import pytest
import torch

from offloadzero.ranks import channel as channels
from offloadzero.ranks import process_groups
from offloadzero.ranks.channel import Channel
from offloadzero.ranks.process_groups import Ranks
from tests.simulated.machine import Machine, SimulatedEvent
from tests.simulated.memory import DeviceMemory, own_work
from tests.simulated.order import DEVICE_THREAD

ON_DEVICE = (
    "weights",
    "updates",
    "gradients",
    "near_weights",
    "near_gradients",
    "far_gradients",
    "activations",
)
IDLE_S = 0.005

Collective = Callable[..., Any]  # given tensors, the one that is written first; returns the work of gloo


class Device(Protocol):
    """What a simulated device has of this."""

    machine: Machine
    memory: DeviceMemory
    communicators: list[Communicator]


class Work:
    """A collective that was issued."""

    def __init__(self, machine: Machine, over: SimulatedEvent, kept: Sequence[torch.Tensor]) -> None:
        self._machine = machine
        self._over = over
        self._kept = kept

    def wait(self) -> None:
        """Make the calling thread's current stream wait for it."""
        self._machine.current_stream.wait_event(self._over)
        self._kept = ()


class Communicator:
    """The stream of a process group, and the thread on which gloo moves its bytes."""

    def __init__(self, machine: Machine, memory: DeviceMemory, name: str) -> None:
        self.stream = machine.new_stream(name)
        self._machine = machine
        self._memory = memory
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], SimulatedEvent] | None] = queue.SimpleQueue()
        self._outstanding: list[SimulatedEvent] = []  # behind collectives that have not ended
        self._is_aborted = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=DEVICE_THREAD, daemon=True)
        self._thread.start()

    def issue(self, collective: Collective, tensors: Sequence[torch.Tensor]) -> Work:
        """Begin a collective behind what the calling thread's current stream has been given."""
        if not all(map(self._memory.holds, tensors)):
            raise AssertionError(f"a collective of {self.stream!r} over memory that is not the device's")
        self.stream.wait_event(self._machine.current_stream.record())
        self.launch(collective, tensors)
        return Work(self._machine, self.stream.record(), tensors)

    def launch(self, collective: Collective, tensors: Sequence[torch.Tensor]) -> None:
        """Put a collective into the stream, which goes on when gloo has done it."""
        over = SimulatedEvent(self._machine)
        with self._lock:
            self._outstanding.append(over)
        task = partial(collective, *map(self._memory.unowned, tensors))
        self.stream.launch(partial(self._tasks.put, (task, over)))
        self.stream.wait_event(over)
        if self._is_aborted:
            self.abort()

    def abort(self) -> None:
        """Have all collectives end now, the one that runs and those that were launched."""
        with self._lock:
            self._is_aborted = True
            outstanding, self._outstanding = self._outstanding, []
        for over in outstanding:
            self._machine.reach(over)

    def close(self) -> None:
        """End the thread, which may wait in gloo where the group was aborted."""
        self._tasks.put(None)
        if not self._is_aborted:
            self._thread.join()

    def _run(self) -> None:
        with torch.no_grad(), own_work():
            while (item := self._tasks.get()) is not None:
                task, over = item
                try:
                    if not self._is_aborted:
                        task().wait()
                except BaseException as error:
                    if not self._is_aborted:
                        self._machine.fail(error)
                        return
                with self._lock:
                    if over in self._outstanding:
                        self._outstanding.remove(over)
                self._machine.reach(over)
                del item, task, over


class _Here(threading.local):
    communicator: Communicator | None = None  # of the channel in whose collective the calling thread is


def run_on_streams(device: Device, patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, channels of devices run their collectives on streams of `device`."""
    here = _Here()
    communicators: weakref.WeakKeyDictionary[Channel, Communicator] = weakref.WeakKeyDictionary()
    by_group: dict[Any, Communicator] = {}
    make_ranks, run = process_groups.make_ranks, Channel._run

    def make(*given: Any, **more: Any) -> Ranks:
        ranks = make_ranks(*given, **more)
        device.machine.idle_s = IDLE_S
        for name in ON_DEVICE:
            channel: Channel | None = getattr(ranks, name)
            if channel is not None:
                channel._is_on_host = False
                communicators[channel] = Communicator(device.machine, device.memory, name)
                by_group[channel._group] = communicators[channel]
                device.communicators.append(communicators[channel])
        return ranks

    def running(channel: Channel, *given: Any) -> None:
        here.communicator = communicators.get(channel)
        try:
            run(channel, *given)
        finally:
            here.communicator = None

    def on_stream(collective: Collective) -> Collective:
        def begin(*tensors: torch.Tensor, **options: Any) -> Any:
            if here.communicator is None:
                return collective(*tensors, **options)
            return here.communicator.issue(partial(collective, **options), tensors)

        return begin

    destroy = channels.dist.destroy_process_group

    def destroying(group: Any = None) -> None:
        communicator = by_group.pop(group, None)
        if communicator is not None:  # NCCL's waits for what was launched, and may wait for the other ranks
            communicator.stream.synchronize()
            channels.dist.barrier(group)
        destroy(group)

    def abort(group: Any) -> None:
        by_group[group].abort()

    patch.setattr(channels.dist, "destroy_process_group", destroying)
    patch.setattr(channels, "abort_process_group", abort)
    patch.setattr(process_groups, "make_ranks", make)
    patch.setattr(Channel, "_run", running)
    for owner, name in (
        (channels, "_all_gather"),
        (channels, "_reduce_scatter"),
        (channels.dist, "all_to_all_single"),
        (channels.dist, "all_reduce"),
    ):
        patch.setattr(owner, name, on_stream(getattr(owner, name)))
