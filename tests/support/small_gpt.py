"""A small GPT whose forward and backward give the same bits in each run, on a CUDA device too."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.tiny import TinyModel


class Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        # Written out: the fused kernels' backward is not deterministic.
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(width // 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, -math.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGpt(TinyModel):
    """TinyModel with attention."""

    def __init__(self) -> None:
        super().__init__(width=64, num_blocks=5)
        self.blocks = nn.ModuleList(Attention(64) for _ in range(5))
