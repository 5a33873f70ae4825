"""What users get wrong: refused at the start by an error that says what to change."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero import BudgetError, ConfigError, StateError
from offloadzero.core.segments import TierName
from offloadzero.ops.adam import DeepSpeedCPUAdam
from offloadzero.optim import CPUAdam
from tests.support.tiny import TinyModel, make_engine, settings, small_disk, tokens, train

HOST = {"param": "host", "master": "host", "exp_avg": "host", "exp_avg_sq": "host"}


def refusal(config: Any, model: nn.Module | None = None, **keys: Any) -> ConfigError:
    """The ConfigError that initialize() raises; the model must be as it was."""
    model = TinyModel() if model is None else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        offloadzero.initialize(model=model, config=config, **keys)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} has changed although the model was refused"
    assert caught.value.key in str(caught.value)
    assert repr(caught.value.value) in str(caught.value)
    assert caught.value.allowed in str(caught.value)
    return caught.value


# --- the configuration ---


def adamw(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **params}}}


STAGE, PATTERNS = "zero_optimization.stage", "offloadzero.units.patterns"
PLACED = "offloadzero.placement.param"


@pytest.mark.parametrize(
    ("config", "key", "value", "said"),
    [
        (settings(placement="host") | {"train_batchsize": 2}, "train_batchsize", 2, "mean 'train_batch_size'"),
        (settings(placement="host") | {"bf61": {}}, "bf61", {}, "did you mean 'bf16'"),
        ({"zero_optimization": {"ofload_param": {}}}, "zero_optimization.ofload_param", {}, "mean 'offload_param'"),
        ({"offloadzero": {"placment": "host"}}, "offloadzero.placment", "host", "did you mean 'placement'"),
        ({"offloadzero": {"update": {"chunk_element": 4096}}}, "offloadzero.update.chunk_element", 4096,
         "did you mean 'chunk_elements'"),
        (settings(placement={"param": "hots"}), PLACED, "hots", "did you mean 'host'"),
        (settings(placement="host", train_batch_size=24, gradient_accumulation_steps=4), "train_batch_size", 24,
         "2 * 4 * 1 = 8"),
        *(({"zero_optimization": {"stage": one}}, STAGE, one, "allowed 0, 1, 2, 3") for one in (4, -1, "three", 2.5)),
        (settings(None), "offloadzero.nvme_path", None, "directory"),
        (settings(placement="host", **adamw(amsgrad=True)), "optimizer.params.amsgrad", True, "is not built"),
        (settings(placement="host", units={"patterns": ["block.*"]}), PATTERNS, "block.*", "matches no module"),
    ],
)  # fmt: skip
def test_a_key_or_value_that_is_wrong(config: dict[str, Any], key: str, value: Any, said: str) -> None:
    error = refusal(config)
    assert (error.key, error.value) == (key, value)
    assert said in str(error)


def test_no_model() -> None:
    with pytest.raises(ConfigError, match="model"):
        offloadzero.initialize(config=settings(placement="host"))


# --- directories ---


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    with small_disk(tmp_path / "disk", size="8m") as path:
        yield path


def test_nvme_path_missing(tmp_path: Path) -> None:
    """A directory is created, but not the one above it: a drive may not be mounted there."""
    error = refusal(settings(tmp_path / "nowhere" / "train"))
    assert (error.key, error.value) == ("offloadzero.nvme_path", str(tmp_path / "nowhere" / "train"))
    assert "no such directory" in str(error)
    assert not (tmp_path / "nowhere").exists()


def test_nvme_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(settings(tmp_path / "file"))
    assert error.value == str(tmp_path / "file")
    assert "not a directory" in str(error)


def test_nvme_path_on_a_readonly_filesystem(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    error = refusal(settings(disk))
    assert error.value == str(disk)
    assert "read-only" in str(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_nvme_path_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    error = refusal(settings(tmp_path))
    assert "not writable" in str(error)


@pytest.mark.parametrize("fill", [False, True])
def test_nvme_path_on_a_full_filesystem(disk: Path, fill: bool) -> None:
    """Too small from the start, or filled by something else: said before the first step, nothing left behind."""
    width = 48 if fill else 400
    if fill:
        (disk / "foreign").write_bytes(bytes(8 * 1024 * 1024 - 4096))
    torch.manual_seed(1)
    model = TinyModel(width)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BudgetError) as caught:
        make_engine(settings(disk), model)
    text = str(caught.value)
    assert str(disk) in text
    assert "No space left" in text
    assert "are free" in text
    assert set(os.listdir(disk)) <= {"foreign"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- budgets ---


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_a_budget_that_is_too_small(tmp_path: Path, tier: str) -> None:
    placement: Any = HOST if tier == "host" else "nvme"
    model = TinyModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = settings(tmp_path if tier != "host" else None, placement=placement, budgets={tier: "40KiB"})
    with pytest.raises(BudgetError) as caught:
        make_engine(config, model)
    text = str(caught.value)
    assert f"offloadzero.budgets.{tier}" in text
    assert "40.00 KiB are allowed" in text
    assert "What would make it fit" in text
    # The table: every tier with its lines.
    for line in ("device", "host", "home: param", "home: exp_avg_sq", "unit leases", "gradient leases"):
        assert line in text
    assert os.listdir(tmp_path) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_number_a_budget_error_asks_for_is_enough(tmp_path: Path) -> None:
    """The refusal's own "are needed", given as the budget, is accepted."""
    engine = make_engine(settings(tmp_path))
    plan = engine.optimizer.runtime.plan
    engine.close()
    sizes = {tier.value: plan.tier_bytes(tier) for tier in TierName}
    for tier in ("host", "nvme"):
        with pytest.raises(BudgetError):
            make_engine(settings(tmp_path, budgets={tier: sizes[tier] - 1}, gradient_clipping=0.0))
        make_engine(settings(tmp_path, budgets={tier: sizes[tier]})).close()
    # The device budget also says how many leases there are; what must be there is less than the default.
    smallest = next(
        size for size in range(4096, sizes["device"] + 4096, 4096) if fits(settings(tmp_path, budgets={"device": size}))
    )  # fmt: skip
    assert smallest <= sizes["device"]
    engine = make_engine(settings(tmp_path, budgets={"device": smallest}))
    assert all(math.isfinite(loss) for loss in train(engine, num_steps=2))
    engine.close()


