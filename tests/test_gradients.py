"""Gradients that arrive in part: parameters that only some micro batches use, steps without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import assert_same, make_config, run_engine, run_plain, worst_relative_difference

WIDTH = 33


class Either(nn.Module):
    """One of two layers, chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in "ab"})

    def forward(self, x: Tensor, choice: str) -> Tensor:
        return x + self.layers[choice](x)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Either() for _ in range(2))

    def forward(self, x: Tensor, choice: str) -> Tensor:
        for block in self.blocks:
            x = block(x, choice)
        return x.float().square().mean()


def alternate(engine: Any) -> list[float]:
    """Each micro batch uses the other layer of each block."""
    losses = []
    for seed, choice in enumerate("ababbaab"):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = engine(x.bfloat16(), choice)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("grad", ["device", "host", "nvme"])
def test_micro_batches_that_use_different_parameters_of_a_unit_add_up(grad: str, tmp_path: Path) -> None:
    def config(where: str) -> Any:
        given = make_config("host", tmp_path, accumulation=2, clipping=1.0)
        given["offloadzero"]["placement"] = {
            **dict.fromkeys(("param", "master", "exp_avg", "exp_avg_sq"), "host"),
            "grad": where,
        }
        return given

    outcome = run_engine(Choosing, alternate, config(grad))
    assert_same(
        outcome,
        run_engine(Choosing, alternate, make_config("resident", tmp_path, accumulation=2, clipping=1.0)),
    )
    plain = run_plain(Choosing, alternate, config(grad))
    assert worst_relative_difference(outcome.losses, plain.losses) < 0.01
