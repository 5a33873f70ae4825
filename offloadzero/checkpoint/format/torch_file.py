"""Writing and reading the format of `torch.save()` without holding a file in memory.

The format: a zip archive whose members are stored as they are. `data.pkl` is the pickled dict; where it has a tensor it
names a storage, whose bytes are the member `data/KEY`. The dict comes first, so the writer is told all names and shapes
at the start and then takes the tensors in that order. As torch does, it begins each member at a multiple of 64 bytes,
so that `torch.load(mmap=True)` has tensors of their alignment.

[Note: nothing of a file is run]
A pickle names functions that whoever unpickles it calls. torch's `weights_only` calls none but those that make tensors
and plain values, and refuses a file that names others, as files with the objects of a program's own classes do. Each
name that it would refuse is therefore given a class of ours that takes any arguments and does nothing, `Foreign`: the
objects come as the attributes that were saved, which are plain values again, and neither the classes nor the functions
are imported, let alone called.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from offloadzero.checkpoint.format.file_tensor import FileExtent
from offloadzero.checkpoint.format.manifest import FileEntry, HashedFile, HashingPool, file_size
from offloadzero.checkpoint.format.safetensors_file import TensorSpec
from offloadzero.core.fail_points import through
from offloadzero.core.interrupts import is_interrupt
from offloadzero.core.torch_private import rebuild_tensor, rebuild_tensor_of_dtype
from offloadzero.errors import CheckpointError
from offloadzero.memory.mapped_files import MappedFiles

# The classes by which the format names the dtype of a storage; those of later dtypes have none.
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
_ALIGNMENT = 64
_ROOT = "archive"


class TorchFileWriter:
    """Writes tensors in the order of `specs` into a dict by name; `close` flushes them to the disk."""

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        *,
        other_names: Mapping[str, Sequence[str]],
        pool: HashingPool,
        is_there: bool = False,
    ) -> None:
        """Create the file.

        Args:
            other_names: by a name of `specs`, further ones under which the dict has the same tensor.
            pool: hashes.
            is_there: an empty file of this name exists; otherwise none may.
        """
        self.path = path
        self._expected = list(enumerate(specs))
        self._zip = _Archive(HashedFile(path, pool, is_there=is_there))
        try:
            self._zip.add("data.pkl", _pickled(specs, other_names))
            self._zip.add("byteorder", b"little")
        except BaseException:
            self._zip.abandon()
            raise

    def add(self, tensor: torch.Tensor) -> None:
        """Append the next tensor (host memory)."""
        key, (name, dtype, shape) = self._expected.pop(0)
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise AssertionError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} instead of what was announced"
            )
        add = through("checkpoint.write", self._zip.add, name)
        add(f"data/{key}", tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> FileEntry:
        """Close the file, with everything on the disk."""
        if self._expected:
            raise AssertionError(f"{self.path}: {len(self._expected)} tensors are missing")
        self._zip.add("version", b"3\n")
        return self._zip.close()

    def __enter__(self) -> TorchFileWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._zip.abandon()


# --- the dict ---


class _Storage:
    """A storage in the pickled dict: its member, dtype and size."""

    def __init__(self, key: int, dtype: torch.dtype, num_elements: int) -> None:
        kind: Any = _STORAGES.get(dtype, torch.UntypedStorage)
        size = num_elements if dtype in _STORAGES else num_elements * dtype.itemsize
        self.identity = ("storage", kind, str(key), "cpu", size)


class _Tensor:
    """A tensor in the pickled dict."""

    def __init__(self, storage: _Storage, dtype: torch.dtype, shape: torch.Size) -> None:
        stride = torch.empty(shape, device="meta").stride()
        hooks: OrderedDict[str, Any] = OrderedDict()
        self._parts = (storage, 0, tuple(shape), stride, False, hooks)
        self._dtype = dtype

    def __reduce__(self) -> tuple[Any, ...]:
        if self._dtype in _STORAGES:
            return rebuild_tensor, self._parts
        return rebuild_tensor_of_dtype, (*self._parts, self._dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, _Storage) else None


def _pickled(specs: Sequence[TensorSpec], other_names: Mapping[str, Sequence[str]]) -> bytes:
    tensors: OrderedDict[str, _Tensor] = OrderedDict()
    for key, (name, dtype, shape) in enumerate(specs):
        storage = _Storage(key, dtype, shape.numel())
        for each in (name, *other_names.get(name, ())):
            tensors[each] = _Tensor(storage, dtype, shape)
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(tensors)  # torch.save's protocol
    return pickled.getvalue()


# --- the archive ---


class _Archive:
    """The zip archive, in a file that only grows."""

    def __init__(self, file: HashedFile) -> None:
        self._file = file
        self._offset = 0
        self._zip = zipfile.ZipFile(cast(IO[bytes], self), "w")  # members are stored as they are

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Append a member."""
        member = zipfile.ZipInfo(f"{_ROOT}/{name}")
        # Before the data: the fixed head, the name, the sizes in 64 bits, and the padding with a head of its own.
        begin = self._offset + 30 + len(member.filename) + 20 + 4
        padding = -begin % _ALIGNMENT
        member.extra = struct.pack("<2s1H", b"FB", padding) + b"Z" * padding
        with self._zip.open(member, "w", force_zip64=True) as stored:
            stored.write(data)

    def close(self) -> FileEntry:
        """Append the directory of the members and close the file."""
        self._zip.close()
        return self._file.close()

    def abandon(self) -> None:
        """Let go of the file after a failure."""
        self._zip.fp = None  # or the archive would write its directory when it is collected
        self._file.abandon()

    # What ZipFile asks of a file that cannot be written twice at one place.

    def write(self, data: bytes | memoryview) -> int:
        """Append to the file."""
        self._file.write(data)
        num_bytes = memoryview(data).nbytes
        self._offset += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is closed."""


# --- reading ---


class Foreign:
    """What stands for an object of another program's class: [Note: nothing of a file is run].

    The name of its class is the full one that the file has.
    """

    def __new__(cls, *_arguments: object) -> Foreign:
        """Make one, whatever the arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Keep a state by names, and no other: numpy's is a tuple."""
        if isinstance(state, dict):
            self.__dict__.update(state)


