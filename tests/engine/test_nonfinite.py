"""Gradients that are no numbers: training stops before harm is done, or skips the whole step."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from offloadzero import NonFiniteError
from tests.engine.poisonable import (
    PLACEMENTS,
    WHERE,
    assert_all_finite,
    poisonable_engine,
    same_states,
    states_after,
)
from tests.support.cases import each_pair
from tests.support.tiny import all_states, make_engine, settings, tokens, train


@pytest.mark.parametrize(("where", "placement", "clipping"), each_pair(WHERE, PLACEMENTS, (0.0, 1.0)))
def test_bf16_stops_at_a_gradient_that_is_not_finite(
    tmp_path: Path, placement: str, where: str, clipping: float
) -> None:
    engine, model = poisonable_engine(tmp_path, where, placement, gradient_clipping=clipping)
    train(engine, num_steps=2)
    engine.synchronize()
    model.poison = math.inf if where == WHERE[1] else math.nan
    with pytest.raises(NonFiniteError) as caught:  # noqa: PT012 (where it shows depends on the timing)
        train(engine, num_steps=1)
        engine.synchronize()
    unit = {"emb.weight": "emb", "blocks.1.up.weight": "blocks.1", "norm.weight": "(rest)"}[where]
    assert unit in str(caught.value)
    assert "on_nonfinite" in str(caught.value)
    assert_all_finite(engine)
    model.poison = None
    with pytest.raises(NonFiniteError):
        train(engine, num_steps=1)
    assert_all_finite(engine)
    engine.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_bf16_stops_at_the_next_use_at_the_latest(tmp_path: Path, placement: str) -> None:
    engine, model = poisonable_engine(tmp_path, WHERE[1], placement, gradient_clipping=1.0)
    train(engine, num_steps=1)
    model.poison = math.nan
    engine.backward(engine(tokens(1)))
    with pytest.raises(NonFiniteError):  # noqa: PT012
        engine.step()
        engine(tokens(2))
    assert_all_finite(engine)
    engine.close()


def test_a_gradient_that_is_not_finite_and_seen_by_nobody_fails_close(tmp_path: Path) -> None:
    engine, model = poisonable_engine(tmp_path, WHERE[1], "host", gradient_clipping=1.0)
    model.poison = math.nan
    engine.backward(engine(tokens(1)))
    engine.step()
    with pytest.raises(NonFiniteError):
        engine.close()


@pytest.mark.parametrize(("where", "placement", "clipping"), each_pair(WHERE, PLACEMENTS, (0.0, 1.0)))
def test_skipping_skips_the_whole_step(tmp_path: Path, placement: str, where: str, clipping: float) -> None:
    update = {"on_nonfinite": "skip", "chunk_elements": 4096}
    engine, model = poisonable_engine(tmp_path, where, placement, gradient_clipping=clipping, update=update)
    train(engine, num_steps=2)
    before = all_states(engine)
    model.poison = math.nan
    train(engine, num_steps=1, first_seed=2)
    assert not engine.was_step_applied()
    assert not math.isfinite(engine.get_global_grad_norm())
    assert same_states(all_states(engine), before)
    assert (engine.skipped_steps, engine.global_steps) == (1, 3)
    model.poison = None
    train(engine, num_steps=1, first_seed=3)
    assert engine.was_step_applied()
    after = all_states(engine)
    assert not same_states(after, before)
    engine.close()

    # The skipped step left no trace: the bias corrections too are those of three steps.
    other, _ = poisonable_engine(tmp_path, where, placement, gradient_clipping=clipping, update=update)
    assert same_states(states_after(other, (0, 1, 3)), after)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_fp16_skips_and_lowers_the_scale(tmp_path: Path, placement: str, dynamic: bool) -> None:
    scaling = {"initial_scale_power": 8, "hysteresis": 1} if dynamic else {"loss_scale": 256.0}
    engine, model = poisonable_engine(
        tmp_path, WHERE[1], placement, bf16=None, fp16={"enabled": True, **scaling}
    )
    train(engine, num_steps=2)
    before = all_states(engine)
    assert engine.loss_scale == 256.0
    model.poison = math.inf
    train(engine, num_steps=1)
    assert not engine.was_step_applied()
    assert engine.skipped_steps == 1
    assert engine.loss_scale == (128.0 if dynamic else 256.0)
    assert same_states(all_states(engine), before)
    model.poison = None
    train(engine, num_steps=1)
    assert engine.was_step_applied()
    assert_all_finite(engine)
    engine.close()


def test_fp16_without_scaling_is_refused(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, bf16=None, fp16={"enabled": True}))
    loss = engine(tokens(0))
    with pytest.raises(RuntimeError, match="scale"):
        loss.backward()
    engine.close()
