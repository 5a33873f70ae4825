"""CPULion and CPUAdagrad: against torch.optim.Adagrad and Lion written out, both in fp64; state_dicts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offloadzero.errors import ConfigError
from offloadzero.optim.cpu_optimizer import CPUOptimizer
from offloadzero.optim.cpu_optimizers import CPUAdagrad, CPULion
from tests.support.lion import ExactLion

SHAPES = [(57, 33), (1000,), (1,)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
KINDS: list[type[CPUOptimizer]] = [CPULion, CPUAdagrad]


def make_params(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for shape in SHAPES]


def clones(params: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().to(dtype, copy=True)) for param in params]


def set_grads(step: int, *param_lists: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for same in zip(*param_lists, strict=True):
        grad = (torch.randn(same[0].shape, generator=generator) * 0.01).to(same[0].dtype)
        for param in same:
            param.grad = grad.to(param.dtype)


def groups_of(kind: type[CPUOptimizer], params: list[nn.Parameter]) -> list[dict[str, Any]]:
    other: dict[str, Any] = {"betas": (0.8, 0.95)} if kind is CPULion else {"lr_decay": 0.2}
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 3e-3, **other}]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_grads(step, params)
        optimizer.step()


def master_of(optimizer: CPUOptimizer, param: Tensor) -> Tensor:
    state = optimizer.state[param]
    if param.dtype == torch.bfloat16:
        high = param.detach().view(torch.int16).to(torch.int64) << 16
        bits = (high + state["master_remainder"].to(torch.int64)).to(torch.int32)
        return bits.view(torch.float32)
    return state["master"] if param.dtype == torch.float16 else param.detach()


def assert_same_bits(actual: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine.detach().view(torch.uint8), theirs.detach().view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_with_groups_and_scheduler(kind: type[CPUOptimizer], dtype: torch.dtype) -> None:
    params = make_params(dtype)
    exact_params = clones(params, torch.float64)
    optimizer = kind(groups_of(kind, params), lr=1e-3)
    exact: torch.optim.Optimizer
    if kind is CPULion:
        exact = ExactLion(groups_of(kind, exact_params), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    else:
        exact = torch.optim.Adagrad(groups_of(kind, exact_params), lr=1e-3)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=25) for o in (optimizer, exact)]
    for step in range(20):
        set_grads(step, params, exact_params)
        for o in (optimizer, exact, *schedulers):
            o.step()
    for param, exact_param in zip(params, exact_params, strict=True):
        bound = 20 * 1e-6 * exact_param.detach().abs().clamp_min(3e-3)
        master = master_of(optimizer, param)
        assert ((master.double() - exact_param.detach()).abs() <= bound).all()
        assert (param.detach().float() - master).abs().max() <= (
            master.to(dtype).float() - master
        ).abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_maximize_and_closure(kind: type[CPUOptimizer]) -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = kind([param], lr=0.1)
    optimizer.param_groups[0]["maximize"] = True

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses[0] < losses[1] < losses[2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_bitwise_after_saving_and_loading(
    kind: type[CPUOptimizer], dtype: torch.dtype
) -> None:
    straight, first = make_params(dtype), make_params(dtype)
    train(kind(groups_of(kind, straight)), straight, range(6))
    saver = kind(groups_of(kind, first))
    train(saver, first, range(3))
    file = io.BytesIO()
    torch.save(saver.state_dict(), file)
    file.seek(0)
    resumed = clones(first, dtype)
    loader = kind(groups_of(kind, resumed), lr=1.0, weight_decay=0.5)
    loader.load_state_dict(torch.load(file, weights_only=True))
    train(loader, resumed, range(3, 6))
    assert_same_bits(resumed, straight)


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    params, others = make_params(), make_params()
    lion, adamw = CPULion(params), torch.optim.AdamW(others)
    train(lion, params, range(2))
    train(adamw, others, range(2))
    before = copy.deepcopy(lion.state_dict())
    foreign = adamw.state_dict()
    foreign["param_groups"] = before["param_groups"]
    with pytest.raises(ConfigError, match="a state of CPULion has exp_avg: this is another optimizer's"):
        lion.load_state_dict(foreign)
    for key, state in lion.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], before["state"][key]["exp_avg"])


def test_torch_adagrad_state_continues_in_cpu_adagrad_and_back() -> None:
    params = make_params()
    exact_params = clones(params, torch.float64)
    options = {"lr": 1e-2, "initial_accumulator_value": 0.1}
    exact = torch.optim.Adagrad(groups_of(CPUAdagrad, exact_params), **options)
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad(groups_of(CPUAdagrad, params), **options)
    for number, kind in enumerate([torch.optim.Adagrad, CPUAdagrad, torch.optim.Adagrad, CPUAdagrad]):
        if number:
            successor = kind(groups_of(CPUAdagrad, params), lr=1.0, weight_decay=0.7)
            successor.load_state_dict(optimizer.state_dict())
            optimizer = successor
        for step in range(5 * number, 5 * number + 5):
            set_grads(step, params, exact_params)
            optimizer.step()
            exact.step()
    assert isinstance(optimizer, CPUAdagrad)
    for param, exact_param in zip(params, exact_params, strict=True):
        bound = 20 * 1e-6 * exact_param.detach().abs().clamp_min(1e-2)
        assert ((param.detach() - exact_param.detach()).abs() <= bound).all()
        assert optimizer.state[param]["step"].item() == 20


def test_fresh_adagrad_state_has_torch_s_format() -> None:
    params, torch_params = make_params(), make_params()
    mine, theirs = CPUAdagrad(params), torch.optim.Adagrad(torch_params)
    train(mine, params, range(1))
    train(theirs, torch_params, range(1))
    mine_dict, theirs_dict = mine.state_dict(), theirs.state_dict()
    assert set(theirs_dict["param_groups"][0]) <= set(mine_dict["param_groups"][0])
    for key, state in theirs_dict["state"].items():
        assert set(state) == set(mine_dict["state"][key])
        for name, value in state.items():
            mine_value = mine_dict["state"][key][name]
            assert (mine_value.dtype, mine_value.shape) == (value.dtype, value.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_deepcopy_and_pickle_train_on(
    duplicate: Callable[[CPUOptimizer], CPUOptimizer], kind: type[CPUOptimizer]
) -> None:
    params = make_params(torch.bfloat16)
    optimizer = kind(params, num_threads=2)
    train(optimizer, params, range(2))
    twin = duplicate(optimizer)
    twin_params = twin.param_groups[0]["params"]
    train(optimizer, params, range(2, 4))
    train(twin, twin_params, range(2, 4))
    assert_same_bits(twin_params, params)


@pytest.mark.parametrize(
    ("kind", "option", "value", "named"),
    [
        (CPULion, "lr", -1.0, "lr"),
        (CPULion, "betas", (0.9, 1.0), "beta2"),
        (CPUAdagrad, "eps", -1e-8, "eps"),
        (CPUAdagrad, "initial_accumulator_value", -0.1, "initial_accumulator_value"),
    ],
)
def test_bad_options_are_refused_at_construction(
    kind: type[CPUOptimizer], option: str, value: object, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named} "):
        kind(make_params(), **{option: value})


@pytest.mark.parametrize("kind", KINDS)
def test_unfit_parameters_are_refused_by_position(kind: type[CPUOptimizer]) -> None:
    with pytest.raises(ConfigError, match=rf"^param_groups\[0\]\.params\[1\] .*{kind.__name__}"):
        kind([nn.Parameter(torch.zeros(2)), torch.zeros(4, device="meta")])
