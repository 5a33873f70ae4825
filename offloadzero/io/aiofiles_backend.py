"""The portable backend of AioEngine: the `aiofiles` package on a private event loop.

The loop runs in a daemon thread; blocking calls run in a small thread pool. An operation is one coroutine, which moves
its blocks one after the other; operations begin in the order of their submission, whatever their priority. Files are
buffered, and each has one descriptor with one position: transfers of one file take turns, those of different files
overlap. Loaded only when this backend is chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import io
import os
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiofiles

from offloadzero.core.constants import MAX_AIOFILES_THREADS
from offloadzero.core.thread_pool import CallerRunsThreadPool
from offloadzero.io.backends import EngineOptions, FaultKind

_MAX_STALLS = 16
_STAT_NAMES = (
    "bytes_read",
    "bytes_written",
    "operations",
    "blocks",
    "retries",
    "bounced",
    "fixed",
    "registered_bytes",
)


@dataclass(frozen=True)
class _Fault:
    """The sum of the injected faults that hit one block."""

    error: int = 0
    short_bytes: int | None = None
    delay_s: float = 0.0


class _Faults:
    """Faults that wait for their block; they are counted in the loop's thread, and injected from any."""

    def __init__(self) -> None:
        self._armed: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def inject(self, kind: str, nth: int, value: int) -> None:
        with self._lock:
            self._armed.append((kind, nth, value))

    def clear(self) -> None:
        with self._lock:
            self._armed.clear()

    def next_block(self) -> _Fault:
        with self._lock:
            hits = {kind: value for kind, nth, value in self._armed if nth == 1}
            self._armed = [(kind, nth - 1, value) for kind, nth, value in self._armed if nth > 1]
        return _Fault(hits.get("errno", 0), hits.get("short"), hits.get("delay", 0) / 1000)


class AiofilesFile:
    """One file: a buffered descriptor and the lock of its position."""

    alignment = 1
    direct_refusal = errno.EOPNOTSUPP

    def __init__(self, handle: Any, engine: AiofilesEngine) -> None:
        self._engine = engine
        self.handle = handle
        self.position_lock = asyncio.Lock()
        # In the loop's thread: the descriptor closes when the owner has closed it and no operation is left.
        self.num_users = 1

    def num_bytes(self) -> int:
        return os.fstat(self.handle.fileno()).st_size

    def preallocate(self, start: int, num_bytes: int, /) -> None:
        if num_bytes == start:
            return
        descriptor = self.handle.fileno()
        old_num_bytes = self.num_bytes()
        space = os.fstatvfs(descriptor)
        if num_bytes - (start or os.fstat(descriptor).st_blocks * 512) > space.f_bfree * space.f_frsize:
            # Refused here: some filesystems would first fill the disk and then fail.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(descriptor, start, num_bytes - start)
        except OSError:
            if self.num_bytes() > old_num_bytes:
                os.ftruncate(descriptor, old_num_bytes)
            raise

    def sync(self) -> None:
        os.fdatasync(self.handle.fileno())

    def close(self) -> None:
        self._engine.release_file(self)


@dataclass(eq=False)
class AiofilesOperation:
    """One operation. The loop's thread runs it; any thread may ask for its state, or find that it is late."""

    file: AiofilesFile
    is_write: bool
    view: memoryview
    offset: int
    deadline: float | None  # on time.monotonic()
    token: int
    error: tuple[int, int] = (0, 0)
    begun_s: float = 0.0
    ended_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `error`
    finished: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        with self.lock:
            if not self.finished.is_set() and self._is_late():
                self.error = (errno.ETIMEDOUT, self.offset)
                self.finished.set()
        return self.finished.is_set()

    def wait(self, timeout_s: float, /) -> tuple[int, int] | None:
        limit = threading.TIMEOUT_MAX if timeout_s < 0 else min(timeout_s, threading.TIMEOUT_MAX)
        if self.deadline is not None:
            limit = min(limit, max(self.deadline - time.monotonic(), 0.0))
        is_done = self.finished.wait(limit) or self.done()
        return self.error if is_done else None

    def times(self) -> tuple[float, float] | None:
        return (self.begun_s or self.ended_s, self.ended_s) if self.released.is_set() else None

    def fail(self, code: int, offset: int) -> None:
        with self.lock:
            if not self.error[0] and not self.finished.is_set():
                self.error = (code, offset)

    def begin_block(self, offset: int) -> bool:
        """Whether a block may run: False once the operation has failed or is late."""
        if self._is_late():
            self.fail(errno.ETIMEDOUT, offset)
        self.begun_s = self.begun_s or time.monotonic()
        return not self.error[0]

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


