"""Asynchronous file input and output: one engine, any number of files, tickets.

An operation moves one contiguous buffer to or from a range of a file. The engine cuts it into blocks of
`block_size` and keeps up to `queue_depth` blocks, of any operations and files, in the kernel at once:

    engine = AioEngine(queue_depth=32)
    file = engine.open("states.bin", create=True)
    ticket = engine.write(file, tensor, offset=0, label="layers.0")
    ticket.wait()

Operations start in the order of (priority, submission), the lowest priority number first (under aiofiles in that of
submission), and may finish in any order: wait for a write before reading what it wrote. Offsets, sizes and buffer
addresses are free. Only transfers whose offset and size are multiples of `AioFile.alignment` travel without a copy; the
others pass through an aligned bounce buffer, and writes of part of a granule (`alignment` bytes) read and rewrite it.
Such writes to one granule are serialised within an engine, not between engines or processes.

Buffers that are used over and over, arenas above all, are worth registering: under io_uring the kernel then
pins their pages once (`register_parts`).
"""

from __future__ import annotations

import atexit
import errno as errno_codes
import itertools
import logging
import os
import weakref
from types import TracebackType
from typing import Any, NamedTuple

from offloadzero.config import AioConfig
from offloadzero.core.constants import GRID_BYTES, MAX_IO_BLOCK_BYTES, MAX_IO_DEPTH, MAX_IO_THREADS
from offloadzero.errors import AioError, AioTimeoutError, ConfigError, StateError
from offloadzero.io.backends import (
    AioBackend,
    EngineCore,
    EngineOptions,
    FaultKind,
    FileCore,
    OperationCore,
    errno_name,
)
from offloadzero.io.registration import Registration, memory_of

logger = logging.getLogger("offloadzero.aio")

__all__ = [
    "AioBackend",
    "AioEngine",
    "AioFile",
    "AioTicket",
    "FaultKind",
]


class AioFile:
    """An open file of one engine; made by `AioEngine.open`."""

    path: str
    direct: bool
    """Whether transfers bypass the page cache."""
    direct_reason: str
    """The reason: "O_DIRECT", "O_DIRECT: EINVAL", "asked for", ..."""
    alignment: int
    """Transfers whose offset and size are multiples of this many bytes need no copy; 1 when not direct."""

    def __init__(self, core: FileCore, path: str, engine: AioEngine, *, direct_reason: str) -> None:
        self._core = core
        self._engine = engine
        self._is_open = True
        self.path = path
        self.alignment = core.alignment
        self.direct = core.alignment > 1
        self.direct_reason = direct_reason

    @property
    def num_bytes(self) -> int:
        """Return the size of the file now. Raises AioError, and StateError if the file is closed."""
        core = self._open_core()
        try:
            return core.num_bytes()
        except OSError as error:
            raise self._error(error, "fstat", 0) from error

    def preallocate(self, num_bytes: int, *, start: int = 0) -> None:
        """Reserve space so that the file has at least `num_bytes`; its bytes stay as they are.

        start: bytes before it are not reserved. From there on nothing may be reserved yet, unless `start` is 0.

        Raises AioError: ENOSPC when the filesystem has no room, and the file is then as before. ConfigError: a negative
        size, or a start outside of it. StateError: the file is closed.
        """
        if num_bytes < 0:
            raise ConfigError("num_bytes", num_bytes, "must not be negative")
        if not 0 <= start < max(num_bytes, 1):
            raise ConfigError("start", start, f"from 0 to less than num_bytes = {num_bytes}")
        core = self._open_core()
        try:
            core.preallocate(start, num_bytes)
        except OSError as error:
            raise self._error(error, "preallocate", num_bytes) from error

    def sync(self) -> None:
        """Block until finished writes are on stable storage. Raises AioError, and StateError if the file is closed."""
        core = self._open_core()
        try:
            core.sync()
        except OSError as error:
            raise self._error(error, "fdatasync", 0) from error

    def close(self) -> None:
        """Allow no further operations; the descriptor closes with the last one in flight. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._core.close()

    def __enter__(self) -> AioFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_core(self) -> FileCore:
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

    __slots__ = (
        "_core",
        "_engine",
        "_outcome",
        "_transfer_timeout_s",
        "label",
        "num_bytes",
        "offset",
        "operation",
        "path",
    )

    def __init__(
        self,
        core: OperationCore,
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
        self._transfer_timeout_s = engine.transfer_timeout_s
        self.operation = operation
        self.path = path
        self.offset = offset
        self.num_bytes = num_bytes
        self.label = label

    def done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        if self._outcome is not None:
            return True
        if self._engine is not None:
            self._engine._check_process()
        return self._core.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the operation is complete. May be called again, with the same result.

        Raises AioError (label, operation, path, offset and num_bytes of the operation, errno) when it failed,
        AioTimeoutError when it took longer than the engine allows, TimeoutError when it is not complete within
        `timeout_s` seconds, StateError in a forked child.
        """
        outcome = self._outcome
        if outcome is None:
            outcome = self._await_outcome(timeout_s)
        error, error_offset = outcome
        if error:
            raise self._error(error, error_offset)

    def times(self) -> tuple[float, float] | None:
        """Return when its first block was taken up and its last finished, on time.monotonic(); None before the end."""
        return self._core.times()

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
        is_timeout = error == errno_codes.ETIMEDOUT and self._transfer_timeout_s is not None
        if error == errno_codes.ENODATA:
            detail = f"end of file at {error_offset:#x}"
        elif error == errno_codes.ECANCELED:
            detail = "the engine was closed"
        elif is_timeout:
            detail = f"not complete after {self._transfer_timeout_s:g} s (transfer_timeout_s)"
        else:
            detail = f"at {error_offset:#x}" if error_offset != self.offset else ""
        kind = AioTimeoutError if is_timeout else AioError
        return kind(
            operation=self.operation,
            path=self.path,
            offset=self.offset,
            num_bytes=self.num_bytes,
            errno=error,
            label=self.label,
            detail=detail,
        )


