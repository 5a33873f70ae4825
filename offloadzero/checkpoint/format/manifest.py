"""manifest.json: the files of a checkpoint with their sizes and digests, and the digests, made as files are written.

The manifest holds a digest of itself, and must equal the bytes that `encode_manifest` writes: no changed bit is missed.

[Note: the digest of a file]
SHA-256 of the SHA-256 digests of its pieces of 4 MiB, one after another: the pieces of one file are hashed side by
side on several cores, beside the writes of others. It is there against damage and not against
adversaries, so its cost decides. Measured on a Xeon: 1.78 GB/s on one core and 3.49 on two, 0.43 and 0.60 with
the SHA instructions switched off; blake2b 0.94 and 1.85, zlib's crc32 4.25 but 32 bits wide, a CRC-64 from tables in C
2.28, a multiply-and-fold hash of our own in C 25. The last was left out: SHA-256 on a few cores is as fast as a drive
writes, and users need not trust a hash that is known only here.

[Note: past the page cache]
A checkpoint is larger than memory, and nobody reads it soon. Through the page cache it would push out what is read
again, be copied by one thread, and reach the drive in one long fsync: on two cores of a virtual machine 0.3 GB/s, where
the drive writes 1.5 at one request at a time. So a piece is copied once, hashed and written by a thread of the pool,
while the next ones are read from their homes; the memory is that of a few pieces, whatever the size of a tensor.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EINVAL, EIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadzero.checkpoint.format.json_file import parse_json
from offloadzero.checkpoint.format.names import MANIFEST, is_data_file
from offloadzero.core.interrupts import is_interrupt, uninterrupted
from offloadzero.core.thread_pool import CallerRunsThreadPool
from offloadzero.errors import AioError, CheckpointError

PIECE_BYTES = 4 * 1024 * 1024
_DIRECT_BYTES = 4096  # what direct writes are multiples of
_MAX_THREADS = 8  # enough for the fastest drives
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
_FORMAT = "offloadzero-manifest-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")

_Buffer = npt.NDArray[np.uint8]  # of PIECE_BYTES, on the border of a page


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for one file."""

    num_bytes: int
    sha256: str  # [Note: the digest of a file]


class HashingPool(CallerRunsThreadPool):
    """Threads that hash, and read or write what they hash, for one save or load."""

    def __init__(self) -> None:
        # Half of their time they wait for the drive.
        self.num_threads = min(2 * len(os.sched_getaffinity(0)), _MAX_THREADS)
        super().__init__(self.num_threads, "offloadzero-sha256")

    def __exit__(self, *_: object) -> None:
        self.shutdown(cancel_futures=True)


