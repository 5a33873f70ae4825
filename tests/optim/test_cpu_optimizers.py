"""CPUAdam, CPULion and CPUAdagrad against torch's optimizers, and Lion written out, in fp64; their state_dicts."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offloadzero.errors import ConfigError
from offloadzero.optim import CPUAdagrad, CPUAdam, CPULion
from offloadzero.optim.cpu_optimizer import CPUOptimizer
from tests.support.lion import ExactLion

SHAPES = [(57, 33), (1000,), (1,), (4097,)]
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]


@dataclass(frozen=True)
class Kind:
    """One of ours, and the optimizer that trains the same; what the second group has of its own, and the first one."""

    ours: Callable[..., CPUOptimizer]
    theirs: Callable[..., torch.optim.Optimizer]
    second: dict[str, Any]
    first: dict[str, Any] = field(default_factory=lambda: {"weight_decay": 0.1})
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3})

    def groups(self, params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2], **self.first}, {"params": params[2:], "lr": 3e-3, **self.second}]

    def make(self, params: list[nn.Parameter], **options: Any) -> CPUOptimizer:
        return self.ours(self.groups(params), **{**self.options, **options})

    def make_theirs(self, params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        return self.theirs(self.groups(params), **{**self.options, **options})


ADAMW = Kind(
    CPUAdam,
    torch.optim.AdamW,
    {"betas": (0.8, 0.95)},
    options={"lr": 1e-3, "weight_decay": 0.01},
)
ADAGRAD = Kind(CPUAdagrad, torch.optim.Adagrad, {"lr_decay": 0.2})
KINDS = {
    "AdamW": ADAMW,
    "Adam": Kind(partial(CPUAdam, adamw_mode=False), torch.optim.Adam, ADAMW.second, options=ADAMW.options),
    "Lion": Kind(CPULion, partial(ExactLion, betas=(0.9, 0.99)), ADAMW.second),
    "Adagrad": ADAGRAD,
}
CLASSES: list[type[CPUOptimizer]] = [CPUAdam, CPULion, CPUAdagrad]


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for shape in SHAPES]


def clones(params: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().to(dtype or param.dtype, copy=True)) for param in params]


def set_grads(step: int, *param_lists: list[nn.Parameter]) -> None:
    """The same gradients (those the first list's dtype can hold) for every list, each in its own dtype."""
    generator = torch.Generator().manual_seed(1000 + step)
    for same in zip(*param_lists, strict=True):
        grad = (torch.randn(same[0].shape, generator=generator) * 0.01).to(same[0].dtype)
        for param in same:
            param.grad = grad.to(param.dtype)


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


def assert_near(actual: Tensor, exact: Tensor, *, num_steps: int, lr: float = 1e-3) -> None:
    """Within 1e-6 * max(|weight|, lr) per step, elementwise."""
    bound = num_steps * 1e-6 * exact.detach().abs().clamp_min(lr)
    assert ((actual.detach().double() - exact.detach()).abs() <= bound).all()


def assert_same_bits(actual: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.detach().view(torch.uint8), theirs.detach().view(torch.uint8))


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


any_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
any_class = pytest.mark.parametrize("kind", CLASSES)
# Those whose state_dicts are torch's own, with the options that both start from.
as_torch = pytest.mark.parametrize(
    ("kind", "options"),
    [(ADAMW, {"lr": 1e-3}), (ADAGRAD, {"lr": 1e-2, "initial_accumulator_value": 0.1})],
    ids=["AdamW", "Adagrad"],
)

# --- the same training as torch ---


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@any_kind
def test_twenty_steps_with_groups_and_scheduler(kind: Kind, dtype: torch.dtype) -> None:
    params = make_params(dtype)
    exact_params = clones(params, torch.float64)
    optimizer, exact = kind.make(params), kind.make_theirs(exact_params)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=25) for o in (optimizer, exact)]
    for step in range(20):
        set_grads(step, params, exact_params)
        for o in (optimizer, exact, *schedulers):
            o.step()
    for param, exact_param in zip(params, exact_params, strict=True):
        master = master_of(optimizer, param)
        assert_near(
            master, exact_param, num_steps=20, lr=3e-3 if kind.ours in (CPULion, CPUAdagrad) else 1e-3
        )
        half_a_unit = (master.to(dtype).float() - master).abs().max()
        assert (param.detach().float() - master).abs().max() <= half_a_unit
        assert "step" not in optimizer.state[param] or optimizer.state[param]["step"].item() == 20


@any_class
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


def test_options_reach_the_kernel() -> None:
    """No bias correction, L2 without decay, lr as a tensor, against the formula for the first step."""
    param = nn.Parameter(torch.tensor([1.0]))
    param.grad = torch.tensor([0.5])
    CPUAdam([param], lr=torch.tensor(0.1), betas=(0.5, 0.75), eps=0.1, bias_correction=False).step()
    m, v = 0.5 * 0.5, 0.25 * 0.25
    assert param.item() == pytest.approx(1.0 - 0.1 * m / (math.sqrt(v) + 0.1), rel=1e-6)


