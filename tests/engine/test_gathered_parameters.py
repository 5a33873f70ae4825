"""`GatheredParameters` and the full-state accessors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero import ConfigError, StateError, zero
from offloadzero.access.gathered import GatheredBlock
from offloadzero.access.parameter import is_offloaded
from offloadzero.streaming.building.waiting_parameters import spilled_weight
from tests.engine.built import build, masters, reference_split, stored_bytes
from tests.support.tiny import TinyModel, all_states, make_engine, settings, tokens, train

PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": "host",
    "mixed": {"param": "nvme", "master": "host", "exp_avg": "device", "exp_avg_sq": "nvme"},
    "device homes": {"param": "device", "master": "nvme", "exp_avg": "host", "exp_avg_sq": "host"},
}


@pytest.fixture(params=list(PLACEMENTS))
def placement(request: pytest.FixtureRequest) -> Any:
    return PLACEMENTS[request.param]


@pytest.fixture
def engine(placement: Any, tmp_path: Path) -> Iterator[offloadzero.Engine]:
    made = make_engine(settings(tmp_path, placement=placement, gradient_clipping=1.0))
    train(made, num_steps=2)
    yield made
    made.close()


# --- GatheredParameters ---


def test_reading(engine: offloadzero.Engine) -> None:
    weights = engine.module.state_dict()
    names = {id(param): name for name, param in engine.module.named_parameters()}
    for part in (engine.module.emb, engine.module.norm, *engine.module.blocks):
        with zero.GatheredParameters(list(part.parameters())):
            for param in part.parameters():
                name = names[id(param)]
                assert torch.equal(param.detach(), weights[name]), name
                assert param.device == engine.device
    before = all_states(engine)
    with zero.GatheredParameters(engine.module.blocks[1].up.weight) as nothing:
        assert nothing is None
        assert torch.equal(engine.module.blocks[1].up.weight.detach(), weights["blocks.1.up.weight"])
    after = all_states(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_edit_is_committed_and_survives_training(
    engine: offloadzero.Engine, placement: Any, tmp_path: Path
) -> None:
    weight = engine.module.blocks[1].up.weight
    before = masters(engine)
    assert any(bool((value != reference_split(value).float()).any()) for value in before.values())
    with zero.GatheredParameters([weight, engine.module.emb.weight], modifier_rank=0), torch.no_grad():
        weight[0, :5] = 3.0
        weight[2].mul_(2.0)
        weight[7, 7] += 0.0  # written, unchanged
    after = masters(engine)
    expected = before["blocks.1.up.weight"].clone()
    expected[0, :5] = 3.0
    expected[2] = 2.0 * reference_split(before["blocks.1.up.weight"][2].contiguous()).float()
    unchanged = reference_split(expected.contiguous()) == reference_split(before["blocks.1.up.weight"])
    expected = torch.where(unchanged, before["blocks.1.up.weight"], expected)
    assert torch.equal(after["blocks.1.up.weight"], expected)
    for name, value in before.items():
        if name != "blocks.1.up.weight":
            assert torch.equal(after[name], value), f"{name} was not edited"

    # An engine whose masters are set to the same values goes on in the same way.
    directory = tmp_path / "twin"
    directory.mkdir()
    twin = make_engine(settings(directory, placement=placement, gradient_clipping=1.0))
    train(twin, num_steps=2)
    zero.safe_set_full_fp32_param(twin.module.blocks[1].up.weight, expected)
    assert train(engine, num_steps=2, first_seed=5) == train(twin, num_steps=2, first_seed=5)
    one, other = all_states(engine), all_states(twin)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(masters(engine)["blocks.1.up.weight"], expected), "training went on"
    twin.close()


@pytest.mark.parametrize("place", ["device", "host"])
def test_an_edit_is_no_write_of_a_view_that_a_recomputed_forward_keeps(place: str, tmp_path: Path) -> None:
    checkpoints = {"units": ["blocks.*"], "tier": "host"}
    config = settings(tmp_path, placement=place, gradient_clipping=1.0, activation_checkpoints=checkpoints)

    def losses(*, gathers: bool) -> list[float]:
        torch.manual_seed(1)
        model = TinyModel()
        for block in model.blocks:
            # Without a bias autograd keeps a view of the weight.
            block.down = nn.Linear(block.down.in_features, block.down.out_features, bias=False)
        engine = make_engine(config, model)
        train(engine, num_steps=1)
        kept = engine(tokens(1))
        engine.backward(kept)
        engine.step()
        weights = [block.down.weight for block in model.blocks]
        with zero.GatheredParameters(weights, modifier_rank=0, enabled=gathers), torch.no_grad():
            for weight in weights:
                weight.mul_(0.5)
            found = [engine(tokens(2)).item()]
            for weight in weights:
                weight.mul_(1.5)
        found += train(engine, num_steps=2, first_seed=3)
        engine.close()
        return found

    assert losses(gathers=True) == losses(gathers=False)


def test_a_change_without_a_modifier_raises_and_is_undone(engine: offloadzero.Engine) -> None:
    before = all_states(engine)
    weights = engine.module.state_dict()

    def edit() -> None:
        with zero.GatheredParameters(engine.module.blocks[2].parameters()), torch.no_grad():
            engine.module.blocks[2].down.bias.zero_()

    with pytest.raises(
        StateError, match=r"blocks\.2\.down\.bias.* pass modifier_rank=0 to keep it"
    ) as caught:
        edit()
    assert "blocks.2.up" not in str(caught.value)
    after = all_states(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with zero.GatheredParameters(engine.module.blocks[2].down.bias):
        assert torch.equal(engine.module.blocks[2].down.bias.detach(), weights["blocks.2.down.bias"])
    train(engine, num_steps=1)


def test_negative_zero_and_nan_are_changes(engine: offloadzero.Engine) -> None:
    bias = engine.module.blocks[0].up.bias
    with zero.GatheredParameters(bias, modifier_rank=0), torch.no_grad():
        bias[0] = 0.0
    with zero.GatheredParameters(bias, modifier_rank=0), torch.no_grad():
        bias[0] = -0.0
    assert str(zero.safe_get_full_fp32_param(bias)[0].item()) == "-0.0"


def test_forward_inside(engine: offloadzero.Engine) -> None:
    with torch.no_grad():
        expected = engine(tokens(9))
        with zero.GatheredParameters([engine.module.emb.weight, engine.module.blocks[0].up.weight]):
            assert torch.equal(engine(tokens(9)), expected)
            assert torch.equal(
                engine.module.blocks[0].up.weight.sum(), engine.module.blocks[0].up.weight.sum()
            )
        assert torch.equal(engine(tokens(9)), expected)
    with zero.GatheredParameters(engine.module.blocks[0].up.weight, modifier_rank=0):
        with torch.no_grad():
            engine.module.blocks[0].up.weight.zero_()
            inside = engine(tokens(9))
        assert not torch.equal(inside, expected)
    with torch.no_grad():
        assert torch.equal(engine(tokens(9)), inside)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_what_nobody_has_written_is_not_a_write(precision: dict[str, Any], tmp_path: Path) -> None:
    """A backward of a forward from inside the block, or from before it."""
    config = {key: value for key, value in settings(tmp_path).items() if key not in ("bf16", "fp16")}
    engine = make_engine({**config, **precision})
    weight = engine.module.blocks[0].up.weight
    before = engine(tokens(2))
    with zero.GatheredParameters(weight, modifier_rank=0):
        inside = engine(tokens(3))
    engine.backward(before + inside)
    engine.step()
    engine.close()


@pytest.mark.parametrize("modifier_rank", [None, 0])
@pytest.mark.parametrize("computes", [False, True], ids=["end", "forward"])
def test_a_step_inside_is_not_undone(
    modifier_rank: int | None, computes: bool, engine: offloadzero.Engine, tmp_path: Path
) -> None:
    directory = tmp_path / "twin"
    directory.mkdir()
    twin = make_engine(settings(directory, gradient_clipping=1.0))
    train(twin, num_steps=2)
    train(twin, num_steps=1, first_seed=7)

    def step_inside() -> None:
        params = [engine.module.blocks[0].up.weight, engine.module.emb.weight]
        with zero.GatheredParameters(params, modifier_rank=modifier_rank):
            train(engine, num_steps=1, first_seed=7)
            if computes:
                engine(tokens(9))

    with pytest.raises(
        StateError, match=r"blocks\.0\.up\.weight.*: updated inside a GatheredParameters block"
    ):
        step_inside()
    ours, theirs = masters(engine), masters(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    train(engine, num_steps=1)
    twin.close()


def set_inside(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    with zero.GatheredParameters([weight], modifier_rank=0):
        zero.safe_set_full_fp32_param(weight, value)


def test_a_setter_inside_is_named_where_the_block_ends(engine: offloadzero.Engine) -> None:
    weight = engine.module.emb.weight
    value = torch.full(weight.shape, 0.5)
    with pytest.raises(
        StateError, match=r"^emb\.weight: updated inside .* or safe_set_full_fp32_param\(\) say"
    ):
        set_inside(weight, value)
    assert torch.equal(weight.detach().float(), value)


def test_a_forward_inside_commits_nothing_where_nobody_may_write(engine: offloadzero.Engine) -> None:
    bias = engine.module.blocks[0].up.bias
    before = masters(engine)["blocks.0.up.bias"]

    def edit() -> None:
        with zero.GatheredParameters(bias), torch.no_grad():
            bias.add_(1.0)
            engine(tokens(9))

    with pytest.raises(StateError, match=r"blocks\.0\.up\.bias changed"):
        edit()
    assert torch.equal(masters(engine)["blocks.0.up.bias"], before)


def test_state_dicts_inside_are_of_the_gathered_memory(engine: offloadzero.Engine) -> None:
    bias = engine.module.blocks[0].up.bias
    with zero.GatheredParameters(bias, modifier_rank=0), torch.no_grad():
        bias.fill_(0.5)
        assert bool((engine.module.state_dict()["blocks.0.up.bias"] == 0.5).all())
        engine.module.load_state_dict({"blocks.0.up.bias": torch.full(bias.shape, 0.25)}, strict=False)
        assert bool((bias == 0.25).all())
        bias.data = torch.full_like(bias, 0.75)
        engine(tokens(9))
        assert bool((bias == 0.75).all())
    assert bool((masters(engine)["blocks.0.up.bias"] == 0.75).all())


def test_disabled(engine: offloadzero.Engine) -> None:
    with zero.GatheredParameters(list(engine.module.parameters()), enabled=False):
        pass
    train(engine, num_steps=1)


def test_an_exception_inside_is_the_one_that_is_raised(engine: offloadzero.Engine) -> None:
    def fails() -> None:
        with zero.GatheredParameters(engine.module.blocks[0].up.weight), torch.no_grad():
            engine.module.blocks[0].up.weight.zero_()
            raise KeyError("the user's own")

    before = masters(engine)["blocks.0.up.weight"]
    with pytest.raises(KeyError, match="the user's own"):
        fails()
    assert torch.equal(masters(engine)["blocks.0.up.weight"], before)
    train(engine, num_steps=1)


def test_more_is_gathered_than_the_leases_hold(tmp_path: Path) -> None:
    """Read, trained inside, edited: as the same model with room for all."""
    small = settings(
        tmp_path, placement="host", zero_optimization={"stage": 3, "stage3_max_live_parameters": 1}
    )
    outcomes = []
    for config in (small, settings(tmp_path, placement="device")):
        engine = make_engine(config)
        losses = train(engine, num_steps=1)
        params = dict(engine.module.named_parameters())
        with zero.GatheredParameters(params.values(), modifier_rank=0), torch.no_grad():
            seen = {name: param.clone() for name, param in params.items()}
            for param in params.values():
                param.mul_(0.5)
            inside = engine(tokens(7)).item()  # computes with the edits
            params["blocks.1.norm.bias"].fill_(0.25)
        losses += [inside, *train(engine, num_steps=2, first_seed=1)]
        outcomes.append((losses, seen, all_states(engine)))
        engine.close()
    assert outcomes[0][0] == outcomes[1][0]
    for ours, theirs in zip(outcomes[0][1:], outcomes[1][1:], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_gathering_a_model_that_is_not_offloaded_yet(tmp_path: Path) -> None:
    config = settings(tmp_path)
    with zero.Init(config_dict_or_path=config):
        model = build()
    ordinary = build()
    with zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        assert torch.equal(model.emb.weight, ordinary.emb.weight)
        model.emb.weight[3] = 1.25
    assert stored_bytes(model.emb.weight) < 10
    with pytest.raises(StateError, match=r"changed under .* pass modifier_rank=0 to keep it"):
        change(model.emb.weight)
    engine = make_engine(config, model)
    with torch.no_grad():
        ordinary.emb.weight[3] = 1.25
    for name, master in masters(engine).items():
        assert torch.equal(master, ordinary.state_dict()[name]), name
    engine.close()


def test_a_gathering_that_fails_leaves_nothing_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is not offloaded yet: what came back before has left memory again."""
    with zero.Init(config_dict_or_path=settings(tmp_path)):
        model = build()
    params = [param for param in model.parameters() if spilled_weight(param)]
    restore, values = zero.restore, [param.detach().clone() for param in params]

    def fail_at_the_third(param: nn.Parameter) -> Any:
        if param is params[2]:
            raise offloadzero.AioError(
                operation="read", path="/the/file", offset=0, num_bytes=1, errno=errno.EIO
            )
        return restore(param)

    monkeypatch.setattr(zero, "restore", fail_at_the_third)
    with pytest.raises(offloadzero.AioError), zero.GatheredParameters(params, modifier_rank=0):
        pass
    assert all(spilled_weight(param) for param in params)
    assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))
    monkeypatch.undo()
    with zero.GatheredParameters(params):  # and again
        assert not any(spilled_weight(param) for param in params)


