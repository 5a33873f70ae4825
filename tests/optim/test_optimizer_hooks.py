"""Hooks on an optimizer run as torch runs them, those that were registered before offloading too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import offloadzero
from offloadzero.errors import ConfigError, StateError
from tests.support.plain_form import final_weights, make_model, make_optimizer, offloaded
from tests.support.tiny import settings, tokens

KINDS = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)


def register(optimizer: Any, calls: list[str], who: str, **options: Any) -> list[Any]:
    def hook(kind: str) -> Callable[..., None]:
        return lambda optimizer, *_: calls.append(f"{who} {kind} {len(optimizer.param_groups)}")

    kinds = [kind for kind in KINDS if not options or "state_dict" in kind]
    return [getattr(optimizer, f"register_{kind}_hook")(hook(kind), **options) for kind in kinds]


def offload(model: Any, optimizer: Any) -> Any:
    config = settings(placement="host", bf16=None, optimizer=None)
    return offloadzero.offload(model, optimizer, config)[1]


def kept(_: Any, optimizer: Any) -> Any:
    return optimizer


def calls_of(make: Callable[[Any, Any], Any]) -> list[str]:
    calls: list[str] = []
    model = make_model()
    origin = make_optimizer(model)
    handles = register(origin, calls, "origin")
    register(origin, calls, "first", prepend=True)
    optimizer = make(model, origin)
    register(optimizer, calls, "ours")
    for _ in range(2):
        model(tokens(0)).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        for handle in handles:
            handle.remove()
    return calls


def test_all_six_kinds_in_the_order_of_torch() -> None:
    expected = calls_of(kept)
    assert {call.split()[1] for call in expected} == set(KINDS)
    assert calls_of(offload) == expected


def test_hooks_of_all_optimizers_run_once() -> None:
    for make in (kept, offload):
        calls: list[Any] = []
        model = make_model()
        optimizer = make(model, make_optimizer(model))
        handles = [
            torch_optimizer.register_optimizer_step_pre_hook(lambda *given: calls.append(given[0])),  # noqa: B023
            torch_optimizer.register_optimizer_step_post_hook(lambda *given: calls.append(given[0])),  # noqa: B023
        ]
        model(tokens(0)).backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
        assert calls == [optimizer, optimizer]


def test_what_a_hook_makes_of_a_state_dict() -> None:
    """Returned or assigned, on the way out and in: torch's numbers."""

    def out(_: Any, state_dict: Any) -> Any:
        return {**state_dict, "note": 1}

    def into(_: Any, state_dict: Any) -> None:
        state_dict["param_groups"] = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]

    def more(_: Any, state_dict: Any) -> Any:
        state = {n: {**values, "exp_avg": values["exp_avg"] * 2} for n, values in state_dict["state"].items()}
        return {**state_dict, "state": state}

    results = []
    for make in (kept, offload):
        model = make_model()
        optimizer = make(model, make_optimizer(model))
        model(tokens(0)).backward()
        optimizer.step()
        optimizer.register_state_dict_post_hook(out)
        optimizer.register_load_state_dict_pre_hook(into)
        optimizer.register_load_state_dict_pre_hook(more)
        given = optimizer.state_dict()
        assert given["note"] == 1
        optimizer.load_state_dict(given)
        assert given["param_groups"][0]["lr"] == 1e-2
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
        results.append(optimizer.state_dict()["state"])
    for number, state in results[0].items():
        torch.testing.assert_close(results[1][number]["exp_avg"] + 0, state["exp_avg"])


def test_a_hook_that_raises_leaves_the_states() -> None:
    model = make_model()
    optimizer = offload(model, make_optimizer(model))
    model(tokens(0)).backward()

    def refuse(*_: Any) -> None:
        raise ArithmeticError("no")

    handle = optimizer.register_step_pre_hook(refuse)
    before = model.emb.weight.detach().clone()
    with pytest.raises(ArithmeticError, match="no"):
        optimizer.step()
    assert torch.equal(model.emb.weight.detach(), before)
    handle.remove()
    optimizer.step()
    assert not torch.equal(model.emb.weight.detach(), before)


def test_the_original_still_refuses_to_step() -> None:
    """Its hooks are those of its successor, where the refusal is silent."""
    model = make_model()
    origin = make_optimizer(model)
    optimizer = offload(model, origin)
    with pytest.raises(StateError, match=r"the states of this AdamW were offloaded"):
        origin.step()
    model(tokens(0)).backward()
    optimizer.step()
    optimizer.restore_model()
    del optimizer
    again = offload(model, origin)
    with pytest.raises(StateError, match=r"the states of this AdamW were offloaded"):
        origin.step()
    model(tokens(0)).backward()
    again.step()


def test_a_refused_optimizer_keeps_its_hooks() -> None:
    calls: list[str] = []
    model = make_model()
    origin = make_optimizer(model)
    register(origin, calls, "origin")
    with pytest.raises(ConfigError):
        offloadzero.offload(model, origin, settings(placement={"nonsense": "host"}))
    model(tokens(0)).backward()
    origin.step()
    assert calls == ["origin step_pre 2", "origin step_post 2"]


# --- the members of groups, and their order, are those of offload() ---


Groups = list[dict[str, Any]]


def swap(groups: Groups) -> None:
    groups[0], groups[1] = groups[1], groups[0]


def move(groups: Groups) -> None:
    groups[0]["params"].append(groups[1]["params"].pop(0))


def only_some(groups: Groups) -> None:
    groups[0]["params"] = groups[0]["params"][1:]


def add_frozen(groups: Groups) -> None:
    groups[1]["params"].append(nn.Parameter(torch.ones(3)))


REFUSED: dict[str, tuple[Callable[[Groups], object], str]] = {
    "the other way round": (lambda groups: groups.reverse(), r"param_groups\[0\]: \S+weight was in it"),
    "swapped": (swap, r"param_groups\[0\]: \S+weight was in it"),
    "one moved": (move, r"param_groups\[0\]: \S+ was not in it"),
    "only some": (only_some, r"param_groups\[0\]: \S+weight was in it"),
    "one more": (add_frozen, r"param_groups\[1\]: a parameter of shape \(3,\) was not in it"),
    "a group less": (lambda groups: groups.pop(), r"param_groups: 1 groups, where there were 2"),
    "a group more": (lambda groups: groups.append({**groups[0], "params": []}), r"param_groups: 3 groups"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_changed_are_refused_by_the_step(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    with offloaded("host", tmp_path) as (model, optimizer):
        model(tokens(0)).backward()
        kept = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        weights = final_weights(model)
        change(optimizer.param_groups)
        with pytest.raises(StateError, match=message):
            optimizer.step()
        assert all(torch.equal(value, weights[key]) for key, value in final_weights(model).items())
        optimizer.param_groups[:] = kept
        optimizer.step()
        assert not all(torch.equal(value, weights[key]) for key, value in final_weights(model).items())


def test_what_groups_may_do(tmp_path: Path) -> None:
    """Other dicts, another list of them, other options, the parameters of a group in another order."""

    def train(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        for seed in range(4):
            model(tokens(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if seed == 0:
                optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 3e-3}
            elif seed == 1:
                optimizer.param_groups = [dict(group, weight_decay=0.3) for group in optimizer.param_groups]
            else:
                optimizer.param_groups[1]["params"].reverse()
        return final_weights(model)

    plain = make_model()
    expected = train(plain, make_optimizer(plain))
    with offloaded("nvme", tmp_path) as (model, optimizer):
        for name, value in train(model, optimizer).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
