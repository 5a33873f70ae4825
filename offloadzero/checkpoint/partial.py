"""A checkpoint while it is written, the way it takes its name, and the leftovers of a kill.

[Note: how a checkpoint takes its name]
It is written into `.TAG.TOKEN.partial`. When every file is on the disk, an existing checkpoint is renamed to
`.TAG.TOKEN.replaced`, the new one to TAG, and the old one is removed. A kill at any instant leaves the last one whole:
under its name, or, between the two renames, as `.replaced`, where the reader finds it and from where the next save
brings it back. The next save also removes a partial one if the process that wrote it is gone: that process holds a lock
on a file inside, which no other process, in no other container and with no reused process number, can hold. On a
filesystem without locks nothing is removed.

A directory without our mark is never touched: a directory is a checkpoint of ours if its meta.json says so, an
unfinished one if its name does ([Note: names that are marks]); and of both only our own files are removed, one by one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offloadzero.checkpoint.format.manifest import read_manifest
from offloadzero.checkpoint.format.meta import read_mark
from offloadzero.checkpoint.format.names import (
    LOCK,
    MANIFEST,
    META,
    PARTIAL,
    REPLACED,
    Unfinished,
    is_data_file,
    is_own_file,
    new_unfinished,
    parse_unfinished,
)
from offloadzero.core.fail_points import through
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.memory.swap_file import sync_directory

log = logging.getLogger("offloadzero.checkpoint")

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


class PartialCheckpoint:
    """A directory to write into, `path`, until `commit` gives it its name; without a commit it is removed on exit."""

    def __init__(self, directory: Path, tag: str) -> None:
        self.tag = tag
        self._directory = directory
        self.path, lock = _new_directory(directory, tag)
        self._lock = os.fdopen(lock)
        unfinished = parse_unfinished(self.path.name)
        if unfinished is None:
            raise AssertionError(self.path)
        self._replaced = directory / Unfinished(tag, unfinished.token, REPLACED).name

    def commit(self) -> Path:
        """Take the name: [Note: how a checkpoint takes its name]. Returns the directory's new path.

        Raises CheckpointError where something else has the name by now.
        """
        final = self._directory / self.tag
        sync_directory(self.path)
        with alone_in(self._directory):
            expect_replaceable(final)  # once more: the writing has taken time
            if os.path.lexists(final):
                final.rename(self._replaced)
            through("checkpoint.commit", self.path.rename, self.tag)(final)
            sync_directory(self._directory)
            _remove_lock(final)
        _remove_own(self._replaced)
        return final

    def __enter__(self) -> PartialCheckpoint:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is not None:
                _settle_replaced(self._replaced, self._directory / self.tag)
                _remove_own(self.path)
        finally:
            self._lock.close()


def expect_new(path: Path) -> None:
    """Raise ConfigError unless the path is free, or an empty directory, in a directory that is there."""
    is_empty = path.is_dir() and not path.is_symlink() and not os.listdir(path)
    if os.path.lexists(path) and not is_empty:
        raise ConfigError("DST", str(path), "is there: give a name that is free, or an empty directory")
    if os.path.ismount(path):
        raise ConfigError(
            "DST", str(path), "is a mount point, which no folder can replace: name a folder in it"
        )
    if not path.parent.is_dir():
        raise ConfigError("DST", str(path), "its parent directory is not there")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A directory to write into, which takes the name `path` at the block's end or, after an error, is removed.

    Those of the same name that killed processes left are removed first. Raises ConfigError as `expect_new`, OSError.
    """
    expect_new(path)
    for left in sorted(path.parent.iterdir()):
        unfinished = parse_unfinished(left.name)
        is_of_path = unfinished is not None and (unfinished.stem, unfinished.kind) == (path.name, PARTIAL)
        if is_of_path and left.is_dir() and not left.is_symlink():
            with _abandoned(left) as is_abandoned:
                if is_abandoned:
                    shutil.rmtree(left)
    partial, lock = _new_directory(path.parent, path.name)
    try:
        yield partial
        _remove_lock(partial)
        sync_directory(partial)
        partial.rename(path)
        sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _new_directory(directory: Path, tag: str) -> tuple[Path, int]:
    while True:
        path = directory / new_unfinished(tag).name
        path.mkdir()
        try:
            lock = _take_new(path / LOCK)
        except FileNotFoundError:
            if not directory.is_dir():
                raise
            continue  # another process thought it abandoned before it had its lock
        if lock is not None:
            return path, lock


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write, empty at first, which takes the name `path` at the block's end or, after an error, is removed.

    Raises OSError.
    """
    lock = None
    while lock is None:
        partial = path.parent / new_unfinished(path.name).name
        lock = _take_new(partial)
    try:
        yield partial
        partial.rename(path)
        sync_directory(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def _take_new(path: Path) -> int | None:
    """Create and lock a file; None when another process thought it abandoned in the moment between."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        if _try_lock(descriptor) is not False and _is_there(path, descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _try_lock(descriptor: int) -> bool | None:
    """Take the lock if it is free; return whether it is ours now, None on a filesystem without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _is_there(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold the lock on a directory's names: for moments, not for the writing of files."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


# --- ours or another program's ---


def not_ours(path: Path) -> str | None:
    """Return why a directory is not a checkpoint of this package; None if it is one."""
    if path.is_symlink():
        return "a symbolic link"
    if not path.is_dir():
        return "not a directory"
    try:
        read_mark(path)
    except CheckpointError as error:
        return str(error)
    return None


def expect_replaceable(final: Path) -> None:
    """Raise CheckpointError unless the path is free, or a checkpoint of ours with nothing else in it."""
    if not os.path.lexists(final):
        return
    reason = not_ours(final)
    what_to_do = "It is left alone: save under another tag, or move it away."
    if reason is not None:
        raise CheckpointError(f"{final} is not a checkpoint of this package ({reason}). {what_to_do}")
    foreign = _foreign_entries(final)
    if foreign:
        raise CheckpointError(f"{final} holds {foreign[0]!r}, which is not of the checkpoint. {what_to_do}")


def _foreign_entries(path: Path) -> list[str]:
    """Return the foreign entries of a checkpoint's directory: by its manifest, or by name if that cannot be read."""
    try:
        listed = set(read_manifest(path))
    except CheckpointError:
        listed = {name for name in os.listdir(path) if is_data_file(name)}
    with os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False)
            or not is_own_file(entry.name)
            or (is_data_file(entry.name) and entry.name not in listed | {META, MANIFEST})
        )


