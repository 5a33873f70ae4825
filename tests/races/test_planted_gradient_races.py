"""Waits left out where scripts use `param.grad`, planted one at a time: each comparison catches its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.step import landing
from offloadzero.step.param_grad import GradientAccess
from offloadzero.step.record_gradient import RecordGradient
from tests.support.faults import delays
from tests.support.plain_form import final_weights, grads, offloaded
from tests.support.tiny import tokens

NUM_STEPS = 3
Edit = Callable[[nn.Module], None]


def run(
    script: Callable[[nn.Module, offloadzero.OffloadedOptimizer], Any], placement: str, directory: Path
) -> Any:
    with offloaded(placement, directory) as (model, optimizer):
        seen = script(model, optimizer)
        return seen, {name: value.tolist() for name, value in final_weights(model).items()}


def editing(*, before_step: Edit | None = None, after_step: Edit | None = None) -> Callable[..., list[float]]:
    def script(model: nn.Module, optimizer: offloadzero.OffloadedOptimizer) -> list[float]:
        losses = []
        for step in range(NUM_STEPS):
            loss = model(tokens(step))
            loss.backward()
            losses.append(loss.item())
            if before_step is not None:
                before_step(model)
            optimizer.step()
            if after_step is not None:
                after_step(model)
            optimizer.zero_grad()
        return losses

    return script


def dropped_while_it_lands(model: nn.Module, optimizer: offloadzero.OffloadedOptimizer) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        for micro in range(3):
            loss = model(tokens(3 * step + micro))
            loss.backward()
            losses.append(loss.item())
            if micro == 1:
                model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def read(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 2


def overwrite(model: nn.Module) -> None:
    for grad in grads(model):
        grad.copy_(torch.full((), 7.0))


def multiply(model: nn.Module) -> None:
    for grad in grads(model):
        grad.mul_(0.25)


def no_wait_for_the_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientAccess, "_wait_landed", lambda *_: None)


def no_wait_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    store = GradientAccess.store

    def impatient(access: GradientAccess, state: RecordGradient, slot: Any, value: Tensor) -> None:
        own, access._previous_update = access._previous_update, lambda _: FINISHED
        try:
            store(access, state, slot, value)
        finally:
            access._previous_update = own

    monkeypatch.setattr(GradientAccess, "store", impatient)


def factors_of_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordGradient, "as_of_now", lambda state: state)


def landing_over_a_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_of(tickets: Iterable[Ticket]) -> Ticket:
        return next(iter(tickets))

    monkeypatch.setattr(landing, "AllOf", first_of)


Delay = Callable[[], AbstractContextManager[None]]
CASES: dict[str, tuple[Callable[..., Any], Delay, Callable[[pytest.MonkeyPatch], None]]]
CASES = {
    "read before it has landed": (
        editing(before_step=read),
        partial(delays, "lane.launch", 0.01, about="gradient-d2h"),
        no_wait_for_the_landing,
    ),
    "written before the update has read it": (
        editing(after_step=overwrite),
        partial(delays, "update.compute", 0.01),
        no_wait_for_the_update,
    ),
    "scaled after the step": (
        editing(after_step=multiply),
        partial(delays, "decider.decide", 0.01),
        factors_of_later,
    ),
    "the next one lands over one that was dropped": (
        dropped_while_it_lands,
        partial(delays, "landing.merge", 0.05),  # slower than a backward on a busy machine
        landing_over_a_landing,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wait_left_out_is_caught(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: ExitStack
) -> None:
    script, delay, plant = CASES[name]
    expected = run(script, "resident", tmp_path)
    faults.enter_context(delay())
    assert run(script, "host", tmp_path) == expected
    plant(monkeypatch)
    assert run(script, "host", tmp_path) != expected


def test_the_model_has_units_whose_gradients_leave(tmp_path: Path) -> None:
    """Else nothing above could differ."""
    with offloaded("host", tmp_path) as (_, optimizer):
        states = optimizer.runtime.parts.window.gradients.values()
        assert sum(state.home is not None and state.home.tier.value == "host" for state in states) >= 4