def test_num_threads_reaches_the_kernel_and_changes_nothing() -> None:
    params = [make_params(torch.bfloat16) for _ in range(2)]
    optimizers = [CPUAdam(p, num_threads=n) for p, n in zip(params, (1, 3), strict=True)]
    set_grads(0, *params)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits(*params)
    optimizers[0].num_threads = 0
    with pytest.raises(ConfigError, match="num_threads"):
        optimizers[0].step()


# --- which parameters ---


def test_parameters_without_gradient_are_skipped() -> None:
    params = make_params()
    before = params[1].detach().clone()
    optimizer = CPUAdam(params)
    set_grads(0, params)
    params[1].grad = None
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_parameters_in_any_memory_order(dtype: torch.dtype) -> None:
    """Transposed and channels-last parameters, with gradients in either order, train like contiguous ones."""
    plain = [torch.randn(6, 5), torch.randn(2, 3, 4, 5)]
    ordered = [plain[0].t().contiguous().t(), plain[1].to(memory_format=torch.channels_last)]
    params = [nn.Parameter(x.to(dtype)) for x in plain]
    reordered = [nn.Parameter(x.to(dtype, memory_format=torch.preserve_format)) for x in ordered]
    assert not any(param.is_contiguous() for param in reordered)
    optimizers = [CPUAdam(params), CPUAdam(reordered)]
    for step in range(4):
        for param, other in zip(params, reordered, strict=True):
            param.grad = torch.randn(param.shape).to(dtype)
            other.grad = param.grad if step % 2 else torch.empty_like(other).copy_(param.grad)
        for optimizer in optimizers:
            optimizer.step()
    loaded = CPUAdam(reordered)
    loaded.load_state_dict(optimizers[0].state_dict())
    for param, other in zip(params, reordered, strict=True):
        assert torch.equal(param, other)
        assert torch.equal(loaded.state[other]["exp_avg"], optimizers[0].state[param]["exp_avg"])
        for optimizer in (loaded, optimizers[1]):
            assert optimizer.state[other]["exp_avg"].stride() == other.stride()


