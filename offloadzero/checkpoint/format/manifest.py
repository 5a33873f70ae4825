"""manifest.json: the files of a checkpoint with their sizes and digests, and the digests, made as files are written.

The manifest holds a digest of itself, and must equal the bytes that `encode_manifest` writes: no changed bit is missed.

[Note: the digest of a file]
SHA-256 of the SHA-256 digests of its pieces of 4 MiB, one after another: the pieces of one file are hashed side by
side on several cores, and beside the write that carries them to the disk. It is there against damage and not against
adversaries, so its cost decides. Measured on a Xeon: 1.78 GB/s on one core and 3.49 on two, 0.43 and 0.60 with
the SHA instructions switched off; blake2b 0.94 and 1.85, zlib's crc32 4.25 but 32 bits wide, a CRC-64 from tables in C
2.28, a multiply-and-fold hash of our own in C 25. The last was left out: SHA-256 on a few cores is as fast as a drive
writes, and users need not trust a hash that is known only here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import Any

from offloadzero.checkpoint.format.json_file import parse_json
from offloadzero.checkpoint.format.names import MANIFEST, is_data_file
from offloadzero.core.interrupts import is_interrupt
from offloadzero.core.thread_pool import CallerRunsThreadPool
from offloadzero.errors import AioError, CheckpointError

PIECE_BYTES = 4 * 1024 * 1024
_MAX_THREADS = 8  # enough for the fastest drives
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
_FORMAT = "offloadzero-manifest-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for one file."""

    num_bytes: int
    sha256: str  # [Note: the digest of a file]


class HashingPool(CallerRunsThreadPool):
    """Threads that hash, for one save or load."""

    def __init__(self) -> None:
        super().__init__(min(len(os.sched_getaffinity(0)), _MAX_THREADS), "offloadzero-sha256")

    def __exit__(self, *_: object) -> None:
        self.shutdown(cancel_futures=True)


class _RunningDigest:
    """The digest of bytes that come in order."""

    def __init__(self) -> None:
        self._pieces: list[hashlib._Hash] = []
        self._num_bytes = 0

    def begin(self, data: memoryview, pool: HashingPool) -> list[Future[None]]:
        """Hash `data` on the pool; it must stay until the futures are done, and the next call waits for them."""
        futures = []
        position = 0
        while position < len(data):
            inside = self._num_bytes % PIECE_BYTES
            if inside == 0:
                self._pieces.append(hashlib.sha256())
            part = data[position : position + PIECE_BYTES - inside]
            futures.append(pool.submit(self._pieces[-1].update, part))
            position += len(part)
            self._num_bytes += len(part)
        return futures

    def entry(self) -> FileEntry:
        return FileEntry(self._num_bytes, _root(piece.digest() for piece in self._pieces))


def _root(digests: Iterator[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


class HashedFile:
    """A new file that is hashed as it is written. AioError names the file, the offset and the length."""

    def __init__(self, path: Path, pool: HashingPool, *, is_there: bool = False) -> None:
        """Create the file. `is_there`: an empty file of this name exists; otherwise none may."""
        self.path = path
        self._pool = pool
        self._digest = _RunningDigest()
        self._offset = 0
        with self._named("open", 0):
            self._file = path.open("r+b" if is_there else "xb")

    def write(self, data: bytes | memoryview) -> None:
        """Append to the file."""
        view = memoryview(data).cast("B")
        futures = self._digest.begin(view, self._pool)
        try:
            with self._named("write", len(view)):
                self._file.write(view)
        finally:
            wait(futures)  # the caller's memory is read until then
        for future in futures:
            future.result()
        self._offset += len(view)

    def close(self) -> FileEntry:
        """Close the file, with everything on the disk."""
        with self._named("fsync", 0):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._digest.entry()

    def abandon(self) -> None:
        """Let go of the file after a failure."""
        with suppress(OSError):  # the failed write has been reported
            self._file.close()

    @contextmanager
    def _named(self, operation: str, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_interrupt(error):
                raise
            raise AioError(
                operation=operation,
                path=str(self.path),
                offset=self._offset,
                num_bytes=num_bytes,
                errno=error.errno or EIO,
            ) from error


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
