"""What scripts assign to `param.grad` of what they have read there: views of all of it, and copies of others'."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.errors import StateError
from offloadzero.step.param_grad import GradientAccess, ParamGradient
from tests.support.faults import replaced
from tests.support.plain_form import plain_config
from tests.support.training import worst_relative_difference

WIDTH = 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Squares(nn.Module):
    """Matrices that have the shape of their transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, seed: int) -> Tensor:
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))
        for block in self.blocks:
            x = block(x)
        return (x - 1).pow(2).mean()


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def each(edit: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], None]:
    def edit_all(model: nn.Module) -> None:
        for p in model.parameters():
            edit(p)

    return edit_all


def assign(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def edit(p: nn.Parameter) -> None:
        p.grad = make(p.grad)

    return each(edit)


def turned(turn: Callable[[list[Tensor]], list[Tensor | None]]) -> Callable[[nn.Module], None]:
    """Copies of the matrices' gradients, made first and then given to others."""

    def edit(model: nn.Module) -> None:
        params = matrices(model)
        found = [p.grad.clone() for p in params]
        for p, grad in zip(params, turn(found), strict=True):
            p.grad = grad

    return edit


def swap(model: nn.Module) -> None:
    a, b = matrices(model)[1:3]
    a.grad, b.grad = b.grad, a.grad


def swap_copies(model: nn.Module) -> None:
    a, b = matrices(model)[1:3]
    a.grad, b.grad = b.grad.clone(), a.grad.clone()


def of_a_dropped_one(model: nn.Module) -> None:
    a, b = matrices(model)[1:3]
    a.grad, b.grad = b.grad, None


def one_for_two(model: nn.Module) -> None:
    a, b = matrices(model)[1:3]
    a.grad = b.grad


def through_none(p: nn.Parameter) -> None:
    flat = p.grad.view(-1)
    p.grad = None
    p.grad = flat.view_as(p)


EDITS: dict[str, Callable[[nn.Module], None]] = {
    "view_as": assign(lambda g: g.view_as(g)),
    "reshape": assign(lambda g: g.reshape(g.shape)),
    "flattened and back": assign(lambda g: g.flatten().view(g.shape)),
    "unsqueezed and back": assign(lambda g: g.unsqueeze(0).squeeze(0)),
    "ellipsis": assign(lambda g: g[...]),
    "view of detached": assign(lambda g: g.detach().view_as(g)),
    "put back as a view": each(through_none),
    "transposed": assign(lambda g: g.clone().t()),
    "expanded row": assign(lambda g: g[:1].clone().expand_as(g)),
    "swapped": swap_copies,
    "turned round": turned(lambda found: [*reversed(found)]),
    "rotated": turned(lambda found: [*found[1:], found[0]]),
    "rotated the other way": turned(lambda found: [found[-1], *found[:-1]]),
    "rotated and transposed": turned(lambda found: [g.t() for g in (*found[1:], found[0])]),
    "moved up, the last dropped": turned(lambda found: [*found[1:], None]),
    "moved down, the first dropped": turned(lambda found: [None, *found[:-1]]),
    "moved up, the last replaced": turned(lambda found: [*found[1:], torch.ones_like(found[0])]),
    "one for all": turned(lambda found: [found[2]] * len(found)),
    "a ring that others read": turned(
        lambda found: [found[1], found[2], found[0], found[1].t(), found[3], found[2], found[6], found[7]]
    ),
}


def train(
    edit: Callable[[nn.Module], None], model: nn.Module, optimizer: Any, *, num_micro: int = 1
) -> list[float]:
    """Losses, and norms of what `param.grad` is after the step. The edit follows each backward."""
    seen = []
    for step in range(3):
        for micro in range(num_micro):
            loss = model(3 * step + micro)
            loss.backward()
            edit(model)
            seen.append(loss.item())
        optimizer.step()
        seen.extend(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
        optimizer.zero_grad()
    return seen


def made(placement: str | None, directory: Path) -> tuple[Squares, Any]:
    """A model with torch's optimizer where `placement` is None."""
    torch.manual_seed(0)
    model = Squares()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if placement is None:
        return model, optimizer
    config = plain_config(placement, directory, units={"min_leaf_elements": 100})
    return model, offloadzero.offload(model, optimizer, config)[1]


def outcome(
    name: str, placement: str | None, directory: Path, *, num_micro: int = 1
) -> tuple[list[float], list[Tensor]]:
    """Of a run with what is `made`."""
    model, optimizer = made(placement, directory)
    seen = train(EDITS[name], model, optimizer, num_micro=num_micro)
    weights = [p.detach().clone() for p in model.parameters()]
    if placement is not None:
        optimizer.close()
    return seen, weights


def expect_that_of_torch(name: str, placement: str, directory: Path, *, num_micro: int = 1) -> None:
    seen, weights = outcome(name, placement, directory, num_micro=num_micro)
    expected, expected_weights = outcome(name, None, directory, num_micro=num_micro)
    assert worst_relative_difference(seen, expected) < 2e-5
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("placement", ["host", "nvme", "resident"])
@pytest.mark.parametrize("name", EDITS)
def test_an_assignment_gives_the_numbers_of_torch(name: str, placement: str, tmp_path: Path) -> None:
    expect_that_of_torch(name, placement, tmp_path)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("placement", ["host", "resident"])
@pytest.mark.parametrize(
    "name",
    [
        "view_as",
        "put back as a view",
        "transposed",
    ],
)
def test_the_next_micro_batch_adds_to_what_was_assigned(name: str, placement: str, tmp_path: Path) -> None:
    expect_that_of_torch(name, placement, tmp_path, num_micro=3)


OF_OTHERS = {
    "swapped": swap,
    "of a dropped one": of_a_dropped_one,
    "one for two": one_for_two,
    "transposed": lambda model: each(lambda p: setattr(p, "grad", p.grad.t()))(model.blocks[1].up),
}


@pytest.mark.parametrize("at", ["the step", "another backward"])
@pytest.mark.parametrize("placement", ["host", "nvme", "resident"])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_stands_for_another_gradient_is_refused(
    name: str, placement: str, at: str, tmp_path: Path
) -> None:
    """Nothing has changed then: `zero_grad()` lets training go on with torch's numbers."""
    model, optimizer = made(placement, tmp_path)
    model(0).backward()
    OF_OTHERS[name](model)
    with pytest.raises(
        StateError, match=r"grad is a gradient that was blocks\.\d\.\w+\.\w+\.grad.*assign a copy"
    ):
        optimizer.step() if at == "the step" else model(1).backward()
    optimizer.zero_grad(set_to_none=at == "the step")
    expected, expected_optimizer = made(None, tmp_path)
    for each_model, each_optimizer in ((model, optimizer), (expected, expected_optimizer)):
        train(EDITS["view_as"], each_model, each_optimizer)
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()])
    optimizer.close()


