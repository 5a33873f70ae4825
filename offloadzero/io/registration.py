"""Memory that is registered with an engine's kernel queues: pinned once instead of at every transfer.

[Note: registered in parts]
io_uring counts what it has registered against RLIMIT_MEMLOCK (8 MiB for ordinary users), once for each thread of the
engine, and takes it whole or not at all. So memory that need not be registered whole goes in parts: where a part is
refused for want of memory its half is tried, down to MIN_PART_BYTES. A block that lies in two parts travels like one
that lies in none: the kernel pins its pages for that one transfer.
"""

from __future__ import annotations

import errno as errno_codes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from offloadzero.errors import ConfigError
from offloadzero.io.backends import AioBackend, EngineCore, errno_name


class Memory(NamedTuple):
    """The place of a buffer in memory, and the object that keeps it there."""

    address: int
    num_bytes: int
    owner: object


def memory_of(buffer: Any, *, must_be_writable: bool) -> Memory:
    """Return the memory of a contiguous CPU tensor, numpy array or buffer. Raises ConfigError."""
    if hasattr(buffer, "data_ptr"):
        return _memory_of_tensor(buffer)
    import numpy as np

    if hasattr(buffer, "__array_interface__"):
        array = buffer
        if not array.flags.c_contiguous:
            raise ConfigError("buffer", f"array with strides {array.strides}", "must be contiguous")
    else:
        try:
            view = memoryview(buffer)
        except TypeError:
            raise ConfigError(
                "buffer", type(buffer).__name__, "must be a tensor, an array or a buffer"
            ) from None
        if not view.c_contiguous:
            raise ConfigError("buffer", f"memoryview with strides {view.strides}", "must be contiguous")
        if view.nbytes == 0:
            return Memory(0, 0, view)
        array = np.frombuffer(view.cast("B"), dtype=np.uint8)
    if must_be_writable and not array.flags.writeable:
        raise ConfigError("buffer", type(buffer).__name__, "must be writable to be read into")
    return Memory(array.__array_interface__["data"][0], array.nbytes, array)


def _memory_of_tensor(tensor: Any) -> Memory:
    device = getattr(tensor, "device", None)
    if device is not None and device.type != "cpu":
        raise ConfigError("buffer", f"tensor on {device}", "must be in host memory (cpu)")
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        raise ConfigError("buffer", f"tensor with layout {tensor.layout}", "must be dense")
    if not tensor.is_contiguous():
        raise ConfigError("buffer", f"tensor with strides {tuple(tensor.stride())}", "must be contiguous")
    return Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


MAX_PART_BYTES = 1 << 30  # the most that the kernel takes as one part
MIN_PART_BYTES = 2 << 20  # a huge page, which the kernel counts whole


class _Entry(NamedTuple):
    memory: Memory
    parts: list[int]  # their addresses, without those that the kernel has refused


class Registration:
    """The memory that one engine has registered. Any thread may call."""

    def __init__(self, core: EngineCore, backend: AioBackend) -> None:
        self.reason = "none registered"
        self._core = core
        self._backend = backend
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}  # by address

    def add(self, memory: Memory) -> int:
        """Register as many bytes of the memory as the kernel takes: [Note: registered in parts].

        Raises ValueError: the memory overlaps a registered one.
        """
        parts: list[int] = []
        done, size, refusal = 0, MAX_PART_BYTES, ""
        with self._adding(memory):
            self._entries[memory.address] = _Entry(memory, parts)
            while done < memory.num_bytes and size:
                size = min(size, memory.num_bytes - done)
                error = self._register(memory.address + done, size)
                if not error:
                    parts.append(memory.address + done)
                    done += size
                    continue
                refusal = refusal or self.reason
                may_halve = error == errno_codes.ENOMEM and size > MIN_PART_BYTES
                size = max(size // 2 // MIN_PART_BYTES, 1) * MIN_PART_BYTES if may_halve else 0
            if not parts:
                del self._entries[memory.address]
            self.reason = refusal or self.reason
        return done

    def remove(self, memory: Memory) -> bool:
        """Remove the memory at an address; False where none is registered there."""
        with self._lock:
            entry = self._entries.get(memory.address)
            if entry is None:
                return False
            for address in entry.parts:
                self._core.unregister_buffer(address)
            del self._entries[memory.address]
        return True

    def clear(self) -> None:
        """Forget all memory: the engine is closed, and has unregistered it."""
        with self._lock:
            self._entries.clear()

    @contextmanager
    def _adding(self, memory: Memory) -> Iterator[None]:
        with self._lock:
            end = memory.address + memory.num_bytes
            for other in self._entries.values():
                begin = other.memory.address
                if memory.address < begin + other.memory.num_bytes and begin < end:
                    raise ValueError("must not overlap one that is registered")
            yield

    def _register(self, address: int, num_bytes: int) -> int:
        """Register one part; return 0, or the errno of the refusal, which `reason` names."""
        try:
            self._core.register_buffer(address, num_bytes)
        except OSError as error:
            code = error.errno or errno_codes.EIO
            self.reason = self._refusal(code)
            return code
        self.reason = "registered"
        return 0

    def _refusal(self, code: int) -> str:
        if code == errno_codes.EOPNOTSUPP:
            return f"{self._backend.value} has none"
        limit = ""
        if code == errno_codes.ENOMEM:
            import resource

            limit = f" (RLIMIT_MEMLOCK is {resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]} bytes)"
        return f"{self._backend.value}: {errno_name(code)}{limit}"