def test_an_interrupt_at_either_end_leaves_nothing_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a block has just been entered; and in its end, with parameters of a model that is not offloaded yet."""
    config = settings(tmp_path, placement="host")
    engine = make_engine(config)
    with zero.Init(config_dict_or_path=config):
        built = build()
    params = [engine.module.emb.weight, built.emb.weight]
    enter = GatheredBlock.enter

    def enter_and_stop(block: GatheredBlock) -> None:
        enter(block)
        raise KeyboardInterrupt

    def stop_in_the_wait(block: GatheredBlock) -> None:
        block.give_up()
        raise KeyboardInterrupt

    for name, interrupted in {"enter": enter_and_stop, "leave": stop_in_the_wait}.items():
        monkeypatch.setattr(GatheredBlock, name, interrupted)
        with pytest.raises(KeyboardInterrupt), zero.GatheredParameters(params, modifier_rank=0):
            pass
        monkeypatch.undo()
        assert is_offloaded(params[0]), name
        assert spilled_weight(params[1]), name
        assert not engine._runtime.blocks.open
    train(engine, num_steps=1)
    engine.close()


def change(param: nn.Parameter) -> None:
    with zero.GatheredParameters(param), torch.no_grad():
        param.zero_()


# --- accessors ---


def test_masters_are_the_exact_fp32_weights(engine: offloadzero.Engine) -> None:
    param = engine.module.blocks[3].down.weight
    value = torch.randn(param.shape) * 1e-3
    zero.safe_set_full_fp32_param(param, value)
    assert torch.equal(zero.safe_get_full_fp32_param(param), value)
    assert torch.equal(engine.module.state_dict()["blocks.3.down.weight"], reference_split(value))
    with zero.GatheredParameters(param):
        assert torch.equal(param.detach().cpu(), reference_split(value))
    neighbour = engine.module.blocks[3].down.bias
    assert zero.safe_get_full_fp32_param(neighbour).shape == neighbour.shape


def test_moments(engine: offloadzero.Engine) -> None:
    param = engine.module.blocks[3].down.weight
    state = engine.optimizer.state_dict()["state"]
    number = [id(p) for p in engine.optimizer.param_groups[0]["params"]].index(id(param))
    for key in ("exp_avg", "exp_avg_sq"):
        found = zero.safe_get_full_optimizer_state(param, key)
        assert found.dtype == torch.float32
        assert found.shape == param.shape
        assert bool(found.any())
        assert torch.equal(found, state[number][key])
        value = torch.rand(param.shape)
        before = all_states(engine)
        zero.safe_set_full_optimizer_state(param, value, key)
        assert torch.equal(zero.safe_get_full_optimizer_state(param, key), value)
        after = all_states(engine)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert changed == [f"blocks.3.{key}"]
    train(engine, num_steps=1)


def test_local_forms_are_all_of_a_parameter_as_a_vector(engine: offloadzero.Engine) -> None:
    param = engine.module.blocks[3].down.weight
    full = zero.safe_get_full_fp32_param(param)
    local = zero.safe_get_local_fp32_param(param)
    assert local.shape == (param.numel(),)
    assert torch.equal(local.view(param.shape), full)
    value = torch.randn(param.numel())
    zero.safe_set_local_fp32_param(param, value)
    assert torch.equal(zero.safe_get_full_fp32_param(param), value.view(param.shape))
    for key in ("exp_avg", "exp_avg_sq"):
        full_state = zero.safe_get_full_optimizer_state(param, key)
        local_state = zero.safe_get_local_optimizer_state(param, key)
        assert full_state is not None
        assert local_state is not None
        assert local_state.shape == (param.numel(),)
        assert torch.equal(local_state.view(param.shape), full_state)
        assert bool(local_state.any())
        zero.safe_set_local_optimizer_state(param, value.abs(), key)
        assert torch.equal(zero.safe_get_full_optimizer_state(param, key), value.abs().view(param.shape))
    train(engine, num_steps=1)


def test_accessors_wait_for_the_update_in_flight(engine: offloadzero.Engine) -> None:
    param = engine.module.blocks[0].up.weight
    engine.backward(engine(tokens(4)))
    engine.step()
    early = zero.safe_get_full_fp32_param(param)
    engine.synchronize()
    assert torch.equal(zero.safe_get_full_fp32_param(param), early)


def test_errors_of_the_accessors(engine: offloadzero.Engine) -> None:
    param = engine.module.blocks[0].up.weight
    with pytest.raises(ConfigError, match="exp_avg") as caught:
        zero.safe_get_full_optimizer_state(param, "exp_avgs")
    assert caught.value.nearest in ("exp_avg", "exp_avg_sq")
    with pytest.raises(ConfigError, match="offloaded"):
        zero.safe_get_full_fp32_param(nn.Parameter(torch.ones(3)))
    with pytest.raises(ConfigError, match="shape"):
        zero.safe_set_full_optimizer_state(param, torch.ones(3), "exp_avg")
    with pytest.raises(ConfigError, match="shape"):
        zero.safe_set_full_fp32_param(param, torch.ones(3))
    assert param.shape[0] != param.shape[1]
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight.*shape"):
        zero.safe_set_full_fp32_param(param, torch.ones(param.shape).T)
    train(engine, num_steps=1)


def test_frozen_parameters(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = TinyModel()
    model.blocks[0].requires_grad_(False)
    value = model.blocks[0].up.weight.detach().clone()
    engine = make_engine(settings(tmp_path), model)
    param = engine.module.blocks[0].up.weight
    assert torch.equal(zero.safe_get_full_fp32_param(param), value.bfloat16().float())
    assert torch.equal(zero.safe_get_local_fp32_param(param), value.bfloat16().float().reshape(-1))
    for key in ("exp_avg", "exp_avg_sq"):
        assert zero.safe_get_full_optimizer_state(param, key) is None
        assert zero.safe_get_local_optimizer_state(param, key) is None
        with pytest.raises(ConfigError, match="frozen"):
            zero.safe_set_full_optimizer_state(param, torch.zeros(param.shape), key)
        with pytest.raises(ConfigError, match="frozen"):
            zero.safe_set_local_optimizer_state(param, torch.zeros(param.numel()), key)
    with pytest.raises(ConfigError, match="exp_avg"):
        zero.safe_get_full_optimizer_state(param, "momentum")
    with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.fill_(0.5)
    train(engine, num_steps=1)
    assert bool((zero.safe_get_full_fp32_param(param) == 0.5).all())
    engine.close()


def test_register_external_parameter_is_accepted(engine: offloadzero.Engine) -> None:
    zero.register_external_parameter(engine.module, engine.module.emb.weight)
    train(engine, num_steps=1)
