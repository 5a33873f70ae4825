"""Gradients that arrive in part, and weights that are written, or were looked at, while others use them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.core.segments import SegmentKind
from offloadzero.step.collect import GradientCollector
from tests.streaming.loops import steps, take_inputs
from tests.support.cases import each_pair
from tests.support.plain_form import adamw, expect_as_torch, plain_config
from tests.support.training import (
    Outcome,
    assert_same,
    make_config,
    run_engine,
    run_plain,
    worst_relative_difference,
)

WIDTH = 33


class Either(nn.Module):
    """One of two layers, chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in "ab"})

    def forward(self, x: Tensor, choice: str) -> Tensor:
        return x + self.layers[choice](x)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Either() for _ in range(2))

    def forward(self, x: Tensor, choice: str) -> Tensor:
        for block in self.blocks:
            x = block(x, choice)
        return x.float().square().mean()


def rows(seed: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Each micro batch uses the other layer of each block.
alternate = steps(lambda engine, seed: engine(rows(seed), "ababbaab"[seed]), 8)


@pytest.mark.parametrize("grad", ["device", "host", "nvme"])
def test_micro_batches_that_use_different_parameters_of_a_unit_add_up(grad: str, tmp_path: Path) -> None:
    def config(where: str) -> Any:
        given = make_config("host", tmp_path, accumulation=2, clipping=1.0)
        given["offloadzero"]["placement"] = {
            **dict.fromkeys(("param", "master", "exp_avg", "exp_avg_sq"), "host"),
            "grad": where,
        }
        return given

    outcome = run_engine(Choosing, alternate, config(grad))
    assert_same(
        outcome,
        run_engine(Choosing, alternate, make_config("resident", tmp_path, accumulation=2, clipping=1.0)),
    )
    plain = run_plain(Choosing, alternate, config(grad))
    assert worst_relative_difference(outcome.losses, plain.losses) < 0.01


class Reading:
    """The ticket of kernels that still read weights: until `end` is set nobody may write these."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def wait(self) -> None:
        self.end.wait(10.0)

    def done(self) -> bool:
        return self.end.is_set()


@contextmanager
def reading(engine: Any) -> Iterator[None]:
    """The device runs what is launched inside a while later; what it read has not changed when it has."""
    accelerator = engine.optimizer.runtime.accelerator
    homes = [r.segments[SegmentKind.PARAM].memory for r in engine.optimizer.runtime.records]
    before = [home.clone() for home in homes]
    kernels = Reading()
    unchanged: list[bool] = []

    def end() -> None:
        unchanged.extend(map(torch.equal, homes, before))
        kernels.end.set()

    accelerator.computed = lambda: kernels
    ending = threading.Timer(0.2, end)
    ending.start()
    try:
        yield
    finally:
        ending.join()
        del accelerator.computed
    assert unchanged
    assert all(unchanged)


@pytest.mark.parametrize("placement", ["resident", "host"])
def test_a_step_waits_for_an_evaluation_since_backward(placement: str, tmp_path: Path) -> None:
    """Its kernels may still read the weights, or a fetch of them the host's memory."""
    torch.manual_seed(0)
    config = make_config(placement, tmp_path, clipping=1.0)
    engine, *_ = offloadzero.initialize(model=Choosing(), config=config)
    engine.backward(engine(torch.ones(2, WIDTH).bfloat16(), "a"))
    with reading(engine):
        engine.step()
    engine.close()


@pytest.mark.parametrize("placement", ["resident", "host"])
def test_the_update_of_an_earlier_gradient_waits_for_the_last_micro_batch(
    placement: str, tmp_path: Path
) -> None:
    """In backward: a unit that the last micro batch used without a gradient is updated while kernels may read it."""
    torch.manual_seed(0)
    config = make_config(placement, tmp_path, accumulation=2)
    engine, *_ = offloadzero.initialize(model=Choosing(), config=config)
    x = torch.ones(2, WIDTH).bfloat16()
    engine.backward(engine(x, "a"))
    engine.step()
    with torch.no_grad():
        hidden = engine.module.blocks[0](x, "a")
    loss = engine.module.blocks[1](hidden, "a").float().square().mean()
    first = engine.optimizer.runtime.records[0].segments[SegmentKind.PARAM].memory
    before = first.clone()
    accelerator = engine.optimizer.runtime.accelerator
    waited = Reading()
    accelerator.computed = lambda: waited
    engine.backward(loss)
    time.sleep(0.1)
    unchanged = torch.equal(first, before)
    del accelerator.computed
    waited.end.set()
    engine.step()
    engine.synchronize()
    assert unchanged
    assert not torch.equal(first, before)
    engine.close()


@pytest.mark.parametrize("placement", ["resident", "host"])
def test_a_write_by_the_user_waits_for_what_was_launched(placement: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=Choosing(), config=make_config(placement, tmp_path))
    weights = {name: value + 1 for name, value in engine.module.state_dict().items()}
    with reading(engine):
        engine.module.load_state_dict(weights)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, weights[name])
    engine.close()