def fits(config: dict[str, Any]) -> bool:
    try:
        make_engine(config).close()
    except BudgetError:
        return False
    return True


# --- models and optimizers ---


def test_a_model_without_parameters() -> None:
    error = refusal(settings(placement="host"), nn.Sequential(nn.ReLU(), nn.Dropout()))
    assert (error.key, error.value) == ("model", "Sequential")
    assert "parameters" in str(error)


def scripted(linear: nn.Linear) -> nn.Module:
    return torch.jit.script(linear)  # type: ignore[no-any-return, no-untyped-call]


def traced(linear: nn.Linear) -> nn.Module:
    return torch.jit.trace(linear, torch.ones(1, 3))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("compiled", [scripted, traced])
@pytest.mark.parametrize("where", ["", "blocks.2."])
def test_a_module_of_the_jit(where: str, compiled: Callable[[nn.Linear], nn.Module]) -> None:
    model = TinyModel()
    parent = model.get_submodule(where[:-1])
    parent.compiled = compiled(nn.Linear(3, 2))
    error = refusal(settings(placement="host"), model)
    assert (error.key, error.value) == (f"{where}compiled", "Linear")
    assert "Offload the model as it was before torch.jit.script or torch.jit.trace" in error.allowed
    del parent.compiled
    model(tokens(0)).backward()


def test_a_module_whose_parameters_have_no_shape_yet() -> None:
    model = TinyModel()
    model.lazy = nn.LazyLinear(3)
    config = settings(placement="host")
    with pytest.raises(
        ConfigError, match=r"lazy\.weight = 'UninitializedParameter'.*run a forward, which gives it"
    ):
        offloadzero.initialize(model=model, config=config)
    model.lazy(torch.ones(1, 2))
    engine = make_engine(config, model)
    train(engine, num_steps=1)
    engine.close()
    with offloadzero.zero.Init(config_dict_or_path=config):
        model.lazy = nn.LazyLinear(3)  # stays as it is
    assert nn.parameter.is_lazy(model.lazy.weight)


