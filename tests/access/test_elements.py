"""Single elements and constructors: what Python and C++ ask a tensor for without torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import offloadzero
from offloadzero.errors import ConfigError, StateError
from tests.support.plain_form import plain_config

PLACEMENTS = ("resident", "host")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).sum() * self.scale


def trained(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5)).backward()
    optimizer.step()


@pytest.fixture(params=PLACEMENTS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[tuple[Net, Any], tuple[Net, Any]]]:
    """A plain model and its optimizer, and the same offloaded, both after a step."""
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    _, optimizer = offloadzero.offload(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), plain_config(request.param, tmp_path)
    )
    trained(plain, plain_optimizer)
    trained(model, optimizer)
    yield (plain, plain_optimizer), (model, optimizer)
    optimizer.close()


FORMATTED: dict[str, Callable[[Net, Any], str]] = {
    "p[0, 0]": lambda m, _: f"{m.lin.weight[0, 0]:.3f}",
    "p.data[0, 0]": lambda m, _: f"{m.lin.weight.data[0, 0]:.3f}",
    "p.grad[0, 0]": lambda m, _: f"{m.lin.weight.grad[0, 0]:.3f}",  # type: ignore[index]
    "scalar.grad": lambda m, _: f"{m.scale.grad:.3f}",
    "scalar.data": lambda m, _: f"{m.scale.data:.3f}",
    "state step": lambda m, o: f"{o.state[m.lin.weight]['step']:.0f}",
    "state element": lambda m, o: f"{o.state[m.lin.weight]['exp_avg'][0, 0]:.3f}",
    "new_tensor": lambda m, _: f"{m.lin.weight.new_tensor([1.0, 2.0])}",
    "data.new_tensor": lambda m, _: f"{m.lin.weight.data.new_tensor([1, 2], dtype=torch.int64)}",
    "grad.new_tensor": lambda m, _: f"{m.lin.weight.grad.new_tensor([1.0, 2.0])}",  # type: ignore[union-attr]
}


@pytest.mark.parametrize("what", FORMATTED)
def test_an_element_is_formatted_and_a_tensor_made_as_of_an_ordinary_one(what: str, both: Any) -> None:
    plain, ours = both
    assert FORMATTED[what](*ours) == FORMATTED[what](*plain)


REFUSED: dict[str, Callable[[Net], Any]] = {
    "set_": lambda m: m.lin.weight.set_(torch.ones(3, 5)),  # type: ignore[call-overload]
    "data.set_": lambda m: m.lin.weight.data.set_(torch.ones(3, 5)),  # type: ignore[call-overload]
    "data.t_": lambda m: m.lin.weight.data.t_(),
    "data.transpose_": lambda m: m.lin.weight.data.transpose_(0, 1),
    "data.unsqueeze_": lambda m: m.lin.weight.data.unsqueeze_(0),
    "grad.squeeze_": lambda m: m.lin.weight.grad.squeeze_(),  # type: ignore[union-attr]
    "apply_": lambda m: m.lin.weight.apply_(lambda x: x - 1),
    "data.apply_": lambda m: m.lin.weight.data.apply_(lambda x: 2 * x + 1),
    "a row's apply_": lambda m: m.lin.weight.data[1].apply_(lambda x: 7 * x),
    "grad.apply_": lambda m: m.lin.weight.grad.apply_(lambda x: x * 0.5),  # type: ignore[union-attr]
    "data.map_": lambda m: m.lin.weight.data.map_(m.lin.weight.data, lambda x, y: x + 2 * y),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_memory_or_shape_in_place_is_refused_by_name(what: str, both: Any) -> None:
    _, (model, optimizer) = both
    model(torch.ones(2, 5)).backward()
    before = model.lin.weight.detach().clone()
    with torch.no_grad(), pytest.raises(StateError, match=r"lin\.weight"):
        REFUSED[what](model)
    assert torch.equal(model.lin.weight, before)
    optimizer.zero_grad()


def test_parametrizations_come_before_offloading(both: Any) -> None:
    _, (model, _) = both
    before = model.lin.weight.detach().clone()
    with pytest.raises(StateError, match=r"^lin\.weight: register parametrizations before offload\(\)"):
        register_parametrization(model.lin, "weight", nn.Identity())
    assert torch.equal(model.lin.weight, before)


def test_a_state_dict_that_is_to_be_assigned_is_refused(both: Any) -> None:
    _, (model, _) = both
    with pytest.raises(ConfigError, match=r"assign\) = True: an offloaded .* leave out assign=True$"):
        model.load_state_dict(model.state_dict(), assign=True)
