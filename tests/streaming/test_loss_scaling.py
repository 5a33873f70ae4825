"""Loss scaling and gradients that are not finite, the same in every placement."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.errors import StateError
from tests.streaming.loops import take_inputs
from tests.support.faults import delays
from tests.support.models import Stack, features
from tests.support.training import Outcome, assert_same, make_config, run_engine, snapshot

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.mark.parametrize("placement", ["resident", "host", "nvme", "mixed"])
def test_overflow_skips_the_step(placement: str, tmp_path: Path) -> None:
    scale = {"loss_scale": 0, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}
    config = make_config(
        placement,
        tmp_path,
        dtype="fp16",
        fp16=scale,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
    )
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    take_inputs(features, num_steps=2)(engine)
    before, rate = snapshot(engine, []), engine.get_lr()
    assert engine.loss_scale == 256.0
    loss = engine(features(5)) * 1e6  # overflows fp16 on its way back
    engine.backward(loss)
    engine.step()
    assert not engine.was_step_applied()
    assert engine.loss_scale == 128.0
    assert (engine.skipped_steps, engine.global_steps) == (1, 3)
    assert engine.get_lr() == rate
    assert math.isnan(engine.get_global_grad_norm())
    after = snapshot(engine, [])
    after.norm = before.norm
    assert_same(after, before)
    loss = engine(features(6))
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied()
    assert engine.get_lr() != rate
    assert not torch.equal(engine.module.state_dict()["out.weight"], before.weights["out.weight"])
    engine.close()


def step_over_nothing(directory: Path) -> offloadzero.Engine:
    """An engine whose first step overflows, and whose second one has no gradients."""
    scale = {"loss_scale": 0, "initial_scale_power": 8, "hysteresis": 1}
    config = make_config("resident", directory, dtype="fp16", fp16=scale)
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    engine.backward(loss_of_block(engine, 0) * 1e6)
    engine.step()
    engine.step()
    return engine


def loss_of_block(engine: offloadzero.Engine, number: int) -> torch.Tensor:
    """A loss that uses the weights of one block only."""
    return engine.module.blocks[number](features(0).half()).float().pow(2).mean()


def test_a_step_without_gradients_comes_after_the_decision_over_the_one_before(tmp_path: Path) -> None:
    """Its own is known at once: the scale and the number of skipped steps wait for the earlier one all the same."""
    with delays("decider.decide", 0.3):
        engine = step_over_nothing(tmp_path)
        assert engine.loss_scale == 128.0
        engine.close()
        engine = step_over_nothing(tmp_path)
        assert (engine.skipped_steps, engine.global_steps) == (1, 2)
        engine.close()


def test_what_is_scaled_after_a_step_without_gradients_is_unscaled_alike(tmp_path: Path) -> None:
    """A forward over other units waits for no update of the step that overflows."""

    def train() -> tuple[float, Outcome]:
        engine = step_over_nothing(tmp_path)
        engine.backward(loss_of_block(engine, 1))
        engine.step()
        norm = engine.get_global_grad_norm()
        outcome = snapshot(engine, [])
        engine.close()
        return norm, outcome

    at_once = train()
    with delays("decider.decide", 0.3):
        later = train()
    assert later[0] == at_once[0] > 0.0
    assert_same(later[1], at_once[1])


def test_training_over_overflows_is_the_same_everywhere(tmp_path: Path) -> None:
    """A scale that starts far too high: most of the first steps are skipped."""
    scale = {"loss_scale": 0, "initial_scale_power": 30, "hysteresis": 2, "loss_scale_window": 3}

    def loop(engine: Any) -> list[float]:
        losses = take_inputs(features, num_steps=40)(engine)
        skipped.append(engine.skipped_steps)
        return losses

    skipped: list[int] = []
    outcomes = [
        run_engine(Stack, loop, make_config(placement, tmp_path, dtype="fp16", fp16=scale, clipping=0.5))
        for placement in ("resident", "host", "nvme", "mixed")
    ]
    assert len(set(skipped)) == 1
    assert 10 < skipped[0] < 38
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])


def test_each_loss_is_scaled_before_its_backward_and_after_the_step_before(tmp_path: Path) -> None:
    """Two losses may be scaled before the backward of either; a third backward is not theirs."""

    def grads(*, together: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Stack()
        model, optimizer = offloadzero.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            make_config("host", tmp_path, dtype="fp16", fp16={"loss_scale": 8}),
        )
        losses = [model(features(seed)) for seed in range(4)]
        if together:
            scaled = [optimizer.scale(loss) for loss in losses[:2]]
            for one in scaled:
                one.backward()
        else:
            for loss in losses[:2]:
                optimizer.scale(loss).backward()
        with pytest.raises(StateError, match="once for each backward"):
            losses[2].backward()
        found = [param.grad.clone() for param in model.parameters()]
        optimizer.scale(losses[3])
        optimizer.step()
        with pytest.raises(StateError, match="once for each backward"):
            model(features(0)).backward()
        optimizer.close()
        return found

    for one, other in zip(grads(together=True), grads(together=False), strict=True):
        assert torch.equal(one, other)


def test_clipping_by_hand_counts_the_loss_scale_in() -> None:
    """A script's norm is that of the scaled loss; the configuration's is that of the loss itself."""
    max_norm = 0.1
    moves: list[list[torch.Tensor]] = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        config: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}
        config |= {} if by_hand else {"gradient_clipping": max_norm}
        model, optimizer = offloadzero.offload(model, torch.optim.SGD(model.parameters(), 0.1), config)
        before = [p.float() for p in model.parameters()]
        loss = model(torch.ones(4, 8, dtype=torch.float16)).float().square().mean()
        optimizer.scale(loss).backward()
        if by_hand:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm * optimizer.loss_scale)
            assert norm > 256 * max_norm  # it clips
        optimizer.step()
        moves.append([p.float() - old for p, old in zip(model.parameters(), before, strict=True)])
        assert torch.nn.utils.get_total_norm(moves[-1]) == pytest.approx(0.1 * max_norm, rel=0.01)
        optimizer.close()
    torch.testing.assert_close(*moves)


def test_a_scaled_loss_has_one_backward_whatever_runs_inside_of_it(tmp_path: Path) -> None:
    """Where all gradients come from reentrant checkpoints each of these begins as a backward of its own."""

    class Frozen(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.out.requires_grad_(False)

        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.is_reentrant)
            return x

    def train(*, is_reentrant: bool) -> Outcome:
        torch.manual_seed(0)
        model = Frozen()
        model.is_reentrant = is_reentrant
        config = make_config("host", tmp_path, dtype="fp16", accumulation=2, fp16={"loss_scale": 8})
        engine, *_ = offloadzero.initialize(model=model, config=config)
        losses = take_inputs(features, num_steps=2)(engine)
        with pytest.raises(StateError, match="once for each backward"):
            engine(features(0)).backward()
        outcome = snapshot(engine, losses)
        engine.close()
        return outcome

    assert_same(train(is_reentrant=True), train(is_reentrant=False))
