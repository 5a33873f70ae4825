"""Writing and reading the safetensors format without holding a file in memory (floor 5).

The format: eight bytes little-endian header length, a JSON header of name -> {dtype, shape, data_offsets}, the
tensors' bytes one after another. The header comes first, so the writer is told all names and shapes at the start
and then takes the tensors in that order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offloadzero.errors import OffloadError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound


class CheckpointError(OffloadError, ValueError):
    """A checkpoint that is not whole, or does not fit the model: names file and tensor."""


TensorSpec = tuple[str, torch.dtype, torch.Size]


class SafetensorsWriter:
    """Writes tensors in the order of `specs`; `close` flushes them to the disk."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec], *, metadata: Mapping[str, str]) -> None:
        self.path = path
        self._expected = list(specs)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name, dtype, shape in specs:
            if dtype not in _DTYPE_NAMES:
                raise CheckpointError(f"{path}: {name} has dtype {dtype}, which safetensors does not know")
            size = shape.numel() * dtype.itemsize
            header[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._file = path.open("xb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def add(self, tensor: torch.Tensor) -> None:
        """Append the next tensor (host memory)."""
        name, dtype, shape = self._expected.pop(0)
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise AssertionError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} instead of what was announced"
            )
        if tensor.numel():
            self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Everything is on the disk."""
        if self._expected:
            raise AssertionError(f"{self.path}: {len(self._expected)} tensors are missing")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class SafetensorsReader:
    """Reads single tensors of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        self._entries = self._read_header()

    def _read_header(self) -> dict[str, Any]:
        size_bytes = os.fstat(self._file.fileno()).st_size
        header_bytes = int.from_bytes(self._file.read(8), "little")
        if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise CheckpointError(f"{self.path}: not a safetensors file, or cut short")
        try:
            header = json.loads(self._file.read(header_bytes))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: the header is not JSON: {error}") from error
        header.pop("__metadata__", None)
        self._data_offset = 8 + header_bytes
        for name, entry in header.items():
            if entry["data_offsets"][1] > size_bytes - self._data_offset:
                raise CheckpointError(f"{self.path}: {name} ends past the end of the file")
        return header  # type: ignore[no-any-return]

    def names(self) -> list[str]:
        """All tensors of the file."""
        return list(self._entries)

    def read(self, name: str) -> torch.Tensor:
        """One tensor in host memory."""
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: there is no {name}")
        entry = self._entries[name]
        start, stop = entry["data_offsets"]
        tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
        if tensor.nbytes != stop - start:
            raise CheckpointError(f"{self.path}: {name} has {stop - start} bytes, its shape {tensor.nbytes}")
        if tensor.numel():
            self._file.seek(self._data_offset + start)
            view = tensor.reshape(-1).view(torch.uint8).numpy().data
            if self._file.readinto(view) != tensor.nbytes:
                raise CheckpointError(f"{self.path}: {name} is cut short")
        return tensor

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
