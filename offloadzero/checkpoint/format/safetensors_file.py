"""Writing and reading the safetensors format without holding a file in memory.

The format: eight bytes little-endian header length, a JSON header of name -> {dtype, shape, data_offsets}, the
tensors' bytes one after another. The header comes first, so the writer is told all names and shapes at the start
and then takes the tensors in that order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from offloadzero.checkpoint.format.json_file import parse_json
from offloadzero.checkpoint.format.manifest import FileEntry, HashedFile, HashingPool, file_size
from offloadzero.core.fail_points import through
from offloadzero.core.interrupts import is_interrupt
from offloadzero.errors import CheckpointError

_DTYPE_NAMES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound
_MAX_DIMENSIONS = 64  # torch's own

TensorSpec = tuple[str, torch.dtype, torch.Size]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: bytes [start, stop) behind the header."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    stop: int


def is_known_dtype(dtype: torch.dtype) -> bool:
    """Whether the format can hold tensors of that dtype."""
    return dtype in _DTYPE_NAMES


def expect_known_dtypes(specs: Iterable[TensorSpec]) -> None:
    """Raise CheckpointError for a tensor that the format cannot hold."""
    for name, dtype, _ in specs:
        if not is_known_dtype(dtype):
            raise CheckpointError(
                f"{name} has dtype {dtype}, which safetensors does not know: keep it as another "
                "(torch.view_as_real() of a complex one), or register the buffer with persistent=False"
            )


class SafetensorsWriter:
    """Writes tensors in the order of `specs`; `close` flushes them to the disk."""

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str],
        pool: HashingPool,
        is_there: bool = False,
    ) -> None:
        """Create the file. `pool` hashes; `is_there`: an empty file of this name exists; otherwise none may.

        Raises CheckpointError for a dtype that the format does not know, AioError where the file cannot be written.
        """
        self.path = path
        self._expected = list(specs)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        expect_known_dtypes(specs)
        for name, dtype, shape in specs:
            size = shape.numel() * dtype.itemsize
            header[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._file = HashedFile(path, pool, is_there=is_there)
        try:
            self._file.write(len(encoded).to_bytes(8, "little") + encoded)
        except BaseException:
            self._file.abandon()
            raise

    def add(self, tensor: torch.Tensor) -> None:
        """Append the next tensor (host memory)."""
        shape = self._expected[0][2]
        if tensor.shape != shape:
            raise AssertionError(f"{self._expected[0][0]}: {tuple(tensor.shape)} instead of {tuple(shape)}")
        self.add_pieces([tensor.contiguous().reshape(-1)])

    def add_pieces(self, pieces: Iterable[torch.Tensor]) -> None:
        """Append the next tensor, whose elements are those of flat `pieces` (host memory) one after another."""
        name, dtype, shape = self._expected.pop(0)
        write = through("checkpoint.write", self._file.write, name)
        num_elements = 0
        for piece in pieces:
            if piece.dtype != dtype:
                raise AssertionError(f"{name}: {piece.dtype} instead of {dtype}")
            if piece.numel():
                write(piece.view(torch.uint8).numpy().data)
            num_elements += piece.numel()
        if num_elements != shape.numel():
            raise AssertionError(f"{name}: {num_elements} elements instead of {shape.numel()}")

    def close(self) -> FileEntry:
        """Close the file, with everything on the disk."""
        if self._expected:
            raise AssertionError(f"{self.path}: {len(self._expected)} tensors are missing")
        return self._file.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._file.abandon()


class SafetensorsReader:
    """Reads single tensors of one file. Opening it checks the header: CheckpointError, whatever the bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size_bytes = file_size(path)
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        try:
            self.entries = self._read_header(size_bytes)
        except BaseException:
            self._file.close()
            raise

    def _read_header(self, size_bytes: int) -> dict[str, TensorEntry]:
        header_bytes = int.from_bytes(self._read_at(0, 8), "little") if size_bytes >= 8 else size_bytes
        if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise CheckpointError(f"{self.path}: not a safetensors file, or cut short")
        header = parse_json(self._read_at(8, header_bytes), self.path)
        header.pop("__metadata__", None)
        self._data_offset = 8 + header_bytes
        entries = {name: self._entry(name, values) for name, values in header.items()}
        position = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != position:
                raise CheckpointError(f"{self.path}: {name} begins at {entry.start} instead of {position}")
            position = entry.stop
        if position > size_bytes - self._data_offset:
            raise CheckpointError(f"{self.path}: {name} ends past the end of the file")
        if position < size_bytes - self._data_offset:
            raise CheckpointError(f"{self.path}: there is more behind the last tensor")
        return entries

    def _entry(self, name: str, values: Any) -> TensorEntry:
        try:
            dtype, shape, (start, stop) = values["dtype"], values["shape"], values["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{self.path}: {name} has no dtype, shape and data_offsets") from None
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name} has an unknown dtype")
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise CheckpointError(f"{self.path}: {name} has no shape")
        if not all(_is_size(size) for size in [*shape, start, stop]):
            raise CheckpointError(f"{self.path}: {name} has sizes that are none")
        num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
        if num_bytes != stop - start:
            raise CheckpointError(f"{self.path}: {name} has {stop - start} bytes, its shape {num_bytes}")
        return TensorEntry(_DTYPES[dtype], torch.Size(shape), start, stop)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in host memory. Raises CheckpointError where it is not there, or cannot be read."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: there is no {name}")
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        if tensor.numel():
            view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data).cast("B")
            read_into(self._file, self._data_offset + entry.start, view, what=name)
        return tensor

    def offset_of(self, name: str) -> int:
        """Where in the file the tensor's bytes begin."""
        return self._data_offset + self.entries[name].start

    def _read_at(self, offset: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        read_into(self._file, offset, memoryview(data), what="the header")
        return bytes(data)

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_into(file: FileIO, offset: int, view: memoryview, *, what: str) -> None:
    """Fill `view` with a file's bytes from `offset` on. CheckpointError names the file and `what` lies there."""
    position = 0
    while position < len(view):
        try:
            read = through("checkpoint.read", os.preadv, what)
            num_read = read(file.fileno(), [view[position:]], offset + position)
        except OSError as error:
            if is_interrupt(error):
                raise
            raise CheckpointError(f"{file.name}: {what}: {error.strerror}") from error
        if num_read == 0:
            raise CheckpointError(f"{file.name}: {what} is cut short")
        position += num_read


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