def test_an_optimizer_that_is_not_built() -> None:
    model = TinyModel()
    error = refusal(settings(placement="host"), model, optimizer=torch.optim.Rprop(model.parameters()))
    assert (error.key, error.value) == ("optimizer", "Rprop")
    assert "Adam" in error.allowed
    assert "AdamW" in error.allowed
    with pytest.raises(ConfigError, match="Rprop"):
        offloadzero.offload(model, torch.optim.Rprop(model.parameters()), settings(placement="host"))


class _WithoutDecay(torch.optim.AdamW):
    """Nothing of it computes anything."""

    note = "ours"

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, weight_decay=0.0)

    def __repr__(self) -> str:
        return "WithoutDecay"

    def rate(self) -> float:
        return float(self.param_groups[0]["lr"])


def _overriding(name: str, base: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    """An optimizer class with a method `name` that calls its parent's, wrapped as a careful author does."""
    parents = getattr(base, name)

    @functools.wraps(parents)
    def method(self: Any, *args: Any, **keys: Any) -> Any:
        return parents(self, *args, **keys)

    return type("Own", (base,), {name: method})


@pytest.mark.parametrize("name", ["step", "zero_grad", "state_dict", "add_param_group"])
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Adam, CPUAdam, _WithoutDecay])
def test_an_optimizer_with_methods_of_its_own(name: str, base: type[torch.optim.Optimizer]) -> None:
    """They would never run."""
    model = TinyModel()
    error = refusal(settings(placement="host"), model, optimizer=_overriding(name, base)(model.parameters()))
    assert (error.key, error.value) == ("optimizer", "Own")
    assert f"its own {name} would never run" in error.allowed
    assert "register_step_pre_hook() and register_step_post_hook() after offload()" in error.allowed
    with pytest.raises(ConfigError, match=f"its own {name} would"):
        offloadzero.offload(model, _overriding(name)(model.parameters()), settings(placement="host"))


@pytest.mark.parametrize("through", ["a function", "a method", "a scheduler"])
def test_an_optimizer_whose_step_was_replaced(through: str) -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    calls: list[object] = []
    replaced: Any = optimizer
    replaced.step = calls.append if through == "a function" else types.MethodType(calls.append, optimizer)
    if through == "a scheduler":  # which wraps it once more
        replaced.step = types.MethodType(lambda *_: calls.append(None), optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    error = refusal(settings(placement="host"), model, optimizer=optimizer)
    assert "as they are: step, set on this very object, would never run" in error.allowed


def test_a_step_of_its_own_class_that_a_scheduler_has_wrapped() -> None:
    model = TinyModel()
    optimizer = _overriding("step")(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    error = refusal(settings(placement="host"), model, optimizer=optimizer)
    assert "as they are: its own step would never run" in error.allowed


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Adam, CPUAdam])
@pytest.mark.parametrize("name", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"])
@pytest.mark.parametrize("when", ["before", "wrapped", "after"])
def test_a_class_of_which_a_method_was_replaced(
    base: Any, name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither would that run; torch wraps `step` of the class as soon as it makes one."""
    parents = getattr(base, name)

    def method(self: Any, *args: Any, **keys: Any) -> Any:
        return parents(self, *args, **keys)

    model = TinyModel()
    made = base(model.parameters()) if when == "after" else None
    monkeypatch.setattr(base, name, functools.wraps(parents)(method) if when == "wrapped" else method)
    optimizer = base(model.parameters()) if made is None else made
    assert (
        f"{name}, replaced on the class {base.__name__} itself, would never run"
        in refusal(settings(placement="host"), model, optimizer=optimizer).allowed
    )
    monkeypatch.undo()
    offloadzero.offload(model, base(model.parameters()), settings(placement="host"))[1].close()


def test_another_optimizers_step_on_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is torch's, but not that class's."""
    model = TinyModel()
    monkeypatch.setattr(torch.optim.AdamW, "step", torch.optim.SGD.step)
    with pytest.raises(ConfigError, match="step, replaced on the class AdamW itself, would never run"):
        offloadzero.offload(model, torch.optim.AdamW(model.parameters()), settings(placement="host"))


@pytest.mark.parametrize("with_scheduler", [False, True])
@pytest.mark.parametrize(
    "base", [torch.optim.AdamW, torch.optim.Adam, CPUAdam, DeepSpeedCPUAdam, _WithoutDecay]
)
def test_an_optimizer_class_that_computes_nothing_else(base: Any, with_scheduler: bool) -> None:
    """torch wraps the step of classes and, for schedulers, of optimizers: that is not the script's."""
    model = TinyModel()
    named = type("Named", (base,), {})
    optimizer = named(model.parameters())
    if with_scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: None)
    _, offloaded = offloadzero.offload(model, optimizer, settings(placement="host"))
    model(tokens(0)).backward()
    offloaded.step()
    offloaded.close()


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_of_adam_that_change_the_numbers(option: str) -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), **{option: True})
    error = refusal(settings(placement="host"), model, optimizer=optimizer)
    assert (error.key, error.value) == (f"optimizer.param_groups[0].{option}", True)
    assert "False" in error.allowed


