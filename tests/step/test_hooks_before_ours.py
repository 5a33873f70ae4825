"""Hooks that a script has put on parameters before offload(), called before ours; and other threads that look."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.memory import arena
from offloadzero.memory.device import CpuDevice
from offloadzero.step import record_gradient
from offloadzero.step.record_gradient import RecordGradient, copy_waiting
from offloadzero.update.records import make_record
from offloadzero.update.specs.adam import ADAM
from tests.support.models import Block, Stack, features
from tests.support.training import make_config


def test_a_kept_gradient_keeps_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small gradient of each block is the script's own: the rest of the block does not wait for it."""
    num_temporary = 0
    make = arena.PooledBuffer.__init__

    def counted(self: arena.PooledBuffer, buffer: Tensor, *, temporary: bool = False) -> None:
        nonlocal num_temporary
        num_temporary += temporary
        make(self, buffer, temporary=temporary)

    monkeypatch.setattr(arena.PooledBuffer, "__init__", counted)

    def weights(offloads: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = Stack(Block, 8)
        kept: dict[int, Tensor | None] = {}
        for number, block in enumerate(model.blocks):  # type: ignore[arg-type,union-attr]
            block.down.bias.register_post_accumulate_grad_hook(
                lambda param, number=number: kept.__setitem__(number, param.grad)
            )
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if offloads:
            config = make_config("host", tmp_path, dtype=None)
            del config["optimizer"], config["gradient_clipping"]
            model, optimizer = offloadzero.offload(model, optimizer, config)
        for seed in range(3):
            model(features(seed)).backward()
            for grad in kept.values():
                assert grad is not None
                grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found = {name: value.clone() for name, value in model.state_dict().items()}
        if offloads:
            optimizer.close()  # type: ignore[attr-defined]
        return found

    expected = weights(offloads=False)
    for name, value in weights(offloads=True).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    assert num_temporary == 0


def test_what_comes_while_others_are_copied_is_copied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the script's that looks at a gradient copies what waits, while autograd's adds another."""
    params = [(f"p{number}", nn.Parameter(torch.zeros(4)), 0) for number in range(3)]
    gradient = RecordGradient(make_record(0, "unit", torch.float32, params, spec=ADAM))
    gradient.targets = tuple(torch.zeros(4) for _ in params)
    gradient.waiting = [(0, torch.ones(4)), (1, torch.ones(4))]
    copy = record_gradient.foreach_copy

    def copied(targets: list[Tensor], grads: list[Tensor]) -> None:
        if len(targets) == 2:
            gradient.waiting.append((2, torch.ones(4)))
        copy(targets, grads)

    monkeypatch.setattr(record_gradient, "foreach_copy", copied)
    copy_waiting(gradient, CpuDevice())
    assert [number for number, _ in gradient.waiting] == [2]
    copy_waiting(gradient, CpuDevice())
    assert not gradient.waiting
    assert all(bool((target == 1).all()) for target in gradient.targets)


def test_what_could_not_be_copied_still_waits() -> None:
    params = [("p", nn.Parameter(torch.zeros(4)), 0)]
    gradient = RecordGradient(make_record(0, "unit", torch.float32, params, spec=ADAM))
    gradient.targets = (torch.zeros(3),)
    gradient.waiting = [(0, torch.ones(4))]
    with pytest.raises(RuntimeError, match="size of tensor"):
        copy_waiting(gradient, CpuDevice())
    gradient.targets = (torch.zeros(4),)
    copy_waiting(gradient, CpuDevice())
    assert bool((gradient.targets[0] == 1).all())
