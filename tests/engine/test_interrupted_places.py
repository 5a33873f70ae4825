"""An interrupt at each place of a forward, a backward, a step and a write: it is taken or not, and training goes on."""

from __future__ import annotations

import math
import os
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
from offloadzero.core import interrupts
from offloadzero.core.interrupts import call_script, uninterrupted
from offloadzero.core.torch_private import top_saved_tensors_default_hooks
from offloadzero.errors import StateError
from offloadzero.memory.tickets import Promise
from tests.engine.interrupts import Injected, InjectedBehindCall
from tests.engine.poisonable import same_states, states_after
from tests.engine.test_interrupts import handler
from tests.support.faults import delays
from tests.support.tiny import all_states, make_engine, settings, tokens, train

__all__ = ["handler"]  # a fixture for every test of the file

EVERY_NTH_BACKWARD = int(os.environ.get("OFFLOADZERO_TEST_EVERY_NTH_BACKWARD", "149"))


def at_each_place(
    engine: offloadzero.Engine,
    use: Callable[[], object],
    *,
    first: int = 1,
    every: int = 100_000,
    inject: type[Injected] = Injected,
) -> list[Injected]:
    """`use()` with an interrupt at its `first` place, then at each `every`th after it."""
    done = []
    for number in range(first, 100_000, every):
        interrupt = inject(number)
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
        assert not interrupts.held.pending, interrupt.place
        done.append(interrupt)
        if interrupt.num_places < number:
            break
    return done


@pytest.mark.parametrize("inject", [Injected, InjectedBehindCall])
@pytest.mark.parametrize("tier", [None, "host"])
def test_a_forward_leaves_nothing_pinned_wherever_it_is_interrupted(
    tier: str | None, inject: type[Injected], tmp_path: Path
) -> None:
    keys = {} if tier is None else {"activation_checkpoints": {"tier": tier}}
    config = settings(tmp_path, placement="host", gradient_clipping=1.0, **keys)
    engine = make_engine(config)
    train(engine, num_steps=2)
    assert len(at_each_place(engine, lambda: engine(tokens(2)), every=7, inject=inject)) > 30
    train(engine, num_steps=1, first_seed=2)
    after = all_states(engine)
    engine.close()
    assert same_states(states_after(make_engine(config), range(3)), after)


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
    assert same_states(states_after(make_engine(config), range(4)), after)


class InjectedInWait(Injected):
    """A SIGINT at the `countdown`th place of a blocking wait after backward has begun to update weights."""

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is interrupts.wait.__code__ and interrupts.held.until() is not None:
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
            with pytest.raises(
                StateError, match=r"backward has already updated the weights: call step\(\) first"
            ):
                engine.zero_grad()
            places.append(interrupt.place)
        finally:
            interrupt.disarm()
        engine.step()
    assert places
    after = all_states(engine)
    engine.close()
    assert same_states(states_after(make_engine(config), range(10)), after)


def waits_to_its_end(ticket: Promise, interrupt: Injected) -> bool:
    """Whether a wait inside of a section comes to its end, with an interrupt in it."""
    has_waited = False

    @uninterrupted
    def section() -> None:
        nonlocal has_waited
        interrupt.arm()
        ticket.wait()
        has_waited = True

    try:
        section()
    except KeyboardInterrupt:
        interrupt.came = True
    finally:
        interrupt.disarm()
    return has_waited


def test_a_wait_for_what_is_done_is_no_place_for_an_interrupt(tmp_path: Path) -> None:
    """A step that hands its gradients over looks at the one before it: an interrupt there ended it half-way."""
    engine = make_engine(settings(tmp_path, placement="host"))  # which holds interrupts back
    done = Promise()
    done.fulfil()
    places = []
    for number in range(1, 100):
        interrupt = Injected(number)
        assert waits_to_its_end(done, interrupt), interrupt.place
        if interrupt.num_places < number:
            break
        places.append(interrupt.place)
    assert any(place.endswith("wait (call)") for place in places), places
    engine.close()


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
    assert same_states(states_after(make_engine(config), range(num_steps)), after)


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


EVERY_NTH_WRITE = int(os.environ.get("OFFLOADZERO_TEST_EVERY_NTH_WRITE", "17"))
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

    @uninterrupted
    def section() -> None:
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


def test_an_interrupt_that_is_held_is_raised_before_the_script_is_called() -> None:
    done = []

    @uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("held")

    @uninterrupted
    def outer() -> None:
        inner()
        done.append("not yet")
        call_script(done.append, "nor here")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["held", "not yet"]
    call_script(done.append, "once")
    assert done[-1] == "once"


def test_the_script_is_interrupted_at_once_in_a_section_that_calls_it() -> None:
    done = []

    def script() -> None:
        done.append("begins")
        try:
            signal.raise_signal(signal.SIGINT)
            done.append("too late")
        finally:
            section()

    @uninterrupted
    def section() -> None:  # a section inside of what the script does
        done.append("inner")

    @uninterrupted
    def outer() -> None:
        try:
            call_script(script)
        finally:
            done.append("ends")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["begins", "inner", "ends"]
