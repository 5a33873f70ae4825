"""Where updates run in backward, the landing thread says what was applied: who asks for it waits for what has begun."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.errors import NonFiniteError, StateError
from offloadzero.observe.clock import StepClock
from tests.support.faults import observes
from tests.support.plain_form import engine_config, final_weights, make_model
from tests.support.tiny import make_engine


class HeldLanding:
    """Gradients land as soon as the script waits for something, and not before."""

    def __init__(self) -> None:
        self._may_land = threading.Event()
        self.num_landed = 0

    def wait(self, _name: object) -> None:
        assert self._may_land.wait(60.0)

    def count(self, _name: object) -> None:
        self.num_landed += 1

    def until_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let go at the next wait."""
        waiting = StepClock.waiting

        def let_go(clock: StepClock, name: str, **options: Any) -> object:
            self._may_land.set()
            return waiting(clock, name, **options)

        monkeypatch.setattr(StepClock, "waiting", let_go)

    def let_go(self) -> None:
        self._may_land.set()


@contextmanager
def backward_without_landing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, factor: float = 1.0, checkpoint: Path | None = None
) -> Iterator[tuple[offloadzero.Engine, HeldLanding]]:
    """An engine after the backward of one block, of which nothing has landed yet."""
    engine = make_engine(engine_config("host", directory), make_model())
    if checkpoint is not None:
        engine.save_checkpoint(checkpoint)
    landing = HeldLanding()
    held = observes("decider.decide_one", before=landing.wait, after=landing.count)
    with held, monkeypatch.context() as patch:
        try:
            engine.backward(engine.module.blocks[1](torch.ones(2, 16)).pow(2).sum() * factor)
            assert landing.num_landed == 0
            landing.until_waited_for(patch)
            yield engine, landing
        finally:
            landing.let_go()
            engine.close()


def test_zero_grad_waits_until_it_is_known_what_was_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backward_without_landing(tmp_path, monkeypatch) as (engine, landing):
        for _ in range(2):
            with pytest.raises(
                StateError, match=r"zero_grad\(\) before step\(\), but backward has already up"
            ):
                engine.zero_grad()
            assert landing.num_landed == 1
        engine.step()
        assert engine.was_step_applied()


def test_zero_grad_waits_for_the_refusal_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with backward_without_landing(tmp_path, monkeypatch, factor=math.inf) as (engine, _):
        before = final_weights(make_model())  # those of the engine would be waited for
        with pytest.raises(NonFiniteError, match="nothing of it was applied"):
            engine.zero_grad()
        engine.zero_grad()
        for name, value in final_weights(engine.module).items():
            assert torch.equal(value, before[name])
        assert engine.global_steps == 0


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_whether_a_step_was_applied_is_said_when_it_is_known(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backward_without_landing(tmp_path, monkeypatch, factor=factor) as (engine, _):
        engine.step()
        assert engine.was_step_applied() is math.isfinite(factor)
        assert engine.optimizer.overflow is not math.isfinite(factor)
        if not math.isfinite(factor):
            with pytest.raises(NonFiniteError, match="nothing of it was applied"):
                engine.step()


@pytest.mark.parametrize("num_empty", [0, 2])
def test_a_step_that_is_refused_when_others_have_come_is_counted(
    num_empty: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backward_without_landing(tmp_path, monkeypatch, factor=math.inf) as (engine, _):
        for _ in range(1 + num_empty):  # without gradients from the second on
            engine.step()
        with pytest.raises(NonFiniteError, match="nothing of it was applied"):
            engine.optimizer.synchronize()
        engine.zero_grad()
        assert (engine.global_steps, engine.skipped_steps) == (1 + num_empty, 1)


def test_a_checkpoint_is_loaded_over_updates_that_have_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    with backward_without_landing(tmp_path, monkeypatch, checkpoint=saved) as (engine, landing):
        engine.load_checkpoint(saved)
        assert landing.num_landed == 1
        weight = engine.module.blocks[1].up.weight
        assert float(engine.optimizer.state[weight]["step"]) == 0
        assert not engine.optimizer.state[weight]["exp_avg"].any()
        fresh = final_weights(make_model())
        for name, value in final_weights(engine.module).items():
            assert torch.equal(value, fresh[name])


def test_a_refusal_that_comes_while_a_checkpoint_is_loaded_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    with backward_without_landing(tmp_path, monkeypatch, factor=math.inf, checkpoint=saved) as (engine, _):
        engine.load_checkpoint(saved)
        engine.backward(engine.module.blocks[1](torch.ones(2, 16)).pow(2).sum())
        engine.step()
        assert engine.was_step_applied()
