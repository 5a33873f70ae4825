"""The kernel backends of AioEngine, io_uring and native AIO: the C++ engine of csrc/aio (floor 2).

Importing this file loads the compiled module. offloadzero.native.aio describes the methods.
"""

from __future__ import annotations

import os

from offloadzero.native import _aio
from offloadzero.native.aio_backends import EngineOptions, errno_name

# The values of the enums in csrc/aio, and the order of engine_stats().
_DIRECT_CODE = {"off": 0, "on": 1, "auto": 2}
_FAULT_CODE = {"errno": 0, "short": 1, "delay": 2}
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


class KernelFile:
    """An open file: a shared handle; operations in flight keep the descriptor open."""

    def __init__(self, handle: _aio._File, *, direct_reason: str, alignment: int) -> None:
        self._handle: _aio._File | None = handle
        self.direct_reason = direct_reason
        self.alignment = alignment

    def handle(self) -> _aio._File:
        if self._handle is None:
            raise AssertionError("the face checks that the file is open")
        return self._handle

    def num_bytes(self) -> int:
        return _checked(_aio.file_num_bytes(self.handle()))

    def preallocate(self, start: int, num_bytes: int) -> None:
        _checked(_aio.file_preallocate(self.handle(), start, num_bytes))

    def sync(self) -> None:
        _checked(_aio.file_sync(self.handle()))

    def close(self) -> None:
        self._handle = None


def _checked(status: int) -> int:
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    return status


class KernelOperation:
    """A submitted operation."""

    __slots__ = ("_engine", "_handle")

    def __init__(self, engine: _aio._Engine, handle: _aio._Operation) -> None:
        self._engine = engine
        self._handle = handle

    def done(self) -> bool:
        return _aio.is_done(self._engine, self._handle)

    def wait(self, timeout_s: float) -> tuple[int, int] | None:
        return _aio.wait(self._engine, self._handle, timeout_s)

    def times(self) -> tuple[float, float] | None:
        return _aio.times(self._handle)


class KernelEngine:
    """An engine on one kernel interface; OSError when the kernel refuses it."""

    def __init__(self, backend: str, options: EngineOptions) -> None:
        handle = _aio.engine_create(
            backend == "io_uring",
            options.block_size,
            options.queue_depth,
            options.num_threads,
            options.transfer_timeout_s,
        )
        if isinstance(handle, int):
            raise OSError(-handle, os.strerror(-handle))
        self._handle = handle

    def open(self, path: str, *, create: bool, readonly: bool, direct: str) -> KernelFile:
        opened = _aio.file_open(self._handle, os.fsencode(path), create, readonly, _DIRECT_CODE[direct])
        if isinstance(opened, int):
            raise OSError(-opened, os.strerror(-opened))
        handle, refusal, alignment = opened
        if direct == "off":
            reason = "asked for"
        else:
            reason = f"O_DIRECT: {errno_name(-refusal)}" if refusal else "O_DIRECT"
        return KernelFile(handle, direct_reason=reason, alignment=alignment)

    def submit(
        self,
        file: KernelFile,
        *,
        is_write: bool,
        address: int,
        num_bytes: int,
        offset: int,
        priority: int,
        token: int,
    ) -> KernelOperation:
        handle = _aio.submit(
            self._handle, file.handle(), is_write, address, num_bytes, offset, priority, token
        )
        if isinstance(handle, int):
            raise OSError(-handle, os.strerror(-handle))
        return KernelOperation(self._handle, handle)

    def collect_finished(self) -> list[int]:
        return _aio.collect_finished(self._handle)

    def register_buffer(self, address: int, num_bytes: int, /) -> None:
        _checked(_aio.engine_register_buffer(self._handle, address, num_bytes))

    def unregister_buffer(self, address: int, /) -> None:
        if not _aio.engine_unregister_buffer(self._handle, address):
            raise AssertionError("the face keeps the list of registered buffers")

    def inject(self, kind: str, nth: int, value: int) -> None:
        _aio.engine_inject(self._handle, _FAULT_CODE[kind], nth, value)

    def clear_faults(self) -> None:
        _aio.engine_clear_faults(self._handle)

    def stats(self) -> dict[str, int]:
        return dict(zip(_STAT_NAMES, _aio.engine_stats(self._handle), strict=True))

    def close(self, *, cancel: bool) -> None:
        _aio.engine_close(self._handle, cancel)
