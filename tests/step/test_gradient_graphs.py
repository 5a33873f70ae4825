"""backward(create_graph=True): `param.grad` is in the graph of that backward, as torch's is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offloadzero.errors import StateError
from tests.support.plain_form import (
    ALL_PLACEMENTS,
    Script,
    clip,
    expect_as_torch,
    grads,
    offloaded,
)
from tests.support.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True will create")

NUM_STEPS = 3


def squares(model: nn.Module) -> Tensor:
    total: Tensor = sum(grad.pow(2).sum() for grad in grads(model))  # type: ignore[assignment]
    return total


def each_step(second: Callable[[nn.Module, int], Any], *, num_micro: int = 1) -> Script:
    def script(model: nn.Module, optimizer: Any) -> list[float]:
        seen = []
        for step in range(NUM_STEPS):
            for micro in range(num_micro):
                loss = model(tokens(step + 100 * micro))
                loss.backward(create_graph=True)
                seen.append(loss.item())
            second(model, step)
            seen.extend(float(grad.detach().norm()) for grad in grads(model))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return script


def penalty_alone(model: nn.Module, step: int) -> None:  # noqa: ARG001
    squares(model).backward()


def penalty_and_loss(model: nn.Module, step: int) -> None:
    (model(tokens(step + 10)) + squares(model)).backward()


def norms(model: nn.Module, step: int) -> None:  # noqa: ARG001
    torch.stack([grad.norm() for grad in grads(model)]).sum().backward()


def of_one_block(model: nn.Module, step: int) -> None:  # noqa: ARG001
    torch.stack([p.grad.mul(p).sum() for p in model.get_submodule("blocks.1").parameters()]).sum().backward()


def by_hand(model: nn.Module, step: int) -> None:  # noqa: ARG001
    params = list(model.parameters())
    products = torch.autograd.grad(squares(model), params)
    for p, product in zip(params, products, strict=True):
        p.grad = p.grad.detach() + 0.1 * product


def twice(model: nn.Module, step: int) -> None:
    """The gradient stays in its graph when a backward that records none has added to it."""
    squares(model).backward(retain_graph=True)
    model(tokens(step + 20)).backward()
    squares(model).backward()


def clipped(model: nn.Module, step: int) -> None:  # noqa: ARG001
    squares(model).backward()
    clip(model)


SCRIPTS: dict[str, Script] = {
    "a penalty alone": each_step(penalty_alone),
    "a penalty beside a loss": each_step(penalty_and_loss),
    "a penalty on the sum of two backwards": each_step(penalty_alone, num_micro=2),
    "norms": each_step(norms),
    "gradients of one block": each_step(of_one_block),
    "autograd.grad of gradients": each_step(by_hand),
    "two penalties": each_step(twice),
    "clipping": each_step(clipped),
    "not used": each_step(lambda *_: None),
}


@pytest.mark.parametrize("placement", [*ALL_PLACEMENTS, "nvme"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gradient_can_be_differentiated(name: str, placement: str, tmp_path: Path) -> None:
    expect_as_torch(
        SCRIPTS[name], placement, tmp_path, seen={"rel": 1e-4}, weights={"rtol": 1e-4, "atol": 2e-5}
    )


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_a_gradient_that_was_made_zero_is_in_no_graph(zero: str, tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        model(tokens(0)).backward(create_graph=True)
        assert all(grad.requires_grad for grad in grads(model))
        {"optimizer": optimizer, "model": model}[zero].zero_grad(set_to_none=False)
        assert not any(grad.requires_grad for grad in grads(model))
        assert not squares(model)


def test_where_weights_are_updated_in_backward_there_is_none(tmp_path: Path) -> None:
    with offloaded("host", tmp_path, update={"in_backward": True}) as (model, optimizer):
        model(tokens(0)).backward(create_graph=True)
        with pytest.raises(
            StateError,
            match=r'backward has updated the weights and dropped this gradient.*"in_backward": false',
        ):
            squares(model)
        optimizer.step()
