"""Backward where a device's autograd runs it: on a thread of its own, on the streams of the forward.

[Note: autograd's thread]
With the CPU as the device the thread that calls `backward()` runs the graph. With a CUDA device it sleeps in the call,
and a thread of autograd's, one per device and for the life of the process, runs the nodes and the hooks: everything
that is local to a thread is another one's there, but for what autograd carries over (dispatch modes, autocast). A
backward inside a backward (reentrant checkpointing) stays on that thread. Each node computes on the stream of its
forward, [Note: streams of nodes], whichever is current where `backward()` is called: the graph runs behind what was
launched there, and the caller's stream goes on behind the graph; so do the callbacks at its end, which autograd's
thread calls. A graph that fails is let go of by that thread when it comes to it, and the caller may have its error
before.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from offloadzero import Engine
from offloadzero.step import coordinator
from tests.simulated.graph_streams import Graph
from tests.simulated.machine import AUTOGRAD_THREAD, Machine, SimulatedStream
from tests.simulated.memory import DeviceMemory

LETS_GO_AFTER_S = 0.005

Run = Callable[[], Any]


class Backward(enum.Enum):
    """Who runs it, and where it is called."""

    CALLER = "the caller"
    THREAD = "autograd's thread"
    OTHER_STREAM = "autograd's thread, called on another stream"


class _Job:
    """A call that another thread makes."""

    def __init__(self, call: Run) -> None:
        self.call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error


class AutogradThread:
    """That of one device: [Note: autograd's thread]."""

    def __init__(
        self, machine: Machine, memory: DeviceMemory, modes: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """`modes` are those that autograd carries over."""
        self._machine = machine
        self._memory = memory
        self._modes = modes
        self._callbacks: list[Run] = []  # of the graph that runs
        self._end: Callable[[Run], None] | None = None  # calls a callback at the end of the graph that runs
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=AUTOGRAD_THREAD, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._modes():
            while (job := self._jobs.get()) is not None:
                job.run()
                has_failed = job.error is not None
                if not has_failed:
                    self._callbacks.clear()
                job.is_over.put(None)
                del job  # or it would keep the last graph
                if has_failed:
                    time.sleep(LETS_GO_AFTER_S)
                    self._callbacks.clear()

    def holds(self, root: Any) -> bool:
        """Whether a root of a graph is on this device."""
        return isinstance(root, torch.Tensor) and self._memory.holds(root)

    def backward(self, roots: Sequence[torch.Tensor], call: Run) -> Any:
        """What `call` gives, which runs the graph of `roots`."""
        if threading.current_thread() is self._thread:
            return call()
        caller = self._machine.current_stream
        carried = _carried_over()

        def on_thread() -> Any:
            graph = Graph(roots, caller, self._machine, self._memory)
            for stream in graph.first:
                _join(stream, caller)
            self._end = partial(self._at_end, caller, graph.last)
            try:
                with self._machine.launching_on(next(iter(graph.first))), carried(), graph:
                    return call()
            finally:
                self._end = None
                for stream in graph.last:
                    _join(caller, stream)

        job = _Job(on_thread)
        self._jobs.put(job)
        job.is_over.get()
        if job.error is not None:
            error, job.error = job.error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return job.result

    def _at_end(self, caller: SimulatedStream, last: Collection[SimulatedStream], callback: Run) -> None:
        for stream in last:
            _join(caller, stream)
        with self._machine.launching_on(caller):
            callback()

    def queue_callback(self, queue_callback: Callable[[Run], None], callback: Run) -> None:
        """What hooks queue for the end of the graph runs on the caller's stream."""
        end = self._end
        if end is None or threading.current_thread() is not self._thread:
            queue_callback(callback)
            return
        self._callbacks.append(callback)
        queue_callback(partial(end, callback))

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()


def _join(stream: SimulatedStream, other: SimulatedStream) -> None:
    if stream is not other:
        stream.wait_event(other.record())


def _carried_over() -> Callable[[], Any]:
    """A context with what autograd takes of the calling thread to its own."""
    grad, autocast, dtype = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )

    @contextmanager
    def carried() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            if autocast:
                stack.enter_context(torch.autocast("cpu", dtype=dtype))
            yield

    return carried


def run_backward_on(thread: AutogradThread, patch: pytest.MonkeyPatch) -> None:
    """Graphs of its device are run there until `patch` is undone."""
    run_backward, queue_callback = (
        torch.autograd.graph._engine_run_backward,
        coordinator.queue_backward_callback,
    )

    def elsewhere(roots: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(run_backward, roots, *args, **kwargs)
        return thread.backward(roots, call) if any(map(thread.holds, roots)) else call()

    patch.setattr(torch.autograd.graph, "_engine_run_backward", elsewhere)
    patch.setattr(torch.autograd, "_engine_run_backward", elsewhere)
    patch.setattr(coordinator, "queue_backward_callback", partial(thread.queue_callback, queue_callback))


def call_on_another_stream(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Engines' backward and step are called on a stream that is not the forward's, ordered as a script would."""
    other = machine.new_stream("of backward and step")

    def moved(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
            here = machine.current_stream
            _join(other, here)
            try:
                with machine.launching_on(other):
                    return method(engine, *args, **kwargs)
            finally:
                _join(here, other)

        return call

    for name in ("backward", "step"):
        patch.setattr(Engine, name, moved(getattr(Engine, name)))
