"""Swap files, made so that no other process can plant one, and removed so that no other file is touched.

[Note: swap files]
A swap file has a name, though an unnamed one (O_TMPFILE) would vanish with its process in every case: a terabyte that
`ls` and `du` do not show is hard to account for, an error should name a file that one can look at, and the file's data
can be handed on only under a name. The file gets the name last:

1. It is made unnamed, with mode 0600, checked to be ours, locked (flock), and its mark is written to disk.
2. linkat() gives it its name, which must be a new one. A process that sees the name also sees the mark and the lock.

So a process that is killed leaves either nothing or a marked file without a lock, whenever it is killed. The mark is
the first block: a magic number, 16 random bytes that the name repeats, a format version. A later start removes a file
only if name and mark agree, it is a regular file of this user, and no process holds its lock. Links are not followed,
and another user's file with a similar name has no such mark.

Where a filesystem has no O_TMPFILE (NFS, some FUSE), the file is made under its name with O_EXCL. If its process is
killed before the mark is written the file is empty: an unlocked empty file with the full pattern of our names is
removed as well, which loses no data. A start that looks at just that moment takes the new file for such a one; its
maker notices that it has no name any more, and makes another.

The name cannot be guessed. Its process number is only for people: two containers may have the same.

The files of a durable run are another matter: they are to be found again, by a name that follows from the configuration
and the rank, and nothing of ours removes them. They have the same mark and lock, so a second process that wants the
same name is refused.

A lock belongs to all processes that have the descriptor. A forked child, a worker of a DataLoader say, may outlive this
process by seconds when it is killed; so a child closes it.
All use goes through the descriptor (/proc/self/fd): changes of the name meanwhile do not matter.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offloadzero.core.constants import GRID_BYTES
from offloadzero.core.interrupts import uninterrupted
from offloadzero.errors import AioError, ConfigError

log = logging.getLogger("offloadzero.nvme")

MARK_BYTES = GRID_BYTES  # the data begin behind it, on the grid of direct I/O
FORMAT_VERSION = 1

_MAGIC = b"offloadzero-swap"
_ID_BYTES = 16
_NAME = re.compile(rf"offloadzero-[0-9]+-([0-9a-f]{{{2 * _ID_BYTES}}})\.bin")
_MODE = 0o600
# The errors of open() with O_TMPFILE where the filesystem or the kernel does not have it (open(2), BUGS), and of
# linkat() of a descriptor where there is no /proc or no second name.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_NO_LINK = (errno.ENOENT, errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS, errno.EXDEV)
_MAX_TRIES = 16
_COMMIT_AT = 256  # in the mark

_open_files: weakref.WeakSet[SwapFile | DirectoryLock] = weakref.WeakSet()


@dataclass(frozen=True)
class KeptFile:
    """A swap file that stays when its process ends."""

    name: str
    file_bytes: Sequence[int] | None = None  # its least size in each directory; None: it begins anew


class KeptMark(NamedTuple):
    """What a swap file that was kept says of itself, and its size."""

    file_id: str
    last_commit: int
    num_bytes: int


def read_kept_mark(path: Path) -> KeptMark:
    """Read the mark of a file, whatever it is. Raises OSError."""
    with path.open("rb") as file:
        mark = file.read(MARK_BYTES)
        file_id = mark[len(_MAGIC) : len(_MAGIC) + _ID_BYTES].hex()
        return KeptMark(file_id, _last_commit(mark), os.fstat(file.fileno()).st_size)


def _last_commit(mark: bytes) -> int:
    return int.from_bytes(mark[_COMMIT_AT : _COMMIT_AT + 8], "little")


class DirectoryLock:
    """Keeps other processes from a directory, which is made, as long as it is not closed."""

    def __init__(self, directory: Path) -> None:
        """Take the lock. Raises ConfigError where another process has it, AioError."""
        self.descriptor = -1
        try:
            self.descriptor = _open_lock(directory)
            _open_files.add(self)
            _lock_kept(self.descriptor, directory)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise AioError(
                operation="lock", path=str(directory), offset=0, num_bytes=0, errno=error.errno or errno.EIO
            ) from error

    @uninterrupted
    def close(self) -> None:
        """Give the lock up. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _open_lock(directory: Path) -> int:
    path, flags = directory / ".lock", os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)
        return os.open(path, flags | os.O_RDWR | os.O_CREAT, _MODE)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, flags | os.O_RDONLY)  # what a drive that fails has is read still


