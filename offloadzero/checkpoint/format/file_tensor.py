"""Tensors that lie in a file, or piece by piece in several: where their bytes are, and how they are read.

A tensor is read in pieces, so that none of them, be it an embedding of gigabytes, is ever in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from offloadzero.arithmetic.device_math import join_master
from offloadzero.checkpoint.format.safetensors_file import read_into
from offloadzero.errors import CheckpointError

_PIECE_ELEMENTS = 4 * 1024 * 1024


@dataclass(frozen=True)
class FileExtent:
    """Bytes of a file."""

    file: Path
    offset: int
    num_bytes: int

    def behind(self, num_bytes: int) -> FileExtent:
        """What is left of it behind its first bytes."""
        return FileExtent(self.file, self.offset + num_bytes, self.num_bytes - num_bytes)

    def read(self, target: memoryview, what: str) -> None:
        """Fill `target` with its first bytes. CheckpointError names the file and `what` lies there."""
        try:
            file = self.file.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{self.file}: {what}: {error.strerror}") from error
        with file:
            read_into(file, self.offset, target, what=what)


@dataclass(frozen=True)
class FileTensor:
    """A tensor whose elements, in the order of a contiguous one, are those of its extents one after another."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    extents: tuple[FileExtent, ...]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the elements in flat tensors, all but the last of one size. CheckpointError names tensor and file."""
        rest = list(reversed(self.extents))
        for start in range(0, self.shape.numel(), _PIECE_ELEMENTS):
            num_elements = min(_PIECE_ELEMENTS, self.shape.numel() - start)
            piece = torch.empty(num_elements, dtype=self.dtype, device="cpu")
            target = memoryview(piece.view(torch.uint8).numpy().data)
            while target:
                extent = rest.pop()
                num_bytes = min(len(target), extent.num_bytes)
                extent.read(target[:num_bytes], self.name)
                target = target[num_bytes:]
                if num_bytes < extent.num_bytes:
                    rest.append(extent.behind(num_bytes))
            yield piece


@dataclass(frozen=True)
class MasterTensor(FileTensor):
    """The fp32 masters of bf16 parameters, which are in the extents, and their remainders, joined as they are read."""

    remainder: FileTensor

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the masters as `FileTensor.pieces` does."""
        params = FileTensor(self.name, torch.bfloat16, self.shape, self.extents)
        for param, remainder in zip(params.pieces(), self.remainder.pieces(), strict=True):
            yield join_master(param, remainder)
