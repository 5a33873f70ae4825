"""What looks at a model from outside: transforms of torch.func, exporters, copies of the optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import offloadzero
from offloadzero.errors import StateError
from tests.support.plain_form import ALL_PLACEMENTS, final_weights, make_model, offloaded
from tests.support.tiny import tokens

TOKENS = tokens(0)
ROW = torch.ones(1, 16)


@pytest.fixture(params=ALL_PLACEMENTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """The model offloaded, and without us."""
    with offloaded(request.param, tmp_path) as (model, _):
        yield model, make_model()


def weight(model: Any) -> nn.Parameter:
    found: nn.Parameter = model.blocks[0].up.weight
    return found


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


RIGHT: dict[str, Callable[[Any], Tensor]] = {
    "functional_call": lambda model: functional_call(model, dict(model.named_parameters()), (TOKENS,)),
    "functional_call, detached": lambda model: functional_call(model, named(model), (TOKENS,)),
    "vmap": lambda model: vmap(lambda row: row.sum())(weight(model).detach()),
    "vmap of a closure": lambda model: vmap(lambda x: weight(model).detach() @ x)(torch.ones(2, 16)),
    "grad": lambda model: grad(lambda w: (w**2).sum())(weight(model).detach()),
    "grad of a closure": lambda model: grad(lambda x: (x @ weight(model).detach().t()).sum())(ROW),
    "stacked": lambda model: torch.func.stack_module_state([model.blocks[0], model.blocks[1]])[0][
        "up.weight"
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_transforms_of_values_are_right(name: str, pair: tuple[Any, Any]) -> None:
    model, plain = pair
    torch.testing.assert_close(RIGHT[name](model), RIGHT[name](plain))


REFUSED: dict[str, Callable[[Any], object]] = {
    "vmap": lambda model: vmap(lambda row: row.sum())(weight(model)),
    "vmap of a closure": lambda model: vmap(lambda x: weight(model) @ x)(torch.ones(2, 16)),
    "grad of a closure": lambda model: grad(lambda x: (x @ weight(model).t()).sum())(ROW),
    "jvp": lambda model: jvp(lambda w: w * 2, (weight(model),), (torch.ones(49, 16),)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_of_parameters_are_refused_by_name(name: str, pair: tuple[Any, Any]) -> None:
    with pytest.raises(StateError, match=r"blocks\.0\.up\.weight: torch\.func.*p\.detach\(\)"):
        REFUSED[name](pair[0])


def loss_of(model: nn.Module) -> Callable[..., Any]:
    return lambda values, ids: functional_call(model, values, (ids,))


THROUGH: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda base, model: grad(loss_of(base))(named(model), TOKENS),
    "jacrev": lambda base, model: jacrev(loss_of(base))(named(model), TOKENS),
    "vmap of grad": lambda base, model: vmap(grad(loss_of(base)), in_dims=(None, 0))(
        named(model), TOKENS.unsqueeze(1)
    ),
}


@pytest.mark.parametrize("name", THROUGH)
def test_transforms_through_the_model_say_what_to_take(name: str, pair: tuple[Any, Any]) -> None:
    model, plain = pair
    with pytest.raises(StateError, match=r"torch\.func.*functional_call.*copy\.deepcopy\(model\)"):
        THROUGH[name](model, model)
    expected = THROUGH[name](plain, plain)
    for key, value in THROUGH[name](copy.deepcopy(model), model).items():
        torch.testing.assert_close(value, expected[key], msg=key)
    model(TOKENS).backward()
    plain(TOKENS).backward()
    torch.testing.assert_close(weight(model).grad.clone(), weight(plain).grad)  # type: ignore[union-attr]


def hidden(model: Any, x: Tensor) -> Tensor:
    """Blocks and, beside them, weights of units whose modules are not in their forward."""
    for block in model.blocks:
        x = block(x)
    others = model.blocks[0].up.weight.detach()[:16].sum() + model.blocks[1].down.weight.detach().norm()
    return x * others


FORWARD_MODE: dict[str, Callable[[Any], Tensor]] = {
    "jvp": lambda model: jvp(lambda x: hidden(model, x), (ROW,), (ROW,))[1],
    "jacfwd": lambda model: jacfwd(lambda x: hidden(model, x))(ROW),
    "jvp of jvp": lambda model: jvp(
        lambda y: jvp(lambda x: hidden(model, x), (y,), (ROW,))[1], (ROW,), (ROW,)
    )[1],
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_derivatives_in_forward_mode_train(name: str, pair: tuple[Any, Any]) -> None:
    found = []
    for model in pair:
        with torch.no_grad():
            unrecorded = FORWARD_MODE[name](model)
        value = FORWARD_MODE[name](model)
        (value**2).sum().backward()
        model(TOKENS).backward()
        found.append([unrecorded, value.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


TANGENTS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "dense": lambda model: {name: torch.ones(value.shape) for name, value in named(model).items()},
    "expanded": lambda model: {name: torch.ones(()).expand(v.shape) for name, v in named(model).items()},
    "the weights": named,
}


@pytest.mark.parametrize("kind", TANGENTS)
def test_forward_gradients_of_the_weights_are_right(kind: str, pair: tuple[Any, Any]) -> None:
    """Evolution strategies and forward gradients: a derivative along a direction of the weights, through the model."""
    model, plain = pair
    with pytest.raises(StateError, match=r"torch\.func.*p\.detach\(\)"):
        jvp(lambda values: loss_of(model)(values, TOKENS), (dict(model.named_parameters()),), (named(plain),))
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            ours, expected = (
                jvp(
                    lambda values, one=one: loss_of(one)(values, TOKENS),
                    (named(one),),
                    (TANGENTS[kind](one),),
                )
                for one in pair
            )
        torch.testing.assert_close(ours, expected)
    model(TOKENS).backward()
    plain(TOKENS).backward()
    torch.testing.assert_close(weight(model).grad.clone(), weight(plain).grad)  # type: ignore[union-attr]


def test_derivatives_through_checkpointed_units_are_refused(tmp_path: Path) -> None:
    with offloaded("host", tmp_path, activation_checkpoints={}) as (model, _):
        with pytest.raises(StateError, match=r"blocks\.0: .*torch\.func.*activation_checkpoints"):
            FORWARD_MODE["jvp"](model)
        model(TOKENS).backward()
        plain = make_model()
        plain(TOKENS).backward()
        torch.testing.assert_close(weight(model).grad.clone(), weight(plain).grad)  # type: ignore[union-attr]


OTHER_WEIGHTS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "all, of the model's": lambda model: {name: p * 1.5 for name, p in model.named_parameters()},
    "all, of their own": lambda model: {
        name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()
    },
    # Autograd saves no bias: computed again with the model's own, it would be another function, and no error.
    "biases": lambda model: {name: p + 0.3 for name, p in model.named_parameters() if name.endswith("bias")},
}


@pytest.mark.parametrize("checkpoints", [{}, {"tier": "host"}], ids=str)
@pytest.mark.parametrize("kind", OTHER_WEIGHTS)
def test_other_weights_through_checkpointed_units(
    kind: str, checkpoints: dict[str, str], tmp_path: Path
) -> None:
    """Backward computes the units again with the weights that functional_call gave them."""
    with offloaded("host", tmp_path, activation_checkpoints=checkpoints) as (model, optimizer):
        plain = make_model()
        for _ in range(2):
            found = []
            for one in (model, plain):
                weights = OTHER_WEIGHTS[kind](one)
                of = [*one.parameters()] if kind != "all, of their own" else [*weights.values()]
                loss = functional_call(one, weights, (TOKENS,))
                found.append([loss, *torch.autograd.grad(loss, of)])
            torch.testing.assert_close(*found)
        for one in (model, plain):
            one(TOKENS).backward()
        torch.testing.assert_close(weight(model).grad.clone(), weight(plain).grad)  # type: ignore[union-attr]
        optimizer.step()


def test_a_step_through_a_step_through_checkpointed_units(tmp_path: Path) -> None:
    """Meta-learning: the loss at weights that have made a step, derived through that step."""
    with offloaded("host", tmp_path, activation_checkpoints={}) as (model, _):
        found = []
        for one in (model, make_model()):
            weights = dict(one.named_parameters())
            loss = functional_call(one, weights, (TOKENS,))
            steps = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            moved = {name: p - 0.1 * step for (name, p), step in zip(weights.items(), steps, strict=True)}
            functional_call(one, moved, (tokens(1),)).backward()
            found.append([p.grad.clone() for p in one.parameters()])  # type: ignore[union-attr]
        torch.testing.assert_close(*found)


class Centred(nn.Module):
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x - self.centre))


def test_other_buffers_through_checkpointed_units() -> None:
    found = []
    for is_offloaded in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(*(Centred() for _ in range(3)))
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        if is_offloaded:
            config: dict[str, Any] = {"offloadzero": {"activation_checkpoints": {}}}
            _, optimizer = offloadzero.offload(model, optimizer, config)
        centres = {name: buffer + 0.5 for name, buffer in model.named_buffers()}
        functional_call(model, centres, (ROW,)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
        assert not any(buffer.any() for buffer in model.buffers())
        if is_offloaded:
            optimizer.close()
    torch.testing.assert_close(*found)


EXPORTS: dict[str, Callable[[Any], Any]] = {
    "trace": lambda model: torch.jit.trace(model, (TOKENS,)),
    "script": torch.jit.script,
    "export": lambda model: torch.export.export(model, (TOKENS,)),
    "trace a block": lambda model: torch.jit.trace(model.blocks[0], (ROW,)),
    "export a block": lambda model: torch.export.export(model.blocks[0], (ROW,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_say_what_to_export(name: str, tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        with pytest.raises(StateError, match=r"copy\.deepcopy\(model\), or call restore_model\(\)"):
            EXPORTS[name](model)
        exported = EXPORTS[name](copy.deepcopy(model))
        exported = exported.module() if hasattr(exported, "module") else exported
        given, module = (ROW, model.blocks[0]) if "block" in name else (TOKENS, model)
        torch.testing.assert_close(exported(given), module(given))
        model(TOKENS).backward()
        optimizer.step()
        after = final_weights(model)
    with offloaded("host", tmp_path) as (model, optimizer):
        model(TOKENS).backward()
        optimizer.step()
        for key, value in final_weights(model).items():
            assert torch.equal(value, after[key]), key


@pytest.mark.filterwarnings("ignore")
def test_a_strict_export_says_so_too(tmp_path: Path) -> None:
    with (
        offloaded("host", tmp_path) as (model, _),
        pytest.raises(Exception, match=r"torch\.export takes an ordinary copy, copy\.deepcopy\(model\)"),
    ):
        torch.export.export(model, (TOKENS,), strict=True)


def test_copies_of_the_optimizer_are_refused(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        copies: list[Callable[[Any], object]] = [
            copy.deepcopy,
            copy.copy,
            pickle.dumps,
            lambda one: torch.save(one, io.BytesIO()),
        ]
        for make_copy in copies:
            with pytest.raises(StateError, match=r"cannot be copied or pickled.*optimizer\.state_dict\(\)"):
                make_copy(optimizer)
        copy.deepcopy(optimizer.state_dict())
        model(TOKENS).backward()
        optimizer.step()
