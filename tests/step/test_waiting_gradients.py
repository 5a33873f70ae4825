"""Small gradients, which wait for the rest of their unit: collect.py, [Note: small gradients wait]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.errors import ConfigError, StateError
from offloadzero.step import collect, record_gradient
from offloadzero.step.record_gradient import RecordGradient
from tests.simulated.checked import checked
from tests.simulated.device import simulated
from tests.simulated.order import RaceError
from tests.simulated.rare_scripts import Running, train_turning, turning_stack
from tests.support.cases import each_pair
from tests.support.models import SMALL_GRADIENT_BYTES
from tests.support.plain_form import (
    ALL_PLACEMENTS,
    adamw,
    clip,
    expect_as_torch,
    final_weights,
    offloaded,
    plain_config,
)
from tests.support.tiny import tokens
from tests.support.training import make_config, run_engine

NEAR = {"rtol": 1e-5, "atol": 1e-5}
BOUNDS = (0, SMALL_GRADIENT_BYTES, 64 << 10)  # nothing waits, half of it, all of it


@pytest.fixture(params=BOUNDS, ids=["none waits", "small ones wait", "all wait"])
def bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(collect, "MAX_WAITING_BYTES", request.param)
    return int(request.param)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, accumulation: int = 1) -> list[float]:
    losses = []
    for step in range(3):
        for micro in range(accumulation):
            loss = model(tokens(accumulation * step + micro))
            loss.backward()
            losses.append(loss.item())
        losses.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


Hook = Callable[[nn.Parameter], None]


def halve(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def replace(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.sign()


def drop(param: nn.Parameter) -> None:
    param.grad = None


def replace_in_graph(param: nn.Parameter) -> None:
    assert param.grad is not None
    with torch.enable_grad():
        param.grad = param.grad + 0.1 * param


def norms_of(model: nn.Module) -> list[float]:
    return [0.0 if p.grad is None else float(p.grad.detach().norm()) for p in model.parameters()]


@pytest.mark.parametrize(
    ("hook", "placement", "before", "bound"),
    each_pair([halve, replace, drop], ALL_PLACEMENTS, [True, False], BOUNDS),
    indirect=["bound"],
)
def test_what_a_hook_of_the_script_makes_of_a_gradient_is_what_is_taken(
    hook: Hook, placement: str, before: bool, bound: int, tmp_path: Path
) -> None:
    """In a unit with such a hook on a bias that comes first, on a matrix, and on a norm that comes last."""
    places = ["blocks.2.down.bias", "blocks.2.up.weight", "blocks.2.norm.weight", "norm.bias"]

    def attach(model: nn.Module) -> None:
        for place in places:
            model.get_parameter(place).register_post_accumulate_grad_hook(hook)

    expect_as_torch(train, placement, tmp_path, prepare=attach, before=before, weights=NEAR)
    del bound


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


def make_shared() -> Shared:
    torch.manual_seed(0)
    return Shared()


@pytest.mark.parametrize(
    ("hook", "placement", "before", "bound"),
    each_pair([halve, replace, drop, replace_in_graph], ALL_PLACEMENTS, [True, False], BOUNDS),
    indirect=["bound"],
)
def test_hooks_between_two_gradients_of_one_backward(
    hook: Hook, placement: str, before: bool, bound: int, tmp_path: Path
) -> None:
    def attach(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        seen = []
        for step in range(3):
            for micro in range(2):
                generator = torch.Generator().manual_seed(2 * step + micro)
                loss = model(torch.randn(3, 8, generator=generator, requires_grad=True))
                loss.backward()
                seen.append(float(loss))
            seen += norms_of(model)
            seen.append(float(clip(model)))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    expect_as_torch(
        run, placement, tmp_path, make=make_shared, make_optimizer=adamw, prepare=attach, before=before,
        seen={"rel": 1e-5, "abs": 1e-6}, weights={"rtol": 1e-5, "atol": 1e-5},
    )  # fmt: skip
    del bound


@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_how_many_wait_changes_no_number(
    placement: str, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for most in BOUNDS:
        monkeypatch.setattr(collect, "MAX_WAITING_BYTES", most)
        with offloaded(placement, tmp_path) as (model, optimizer):
            losses = train(model, optimizer, accumulation=accumulation)
            seen.append((losses, {name: value.tolist() for name, value in final_weights(model).items()}))
    assert seen[0] == seen[1] == seen[2]


def test_only_small_ones_wait_and_no_more_than_may_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[list[int]] = []

    def counted(targets: list[Tensor], grads: list[Tensor]) -> None:
        launches.append([target.nbytes for target in targets])
        foreach_copy(targets, grads)

    foreach_copy = record_gradient.foreach_copy
    monkeypatch.setattr(record_gradient, "foreach_copy", counted)

    def sizes() -> list[list[int]]:
        launches.clear()
        with offloaded("host", tmp_path) as (model, _):
            model(tokens(0)).backward()
        return launches

    bias, wide, norm = 4 * 16, 4 * 49, 4 * 16
    assert sizes().count([bias, wide, norm, norm]) == 4  # a block's, its matrices left out
    monkeypatch.setattr(collect, "MAX_WAITING_UNIT_BYTES", bias + norm)
    assert max(map(sum, sizes())) <= bias + norm
    monkeypatch.setattr(collect, "MAX_WAITING_BYTES", 0)
    assert not sizes()


@pytest.mark.parametrize(
    ("edit", "placement", "before", "accumulation", "bound"),
    each_pair(
        [lambda grad: grad.mul_(0.5), lambda grad: grad.zero_()],
        ALL_PLACEMENTS,
        [True, False],
        [1, 2],
        BOUNDS,
    ),
    indirect=["bound"],
)
def test_what_a_hook_has_kept_is_the_gradient_when_backward_is_over(
    edit: Callable[[Tensor], Tensor],
    placement: str,
    before: bool,
    accumulation: int,
    bound: int,
    tmp_path: Path,
) -> None:
    kept: dict[str, Tensor] = {}

    def keep(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: kept.update({name: p.grad})  # type: ignore[misc]
            )

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        norms = []
        for step in range(2):
            for micro in range(accumulation):
                model(tokens(accumulation * step + micro)).backward()
            for grad in kept.values():
                edit(grad)
            norms.append(float(clip(model)))
            optimizer.step()
            optimizer.zero_grad()
            kept.clear()
        return norms

    expect_as_torch(run, placement, tmp_path, prepare=keep, before=before, weights=NEAR)
    del bound


class _Failing(torch.autograd.Function):
    """Its backward fails, after those of what was computed later."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        raise ValueError("a backward's own")


