"""`load_state_dict` of an offloaded optimizer: torch's numbers, and what does not fit is refused as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offloadzero
from offloadzero.errors import ConfigError
from offloadzero.optim import CPUAdam
from tests.support.plain_form import final_weights, make_model, make_optimizer, offloaded, plain_config
from tests.support.tiny import make_engine, settings, tokens, train

Values = dict[str, Any]


def take_steps(model: Any, optimizer: Any, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = model(tokens(seed))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_state() -> Values:
    """Of torch.optim.AdamW, after three steps."""
    model = make_model()
    optimizer = make_optimizer(model)
    take_steps(model, optimizer, range(7, 10))
    return copy.deepcopy(optimizer.state_dict())


def keep(numbers: Callable[[int], bool]) -> Values:
    state_dict = trained_state()
    state_dict["state"] = {n: state for n, state in state_dict["state"].items() if numbers(n)}
    return state_dict


@pytest.mark.parametrize("placement", ["resident", "nvme"])
@pytest.mark.parametrize("kept", [lambda n: n % 3, lambda _: False], ids=["some", "none"])
def test_a_parameter_without_a_state_begins_anew(
    kept: Callable[[int], bool], placement: str, tmp_path: Path
) -> None:
    plain = make_model()
    plain_optimizer = make_optimizer(plain)
    with offloaded(placement, tmp_path) as (model, optimizer):
        losses = []
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            take_steps(one, its, range(3))
            its.load_state_dict(keep(kept))
            losses.append(take_steps(one, its, range(3, 6)))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        expected = final_weights(plain)
        for name, value in final_weights(model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", ["fp32", "compact"])
def test_a_state_that_begins_anew_has_the_bits_of_the_first(layout: str, tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="nvme", state_layout=layout))
    fresh = copy.deepcopy(engine.optimizer.state_dict())
    train(engine, num_steps=2)
    nothing = {0: {}, 1: dict.fromkeys(fresh["state"][1])}  # as torch has some: without a tensor
    engine.optimizer.load_state_dict({"state": nothing, "param_groups": fresh["param_groups"]})
    for number, state in engine.optimizer.state_dict()["state"].items():
        for key in state.keys() - {"master"}:  # the weights stay
            assert torch.equal(state[key] + 0, fresh["state"][number][key]), key
    engine.close()


def test_states_are_found_by_the_numbers_of_the_groups(tmp_path: Path) -> None:
    state_dict = trained_state()
    names = {n: f"w{n}" for n in state_dict["state"]}
    renamed = {
        "state": {names[n]: state for n, state in state_dict["state"].items()},
        "param_groups": [
            {**g, "params": [names[n] for n in g["params"]]} for g in state_dict["param_groups"]
        ],
    }
    with offloaded("host", tmp_path) as (_, optimizer):
        optimizer.load_state_dict(renamed)
        for number, state in optimizer.state_dict()["state"].items():
            assert torch.equal(state["exp_avg"] + 0, state_dict["state"][number]["exp_avg"])


def change(key: str, value: Any) -> Callable[[Values], None]:
    return lambda state: state.__setitem__(key, value)


BAD_STATES: dict[str, tuple[Callable[[Values], Any], str]] = {
    "a shape": (change("exp_avg", torch.zeros(3)), r"\.exp_avg = \(3,\): shape \("),
    "as many elements in another shape": (
        lambda state: state.update(exp_avg_sq=state["exp_avg_sq"].reshape(-1, 1)),
        r"\.exp_avg_sq = \(\d+, 1\): shape \(",
    ),
    "no moment": (
        lambda state: state.pop("exp_avg_sq"),
        r"\.exp_avg_sq = None: a state of Adam has exp_avg, ",
    ),
    "no step": (lambda state: state.pop("step"), r"\.step = None: a state of Adam has"),
    "a moment that is no tensor": (change("exp_avg", 0.5), r"\.exp_avg = 'float': a tensor"),
    "half a step": (change("step", torch.tensor(1.5)), r"\.step = 1\.5: a whole number of steps"),
    "a step that is no number": (change("step", "many"), r"\.step = 'many': a whole number of steps"),
    "a master": (change("master", torch.zeros(2)), r"\.master = \(2,\): shape \("),
}


def all_values(optimizer: Any) -> list[Any]:
    states = optimizer.state_dict()
    return [
        *[tensor + 0 for state in states["state"].values() for tensor in state.values()],
        *[dict(group) for group in states["param_groups"]],
    ]


def unchanged(optimizer: Any, before: list[Any]) -> bool:
    pairs = zip(all_values(optimizer), before, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_does_not_fit_changes_nothing(name: str, tmp_path: Path) -> None:
    spoil, message = BAD_STATES[name]
    state_dict = trained_state()
    state_dict["param_groups"][0]["lr"] = 0.5
    spoil(state_dict["state"][5])
    with offloaded("host", tmp_path) as (model, optimizer):
        take_steps(model, optimizer, range(2))
        before = all_values(optimizer)
        with pytest.raises(ConfigError, match=message):
            optimizer.load_state_dict(state_dict)
        assert unchanged(optimizer, before)
        take_steps(model, optimizer, range(2, 3))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("amsgrad", True, r"param_groups\[1\]\.amsgrad = True: allowed: False"),
        ("maximize", True, r"param_groups\[1\]\.maximize = True: allowed: False"),
        ("differentiable", True, r"param_groups\[1\]\.differentiable = True: allowed: False"),
        ("lr", "much", r"param_groups\[1\]\.lr = 'much': a number"),
        ("betas", (0.9,), r"param_groups\[1\]\.betas = \(0\.9,\): two numbers"),
    ],
)
def test_options_of_a_group_that_are_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    """When they are loaded, and when a script sets them and then steps: nothing is loaded, nothing is applied."""
    state_dict = trained_state()
    state_dict["param_groups"][1][key] = value
    with offloaded("host", tmp_path) as (model, optimizer):
        take_steps(model, optimizer, range(2))
        before = all_values(optimizer)
        with pytest.raises(ConfigError, match=f"state_dict.{message}"):
            optimizer.load_state_dict(state_dict)
        assert unchanged(optimizer, before)
        model(tokens(2)).backward()
        was = optimizer.param_groups[1][key]
        optimizer.param_groups[1][key] = value
        with pytest.raises(ConfigError, match=f"optimizer.{message}"):
            optimizer.step()
        optimizer.param_groups[1][key] = was
        assert unchanged(optimizer, before)
        optimizer.step()
        assert not unchanged(optimizer, before)


def test_groups_that_are_loaded_are_the_optimizers_own(tmp_path: Path) -> None:
    state_dict = trained_state()
    state_dict["param_groups"][0]["mine"] = [1]
    with offloaded("host", tmp_path) as (_, optimizer):
        optimizer.load_state_dict(state_dict)
        state_dict["param_groups"][0]["mine"].append(2)
        assert optimizer.param_groups[0]["mine"] == [1]


def test_an_adamw_that_loads_the_groups_of_an_adam_decays_as_an_adamw(tmp_path: Path) -> None:
    model = make_model()
    groups = torch.optim.Adam(make_optimizer(model).param_groups, lr=1e-2).state_dict()["param_groups"]
    for group in groups:
        group["decoupled_weight_decay"] = False
    plain = make_model()
    plain_optimizer = make_optimizer(plain)
    with offloaded("host", tmp_path) as (model, optimizer):
        losses = []
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            its.load_state_dict({"state": {}, "param_groups": copy.deepcopy(groups)})
            losses.append(take_steps(one, its, range(4)))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert all(group["decoupled_weight_decay"] for group in plain_optimizer.param_groups)


def test_another_number_of_groups(tmp_path: Path) -> None:
    state_dict = trained_state()
    with offloaded("host", tmp_path) as (_, optimizer):
        for groups in ([], state_dict["param_groups"][:1]):
            with pytest.raises(ConfigError, match=r"parameters per group here: \[\d+, \d+\]"):
                optimizer.load_state_dict({"state": {}, "param_groups": groups})
        with pytest.raises(ConfigError, match=r"state_dict = \['state'\]: the keys state and param_groups"):
            optimizer.load_state_dict({"state": {}})


def test_a_state_of_another_optimizer_is_refused_as_a_whole(tmp_path: Path) -> None:
    lion = {"type": "Lion", "params": {"lr": 1e-3}}
    engine = make_engine(settings(tmp_path, placement="nvme", optimizer=lion))
    train(engine, num_steps=2)
    before = copy.deepcopy(engine.optimizer.state_dict())
    adamw = copy.deepcopy(before)
    for state in adamw["state"].values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"] + 1, state["exp_avg"].clone()
    with pytest.raises(
        ConfigError, match=r"exp_avg_sq.*a state of Lion has exp_avg: this is another optimizer's"
    ):
        engine.optimizer.load_state_dict(adamw)
    after = engine.optimizer.state_dict()
    for key, state in before["state"].items():
        assert torch.equal(after["state"][key]["exp_avg"], state["exp_avg"])
    engine.close()


def expect_same_training(model: Any, optimizer: Any, plain: Any, steady: Any) -> None:
    losses = [take_steps(model, optimizer, range(3, 9)), take_steps(plain, steady, range(3, 9))]
    assert losses[0] == losses[1]
    expected = final_weights(plain)
    for name, weight in final_weights(model).items():
        assert torch.equal(weight, expected[name]), name
    optimizer.close()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_cpu_adam_in_bf16_goes_on_offloaded_with_all_bits_of_its_master(
    placement: str, tmp_path: Path
) -> None:
    plain = make_model().to(torch.bfloat16)
    steady = CPUAdam(plain.parameters(), lr=1e-2)
    take_steps(plain, steady, range(3))
    model = make_model().to(torch.bfloat16)
    model.load_state_dict(plain.state_dict())
    _, optimizer = offloadzero.offload(
        model, CPUAdam(model.parameters(), lr=1e-2), plain_config(placement, tmp_path)
    )
    optimizer.load_state_dict(copy.deepcopy(steady.state_dict()))
    expect_same_training(model, optimizer, plain, steady)


@pytest.mark.parametrize("layout", ["fp32", "compact"])
def test_an_offloaded_adam_in_bf16_goes_on_as_a_cpu_adam_with_all_bits_of_its_master(
    layout: str, tmp_path: Path
) -> None:
    model = make_model().to(torch.bfloat16)
    config = plain_config("host", tmp_path, state_layout=layout)
    _, optimizer = offloadzero.offload(model, CPUAdam(model.parameters(), lr=1e-2), config)
    take_steps(model, optimizer, range(3))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain = make_model().to(torch.bfloat16)
    steady = CPUAdam(plain.parameters(), lr=1.0, state_layout=layout)
    with pytest.raises(ConfigError, match=r"master.*load those of the model before the optimizer's state"):
        steady.load_state_dict(copy.deepcopy(state))
    assert not steady.state
    plain.load_state_dict(weights)
    steady.load_state_dict(state)
    expect_same_training(model, optimizer, plain, steady)
