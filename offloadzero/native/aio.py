"""Asynchronous file input and output: one engine, any number of files, tickets (floor 2).

An operation moves one contiguous buffer to or from a range of a file. The engine cuts it into blocks of
`block_size` and keeps up to `queue_depth` blocks, of any operations and files, in the kernel at once:

    engine = AioEngine(queue_depth=32)
    file = engine.open("states.bin", create=True)
    ticket = engine.write(file, tensor, offset=0, label="layers.0")
    ticket.wait()

Operations start in the order of (priority, submission), the lowest priority number first, and may finish in
any order: wait for a write before reading what it wrote. Offsets, sizes and buffer addresses are free. Only
transfers whose offset and size are multiples of `AioFile.alignment` travel without a copy; the others pass
through an aligned bounce buffer, and writes of part of an alignment unit read and rewrite that unit. Such
writes to one unit are serialised within an engine, not between engines or processes.
"""

from __future__ import annotations

import atexit
import errno as errno_codes
import itertools
import logging
import os
import weakref
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from offloadzero.errors import AioError, ConfigError, StateError

logger = logging.getLogger("offloadzero.aio")

MIN_BLOCK_SIZE = 4096
MAX_BLOCK_SIZE = 1 << 30
MAX_QUEUE_DEPTH = 4096
MAX_NUM_THREADS = 64


class AioBackend(str, Enum):
    """What moves the blocks."""

    AUTO = "auto"
    """The first of io_uring, native_aio, aiofiles that this machine allows; logged once with the reason."""
    IO_URING = "io_uring"
    """Linux io_uring (kernel 5.6 or later); many container runtimes forbid it."""
    NATIVE_AIO = "native_aio"
    """Linux native AIO, the kernel interface under libaio. Asynchronous on direct files only: on a buffered
    file the engine's thread does the transfers one after the other."""
    AIOFILES = "aiofiles"
    """The `aiofiles` package on Python threads: portable, buffered, one transfer per file at a time."""


class DirectMode(str, Enum):
    """Whether a file bypasses the page cache (O_DIRECT)."""

    OFF = "off"
    """Never."""
    ON = "on"
    """Always; a filesystem without it is a ConfigError."""
    AUTO = "auto"
    """Where the filesystem has it; `AioFile.direct_reason` says why not."""


class FaultKind(str, Enum):
    """What `AioEngine.inject` does to a block."""

    ERRNO = "errno"
    """It fails with errno `value` before any transfer (EINTR and EAGAIN are retried, as real ones are)."""
    SHORT = "short"
    """Its first transfer reports `value` bytes at most."""
    DELAY = "delay"
    """Its completion is seen `value` milliseconds late; other blocks go on."""