@pytest.mark.parametrize("in_graph", [False, True], ids=["plain", "create_graph"])
def test_what_a_failed_backward_has_left_waiting_is_not_added_to(in_graph: bool, tmp_path: Path) -> None:
    class Pair(nn.Module):
        """The second parameter keeps the unit from being complete when backward fails."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7))
            self.other = nn.Parameter(torch.ones(7))

        def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
            other = _Failing.apply(self.other) if fails else self.other
            return (other * x).sum() + (self.scale * x).sum()

    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, optimizer = offloadzero.offload(model, optimizer, plain_config("host", tmp_path))
    x = torch.arange(7.0)
    with pytest.raises(ValueError, match="a backward's own"):
        model(x, fails=True).backward()
    with pytest.raises(StateError, match="did not finish"):
        model(x).backward(create_graph=in_graph)
    optimizer.zero_grad()
    model(x).backward()
    assert model.scale.grad is not None
    assert model.scale.grad.tolist() == x.tolist()
    optimizer.close()


class _Scaling(torch.autograd.Function):
    """Its backward writes the small gradient into memory that all its calls share."""

    workspace = torch.empty(16)

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, torch.sum((grad * x).reshape(-1, 16), 0, out=_Scaling.workspace)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(16))
        self.two = nn.Parameter(torch.ones(16))
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + _Scaling.apply(self.lin(_Scaling.apply(x, self.one)), self.two)


@pytest.mark.parametrize("placement", ["host", "resident"])
def test_a_gradient_whose_memory_is_used_again_is_copied_in_time(
    placement: str, bound: int, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(_Scaled() for _ in range(3)))

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        seen = []
        for step in range(2):
            for micro in range(3):
                generator = torch.Generator().manual_seed(3 * step + micro)
                model(torch.randn(5, 16, generator=generator)).pow(2).mean().backward()
            seen += [*norms_of(model), float(clip(model))]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    expect_as_torch(run, placement, tmp_path, make=make, make_optimizer=adamw)
    del bound


def test_a_part_of_something_larger_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is a view would keep all of it."""
    launches: list[int] = []
    foreach_copy = record_gradient.foreach_copy
    monkeypatch.setattr(collect, "MAX_WAITING_BYTES", 1024)
    monkeypatch.setattr(
        record_gradient, "foreach_copy", lambda to, of: (launches.append(len(of)), foreach_copy(to, of))
    )

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(4))
            self.two = nn.Parameter(torch.ones(4))
            self.large = nn.Parameter(torch.ones(1000))

        def forward(self) -> Tensor:
            return torch.cat([self.one, self.large]).pow(2).sum() + self.two.pow(2).sum()

    model = Joined()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, offloaded_optimizer = offloadzero.offload(model, optimizer, plain_config("host", tmp_path))
    model().backward()
    assert launches == [1]
    assert [float(p.grad.sum()) for p in model.parameters() if p.grad is not None] == [8.0, 8.0, 2000.0]
    offloaded_optimizer.close()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(7))
        self.b = nn.Parameter(torch.full((7,), 2.0))
        self.w = nn.Parameter(torch.ones(9, 7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w @ (self.b * x)).sum() + (self.a * x).sum()


@pytest.mark.parametrize(
    ("hooked_and_graph", "before", "placement", "bound"),
    each_pair([("w", False), ("w", True), ("a", False)], [False, True], ["host", "resident"], BOUNDS),
    indirect=["bound"],
)
def test_a_backward_inside_a_backward_adds_to_what_waits(
    hooked_and_graph: tuple[str, bool], before: bool, placement: str, bound: int, tmp_path: Path
) -> None:
    """In every micro batch; what the outer one has brought of that very parameter may not be taken yet, either."""
    hooked, graph = hooked_and_graph
    is_inside = False

    def attach(model: nn.Module) -> None:
        def inside(_: Tensor) -> None:
            nonlocal is_inside
            if not is_inside:
                is_inside = True
                with torch.enable_grad():
                    (model.a.pow(2) * 3).sum().backward(create_graph=graph)
                is_inside = False

        model.get_parameter(hooked).register_post_accumulate_grad_hook(inside)

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        seen = []
        for step in range(3):
            for _ in range(1 if graph else 1 + step):
                model(torch.arange(7.0)).backward()
                seen += norms_of(model)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    expect_as_torch(run, placement, tmp_path, make=Inner, make_optimizer=adamw, prepare=attach, before=before)
    del bound


def test_a_small_sparse_gradient_is_refused_by_name(bound: int, tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(5, 3, sparse=True)
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, ids: Tensor) -> Tensor:
            return (self.emb(ids) + self.bias).sum()

    model = Sparse()
    _, optimizer = offloadzero.offload(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), plain_config("host", tmp_path)
    )
    with pytest.raises(ConfigError, match=r"emb\.weight.*sparse"):
        model(torch.tensor([1, 2])).backward()
    with contextlib.suppress(StateError):
        optimizer.zero_grad()
    optimizer.close()
    del bound


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "taken on whichever stream is current"])
@pytest.mark.parametrize("placement", ["host", "resident"])
def test_they_are_taken_on_the_stream_on_which_they_came(
    placement: str, planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward takes two streams in turns, in the middle of each unit."""
    monkeypatch.setattr(collect, "MAX_WAITING_BYTES", 64 << 10)
    if planted:
        arrive = RecordGradient.arrive_waiting
        monkeypatch.setattr(
            RecordGradient,
            "arrive_waiting",
            lambda self, number, grad, _, **size: arrive(self, number, grad, None, **size),
        )
    config = make_config(placement, tmp_path, clipping=0.5)
    is_caught = pytest.raises(RaceError, match="_foreach_copy_") if planted else contextlib.nullcontext()
    with is_caught, checked() as order, simulated(monkeypatch, 0) as device:
        monkeypatch.setattr(Running, "machine", device.machine)
        monkeypatch.setattr(Running, "order", order)
        run_engine(turning_stack, train_turning, config)