def _root(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


class HashedFile:
    """A new file that is hashed as it is written: [Note: past the page cache].

    AioError names the file, the offset and the length, of this call or of an earlier one.
    """

    def __init__(self, path: Path, pool: HashingPool, *, is_there: bool = False) -> None:
        """Create the file. `is_there`: an empty file of this name exists; otherwise none may."""
        self.path = path
        self._pool = pool
        self._digests: list[bytes] = []
        self._in_flight: deque[tuple[Future[bytes], _Buffer]] = deque()  # pieces in their order
        self._buffer: _Buffer | None = None  # the next piece
        self._num_filled = 0  # bytes of it
        self._offset = 0  # where it begins
        flags = os.O_WRONLY | os.O_CLOEXEC | (0 if is_there else os.O_CREAT | os.O_EXCL)
        with self._named("open", 0, 0):
            self._descriptor, self._is_direct = _open_direct(path, flags)

    def write(self, data: bytes | memoryview) -> None:
        """Append to the file. The bytes are copied; they are on their way to the disk a piece later."""
        view = memoryview(data).cast("B")
        left = np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)
        while left.size:
            if self._buffer is None:
                self._buffer = self._free_buffer()
            end = min(PIECE_BYTES, self._num_filled + left.size)
            num_bytes = end - self._num_filled
            np.copyto(self._buffer[self._num_filled : end], left[:num_bytes])
            self._num_filled, left = end, left[num_bytes:]
            if end == PIECE_BYTES:
                self._send()

    def close(self) -> FileEntry:
        """Close the file, with everything on the disk."""
        if self._num_filled:
            self._send()
        while self._in_flight:
            self._finish_first()
        with self._named("fsync", self._offset, 0):
            if self._is_direct:
                os.ftruncate(self._descriptor, self._offset)  # the last piece was filled up
            os.fsync(self._descriptor)
        self._close()
        return FileEntry(self._offset, _root(self._digests))

    def abandon(self) -> None:
        """Let go of the file after a failure, which has been reported."""
        wait([future for future, _ in self._in_flight])
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # what is on the disk is known by fsync
                os.close(descriptor)

    def _free_buffer(self) -> _Buffer:
        if self._in_flight and (
            self._in_flight[0][0].done() or len(self._in_flight) > self._pool.num_threads
        ):
            return self._finish_first()
        return np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)

    def _finish_first(self) -> _Buffer:
        future, buffer = self._in_flight[0]
        self._digests.append(future.result())
        self._in_flight.popleft()
        return buffer

    @uninterrupted  # abandon() waits for every write that has begun
    def _send(self) -> None:
        buffer, num_bytes = self._buffer, self._num_filled
        if buffer is None:
            raise AssertionError(f"{self.path}: nothing to write at {self._offset}")
        self._buffer, self._num_filled = None, 0
        self._in_flight.append(
            (self._pool.submit(self._write_piece, buffer, num_bytes, self._offset), buffer)
        )
        self._offset += num_bytes

    def _write_piece(self, buffer: _Buffer, num_bytes: int, offset: int) -> bytes:
        """Write a piece and return its digest."""
        digest = hashlib.sha256(buffer[:num_bytes].data).digest()
        size = num_bytes
        if self._is_direct:
            size = -(-num_bytes // _DIRECT_BYTES) * _DIRECT_BYTES
            buffer[num_bytes:size] = 0
        done, is_refused = 0, False
        while done < num_bytes:
            with self._named("write", offset + done, num_bytes - done):
                try:
                    done += os.pwritev(self._descriptor, [buffer[done:size].data], offset + done)
                except OSError as error:
                    if error.errno != EINVAL or not self._is_direct or is_refused:
                        raise
                    # The drive asks for larger multiples than ours, or it was full midway.
                    is_refused = True
                    flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                    fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return digest

    @contextmanager
    def _named(self, operation: str, offset: int, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_interrupt(error):
                raise
            raise AioError(
                operation=operation,
                path=str(self.path),
                offset=offset,
                num_bytes=num_bytes,
                errno=error.errno or EIO,
            ) from error


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file past the page cache, and say whether it is so: not every filesystem can."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != EINVAL:
            raise
    # Where the file was to be made, it may have been.
    return os.open(path, flags & ~os.O_EXCL, 0o666), False


def write_file(path: Path, data: bytes, pool: HashingPool, *, is_there: bool = False) -> FileEntry:
    """Write a `HashedFile` with that content, which is on the disk then. Raises AioError."""
    file = HashedFile(path, pool, is_there=is_there)
    try:
        file.write(data)
        return file.close()
    except BaseException:
        file.abandon()
        raise


def file_size(path: Path) -> int:
    """Return the size of a regular file; CheckpointError for everything else."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Read a small file; CheckpointError when it is no file, larger, or cannot be read."""
    num_bytes = file_size(path)
    if num_bytes > max_bytes:
        raise CheckpointError(f"{path} has {num_bytes:,} bytes: more than {max_bytes:,}")
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def check_file(path: Path, entry: FileEntry, pool: HashingPool) -> None:
    """Read the file, a piece per thread at a time; CheckpointError unless it has the bytes that were written."""
    check_size(path, entry)
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            offsets = range(0, entry.num_bytes, PIECE_BYTES)
            pieces = [pool.submit(_piece_digest, descriptor, offset) for offset in offsets]
            found = _root(piece.result() for piece in pieces)
        finally:
            os.close(descriptor)
    except OSError as error:
        if is_interrupt(error):
            raise
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if found != entry.sha256:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")


def check_size(path: Path, entry: FileEntry) -> None:
    """Raise CheckpointError unless the file is as long as it was when it was written."""
    num_bytes = file_size(path)
    if num_bytes != entry.num_bytes:
        raise CheckpointError(f"{path} has {num_bytes:,} bytes; {entry.num_bytes:,} were written")


def _piece_digest(descriptor: int, offset: int) -> bytes:
    piece = hashlib.sha256()
    end = offset + PIECE_BYTES
    while offset < end:
        data = os.pread(descriptor, end - offset, offset)
        if not data:
            break
        piece.update(data)
        offset += len(data)
    return piece.digest()


# --- manifest.json ---


def encode_manifest(files: Mapping[str, FileEntry]) -> bytes:
    """Return the file's bytes."""
    listed = {name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in files.items()}
    return _encode({"format": _FORMAT, "piece_bytes": PIECE_BYTES, "files": listed})


def _encode(body: Mapping[str, Any]) -> bytes:
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": own}, indent=1, sort_keys=True).encode()


def read_manifest(checkpoint: Path) -> dict[str, FileEntry]:
    """Return size and digest by file name. CheckpointError when the file is missing or has been changed."""
    path = checkpoint / MANIFEST
    raw = read_bytes(path, max_bytes=MAX_MANIFEST_BYTES)
    values = parse_json(raw, path)
    body = {key: value for key, value in values.items() if key != "sha256"}
    if not _is_own(body, raw):
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")
    if body.get("format") != _FORMAT or body.get("piece_bytes") != PIECE_BYTES:
        raise CheckpointError(f"{path}: its format is not {_FORMAT!r}")
    files = body.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: files is not an object")
    return {name: _entry(path, name, values) for name, values in files.items()}


def _is_own(body: Mapping[str, Any], raw: bytes) -> bool:
    try:
        return _encode(body) == raw
    except (ValueError, RecursionError):  # numbers that JSON reads but does not write
        return False


def _entry(path: Path, name: str, values: Any) -> FileEntry:
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: {name} is not an object")
    num_bytes, sha256 = values.get("bytes"), values.get("sha256")
    if type(num_bytes) is not int or num_bytes < 0:
        raise CheckpointError(f"{path}: the size of {name} is not a count")
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        raise CheckpointError(f"{path}: the digest of {name} is not one")
    if not is_data_file(name):
        raise CheckpointError(f"{path}: {name!r} is no file of a checkpoint")
    return FileEntry(num_bytes, sha256)
