"""Parameters that get a gradient more than once in one backward, with hooks of the script's in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.step import collect
from tests.support.plain_form import ALL_PLACEMENTS, clip, plain_config


class Shared(nn.Module):
    """Two reentrant checkpoints around one module: two backwards inside a backward, of the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.lin(x)), x, use_reentrant=True)
        return self.out(x).pow(2).sum()


def halve(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def replace(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad = p.grad * 0.5


def drop(p: nn.Parameter) -> None:
    p.grad = None


def replace_in_graph(p: nn.Parameter) -> None:
    assert p.grad is not None
    with torch.enable_grad():
        p.grad = p.grad + 0.1 * p


@pytest.mark.parametrize("hook", [halve, replace, drop, replace_in_graph], ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
@pytest.mark.parametrize("before", [True, False], ids=["before offload()", "after offload()"])
@pytest.mark.parametrize("bound", [0, 1 << 16])
def test_hooks_between_two_gradients_of_one_backward(
    hook: Callable[[nn.Parameter], None],
    placement: str,
    before: bool,
    bound: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collect, "MAX_WAITING_BYTES", bound)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Shared()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def attach(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        seen = []
        for step in range(3):
            for micro in range(2):
                generator = torch.Generator().manual_seed(2 * step + micro)
                loss = model(torch.randn(3, 8, generator=generator, requires_grad=True))
                loss.backward()
                seen.append(float(loss))
            seen += [0.0 if p.grad is None else float(p.grad.detach().norm()) for p in model.parameters()]
            seen.append(float(clip(model)))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    plain, plain_optimizer = make()
    attach(plain)
    expected = run(plain, plain_optimizer)
    model, optimizer = make()
    if before:
        attach(model)
    _, offloaded = offloadzero.offload(model, optimizer, plain_config(placement, tmp_path))
    if not before:
        attach(model)
    assert run(model, offloaded) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    offloaded.close()
