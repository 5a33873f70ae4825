"""Buffers and frozen parameters of unusual forms and dtypes are the first rank's on all ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from offloadzero import initialize
from tests.support.ranks import run_ranks
from tests.support.sharded import config_of

FROZEN = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.bfloat16)


class Quantized(nn.Module):
    """A unit that trains in part."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.lin = nn.Linear(40, 40)
        self.frozen = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + self.frozen.float().mean()


class Forms(nn.Module):
    """Its values follow from `first`."""

    def __init__(self, first: int) -> None:
        super().__init__()
        torch.manual_seed(first)
        values = (torch.arange(1001) + first) % 7
        self.blocks = nn.ModuleList(Quantized(values.to(dtype)) for dtype in FROZEN)
        self.register_buffer("expanded", torch.full((1,), float(first)).expand(4))
        self.register_buffer("sparse", (torch.eye(4) * (first + 1)).to_sparse(), persistent=False)
        self.register_buffer("strided", torch.full((4, 4), float(first)).t()[:, ::2])
        with torch.inference_mode():
            self.register_buffer("inference", torch.full((4,), float(first)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean() + self.expanded.sum()

    def values(self) -> list[list[float]]:
        """All but the trained ones, as lists."""
        buffers = [self.expanded, self.sparse.to_dense(), self.strided, self.inference]
        frozen = [block.frozen.data for block in self.blocks]
        return [value.float().flatten().tolist() for value in [*buffers, *frozen]]


def start(rank: int, directory: str) -> list[list[list[float]]]:
    """By stage."""
    found = []
    for stage in (1, 3):
        config = config_of("host", stage, Path(directory), world_size=2)
        config["offloadzero"]["units"]["patterns"] = ["blocks.?"]
        engine, *_ = initialize(model=Forms(first=3 + rank), config=config)
        loss = engine(torch.ones(2, 40))
        assert abs(loss.item() - Forms(first=3)(torch.ones(2, 40)).item()) < 1e-5 * loss.item()
        engine.backward(loss)
        engine.step()
        module = engine.module
        assert isinstance(module, Forms)
        found.append(module.values())
        engine.close()
    return found


def test_they_are_the_first_ranks(tmp_path: Path) -> None:
    expected = Forms(first=3).values()
    assert expected != Forms(first=4).values()
    for by_stage in run_ranks(start, 2, tmp_path, str(tmp_path)):
        assert by_stage == [expected] * 2
