"""Loops that accumulate, schedule, drop and clip under small leases: bitwise as with everything on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadzero
from offloadzero.errors import StateError
from tests.streaming.loops import NUM_STEPS, check_everywhere, steps, take_inputs
from tests.support import models
from tests.support.cases import IN_FULL
from tests.support.models import WIDTH, Stack, features
from tests.support.training import (
    Loop,
    PlainEngine,
    assert_same,
    make_config,
    run_engine,
    run_plain,
    snapshot,
    worst_relative_difference,
)

pytestmark = pytest.mark.usefixtures("no_files_left")

# --- accumulation, in three ways


def test_accumulation_counted_set_and_suppressed_agree(tmp_path: Path) -> None:
    """The engine's counting, set_gradient_accumulation_boundary and no_sync give the same bits."""
    num_micro = 9 if IN_FULL else 6
    counted = take_inputs(features, num_steps=num_micro)

    def with_boundary(engine: Any) -> list[float]:
        losses = []
        for seed in range(num_micro):
            engine.set_gradient_accumulation_boundary(seed % 3 == 2)
            losses += take_inputs(lambda _, seed=seed: features(seed), num_steps=1)(engine)
        return losses

    def with_no_sync(engine: Any) -> list[float]:
        losses = []
        for seed in range(num_micro):
            one = take_inputs(lambda _, seed=seed: features(seed), num_steps=1)
            if seed % 3 == 2:
                engine.set_gradient_accumulation_boundary(True)
                losses += one(engine)
            else:
                with engine.no_sync():
                    losses += one(engine)
        return losses

    for clipping in (0.0, 0.5):
        reference = check_everywhere(Stack, counted, tmp_path, accumulation=3, clipping=clipping)
        for placement in ("resident", "host", "nvme"):
            config = make_config(placement, tmp_path, dtype=None, accumulation=3, clipping=clipping)
            assert_same(run_engine(Stack, with_boundary, config), reference)
            assert_same(run_engine(Stack, with_no_sync, config), reference)


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_plain_loop_is_the_engine(clipping: float, accumulation: int, tmp_path: Path) -> None:
    """offload(): backward, step, zero_grad as in any script, with a scheduler on the optimizer."""

    def run(placement: str) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        config = make_config(placement, tmp_path, accumulation=accumulation, clipping=clipping)
        model, offloaded = offloadzero.offload(model, optimizer, config)
        losses = []
        for step in range(NUM_STEPS):
            offloaded.zero_grad()
            for micro in range(accumulation):
                loss = model(features(step * accumulation + micro))
                (loss / accumulation).backward()
                losses.append(loss.item())
            assert all(param.grad is not None for param in model.parameters())
            offloaded.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        offloaded.close()
        return losses, weights

    loop = take_inputs(features, num_steps=NUM_STEPS * accumulation)
    config = make_config("resident", tmp_path, accumulation=accumulation, clipping=clipping)
    expected = run_engine(Stack, loop, config)
    for placement in ("resident", "host", "nvme"):
        losses, weights = run(placement)
        assert losses == expected.losses
        assert all(torch.equal(weights[name], value) for name, value in expected.weights.items())


def test_accumulation_without_homes_for_gradients_is_refused_not_awaited(tmp_path: Path) -> None:
    for placement in ("host", "nvme", "resident"):
        engine, *_ = offloadzero.initialize(
            model=Stack(num_blocks=6), config=make_config(placement, tmp_path, accumulation=1)
        )
        with engine.no_sync():
            loss = engine(features(0))
            with pytest.raises(StateError, match="gradient_accumulation_steps"):
                engine.backward(loss)
        engine.close()


# --- param groups, schedules, closures, dropped gradients


def test_param_groups_with_their_own_hyperparameters(tmp_path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        return [
            {"params": matrices, "lr": 2e-3, "weight_decay": 0.2},
            {"params": vectors, "lr": 5e-4, "weight_decay": 0.0, "betas": (0.8, 0.95)},
        ]

    def slow_down(engine: Any, _seed: int) -> list[float]:
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.7
        return []

    loop = steps(lambda engine, seed: engine(features(seed)), after=slow_down)

    outcomes = []
    for placement in ("resident", "host", "nvme"):
        torch.manual_seed(0)
        model = Stack()
        engine, *_ = offloadzero.initialize(
            model=model,
            model_parameters=groups(model),
            config=make_config(placement, tmp_path, dtype=None),
        )
        losses = loop(engine)
        outcomes.append(snapshot(engine, losses))
        engine.close()
    assert_same(outcomes[1], outcomes[0])
    assert_same(outcomes[2], outcomes[0])
    torch.manual_seed(0)
    model = Stack()
    plain = PlainEngine(model, make_config("resident", tmp_path, dtype=None), groups(model))
    assert worst_relative_difference(outcomes[0].losses, loop(plain)) < 2e-5
    for name, value in plain.module.state_dict().items():
        torch.testing.assert_close(outcomes[0].weights[name], value, rtol=1e-4, atol=1e-5)


def test_hyperparameters_changed_too_late_are_refused(tmp_path: Path) -> None:
    """An update in backward has used the old learning rate already."""
    engine, optimizer, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path))
    engine.backward(engine(features(0)))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StateError, match="in_backward"):
        engine.step()
    engine.close()


