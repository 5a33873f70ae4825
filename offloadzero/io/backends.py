"""The backends of AioEngine: their options, their methods, and the choice of one that this machine allows."""

from __future__ import annotations

import errno as errno_codes
import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from offloadzero.config.schema import AioBackend
from offloadzero.errors import ConfigError

__all__ = [
    "AioBackend",
    "EngineCore",
    "EngineOptions",
    "FaultKind",
    "FileCore",
    "OperationCore",
    "errno_name",
]


class FaultKind(str, Enum):
    """Faults of `AioEngine.inject`, in the order of the compiled module's enum."""

    ERRNO = "errno"
    """The block fails with errno `value` before any transfer (EINTR and EAGAIN are retried, as real ones are)."""
    SHORT = "short"
    """The block's first transfer reports `value` bytes at most."""
    DELAY = "delay"
    """The block's completion is seen `value` milliseconds late, and it keeps its place in the queue so long, as on a
    slow drive; other blocks go on in the other places."""


@dataclass(frozen=True)
class EngineOptions:
    """The checked arguments of an `AioEngine`."""

    block_size: int
    queue_depth: int
    num_threads: int
    transfer_timeout_s: float  # negative: no limit


class FileCore(Protocol):
    """An open file of one backend; the methods raise OSError."""

    @property
    def alignment(self) -> int:
        """The alignment of direct transfers in bytes; 1 where the file is not direct."""

    @property
    def direct_refusal(self) -> int:
        """The errno that direct I/O was refused with; 0: it was not refused, or not asked for."""

    def num_bytes(self) -> int: ...
    def preallocate(self, start: int, num_bytes: int, /) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class OperationCore(Protocol):
    """A submitted operation of one backend.

    wait() returns (errno or 0, file offset of the error), or None when the time is over; a negative timeout is
    no limit. times(): see AioTicket.times.
    """

    def done(self) -> bool: ...
    def wait(self, timeout_s: float, /) -> tuple[int, int] | None: ...
    def times(self) -> tuple[float, float] | None: ...


class EngineCore(Protocol):
    """A backend; the methods raise OSError.

    `token` names the operation in collect_finished(), once its memory is not touched any more. `kind` is a
    place in FaultKind.
    """

    def open(self, path: bytes, can_create: bool, is_readonly: bool, direct: bool, /) -> FileCore: ...
    def submit(
        self,
        file: Any,
        is_write: bool,
        address: int,
        num_bytes: int,
        offset: int,
        priority: int,
        token: int,
        /,
    ) -> OperationCore: ...
    def register_buffer(self, address: int, num_bytes: int, /) -> None: ...
    def unregister_buffer(self, address: int, /) -> None: ...
    def collect_finished(self) -> list[int]: ...
    def inject(self, kind: int, nth: int, value: int, /) -> None: ...
    def clear_faults(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self, should_cancel: bool, /) -> None: ...


def errno_name(code: int) -> str:
    """Return the name of an error number: "EPERM" for 1, and so on."""
    return errno_codes.errorcode.get(code, str(code))


logger = logging.getLogger("offloadzero.aio")


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