def test_an_optimizer_that_has_stepped() -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(0)).backward()
    optimizer.step()
    error = refusal(settings(placement="host"), model, optimizer=optimizer)
    assert "it has states already: pass a new optimizer" in str(error)


def test_an_optimizer_that_has_loaded_its_states() -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(0)).backward()
    optimizer.step()
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(optimizer.state_dict())
    error = refusal(settings(placement="host"), model, optimizer=again)
    assert "load this one's state_dict() into the optimizer that is returned" in error.allowed


def test_no_optimizer_at_all() -> None:
    """Enough to evaluate; training says what is missing."""
    engine, *_ = offloadzero.initialize(model=TinyModel(), config=settings(placement="host", optimizer=None))
    loss = engine(tokens(0))
    for call in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(StateError, match=r"pass one to initialize\(\), or name one in the config"):
            call()
    engine.close()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize(("grad_dtype", "shown"), [(torch.float32, "'float32'"), (None, "None")])
def test_gradients_of_another_dtype_than_the_parameter(grad_dtype: torch.dtype | None, shown: str) -> None:
    model = TinyModel().bfloat16()
    weight = model.get_parameter("blocks.1.up.weight")
    weight.grad_dtype = grad_dtype
    optimizer = torch.optim.AdamW(model.parameters())
    config = settings(placement="host", optimizer=None)
    expected = rf"blocks\.1\.up\.weight\.grad_dtype = {shown}: bfloat16: a gradient has the dtype"
    with pytest.raises(ConfigError, match=expected):
        offloadzero.offload(model, optimizer, config)
    weight.grad_dtype = torch.bfloat16
    _, offloaded = offloadzero.offload(model, optimizer, config)
    model(tokens(0)).backward()
    offloaded.step()
    offloaded.close()


def test_sparse_gradients_name_the_parameter() -> None:
    model = nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Linear(32, 1))
    engine = make_engine(settings(placement="host"), model)
    loss = engine(torch.tensor([1, 2, 3])).float().sum()
    with pytest.raises(ConfigError) as caught:
        engine.backward(loss)
    assert caught.value.key == "0.weight"
    assert "sparse=False" in str(caught.value)
    engine.close()


def test_a_sparse_gradient_from_before_offload_names_the_parameter() -> None:
    model = nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Linear(32, 1))
    inputs = torch.tensor([1, 2, 3])
    model(inputs).sum().backward()
    _, optimizer = offloadzero.offload(model, torch.optim.AdamW(model.parameters()), {})
    with pytest.raises(ConfigError, match=r"0\.weight.*sparse=False"):
        model(inputs).sum().backward()
    optimizer.close()


def test_a_rule_for_units_that_are_not_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Else its states stay on the device, and nobody is told."""
    rules = [{"units": "blocks.*", "exp_avg": "host"}, {"units": "layers.*", "param": "host"}]
    engine, *_ = offloadzero.initialize(model=TinyModel(), config=settings(placement=rules))
    engine.close()
    (said,) = [
        r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "placement" in r.getMessage()
    ]
    assert "'layers.*' places nothing" in said
    assert "blocks.0" in said