def test_hyperparameters_set_between_backward_and_step_are_used(tmp_path: Path) -> None:
    def set_rate(engine: Any, seed: int) -> list[float]:
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3 * (seed + 1)
        return []

    loop = steps(lambda engine, seed: engine(features(seed)), between=set_rate)
    check_everywhere(Stack, loop, tmp_path, clipping=0.5)


def test_zero_grad_drops_gradients(tmp_path: Path) -> None:
    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            (engine(features(100 + seed)) * 1000).backward()
            engine.zero_grad()
            losses += take_inputs(lambda _, seed=seed: features(seed), num_steps=1)(engine)
        return losses

    for placement in ("resident", "host", "nvme", "mixed"):
        config = make_config(placement, tmp_path, clipping=0.5)
        assert_same(run_engine(Stack, loop, config), run_engine(Stack, take_inputs(features), config))


# --- clipping


def test_global_norm_is_exact(tmp_path: Path) -> None:
    """Against clip_grad_norm_ on a plain fp32 copy, over unused parameters and micro batches."""

    def loop_of(norms: list[float]) -> Loop:
        def note(engine: Any, seed: int) -> list[float]:
            if seed % 2:
                is_plain = isinstance(engine, PlainEngine)
                norms.append(engine.norm if is_plain else engine.get_global_grad_norm())
            return []

        return steps(lambda engine, seed: engine(features(seed), (0, 2, 3)), 6, after=note)

    expected: list[float] = []
    options = {"dtype": None, "clipping": 0.01, "accumulation": 2}
    plain = run_plain(models.SometimesStack, loop_of(expected), make_config("resident", tmp_path, **options))
    found: dict[str, list[float]] = {}
    for placement in ("resident", "host", "nvme", "mixed"):
        norms = found.setdefault(placement, [])
        outcome = run_engine(
            models.SometimesStack, loop_of(norms), make_config(placement, tmp_path, **options)
        )
        assert worst_relative_difference(outcome.losses, plain.losses) < 2e-5
    assert found["resident"] == found["host"] == found["nvme"] == found["mixed"]
    assert found["host"] == pytest.approx(expected, rel=2e-5)
    assert min(expected) > 0.05  # clipping did something


def test_global_norm_without_clipping(tmp_path: Path) -> None:
    """Updates in backward know the norm too, after the fact."""
    torch.manual_seed(0)
    plain = Stack()
    plain(features(0)).backward()
    expected = float(
        torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    )
    for placement in ("resident", "host", "nvme"):
        torch.manual_seed(0)
        engine, *_ = offloadzero.initialize(
            model=Stack(), config=make_config(placement, tmp_path, dtype=None)
        )
        engine.backward(engine(features(0)))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-6)
        engine.close()


# --- misuse of graphs


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_backward_through_a_graph_from_before_the_step(
    placement: str, clipping: float, tmp_path: Path
) -> None:
    engine, *_ = offloadzero.initialize(
        model=Stack(), config=make_config(placement, tmp_path, clipping=clipping)
    )
    old = engine(features(1))
    engine.backward(engine(features(0)))
    engine.step()
    with pytest.raises(StateError, match="updated between this forward and its backward"):
        engine.backward(old)
    engine.close()


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_second_backward_before_step_with_updates_in_backward(placement: str, tmp_path: Path) -> None:
    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            loss, again = engine(features(seed)), engine(features(seed + 50))
            engine.backward(loss)
            with pytest.raises(StateError, match=r"gradient_accumulation_steps|updated between this forward"):
                engine.backward(again)
            with pytest.raises(StateError, match=r"already updated.*in_backward"):
                engine(features(seed + 50))  # with the weights after the step
            with pytest.raises(StateError, match=r"already updated.*in_backward"):
                next(engine.module.parameters()).sum()
            engine.step()
            losses.append(loss.item())
        return losses

    config = make_config(placement, tmp_path)
    # What the refused backward had computed is in no later step.
    assert_same(run_engine(Stack, loop, config), run_engine(Stack, take_inputs(features), config))


@pytest.mark.parametrize("update", ["in_backward", "at_step"])
def test_retained_graph_twice(update: str, tmp_path: Path) -> None:
    """Two backward passes through one graph add up, as in torch."""

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            loss = engine(features(seed))
            (loss / 2).backward(retain_graph=True)
            (loss / 2).backward()
            if isinstance(engine, PlainEngine):
                engine.step_now()
            else:
                engine.optimizer.step()
            losses.append(loss.item())
        return losses

    options: dict[str, Any] = {"clipping": 0.5 if update == "at_step" else 0.0}
    if update == "in_backward":
        # The engine's counter would call every backward a boundary; the optimizer's own counting is used.
        def counted(engine: Any) -> list[float]:
            if not isinstance(engine, PlainEngine):
                engine.optimizer.runtime.accumulation.ends_with_step = False
            return loop(engine)

        check_everywhere(Stack, counted, tmp_path, accumulation=2, **options)
    else:
        check_everywhere(Stack, loop, tmp_path, **options)


def test_detached_use_of_a_weight(tmp_path: Path) -> None:
    """Exact when updates come after backward; refused, not wrong, when they come in it."""

    class Detaching(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h + F.linear(torch.tanh(h) * x, self.up.weight.detach()[:WIDTH])

    check_everywhere(lambda: Stack(Detaching), take_inputs(features), tmp_path, clipping=0.5)
