"""What a module's own forward does with its weights: operations that write them, and views that are kept.

The reference is the same module without this library, in fp32.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from tests.access.offloaded_stacks import adam, assert_same_weights, build, step
from tests.support.models import Block, Stack, features

# --- written after a use


class WritesAfterUse(Block):
    """Changes a weight that backward needs."""

    write: Callable[[Tensor], Any]
    frozen = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with torch.no_grad():
            type(self).write(self.up.weight)
        return out


AFTER_USE: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda w: w.mul_(0.5),
    "item": lambda w: w.__setitem__((0, 0), 3.0),
    "view": lambda w: w.view(-1)[3:].add_(0.25),
    "detached": lambda w: torch.detach(w).mul_(0.5),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "out": lambda w: torch.mul(w, 0.5, out=w),
}


def writing(write: Callable[[Tensor], Any], *, frozen: bool = False) -> Callable[[], nn.Module]:
    kind = type("Writing", (WritesAfterUse,), {"write": staticmethod(write)})

    def make() -> nn.Module:
        model = Stack(kind)
        if frozen:
            model.blocks[1].up.weight.requires_grad_(False)
        return model

    return make


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", AFTER_USE)
def test_a_weight_written_after_its_use_fails_in_backward_as_in_torch(
    name: str, frozen: bool, offloaded: Any
) -> None:
    make = writing(AFTER_USE[name], frozen=frozen)
    words = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=words):
        build(make)(features(0)).backward()
    model, _ = offloaded(make)
    loss = model(features(0))
    with pytest.raises(RuntimeError, match=rf"{words}: blocks\.\d\.up\.weight is at version") as raised:
        loss.backward()
    assert "expected version" in str(raised.value)


class ReadsThenWritesData(Block):
    """A write through `data` is not seen by autograd: backward takes the new value, in torch too."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.up.weight.data.mul_(0.75)
        return out


class WritesBetweenUses(Block):
    """What autograd saves is the value after the write."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.75)
        out = super().forward(x)
        return out + 0 * self.up.weight.detach().sum()


class WritesWhatIsNotSaved(Block):
    """Adding a bias saves nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with torch.no_grad():
            self.down.bias.mul_(0.75)
        return out


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", [ReadsThenWritesData, WritesBetweenUses, WritesWhatIsNotSaved])
def test_writes_that_torch_takes_are_taken(kind: type[Block], accumulation: int, offloaded: Any) -> None:
    model, optimizer = offloaded(lambda: Stack(kind))
    reference = build(lambda: Stack(kind))
    plain = adam(reference)
    for seed in range(0, 3 * accumulation, accumulation):
        losses = []
        for net, one in ((model, optimizer), (reference, plain)):
            parts = []
            for part in range(accumulation):
                loss = net(features(seed + part))
                loss.backward()
                parts.append(loss.item())
            one.step()
            one.zero_grad()
            losses.append(parts)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same_weights(model, reference)


def test_two_graphs_over_a_weight_written_in_each_forward(offloaded: Any) -> None:
    """The second forward writes what the first one's backward needs."""
    make = lambda: Stack(WritesBetweenUses)  # noqa: E731
    reference = build(make)
    losses = [reference(features(seed)) for seed in range(2)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()
    model, _ = offloaded(make)
    losses = [model(features(seed)) for seed in range(2)]
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: blocks\.\d\.up\.weight"):
        losses[0].backward()


# --- views that are kept

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda w: w.t(),
    "row": lambda w: w[1],
    "strided": lambda w: w[1:, ::2].t(),
    "expanded": lambda w: w[:, :1].expand(-1, 5),
    "flat": lambda w: w.view(-1)[7:],
    "detached": torch.detach,
    "detached view": lambda w: torch.detach(w).t()[3:],
    "bits": lambda w: torch.detach(w).view(torch.int32),
    "of data": lambda w: w.data.view(-1),
}


class Keeps(Block):
    """Keeps what its forward makes of a weight."""

    make: Callable[[Tensor], Tensor]
    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = type(self).make(self.up.weight)
        return super().forward(x)


