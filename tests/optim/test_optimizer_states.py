"""`optimizer.state` and `optimizer.state_dict()`: what is written into them arrives, or is an error at that line."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

import offloadzero
from offloadzero.errors import ConfigError, StateError
from tests.support.cases import each_pair
from tests.support.models import Stack, features
from tests.support.plain_form import final_weights, make_model, make_optimizer, offloaded, plain_config
from tests.support.tiny import make_engine, settings, tokens, train
from tests.support.training import make_config


def step(model: Any, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    model(tokens(seed)).backward()
    optimizer.step()


def by_state(model: Any, optimizer: Any, change: Callable[[Tensor], object], key: str) -> None:
    for param in model.parameters():
        change(optimizer.state[param][key])


def by_state_dict(_: Any, optimizer: Any, change: Callable[[Tensor], object], key: str) -> None:
    for values in optimizer.state_dict()["state"].values():
        change(values[key])


CHANGES: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "a moment in place": ("exp_avg", lambda t: t.mul_(0.5)),
    "the other moment": ("exp_avg_sq", lambda t: t.add_(1e-6)),
    "a part of one": ("exp_avg", lambda t: t.view(-1)[:3].zero_()),
    "an item": ("exp_avg", lambda t: t.__setitem__((0,), 0.25)),
    "its data": ("exp_avg", lambda t: t.data.fill_(1e-6)),
    "copied": ("exp_avg_sq", lambda t: t.copy_(torch.full(t.shape, 1e-4))),
    "by torch": ("exp_avg", lambda t: torch._foreach_mul_([t], 0.1)),
    "the count": ("step", lambda t: t.fill_(7.0)),
}


@pytest.mark.parametrize(
    ("name", "write", "placement"),
    each_pair(CHANGES, [by_state, by_state_dict], ["resident", "host", "nvme"]),
)
def test_what_is_written_into_states_arrives(name: str, write: Any, placement: str, tmp_path: Path) -> None:
    key, change = CHANGES[name]
    plain = make_model()
    plain_optimizer = make_optimizer(plain)
    with offloaded(placement, tmp_path) as (model, optimizer):
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            step(one, its, 0)
            write(one, its, change, key)
            step(one, its, 1)
        expected = final_weights(plain)
        for weight_name, value in final_weights(model).items():
            torch.testing.assert_close(value, expected[weight_name], rtol=1e-5, atol=1e-6)
        for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
            for kind, value in plain_optimizer.state[twin].items():
                torch.testing.assert_close(optimizer.state[param][kind] + 0, value, rtol=1e-4, atol=1e-7)


def test_a_parameter_without_states(tmp_path: Path) -> None:
    """One that is frozen has none, as in torch; one of another model is a mistake."""
    model = make_model()
    frozen = model.blocks[0].up.weight.requires_grad_(requires_grad=False)
    _, optimizer = offloadzero.offload(model, make_optimizer(model), plain_config("host", tmp_path))
    step(model, optimizer, 0)
    counts = [len(optimizer.state[param]) for group in optimizer.param_groups for param in group["params"]]
    assert counts.count(0) == 1
    assert optimizer.state[frozen] == {}
    assert optimizer.state.get(frozen) is None
    other = make_model().blocks[0].up.weight
    with pytest.raises(KeyError, match="no parameter of the model that was offloaded"):
        optimizer.state[other]
    assert optimizer.state.get(other, 3) == 3
    optimizer.close()


def test_the_master_is_written_too(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="nvme"))
    train(engine, num_steps=1)
    param = engine.module.blocks[0].up.weight
    engine.optimizer.state[param]["master"].fill_(0.1)
    assert torch.equal(offloadzero.zero.safe_get_full_fp32_param(param), torch.full(param.shape, 0.1))
    assert torch.equal(param.data, torch.full(param.shape, 0.1, dtype=torch.bfloat16))
    engine.close()


def test_a_state_that_was_taken_before_an_update_is_the_present_one(tmp_path: Path) -> None:
    """As torch's is, whose step writes into the tensors of an earlier state dict."""
    plain = make_model()
    plain_optimizer = make_optimizer(plain)
    with offloaded("nvme", tmp_path) as (model, optimizer):
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            step(one, its, 0)
        found, expected = (its.state_dict()["state"][0] for its in (optimizer, plain_optimizer))
        before = found["exp_avg"].clone()
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            step(one, its, 1)
        assert found["step"] == expected["step"] == 2
        assert not torch.equal(found["exp_avg"], before)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found[key] + 0, expected[key], rtol=1e-4, atol=1e-7)
            found[key].zero_()
            assert not optimizer.state_dict()["state"][0][key].any()


def test_two_state_dicts_have_one_state(tmp_path: Path) -> None:
    """What is written through the one is read through the other."""
    with offloaded("host", tmp_path) as (model, optimizer):
        step(model, optimizer, 0)
        one, other = (optimizer.state_dict()["state"] for _ in range(2))
        one[0]["exp_avg"].fill_(1.0)
        other[1]["exp_avg"].fill_(2.0)
        other[0]["exp_avg"].mul_(3.0)
        assert [float(its[i]["exp_avg"].mean()) for its in (one, other) for i in (0, 1)] == [3, 2, 3, 2]


