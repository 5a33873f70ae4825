"""A model of matrices of odd shapes, and its training by torch.optim.Muon, offloaded or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 33


class Matrices(nn.Module):
    """Wide, tall, square ones, and a row: 33 x 65, 65 x 33, 33 x 33, 511 x 33, 1 x 511. `mixed`: others as well."""

    def __init__(self, *, mixed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, WIDTH) if mixed else None
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *((nn.LayerNorm(WIDTH),) if mixed else ()),
                nn.Linear(WIDTH, 65, bias=mixed),
                nn.Tanh(),
                nn.Linear(65, WIDTH, bias=False),
            )
            for _ in range(2)
        )
        self.square = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 511, bias=False)
        self.row = nn.Linear(511, 1, bias=mixed)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (self.row(torch.tanh(self.up(self.square(hidden)))).float() - 1).pow(2).mean()


def matrices(*, mixed: bool = False, seed: int = 1) -> Matrices:
    torch.manual_seed(seed)
    return Matrices(mixed=mixed)


def batch_of(seed: int, *, mixed: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if mixed:
        return torch.randint(0, 29, (4, 6), generator=generator)
    return torch.randn(8, WIDTH, generator=generator).to(dtype)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that are Muon's by DeepSpeed's rule, and the others."""
    muons = {n: p.ndim >= 2 and "embed" not in n and "lm_head" not in n for n, p in model.named_parameters()}
    named = dict(model.named_parameters())
    return [p for n, p in named.items() if muons[n]], [p for n, p in named.items() if not muons[n]]


def take_steps(
    model: nn.Module,
    optimizers: list[Any],
    seeds: range,
    *,
    mixed: bool = False,
    micro_batches: int = 1,
    max_norm: float | None = None,
) -> list[float]:
    """The losses of torch's loop; each step has `micro_batches`."""
    losses = []
    for seed in seeds:
        for micro in range(micro_batches):
            loss = model(batch_of(seed * micro_batches + micro, mixed=mixed)) / micro_batches
            loss.backward()
            losses.append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return losses
