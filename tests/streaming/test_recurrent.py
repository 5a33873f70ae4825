"""Recurrent layers, whose weights torch would move together where cuDNN computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.backends.cudnn import rnn as cudnn_rnn

from tests.streaming.loops import take_inputs
from tests.support.models import WIDTH, Stack, features
from tests.support.training import assert_same, make_config, run_engine


def move_together(weights: Sequence[Tensor], *_: Any) -> None:
    """What cuDNN's function does: the parameters get other memory, one piece for all of them.

    It is C++, and asks no class of Python's for the values.
    """
    together = torch.cat([torch.ops.aten.clone.default(weight).reshape(-1) for weight in weights])
    for weight, part in zip(weights, together.split([weight.numel() for weight in weights]), strict=True):
        torch.ops.aten.set_.source_Tensor(weight, part.view(weight.shape))


class Recurrent(nn.Module):
    """Its forward asks for the fast form each time, as many models do."""

    flattens = True

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.flattens:
            self.cells.flatten_parameters()
        return x + self.cells(x.unsqueeze(0))[0].squeeze(0)


class OneRecurrent(Stack):
    """A layer that is a unit, in a model that is none: the weights are away where its forward asks."""

    flattens = True

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def run_blocks(self, x: Tensor) -> Tensor:
        if self.flattens:
            self.cells.flatten_parameters()
        return super().run_blocks(self.cells(x.unsqueeze(0))[0].squeeze(0))


def recurrent_stack() -> nn.Module:
    return Stack(Recurrent)


@pytest.fixture
def with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flatten_parameters()` does on the CPU what it does on CUDA, where the weights are those of cuDNN."""
    flatten = nn.GRU.flatten_parameters

    def flatten_as_there(module: nn.GRU) -> None:
        with monkeypatch.context() as there:
            there.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
            there.setattr(torch.backends.cudnn, "is_acceptable", lambda _: True)
            there.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
            there.setattr(torch, "_cudnn_rnn_flatten_weight", move_together)
            there.setattr(cudnn_rnn, "get_cudnn_mode", lambda _: 0)
            there.setattr(torch.cuda, "device_of", lambda _: nullcontext())
            flatten(module)

    monkeypatch.setattr(nn.GRU, "flatten_parameters", flatten_as_there)


train = take_inputs(features, 4)


@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
@pytest.mark.parametrize(
    ("make_model", "asking"),
    [(recurrent_stack, Recurrent), (OneRecurrent, OneRecurrent)],
    ids=["in the forward", "before it"],
)
def test_weights_stay_where_the_engine_has_them(
    make_model: Any, asking: Any, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a forward would go on with weights from before the step, in memory that no update writes."""
    config = make_config(placement, tmp_path, dtype=None)
    found = run_engine(make_model, train, config)
    monkeypatch.setattr(asking, "flattens", False)
    assert_same(found, run_engine(make_model, train, config))


@pytest.mark.usefixtures("with_cudnn")
def test_a_model_is_asked_to_be_where_it_is(tmp_path: Path) -> None:
    """torch's modules of this kind ask for the fast form behind each `to()`."""

    def move_and_train(engine: Any) -> list[float]:
        engine.module.to("cpu").float()
        return train(engine)

    config = make_config("host", tmp_path, dtype=None)
    assert_same(run_engine(OneRecurrent, move_and_train, config), run_engine(OneRecurrent, train, config))


@pytest.mark.usefixtures("with_cudnn")
def test_the_fast_form_is_for_models_that_are_not_offloaded() -> None:
    """The instrument: an ordinary layer's weights do move together."""
    cells = nn.GRU(WIDTH, WIDTH)
    cells.flatten_parameters()
    starts = [weight.untyped_storage().data_ptr() for weight in cells.parameters()]
    assert len(set(starts)) == 1
