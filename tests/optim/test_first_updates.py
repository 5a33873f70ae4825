"""What an optimizer's state is before its first update, through state dicts and switches of options, against torch's.

SGD's buffer is not there before the first step with momentum, and that step is the one that is not dampened.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.core.segments import SegmentKind
from offloadzero.native.hyper import SgdHyper
from offloadzero.update.spec import UpdateForm
from offloadzero.update.specs.sgd import MOMENTUM_BUFFER, SGD
from tests.support.tiny import make_engine, settings

DAMPENED = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
placements = pytest.mark.parametrize("placement", ["host", "nvme"])


class Net(nn.Module):
    """The second part takes part only where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))

    def forward(self, x: Tensor, *, num_blocks: int = 3) -> Tensor:
        for block in self.blocks[:num_blocks]:
            x = torch.tanh(block(x))
        return x.square().mean()


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


class Pair:
    """The same training without and with this library."""

    def __init__(self, directory: Path, placement: str, **options: Any) -> None:
        self.plain, model = make_net(), make_net()
        self.theirs = torch.optim.SGD(self.plain.parameters(), **options)
        config = settings(directory, placement=placement, bf16=None)
        self.model, self.ours = offloadzero.offload(
            model, torch.optim.SGD(model.parameters(), **options), config
        )
        self._num_steps = 0

    def step(self, num_steps: int = 1, *, num_blocks: int = 3) -> None:
        for _ in range(num_steps):
            x = torch.randn(5, 9, generator=torch.Generator().manual_seed(self._num_steps))
            for model, optimizer in ((self.plain, self.theirs), (self.model, self.ours)):
                model(x, num_blocks=num_blocks).backward()
                optimizer.step()
                optimizer.zero_grad()
            self._num_steps += 1

    def update_groups(self, **options: Any) -> None:
        for optimizer in (self.theirs, self.ours):
            optimizer.param_groups[0].update(options)

    def expect_equal(self) -> None:
        for plain, param in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), plain.detach(), rtol=1e-6, atol=1e-7)

    def close(self) -> None:
        self.expect_equal()
        self.ours.close()


@placements
def test_a_reload_before_the_first_step_is_none(placement: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, placement, **DAMPENED)
    pair.ours.load_state_dict(pair.ours.state_dict())
    pair.step(3)
    pair.close()


@placements
def test_a_reload_leaves_parameters_without_a_buffer_without_one(placement: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, placement, **DAMPENED)
    pair.step(2, num_blocks=1)
    saved = copy.deepcopy(pair.ours.state_dict())
    theirs = pair.theirs.state_dict()["state"]
    for number, state in saved["state"].items():
        assert ("momentum_buffer" in state) == (number in theirs)
    pair.ours.load_state_dict(saved)
    pair.step(3)
    pair.close()


@placements
def test_torch_goes_on_with_what_has_no_buffer_yet(placement: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, placement, **DAMPENED)
    pair.step(num_blocks=2)
    saved = copy.deepcopy(pair.ours.state_dict())
    pair.theirs.load_state_dict({**pair.theirs.state_dict(), "state": saved["state"]})
    pair.step(3)
    pair.close()


@placements
def test_momentum_that_comes_later_begins_undampened(placement: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, placement, lr=0.1)
    pair.step(2)
    pair.update_groups(momentum=0.9, dampening=0.5)
    pair.ours.load_state_dict(pair.ours.state_dict())
    pair.step(2)
    pair.update_groups(momentum=0.0)
    pair.step()
    pair.update_groups(momentum=0.9)
    pair.step(2)
    pair.close()


@pytest.mark.parametrize("form", [UpdateForm.NATIVE, UpdateForm.TORCH])
def test_without_momentum_the_buffer_is_not_looked_at(form: UpdateForm) -> None:
    param, buffer = torch.ones(4097), torch.full((4097,), float("inf"))
    buffers = {
        SegmentKind.PARAM: param,
        SegmentKind.GRAD: torch.full((4097,), 2.0),
        MOMENTUM_BUFFER: buffer,
    }
    hyper = SgdHyper(lr=0.25, momentum=0.0, dampening=0.0, weight_decay=0.0)
    SGD.step(buffers, hyper=hyper, step=3, grad_scale=1.0, form=form)
    assert torch.equal(param, torch.full((4097,), 0.5))
    assert torch.equal(buffer, torch.full((4097,), float("inf")))


@placements
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_first_value_is_fp32_whatever_torchs_default_is(
    dtype: torch.dtype, placement: str, tmp_path: Path
) -> None:
    model = make_net()
    adagrad = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        _, optimizer = offloadzero.offload(model, adagrad, settings(tmp_path, placement=placement, bf16=None))
    finally:
        torch.set_default_dtype(before)
    for state in optimizer.state_dict()["state"].values():
        assert torch.equal(state["sum"], torch.full_like(state["sum"], 0.1, dtype=torch.float32))
    optimizer.close()


@pytest.mark.parametrize(
    ("type_", "params", "expected"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}, 0.9), ("Adagrad", {}, 0.0), ("Lion", {}, (0.9, 0.999))],
)
def test_the_momentum_of_each_group(
    type_: str, params: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    engine = make_engine(settings(tmp_path, optimizer={"type": type_, "params": params}))
    assert engine.get_mom() == [expected]
    engine.close()
