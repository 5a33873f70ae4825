"""Files of a benchmark: made exclusively, removed on every exit, and never another program's."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from offloadzero.cli.bench.points import MIB
from offloadzero.errors import AioError, ConfigError
from offloadzero.planning.machine import MEMORY_FILESYSTEMS, describe_path

NAME_PREFIX = "offloadzero-bench-"
_FREE_MARGIN_BYTES = 1024 * MIB
_FREE_MARGIN_SHARE = 0.05


class ScratchFile:
    """A new empty file with mode 0600 and a name of its own; a context that removes it.

    Raises AioError when it cannot be made. `num_bytes` is how much of it holds written data.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.path = os.path.join(directory, f"{NAME_PREFIX}{os.getpid()}-{secrets.token_hex(8)}.tmp")
        self.num_bytes = 0
        self.cursor = 0
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise AioError(
                operation="create", path=self.path, offset=0, num_bytes=0, errno=error.errno or errno.EIO
            ) from error
        self._pid = os.getpid()
        self._identity = _identity(os.fstat(self._fd))
        _live_files.append(self)

    @property
    def allocated_bytes(self) -> int:
        """The bytes that the filesystem keeps for it: less than its size where there are holes or compression."""
        return os.fstat(self._fd).st_blocks * 512

    def advance(self, num_bytes: int) -> int:
        """Return the next offset for `num_bytes`; the beginning where they do not fit before the end."""
        offset = -(-self.cursor // num_bytes) * num_bytes
        if offset + num_bytes > self.num_bytes:
            offset = 0
        self.cursor = offset + num_bytes
        return offset

    def check(self) -> None:
        """Raise AioError when its name stands for another file by now."""
        try:
            found = _identity(os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            found = None
        if found != self._identity:
            raise AioError(
                operation="open",
                path=self.path,
                offset=0,
                num_bytes=0,
                errno=errno.ESTALE,
                detail="somebody replaced the file of this benchmark",
            )

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def drop_cache(self) -> None:
        """Write out the file's pages in the page cache, and drop them."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self) -> None:
        """Remove the file. Idempotent; leaves a file that took its name alone, and does nothing in a forked child."""
        if self not in _live_files or os.getpid() != self._pid:
            return
        with contextlib.suppress(FileNotFoundError):
            if _identity(os.stat(self.path, follow_symlinks=False)) == self._identity:
                os.unlink(self.path)
        os.close(self._fd)
        _live_files.remove(self)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


_live_files: list[ScratchFile] = []


@atexit.register
def _remove_live_files() -> None:
    for file in list(_live_files):
        file.remove()


@contextlib.contextmanager
def scratch_files(directories: Sequence[str]) -> Iterator[list[ScratchFile]]:
    """Make one new file in each directory; each is removed at the end, whatever ends it."""
    files: list[ScratchFile] = []
    try:
        for directory in directories:
            with _signals_held():  # else one could come when the file exists and is not noted yet
                files.append(ScratchFile(directory))
        yield files
    finally:
        with _signals_ignored():
            for file in files:
                file.remove()


# --- Signals ---

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], Any] | int


class Terminated(SystemExit):
    """A signal asked the process to end; the exit status is the shell's, 128 + its number."""


def _raise_terminated(number: int, _frame: FrameType | None) -> None:
    raise Terminated(128 + number)


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that files are removed.

    One that is ignored stays so: under nohup a terminal that closes ends nothing.
    """
    heard = [number for number in _ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    with _handlers(dict.fromkeys(heard, _raise_terminated)):
        yield


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold signals back until the end of the block."""
    held: list[int] = []
    try:
        hold = dict.fromkeys((signal.SIGINT, *_ENDING_SIGNALS), lambda number, _frame: held.append(number))
        with _handlers(hold):
            yield
    finally:
        if held:
            signal.raise_signal(held[0])


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore a second Ctrl-C, so that it does not stop the removal of the files."""
    with _handlers(dict.fromkeys((signal.SIGINT, *_ENDING_SIGNALS), signal.SIG_IGN)):
        yield


@contextlib.contextmanager
def _handlers(wanted: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    """Set handlers, which Python lets only the main thread do; in another one signals stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


# --- Checks beforehand ---


def check_directories(paths: Sequence[str]) -> None:
    """Raise ConfigError unless each can be written to and lies on a drive of its own.

    Two directories of one drive would be measured as two drives. Filesystems in memory are no drives: there only the
    same directory may not be named twice.
    """
    directories: dict[tuple[int, int], str] = {}
    drives: dict[object, str] = {}
    for path in paths:
        if not Path(path).is_dir():
            what = "exists and is no directory" if os.path.lexists(path) else "does not exist"
            raise ConfigError("PATH", path, f"{what}: name a directory on a drive")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError("PATH", path, "the directory is not writable")
        identity = _identity(os.stat(path))
        if identity in directories:
            raise ConfigError("PATH", path, f"is the same directory as {directories[identity]!r}")
        directories[identity] = path
        drive = _drive_of(path)
        if drive is not None and drive in drives:
            other = drives[drive]
            raise ConfigError(
                "PATH", path, f"is on the same drive as {other!r}, which would count as two: name one"
            )
        drives[drive] = path


def _drive_of(path: str) -> object:
    """Return the disk's name, else the number of the filesystem; None in memory."""
    described = describe_path(path)
    if described["filesystem"] in MEMORY_FILESYSTEMS:
        return None
    return described["device"]["name"] if described["device"] else os.stat(path).st_dev


def check_space(paths: Sequence[str], num_bytes: int) -> None:
    """Raise ConfigError unless each filesystem has room for its files of `num_bytes` and keeps a margin.

    The margin is 5 % of the filesystem, 1 GiB at most.
    """
    wanted: dict[int, list[str]] = {}
    for path in paths:
        wanted.setdefault(os.stat(path).st_dev, []).append(path)
    for members in wanted.values():
        space = os.statvfs(members[0])
        margin = min(int(space.f_blocks * space.f_frsize * _FREE_MARGIN_SHARE), _FREE_MARGIN_BYTES)
        free = space.f_bavail * space.f_frsize
        needed = num_bytes * len(members)
        if needed + margin > free:
            raise ConfigError(
                "--size",
                num_bytes,
                f"{', '.join(members)}: {needed / MIB:,.0f} MiB are needed and {margin / MIB:,.0f} MiB stay "
                f"free, but {free / MIB:,.0f} MiB are free",
            )
