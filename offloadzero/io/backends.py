"""The backends of AioEngine: their options and their methods."""

from __future__ import annotations

import errno as errno_codes
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from offloadzero.config.schema import AioBackend

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