def _lock_kept(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        allowed = f"a directory in which no other process trains: one has {path.name}, for it is durable"
        raise ConfigError("offloadzero.nvme_path", str(path.parent), allowed) from error


class SwapFile:
    """An open file of this process, locked as long as it is open, and `MARK_BYTES` long at first."""

    def __init__(self, directory: Path, kept: KeptFile | None = None, *, least_bytes: int = 0) -> None:
        """Make the file, or open the one that is `kept`. Raises AioError: it cannot be, or it is not this user's alone.

        `least_bytes`: of one that is kept; 0: it begins anew. Raises ConfigError where another process has it.
        """
        file_id = secrets.token_bytes(_ID_BYTES)
        name = f"offloadzero-{os.getpid()}-{file_id.hex()}.bin" if kept is None else kept.name
        self.path = directory / name
        self.file_id = file_id.hex()
        self._is_kept = kept is not None
        self.descriptor = -1
        if self._is_kept:
            _open_files.add(self)
        try:
            self.path = self.path.absolute()  # removed later, perhaps from another directory
            if kept is None:
                self._make(directory, file_id)
            else:
                self._open_kept(directory, file_id, least_bytes)
        except BaseException as error:
            self.remove()
            if isinstance(error, AioError | ConfigError) or not isinstance(error, OSError):
                raise
            raise AioError(
                operation="open", path=str(self.path), offset=0, num_bytes=0, errno=error.errno or errno.EIO
            ) from error

    @uninterrupted  # a file that is made has its number here, by which it is removed
    def _make(self, directory: Path, file_id: bytes) -> None:
        with _directory(directory) as at:
            self.descriptor = _make_linked(at, self.path, file_id)
            if self.descriptor < 0:
                self.descriptor = _make_named(at, self.path, file_id)

    @uninterrupted
    def _open_kept(self, directory: Path, file_id: bytes, least_bytes: int) -> None:
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with _directory(directory) as at:
            self.descriptor = os.open(self.path.name, flags, _MODE, dir_fd=at)
        first = os.pread(self.descriptor, len(_MAGIC) + _ID_BYTES, 0)
        if first.strip(b"\0") and not first.startswith(_MAGIC):
            raise AioError(
                operation="open", path=str(self.path), offset=0, num_bytes=len(first), errno=errno.EEXIST,
                detail="it is not a file of this package",
            )  # fmt: skip
        _lock_kept(self.descriptor, self.path)
        _take(self.descriptor, self.path)
        if least_bytes and self.num_bytes < least_bytes:
            raise AioError(
                operation="open", path=str(self.path), offset=self.num_bytes, num_bytes=least_bytes - self.num_bytes,
                errno=errno.ENODATA, detail=f"it had {least_bytes:,} bytes when its last commit was made",
            )  # fmt: skip
        if least_bytes:
            self.file_id = first[len(_MAGIC) :].hex()
            return
        if self.last_commit:
            raise ConfigError(
                "offloadzero.nvme_path",
                str(directory),
                f"{self.path.name} here belongs to a durable run whose commits are not in the first directory: name "
                "the directories of that run in their order, or remove "
                f"{self.path.stem}* from all of them to start anew",
            )
        os.ftruncate(self.descriptor, 0)  # what is reserved anew reads as zeros
        _write_mark(self.descriptor, file_id)
        sync_directory(directory)  # or a power failure could leave commits without it

    @property
    def open_path(self) -> str:
        """A path that opens this very file, whatever has become of its name."""
        return f"/proc/self/fd/{self.descriptor}"

    @property
    def num_bytes(self) -> int:
        """The file's size now."""
        return os.fstat(self.descriptor).st_size

    @uninterrupted  # or its number may be another file's when it is closed
    def remove(self) -> None:
        """Give up the lock, and the name unless it is kept or another file's now. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        try:
            if not self._is_kept and self._has_name(descriptor):
                self.path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    @property
    def last_commit(self) -> int:
        """The number of the last commit that the mark knows of, which needs the data; 0: there is none."""
        return _last_commit(os.pread(self.descriptor, MARK_BYTES, 0))

    def note_commit(self, number: int) -> None:
        """Note a commit in the mark: the file does not begin anew, nor with a commit before it."""
        os.pwrite(self.descriptor, number.to_bytes(8, "little"), _COMMIT_AT)
        os.fdatasync(self.descriptor)

    def _has_name(self, descriptor: int) -> bool:
        try:
            is_ours = _is_same(os.stat(self.path, follow_symlinks=False), os.fstat(descriptor))
        except FileNotFoundError:
            return False
        if not is_ours:
            log.warning("%s is another file by now and stays", self.path)
        return is_ours


def _close_in_child() -> None:
    for file in list(_open_files):
        descriptor, file.descriptor = file.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)


def remove_stale_files(directory: Path) -> list[Path]:
    """Remove files that killed processes of ours left in `directory`: [Note: swap files]."""
    removed = []
    try:
        with _directory(directory) as at:
            for name, _ in _stale_files(at, directory):
                with contextlib.suppress(FileNotFoundError):  # another start was quicker
                    os.unlink(name, dir_fd=at)
                    removed.append(directory / name)
    except FileNotFoundError:
        return []  # making a file in that directory raises the error
    except PermissionError as error:
        log.warning("%s: cannot look for files of processes that are gone: %s", directory, error.strerror)
    if removed:
        log.warning("removed files of processes that are gone: %s", ", ".join(map(str, removed)))
    return removed


def stale_bytes(directory: Path) -> int:
    """The bytes of the drive that `remove_stale_files` would free; 0 where the directory cannot be looked into."""
    try:
        with _directory(directory) as at:
            return sum(512 * os.fstat(descriptor).st_blocks for _, descriptor in _stale_files(at, directory))
    except OSError:
        return 0


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Write the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_linked(at: int, path: Path, file_id: bytes) -> int:
    """Do steps 1 and 2 of the note; return -1 where the filesystem does not have them."""
    try:
        descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE, dir_fd=at)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            return -1
        raise
    try:
        _take(descriptor, path)
        _write_mark(descriptor, file_id)
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=at, follow_symlinks=True)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_LINK and not isinstance(error, AioError):
            return -1
        raise
    except BaseException:
        if os.fstat(descriptor).st_nlink:  # an interrupt has come after it got its name
            os.unlink(path.name, dir_fd=at)
        os.close(descriptor)
        raise
    return descriptor


def _make_named(at: int, path: Path, file_id: bytes) -> int:
    """Do the fallback of the note."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_MAX_TRIES):
        descriptor = os.open(path.name, flags, _MODE, dir_fd=at)
        is_made = False
        try:
            # A start that looks for stale files may hold the lock for a moment, or may have removed the file.
            with contextlib.suppress(BlockingIOError):
                _take(descriptor, path)
                is_made = os.fstat(descriptor).st_nlink > 0
            if is_made:
                _write_mark(descriptor, file_id)
                return descriptor
        except BaseException:
            is_made = False
            raise
        finally:
            if not is_made:
                _discard(at, path.name, descriptor)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _discard(at: int, name: str, descriptor: int) -> None:
    try:
        with contextlib.suppress(FileNotFoundError):
            if _is_same(os.stat(name, dir_fd=at, follow_symlinks=False), os.fstat(descriptor)):
                os.unlink(name, dir_fd=at)
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> None:
    """Lock a new file, and make sure that it is this user's alone: a mount may say otherwise."""
    os.fchmod(descriptor, _MODE)  # whatever the umask is
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != _MODE:
        raise AioError(
            operation="open",
            path=str(path),
            offset=0,
            num_bytes=0,
            errno=errno.EPERM,
            detail=f"a new file here belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}, "
            f"not to user {os.geteuid()} alone",
        )
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write_mark(descriptor: int, file_id: bytes) -> None:
    mark = _MAGIC + file_id + FORMAT_VERSION.to_bytes(4, "little")
    os.pwrite(descriptor, mark.ljust(MARK_BYTES, b"\0"), 0)
    os.fdatasync(descriptor)  # else a power failure could leave the name without the mark


def _stale_files(at: int, directory: Path) -> Iterator[tuple[str, int]]:
    """Yield each unused file of this user and its descriptor, which holds its lock until the next one is asked for."""
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        descriptor = -1 if match is None else _open_stale(at, name, bytes.fromhex(match[1]))
        if descriptor >= 0:
            try:
                yield name, descriptor
            finally:
                os.close(descriptor)


def _open_stale(at: int, name: str, file_id: bytes) -> int:
    """Open and lock the file if it is an unused one of this user; else return -1."""
    # The flags keep a pipe from blocking; a device is not even opened.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        if not _is_candidate(os.stat(name, dir_fd=at, follow_symlinks=False)):
            return -1
        descriptor = os.open(name, flags, dir_fd=at)
    except OSError:
        return -1  # a link, another user's, or gone already
    is_stale = False
    try:
        status = os.fstat(descriptor)
        if _is_candidate(status):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            first = os.pread(descriptor, len(_MAGIC) + _ID_BYTES, 0)
            has_name = _is_same(os.stat(name, dir_fd=at, follow_symlinks=False), status)
            is_stale = first in (b"", _MAGIC + file_id) and has_name
    except (BlockingIOError, FileNotFoundError):
        is_stale = False  # its process lives, or another start was quicker
    finally:
        if not is_stale:
            os.close(descriptor)
    return descriptor if is_stale else -1


def _is_candidate(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
