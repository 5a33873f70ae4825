"""A byte-level GPT in plain PyTorch and its training text. This file knows nothing about offloading."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB_SIZE = 256  # every byte is a token
INIT_STD = 0.02
MAX_TEXT_BYTES = 32 * 1024 * 1024
MAX_HELD_OUT_BYTES = 512 * 1024
STDLIB = Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class GPTSize:
    """Depth, width and heads; a block has about 12 * width**2 parameters."""

    num_layers: int
    width: int
    num_heads: int


SIZES = {
    "tiny": GPTSize(4, 192, 6),
    "160m": GPTSize(12, 1024, 16),
    "400m": GPTSize(32, 1024, 16),
    "1b": GPTSize(20, 2048, 16),
    "7b": GPTSize(35, 4096, 32),
    "10b": GPTSize(50, 4096, 32),
    "13b": GPTSize(42, 5120, 40),
}


# Weights are initialised in `reset_parameters`, inside each module's own constructor: `zero.Init` may move
# a parameter to its home tier as soon as that constructor returns.
class Linear(nn.Linear):
    """`nn.Linear` with weights from N(0, 0.02) and zero bias."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` with weights from N(0, 0.02)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Block(nn.Module):
    """Pre-LayerNorm transformer block: (batch, seq, width) -> the same shape."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = Linear(size.width, 3 * size.width)
        self.proj = Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = Linear(size.width, 4 * size.width)
        self.down = Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, seq, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(batch, seq, width))
        return projected


class GPT(nn.Module):
    """Decoder over bytes. `seq_len` is the longest input; `tied` shares the embedding with the head."""

    def __init__(
        self, size: GPTSize, *, seq_len: int, tied: bool = True, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        self.tokens = Embedding(VOCAB_SIZE, size.width)
        self.positions = Embedding(seq_len, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = Linear(size.width, VOCAB_SIZE, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, seq, 256) for tokens (batch, seq) int64; with `targets`, the mean loss in nats."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def num_params(size: GPTSize, *, seq_len: int, tied: bool = True) -> int:
    """Return the parameters of `GPT(size, ...)`, without building it."""
    with torch.device("meta"):
        model = GPT(size, seq_len=seq_len, tied=tied)
    return sum(parameter.numel() for parameter in model.parameters())


class Text:
    """Bytes to train on, and a held-out tail (a tenth, at most 512 KiB) for validation."""

    def __init__(self, data: bytes) -> None:
        if not data:
            raise ValueError("there is no text")
        num_held_out = min(len(data) // 10, MAX_HELD_OUT_BYTES)
        everything = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.train, self.held_out = everything.split([len(data) - num_held_out, num_held_out])

    @classmethod
    def load(cls, path: Path | None = None) -> Text:
        """Load a file, or all files of a directory, or by default the .py files of Python's standard library."""
        if path is None:
            return cls(read_files(stdlib_sources()))
        if not path.exists():
            raise FileNotFoundError("it does not exist")
        return cls(read_files(sorted(path.rglob("*")) if path.is_dir() else [path]))

    def batch(self, *, batch_size: int, seq_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random windows of the training part: tokens and targets, each (batch_size, seq_len) int64."""
        self._expect_window(self.train, seq_len)
        starts = torch.randint(len(self.train) - seq_len, (batch_size,), generator=generator)
        return windows(self.train, starts.tolist(), seq_len)

    def validation_batches(
        self, *, batch_size: int, seq_len: int, num_batches: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same evenly spaced windows of the held-out part every time."""
        self._expect_window(self.held_out, seq_len)
        spacing = (len(self.held_out) - seq_len) / (num_batches * batch_size)
        for first in range(0, num_batches * batch_size, batch_size):
            starts = [int((first + i) * spacing) for i in range(batch_size)]
            yield windows(self.held_out, starts, seq_len)

    @staticmethod
    def _expect_window(data: Tensor, seq_len: int) -> None:
        if len(data) <= seq_len:
            raise ValueError(f"{len(data)} bytes of text are too few for sequences of {seq_len} bytes")


def windows(data: Tensor, starts: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """Return tokens at `starts` and, one byte later, their targets: each (len(starts), seq_len) int64."""
    rows = torch.stack([data[start : start + seq_len + 1] for start in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def stdlib_sources(folder: Path = STDLIB) -> Iterator[Path]:
    """Yield the standard library's own sources in sorted order, without installed packages.

    A folder is read as its files are asked for: the first megabyte needs few of them.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            # Not even looked at: there are several times as many files in them.
            if path.name not in ("site-packages", "dist-packages"):
                yield from stdlib_sources(path)
        elif path.suffix == ".py":
            yield path


def read_files(paths: Iterable[Path], *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the files one after another, up to `max_bytes`."""
    data = bytearray()
    for path in paths:
        if path.is_file():
            data += path.read_bytes()
        if len(data) >= max_bytes:
            break
    return bytes(data[:max_bytes])
