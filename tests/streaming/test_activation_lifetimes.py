"""What is on the device between forward and backward with activation checkpoints, and what nothing keeps after them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offloadzero.activations import store as activations
from offloadzero.core.segments import TierName
from offloadzero.errors import StateError
from offloadzero.planning.checkpointed_inputs import INPUTS_AHEAD
from tests.streaming.checkpointed import TIERS, config_with, features, loop, make_engine
from tests.support import models
from tests.support.models import CheckpointedStack, Stack
from tests.support.tiny import run_script
from tests.support.training import assert_same, run_engine


@contextmanager
def no_collector() -> Iterator[None]:
    """What is freed inside is freed by its references alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class WatchedBlock(models.Block):
    """Notes the storages of its inputs and of an activation inside."""

    inputs: list[weakref.ref[Any]]
    inner: list[weakref.ref[Any]]

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(weakref.ref(x.untyped_storage()))
        h = self.up(self.norm(x))
        self.inner.append(weakref.ref(h.untyped_storage()))
        return x + self.down(F.gelu(h))


def num_alive(references: list[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_on_the_device_between_forward_and_backward(tier: str, tmp_path: Path) -> None:
    engine = make_engine(tier, tmp_path, lambda: Stack(WatchedBlock, num_blocks=8))
    inputs: list[weakref.ref[Any]] = []
    inner: list[weakref.ref[Any]] = []
    for block in engine.module.blocks:
        block.inputs, block.inner = inputs, inner
    with no_collector():
        loss = engine(features(0))
        assert len(inputs) == 8
        assert num_alive(inner) == 0
        held = num_alive(inputs)
        assert held == 8 if tier == "device" else 1 <= held <= activations.NUM_SENDING + 1
        engine.backward(loss)
        # A copy that still runs holds its input, until the next forward at the latest.
        engine.optimizer.runtime.activations._ended.release(wait=True)
        left = {storage._cdata for reference in inputs if (storage := reference()) is not None}
        # Those that came back lay in a few buffers, which stay.
        assert len(left) <= (0 if tier == "device" else 1 + INPUTS_AHEAD[TierName(tier)])
        engine.step()
    engine.close()


def test_what_the_first_call_of_a_process_keeps() -> None:
    """Nothing: the compiler, which torch's checkpoint imports, leaves cycles that hold the frames it is imported in."""
    script = """
        import sys, tempfile
        from pathlib import Path
        from tests.streaming import test_activation_lifetimes as tests
        assert "torch._dynamo" not in sys.modules
        with tempfile.TemporaryDirectory() as directory:
            tests.test_what_is_on_the_device_between_forward_and_backward("device", Path(directory))
    """
    done = run_script(script, timeout_s=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("make_model", [Stack, CheckpointedStack], ids=["plain", "by the user"])
def test_inputs_are_freed_without_the_collector(make_model: Callable[[], nn.Module], tmp_path: Path) -> None:
    """A cycle among the hooks would keep them until it runs."""
    engine = make_engine(None, tmp_path, make_model)
    for block in engine.module.blocks:
        block.__class__ = WatchedBlock
        block.inputs, block.inner = [], []
    with no_collector():
        engine.backward(engine(features(0)))
        assert sum(num_alive(block.inputs) for block in engine.module.blocks) == 0
        engine.step()
    engine.close()


@pytest.mark.parametrize("tier", TIERS)
def test_forwards_without_a_backward_leave_nothing(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: list[weakref.ref[Any]] = []
    find = activations.ActivationStore._find_or_make

    def noting(store: Any, call: Any, tensor: Tensor) -> Any:
        cell = find(store, call, tensor)
        cells.append(weakref.ref(cell))
        return cell

    monkeypatch.setattr(activations.ActivationStore, "_find_or_make", noting)
    engine = make_engine(tier, tmp_path)
    with no_collector():
        with torch.no_grad():
            engine(features(0))
        assert cells == []
        engine.backward(engine(features(0)))
        engine.step()
        assert len(cells) == models.NUM_BLOCKS
        reserved = engine.reserved_bytes()
        for seed in range(5):
            engine(features(seed))  # the loss is thrown away
        assert num_alive(cells) == 0
        assert len(cells) == 6 * models.NUM_BLOCKS
        assert engine.reserved_bytes() == reserved
    engine.close()


@pytest.mark.parametrize("tier", TIERS)
def test_an_exception_in_the_forward(tier: str, tmp_path: Path) -> None:
    class Failing(models.Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("in the forward")
            return super().forward(x)

    def failing_loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(2):
            engine.module.blocks[2].fails = True
            with pytest.raises(KeyError, match="in the forward"):
                engine(features(seed))
            engine.module.blocks[2].fails = False
            losses += loop(engine)
        return losses

    plain = run_engine(lambda: Stack(Failing), failing_loop, config_with(None, tmp_path, "resident"))
    assert_same(run_engine(lambda: Stack(Failing), failing_loop, config_with(tier, tmp_path, "nvme")), plain)


class AddsInPlace(Stack):
    """Changes the input of each block after the block."""

    def run_blocks(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            x += block(x)
        return x


class ChangesItsInput(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("make_model", [AddsInPlace, lambda: Stack(ChangesItsInput)], ids=["after", "inside"])
@pytest.mark.parametrize("tier", TIERS)
def test_inputs_changed_in_place_are_refused(
    make_model: Callable[[], nn.Module], tier: str, tmp_path: Path
) -> None:
    engine = make_engine(tier, tmp_path, make_model)
    with pytest.raises(
        StateError, match=r"blocks\.\d: an input of this checkpointed unit was changed in place"
    ):
        engine.backward(engine(features(0)))
    engine.close()
