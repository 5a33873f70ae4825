"""After an interrupt or a gradient that is not finite: training goes on where the states are whole, else it says what
of the step was applied; states can be saved in any case.
"""

from __future__ import annotations

import copy
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.core import interrupts
from offloadzero.engine.lifetime import EngineState
from offloadzero.errors import NonFiniteError, StateError
from tests.engine.poisonable import poisonable_engine, same_states, states_after
from tests.engine.test_interrupts import handler
from tests.support.plain_form import offloaded, plain_steps
from tests.support.tiny import all_states, make_engine, settings, tokens, train

__all__ = ["handler"]  # a fixture for every test of the file

LAST_TO_LAND, FIRST_TO_LAND = "emb.weight", "norm.weight"
IN_PART = r"of step 3 the updates of (\d) units were applied \((.+)\) and those of (\d) were not \((.+?)\)"


def poisoned(engine: offloadzero.Engine, model: Any, *, seed: int) -> NonFiniteError:
    """A step whose gradient is not finite."""
    model.poison = math.nan
    with pytest.raises(NonFiniteError) as caught:  # noqa: PT012 (where it shows depends on the timing)
        train(engine, num_steps=1, first_seed=seed)
        engine.synchronize()
    model.poison = None
    return caught.value


def changed_units(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name.rsplit(".", 1)[0] for name in before if not torch.equal(before[name], after[name])}


def names(text: str) -> set[str]:
    return set(text.split(", "))


def meta_of(directory: Path) -> dict[str, Any]:
    (path,) = directory.glob("*/meta.json")
    meta: dict[str, Any] = json.loads(path.read_text())
    return meta


