"""State dicts of streamed models are those of plain torch, and training goes on from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from tests.streaming.loops import NUM_STEPS, check_everywhere, take_inputs
from tests.support import models
from tests.support.cases import each_pair
from tests.support.faults import delays
from tests.support.models import Stack, features
from tests.support.training import Outcome, assert_same, make_config, run_engine, snapshot

pytestmark = pytest.mark.usefixtures("no_files_left")


def test_state_dict_has_plain_torchs_names_shapes_and_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Stack(models.RunningNormBlock).state_dict()
    torch.manual_seed(0)
    config = make_config("nvme", tmp_path, dtype=None)
    engine, *_ = offloadzero.initialize(model=Stack(models.RunningNormBlock), config=config)
    found = engine.module.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    part = engine.module.blocks[1].linear.state_dict()
    assert torch.equal(part["weight"], expected["blocks.1.linear.weight"])
    engine.close()


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_running_statistics_are_those_of_torch(clipping: float, tmp_path: Path) -> None:
    def make_model() -> nn.Module:
        return Stack(models.RunningNormBlock)

    # torch wants statistics in the parameters' dtype, and buffers keep theirs: fp32.
    outcome = check_everywhere(
        make_model,
        take_inputs(features),
        tmp_path,
        clipping=clipping,
        dtypes=(None,),
        placements=("nvme", "mixed"),
    )
    assert int(outcome.weights["blocks.0.norm.num_batches_tracked"]) == NUM_STEPS
    assert not any(name.endswith("offsets") for name in outcome.weights)


@functools.cache
def taken_at_once(dtype: str | None, clipping: float) -> Outcome:
    config = make_config("resident", Path(), dtype=dtype, clipping=clipping)
    return run_engine(Stack, take_inputs(features, num_steps=4), config)


@pytest.mark.parametrize(
    ("dtype", "clipping", "places"),
    each_pair(
        ["bf16", "fp16", None],
        [0.0, 0.5],
        [("nvme", "resident"), ("resident", "mixed"), ("mixed", "host"), ("host", "nvme")],
    ),
    ids=str,
)
def test_training_goes_on_from_state_dicts_under_another_placement(
    dtype: str | None, clipping: float, places: tuple[str, str], tmp_path: Path
) -> None:
    first, second = (make_config(place, tmp_path, dtype=dtype, clipping=clipping) for place in places)
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=Stack(), config=first)
    losses = take_inputs(features, num_steps=2)(engine)
    # Right after the step, which has not waited for the updates.
    optimizer_state, model_state = engine.optimizer.state_dict(), engine.module.state_dict()
    engine.close()
    torch.manual_seed(99)
    engine, *_ = offloadzero.initialize(model=Stack(), config=second)
    engine.backward(engine(features(77)))  # leaves other weights, moments and leases behind
    engine.step()
    engine.module.load_state_dict(model_state)
    engine.optimizer.load_state_dict(optimizer_state)
    losses += take_inputs(lambda seed: features(seed + 2), num_steps=2)(engine)
    assert_same(snapshot(engine, losses), taken_at_once(dtype, clipping))
    engine.close()


@pytest.mark.parametrize("place", ["resident", "nvme"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
def test_the_optimizers_state_may_be_loaded_before_the_models(
    dtype: str | None, place: str, tmp_path: Path
) -> None:
    config = make_config(place, tmp_path, dtype=dtype)
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    take_inputs(features, num_steps=2)(engine)
    optimizer_state, model_state = engine.optimizer.state_dict(), engine.module.state_dict()
    engine.close()
    outcomes = []
    for is_model_first in (True, False):
        torch.manual_seed(99)
        engine, *_ = offloadzero.initialize(model=Stack(), config=config)
        if is_model_first:
            engine.module.load_state_dict(model_state)
        engine.optimizer.load_state_dict(optimizer_state)
        if not is_model_first:
            engine.module.load_state_dict(model_state)
        outcomes.append(snapshot(engine, []))
        engine.close()
    assert_same(*outcomes)


@pytest.mark.parametrize("dtype", ["bf16", None])
def test_parameters_are_values_that_a_model_loads(dtype: str | None, tmp_path: Path) -> None:
    """As torch's do; those of one dimension have no memory for the write either."""
    engine, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path, dtype=dtype))
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    engine.module.load_state_dict(dict(engine.module.named_parameters()), strict=False)
    assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
    engine.close()


def assert_masters_are(state: dict[str, torch.Tensor], engine: offloadzero.Engine) -> None:
    """Without low bits from elsewhere."""
    for name, param in engine.module.named_parameters():
        master = offloadzero.zero.safe_get_full_fp32_param(param)
        assert master is not None
        assert torch.equal(master, state[name].float()), name


@pytest.mark.parametrize("place", ["resident", "nvme"])
def test_another_models_state_that_is_equal_in_part_is_all_that_its_masters_have(
    place: str, tmp_path: Path
) -> None:
    engine, *_ = offloadzero.initialize(model=Stack(), config=make_config(place, tmp_path, dtype="bf16"))
    take_inputs(features, num_steps=2)(engine)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for value in state.values():
        value.view(-1)[0] += 1
    for _ in range(2):
        engine.module.load_state_dict(state)
        assert_masters_are(state, engine)
    engine.close()


def test_a_models_state_that_is_loaded_after_a_step_is_all_that_its_masters_have(tmp_path: Path) -> None:
    engine, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path, dtype="bf16"))
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    take_inputs(features, num_steps=1)(engine)
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.module.load_state_dict(state)
    assert_masters_are(state, engine)
    engine.close()


