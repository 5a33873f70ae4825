"""Gradients are there after backward, and what a script does with them is what plain torch does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import offloadzero
from offloadzero import OffloadError
from tests.scripts import gradient_loops, gradient_params, gradients
from tests.scripts.common import (
    AUTOCAST_TOLERANCES,
    LM,
    adamw,
    assert_matches,
    cases,
    offloaded,
    reference,
    run,
    start,
    tokens,
)

SCRIPTS = {**gradients.SCRIPTS, **gradient_loops.SCRIPTS, **gradient_params.SCRIPTS}


@pytest.mark.parametrize(("name", "placement"), cases(SCRIPTS, ["host", "nvme", "stage 1"]))
def test_gradients_are_those_of_torch(name: str, placement: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    tolerances = AUTOCAST_TOLERANCES if name == "autocast" else {}
    assert_matches(run(script, offloaded(placement, tmp_path)), reference(script), **tolerances)


@pytest.mark.parametrize("name", gradient_params.SCRIPTS_THAT_MAY_BE_REFUSED)
def test_followed_or_refused_by_name(name: str, tmp_path: Path) -> None:
    script, words = gradient_params.SCRIPTS_THAT_MAY_BE_REFUSED[name]
    expected = reference(script)
    try:
        result = run(script, offloaded("host", tmp_path))
    except OffloadError as error:
        assert re.search(words, str(error)), error  # noqa: PT017
    else:
        assert_matches(result, expected)


@pytest.mark.parametrize("placement", ["host", "stage 1"])
def test_an_optimizer_of_another_copy_is_refused(placement: str, tmp_path: Path) -> None:
    """It would train nothing."""
    wrap = offloaded(placement, tmp_path)
    with pytest.raises(OffloadError, match="optimizer"):
        wrap(LM(), adamw(LM()))
    wrap.close()


def test_without_a_clipping_key_nothing_clips(tmp_path: Path) -> None:
    """The plain form clips if its configuration says so."""

    def script(wrap: gradients.Wrap) -> gradients.Result:
        model, optimizer = start(wrap, lr=1e-2)
        losses = []
        for step in range(4):
            loss = 100 * model(tokens(step))  # a norm of 100 and more
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return gradients.Result(losses, [], gradients.weights_of(model))

    assert_matches(run(script, offloaded("host", tmp_path)), run(script, gradients.Wrap()))


@pytest.mark.parametrize("placement", ["host", "stage 1"])
def test_a_gradient_is_like_its_parameter(placement: str, tmp_path: Path) -> None:
    wrap = offloaded(placement, tmp_path)
    model, optimizer = start(wrap)
    assert all(p.grad is None for p in model.parameters())
    model(tokens(0)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert isinstance(p.grad, torch.Tensor)
        assert (p.grad.shape, p.grad.dtype, p.grad.device) == (p.shape, p.dtype, p.device), name
        assert p.grad.numel() == p.numel()
        assert not p.grad.requires_grad
        assert p.grad is p.grad
        assert repr(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    wrap.close()


def test_where_the_update_runs_in_backward_a_gradient_says_so(tmp_path: Path) -> None:
    """Never None or 0 in silence: an error that names the key."""
    wrap = offloaded("host", tmp_path, update={"in_backward": True})
    model, _ = start(wrap)
    model(tokens(0)).backward()
    with pytest.raises(OffloadError, match="in_backward"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    wrap.close()


def test_gradients_of_the_engine(tmp_path: Path) -> None:
    """initialize(): between backward() and step() too, or a named error."""
    from tests.scripts.common import make_config

    torch.manual_seed(0)
    plain = LM()
    plain(tokens(0)).backward()
    torch.manual_seed(0)
    made = LM()
    config = {**make_config("host", tmp_path), "gradient_clipping": 0.0}
    engine, *_ = offloadzero.initialize(model=made, optimizer=adamw(made), config=config)
    engine.backward(engine(tokens(0)))
    try:
        found = [p.grad.clone() for p in engine.module.parameters()]
    except OffloadError as error:
        assert "in_backward" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, [p.grad for p in plain.parameters()])
    engine.close()
