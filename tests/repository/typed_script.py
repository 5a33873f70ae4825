"""What a user writes with types, for `mypy --strict` in `make lint`: the types of the public names are seen by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import offloadzero


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def plain_loop(batches: DataLoader[Tensor]) -> Net:
    model = Net()
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    model, optimizer = offloadzero.offload(model, torch.optim.AdamW(model.parameters()), config)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert_type(optimizer.last_step_report().waits_s, dict[str, float])
    optimizer.restore_model()
    return model


def script_for_deepspeed(batches: DataLoader[Tensor]) -> None:
    with offloadzero.zero.Init(config_dict_or_path="config.json"):
        model = Net()
    engine, optimizer, _, _ = offloadzero.initialize(model=model, config="config.json")
    assert_type(engine, offloadzero.Engine)
    assert_type(optimizer, offloadzero.OffloadedOptimizer | None)
    for batch in batches:
        engine.backward(engine(batch).sum())
        engine.step()
    with offloadzero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        nn.init.zeros_(next(model.parameters()))
    assert_type(engine.get_global_grad_norm(), float | None)
    assert_type(engine.memory_table(), str)
    engine.save_checkpoint("checkpoints", client_state={"step": 3})
    engine.close()


def mistakes() -> str:
    try:
        assert_type(offloadzero.load_config("config.json"), offloadzero.OffloadConfig)
    except offloadzero.ConfigError as error:
        return f"{error.key}: {error.allowed}, {error.nearest}"
    except offloadzero.OffloadError as error:
        return str(error)
    return ""
