"""On which stream each node of an autograd graph runs in backward: the one on which its forward was launched.

[Note: streams of nodes]
With a CUDA device a node knows the stream that was current when it was made, and backward launches its kernels there,
on whichever stream the forward's caller or the caller of `backward()` is by then. Where a gradient goes from a node of
one stream to a node of another, autograd has the second stream wait for the first, and its memory is kept until both
have done with it. A parameter's gradient arrives on the stream of its first use. Here the streams are noted above
autograd, by a mode, and set by hooks around the nodes: a tensor's own hooks come before those, on the stream of the
node before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.simulated.machine import Machine, SimulatedStream
from tests.simulated.memory import DeviceMemory
from tests.simulated.operations import tensors_in

Node = Any  # torch.autograd.graph.Node


class NotedStreams(TorchFunctionMode):
    """Inside, the nodes that the calling thread makes remember its current stream."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._key = _key(machine)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            with torch._C.DisableTorchFunctionSubclass():
                node = tensor.grad_fn
            if node is not None and self._key not in node.metadata:
                node.metadata[self._key] = self._machine.current_stream
        return result


class Graph:
    """What one backward runs."""

    def __init__(
        self, roots: Iterable[torch.Tensor], caller: SimulatedStream, machine: Machine, memory: DeviceMemory
    ) -> None:
        self._machine = machine
        self._memory = memory
        starts = [node for root in roots if (node := _node_of(root)) is not None]
        self._consumers: dict[Node, list[Node]] = {}  # in the forward's sense: those that run before it
        ordered = self._collect(starts)
        self._stream_of: dict[Node, SimulatedStream] = {}
        for node in ordered:
            self._stream_of[node] = self._find_stream(node, caller)
        self.first = {self._stream_of[node] for node in starts}
        self.last = {self._stream_of[node] for node in ordered if not node.next_functions}
        self.streams = set(self._stream_of.values())
        self._handles: list[Any] = []

    def _collect(self, starts: Sequence[Node]) -> list[Node]:
        """All nodes, each behind those that run before it."""
        for node in starts:
            self._consumers[node] = []
        stack = list(starts)
        while stack:
            node = stack.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following not in self._consumers:
                    self._consumers[following] = []
                    stack.append(following)
                self._consumers[following].append(node)
        # A later node of the forward runs earlier; where gradients arrive has the largest number of all.
        return sorted(self._consumers, key=lambda node: (_is_end(node), -node._sequence_nr()))

    def _find_stream(self, node: Node, caller: SimulatedStream) -> SimulatedStream:
        noted: SimulatedStream | None = node.metadata.get(_key(self._machine))
        if not _is_end(node) and noted is not None:
            return noted
        consumers = self._consumers[node]
        if not consumers:
            return caller
        return self._stream_of[min(consumers, key=lambda each: each._sequence_nr())]

    def __enter__(self) -> None:
        if len(self.streams) == 1:
            return
        for node, stream in self._stream_of.items():
            before = {self._stream_of[each] for each in self._consumers[node]}
            self._handles.append(node.register_prehook(self._entering(stream, before)))
            crossing = {self._stream_of[following] for following, _ in node.next_functions if following}
            for following, _ in node.next_functions:  # autograd adds gradients up before the node runs
                crossing.update(self._stream_of[each] for each in self._consumers.get(following, ()))
            if crossing - {stream}:
                self._handles.append(node.register_hook(self._leaving(stream, crossing - {stream})))

    def __exit__(self, *_error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _entering(self, stream: SimulatedStream, before: set[SimulatedStream]) -> Any:
        machine = self._machine

        def enter(_gradients: Any) -> None:
            for other in before - {stream}:
                stream.wait_event(other.record())
            machine.set_stream(stream)

        return enter

    def _leaving(self, stream: SimulatedStream, others: set[SimulatedStream]) -> Any:
        memory = self._memory

        def leave(gradients: Any, _arrived: Any) -> None:
            for other in others:
                stream.wait_event(other.record())  # what it has brought is added to on this one
            for gradient in gradients:
                if gradient is not None and memory.holds(gradient):
                    memory.also_used_on(gradient, others)

        return leave


def _key(machine: Machine) -> str:
    """Of a node's metadata: each of two devices notes its own stream."""
    return f"stream of the simulated device {id(machine)}"


def _node_of(root: Any) -> Node | None:
    if isinstance(root, torch.Tensor):
        return root.grad_fn
    return root.node


def _is_end(node: Node) -> bool:
    return node.name().endswith("AccumulateGrad")