@pytest.mark.parametrize("placement", ["resident", "host"])
def test_a_step_is_clipped_by_the_norms_of_gradients_that_are_dropped_after_it(
    placement: str, tmp_path: Path
) -> None:
    """Though they were dropped, and another step has seen that, before their norms were taken."""

    def train(model: nn.Module, optimizer: Any, clip: Any, landing: Any = None) -> Tensor:
        may_land = threading.Event()
        if landing is not None:
            landing.submit(may_land.wait)
        model(torch.ones(2, WIDTH), "a").backward()
        clip()
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        optimizer.step()
        may_land.set()
        return torch.cat([p.detach().clone().flatten() for p in model.parameters()])

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Choosing()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1)

    plain, plain_optimizer = make()
    expected = train(plain, plain_optimizer, lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    model, made = make()
    _, optimizer = offloadzero.offload(model, made, plain_config(placement, tmp_path, gradient_clipping=0.1))
    landing = optimizer.runtime.parts.landing._lane
    torch.testing.assert_close(train(model, optimizer, lambda: None, landing), expected)
    optimizer.close()


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_step_without_gradients_changes_nothing_and_says_so(clipping: float, tmp_path: Path) -> None:
    engine, *_ = offloadzero.initialize(
        model=Choosing(), config=make_config("host", tmp_path, clipping=clipping)
    )
    engine.backward(engine(torch.ones(2, WIDTH).bfloat16(), "a"))
    engine.step()
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() > 0.0
    weights = engine.module.state_dict()
    engine.step()
    assert not engine.was_step_applied()
    assert engine.get_global_grad_norm() == 0.0
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, weights[name])
    engine.close()


def evaluate_and_train(engine: Any) -> list[float]:
    """The first use of every lease is an evaluation in inference mode, and more are in between."""

    def evaluate(engine: Any, seed: int) -> list[float]:
        with torch.inference_mode():
            return [engine(rows(seed), "a").item()]

    return evaluate(engine, 0) + steps(lambda engine, seed: engine(rows(seed), "b"), 3, after=evaluate)(
        engine
    )


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_an_evaluation_in_inference_mode_leaves_training_as_it_was(placement: str, tmp_path: Path) -> None:
    resident = run_engine(Choosing, evaluate_and_train, make_config("resident", tmp_path))
    assert_same(run_engine(Choosing, evaluate_and_train, make_config(placement, tmp_path)), resident)


class BothEnds(nn.Module):
    """An embedding and a head of the same record, (rest), around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.dtype) * self.first
        for block in self.blocks:
            x = x + block(x)
        return (x * self.last).float().square().mean()


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["in_backward", "at_step"])
def test_the_rest_takes_no_lease_from_the_blocks(
    clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient begins with the last operation and ends with the first: the units between take turns in both."""
    free: dict[str, list[int]] = {}
    begin = GradientCollector._begin

    def watched(collector: GradientCollector, state: Any) -> None:
        begin(collector, state)
        free.setdefault(state.record.name, []).append(collector._num_filling)

    monkeypatch.setattr(GradientCollector, "_begin", watched)
    loop = take_inputs(lambda _: torch.ones(2, WIDTH), 3)
    expected = run_engine(BothEnds, loop, make_config("resident", tmp_path, clipping=clipping))
    free.clear()
    assert_same(run_engine(BothEnds, loop, make_config("host", tmp_path, clipping=clipping)), expected)
    assert free.pop("(rest)") == [0] * 3
    assert set(free) == {f"blocks.{index}" for index in range(3)}
    assert all(counts == [1] * 3 for counts in free.values())


class Empty(nn.Module):
    """A parameter of no elements has a gradient, all the same; the one beside it has none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, width))
        self.other = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ self.empty.t()).sum()


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_unit_without_an_element_to_update_is_updated(
    placement: str, in_backward: bool, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Empty(7) for _ in range(3))
        return nn.Sequential(nn.Linear(7, 7), nn.Sequential(*blocks), nn.Linear(7, 1))

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for seed in range(3):
            loss = model(torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if isinstance(optimizer, offloadzero.OffloadedOptimizer):
            assert len(optimizer.runtime.records) > 3
        return losses

    keys = {"update": {"in_backward": in_backward}}
    expect_as_torch(run, placement, tmp_path, make=make, make_optimizer=adamw, **keys)


class WithNothing(nn.Module):
    """All that is in no block is a parameter without elements: a unit of its own."""

    def __init__(self, *, has_nothing: bool, trains: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=trains) if has_nothing else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().pow(2).mean() + (0 if self.nothing is None else self.nothing.sum())


@pytest.mark.parametrize(
    ("placement", "layout", "trains"),
    each_pair(["resident", "host", "nvme"], ["fp32", "compact"], [True, False]),
)
def test_a_unit_without_an_element_changes_no_number(
    placement: str, layout: str, trains: bool, tmp_path: Path
) -> None:
    config = make_config(placement, tmp_path, clipping=0.5, offloadzero={"state_layout": layout})

    def outcome(*, has_nothing: bool) -> Outcome:
        model = functools.partial(WithNothing, has_nothing=has_nothing, trains=trains)
        return run_engine(model, loop, config)

    loop = take_inputs(lambda seed: rows(seed)[:, :32], 3)
    found = outcome(has_nothing=True)
    assert found.weights["nothing"].shape == (0,)
    assert found.losses == outcome(has_nothing=False).losses