UNFIT = {
    "float64": torch.zeros(4, dtype=torch.float64),
    "complex64": torch.zeros(4, dtype=torch.complex64),
    "meta": torch.zeros(4, device="meta"),
    "expanded": torch.zeros(1).expand(4),
    "sliced": torch.zeros(4, 4)[:, :2],
}


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_parameters_are_refused_by_position(name: str) -> None:
    pair = [nn.Parameter(torch.zeros(2)), UNFIT[name]]
    for kind in CLASSES:
        says = f"{kind.__name__} trains" if name == "meta" else ""
        with pytest.raises(ConfigError, match=rf"^param_groups\[0\]\.params\[1\] .*{says}"):
            kind(pair)
        optimizer = kind(make_params())
        with pytest.raises(ConfigError, match=r"^param_groups\[1\]\.params\[1\] "):
            optimizer.add_param_group({"params": pair})
        assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer = CPUAdam(embedding.parameters())
    with pytest.raises(ConfigError, match=r"param_groups\[0\].params\[0\].grad .*dense gradients only"):
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "option", "value", "named"),
    [
        (CPUAdam, "lr", -1.0, "lr"),
        (CPUAdam, "eps", math.nan, "eps"),
        (CPUAdam, "betas", (0.9, 1.0), "beta2"),
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


# --- state_dict ---


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@any_kind
def test_training_continues_bitwise_after_saving_and_loading(kind: Kind, dtype: torch.dtype) -> None:
    straight, first = make_params(dtype), make_params(dtype)
    train(kind.make(straight), straight, range(6))
    saver = kind.make(first)
    train(saver, first, range(3))
    resumed = clones(first)
    loader = kind.make(resumed, lr=1.0, weight_decay=0.5)
    loader.load_state_dict(through_a_file(saver.state_dict()))
    train(loader, resumed, range(3, 6))
    assert_same_bits(resumed, straight)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_loading_keeps_dtypes_and_copies(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    optimizer = CPUAdam(params)
    train(optimizer, params, range(1))
    other = CPUAdam(clones(params))
    other.load_state_dict(optimizer.state_dict())
    for param, copied in zip(params, other.param_groups[0]["params"], strict=True):
        mine, theirs = optimizer.state[param], other.state[copied]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert value.dtype == theirs[key].dtype
            assert torch.equal(value, theirs[key])
            assert value.data_ptr() != theirs[key].data_ptr()


@as_torch
def test_torchs_state_continues_in_ours_and_back(kind: Kind, options: dict[str, Any]) -> None:
    params = make_params()
    exact_params = clones(params, torch.float64)
    exact = kind.make_theirs(exact_params, **options)
    optimizer = kind.make_theirs(params, **options)
    for number, make in enumerate((kind.make_theirs, kind.make) * 2):
        if number:
            successor = make(params, lr=1.0, weight_decay=0.7)
            successor.load_state_dict(through_a_file(optimizer.state_dict()))
            optimizer = successor
        for step in range(5 * number, 5 * number + 5):
            set_grads(step, params, exact_params)
            optimizer.step()
            exact.step()
    assert optimizer.param_groups[0]["lr"] == options["lr"]
    for param, exact_param in zip(params, exact_params, strict=True):
        assert_near(param, exact_param, num_steps=20, lr=options["lr"])
        assert optimizer.state[param]["step"].item() == 20


@as_torch
def test_fresh_state_has_torch_s_format(kind: Kind, options: dict[str, Any]) -> None:
    params, torch_params = make_params(), make_params()
    mine, theirs = kind.ours(params, **options), kind.theirs(torch_params, **options)
    train(mine, params, range(1))
    train(theirs, torch_params, range(1))
    mine_dict, theirs_dict = mine.state_dict(), theirs.state_dict()
    assert set(theirs_dict["param_groups"][0]) <= set(mine_dict["param_groups"][0])
    for key, state in theirs_dict["state"].items():
        assert set(state) == set(mine_dict["state"][key])
        for name, value in state.items():
            mine_value = mine_dict["state"][key][name]
            assert (mine_value.dtype, mine_value.shape) == (value.dtype, value.shape)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_state_without_a_master_starts_from_the_parameter(dtype: torch.dtype) -> None:
    params = make_params()
    trained = torch.optim.AdamW(params)
    train(trained, params, range(3))
    halves = clones(params, dtype)
    optimizer = CPUAdam(halves)
    optimizer.load_state_dict(trained.state_dict())
    exact_params = clones(halves, torch.float64)
    exact = torch.optim.AdamW(exact_params)
    exact.load_state_dict(trained.state_dict())
    set_grads(3, halves, exact_params)
    optimizer.step()
    assert exact.param_groups[0]["weight_decay"] == optimizer.param_groups[0]["weight_decay"]
    exact.step()
    for param, exact_param in zip(halves, exact_params, strict=True):
        assert_near(master_of(optimizer, param), exact_param, num_steps=1)


def test_loaded_maximize_is_honoured_and_amsgrad_refused() -> None:
    params = make_params()
    exact_params = clones(params, torch.float64)
    exact = torch.optim.AdamW(exact_params, maximize=True)
    optimizer = CPUAdam(params)
    optimizer.load_state_dict(exact.state_dict())
    set_grads(0, params, exact_params)
    optimizer.step()
    exact.step()
    for param, exact_param in zip(params, exact_params, strict=True):
        assert_near(param, exact_param, num_steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ConfigError, match=r"^amsgrad "):
        optimizer.load_state_dict(torch.optim.AdamW(make_params(), amsgrad=True).state_dict())
    assert repr(optimizer.state_dict()) == repr(before)


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    params = make_params(torch.bfloat16)
    optimizer = CPUAdam(params)
    train(optimizer, params, range(1))
    wrong_shape = copy.deepcopy(optimizer.state_dict())
    wrong_shape["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"^state\[1\]\.exp_avg = \(3,\).*\(1000,\)"):
        optimizer.load_state_dict(wrong_shape)
    wrong_dtype = copy.deepcopy(optimizer.state_dict())
    wrong_dtype["state"][0]["master_remainder"] = torch.zeros(SHAPES[0])
    with pytest.raises(ConfigError, match=r"^state\[0\]\.master_remainder = torch.float32"):
        optimizer.load_state_dict(wrong_dtype)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(CPUAdam(params[:2]).state_dict())


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


def test_load_hooks_see_the_final_state() -> None:
    params = make_params(torch.bfloat16)
    optimizer = CPUAdam(params)
    train(optimizer, params, range(1))
    other = CPUAdam(clones(params))
    seen: list[torch.dtype] = []

    def double_the_moments(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        for state in changed["state"].values():
            state["exp_avg"] *= 2
        return changed

    other.register_load_state_dict_pre_hook(double_the_moments)
    other.register_load_state_dict_post_hook(
        lambda o: seen.extend(s["exp_avg"].dtype for s in o.state.values())
    )
    other.load_state_dict(optimizer.state_dict())
    assert seen == [torch.float32] * len(params)
    for param, copied in zip(params, other.param_groups[0]["params"], strict=True):
        assert torch.equal(other.state[copied]["exp_avg"], 2 * optimizer.state[param]["exp_avg"])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@any_class
def test_deepcopy_and_pickle_train_on(
    kind: type[CPUOptimizer], duplicate: Callable[[CPUOptimizer], CPUOptimizer]
) -> None:
    params = make_params(torch.bfloat16)
    optimizer = kind(params, num_threads=2)
    train(optimizer, params, range(2))
    twin = duplicate(optimizer)
    twin_params = twin.param_groups[0]["params"]
    train(optimizer, params, range(2, 4))
    train(twin, twin_params, range(2, 4))
    assert twin.num_threads == 2
    assert_same_bits(twin_params, params)
