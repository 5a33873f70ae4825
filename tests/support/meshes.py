"""Models that ranks divide beside the data: by tensor parallelism, and into the stages of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.training import make_config, merge

VOCABULARY = 29
WIDTH = 16
INNER = 48
NUM_BLOCKS = 2
GLOBAL_BATCH = 4  # of a micro batch


class _Copied(torch.autograd.Function):
    """Megatron's f: the identity, whose backward adds up the gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduced(torch.autograd.Function):
    """Megatron's g: adds up what the ranks have; its backward is the identity."""

    @staticmethod
    def forward(_: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """A pre-norm MLP whose inner width the ranks of a group divide: a column-parallel and a row-parallel layer."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self._group = group
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        self.norm = nn.LayerNorm(WIDTH)
        whole = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        # Without values: the parts have those of the whole.
        self.up = nn.utils.skip_init(nn.Linear, WIDTH, INNER // size)
        self.down = nn.utils.skip_init(nn.Linear, INNER // size, WIDTH, bias=False)
        self.bias = nn.Parameter(whole[1].bias.detach().clone())  # added once, after the sum
        with torch.no_grad():
            self.up.weight.copy_(whole[0].weight.chunk(size)[rank])
            self.up.bias.copy_(whole[0].bias.chunk(size)[rank])
            self.down.weight.copy_(whole[1].weight.chunk(size, dim=1)[rank])
        if group is not None:
            for param in (self.up.weight, self.up.bias, self.down.weight):
                param.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self._group is None:
            return x + self.down(F.gelu(self.up(y))) + self.bias
        y = self.down(F.gelu(self.up(_Copied.apply(y, self._group))))
        return x + _Reduced.apply(y, self._group) + self.bias


DIVIDED = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # of a block: the dimension that is divided


class Model(nn.Module):
    """An embedding, blocks and a head. `first` and `last`: whether the stage has the embedding, and the head."""

    def __init__(self, group: Any = None, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        blocks = [Block(group) for _ in range(NUM_BLOCKS)]
        kept = blocks[: 1 if first and not last else None][1 if last and not first else 0 :]
        emb, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.emb = emb if first else None
        self.blocks = nn.ModuleList(kept)
        self.head = head if last else None
        self.recomputes = False  # the blocks' activations, in backward

    def forward(self, x: Tensor) -> Tensor:
        if self.emb is not None:
            x = self.emb(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x if self.head is None else self.head(x)


def make_model(group: Any = None, **which: Any) -> Model:
    """The same values in each part as in the whole model."""
    torch.manual_seed(0)
    return Model(group, **which)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch_of(number: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a data-parallel rank's part of a micro batch."""
    tokens = torch.randint(
        0, VOCABULARY, (GLOBAL_BATCH, 7), generator=torch.Generator().manual_seed(number)
    ).chunk(num_ranks)[rank]
    return tokens[:, :-1], tokens[:, 1:]


def config_of(
    placement: str, stage: int, directory: Path | str, *, num_ranks: int = 1, **over: Any
) -> dict[str, Any]:
    """A configuration under which gradients are clipped, for so many data-parallel ranks."""
    base = make_config(placement, directory, clipping=0.5, accumulation=2, dtype=None, lr=3e-3)
    base["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // num_ranks
    base["train_batch_size"] = 2 * GLOBAL_BATCH
    base["zero_optimization"]["stage"] = stage
    if stage in (1, 2) and placement != "resident":
        base["offloadzero"]["placement"] = {"states": placement}
    return merge(base, over)


def train(engine: Any, *, num_steps: int, first: int = 0) -> list[float]:
    """The losses of this rank's micro batches."""
    losses = []
    rank, num_ranks = engine.get_data_parallel_rank(), engine.dp_world_size
    num_micro = engine.gradient_accumulation_steps()
    for number in range(first * num_micro, (first + num_steps) * num_micro):
        inputs, targets = batch_of(number, rank, num_ranks)
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole_weights(by_tensor_rank: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Put the weights of the ranks of one tensor-parallel group together; what is not divided is the same on all."""
    whole = {}
    for name in by_tensor_rank[0]:
        parts = [torch.tensor(weights[name]) for weights in by_tensor_rank]
        dim = next((dim for suffix, dim in DIVIDED.items() if name.endswith(suffix)), None)
        if dim is None:
            assert all(torch.equal(part, parts[0]) for part in parts), name
        whole[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return whole