ZEROED: dict[str, Callable[[nn.Module], None]] = {
    "a view of a buffer": assign(lambda g: g.clone().view(-1).view(g.shape)),
    "in a graph": assign(lambda g: g.clone().requires_grad_() * 2),
    "its own, of a graph": lambda _: None,
    "swapped": swap_copies,
    "transposed": assign(lambda g: g.clone().t()),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", ZEROED)
def test_what_was_assigned_is_made_zero(name: str, tmp_path: Path) -> None:
    """Before the step and after it; and it is what the next backward adds to."""

    def train_zeroing(model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            model(step).backward(create_graph=step == 0 and name.endswith("of a graph"))
            ZEROED[name](model)
            if step != 1:
                optimizer.step()
            worn = [p for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad(set_to_none=False)
            assert worn
            assert not any(p.grad.any() or p.grad.requires_grad for p in worn)
            model(step + 7).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)

    plain, plain_optimizer = made(None, tmp_path)
    train_zeroing(plain, plain_optimizer)
    model, optimizer = made("host", tmp_path)
    train_zeroing(model, optimizer)
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()])
    optimizer.close()


@pytest.mark.parametrize("name", ["swapped", "rotated and transposed", "transposed"])
def test_a_step_that_is_interrupted_can_be_repeated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have brought some of the gradients home, and have put them in the place of others."""
    step = offloadzero.OffloadedOptimizer.step
    calls = itertools.count()
    interrupted_at = iter([1, 2, 3])

    def repeated(optimizer: offloadzero.OffloadedOptimizer) -> None:
        last = next(calls) + 1 + next(interrupted_at)

        def interrupted(store: Callable[..., None], *arguments: Any) -> None:
            if next(calls) == last:
                raise KeyboardInterrupt
            store(*arguments)
            if next(calls) == last:
                raise KeyboardInterrupt

        with replaced("gradient.store", interrupted), contextlib.suppress(KeyboardInterrupt):
            step(optimizer)
            pytest.fail("was not interrupted")
        step(optimizer)

    monkeypatch.setattr(offloadzero.OffloadedOptimizer, "step", repeated)
    expect_that_of_torch(name, "host", tmp_path)


@pytest.mark.parametrize("name", ["view_as", "flattened and back", "put back as a view"])
def test_a_view_of_all_of_a_gradient_is_the_gradient(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientAccess, "store", lambda *_: pytest.fail("a gradient was moved"))
    monkeypatch.setattr(ParamGradient, "read", lambda *_, **__: pytest.fail("a gradient was read"))
    model = Squares()
    _, optimizer = offloadzero.offload(
        model, torch.optim.AdamW(model.parameters()), plain_config("host", tmp_path)
    )
    model(0).backward()
    EDITS[name](model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert optimizer.was_step_applied()
    optimizer.close()
