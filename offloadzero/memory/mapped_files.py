"""Files of others in which values of this process lie already, and proof that they do.

[Note: weights in place]
Libraries load a file of weights by mapping it: `from_pretrained` of transformers, `safetensors.torch.load_file` and
`torch.load(mmap=True)` give tensors whose memory is the file. Such a weight that stays frozen needs no copy in a swap
file. Where it lies is not guessed by names, which libraries change; the kernel says it. /proc/self/maps has the file
and the offset of an address. A mapping that is private has the file's own pages until somebody writes to them; then
they become pages of the process, which /proc/self/pagemap tells. Where there is none of those the value is what the
file holds, and no byte is read to know that.

From then on the file is read through a descriptor of ours. So it may be renamed, replaced by another or deleted: the
descriptor has the one that was mapped. If it is written to, though, its size or its time of modification changes before
its bytes do, and each read looks at both when its bytes have come.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from offloadzero.errors import AioError

# Bits of an entry of /proc/self/pagemap: Documentation/admin-guide/mm/pagemap.rst of Linux.
_IS_PRESENT_OR_SWAPPED = np.uint64(1 << 63 | 1 << 62)
_IS_OF_FILE = np.uint64(1 << 61)
_ENTRY_BYTES = 8


class MappedFile:
    """An open file that must stay as it is now: [Note: weights in place]."""

    def __init__(self, path: str) -> None:
        """Open the file. Raises OSError."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.status = os.fstat(self.descriptor)

    @property
    def open_path(self) -> str:
        """A path that opens this very file, whatever has become of its name."""
        return f"/proc/self/fd/{self.descriptor}"

    def expect_unchanged(self, label: str, offset: int, num_bytes: int) -> None:
        """Raise AioError if the file has been written to. The tensor `label` lies at `offset`."""
        now, before = os.fstat(self.descriptor), self.status
        if (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
            return
        raise AioError(
            operation="pread",
            path=self.path,
            offset=offset,
            num_bytes=num_bytes,
            errno=errno.ESTALE,
            label=label,
            detail="the file has been written to, or touched, since the start of this run, which reads frozen weights "
            'from it: leave it alone, or set "offloadzero": {"frozen_weights": "copy"}. What is trained is as it was: '
            "save_checkpoint(exclude_frozen_parameters=True) saves it, and PEFT's save_pretrained() adapters",
        )


@dataclass(frozen=True)
class FileRange:
    """Bytes from `offset` on of a file in which a home's values lie."""

    file: MappedFile
    offset: int

    def behind(self, num_bytes: int) -> FileRange:
        """The range that begins `num_bytes` later."""
        return FileRange(self.file, self.offset + num_bytes)


class _Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    stop: int
    is_private: bool
    offset: int
    device: tuple[int, int]  # major, minor
    inode: int
    path: str


class MappedFiles:
    """The files that are mapped into this process now."""

    def __init__(self) -> None:
        self._mappings = _read_mappings()
        self._starts = [mapping.start for mapping in self._mappings]
        self._files: dict[tuple[int, tuple[int, int]], MappedFile | None] = {}  # by inode and device

    def offset(self, values: torch.Tensor) -> int | None:
        """Return where contiguous values of host memory begin in the file that is mapped there; None: in no file."""
        mapping = self._mapping_of(values)
        return None if mapping is None else mapping.offset + values.data_ptr() - mapping.start

    def _mapping_of(self, values: torch.Tensor) -> _Mapping | None:
        index = bisect_right(self._starts, values.data_ptr()) - 1
        mapping = self._mappings[index] if index >= 0 else None
        is_inside = mapping is not None and values.data_ptr() + values.nbytes <= mapping.stop
        return mapping if mapping is not None and is_inside and mapping.inode else None

    def find(self, values: torch.Tensor) -> FileRange | None:
        """Return where the values lie in a file; None: nowhere, or not provably so.

        values: any tensor; of a subclass, on a device or strided it lies nowhere.
        """
        is_plain = type(values) is torch.Tensor and values.device.type == "cpu" and values.is_contiguous()
        if not is_plain or not values.numel():
            return None
        address, num_bytes = values.data_ptr(), values.nbytes
        mapping = self._mapping_of(values)
        if mapping is None or not mapping.is_private:
            return None
        file = self._open(mapping)
        offset = mapping.offset + address - mapping.start
        if file is None or offset + num_bytes > file.status.st_size or not _is_unwritten(address, num_bytes):
            return None
        return FileRange(file, offset)

    def _open(self, mapping: _Mapping) -> MappedFile | None:
        """Open the file of a mapping, unless its path is another file's by now.

        Some filesystems (overlayfs, the subvolumes of btrfs) tell /proc/self/maps another device than fstat: None, too.
        """
        key = mapping.inode, mapping.device
        if key not in self._files:
            self._files[key] = None
            try:
                file = MappedFile(mapping.path)
            except OSError:
                return None
            status = file.status
            device = os.major(status.st_dev), os.minor(status.st_dev)
            if stat.S_ISREG(status.st_mode) and (status.st_ino, device) == key:
                self._files[key] = file
        return self._files[key]


def _read_mappings() -> list[_Mapping]:
    """Read /proc/self/maps, which is sorted; empty where there is none."""
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            lines = [line.rstrip("\n").split(None, 5) for line in maps]
    except OSError:
        return []
    return [_mapping(*fields) for fields in lines if len(fields) == 6]


def _mapping(addresses: str, mode: str, offset: str, device: str, inode: str, path: str) -> _Mapping:
    start, stop = (int(address, 16) for address in addresses.split("-"))
    major, minor = (int(number, 16) for number in device.split(":"))
    return _Mapping(start, stop, mode[3] == "p", int(offset, 16), (major, minor), int(inode), path)


def _is_unwritten(address: int, num_bytes: int) -> bool:
    """Whether no page of a private mapping has been written to; also False where the kernel does not tell."""
    first, stop = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(first * _ENTRY_BYTES)
            entries = np.frombuffer(pagemap.read((stop - first) * _ENTRY_BYTES), dtype=np.uint64)
    except OSError:
        return False
    is_of_process = (entries & _IS_PRESENT_OR_SWAPPED != 0) & (entries & _IS_OF_FILE == 0)
    return len(entries) == stop - first and not bool(is_of_process.any())
