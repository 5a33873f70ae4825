"""Backward on autograd's own thread, as on CUDA: what is local to a thread, and a graph that has failed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offloadzero
from offloadzero.errors import StateError
from tests.simulated.backward import Backward
from tests.simulated.checked import checked
from tests.simulated.device import simulated
from tests.simulated.machine import AUTOGRAD_THREAD
from tests.simulated.small_loops import FailingStack
from tests.support.models import Stack, features
from tests.support.training import assert_same, make_config, run_engine

ON_THREAD = [Backward.THREAD, Backward.OTHER_STREAM]


@pytest.mark.parametrize("way", ON_THREAD)
def test_where_backward_runs(way: Backward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks run on autograd's thread and on the stream of the forward, wherever backward is called."""
    seen: list[Any] = []

    def see(_: Tensor) -> None:
        here = device.machine.current_stream.name
        seen.append((threading.current_thread().name, here, torch.is_grad_enabled()))

    with checked(), simulated(monkeypatch, backward=way) as device:
        engine, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path))
        forward = device.machine.new_stream("forward")
        engine.module.front.weight.register_post_accumulate_grad_hook(see)
        with device.machine.launching_on(forward):
            loss = engine(features(0))
        forward.synchronize()
        called_on = device.machine.current_stream
        engine.backward(loss)
        assert device.machine.current_stream is called_on
        engine.step()
        engine.close()
    assert seen == [(AUTOGRAD_THREAD, "forward", False)]


def test_a_graph_of_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node runs on the stream of its forward; a parameter's gradient comes on that of its first use."""
    order: list[str] = []

    def see(_: Tensor) -> None:
        order.append(device.machine.current_stream.name)

    with simulated(monkeypatch, slow=["side"], backward=Backward.THREAD) as device:
        main, side = device.machine.current_stream, device.machine.new_stream("side")
        weight = device.memory.take(4 * 5).view(torch.float32).fill_(3.0).requires_grad_()
        weight.register_post_accumulate_grad_hook(see)
        one = weight * 2
        side.wait_event(main.record())
        with device.machine.launching_on(side):
            other = (weight * weight) * 5
        main.wait_event(side.record())
        total = (one + other).sum()
        one.grad_fn.register_hook(lambda *_: see(one))  # type: ignore[union-attr]
        other.grad_fn.register_hook(lambda *_: see(other))  # type: ignore[union-attr]
        total.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [32.0] * 5
    assert sorted(order) == ["default", "default", "side"]


def fail(engine: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        engine.backward(engine.module(features(1), fails_at=1))


@pytest.mark.parametrize("way", Backward)
def test_going_on_at_once_after_an_error_in_backward(
    way: Backward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error may come while autograd's thread still holds the graph: that backward runs no more."""
    config = make_config("host", tmp_path, clipping=0.5)

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(3):
            fail(engine)
            with pytest.raises(StateError, match="did not finish"):
                engine.step()
            engine.optimizer.zero_grad()
            loss = engine(features(seed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    expected = run_engine(FailingStack, loop, config)
    with checked(), simulated(monkeypatch, backward=way):
        assert_same(run_engine(FailingStack, loop, config), expected)


@pytest.mark.parametrize("asked", ["zero_grad", "step"])
@pytest.mark.parametrize("way", Backward)
def test_an_error_in_a_backward_that_updates(
    way: Backward, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some units have taken the step, so training is over, whoever asks first."""
    config = make_config("host", tmp_path)
    with checked(), simulated(monkeypatch, backward=way):
        engine, *_ = offloadzero.initialize(model=FailingStack(), config=config)
        fail(engine)
        ask = engine.step if asked == "step" else engine.optimizer.zero_grad
        with pytest.raises(StateError, match="the last backward did not finish: the weights are updated"):
            ask()
        engine.close()