class _FileCore(Protocol):
    """An open file of one backend. The methods raise OSError."""

    @property
    def direct_reason(self) -> str: ...
    @property
    def alignment(self) -> int: ...
    def num_bytes(self) -> int: ...
    def preallocate(self, num_bytes: int) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class _OperationCore(Protocol):
    """A submitted operation of one backend; wait() gives (errno or 0, file offset of the error), or None."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> tuple[int, int] | None: ...


class _EngineCore(Protocol):
    """What a backend provides. `token` names the operation in collect_finished()."""

    def open(self, path: str, *, create: bool, readonly: bool, direct: str) -> _FileCore: ...
    def submit(
        self,
        file: Any,
        *,
        is_write: bool,
        address: int,
        num_bytes: int,
        offset: int,
        priority: int,
        token: int,
    ) -> _OperationCore: ...
    def collect_finished(self) -> list[int]: ...
    def inject(self, kind: str, nth: int, value: int) -> None: ...
    def clear_faults(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self, *, cancel: bool) -> None: ...


# --- Choosing a backend ---


class _BackendRefused(Exception):  # noqa: N818 (a signal inside this file)
    """The machine does not allow a backend; the text says why."""


def _errno_name(code: int) -> str:
    return errno_codes.errorcode.get(code, str(code))


class _Choice(NamedTuple):
    core: _EngineCore
    backend: AioBackend
    reason: str


_AUTO_ORDER = (AioBackend.IO_URING, AioBackend.NATIVE_AIO, AioBackend.AIOFILES)
_is_choice_logged = False


def _make_core(backend: AioBackend, *, block_size: int, queue_depth: int, num_threads: int) -> _EngineCore:
    if backend is not AioBackend.AIOFILES:
        return _make_kernel_core(
            backend, block_size=block_size, queue_depth=queue_depth, num_threads=num_threads
        )
    try:
        from offloadzero.native.aiofiles_backend import AiofilesEngine
    except ImportError as error:
        raise _BackendRefused(f"aiofiles: {error}") from error
    return AiofilesEngine(block_size=block_size, queue_depth=queue_depth)


def _make_kernel_core(backend: AioBackend, **options: int) -> _EngineCore:
    try:
        from offloadzero.native.aio_kernel import KernelEngine
    except ImportError as error:
        raise _BackendRefused(f"{backend.value}: {error}") from error
    try:
        return KernelEngine(backend.value, **options)
    except OSError as error:
        raise _BackendRefused(f"{backend.value}: {_errno_name(error.errno or 0)}") from error


def _choose(asked: AioBackend, **options: int) -> _Choice:
    if asked is not AioBackend.AUTO:
        try:
            return _Choice(_make_core(asked, **options), asked, "asked for")
        except _BackendRefused as refusal:
            raise ConfigError("backend", asked.value, f"not available here ({refusal})") from refusal
    refusals: list[str] = []
    for backend in _AUTO_ORDER:
        try:
            core = _make_core(backend, **options)
        except _BackendRefused as refusal:
            refusals.append(str(refusal))
            continue
        choice = _Choice(core, backend, "; ".join(refusals) or "the kernel allows it")
        _log_choice(choice, is_fallback=bool(refusals))
        return choice
    raise ConfigError("backend", asked.value, f"none is available here ({'; '.join(refusals)})")


def _log_choice(choice: _Choice, *, is_fallback: bool) -> None:
    global _is_choice_logged
    if _is_choice_logged:
        return
    _is_choice_logged = True
    level = logging.WARNING if is_fallback else logging.INFO
    logger.log(level, "aio backend: %s (%s)", choice.backend.value, choice.reason)


# --- Buffers ---


class _Memory(NamedTuple):
    """Where a buffer lies, and the object that keeps it there."""

    address: int
    num_bytes: int
    owner: object


def _memory_of(buffer: Any, *, must_be_writable: bool) -> _Memory:
    if hasattr(buffer, "data_ptr"):
        return _memory_of_tensor(buffer)
    import numpy as np

    if hasattr(buffer, "__array_interface__"):
        array = buffer
        if not array.flags.c_contiguous:
            raise ConfigError("buffer", f"array with strides {array.strides}", "must be contiguous")
    else:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ConfigError("buffer", f"memoryview with strides {view.strides}", "must be contiguous")
        if view.nbytes == 0:
            return _Memory(0, 0, view)
        array = np.frombuffer(view.cast("B"), dtype=np.uint8)
    if must_be_writable and not array.flags.writeable:
        raise ConfigError("buffer", type(buffer).__name__, "must be writable to be read into")
    return _Memory(array.__array_interface__["data"][0], array.nbytes, array)


def _memory_of_tensor(tensor: Any) -> _Memory:
    device = getattr(tensor, "device", None)
    if device is not None and device.type != "cpu":
        raise ConfigError("buffer", f"tensor on {device}", "must be in host memory (cpu)")
    if not tensor.is_contiguous():
        raise ConfigError("buffer", f"tensor with strides {tuple(tensor.stride())}", "must be contiguous")
    return _Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


# --- The public face ---


class AioFile:
    """An open file of one engine; made by `AioEngine.open`."""

    path: str
    direct: bool
    """Whether transfers bypass the page cache."""
    direct_reason: str
    """Why, or why not: "O_DIRECT", "O_DIRECT: EINVAL", "asked for", ..."""
    alignment: int
    """Bytes. Transfers whose offset and size are multiples of it need no copy; 1 when not direct."""

    def __init__(self, core: _FileCore, path: str, engine: AioEngine) -> None:
        self._core = core
        self._engine = engine
        self._is_open = True
        self.path = path
        self.alignment = core.alignment
        self.direct = core.alignment > 1
        self.direct_reason = core.direct_reason

    @property
    def num_bytes(self) -> int:
        """The size of the file now. Raises AioError."""
        core = self._open_core()
        try:
            return core.num_bytes()
        except OSError as error:
            raise self._error(error, "fstat", 0) from error

    def preallocate(self, num_bytes: int) -> None:
        """Reserves space so that the file has at least `num_bytes`; its bytes stay as they are.

        Raises AioError: ENOSPC when the filesystem has no room, and the file is then as before.
        """
        if num_bytes < 0:
            raise ConfigError("num_bytes", num_bytes, "must not be negative")
        core = self._open_core()
        try:
            core.preallocate(num_bytes)
        except OSError as error:
            raise self._error(error, "preallocate", num_bytes) from error

    def sync(self) -> None:
        """Blocks until what finished writes have written is on stable storage. Raises AioError."""
        core = self._open_core()
        try:
            core.sync()
        except OSError as error:
            raise self._error(error, "fdatasync", 0) from error

    def close(self) -> None:
        """No further operations; the descriptor closes with the last one in flight. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._core.close()

    def __enter__(self) -> AioFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_core(self) -> _FileCore:
        if not self._is_open:
            raise StateError(f"{self.path}: the file is closed")
        return self._core

    def _error(self, error: OSError, operation: str, num_bytes: int) -> AioError:
        return AioError(
            operation=operation,
            path=self.path,
            offset=0,
            num_bytes=num_bytes,
            errno=error.errno or errno_codes.EIO,
        )


