"""After an interrupt or a gradient that is not finite: training goes on where the states are whole, else it says what
of the step was applied; states can be saved in any case.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.errors import NonFiniteError, StateError
from offloadzero.interrupts import _waits, held, raise_held, uninterrupted, uninterrupted_from_start
from offloadzero.lifetime import EngineState
from offloadzero.torch_private import top_saved_tensors_default_hooks
from tests.engine.interrupts import Injected
from tests.engine.test_bad_input import poisonable_engine, same_states
from tests.engine.test_interrupts import handler
from tests.support.faults import delays
from tests.support.plain_form import offloaded
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
    def steps(model: Any, optimizer: Any, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            loss = model(tokens(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with offloaded(placement, tmp_path) as (model, optimizer):
        steps(model, optimizer, range(2))
        (model(tokens(2)) * math.nan).backward()
        with pytest.raises(NonFiniteError, match=r"step 3.*nothing of it was applied"):  # noqa: PT012 (as above)
            optimizer.step()
            optimizer.synchronize()
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        losses = steps(model, optimizer, range(3, 6))
    with offloaded(placement, tmp_path) as (model, optimizer):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert steps(model, optimizer, range(3, 6)) == losses
    with offloaded(placement, tmp_path) as (model, optimizer):
        steps(model, optimizer, range(2))
        assert steps(model, optimizer, range(3, 6)) == losses


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
    train(other, num_steps=2)
    train(other, num_steps=2, first_seed=3)
    assert same_states(all_states(other), after)
    other.close()


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
    train(other, num_steps=2)
    train(other, num_steps=2, first_seed=3)
    assert same_states(all_states(other), gone_on)
    other.close()


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
        optimizer.runtime.executor.wait_updates()
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

    other = make_engine(settings(tmp_path, placement=placement))
    train(other, num_steps=3)
    assert same_states(all_states(other), after)
    other.close()


def test_what_a_whole_backward_has_updated_is_closed_by_step(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="host"))
    engine.backward(engine(tokens(0)))
    with pytest.raises(StateError, match=r"call step\(\), which closes that step"):
        engine.zero_grad()
    with pytest.warns(UserWarning, match=r"step 1 was applied in backward, and step\(\) was not called"):
        engine.save_checkpoint(tmp_path / "saved")
    engine.step()
    train(engine, num_steps=1, first_seed=1)
    after = all_states(engine)
    engine.close()
    other = make_engine(settings(tmp_path, placement="host"))
    train(other, num_steps=2)
    assert same_states(all_states(other), after)
    other.close()


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
    assert uninterrupted.until is None
    with pytest.raises(StateError, match=r"call step\(\), which closes that step"):
        engine.zero_grad()
    engine.step()
    after = all_states(engine)
    engine.close()
    other = make_engine(settings(tmp_path, placement="host"))
    train(other, num_steps=3)
    assert same_states(all_states(other), after)
    other.close()


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


# --- an interrupt at each place ---


EVERY_NTH_BACKWARD = int(os.environ.get("OFFLOADZERO_TEST_EVERY_NTH_BACKWARD", "97"))


def at_each_place(
    engine: offloadzero.Engine, use: Callable[[], object], *, first: int = 1, every: int = 100_000
) -> list[Injected]:
    """`use()` with an interrupt at its `first` place, then at each `every`th after it."""
    done = []
    for number in range(first, 100_000, every):
        interrupt = Injected(number)
        interrupt.arm()
        try:
            use()
        except KeyboardInterrupt:
            interrupt.came = True
        finally:
            interrupt.disarm()
        assert not any(engine.optimizer.runtime.executor.pins), interrupt.place
        assert not engine.optimizer.runtime.executor.is_running, interrupt.place
        assert top_saved_tensors_default_hooks(False) is None, interrupt.place
        assert uninterrupted.depth == 0, interrupt.place
        done.append(interrupt)
        if interrupt.num_places < number:
            break
    return done


@pytest.mark.parametrize("tier", [None, "host"])
def test_a_forward_leaves_nothing_pinned_wherever_it_is_interrupted(tier: str | None, tmp_path: Path) -> None:
    keys = {} if tier is None else {"activation_checkpoints": {"tier": tier}}
    engine = make_engine(settings(tmp_path, placement="host", gradient_clipping=1.0, **keys))
    train(engine, num_steps=2)
    assert len(at_each_place(engine, lambda: engine(tokens(2)), every=7)) > 50
    train(engine, num_steps=1, first_seed=2)
    after = all_states(engine)
    engine.close()
    other = make_engine(settings(tmp_path, placement="host", gradient_clipping=1.0, **keys))
    train(other, num_steps=3)
    assert same_states(all_states(other), after)
    other.close()


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
@pytest.mark.parametrize("tier", [None, "host"])
def test_gradients_are_dropped_wherever_backward_is_interrupted(
    placement: str, tier: str | None, tmp_path: Path
) -> None:
    keys = {} if tier is None else {"activation_checkpoints": {"tier": tier}}
    config = settings(
        tmp_path,
        placement=placement,
        gradient_clipping=1.0,
        gradient_accumulation_steps=2,
        **keys,
    )
    engine = make_engine(config)
    train(engine, num_steps=2)

    def micro_batches() -> None:
        for seed in (2, 3):
            engine.backward(engine(tokens(seed)))
            if seed == 2:
                engine.step()

    for number in range(1, 100_000, EVERY_NTH_BACKWARD):
        (interrupt,) = at_each_place(engine, micro_batches, first=number)
        engine.zero_grad()
        if interrupt.num_places < number:
            break
        assert interrupt.came, interrupt.place
    assert number > 5 * EVERY_NTH_BACKWARD
    train(engine, num_steps=2, first_seed=2)
    after = all_states(engine)
    engine.close()
    other = make_engine(config)
    train(other, num_steps=4)
    assert same_states(all_states(other), after)
    other.close()


class InjectedInWait(Injected):
    """A SIGINT at the `countdown`th place of a blocking wait after backward has begun to update weights."""

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        until = uninterrupted.until
        if frame.f_code in _waits and until is not None and until() is not None:
            super()._look(frame, event, argument)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_one_ctrl_c_in_a_wait_of_backward_ends_no_run_either(
    placement: str, tmp_path: Path, faults: ExitStack
) -> None:
    """It comes at the end of a backward that updates weights, and step() closes the step."""
    faults.enter_context(delays("update.compute", 0.002))  # else a slow backward waits for no update
    config = settings(tmp_path, placement=placement, update={"chunk_elements": 4096})
    engine = make_engine(config)
    train(engine, num_steps=2)
    places = []
    for number in range(8):
        loss = engine(tokens(2 + number))
        interrupt = InjectedInWait(1 + number % 3)
        interrupt.arm()
        try:
            engine.backward(loss)
        except KeyboardInterrupt:
            with pytest.raises(StateError, match=r"call step\(\), which closes that step"):
                engine.zero_grad()
            places.append(interrupt.place)
        finally:
            interrupt.disarm()
        engine.step()
    assert places
    after = all_states(engine)
    engine.close()
    other = make_engine(config)
    train(other, num_steps=10)
    assert same_states(all_states(other), after)
    other.close()


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_step_is_taken_or_not_wherever_it_is_interrupted(clipping: float, tmp_path: Path) -> None:
    config = settings(tmp_path, placement="nvme", gradient_clipping=clipping)
    engine = make_engine(config)
    num_steps = 0
    for number in range(1, 100_000, 11):
        engine.backward(engine(tokens(num_steps)))
        interrupt = Injected(number)
        interrupt.arm()
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupt.came = True
        finally:
            interrupt.disarm()
        if engine.global_steps == num_steps:
            assert interrupt.came
            engine.step()
        num_steps += 1
        assert engine.global_steps == num_steps, interrupt.place
        assert engine.micro_steps == num_steps, interrupt.place
        if interrupt.num_places < number:
            break
    assert num_steps > 5
    after = all_states(engine)
    engine.close()
    other = make_engine(config)
    train(other, num_steps=num_steps)
    assert same_states(all_states(other), after)
    other.close()


def test_a_schedule_that_was_interrupted_makes_up_for_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, placement="host", bf16=None, fp16={"enabled": True, "initial_scale_power": 4})
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 9}}
    engine = make_engine(config)
    train(engine, num_steps=1)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    engine.backward(engine(tokens(1)))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "was_step_applied", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.global_steps == 2
    train(engine, num_steps=1, first_seed=2)
    rates = engine.get_lr()
    engine.close()
    other = make_engine(config)
    train(other, num_steps=3)
    assert other.get_lr() == rates
    other.close()


EVERY_NTH_WRITE = int(os.environ.get("OFFLOADZERO_TEST_EVERY_NTH_WRITE", "13"))
WRITES: dict[str, Callable[[nn.Module, float], object]] = {
    "data": lambda model, value: model.blocks[1].up.weight.data.fill_(value),
    "assigned": lambda model, value: setattr(
        model.blocks[1].up.weight, "data", torch.full((145, 48), value).bfloat16()
    ),
    "state dict": lambda model, value: model.state_dict()["blocks.1.up.weight"].fill_(value),
    "loaded": lambda model, value: model.blocks[1].up.load_state_dict(
        {"weight": torch.full((145, 48), value)}, strict=False
    ),
    "set": lambda model, value: offloadzero.zero.safe_set_full_fp32_param(
        model.blocks[1].up.weight, torch.full((145, 48), value)
    ),
    "gathered": lambda model, value: gathered_fill(model.blocks[1].up.weight, value),
}


def gathered_fill(param: nn.Parameter, value: float) -> None:
    with offloadzero.zero.GatheredParameters(param, modifier_rank=0):
        param.data.fill_(value)


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
@pytest.mark.parametrize("how", WRITES)
def test_a_weight_is_written_or_not_wherever_that_is_interrupted(
    how: str, placement: str, tmp_path: Path
) -> None:
    """Its fp32 master with it."""
    engine = make_engine(settings(tmp_path, placement=placement, gradient_clipping=1.0))
    train(engine, num_steps=1)
    param = engine.module.blocks[1].up.weight
    WRITES["set"](engine.module, 0.123)
    old = float(offloadzero.zero.safe_get_full_fp32_param(param)[0, 0])
    num_whole = 0
    for number in range(1, 100_000, EVERY_NTH_WRITE):
        value = 0.123 + number / 1000
        (interrupt,) = at_each_place(
            engine, lambda value=value: WRITES[how](engine.module, value), first=number
        )
        master = offloadzero.zero.safe_get_full_fp32_param(param)
        assert torch.equal(master, master[0, 0].expand(master.shape)), interrupt.place
        now = float(master[0, 0])
        assert now == old or math.isclose(now, value, rel_tol=2**-8), interrupt.place
        assert torch.equal(param.data, torch.full_like(param.data, now)), interrupt.place
        assert param.grad is None
        num_whole += now != old
        old = now
        if interrupt.num_places < number:
            break
    assert num_whole
    WRITES[how](engine.module, 0.25)
    train(engine, num_steps=2, first_seed=1)
    after = all_states(engine)
    engine.close()
    other = make_engine(settings(tmp_path, placement=placement, gradient_clipping=1.0))
    train(other, num_steps=1)
    WRITES["set"](other.module, 0.25)
    train(other, num_steps=2, first_seed=1)
    assert same_states(all_states(other), after)
    other.close()


# --- sections ---


def test_an_interrupt_before_a_section_waits_for_its_end() -> None:
    done = []

    @uninterrupted_from_start
    def section() -> None:
        with uninterrupted:
            done.append("inside")

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is section.__code__:
            sys.setprofile(None)
            handle = signal.getsignal(signal.SIGINT)
            assert callable(handle)
            handle(signal.SIGINT, frame)

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        section()
    assert done == ["inside"]


def test_an_interrupt_that_is_held_is_raised_by_who_asks() -> None:
    done = []

    def use() -> None:
        with held:
            signal.raise_signal(signal.SIGINT)
            done.append("held")
        done.append("not yet")
        with uninterrupted:  # an outer section goes on holding
            raise_held()
            done.append("nor here")

    with pytest.raises(KeyboardInterrupt):
        use()
    assert done == ["held", "not yet", "nor here"]
    raise_held()  # once