def test_items_of_one_parameters_states(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        step(model, optimizer, 0)
        param = model.blocks[0].up.weight
        optimizer.state[param]["exp_avg"] = torch.full(param.shape, 0.5)
        optimizer.state[param].update(exp_avg_sq=torch.full(param.shape, 0.25), step=9)
        assert float(optimizer.state[param]["exp_avg"].mean()) == 0.5
        assert float(optimizer.state[param]["exp_avg_sq"].mean()) == 0.25
        assert optimizer.state[param]["step"] == 9
        states = optimizer.state[param]
        refused: list[Callable[[], object]] = [
            lambda: states.__setitem__("max_exp_avg_sq", param),
            lambda: states.pop("exp_avg"),
            lambda: states.__delitem__("step"),
            states.clear,
            states.popitem,
            lambda: states.setdefault("momentum_buffer", param),
        ]
        for call in refused:
            with pytest.raises(StateError, match="has the states exp_avg, exp_avg_sq, step;"):
                call()
        with pytest.raises(ConfigError, match="a whole number of steps"):
            optimizer.state[param]["step"] = -1


def test_states_are_not_replaced(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        step(model, optimizer, 0)
        param = model.blocks[0].up.weight
        refused: list[Callable[[], object]] = [
            lambda: setattr(optimizer, "state", defaultdict(dict)),
            lambda: setattr(optimizer, "state", {param: {}}),
            lambda: optimizer.state.__setitem__(param, {"exp_avg": param}),
            lambda: optimizer.state.update({param: {}}),
            lambda: optimizer.state.__ior__({param: {}}),
            lambda: optimizer.state.pop(param),
            optimizer.state.popitem,
            optimizer.state.clear,
        ]
        for call in refused:
            with pytest.raises(StateError, match=r"cannot be replaced.*load_state_dict\(\)"):
                call()
        optimizer.state = optimizer.state
        assert float(optimizer.state[param]["exp_avg"].abs().max()) > 0


def test_they_are_ordinary_tensors_in_files_and_copies(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        step(model, optimizer, 0)
        state = optimizer.state_dict()
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        copied = copy.deepcopy(state)
        param = model.blocks[0].up.weight
        assert type(copy.deepcopy(optimizer.state[param])) is dict
        for number, values in state["state"].items():
            for key, value in values.items():
                for other in (loaded["state"][number][key], copied["state"][number][key]):
                    assert type(other) is Tensor
                    assert torch.equal(other, value)
        copied["state"][0]["exp_avg"].zero_()
        assert float(optimizer.state_dict()["state"][0]["exp_avg"].abs().max()) > 0


def test_compact_moments_that_were_changed_win_over_their_codes(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="host", state_layout="compact"))
    train(engine, num_steps=1)
    state = engine.optimizer.state_dict()
    with pytest.raises(StateError, match="write exp_avg or exp_avg_sq"):
        state["state"][0]["scales"].zero_()
    state = engine.optimizer.state_dict()
    kept = {key: value.clone() for key, value in state["state"][1].items()}
    state["state"][0]["exp_avg"].zero_()
    for _ in range(2):
        assert float(engine.optimizer.state_dict()["state"][0]["exp_avg"].abs().max()) == 0.0
        engine.optimizer.load_state_dict(state)
    for key, value in kept.items():
        assert torch.equal(engine.optimizer.state_dict()["state"][1][key] + 0, value), key
    engine.close()


def test_an_optimizer_of_torch_that_takes_them_over_is_on_its_own(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        step(model, optimizer, 0)
        plain = make_model()
        plain_optimizer = make_optimizer(plain)
        plain.load_state_dict(model.state_dict())
        plain_optimizer.load_state_dict(optimizer.state_dict())
        before = copy.deepcopy(optimizer.state_dict())
        step(plain, plain_optimizer, 1)
        for number, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                assert torch.equal(value + 0, before["state"][number][key]), key
        step(model, optimizer, 1)
        for name, value in final_weights(model).items():
            torch.testing.assert_close(value, final_weights(plain)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float64])
def test_a_copy_seen_as_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """What hashes or packs a state dict looks at its bytes."""
    engine, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path))
    engine.backward(engine(features(0)))
    engine.step()
    for state in (
        engine.optimizer.state_dict()["state"][0]["exp_avg"],
        engine.module.state_dict()["blocks.0.up.weight"],
    ):
        expected = (
            state.detach().clone().reshape(-1).numpy(force=True) if state.dtype != torch.bfloat16 else None
        )
        seen = state.reshape(-1).contiguous()[8:].view(dtype)
        assert seen.numpy().nbytes == seen.nbytes
        if expected is not None:
            assert seen.numpy().tobytes() == expected[8:].tobytes()
        assert repr(seen).startswith("tensor(")
    engine.close()


def test_torchs_checkpoint_functions_take_no_step(tmp_path: Path) -> None:
    """They take one of zero gradients with an optimizer whose `state` is false, so that it has states to save."""
    plain = make_model()
    plain_optimizer = make_optimizer(plain)
    with offloaded("nvme", tmp_path) as (model, optimizer):
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            step(one, its, 0)
            its.zero_grad()  # with gradients they take no step
            weights, states = get_state_dict(one, its)
            kept = copy.deepcopy((weights, states))
            step(one, its, 1)
            set_state_dict(one, its, model_state_dict=kept[0], optim_state_dict=kept[1])
            step(one, its, 2)
            its.zero_grad()
            get_optimizer_state_dict(one, its)
        assert float(optimizer.state[model.head.weight]["step"]) == 2
        for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach() + 0, twin.detach(), rtol=1e-5, atol=1e-6)
            for kind, value in plain_optimizer.state[twin].items():
                torch.testing.assert_close(optimizer.state[param][kind] + 0, value, rtol=1e-4, atol=1e-7)
