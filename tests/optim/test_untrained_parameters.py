"""Parameters and optimizers that do not belong together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.errors import ConfigError, StateError
from tests.support.plain_form import (
    TOLERANCE,
    make_model,
    make_optimizer,
    named_grads,
    plain_config,
)
from tests.support.tiny import settings, tokens
from tests.support.training import worst_relative_difference

# --- parameters that the optimizer does not train ---


FORMS: dict[str, Callable[..., Any]] = {
    "offload": offloadzero.offload,
    "initialize": offloadzero.initialize,
}


def foreign_optimizer(_: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(make_model().parameters())


def with_a_foreign_parameter(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            foreign_optimizer,
            r"27 parameters'?: 27 of them are not the model's, .* hold the model's emb\.weight",
        ),
        (
            with_a_foreign_parameter,
            r"28 parameters'?: 1 of them are not the model's, one has the shape \(3,\): .*make one module of both",
        ),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_of_another_model_is_refused(
    form: str, make: Callable[[nn.Module], torch.optim.Optimizer], message: str, tmp_path: Path
) -> None:
    model = make_model()
    before = [(p, p.data_ptr(), type(p)) for p in model.parameters()]
    config, optimizer = plain_config("host", tmp_path), make(model)
    with pytest.raises(ConfigError, match=message):
        FORMS[form](model=model, optimizer=optimizer, config=config)
    assert [(p, p.data_ptr(), type(p)) for p in model.parameters()] == before
    assert os.listdir(tmp_path) == []


def test_a_parameter_in_no_group_has_torchs_gradient_and_no_update(tmp_path: Path) -> None:
    plain, model = make_model(), make_model()
    held = [name for name, _ in plain.named_parameters() if not name.startswith("blocks.1")]
    outcomes = []
    for each in (plain, model):
        optimizer: Any = torch.optim.AdamW([each.get_parameter(name) for name in held], lr=1e-2)
        if each is model:
            _, optimizer = offloadzero.offload(model, optimizer, plain_config("host", tmp_path))
        seen = []
        for step in range(4):
            loss = each(tokens(step))
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(seen)
    assert worst_relative_difference(*outcomes) < TOLERANCE
    for name, p in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) is (p.grad is None) is (name in held)
        if p.grad is not None and grad is not None:
            torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-7)
    optimizer.close()


@pytest.mark.parametrize("is_callable", [False, True], ids=["of the config", "callable"])
def test_a_parameter_unfrozen_after_initialize_is_refused_where_no_script_has_left_it_out(
    is_callable: bool, tmp_path: Path
) -> None:
    model = make_model()
    model.blocks[2].requires_grad_(False)
    config = settings(tmp_path, placement="host")
    made: Any = (lambda params: torch.optim.AdamW(params, lr=1e-2)) if is_callable else None
    engine, *_ = offloadzero.initialize(model=model, config=config, optimizer=made)
    engine.backward(engine(tokens(0)))
    engine.step()
    model.blocks[2].requires_grad_(True)
    with pytest.raises(StateError, match=r"blocks\.2\.norm\.weight: was frozen when the model was offloaded"):
        engine.backward(engine(tokens(1)))
    model.blocks[2].requires_grad_(False)
    engine.optimizer.zero_grad()
    engine.backward(engine(tokens(1)))
    engine.step()
    engine.close()


def test_what_a_callable_leaves_out_does_not_train_and_is_no_error(tmp_path: Path) -> None:
    model = make_model()
    engine, *_ = offloadzero.initialize(
        model=model,
        config=settings(tmp_path, placement="host"),
        optimizer=lambda params: torch.optim.AdamW([p for p in params if p.dim() > 1], lr=1e-2),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine.backward(engine(tokens(0)))
    engine.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (value.dim() < 2), name
    engine.close()


def test_a_parameter_that_a_script_has_left_out_of_the_optimizer_may_be_unfrozen_as_in_torch(
    tmp_path: Path,
) -> None:
    model = make_model()
    model.blocks[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = offloadzero.initialize(
        model=model, config=settings(tmp_path, placement="host", optimizer=None), optimizer=optimizer
    )
    model.blocks[2].requires_grad_(True)
    engine.backward(engine(tokens(1)))
    engine.step()
    engine.close()


@pytest.mark.parametrize("when", ["at once", "after a step"])
def test_a_parameter_unfrozen_later_is_refused_by_name(when: str, tmp_path: Path) -> None:
    model = make_model()
    model.blocks[2].requires_grad_(False)
    _, optimizer = offloadzero.offload(model, make_optimizer(model), plain_config("host", tmp_path))
    if when == "after a step":
        model(tokens(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.blocks[2].requires_grad_(True)
    with pytest.raises(StateError, match=r"blocks\.2\.norm\.weight: was frozen when the model was offloaded"):
        model(tokens(1)).backward()
    model.blocks[2].requires_grad_(False)
    optimizer.zero_grad()
    assert not named_grads(model)
    model(tokens(1)).backward()
    optimizer.step()
    optimizer.close()
