"""Leases find room wherever others lie: what the plan has accepted does not fail for want of room later.

Models whose forward and backward need more than one record at once, with the smallest leases there are.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offloadzero.memory.arena import ALIGN_BYTES, room_for
from tests.streaming.loops import steps
from tests.support.models import WIDTH, Block, Stack, features
from tests.support.training import assert_same, make_config, run_engine

NUM_RANDOM = int(os.environ.get("OFFLOADZERO_TEST_LEASES", "6"))


@torch.no_grad()
def evaluate(engine: Any, seed: int) -> list[float]:
    return [engine(features(seed + 10)).item()]


loop = steps(lambda engine, seed: engine(features(seed)), 3, after=evaluate)


def check(make_model: Callable[[], nn.Module], directory: Path, **options: Any) -> None:
    expected = run_engine(make_model, loop, make_config("resident", directory, dtype=None, **options))
    for placement in ("host", "nvme"):
        assert_same(
            run_engine(make_model, loop, make_config(placement, directory, dtype=None, **options)), expected
        )


# --- how much room ---


def fits_wherever_the_others_lie(
    sizes: tuple[int, ...], room: int, taken: frozenset[int] = frozenset()
) -> bool:
    if not sizes:
        return True
    places = [frozenset(range(first, first + sizes[0])) for first in range(room - sizes[0] + 1)]
    free = [place for place in places if not place & taken]
    return bool(free) and all(fits_wherever_the_others_lie(sizes[1:], room, taken | place) for place in free)


SIZES = [*itertools.product((1, 2, 3), repeat=3), (), (4,), (3, 3, 1, 1), (4, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_leases_find_room_in_the_least_that_is_enough(sizes: tuple[int, ...]) -> None:
    room = room_for(size * ALIGN_BYTES for size in sizes) // ALIGN_BYTES
    assert fits_wherever_the_others_lie(sizes, room)
    assert not sizes or not fits_wherever_the_others_lie(sizes, room - 1)


# --- units of several dtypes ---


class _Quantized(torch.autograd.Function):
    """x (q + b a), whose backward looks at weights of three dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, q, a, b)
        return F.linear(x, q / 128 - 1) + x @ a.t().float() @ b.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, q, a, b = ctx.saved_tensors
        inner = grad @ b
        grad_x = grad @ (q / 128 - 1) + inner @ a.float()
        return grad_x, None, (inner.t() @ x).to(a.dtype), grad.t() @ (x @ a.t().float())


class QuantizedBlock(nn.Module):
    """A frozen base in bytes, adapters in bf16 and fp32 (QLoRA's)."""

    def __init__(self, rank: int, *, fused: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.a = nn.Parameter(torch.randn(rank, WIDTH).bfloat16() * 0.1)
        self.b = nn.Parameter(torch.randn(WIDTH, rank) * 0.1)
        self.q = nn.Parameter(torch.randint(255, (WIDTH, WIDTH), dtype=torch.uint8), requires_grad=False)
        self.more = nn.Parameter(torch.randint(255, (20_000,), dtype=torch.uint8), requires_grad=False)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x) * self.scale
        if self.fused:
            h = _Quantized.apply(h, self.q, self.a, self.b)  # type: ignore[no-untyped-call]
        else:
            h = F.linear(h, self.q / 128 - 1) + F.linear(F.linear(h, self.a.float()), self.b)
        return x + h * (self.more[-1] / 255)


class Quantized(Stack):
    """Blocks of which each has records of three dtypes and other sizes."""

    def __init__(self, ranks: tuple[int, ...], *, fused: bool, checkpointed: bool) -> None:
        made = iter(ranks)
        super().__init__(lambda: QuantizedBlock(next(made), fused=fused), len(ranks))
        self.checkpointed = checkpointed

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_units_of_several_dtypes(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    ranks = tuple(draw.choice([1, 8, 50, 200, 400]) for _ in range(draw.randint(2, 5)))
    fused, checkpointed, clipping = seed % 2 == 0, seed % 3 == 0, draw.choice([0.0, 0.5])
    check(lambda: Quantized(ranks, fused=fused, checkpointed=checkpointed), tmp_path, clipping=clipping)


# --- units inside and beside others ---


class LooksAtBlocks(Stack):
    """Looks at a block's dtype first, as models of transformers do, and at a weight of a later block before each."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.blocks[0].norm.weight.dtype))

    def run_blocks(self, x: Tensor) -> Tensor:
        for block, other in zip(self.blocks, reversed(self.blocks), strict=True):
            x = block(x * other.norm.weight.mean())
        return x


class SharingBlock(Block):
    """Calls a module that all blocks and the model share."""

    shared: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(super().forward(x))


class SharedModule(Stack):
    """The shared one is no part of any unit: it belongs to the model, which names it first."""

    def __init__(self) -> None:
        super().__init__(SharingBlock)
        blocks = self._modules.pop("blocks")
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = blocks
        for block in self.blocks:
            block.shared = self.shared


class WeightFirst(nn.Module):
    """Backward of the product takes the weight first, then the input, which a checkpoint computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class CheckpointedTogether(Stack):
    """One checkpoint around all blocks: the last weight is there while the first block computes again."""

    def __init__(self) -> None:
        super().__init__(WeightFirst)

    def run_blocks(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().run_blocks, x, use_reentrant=False)
        return result


class _Product(torch.autograd.Function):
    """x (w v): one node of backward for weights of two units."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, v)
        return x @ (w @ v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (grad,) = grads
        x, w, v = ctx.saved_tensors
        outer = x.t() @ grad
        return grad @ (w @ v).t(), outer @ v.t(), w.t() @ outer


class WeightsOfTwoUnits(Stack):
    """Products of neighbours' weights, in the model's own forward."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH))

    def run_blocks(self, x: Tensor) -> Tensor:
        for one, other in itertools.pairwise(self.blocks):
            x = other(one(x) + _Product.apply(x, one.weight, other.weight))  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("make_model", [LooksAtBlocks, SharedModule, CheckpointedTogether, WeightsOfTwoUnits])
def test_units_beside_others(make_model: type[nn.Module], clipping: float, tmp_path: Path) -> None:
    check(make_model, tmp_path, clipping=clipping)
