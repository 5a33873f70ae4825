"""A backward that raises, or that Ctrl-C ends, leaves nothing that later steps would use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.errors import StateError
from tests.support.cases import each_pair
from tests.support.plain_form import (
    clip,
    engine_config,
    final_weights,
    grads,
    make_model,
    make_optimizer,
    named_grads,
    offloaded,
    plain_config,
)
from tests.support.tiny import tokens

# --- a backward that does not finish ---


class Failing:
    """A gradient hook that raises once."""

    def __init__(self, p: nn.Parameter, error: BaseException, *, post: bool) -> None:
        self._error: BaseException | None = error
        if post:
            p.register_post_accumulate_grad_hook(self)
        else:
            p.register_hook(self)

    def __call__(self, _: Tensor) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


FAILURES = [ValueError("a hook's own"), KeyboardInterrupt()]
# By the place of the parameter in backward; a hook may run before the gradient is stored and after it.
PLACES = ["head", "blocks.3.down.bias", "blocks.1.up.weight", "emb.weight"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        loss = model(tokens(step))
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def planted(model: nn.Module, place: str, *, post: bool, error: BaseException) -> None:
    p = model.norm.weight if place == "head" else model.get_parameter(place)
    Failing(p, error, post=post)


@pytest.mark.parametrize(
    ("place", "error", "post", "before"), each_pair(PLACES, FAILURES, [False, True], [True, False])
)
def test_a_backward_that_failed_leaves_nothing_after_zero_grad(
    place: str, error: BaseException, post: bool, before: bool, tmp_path: Path
) -> None:
    with offloaded("mixed", tmp_path) as (model, optimizer):
        expected = train(model, optimizer)
    model = make_model()
    if before:
        planted(model, place, post=post, error=error)
    _, optimizer = offloadzero.offload(model, make_optimizer(model), plain_config("mixed", tmp_path))
    if not before:
        planted(model, place, post=post, error=error)
    with pytest.raises(type(error)):
        model(tokens(0)).backward()
    optimizer.zero_grad()
    assert not named_grads(model)
    assert train(model, optimizer) == expected
    optimizer.close()


def test_a_failed_backward_must_be_dropped_before_anything_else(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        before = final_weights(model)
        model(tokens(0)).backward()
        planted(model, "blocks.1.up.weight", post=True, error=ValueError("a hook's own"))
        with pytest.raises(ValueError, match="a hook's own"):
            model(tokens(1)).backward()
        for go_on in (optimizer.step, lambda: model(tokens(1)).backward(), optimizer.step):
            with pytest.raises(StateError, match=r"did not finish.*optimizer\.zero_grad\(\)"):
                go_on()
        for name, value in final_weights(model).items():
            assert torch.equal(value, before[name])
        optimizer.zero_grad(set_to_none=False)
        assert all(float(grad.abs().sum()) == 0 for grad in grads(model))
        model(tokens(0)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("place", "post", "accumulation"),
    each_pair(["blocks.3.down.bias", "blocks.1.up.weight"], [False, True], [1, 2]),
)
def test_an_engine_begins_a_window_with_nothing_left(
    place: str, post: bool, accumulation: int, tmp_path: Path
) -> None:
    def run(*, fail: bool) -> list[float]:
        config = engine_config(
            "host", tmp_path, gradient_clipping=0.1, gradient_accumulation_steps=accumulation
        )
        engine, *_ = offloadzero.initialize(model=make_model(), config=config)
        if fail:
            planted(engine.module, place, post=post, error=ValueError("a hook's own"))
            with pytest.raises(ValueError, match="a hook's own"):
                engine.backward(engine(tokens(0)))
            with pytest.raises(StateError, match="did not finish"):
                engine.step()
        losses = []
        for micro in range(6):
            loss = engine(tokens(micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        return losses

    assert run(fail=True) == run(fail=False)


def test_an_engine_refuses_to_go_on_inside_a_window(tmp_path: Path) -> None:
    config = engine_config("host", tmp_path, gradient_clipping=0.1, gradient_accumulation_steps=3)
    engine, *_ = offloadzero.initialize(model=make_model(), config=config)
    engine.backward(engine(tokens(0)))
    engine.step()
    planted(engine.module, "blocks.1.up.weight", post=True, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.backward(engine(tokens(1)))
    with pytest.raises(StateError, match="did not finish"):
        engine.backward(engine(tokens(1)))
    engine.zero_grad()
    engine.backward(engine(tokens(1)))
    engine.close()


def test_what_a_script_drops_itself_needs_no_zero_grad_of_the_optimizer(tmp_path: Path) -> None:
    with offloaded("mixed", tmp_path) as (model, optimizer):
        expected = train(model, optimizer)
    with offloaded("mixed", tmp_path) as (model, optimizer):
        planted(model, "blocks.1.up.weight", post=True, error=ValueError("a hook's own"))
        with pytest.raises(ValueError, match="a hook's own"):
            model(tokens(0)).backward()
        model.zero_grad()
        assert train(model, optimizer) == expected


def test_a_step_inside_backward_is_refused(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        handle = model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(StateError, match="did not finish"):
            model(tokens(0)).backward()
        handle.remove()
        optimizer.zero_grad()
        train(model, optimizer)