# --- a gradient that is not finite ---


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_step_that_was_refused_as_a_whole_is_left_out(placement: str, tmp_path: Path) -> None:
    engine, model = poisonable_engine(tmp_path, LAST_TO_LAND, placement, gradient_clipping=1.0)
    train(engine, num_steps=2)
    before = all_states(engine)
    error = poisoned(engine, model, seed=2)
    assert re.search(
        r"step 3: the gradient of model\.emb holds NaN or Inf; nothing of it was applied\.", str(error)
    )
    assert engine.state is EngineState.FAILED
    for go_on in (engine.optimizer.step, lambda: engine(tokens(3)), engine.synchronize):
        with pytest.raises(NonFiniteError, match="step 3"):
            go_on()
    engine.save_checkpoint(tmp_path / "saved")
    assert meta_of(tmp_path / "saved")["partial_step"] is None
    with torch.no_grad():
        assert math.isfinite(engine(tokens(3)).item())
    engine.zero_grad()
    assert engine.state is EngineState.OPEN
    assert same_states(all_states(engine), before)
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)
    train(engine, num_steps=2, first_seed=3)
    after = all_states(engine)
    engine.load_checkpoint(tmp_path / "saved")
    assert same_states(all_states(engine), before)
    train(engine, num_steps=2, first_seed=3)
    assert same_states(all_states(engine), after)
    engine.close()

    update = {"on_nonfinite": "skip"}
    other, model = poisonable_engine(tmp_path, LAST_TO_LAND, placement, gradient_clipping=1.0, update=update)
    train(other, num_steps=2)
    model.poison = math.nan
    train(other, num_steps=1, first_seed=2)
    model.poison = None
    train(other, num_steps=2, first_seed=3)
    assert same_states(all_states(other), after)
    other.close()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_plain_loop_saves_and_goes_on_after_a_gradient_that_is_not_finite(
    placement: str, tmp_path: Path
) -> None:
    with offloaded(placement, tmp_path) as (model, optimizer):
        plain_steps(model, optimizer, range(2))
        (model(tokens(2)) * math.nan).backward()
        with pytest.raises(NonFiniteError, match=r"step 3.*nothing of it was applied"):  # noqa: PT012 (as above)
            optimizer.step()
            optimizer.synchronize()
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        losses = plain_steps(model, optimizer, range(3, 6))
    with offloaded(placement, tmp_path) as (model, optimizer):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert plain_steps(model, optimizer, range(3, 6)) == losses
    with offloaded(placement, tmp_path) as (model, optimizer):
        plain_steps(model, optimizer, range(2))
        assert plain_steps(model, optimizer, range(3, 6)) == losses


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_updates_in_backward_end_with_the_first_gradient_that_is_not_finite(
    placement: str, tmp_path: Path
) -> None:
    """The one that lands first: nothing of the step is applied."""
    engine, model = poisonable_engine(tmp_path, FIRST_TO_LAND, placement)
    train(engine, num_steps=2)
    before = all_states(engine)
    model.poison = math.nan
    with pytest.raises(NonFiniteError, match=r"\(rest\) holds NaN or Inf; nothing of it was applied"):  # noqa: PT012
        train(engine, num_steps=1, first_seed=2)
        engine.synchronize()
    model.poison = None
    assert same_states(all_states(engine), before)
    engine.save_checkpoint(tmp_path / "saved")
    engine.zero_grad()
    train(engine, num_steps=2, first_seed=3)
    after = all_states(engine)
    engine.close()

    other, _ = poisonable_engine(tmp_path, FIRST_TO_LAND, placement)
    assert same_states(states_after(other, (0, 1, 3, 4)), after)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_step_applied_in_part_says_which_units_and_a_checkpoint_replaces_it(
    placement: str, tmp_path: Path
) -> None:
    engine, model = poisonable_engine(tmp_path, LAST_TO_LAND, placement)
    train(engine, num_steps=2)
    engine.save_checkpoint(tmp_path / "whole")
    before = all_states(engine)
    error = poisoned(engine, model, seed=2)
    in_part = re.search(IN_PART, str(error))
    assert in_part is not None, error
    after = all_states(engine)
    assert names(in_part[2]) == changed_units(before, after)
    assert names(in_part[4]) == {name.rsplit(".", 1)[0] for name in before} - names(in_part[2])
    for _ in range(2):
        for go_on in (engine.zero_grad, engine.optimizer.step, lambda: engine(tokens(3))):
            with pytest.raises(NonFiniteError, match="Training cannot go on from there"):
                go_on()
    with pytest.warns(UserWarning, match="of step 3 the updates of"):
        engine.save_checkpoint(tmp_path / "part")
    assert re.search(IN_PART, meta_of(tmp_path / "part")["partial_step"])
    engine.load_checkpoint(tmp_path / "whole")
    assert same_states(all_states(engine), before)
    train(engine, num_steps=2, first_seed=3)
    gone_on = all_states(engine)
    with pytest.warns(UserWarning, match="was saved in the middle of a step"):
        engine.load_checkpoint(tmp_path / "part")
    assert same_states(all_states(engine), after)
    engine.close()

    other, _ = poisonable_engine(tmp_path, LAST_TO_LAND, placement)
    assert same_states(states_after(other, (0, 1, 3, 4)), gone_on)


def test_weights_alone_do_not_make_a_step_whole(tmp_path: Path) -> None:
    engine, model = poisonable_engine(tmp_path, LAST_TO_LAND, "host")
    train(engine, num_steps=2)
    engine.save_checkpoint(tmp_path / "whole")
    poisoned(engine, model, seed=2)
    engine.load_checkpoint(tmp_path / "whole", load_optimizer_states=False)
    with pytest.raises(NonFiniteError, match="Training cannot go on"):
        engine(tokens(3))
    engine.load_checkpoint(tmp_path / "whole")
    train(engine, num_steps=1, first_seed=3)
    engine.close()