class AioEngine:
    """One queue over all its operations and files; by default with the configuration's defaults.

    Args:
        backend: an AioBackend value. One asked for by name never falls back.
        block_size: bytes, a multiple of 4096; long operations are cut into blocks of about this size,
            fitted to the requests of the disk: [Note: whole requests] in csrc/aio/device_limits.h.
        queue_depth: blocks in the kernel at once, over all threads.
        num_threads: threads that serve the queue, each with its own kernel queue and an equal share of
            `queue_depth`, at most 4096. One is enough for aligned direct transfers; more help where the
            thread itself copies (bounced blocks, buffered files under native_aio). aiofiles ignores it.
        transfer_timeout_s: an operation that is not complete so long after it was submitted counts as failed
            (AioTimeoutError), and what of it has not started by then never does. None: no limit.

    Raises ConfigError: a value out of range, or a backend that is not available, with the reason.
    An engine belongs to the process that made it; in a forked child its methods raise StateError.
    """

    backend: AioBackend
    """The backend in use, never AUTO."""
    reason: str
    """The reason for it: "asked for", "the kernel allows it", or the refusals of the better ones."""

    def __init__(
        self,
        *,
        backend: str = AioConfig.backend,
        block_size: int = AioConfig.block_size,
        queue_depth: int = AioConfig.queue_depth,
        num_threads: int = AioConfig.num_threads,
        transfer_timeout_s: float | None = AioConfig.transfer_timeout_s,
    ) -> None:
        self._is_closed = True  # until there is something to close
        self._pid = os.getpid()
        asked = _parse(AioBackend, "backend", backend)
        if block_size % GRID_BYTES or not GRID_BYTES <= block_size <= MAX_IO_BLOCK_BYTES:
            raise ConfigError(
                "block_size", block_size, f"allowed: multiples of {GRID_BYTES} up to {MAX_IO_BLOCK_BYTES}"
            )
        if not 1 <= num_threads <= MAX_IO_THREADS:
            raise ConfigError("num_threads", num_threads, f"allowed: 1 to {MAX_IO_THREADS}")
        if not 1 <= queue_depth <= MAX_IO_DEPTH * num_threads:
            allowed = f"allowed: 1 to {MAX_IO_DEPTH * num_threads}, {MAX_IO_DEPTH} for each thread"
            raise ConfigError("queue_depth", queue_depth, allowed)
        if transfer_timeout_s is not None and transfer_timeout_s <= 0:
            raise ConfigError("transfer_timeout_s", transfer_timeout_s, "must be positive")
        self.transfer_timeout_s = transfer_timeout_s
        limit_s = -1.0 if transfer_timeout_s is None else transfer_timeout_s
        options = EngineOptions(block_size, queue_depth, num_threads, limit_s)
        self._core, self.backend, self.reason = choose_backend(asked, options)
        self._registration = Registration(self._core, self.backend)
        self.block_size = block_size
        self.queue_depth = queue_depth
        self.num_threads = num_threads
        # Memory that the kernel may still touch, by token: it outlives a dropped ticket.
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
        direct: bool = True,
        name: str | None = None,
    ) -> AioFile:
        """Open a file for reading and, unless `readonly`, writing.

        create: make the file, with mode 0600, if it is missing; an existing one keeps its bytes.
        direct: past the page cache (O_DIRECT) where filesystem and backend can; `AioFile.direct_reason` says why not.
        name: the file's name in errors, where the path does not tell.
        Raises AioError when the file cannot be opened, ConfigError for `create` together with `readonly`, StateError.
        """
        self._check_usable()
        plain = os.fspath(path)
        name = plain if name is None else name
        if create and readonly:
            raise ConfigError("create", create, "not together with readonly")
        try:
            core = self._core.open(os.fsencode(plain), create, readonly, direct)
        except OSError as error:
            code = error.errno or errno_codes.EIO
            raise AioError(operation="open", path=name, offset=0, num_bytes=0, errno=code) from error
        return AioFile(core, name, self, direct_reason=self._direct_reason(direct, core.direct_refusal))

    def _direct_reason(self, direct: bool, refusal: int) -> str:
        if self.backend is AioBackend.AIOFILES:
            return "aiofiles: buffered only"
        if not direct:
            return "asked for"
        return f"O_DIRECT: {errno_name(refusal)}" if refusal else "O_DIRECT"

    def register_parts(self, buffer: Any) -> int:
        """Let the kernel pin the buffer's pages now, once, instead of at every transfer to or from it.

        buffer: as in read(), writable; any part of it may then be transferred. It stays pinned, and referenced,
        until unregister_buffer() or close(). Each of `num_threads` counts it against RLIMIT_MEMLOCK. Where the kernel
        does not take all of it, a part is pinned: the number of its bytes is returned, `buffers_reason` has the reason,
        and transfers of the rest pin their pages as they go.

        Raises ConfigError (it overlaps a registered one), StateError.
        """
        self._check_usable()
        memory = memory_of(buffer, must_be_writable=True)
        try:
            return self._registration.add(memory) if memory.num_bytes else 0
        except ValueError as error:
            raise ConfigError("buffer", type(buffer).__name__, str(error)) from None

    @property
    def buffers_reason(self) -> str:
        """The fate of the last buffer: "none registered", "registered", or the reason why all or a part of it is not:
        "io_uring: ENOMEM (RLIMIT_MEMLOCK is 65536 bytes)", "native_aio has none".
        """
        return self._registration.reason

    def unregister_buffer(self, buffer: Any) -> None:
        """Unpin the pinned part of a buffer, after the transfers in flight.

        Raises ConfigError (it is not registered), StateError.
        """
        self._check_usable()
        memory = memory_of(buffer, must_be_writable=True)
        if memory.num_bytes and not self._registration.remove(memory):
            raise ConfigError("buffer", type(buffer).__name__, "must be registered")

    def read(
        self,
        file: AioFile,
        buffer: Any,
        *,
        offset: int,
        priority: int = 0,
        label: str = "",
    ) -> AioTicket:
        """Fill `buffer` from the file's bytes at `offset`; the buffer belongs to the engine until wait().

        buffer: a contiguous CPU tensor, numpy array, or writable object with the buffer protocol.
        priority: lower runs first. label: the tensor's name, for errors.
        A read past the end of the file fails with ENODATA. Raises ConfigError, StateError.
        """
        return self._submit(False, file, buffer, offset, priority, label)

    def write(
        self,
        file: AioFile,
        buffer: Any,
        *,
        offset: int,
        priority: int = 0,
        label: str = "",
    ) -> AioTicket:
        """Write `buffer` to the file at `offset`, growing the file if need be; otherwise as read().

        A finished write has been accepted by the file; `AioFile.sync` makes it survive a power failure.
        Writes in flight together must not overlap. Raises ConfigError, StateError.
        """
        return self._submit(True, file, buffer, offset, priority, label)

    def stats(self) -> dict[str, int]:
        """Return totals since the engine was made.

        bytes_read, bytes_written: of operations that succeeded. operations: ended ones. blocks: begun ones.
        retries: transfers repeated or continued (short, EINTR, EAGAIN). bounced: blocks that were copied.
        fixed: transfers to or from registered buffers. registered_bytes: bytes of those buffers now.
        Raises StateError in a forked child.
        """
        self._check_process()
        return self._core.stats()

    def inject(self, kind: str, nth: int, value: int) -> None:
        """Inject a fault, for tests: a FaultKind that hits the nth block to begin from now (1: the next), once.

        Raises ConfigError for another kind, a block before the next one, and a negative value; StateError.
        """
        self._check_usable()
        fault = _parse(FaultKind, "kind", kind)
        if nth < 1:
            raise ConfigError("nth", nth, "must be at least 1")
        if value < 0:
            raise ConfigError("value", value, "must not be negative")
        self._core.inject(list(FaultKind).index(fault), nth, value)

    def clear_faults(self) -> None:
        """Forget injected faults that have hit no block yet. Raises StateError."""
        self._check_usable()
        self._core.clear_faults()

    def close(self, *, cancel: bool = False) -> None:
        """Finish every operation submitted and end the threads. Idempotent; does nothing in a forked child.

        cancel: blocks that have not started are dropped instead, and their operations fail with ECANCELED.
        The interpreter's exit closes engines that are still open in this way.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._core.close(cancel)
        self._release_finished()
        self._registration.clear()

    def __enter__(self) -> AioEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Closed before the dictionary of held buffers is dropped: the kernel may be writing to them.
        self.close()

    def _submit(
        self,
        is_write: bool,
        file: AioFile,
        buffer: Any,
        offset: int,
        priority: int,
        label: str,
    ) -> AioTicket:
        self._check_usable()
        if file._engine is not self:
            raise ConfigError("file", file.path, "must have been opened by this engine")
        core_file = file._open_core()
        memory = memory_of(buffer, must_be_writable=not is_write)
        if offset < 0 or offset + memory.num_bytes >= 1 << 63:
            raise ConfigError("offset", offset, "must not be negative or end past 2**63")
        token = next(self._tokens)
        # Held before the kernel knows of the buffer.
        self._held[token] = memory.owner
        self._release_finished()
        try:
            core = self._core.submit(
                core_file, is_write, memory.address, memory.num_bytes, offset, priority, token
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


# --- the choice of a backend ---


class _BackendRefused(Exception):  # noqa: N818 (a signal inside this file)
    """The machine does not allow a backend; the text says why."""


class Choice(NamedTuple):
    """An engine core, its backend, and the reason for that choice."""

    core: EngineCore
    backend: AioBackend
    reason: str


_AUTO_ORDER = (AioBackend.IO_URING, AioBackend.NATIVE_AIO, AioBackend.AIOFILES)
_is_choice_logged = False


def _make_core(backend: AioBackend, options: EngineOptions) -> EngineCore:
    try:
        if backend is AioBackend.AIOFILES:
            from offloadzero.io.aiofiles_backend import AiofilesEngine

            return AiofilesEngine(options)
        from offloadzero.io._aio import Engine

        return Engine(
            backend is AioBackend.IO_URING,
            options.block_size,
            options.queue_depth,
            options.num_threads,
            options.transfer_timeout_s,
        )
    except ImportError as error:
        raise _BackendRefused(f"{backend.value}: {error}") from error
    except OSError as error:
        raise _BackendRefused(f"{backend.value}: {errno_name(error.errno or 0)}") from error


def choose_backend(asked: AioBackend, options: EngineOptions) -> Choice:
    """Return the backend asked for, or under AUTO the first that works, logged once per process.

    Raises ConfigError: that backend, or under AUTO each of them, is not available here.
    """
    if asked is not AioBackend.AUTO:
        try:
            return Choice(_make_core(asked, options), asked, "asked for")
        except _BackendRefused as refusal:
            raise ConfigError("backend", asked.value, f"not available here ({refusal})") from refusal
    refusals: list[str] = []
    for backend in _AUTO_ORDER:
        try:
            core = _make_core(backend, options)
        except _BackendRefused as refusal:
            refusals.append(str(refusal))
            continue
        choice = Choice(core, backend, "; ".join(refusals) or "the kernel allows it")
        _log_choice(choice, is_fallback=bool(refusals))
        return choice
    raise ConfigError("backend", asked.value, f"none is available here ({'; '.join(refusals)})")


def _log_choice(choice: Choice, *, is_fallback: bool) -> None:
    global _is_choice_logged
    if _is_choice_logged:
        return
    _is_choice_logged = True
    level = logging.WARNING if is_fallback else logging.INFO
    logger.log(level, "aio backend: %s (%s)", choice.backend.value, choice.reason)
