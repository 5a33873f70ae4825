"""Small trainings with activation checkpoints by configuration, and forms of models for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from tests.support import models
from tests.support.cases import IN_FULL
from tests.support.models import Stack
from tests.support.training import Config, make_config, merge

ROWS = 97  # 4656 bytes in bf16: an input that moves
NUM_STEPS = 4 if IN_FULL else 3
TIERS = ("device", "host", "nvme")
AWAY = ("host", "nvme")


def features(seed: int) -> Tensor:
    return models.features(seed, rows=ROWS)


def loop(engine: Any) -> list[float]:
    losses = []
    for seed in range(NUM_STEPS * engine.gradient_accumulation_steps()):
        loss = engine(features(seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def config_with(tier: str | None, directory: Path, placement: str = "host", **options: Any) -> Config:
    config = make_config(placement, directory, **options)
    block = {} if tier is None else {"offloadzero": {"activation_checkpoints": {"tier": tier}}}
    return merge(config, block)


def make_engine(
    tier: str | None, directory: Path, make_model: Callable[[], nn.Module] = Stack, **options: Any
) -> Any:
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=make_model(), config=config_with(tier, directory, **options))
    return engine


class DropoutBlock(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.3)


class NestedInputs(models.Block):
    """Takes tensors inside tuples and dicts, integers, None, and a tensor that every block gets."""

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, more: dict[str, Any], none: None) -> Any:
        cos, sin = pair
        h = super().forward(x * cos + sin)
        picked = h.index_select(0, more["rows"]) * more["scale"]
        return {"x": h + more["bias"].t(), "extra": (picked.float().mean(), none)}


class NestedStack(Stack):
    def __init__(self) -> None:
        super().__init__(NestedInputs)

    def run_blocks(self, x: Tensor) -> Tensor:
        pair = (x.detach().cos(), x.sin())
        bias = (x * 0.5).t().contiguous()
        more = {"rows": torch.arange(5), "scale": 2, "bias": bias, "strided": x[:, ::2]}
        total = x.new_zeros(())
        for block in self.blocks:
            out = block(x, pair, more=more, none=None)
            x = out["x"]
            total = total + out["extra"][0]
        return x + total


class AroundStack(Stack):
    """The user's own checkpoint around two of our units."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        return last(third(checkpoint(lambda h: second(first(h)), x, use_reentrant=False)))


FORMS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Stack(DropoutBlock),
    "nested inputs": NestedStack,
    "blocks used twice": models.SharedBlocks,
    "a checkpoint inside": lambda: Stack(models.InnerCheckpointBlock),
    "a checkpoint around": AroundStack,
    "structured outputs": models.StructuredStack,
    "frozen front": models.FrozenFront,
    "frozen middle": models.FrozenMiddle,
    "lora": lambda: Stack(models.LoraBlock),
    "shared reader": models.SharedReader,
    "outputs without gradient": models.NoGradOutputs,
    "unused parameters": models.WithUnusedBlock,
}
