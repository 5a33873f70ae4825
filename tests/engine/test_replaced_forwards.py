"""A script puts another forward on modules of an offloaded model, or takes its own away: both stay as they are."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from tests.support.plain_form import final_weights, make_model, make_optimizer, plain_config
from tests.support.tiny import TinyModel, tokens


def around(module: nn.Module) -> Any:
    own = module.forward

    def forward(*args: Any) -> Any:
        return own(*args) * 0.9

    module.forward = forward
    return forward


def instead(module: nn.Module) -> Any:
    forward = types.MethodType(lambda _, x: x * 1.1, module)
    module.forward = forward
    return forward


def nothing_again(module: nn.Module) -> None:
    around(module)
    del module.forward


# What happens to a block, and to the model.
CASES: dict[str, tuple[Callable[[nn.Module], Any] | None, Callable[[nn.Module], Any] | None]] = {
    "around a block": (around, None),
    "in a block's place": (instead, None),
    "taken away from a block": (nothing_again, None),
    "around the model": (None, around),
    "taken away from the model": (None, nothing_again),
    "around both": (around, around),
}


def steps(model: TinyModel, optimizer: Any, num_steps: int) -> list[float]:
    losses = []
    for seed in range(num_steps):
        loss = model(tokens(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(case: str, config: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
    """Train, put the forwards in place, train, make the model an ordinary one, evaluate it."""
    change_block, change_model = CASES[case]
    model = make_model()
    optimizer: Any = make_optimizer(model)
    if config is not None:
        _, optimizer = offloadzero.offload(model, optimizer, config)
    losses = steps(model, optimizer, 2)
    forwards = [
        (module, change(module))
        for module, change in ((model.blocks[1], change_block), (model, change_model))
        if change is not None
    ]
    losses += steps(model, optimizer, 3)
    if config is not None:
        optimizer.restore_model()
    for module, forward in forwards:
        assert module.__dict__.get("forward") is forward
    losses += [model(tokens(seed)).item() for seed in range(2)]
    return losses, final_weights(model)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("case", CASES)
def test_what_a_script_makes_of_a_forward_stays(
    case: str, placement: str, checkpointed: bool, tmp_path: Path
) -> None:
    config = plain_config(placement, tmp_path)
    if checkpointed:
        config["offloadzero"]["activation_checkpoints"] = {}
    losses, weights = run(case, config)
    expected_losses, expected_weights = run(case, None)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected_weights[name], rtol=1e-4, atol=1e-5)


def test_a_forward_that_is_kept_keeps_no_engine(tmp_path: Path) -> None:
    model = make_model()
    _, optimizer = offloadzero.offload(model, make_optimizer(model), plain_config("host", tmp_path))
    runtime = weakref.ref(optimizer.runtime)
    around(model.blocks[0])
    around(model)
    optimizer.restore_model()
    del optimizer
    gc.collect()
    assert runtime() is None
