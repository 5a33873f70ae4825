"""Device memory as a caching allocator gives it: by stream, at once again when it was let go, full of NaN."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable

import numpy as np
import torch

from tests.simulated.machine import Machine, SimulatedEvent, SimulatedStream, WrongDeviceError

_GRANULE = 512


class _Own(threading.local):
    is_inside = False
    results_go_home = False


_own = _Own()


class own_work:  # noqa: N801 (reads as a keyword)
    """Inside, what the calling thread does with tensors is the simulation's own and not dispatched."""

    def __enter__(self) -> None:
        self._before, _own.is_inside = _own.is_inside, True

    def __exit__(self, *_error: object) -> None:
        _own.is_inside = self._before


class results_on_the_host:  # noqa: N801 (reads as a keyword)
    """Inside, results of what the calling thread does with device memory are host memory."""

    def __enter__(self) -> None:
        _own.results_go_home = True

    def __exit__(self, *_error: object) -> None:
        _own.results_go_home = False


def do_results_go_home() -> bool:
    """Whether the calling thread is inside `results_on_the_host`."""
    return _own.results_go_home


def is_own_work() -> bool:
    """Whether the calling thread is inside `own_work`."""
    return _own.is_inside


class no_modes:  # noqa: N801 (reads as a keyword)
    """Inside, operations go to no mode and no subclass: each would cost calls into Python that pass it on."""

    def __enter__(self) -> None:
        self._guards = (torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction())
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *_error: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


class _Block:
    def __init__(self, num_bytes: int, stream: SimulatedStream) -> None:
        self.bytes = np.full(num_bytes + _GRANULE, 0xFF, np.uint8)
        shift = -self.bytes.ctypes.data % _GRANULE
        self.bytes = self.bytes[shift : shift + num_bytes]
        self.start = self.bytes.ctypes.data
        self.end = self.start + num_bytes
        self.stream = stream
        self.also_used_on: set[SimulatedStream] = set()
        self.storage = torch.from_numpy(self.bytes).untyped_storage()


_all: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()


class DeviceMemory:
    """What has an address here is device memory; all else is the host's, or another device's."""

    def __init__(self, machine: Machine) -> None:
        _all.add(self)
        self._machine = machine
        self._lock = threading.Lock()
        self._free: dict[SimulatedStream, list[_Block]] = {}  # the last one is the one that was let go last
        # By finalizers, which may run anywhere; with what must be reached before another gets it.
        self._given_back: deque[tuple[_Block, list[SimulatedEvent]]] = deque()
        # Starts and blocks, by start; none ever leaves. Replaced as a whole, so that who looks needs no lock.
        self._known: tuple[list[int], list[_Block]] = ([], [])
        self.taken_bytes = 0
        self.peak_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Uint8, shape (num_bytes,), NaN in every floating-point dtype: of the calling thread's current stream.

        When the last tensor over it is gone the next one that fits in, on the same stream, gets it at once: that is
        right for what the stream itself does, and for nothing else.
        """
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        size = -(-num_bytes // _GRANULE) * _GRANULE
        stream = self._machine.current_stream
        with own_work(), self._lock:
            self._collect()
            block = self._last_free(stream, size)
            is_new = block is None
            if block is None:
                block = _Block(size, stream)
                starts, blocks = self._known
                index = bisect_right(starts, block.start)
                self._known = (
                    [*starts[:index], block.start, *starts[index:]],
                    [*blocks[:index], block, *blocks[index:]],
                )
            self.taken_bytes += block.bytes.nbytes
            self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        if not is_new:
            content = block.bytes
            self._machine.launch(stream, lambda: content.fill(0xFF))
            self._machine.counts["launches"] -= 1  # no real device does this
        owned = block.bytes[:num_bytes]
        weakref.finalize(owned, self._give_back, block)
        with own_work():
            return torch.from_numpy(owned)

    def _give_back(self, block: _Block) -> None:
        others, block.also_used_on = block.also_used_on, set()
        self._given_back.append((block, [stream.record() for stream in others]))

    def also_used_on(self, tensor: torch.Tensor, streams: Collection[SimulatedStream]) -> None:
        """Nobody gets a tensor's memory before these streams have done what they have been given by then."""
        block = self._block(tensor)
        if block is None:
            raise AssertionError("not device memory")
        block.also_used_on.update(set(streams) - {block.stream})

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes are device memory."""
        return self._block(tensor) is not None

    def expect_no_other(self, tensors: Iterable[torch.Tensor]) -> None:
        """WrongDeviceError if one of them is on another device."""
        others = [memory for memory in _all if memory is not self]
        if others and any(memory.holds(tensor) for tensor in tensors for memory in others):
            raise WrongDeviceError("memory of two devices in one operation")

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes of device memory for a kernel: a launch keeps no memory from being given to another."""
        found = self.unowned_or_none(tensor)
        if found is None:
            raise AssertionError("not device memory")
        return found

    def unowned_or_none(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """`unowned`, or None if it is no device memory."""
        block = self._block(tensor)
        if block is None:
            return None
        offset = (tensor.data_ptr() - block.start) // tensor.itemsize if tensor.numel() else 0
        with no_modes():
            over = torch.empty(0, dtype=tensor.dtype)
            return over.set_(block.storage, offset, tensor.shape, tensor.stride())  # type: ignore[call-overload,no-any-return]

    def _block(self, tensor: torch.Tensor) -> _Block | None:
        address = tensor.untyped_storage().data_ptr()
        if not address:
            return None
        starts, blocks = self._known
        index = bisect_right(starts, address) - 1
        block = blocks[index] if index >= 0 else None
        return block if block is not None and address < block.end else None

    def _collect(self) -> None:
        for _ in range(len(self._given_back)):
            block, events = self._given_back.popleft()
            if not all(event.is_reached for event in events):
                self._given_back.append((block, events))
                continue
            self.taken_bytes -= block.bytes.nbytes
            self._free.setdefault(block.stream, []).append(block)

    def _last_free(self, stream: SimulatedStream, size: int) -> _Block | None:
        free = self._free.get(stream, [])
        index = next((i for i in reversed(range(len(free))) if free[i].bytes.nbytes >= size), None)
        return None if index is None else free.pop(index)