class AioTicket:
    """One read or write in flight; made by `AioEngine.read` and `AioEngine.write`."""

    __slots__ = ("_core", "_engine", "_outcome", "label", "num_bytes", "offset", "operation", "path")

    def __init__(
        self,
        core: _OperationCore,
        engine: AioEngine,
        *,
        operation: str,
        path: str,
        offset: int,
        num_bytes: int,
        label: str,
    ) -> None:
        self._core = core
        # Keeps the engine, and through it the buffer, while the operation runs.
        self._engine: AioEngine | None = engine
        self._outcome: tuple[int, int] | None = None
        self.operation = operation
        self.path = path
        self.offset = offset
        self.num_bytes = num_bytes
        self.label = label

    def done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self._outcome is not None or self._core.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the operation is complete. May be called again, with the same result.

        Raises AioError (label, operation, path, offset and num_bytes of the operation, errno) when it failed,
        TimeoutError when it is not complete within `timeout_s` seconds, StateError in a forked child.
        """
        outcome = self._outcome
        if outcome is None:
            outcome = self._await_outcome(timeout_s)
        error, error_offset = outcome
        if error:
            raise self._error(error, error_offset)

    def _await_outcome(self, timeout_s: float | None) -> tuple[int, int]:
        engine = self._engine
        if engine is not None:
            engine._check_process()
        outcome = self._core.wait(-1.0 if timeout_s is None else max(timeout_s, 0.0))
        if outcome is None:
            raise TimeoutError(f"{self.operation} {self.path}+{self.offset:#x}: not done after {timeout_s} s")
        self._outcome = outcome
        self._engine = None
        if engine is not None:
            engine._release_finished()
        return outcome

    def _error(self, error: int, error_offset: int) -> AioError:
        if error == errno_codes.ENODATA:
            detail = f"end of file at {error_offset:#x}"
        elif error == errno_codes.ECANCELED:
            detail = "the engine was closed"
        else:
            detail = f"at {error_offset:#x}" if error_offset != self.offset else ""
        return AioError(
            operation=self.operation,
            path=self.path,
            offset=self.offset,
            num_bytes=self.num_bytes,
            errno=error,
            label=self.label,
            detail=detail,
        )


class AioEngine:
    """One queue over all its operations and files.

    Args:
        backend: an AioBackend value. One asked for by name never falls back.
        block_size: bytes; operations are cut into blocks of this size. A multiple of 4096.
        queue_depth: blocks in the kernel at once, over all threads.
        num_threads: threads that serve the queue, each with its own kernel queue and an equal share of
            `queue_depth`. One is enough for aligned direct transfers; more help where the thread itself
            copies (bounced blocks, buffered files under native_aio). aiofiles ignores it.

    Raises ConfigError: a value out of range, or a backend that is not available, with the reason.
    An engine belongs to the process that made it; in a forked child its methods raise StateError.
    """

    backend: AioBackend
    """The one in use, never AUTO."""
    reason: str
    """Why that one: "asked for", "the kernel allows it", or what the better ones were refused with."""

    def __init__(
        self,
        *,
        backend: str = "auto",
        block_size: int = 1 << 20,
        queue_depth: int = 32,
        num_threads: int = 1,
    ) -> None:
        self._is_closed = True  # until there is something to close
        self._pid = os.getpid()
        asked = _parse(AioBackend, "backend", backend)
        if block_size % MIN_BLOCK_SIZE or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
            raise ConfigError("block_size", block_size, f"allowed: multiples of 4096 up to {MAX_BLOCK_SIZE}")
        if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
            raise ConfigError("queue_depth", queue_depth, f"allowed: 1 to {MAX_QUEUE_DEPTH}")
        if not 1 <= num_threads <= MAX_NUM_THREADS:
            raise ConfigError("num_threads", num_threads, f"allowed: 1 to {MAX_NUM_THREADS}")
        choice = _choose(asked, block_size=block_size, queue_depth=queue_depth, num_threads=num_threads)
        self._core, self.backend, self.reason = choice
        self.block_size = block_size
        self.queue_depth = queue_depth
        self.num_threads = num_threads
        # What the kernel may still touch, by token: outlives a dropped ticket.
        self._held: dict[int, object] = {}
        self._tokens = itertools.count(1)
        self._is_closed = False
        _live_engines.add(self)

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        readonly: bool = False,
        direct: str = "auto",
    ) -> AioFile:
        """Opens a file for reading and, unless `readonly`, writing.

        create: make it, with mode 0600, if it is missing; an existing one keeps its bytes.
        direct: a DirectMode value.
        Raises AioError when the file cannot be opened, ConfigError when direct="on" and the filesystem or the
        backend has no direct I/O.
        """
        self._check_usable()
        mode = _parse(DirectMode, "direct", direct)
        name = os.fspath(path)
        if create and readonly:
            raise ConfigError("create", create, "not together with readonly")
        try:
            core = self._core.open(name, create=create, readonly=readonly, direct=mode.value)
        except OSError as error:
            code = error.errno or errno_codes.EIO
            if mode is DirectMode.ON and code in (errno_codes.EINVAL, errno_codes.EOPNOTSUPP):
                refusal = f"{name} has no direct I/O here ({self.backend.value}: {_errno_name(code)})"
                raise ConfigError("direct", direct, refusal) from error
            raise AioError(operation="open", path=name, offset=0, num_bytes=0, errno=code) from error
        return AioFile(core, name, self)

    def read(
        self, file: AioFile, buffer: Any, *, offset: int, priority: int = 0, label: str = ""
    ) -> AioTicket:
        """Fills `buffer` from the file's bytes at `offset`; the buffer belongs to the engine until wait().

        buffer: a contiguous CPU tensor, numpy array, or writable object with the buffer protocol.
        priority: lower runs first. label: the tensor's name, for errors.
        A read past the end of the file fails with ENODATA. Raises ConfigError, StateError.
        """
        return self._submit(False, file, buffer, offset, priority, label)

    def write(
        self, file: AioFile, buffer: Any, *, offset: int, priority: int = 0, label: str = ""
    ) -> AioTicket:
        """Writes `buffer` to the file at `offset`, growing the file if need be; otherwise as read().

        A finished write has been accepted by the file; `AioFile.sync` makes it survive a power failure.
        Writes in flight together must not overlap.
        """
        return self._submit(True, file, buffer, offset, priority, label)

    def stats(self) -> dict[str, int]:
        """Totals since the engine was made.

        bytes_read, bytes_written: of operations that succeeded. operations: that ended. blocks: begun.
        retries: transfers repeated or continued (short, EINTR, EAGAIN). bounced: blocks that were copied.
        """
        self._check_process()
        return self._core.stats()

    def inject(self, kind: str, nth: int, value: int) -> None:
        """For tests: a FaultKind that hits the nth block to begin from now (1: the next), once."""
        self._check_usable()
        fault = _parse(FaultKind, "kind", kind)
        if nth < 1:
            raise ConfigError("nth", nth, "must be at least 1")
        if value < 0:
            raise ConfigError("value", value, "must not be negative")
        self._core.inject(fault.value, nth, value)

    def clear_faults(self) -> None:
        """Forgets injected faults that have hit no block yet."""
        self._check_usable()
        self._core.clear_faults()

    def close(self, *, cancel: bool = False) -> None:
        """Finishes every operation submitted, ends the threads. Idempotent; does nothing in a forked child.

        cancel: blocks that have not started are dropped instead, and their operations fail with ECANCELED.
        The interpreter's exit closes engines that are still open in this way.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._core.close(cancel=cancel)
        self._release_finished()

    def __enter__(self) -> AioEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Before the dictionary of held buffers goes: the kernel may be writing to them.
        self.close()

    def _submit(
        self, is_write: bool, file: AioFile, buffer: Any, offset: int, priority: int, label: str
    ) -> AioTicket:
        self._check_usable()
        if file._engine is not self:
            raise ConfigError("file", file.path, "must have been opened by this engine")
        core_file = file._open_core()
        memory = _memory_of(buffer, must_be_writable=not is_write)
        if offset < 0 or offset + memory.num_bytes >= 1 << 63:
            raise ConfigError("offset", offset, "must not be negative or end past 2**63")
        token = next(self._tokens)
        # Held before the kernel hears of it.
        self._held[token] = memory.owner
        self._release_finished()
        try:
            core = self._core.submit(
                core_file,
                is_write=is_write,
                address=memory.address,
                num_bytes=memory.num_bytes,
                offset=offset,
                priority=priority,
                token=token,
            )
        except OSError as error:
            del self._held[token]
            raise StateError(f"the engine takes no more operations: {error}") from error
        return AioTicket(
            core,
            self,
            operation="pwrite" if is_write else "pread",
            path=file.path,
            offset=offset,
            num_bytes=memory.num_bytes,
            label=label,
        )

    def _release_finished(self) -> None:
        for token in self._core.collect_finished():
            self._held.pop(token, None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"this AioEngine belongs to process {self._pid}; a forked child has to make its own"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self._is_closed:
            raise StateError("the AioEngine is closed")


_live_engines: weakref.WeakSet[AioEngine] = weakref.WeakSet()


def _parse(enum: Any, key: str, value: str) -> Any:
    try:
        return enum(value)
    except ValueError:
        names = [member.value for member in enum]
        raise ConfigError(key, value, f"allowed: {', '.join(names)}") from None


@atexit.register
def _close_live_engines() -> None:
    for engine in list(_live_engines):
        engine.close(cancel=True)
