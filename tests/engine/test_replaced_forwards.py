"""A script puts another forward on modules of an offloaded model, or on their classes, or takes its own away."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import offloadzero
from tests.support.cases import each_pair
from tests.support.plain_form import final_weights, make_model, make_optimizer, plain_config, plain_steps
from tests.support.tiny import Block, TinyModel, tokens


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


def run(case: str, config: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
    """Train, put the forwards in place, train, make the model an ordinary one, evaluate it."""
    change_block, change_model = CASES[case]
    model = make_model()
    optimizer: Any = make_optimizer(model)
    if config is not None:
        _, optimizer = offloadzero.offload(model, optimizer, config)
    losses = plain_steps(model, optimizer, range(2))
    forwards = [
        (module, change(module))
        for module, change in ((model.blocks[1], change_block), (model, change_model))
        if change is not None
    ]
    losses += plain_steps(model, optimizer, range(3))
    if config is not None:
        optimizer.restore_model()
    for module, forward in forwards:
        assert module.__dict__.get("forward") is forward
    losses += [model(tokens(seed)).item() for seed in range(2)]
    return losses, final_weights(model)


@pytest.mark.parametrize(
    ("case", "placement", "checkpointed"), each_pair(CASES, ["host", "nvme"], [False, True])
)
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


class OwnBlock(Block):
    """A block whose class a test may change."""


class OwnModel(TinyModel):
    """A model of them, of which the same is true."""

    def __init__(self) -> None:
        super().__init__(width=16)
        for block in self.blocks:
            block.__class__ = OwnBlock


class LoudBlock(OwnBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.2


class StaticBlock(OwnBlock):
    forward = staticmethod(lambda x: x * 0.7)


class Halves:
    """An object that is called, and that a class does not make a method of."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def another_class(model: OwnModel, kind: type[OwnBlock]) -> Iterator[None]:
    model.blocks[1].__class__ = kind
    yield
    model.blocks[1].__class__ = OwnBlock


def another_forward(patched: type[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    with mock.patch.object(patched, "forward", forward):
        yield


CHANGES_OF_CLASSES: dict[str, Callable[[OwnModel], Iterator[None]]] = {
    "the block's class": lambda _: another_forward(OwnBlock, lambda self, x: x + self.down(self.up(x))),
    "the model's class": lambda _: another_forward(OwnModel, lambda self, t: TinyModel.forward(self, t) * 2),
    "another class": lambda model: another_class(model, LoudBlock),
    "a class without self": lambda model: another_class(model, StaticBlock),
    "an object on the block's class": lambda _: another_forward(OwnBlock, Halves()),
}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", CHANGES_OF_CLASSES)
def test_what_a_script_makes_of_a_class_is_seen(name: str, checkpointed: bool, tmp_path: Path) -> None:
    def losses(config: dict[str, Any] | None) -> list[float]:
        torch.manual_seed(1)
        model = OwnModel()
        optimizer: Any = make_optimizer(model)
        if config is not None:
            _, optimizer = offloadzero.offload(model, optimizer, config)
        found = plain_steps(model, optimizer, range(2))
        for _ in CHANGES_OF_CLASSES[name](model):
            found += plain_steps(model, optimizer, range(2))
            found.append(model(tokens(7)).item())
        found += plain_steps(model, optimizer, range(2))
        if config is not None:
            optimizer.restore_model()
        for _ in CHANGES_OF_CLASSES[name](model):
            found.append(model(tokens(7)).item())
        return found

    config = plain_config("nvme", tmp_path)
    if checkpointed:
        config["offloadzero"]["activation_checkpoints"] = {}
    assert losses(config) == pytest.approx(losses(None), rel=1e-5)


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
