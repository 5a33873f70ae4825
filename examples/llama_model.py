"""A Llama-shaped decoder in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LlamaSize:
    """Depth, width, heads and the widths of the feed-forward and of the vocabulary."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    hidden_width: int
    vocab_size: int


SIZES = {
    "micro": LlamaSize(2, 64, 4, 2, 128, 256),
    "1b": LlamaSize(16, 2048, 32, 8, 8192, 32000),
    "7b": LlamaSize(32, 4096, 32, 32, 11008, 32000),
    "13b": LlamaSize(40, 5120, 40, 40, 13824, 32000),
    "30b": LlamaSize(60, 6656, 52, 52, 17920, 32000),
}


def num_params(size: LlamaSize) -> int:
    """Return the parameters of a `Llama` of this size."""
    kv_width = size.width // size.num_heads * size.num_kv_heads
    per_block = 2 * size.width * (size.width + kv_width) + 3 * size.width * size.hidden_width + 2 * size.width
    return size.num_layers * per_block + 2 * size.vocab_size * size.width + size.width


def size_with(max_params: int) -> LlamaSize:
    """Return the largest size of a family (7b and 13b are of it) with at most so many parameters."""
    vocab_size = 32000 if max_params >= 200_000_000 else 1024
    sizes = (_sized(width, max_params, vocab_size) for width in range(64, 16384, 64))
    fitting = [size for size in sizes if size is not None]
    if not fitting:
        raise ValueError(
            f"no size has {max_params:,} parameters or a little less; for all from 800K to 600B there is one"
        )
    return max(fitting, key=num_params)


def size_of_at_least(min_params: int, *, vocab_size: int) -> LlamaSize:
    """Return the smallest size of the same family that has so many parameters."""
    sizes = []
    for width in range(64, 16384, 64):
        largest = _sized(width, min_params - 1, vocab_size)  # one more layer is enough
        if largest is not None:
            sizes.append(replace(largest, num_layers=largest.num_layers + 1))
    if not sizes:
        raise ValueError(
            f"no size has {min_params:,} parameters or a little more: from 1M to 300B there is one"
        )
    return min(sizes, key=num_params)


def shape_of(width: int, num_layers: int, *, vocab_size: int) -> LlamaSize:
    """Return the shape with the family's heads and feed-forward."""
    num_heads, hidden_width = width // _head_width(width), -(-8 * width // 3 // 256) * 256
    return LlamaSize(num_layers, width, num_heads, num_heads, hidden_width, vocab_size)


def _head_width(width: int) -> int:
    return 128 if width >= 1024 else 64


def _sized(width: int, max_params: int, vocab_size: int) -> LlamaSize | None:
    """Return a size with about one layer per 128 of width, at most so large; None when that is no such shape."""
    if width % _head_width(width):
        return None
    base = num_params(shape_of(width, 0, vocab_size=vocab_size))
    num_layers = (max_params - base) // (num_params(shape_of(width, 1, vocab_size=vocab_size)) - base)
    usual = max(2, width // 128)
    if not usual <= num_layers <= usual + max(2, usual // 2):
        return None
    return shape_of(width, num_layers, vocab_size=vocab_size)


class RMSNorm(nn.Module):
    """Root mean square normalisation with a learned gain (Zhang & Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, eps=1e-6)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021) to (batch, heads, seq, head width); angles (seq, head width / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm: (batch, seq, width) -> the same shape."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_width = size.width // size.num_heads
        kv_width = self.head_width * size.num_kv_heads
        self.attention_norm = RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.output = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = RMSNorm(size.width)
        self.gate = nn.Linear(size.width, size.hidden_width, bias=False)
        self.up = nn.Linear(size.width, size.hidden_width, bias=False)
        self.down = nn.Linear(size.hidden_width, size.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, seq, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, seq, -1, self.head_width).transpose(1, 2)

        normed = self.attention_norm(x)
        query = rotate(heads(self.query(normed)), angles)
        key = rotate(heads(self.key(normed)), angles)
        mixed = F.scaled_dot_product_attention(
            query, key, heads(self.value(normed)), is_causal=True, enable_gqa=True
        )
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """tokens (batch, seq) and targets of the same shape -> mean loss in nats per token."""

    def __init__(self, size: LlamaSize, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.size = size
        self.checkpoint_activations = checkpoint_activations
        self.embed = nn.Embedding(size.vocab_size, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        half = self.size.width // self.size.num_heads // 2
        frequencies = 10000.0 ** (-torch.arange(half, device=tokens.device) / half)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequencies
        for block in self.blocks:
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, angles, use_reentrant=False)
            else:
                x = block(x, angles)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
