"""A model that is awkward to divide, and its training on one rank of several (or on the only one)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadzero
from tests.support.training import make_config, merge, one_step

VOCABULARY = 61
WIDTH = 17
GLOBAL_BATCH = 6


class OddBlock(nn.Module):
    """A block whose sizes no number of ranks divides."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ExpertBlock(nn.Module):
    """Two experts of which each sequence takes one: ranks whose data differ use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        rows = (self.experts[number](row) for row, number in zip(x, which.tolist(), strict=True))
        return x + torch.stack(list(rows))


class OddModel(nn.Module):
    """Tied, frozen and unused parameters; units of 511 and 4097 elements and of fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([OddBlock(31), OddBlock(13), ExpertBlock(), OddBlock(40)])
        self.wide = nn.Linear(WIDTH, 241, bias=False)  # 4,097 elements
        self.narrow = nn.Linear(241, WIDTH, bias=False)
        self.odd = nn.Parameter(torch.full((511,), 0.5))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(33))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight
        self.blocks[1].up.requires_grad_(False)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens[:, :-1])
        x = x + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x, tokens[:, 0] % 2)
        x = x + self.narrow(torch.tanh(self.wide(x))) * self.scale + self.odd.sum() / 511
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def micro_batch(seed: int, rank: int, world_size: int) -> Tensor:
    """This rank's part of a global micro batch."""
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, 8), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = torch.arange(GLOBAL_BATCH) * 2 // GLOBAL_BATCH  # experts by rank, and at times one for all
    if seed % 3 == 0:
        tokens[:, 0] = 0
    return tokens.chunk(world_size)[rank]


def config_of(
    placement: str, stage: int, directory: Path, *, world_size: int = 1, accumulation: int = 1, **over: Any
) -> dict[str, Any]:
    """A configuration for OddModel, of which the states are at `placement`, and, at stages 0 and 3, the parameters."""
    base = make_config(placement, directory, clipping=1.0, accumulation=accumulation, dtype=None, lr=3e-3)
    base["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // world_size
    base["zero_optimization"]["stage"] = stage
    base["offloadzero"]["units"]["patterns"] = ["blocks.?"]
    if stage in (1, 2) and placement != "resident":
        base["offloadzero"]["placement"] = {"states": placement}
    return merge(base, over)


def make_odd_model(seed: int = 0) -> OddModel:
    torch.manual_seed(seed)
    return OddModel()


def train(engine: offloadzero.Engine, rank: int, world_size: int, *, num_steps: int) -> list[float]:
    """The losses of this rank's micro batches."""
    return [
        one_step(engine, micro_batch(seed, rank, world_size))
        for seed in range(num_steps * engine.gradient_accumulation_steps())
    ]


def digest(values: dict[str, Tensor]) -> dict[str, str]:
    """A hash of each tensor's bytes."""
    return {
        name: hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, value in values.items()
    }


def engine_of(config: dict[str, Any], *, seed: int = 0, **keys: Any) -> offloadzero.Engine:
    engine, *_ = offloadzero.initialize(model=make_odd_model(seed), config=config, **keys)
    return engine


def said_of(call: Callable[[], Any]) -> str:
    """The error that `call` raises, in words."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def global_losses(by_rank: list[list[float]]) -> list[float]:
    """The losses of the global micro batches."""
    return [sum(losses) / len(losses) for losses in itertools.zip_longest(*by_rank)]