def keeping(make: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    kind = type("Keeping", (Keeps,), {"make": staticmethod(make)})
    return lambda: Stack(kind)


def kept_views(model: Any) -> list[Tensor]:
    return [block.kept for block in model.blocks]


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_a_forward_has_made_is_alive(name: str, offloaded: Any) -> None:
    """After the forward, the backward and the step, as an alias of an ordinary weight is."""
    model, optimizer = offloaded(keeping(VIEWS[name]))
    reference = build(keeping(VIEWS[name]))
    plain = adam(reference)
    for seed in range(2):
        losses = [net(features(seed)) for net in (model, reference)]
        for loss in losses:
            assert_same_views(model, reference, same_bits=seed == 0)
            loss.backward()
            assert_same_views(model, reference, same_bits=seed == 0)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
        if name != "bits":
            assert_same_views(model, reference, same_bits=False)
    assert_same_weights(model, reference)


def test_a_view_that_was_just_made_is_found_among_the_young(
    offloaded: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A look at all objects of a process takes longer than a small model's step."""
    asked: list[int | None] = []
    get_objects = gc.get_objects

    def recorded(generation: int | None = None) -> list[Any]:
        asked.append(generation)
        return get_objects(generation)

    model, optimizer = offloaded(keeping(VIEWS["t"]))
    monkeypatch.setattr(gc, "get_objects", recorded)
    gc.collect()
    model(features(0)).backward()
    optimizer.step()
    assert None not in asked
    assert (0 in asked) == ("resident" not in request.node.name)


def test_a_kept_view_is_found_however_long_it_is_there(offloaded: Any) -> None:
    make = keeping(VIEWS["t"])
    model, optimizer = offloaded(make)
    reference = build(make)
    plain = adam(reference)
    for seed in range(3):
        losses = [net(features(seed)) for net in (model, reference)]
        gc.collect()
        for loss, one in zip(losses, (optimizer, plain), strict=True):
            loss.backward()
            one.step()
            one.zero_grad()
        assert_same_views(model, reference, same_bits=False)
    assert_same_weights(model, reference)


def assert_same_views(model: Any, reference: Any, *, same_bits: bool) -> None:
    for ours, theirs in zip(kept_views(model), kept_views(reference), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype, ours.requires_grad) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
            theirs.requires_grad,
        )
        if ours.dtype.is_floating_point or same_bits:
            torch.testing.assert_close(ours.detach().clone(), theirs.detach(), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=1e-4, atol=1e-4)


def compare_training(
    make: Callable[[], nn.Module], offloaded: Any, *, rel: float = 1e-5, **over: Any
) -> None:
    model, optimizer = offloaded(make, **over)
    reference = build(make)
    plain = adam(reference)
    for seed in range(3):
        assert step(model, optimizer, seed) == pytest.approx(step(reference, plain, seed), rel=rel)
    assert_same_weights(model, reference)


class Table(nn.Module):
    """Learned positions: its forward returns rows of its weight, as those of speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 24))

    def forward(self, num_rows: int) -> Tensor:
        return self.weight[2 : 2 + num_rows]


class WithTable(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def run_blocks(self, x: Tensor) -> Tensor:
        rows = self.table(len(x))
        x = super().run_blocks(x + rows)
        return x * (1 + rows)  # other units have had the lease


def test_a_module_that_returns_a_part_of_its_weight(offloaded: Any) -> None:
    compare_training(WithTable, offloaded)


class _Product(torch.autograd.Function):
    """x @ w.t(), with what backward needs in the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, by_view: bool) -> Tensor:
        ctx.x, ctx.w = x, w.t() if by_view else w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        w = ctx.w if ctx.w.shape[1] == ctx.x.shape[1] else ctx.w.t()
        return grad @ w, grad.t() @ ctx.x, None


class CustomBlock(Block):
    by_view = False

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(_Product.apply(self.norm(x), self.up.weight, self.by_view))  # type: ignore[no-untyped-call]
        return x + self.down(h)


class CustomViewBlock(CustomBlock):
    by_view = True


class CheckpointsWithView(Block):
    """The recomputation gets a view that the forward made."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self._product, self.norm(x), self.up.weight.t(), use_reentrant=False)
        return x + self.down(h)

    @staticmethod
    def _product(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x @ w)


class UsesLastForwards(Block):
    """Computes with the view that its last forward made; gradients arrive through it."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept if self.kept is not None else self.up.weight.t()
        h = F.gelu(self.norm(x) @ kept + self.up.bias)
        self.kept = self.up.weight.t()
        return x + self.down(h)


class UsesDetached(Block):
    """A penalty that holds the weight fixed, outside of the forward that made the view."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        fixed = torch.detach(self.down.weight)
        self.penalty = lambda: (self.down.weight * fixed).sum()
        return out


class WithPenalty(Stack):
    def __init__(self) -> None:
        super().__init__(UsesDetached)

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) + sum(block.penalty() for block in self.blocks)  # type: ignore[operator, misc]


@pytest.mark.parametrize("kind", [CustomBlock, CustomViewBlock, CheckpointsWithView, UsesLastForwards, None])
def test_kept_views_in_graphs(kind: type[Block] | None, offloaded: Any) -> None:
    compare_training(WithPenalty if kind is None else lambda: Stack(kind), offloaded)


LATE = {
    "after backward": (lambda kept: kept.mul_(0.5), True),
    "between forwards": (lambda kept: kept.mul_(0.5), False),
    "item between forwards": (lambda kept: kept.__setitem__((0, 0), 2.0), False),
    "copy_ between forwards": (
        lambda kept: kept.copy_(torch.linspace(-1, 1, kept.numel()).view(kept.shape)),
        False,
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_write_through_a_kept_view_arrives_or_is_refused(name: str, offloaded: Any) -> None:
    write, at_once = LATE[name]
    model, optimizer = offloaded(keeping(torch.t))
    reference = build(keeping(torch.t))
    plain = adam(reference)
    for net, one in ((reference, plain), (model, optimizer)):
        try:
            for seed in range(2):
                loss = net(features(seed))
                if at_once:
                    loss.backward()
                for kept in reversed(kept_views(net)):
                    with torch.no_grad():
                        write(kept)
                if not at_once:
                    loss = net(features(seed))
                    loss.backward()
                one.step()
                one.zero_grad()
            net.state_dict()
        except offloadzero.OffloadError as error:
            assert net is model, error  # noqa: PT017
            assert re.search(r"up\.weight was written through a view that its module's forward", str(error))  # noqa: PT017
            return
    assert_same_weights(model, reference)
