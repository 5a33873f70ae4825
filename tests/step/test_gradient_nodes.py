"""The nodes at which autograd adds up gradients: scripts find those of an offloaded model's parameters as in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

import offloadzero
from tests.support.plain_form import make_model, make_optimizer, offloaded, plain_config
from tests.support.tiny import Block, TinyModel, tokens

SMALLEST_LEASES = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1}}


def norm(grads: Any) -> float:
    return sum(float(grad.norm()) for grad in grads if isinstance(grad, Tensor))


def all_of_a_block(model: TinyModel, seen: list[float]) -> Any:
    def call(grads: Sequence[Tensor | None]) -> None:
        seen.append(norm(grads))

    return graph.register_multi_grad_hook(list(model.blocks[1].parameters()), call)


def any_of_a_block(model: TinyModel, seen: list[float]) -> Any:
    return graph.register_multi_grad_hook(
        list(model.blocks[1].parameters()), lambda grad: seen.append(grad.numel()), mode="any"
    )


def by_the_node(view: Callable[[Tensor], Tensor]) -> Callable[[TinyModel, list[float]], Any]:
    def register(model: TinyModel, seen: list[float]) -> Any:
        nodes = [view(param).grad_fn.next_functions[0][0] for param in model.parameters()]  # type: ignore[union-attr]
        for node in nodes:
            node.register_hook(lambda *_: seen.append(1.0))
            node.register_prehook(lambda grads: seen.append(norm(grads)))
        return nodes

    return register


WAYS: dict[str, Callable[[TinyModel, list[float]], Any]] = {
    "all": all_of_a_block,
    "any": any_of_a_block,
    "the node by view_as": by_the_node(lambda p: p.view_as(p)),
    "the node by expand_as": by_the_node(lambda p: p.expand_as(p)),
}


def what_hooks_see(model: TinyModel, way: str) -> list[float]:
    seen: list[float] = []
    kept = WAYS[way](model, seen)
    for seed in range(3):
        model(tokens(seed)).backward()
        model.zero_grad()
    del kept
    return seen


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_at_the_nodes_see_the_gradients(way: str, placement: str, tmp_path: Path) -> None:
    expected = what_hooks_see(make_model(), way)
    assert expected
    with offloaded(placement, tmp_path) as (model, _):
        assert sorted(what_hooks_see(model, way)) == pytest.approx(sorted(expected), rel=1e-5)


def test_a_gradient_at_an_edge(tmp_path: Path) -> None:
    def grad_at_an_edge(model: TinyModel) -> Tensor:
        edge = graph.get_gradient_edge(model.blocks[0].up.weight)
        return torch.autograd.grad(model(tokens(0)), [edge])[0].clone()  # type: ignore[list-item]

    with offloaded("host", tmp_path) as (model, _):
        torch.testing.assert_close(grad_at_an_edge(model), grad_at_an_edge(make_model()))


@pytest.mark.parametrize("name", ["view_as", "expand_as"])
def test_such_a_view_has_the_value_and_the_gradient(name: str, tmp_path: Path) -> None:
    with offloaded("nvme", tmp_path) as (model, _):
        param = model.blocks[0].up.weight
        view = getattr(param, name)(param)
        assert view is not param
        assert torch.equal(view, make_model().blocks[0].up.weight)
        (2 * view).sum().backward()
        assert param.grad is not None
        assert torch.equal(param.grad, torch.full(param.shape, 2.0))
        with torch.no_grad():
            getattr(param, name)(param).fill_(0.5)
        assert torch.equal(param, torch.full(param.shape, 0.5))


# --- what runs inside of a backward reads weights


def by_grad(loss: Tensor, params: list[Any]) -> Any:
    return torch.autograd.grad(loss, params)


def by_grad_of_unused(loss: Tensor, params: list[Any]) -> Any:
    unused = nn.Parameter(torch.ones(3))
    return torch.autograd.grad(loss, [*params, unused], materialize_grads=True)


def by_inputs(loss: Tensor, params: list[Any]) -> Any:
    loss.backward(inputs=params)
    return [p.grad for p in params]


class ReadsAnother(Block):
    """Its recomputation reads a weight of another block."""

    others: list[Block]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.others[0].up.weight[: x.shape[-1]])


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
@pytest.mark.parametrize("gradients", [by_grad, by_grad_of_unused, by_inputs])
@pytest.mark.parametrize("reads", ["a hook", "a recomputation"])
def test_weights_are_read_in_a_backward_for_some_parameters(
    reads: str, gradients: Callable[[Tensor, list[Any]], Any], placement: str, tmp_path: Path
) -> None:
    class Checkpointing(TinyModel):
        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.emb(ids)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            return self.head(self.norm(hidden)).square().mean()

    def make() -> TinyModel:
        if reads == "a hook":
            return make_model()
        torch.manual_seed(1)
        model = Checkpointing(width=16, num_blocks=0)
        model.blocks.extend(ReadsAnother(16) for _ in range(3))
        for block, other in zip(model.blocks, reversed(model.blocks), strict=True):
            block.others = [other]  # type: ignore[assignment]
        return model

    def run(model: TinyModel) -> list[Tensor]:
        params = list(model.parameters())
        if reads == "a hook":
            params[3].register_hook(lambda grad: grad + 0.1 * params[-3].mean())
            params[-1].register_hook(lambda grad: grad + 0.1 * params[2].norm())
        return [grad.detach().clone() for grad in gradients(model(tokens(0)), params)]

    expected = run(make())
    model = make()
    config = plain_config(placement, tmp_path, **SMALLEST_LEASES)
    _, optimizer = offloadzero.offload(model, make_optimizer(model), config)
    found = run(model)
    optimizer.close()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