# --- leftovers of a kill ---


def clear_leftovers(directory: Path) -> None:
    """Remove the leftovers of dead processes, and bring back the checkpoints that they were about to replace."""
    found = [(parse_unfinished(name), directory / name) for name in sorted(os.listdir(directory))]
    ours = [(unfinished, path) for unfinished, path in found if unfinished and not path.is_symlink()]
    # The old ones first: while the partial one of the same token is locked, its process is at work.
    for unfinished, path in ours:
        if unfinished.kind == REPLACED and path.is_dir():
            successor = directory / Unfinished(unfinished.stem, unfinished.token, PARTIAL).name
            with _abandoned(successor) as is_abandoned:
                if is_abandoned:
                    _settle_replaced(path, directory / unfinished.stem)
    for unfinished, path in ours:
        if unfinished.kind == PARTIAL:
            with _abandoned(path) as is_abandoned:
                if is_abandoned:
                    _clear_partial(path)
    for path in sorted(directory.iterdir()):
        if os.path.lexists(path / LOCK) and not_ours(path) is None:
            with _abandoned(path) as is_abandoned:  # killed between its last rename and the removal
                if is_abandoned:
                    _remove_lock(path)


def _clear_partial(path: Path) -> None:
    if path.is_dir():
        foreign = [name for name in os.listdir(path) if not is_own_file(name)]
        if foreign:
            log.warning("%s was left by a killed process, but holds %r: it stays", path, foreign[0])
            return
        _remove_own(path)
    else:
        try:
            path.unlink()
        except FileNotFoundError:
            return  # it was listed before its process gave it its name
    log.warning("removed %s, which a killed process left behind", path)


@contextmanager
def _abandoned(path: Path) -> Iterator[bool]:
    """Yield whether no process writes a partial file or directory; in the block none begins to."""
    lock = path / LOCK if path.is_dir() else path
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        # Its process was killed before it made the lock, or is about to make it and will find the directory taken.
        yield not os.path.lexists(path) or not os.listdir(path)
        return
    except OSError:
        yield False  # it is another user's
        return
    try:
        yield _try_lock(descriptor) is True
    finally:
        os.close(descriptor)


def _settle_replaced(replaced: Path, final: Path) -> None:
    """Give a checkpoint its name back, or remove it when its successor has the name."""
    if not os.path.lexists(replaced):
        return
    if os.path.lexists(final):
        _remove_own(replaced)
    elif not_ours(replaced) is None:
        replaced.rename(final)
        sync_directory(final.parent)


def _remove_lock(path: Path) -> None:
    (path / LOCK).unlink(missing_ok=True)


def _remove_own(path: Path) -> None:
    """Remove our files and, when nothing else is in it, the directory. The lock is removed last."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in sorted(filter(is_own_file, names), key=lambda name: (name == LOCK, name == META)):
        (path / name).unlink(missing_ok=True)
    try:
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        log.warning("%s holds what is not of the checkpoint: it stays", path)