def test_optimizer_state_dict_is_torchs(tmp_path: Path) -> None:
    """It loads into torch.optim.AdamW, and AdamW's loads here."""
    loop = take_inputs(features)
    config = make_config("nvme", tmp_path, dtype=None)
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    loop(engine)
    torch.manual_seed(0)
    plain = Stack()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer.load_state_dict(engine.optimizer.state_dict())
    plain.load_state_dict(engine.module.state_dict())
    torch.manual_seed(5)
    other, *_ = offloadzero.initialize(model=Stack(), config=config)
    other.module.load_state_dict(plain.state_dict())
    other.optimizer.load_state_dict(optimizer.state_dict())
    for seed in range(10, 13):
        losses = []
        for candidate in (engine, other):
            loss = candidate(features(seed))
            candidate.backward(loss)
            candidate.step()
            losses.append(loss.item())
        optimizer.zero_grad()
        loss = plain(features(seed))
        loss.backward()
        optimizer.step()
        assert losses[0] == losses[1]
        assert losses[0] == pytest.approx(loss.item(), rel=2e-5)
    engine.close()
    other.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_submodule_loads_a_state_dict(placement: str, dtype: str | None, tmp_path: Path) -> None:
    """The masters follow: the next update starts from the loaded weights."""
    config = make_config(placement, tmp_path, dtype=dtype, lr=1e-6)
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    block = engine.module.blocks[1]
    loaded = {name: torch.full_like(value, 0.25) for name, value in block.state_dict().items()}
    assert str(block.load_state_dict(loaded)) == "<All keys matched successfully>"
    loss = engine(features(0))
    engine.backward(loss)
    engine.step()
    for name, value in block.state_dict().items():
        assert torch.allclose(value.float(), torch.tensor(0.25), atol=1e-3), name
    incomplete = {name: value for name, value in loaded.items() if name != "up.bias"}
    assert block.load_state_dict(incomplete, strict=False).missing_keys == ["up.bias"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        block.load_state_dict({**loaded, "up.bias": torch.zeros(3)})
    engine.close()


def test_optimizer_state_right_after_step_is_the_steps(tmp_path: Path, faults: ExitStack) -> None:
    """`step()` returns before the update thread has decided; the state dict must wait for it."""
    faults.enter_context(delays("decider.decide", 0.1))
    engine, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path, clipping=0.5))
    engine.backward(engine(features(0)))
    engine.step()
    state = engine.optimizer.state_dict()["state"]
    assert {int(values["step"]) for values in state.values()} == {1}
    assert all(bool(values["exp_avg"].any()) for values in state.values())
    engine.close()


BESIDE_A_WEIGHT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sub": lambda copy, p: copy - 2 * p,
    "sub alone": lambda copy, p: copy - p,
    "matmul": lambda copy, p: copy @ p.t(),
    "matmul alone": lambda copy, p: torch.mm(copy.t(), p),
    "lerp": lambda copy, p: torch.lerp(copy, p, 0.25),
    "foreach": lambda copy, p: torch._foreach_add([copy, copy], [p, p])[1],
    "equal": lambda copy, p: torch.tensor(torch.equal(copy, p)),
    "where": lambda copy, p: torch.where(copy > 0, copy, p),
    "gradient": lambda copy, p: copy * p.grad,
    "view": lambda copy, p: copy[1:] - p[1:],
}
WRITES_BESIDE_A_WEIGHT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda copy, p: copy.add_(p, alpha=0.5),
    "lerp_": lambda copy, p: copy.lerp_(2 * p, 0.25),
    "copy_": lambda copy, p: copy.copy_(p).mul_(0.5),
    "foreach": lambda copy, p: torch._foreach_mul_([copy], [p]),
    "view": lambda copy, p: copy[1:].sub_(p[1:], alpha=0.5),
    "out": lambda copy, p: torch.mul(p, 3.0, out=copy),
}


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_copies_beside_the_weights_themselves(placement: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Stack()

    def results(model: nn.Module) -> dict[str, Tensor]:
        found = {}
        model(features(0)).backward()
        p = model.blocks[1].up.weight
        with torch.no_grad():
            for name, compute in BESIDE_A_WEIGHT.items():
                found[name] = compute(model.state_dict()["blocks.1.up.weight"], p).clone()
            for name, write in WRITES_BESIDE_A_WEIGHT.items():
                copy = model.state_dict()["blocks.1.up.weight"]
                written = write(copy, p)
                assert name != "add_" or written is copy
                found[f"copy after {name}"] = copy.clone()
                found[f"weight after {name}"] = p.clone()
        return found

    config = make_config(placement, tmp_path, dtype=None)
    config.pop("optimizer")
    expected, model = results(make()), make()
    _, optimizer = offloadzero.offload(model, torch.optim.AdamW(model.parameters()), config)
    found = results(model)
    optimizer.close()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_states_beside_the_weights(placement: str, tmp_path: Path) -> None:
    config = make_config(placement, tmp_path, dtype=None, clipping=0.5)
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    engine.backward(engine(features(0)))
    engine.step()
    p = engine.module.blocks[0].up.weight
    value = p.detach().clone()
    moment = engine.optimizer.state[p]["exp_avg"]
    before = moment.clone()
    with torch.no_grad():
        assert torch.equal(moment + p, before + value)
        moment.add_(p)
    assert torch.equal(engine.optimizer.state[p]["exp_avg"], before + value)
    engine.close()