class TorchFile:
    """What `torch.save()` wrote, checked against the archive's own checksums. No tensor is in memory."""

    def __init__(self, path: Path) -> None:
        """Read all but the tensors. CheckpointError names the file and what is wrong with it."""
        file_size(path)
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            self.values: Any = None if damaged else _load(path)
        except Exception as error:
            if is_interrupt(error):
                raise
            raise CheckpointError(f"{path}: not a whole file of torch.save(): {_reason(error)}") from error
        if damaged:
            raise CheckpointError(f"{path} is damaged: {damaged} is not what was written")
        self._mapped = MappedFiles()

    def extent(self, tensor: torch.Tensor, name: str) -> FileExtent:
        """Return where a tensor of `values` lies. CheckpointError calls it `name` if that is not in one piece."""
        if not tensor.is_contiguous():
            raise CheckpointError(f"{self.path}: {name} is not contiguous")
        offset = self._mapped.offset(tensor) if tensor.numel() else 0
        if offset is None:
            raise CheckpointError(f"{self.path}: {name} is not mapped from it")
        return FileExtent(self.path, offset, tensor.nbytes)


def _reason(error: Exception) -> str:
    """Return what an error of torch's says beside its advice."""
    advice = ("Weights only load failed", "Check the documentation")
    lines = [line.rpartition("WeightsUnpickler error: ")[2].strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.startswith(advice)), type(error).__name__)


def _empty_dict(*_arguments: object) -> dict[Any, Any]:
    return {}


def _empty_list(*_arguments: object) -> list[Any]:
    return []


# A file fills these as it fills a dict and a list, which torch allows of no class of ours.
_FILLED: Mapping[str, Any] = {"collections.defaultdict": _empty_dict, "collections.deque": _empty_list}


def _load(path: Path) -> Any:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    stand_ins: list[Any] = [(_FILLED.get(name) or type(name, (Foreign,), {}), name) for name in names]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")