class AiofilesEngine:
    """The engine behind AioEngine(backend="aiofiles"); EngineCore describes the methods."""

    def __init__(self, options: EngineOptions) -> None:
        self._block_size = options.block_size
        self._timeout_s = options.transfer_timeout_s
        num_threads = min(options.queue_depth, MAX_AIOFILES_THREADS)
        self._executor = CallerRunsThreadPool(num_threads, thread_name_prefix="offloadzero-aiofiles")
        self._faults = _Faults()
        self._stats = dict.fromkeys(_STAT_NAMES, 0)
        self._finished_tokens: list[int] = []
        self._finished_lock = threading.Lock()
        self._files: set[AiofilesFile] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(num_threads)  # for operations that have begun
        self._close_asked = asyncio.Event()
        self._cancel_asked = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name="offloadzero-aiofiles", daemon=True)
        self._thread.start()

    # Called from any thread.

    def open(self, path: bytes, can_create: bool, is_readonly: bool, _direct: bool, /) -> AiofilesFile:
        opened = self._open(os.fsdecode(path), create=can_create, readonly=is_readonly)
        return asyncio.run_coroutine_threadsafe(opened, self._loop).result()

    def submit(
        self,
        file: AiofilesFile,
        is_write: bool,
        address: int,
        num_bytes: int,
        offset: int,
        _priority: int,
        token: int,
        /,
    ) -> AiofilesOperation:
        memory = (ctypes.c_char * num_bytes).from_address(address) if num_bytes else bytearray()
        view = memoryview(memory).cast("B")
        deadline = None if self._timeout_s < 0 else time.monotonic() + self._timeout_s
        operation = AiofilesOperation(file, is_write, view, offset, deadline, token)
        self._loop.call_soon_threadsafe(self._start, operation)
        return operation

    def collect_finished(self) -> list[int]:
        with self._finished_lock:
            tokens, self._finished_tokens = self._finished_tokens, []
        return tokens

    def register_buffer(self, _address: int, _num_bytes: int, /) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def unregister_buffer(self, _address: int, /) -> None:
        raise AssertionError("nothing can have been registered")

    def inject(self, kind: int, nth: int, value: int, /) -> None:
        self._faults.inject(list(FaultKind)[kind].value, nth, value)

    def clear_faults(self) -> None:
        self._faults.clear()

    def stats(self) -> dict[str, int]:
        return dict(self._stats)

    def release_file(self, file: AiofilesFile) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._release_file, file)

    def close(self, should_cancel: bool, /) -> None:
        self._loop.call_soon_threadsafe(self._begin_close, should_cancel)
        self._thread.join()

    # In the loop's thread from here on.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()
        self._executor.shutdown(wait=False)

    async def _serve(self) -> None:
        await self._close_asked.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for file in list(self._files):
            await self._close_file(file)

    def _begin_close(self, should_cancel: bool) -> None:
        self._close_asked.set()
        if should_cancel:
            self._cancel_asked.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, path: str, *, create: bool, readonly: bool) -> AiofilesFile:
        def opener(name: str, flags: int) -> int:
            return os.open(name, flags | (os.O_CREAT if create else 0), 0o600)

        handle = await aiofiles.open(
            path,
            "rb" if readonly else "r+b",
            buffering=0,
            opener=opener,
            loop=self._loop,
            executor=self._executor,
        )
        file = AiofilesFile(handle, self)
        self._files.add(file)
        return file

    def _release_file(self, file: AiofilesFile) -> None:
        file.num_users -= 1
        if file.num_users == 0 and file in self._files:
            self._spawn(self._close_file(file))

    async def _close_file(self, file: AiofilesFile) -> None:
        self._files.discard(file)
        await file.handle.close()

    def _start(self, operation: AiofilesOperation) -> None:
        operation.file.num_users += 1
        self._spawn(self._run(operation))

    async def _run(self, operation: AiofilesOperation) -> None:
        try:
            async with self._places:
                for start in range(0, len(operation.view), self._block_size):
                    if self._cancel_asked.is_set():
                        operation.fail(errno.ECANCELED, operation.offset + start)
                    if not operation.begin_block(operation.offset + start):
                        break
                    await self._move_block(operation, start)
        except BaseException:
            operation.fail(errno.EIO, operation.offset)
            raise
        finally:
            self._complete(operation)

    async def _move_block(self, operation: AiofilesOperation, start: int) -> None:
        self._stats["blocks"] += 1
        fault = self._faults.next_block()
        view = operation.view[start : start + self._block_size]
        code, num_done = await self._transfer(operation, view, operation.offset + start, fault)
        if fault.delay_s:
            with contextlib.suppress(asyncio.TimeoutError):  # the usual end of the delay
                await asyncio.wait_for(self._cancel_asked.wait(), fault.delay_s)
        if code:
            operation.fail(code, operation.offset + start + num_done)

    async def _transfer(
        self, operation: AiofilesOperation, view: memoryview, offset: int, fault: _Fault
    ) -> tuple[int, int]:
        """Move a whole block. Returns (errno or 0, bytes moved)."""
        num_done = num_stalls = 0
        error, short_bytes = fault.error, fault.short_bytes
        while num_done < len(view):
            left = view[num_done:]
            try:
                if error:
                    injected, error = error, 0
                    raise OSError(injected, os.strerror(injected))
                part = left if short_bytes is None else left[:short_bytes]
                num_moved = await self._move(operation, part, offset + num_done)
            except io.UnsupportedOperation:
                # A write to a file opened for reading: the number the kernel would give.
                return errno.EBADF, num_done
            except OSError as failure:
                if failure.errno not in (errno.EINTR, errno.EAGAIN):
                    return failure.errno or errno.EIO, num_done
                num_moved = None
            except RuntimeError:
                # An ending interpreter: the thread pool takes no more work.
                return errno.ECANCELED, num_done
            short_bytes = None
            if num_moved == 0 and not operation.is_write:
                return errno.ENODATA, num_done
            num_done += num_moved or 0
            num_stalls = 0 if num_moved else num_stalls + 1
            if num_stalls > _MAX_STALLS:
                return errno.EIO, num_done
            self._stats["retries"] += num_done < len(view)
        return 0, num_done

    async def _move(self, operation: AiofilesOperation, view: memoryview, offset: int) -> int | None:
        """Do one seek and one transfer. None: it would have blocked."""
        file = operation.file
        async with file.position_lock:
            await file.handle.seek(offset)
            call = file.handle.write if operation.is_write else file.handle.readinto
            num_moved: int | None = await call(view)
        return num_moved

    def _complete(self, operation: AiofilesOperation) -> None:
        self._stats["operations"] += 1
        if not operation.error[0]:
            direction = "bytes_written" if operation.is_write else "bytes_read"
            self._stats[direction] += len(operation.view)
        self._release_file(operation.file)
        with self._finished_lock:
            self._finished_tokens.append(operation.token)
        operation.ended_s = time.monotonic()
        operation.released.set()
        with operation.lock:
            operation.finished.set()