def test_a_loop_that_drops_its_gradients_first_swallows_no_error(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        (model(tokens(0)) * math.nan).backward()
        optimizer.step()
        optimizer.runtime.changes.wait_updates()
        with pytest.raises(NonFiniteError, match="step 1"):
            optimizer.zero_grad()
        optimizer.zero_grad()
        model(tokens(1)).backward()
        optimizer.step()
        optimizer.synchronize()


# --- a backward that does not end ---


class Interrupts:
    """A gradient hook that raises KeyboardInterrupt once."""

    def __init__(self, param: nn.Parameter) -> None:
        self.is_armed = True
        param.register_hook(self)

    def __call__(self, _: torch.Tensor) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_updates_of_an_interrupted_backward_are_named(placement: str, tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement=placement))
    train(engine, num_steps=2)
    engine.save_checkpoint(tmp_path / "whole")
    before = all_states(engine)
    Interrupts(engine.module.blocks[1].up.weight)
    with pytest.raises(KeyboardInterrupt):
        train(engine, num_steps=1, first_seed=2)
    for _ in range(2):
        for go_on in (engine.zero_grad, engine.step, lambda: train(engine, num_steps=1)):
            with pytest.raises(StateError, match="last backward did not finish") as caught:
                go_on()
    in_part = re.search(IN_PART, str(caught.value))
    assert in_part is not None, caught.value
    assert (
        names(in_part[2]) == changed_units(before, all_states(engine)) == {"(rest)", "blocks.3", "blocks.2"}
    )
    with pytest.warns(UserWarning, match="of step 3 the updates of 3 units"):
        engine.save_checkpoint(tmp_path / "part")
    engine.load_checkpoint(tmp_path / "whole")
    train(engine, num_steps=1, first_seed=2)
    after = all_states(engine)
    engine.close()

    assert same_states(states_after(make_engine(settings(tmp_path, placement=placement)), range(3)), after)


def test_what_a_whole_backward_has_updated_is_closed_by_step(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="host"))
    engine.backward(engine(tokens(0)))
    with pytest.raises(StateError, match=r"backward has already updated the weights: call step\(\) first"):
        engine.zero_grad()
    with pytest.warns(UserWarning, match=r"step 1 was applied in backward, and step\(\) was not called"):
        engine.save_checkpoint(tmp_path / "saved")
    engine.step()
    train(engine, num_steps=1, first_seed=1)
    after = all_states(engine)
    engine.close()
    assert same_states(states_after(make_engine(settings(tmp_path, placement="host")), range(2)), after)


def test_what_a_backward_left_that_did_not_end_is_not_added_to(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 3, bias=False))
    weight = model[0].weight
    failing: list[Exception] = []

    def fail(_: torch.Tensor) -> None:
        if failing:
            raise failing.pop()

    weight.register_post_accumulate_grad_hook(fail)  # before ours
    config = settings(tmp_path, placement="host", bf16=None, optimizer=None)
    _, optimizer = offloadzero.offload(model, torch.optim.AdamW(model.parameters()), config)
    model(torch.full((1, 5), 1.0)).sum().backward()
    failing.append(ValueError("a hook's own"))
    with pytest.raises(ValueError, match="a hook's own"):
        model(torch.full((1, 5), 10.0)).sum().backward()
    model(torch.full((1, 5), 100.0)).sum().backward()
    assert torch.equal(weight.grad.clone(), torch.full((3, 5), 101.0))
    optimizer.close()


def interrupting(param: nn.Parameter, times: int) -> None:
    """Ctrl-C `times` times when the gradient of `param` is there."""
    param.register_hook(lambda _: [signal.raise_signal(signal.SIGINT) for _ in range(times)] and None)


def test_ctrl_c_waits_until_backward_has_updated_all(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="host"))
    train(engine, num_steps=2)
    interrupting(engine.module.blocks[1].up.weight, 1)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(engine(tokens(2)))
    assert interrupts.held.until() is None
    with pytest.raises(StateError, match=r"backward has already updated the weights: call step\(\) first"):
        engine.zero_grad()
    engine.step()
    after = all_states(engine)
    engine.close()
    assert same_states(states_after(make_engine(settings(tmp_path, placement="host")), range(3)), after)


def test_the_second_ctrl_c_does_not_wait_for_the_end_of_backward(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="host"))
    train(engine, num_steps=2)
    interrupting(engine.module.blocks[1].up.weight, 2)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(engine(tokens(2)))
    with pytest.raises(StateError, match="last backward did not finish"):
        engine.zero_grad()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # at once again
    engine.close()


def test_ctrl_c_in_a_backward_that_fails_is_not_held_for_good(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="host"))

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a hook's own")

    engine.module.blocks[1].up.weight.register_hook(fail)
    with pytest.raises(ValueError, match="a hook's own"):
        engine.backward(engine(tokens(2)))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    engine.close()
