"""torch.autocast over fp32 weights: the copies that it makes of them take no memory beside the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from tests.simulated.device import simulated

WIDTH, NUM_BLOCKS = 64, 6
COPY_BYTES = 2 * WIDTH * WIDTH  # of one weight


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return x.float().sum()


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("trains", [False, True], ids=["evaluation", "checkpoints"])
def test_copies_of_weights_go_with_their_unit(
    trains: bool, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps those of all units until the block of autocast ends."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "offloadzero": {"device": "cpu", "placement": placement, "nvme_path": str(tmp_path)},
    }
    with simulated(monkeypatch) as device:
        engine, *_ = offloadzero.initialize(model=Blocks(), config=config)
        x = torch.randn(2, WIDTH)
        before = device.memory.taken_bytes
        with torch.set_grad_enabled(trains), torch.autocast("cpu", torch.bfloat16):
            loss = engine(x)
            device.memory._collect()
            kept = device.memory.taken_bytes - before
        assert kept < 3 * COPY_BYTES
        if trains:
            engine.backward(loss)
            engine.step()
        engine.close()
