"""Tensors that lie in a file, or piece by piece in several: where their bytes are, and how they are read.

A tensor is read in pieces, so that none of them, be it an embedding of gigabytes, is ever in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from offloadzero.checkpoint.format.safetensors_file import read_into
from offloadzero.errors import CheckpointError

PIECE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class FileExtent:
    """Bytes of a file."""

    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor whose elements, in the order of a contiguous one, are those of its extents one after another."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    extents: tuple[FileExtent, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements."""
        return self.shape.numel() * self.dtype.itemsize

    def pieces(self, *, piece_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
        """Yield the elements in flat tensors of at most `piece_bytes`. CheckpointError names tensor and file."""
        for extent in self.extents:
            try:
                file = extent.file.open("rb", buffering=0)
            except OSError as error:
                raise CheckpointError(f"{extent.file}: {self.name}: {error.strerror}") from error
            with file:
                for start in range(0, extent.num_bytes, piece_bytes):
                    piece = torch.empty(
                        min(piece_bytes, extent.num_bytes - start), dtype=torch.uint8, device="cpu"
                    )
                    read_into(file, extent.offset + start, memoryview(piece.numpy().data), what=self.name)
                    yield piece.view(self.dtype)
