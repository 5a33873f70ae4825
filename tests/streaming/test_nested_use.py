"""Models inside each other's forward, threads beside a forward, backward inside backward: as without us, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.errors import StateError
from tests.support.models import WIDTH, Block, Stack, features
from tests.support.plain_form import expect_as_torch
from tests.support.training import make_config

PLACEMENTS = ["resident", "host", "nvme"]
NUM_STEPS = 4
SMALLEST_LEASES = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1}}
NEAR = {"rtol": 1e-4, "atol": 1e-5}


class Around(nn.Module):
    """Blocks with a model that is offloaded by itself between them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self._inner = [inner]  # no submodule

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._inner[0](block(x))
        return x.square().mean()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Shared(nn.Module):
    """One gain in all blocks, each under a checkpoint that runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block(x) * self.gain, x, use_reentrant=True)
        return x.square().mean()


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Offloads a model to a placement; the leases hold one unit and are poisoned when it leaves."""
    opened = []

    def make(model: nn.Module, placement: str) -> Any:
        config = make_config(placement, tmp_path, dtype=None)
        config.pop("optimizer")
        opened.append(offloadzero.offload(model, adam(model), config)[1])
        return opened[-1]

    yield make
    for optimizer in opened:
        optimizer.close()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizers: list[Any]) -> list[float]:
    losses = []
    for seed in range(NUM_STEPS):
        loss = model(features(seed))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_model_inside_the_forward_of_another(placement: str, offloaded: Callable[..., Any]) -> None:
    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(2)
        inner = Body()
        return Around(inner), inner

    outer, inner = build()
    expected = train(outer, [adam(outer), adam(inner)])
    outer, inner = build()
    ours = train(outer, [offloaded(outer, placement), offloaded(inner, placement)])
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_parameter_in_several_checkpoints_with_a_backward_of_their_own(
    placement: str, tmp_path: Path
) -> None:
    def make() -> Shared:
        torch.manual_seed(2)
        return Shared()

    def script(model: nn.Module, optimizer: Any) -> list[float]:
        return train(model, [optimizer])

    expect_as_torch(
        script, placement, tmp_path, make=make, make_optimizer=adam, weights=NEAR, **SMALLEST_LEASES
    )


def test_such_a_parameter_is_refused_where_backward_updates(tmp_path: Path) -> None:
    engine, *_ = offloadzero.initialize(model=Shared(), config=make_config("host", tmp_path, dtype=None))
    with pytest.raises(StateError, match=r"already updated.*in_backward"):
        engine.backward(engine(features(0)))
    engine.close()


def in_thread(call: Callable[[], Any]) -> Any:
    """What `call` gives or raises on another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_thread_reads_weights_beside_a_forward(placement: str, offloaded: Callable[..., Any]) -> None:
    torch.manual_seed(2)
    model = Stack()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[dict[str, Tensor]] = []

    def read() -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    model.blocks[1].register_forward_pre_hook(lambda *_: seen.append(in_thread(read)))
    offloaded(model, placement)
    model(features(0)).backward()
    assert len(seen) == 1
    assert all(torch.equal(seen[0][name], value) for name, value in values.items())


def test_another_thread_computes_beside_a_forward(offloaded: Callable[..., Any]) -> None:
    model = Stack()
    found: list[Any] = []

    def evaluate() -> Any:
        with torch.no_grad():
            return model(features(1))

    handle = model.blocks[1].register_forward_pre_hook(lambda *_: found.append(in_thread(evaluate)))
    offloaded(model, "host")
    loss = model(features(0))
    handle.remove()
    assert isinstance(found[0], StateError)
    assert "only one thread at a time may compute" in str(found[0])
    loss.backward()  # and the forward that was running is as it was
