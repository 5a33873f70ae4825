"""Parameters that left memory while their model was being built (floor 5).

`zero.Init` hands large parameters over as soon as their module exists; the runtime takes them back one unit at a
time. They wait with all bits they were initialised with, so a model built under `Init` trains exactly as one that
was not; on NVMe each has a file of its own until then.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from offloadzero.memory.arena import align_up


class Spilled:
    """The value of one parameter, outside the module."""

    def __init__(self, value: torch.Tensor, directory: Path | None) -> None:
        """Keep `value` in host memory, or in an unnamed file in `directory`."""
        self.dtype = value.dtype
        self.shape = value.shape
        self.directory = directory
        self._value: torch.Tensor | None = value
        self._descriptor: int | None = None
        self.drive: int | None = None  # st_dev
        if directory is not None:
            self._descriptor = _write_unnamed(value, directory)
            self._value = None
            self.drive = os.fstat(self._descriptor).st_dev
            self._close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def host_bytes(self) -> int:
        """Of the value; 0 when it is on a file."""
        return 0 if self._value is None else self._value.nbytes

    @property
    def file_bytes(self) -> int:
        """On the drive; 0 when the value is in memory."""
        return 0 if self._descriptor is None else align_up(self.shape.numel() * self.dtype.itemsize)

    def take(self) -> torch.Tensor:
        """The value; its file is gone afterwards, and the drive has its space back."""
        value = self._load()
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)  # closing alone frees the space some time later on XFS
            self._close()
            self._descriptor, self._value = None, value
        return value

    def _load(self) -> torch.Tensor:
        if self._value is not None:
            return self._value
        if self._descriptor is None:
            raise AssertionError("nothing was spilled")
        target = torch.empty(self.shape, dtype=self.dtype)
        view = _as_bytes(target)
        position = 0
        while position < len(view):
            count = os.preadv(self._descriptor, [view[position:]], position)
            if count <= 0:
                raise OSError("short read of a spilled parameter")
            position += count
        return target


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_unnamed(value: torch.Tensor, directory: Path) -> int:
    """A file without a name: it is gone when its descriptor closes, however the process ends."""
    with tempfile.TemporaryFile(dir=directory) as file:
        descriptor = os.dup(file.fileno())
    try:
        view = _as_bytes(value.contiguous())
        position = 0
        while position < len(view):
            position += os.pwrite(descriptor, view[position:], position)
        # Written pages are to leave memory, not to pile up in the page cache.
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except BaseException:
        os.close(descriptor)  # a full disk gets its space back
        raise
    return descriptor


class _Registry:
    """Spilled values by parameter; tensors compare elementwise, so by identity."""

    def __init__(self) -> None:
        self._values: dict[int, Spilled] = {}

    def put(self, param: torch.nn.Parameter, value: Spilled) -> None:
        key = id(param)
        if key not in self._values:
            weakref.finalize(param, self._values.pop, key, None)
        self._values[key] = value

    def get(self, param: torch.nn.Parameter) -> Spilled | None:
        return self._values.get(id(param))

    def take(self, param: torch.nn.Parameter) -> Spilled | None:
        return self._values.pop(id(param), None)


_registry = _Registry()


def spill(param: torch.nn.Parameter, *, dtype: torch.dtype, directory: Path | None) -> None:
    """Take the parameter's value out of its module; a placeholder of `dtype` keeps its shape."""
    shape = param.shape
    _registry.put(param, Spilled(param.data, directory))
    param.data = torch.full((), float("nan"), dtype=dtype).expand(shape)


def is_spilled(param: torch.nn.Parameter) -> bool:
    """Whether the parameter's value is elsewhere."""
    return _registry.get(param) is not None


def original_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """That of the parameter's value, wherever it is; a placeholder may have another."""
    spilled = _registry.get(param)
    return param.dtype if spilled is None else spilled.dtype


def take_spilled(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The value, which is forgotten here; None if the parameter holds it itself."""
    value = _registry.take(param)
    return None if value is None else value.take()


def restore(param: torch.nn.Parameter) -> Spilled | None:
    """Put a spilled value back into the parameter; returns where it was, None if it was not spilled."""
    spilled = _registry.take(param)
    if spilled is not None:
        param.data = spilled.take()
    return spilled


def file_bytes(params: Iterable[torch.nn.Parameter]) -> Counter[int]:
    """What the parameters' values take on drives now, by `st_dev`."""
    found: Counter[int] = Counter()
    for param in params:
        spilled = _registry.get(param)
        if spilled is not None and spilled.drive is not None:
            found[spilled.drive] += spilled.file_bytes
    return found


def host_bytes(param: torch.nn.Parameter) -> int:
    """Host memory that the parameter's value takes now."""
    spilled = _registry.get(param)
    if spilled is not None:
        return spilled.host_bytes
    return param.data.untyped_storage().nbytes() if param.device.type == "cpu" else 0
