"""State dicts of streamed models are those of plain torch, and training goes on from them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from tests.streaming.loops import NUM_STEPS, check_everywhere, take_inputs
from tests.support import models
from tests.support.faults import delays
from tests.support.models import Stack, features
from tests.support.training import Config, assert_same, make_config, run_engine, snapshot

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


@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_training_goes_on_from_state_dicts_under_another_placement(
    dtype: str | None, clipping: float, tmp_path: Path
) -> None:
    def config(placement: str) -> Config:
        return make_config(placement, tmp_path, dtype=dtype, clipping=clipping)

    def make_input(seed: int) -> Tensor:
        return features(seed)

    whole = run_engine(Stack, take_inputs(make_input, num_steps=6), config("resident"))
    chain = ["nvme", "resident", "mixed", "host"]
    for first, second in zip(chain, chain[1:] + chain[:1], strict=True):
        torch.manual_seed(0)
        engine, *_ = offloadzero.initialize(model=Stack(), config=config(first))
        losses = take_inputs(make_input, num_steps=3)(engine)
        # Right after the step, which has not waited for the updates.
        optimizer_state, model_state = engine.optimizer.state_dict(), engine.module.state_dict()
        engine.close()
        torch.manual_seed(99)
        engine, *_ = offloadzero.initialize(model=Stack(), config=config(second))
        engine.backward(engine(features(77)))  # leaves other weights, moments and leases behind
        engine.step()
        engine.module.load_state_dict(model_state)
        engine.optimizer.load_state_dict(optimizer_state)
        losses += take_inputs(lambda seed: make_input(seed + 3), num_steps=3)(engine)
        assert_same(snapshot(engine, losses), whole)
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
