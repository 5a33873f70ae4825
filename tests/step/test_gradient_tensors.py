"""`param.grad`: what it reads as, what is kept of it, what is refused."""

from __future__ import annotations

import copy
import functools
import io
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offloadzero
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.store import TieredStore
from offloadzero.step.param_grad import GradientAccess, ParamGradient
from offloadzero.zero import (
    safe_get_full_grad,
    safe_get_local_grad,
    safe_set_full_grad,
    safe_set_local_grad,
)
from tests.support.plain_form import (
    ALL_PLACEMENTS,
    TOLERANCE,
    clip,
    engine_config,
    final_weights,
    grads,
    make_model,
    make_optimizer,
    named_grads,
    offloaded,
)
from tests.support.tiny import tokens
from tests.support.training import worst_relative_difference

# --- what a gradient is ---


@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_has_the_value_of_what_autograd_brought(dtype: str, placement: str, tmp_path: Path) -> None:
    keys = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    sums: dict[str, Tensor] = {}

    def add(name: str, grad: Tensor) -> None:
        sums[name] = sums[name].add_(grad) if name in sums else grad.clone()

    with offloaded(placement, tmp_path, **keys) as (model, optimizer):
        for name, p in model.named_parameters():
            p.register_hook(functools.partial(add, name))

        def expect_sums() -> None:
            found = named_grads(model)
            assert found.keys() == sums.keys()
            for name, expected in sums.items():
                grad = found[name]
                assert isinstance(grad, torch.Tensor)
                assert (grad.shape, grad.dtype, grad.device) == (
                    expected.shape,
                    expected.dtype,
                    expected.device,
                )
                assert torch.equal(grad.clone(), expected), name

        assert not named_grads(model)
        for num_micro in (1, 2):
            model(tokens(num_micro)).backward()
            expect_sums()
        optimizer.step()
        expect_sums()
        model(tokens(3)).backward()
        expect_sums()
        optimizer.zero_grad()
        assert not named_grads(model)


def test_a_norm_has_torchs_dtype(tmp_path: Path) -> None:
    with offloaded("host", tmp_path, bf16={"enabled": True}) as (model, _):
        model(tokens(0)).backward()
        grad = model.emb.weight.grad
        value = grad.clone()
        for norm in (torch.linalg.vector_norm, lambda g, **k: g.norm(**k), torch.norm):
            assert norm(grad).dtype == torch.bfloat16
            assert torch.equal(norm(grad, dtype=torch.float32), norm(value, dtype=torch.float32))
        assert torch.equal(torch.linalg.vector_norm(grad, 1), torch.linalg.vector_norm(value, 1))
        assert torch.equal(torch.linalg.vector_norm(grad, dim=0), torch.linalg.vector_norm(value, dim=0))


class Moved:
    """Counts what moves of gradients, and where their values are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for owner, name in ((ParamGradient, "read"), (GradientAccess, "store"), (Accelerator, "copy")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        for name in ("read", "write"):
            monkeypatch.setattr(TieredStore, name, self._counted(getattr(TieredStore, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return function(*arguments, **options)

        return counted


def test_clipping_and_unscaling_a_model_move_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaded("mixed", tmp_path) as (model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(model(tokens(0))).backward()
        optimizer.synchronize()
        for state in optimizer.runtime.parts.window.gradients.values():
            state.landed.wait()
            if state.trial is not None:
                state.trial.ticket.wait()
        moved = Moved(monkeypatch)
        scaler.unscale_(optimizer)
        norm = clip(model)
        assert norm > 0.1
        assert torch.nn.utils.get_total_norm(grads(model)) == pytest.approx(0.1, rel=1e-4)
        assert moved.count == 0
        assert model.emb.weight.grad.abs().sum() > 0
        assert moved.count > 0


def test_a_clipped_gradient_reads_as_clipped(tmp_path: Path) -> None:
    plain = make_model()
    with offloaded("host", tmp_path) as (model, _):
        for each in (plain, model):
            each(tokens(0)).backward()
            for grad in grads(each):
                grad.mul_(0.3)
        for name, expected in named_grads(plain).items():
            assert torch.equal(named_grads(model)[name].clone(), expected)


def test_data_of_a_gradient_is_assigned_as_torch_does(tmp_path: Path) -> None:
    with offloaded("mixed", tmp_path) as (model, optimizer):
        model(tokens(0)).backward()
        p = model.blocks[0].up.weight
        p.grad.data = p.grad.data.sign()
        assert torch.equal(p.grad.abs(), torch.ones(p.shape))
        with pytest.raises(
            StateError, match=r"up\.weight\.grad: data of torch\.float32 \(3,\) is assigned where"
        ):
            p.grad.data = torch.ones(3)
        del p.grad
        assert p.grad is None
        before = p.detach().clone()
        optimizer.step()
        assert torch.equal(p.detach(), before)


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "a view": lambda grad: grad.view(grad.shape),
    "transposed": lambda grad: grad.t(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_data_of_what_is_not_the_gradient_itself(name: str, tmp_path: Path) -> None:
    """`param.grad.data = x` sets the gradient; no other tensor over it takes other data."""
    with offloaded("mixed", tmp_path) as (model, optimizer):
        for seed in range(2):
            model(tokens(seed)).backward()
            p = model.blocks[0].up.weight
            before = p.grad.clone()
            t = LOOKS[name](p.grad)
            with pytest.raises(StateError, match=r"up\.weight\.grad: data of .* a tensor that stands for"):
                t.data = torch.ones(t.shape)
            assert torch.equal(p.grad.clone(), before)
            p.grad.data = torch.full(p.shape, 0.5)
            assert torch.equal(p.grad.clone(), torch.full(p.shape, 0.5))
            optimizer.step()
            optimizer.zero_grad()


def test_data_of_a_gradient_that_is_no_longer_worn(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, _):
        p = model.blocks[0].up.weight
        model(tokens(0)).backward()
        kept, p.grad = p.grad, None
        with pytest.raises(StateError, match="a tensor that stands for"):
            kept.data = torch.ones(p.shape)


def test_copies_are_ordinary_tensors(tmp_path: Path) -> None:
    with offloaded("nvme", tmp_path) as (model, _):
        model(tokens(0)).backward()
        grad = model.emb.weight.grad
        value = grad.clone()
        file = io.BytesIO()
        torch.save(grad, file)
        file.seek(0)
        for copied in (value, copy.deepcopy(grad), pickle.loads(pickle.dumps(grad)), torch.load(file)):
            assert type(copied) is Tensor
            assert torch.equal(copied, value)
        with pytest.raises(StateError, match=r"emb\.weight\.grad: data_ptr\(\) needs the gradient in memory"):
            grad.data_ptr()


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_nan_times_zero_is_nan(factor: float, tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        (model(tokens(0)) * math.nan).backward()
        for grad in grads(model):
            grad.mul_(factor)
        assert all(bool(grad.isnan().any()) for grad in grads(model))
        optimizer.step()
        with pytest.raises(offloadzero.NonFiniteError, match="holds NaN or Inf"):
            optimizer.synchronize()


def test_zeroing_clears_nan(tmp_path: Path) -> None:
    plain = make_model()
    plain_optimizer = make_optimizer(plain)
    with offloaded("mixed", tmp_path) as (model, optimizer):
        for each, own in ((plain, plain_optimizer), (model, optimizer)):
            (each(tokens(0)) * math.nan).backward()
            for grad in grads(each):
                grad.zero_()
            assert float(clip(each)) == 0.0
            own.step()
        torch.testing.assert_close(final_weights(model), final_weights(plain))


@pytest.mark.parametrize("factor", [2.0**120, 1e38])
def test_a_factor_that_overflows_gives_what_torch_gives(factor: float, tmp_path: Path) -> None:
    plain = make_model()
    with offloaded("host", tmp_path) as (model, _):
        for each in (plain, model):
            (each(tokens(0)) * 1e4).backward()
            for grad in grads(each):
                grad.mul_(factor)
        assert any(bool(grad.isinf().any()) for grad in grads(plain))
        for name, expected in named_grads(plain).items():
            assert torch.equal(named_grads(model)[name].clone(), expected)


# --- what is kept of it ---


def test_a_gradient_kept_after_it_was_dropped_is_an_error_and_not_the_next_one(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        model(tokens(0)).backward()
        p = model.blocks[0].up.weight
        kept, row = p.grad, p.grad[0]
        value = kept.clone()
        p.grad = None
        assert torch.equal(kept.clone(), value)  # nothing has taken its place yet
        model(tokens(1)).backward()
        assert p.grad is not kept
        for old in (kept, row):
            with pytest.raises(StateError, match=r"blocks\.0\.up\.weight\.grad: this gradient was dropped"):
                old.sum()
        assert not torch.equal(p.grad.clone(), value)
        kept = p.grad
        optimizer.zero_grad()
        with pytest.raises(StateError, match="this gradient was dropped"):
            kept.sum()


def test_a_gradient_put_back_is_the_gradient(tmp_path: Path) -> None:
    plain = make_model()
    plain_optimizer = make_optimizer(plain)
    with offloaded("host", tmp_path) as (model, optimizer):
        for each, own in ((plain, plain_optimizer), (model, optimizer)):
            each(tokens(0)).backward()
            kept = each.emb.weight.grad
            each.emb.weight.grad = None
            each.emb.weight.grad = kept.detach()
            own.step()
        torch.testing.assert_close(final_weights(model), final_weights(plain))


def test_after_close_it_is_an_error(tmp_path: Path) -> None:
    with offloaded("host", tmp_path) as (model, _):
        model(tokens(0)).backward()
        grad = model.emb.weight.grad
    with pytest.raises(StateError, match="this gradient was dropped"):
        grad.sum()
    assert model.emb.weight.grad is None


# --- updates in backward ---

TOUCHES: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda grad: grad.norm(),
    "mul_": lambda grad: grad.mul_(0.5),
    "zero_": lambda grad: grad.zero_(),
    "clone": lambda grad: grad.clone(),
    "copy_": lambda grad: grad.copy_(torch.zeros(())),
    "view": lambda grad: grad[0].sum(),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_touching_a_gradient_that_backward_has_used_names_the_key(touch: str, tmp_path: Path) -> None:
    with offloaded("host", tmp_path, update={"in_backward": True}) as (model, optimizer):
        model(tokens(0)).backward()
        with pytest.raises(StateError, match=r'emb\.weight\.grad: .*"update": \{"in_backward": false\}'):
            TOUCHES[touch](model.emb.weight.grad)
        assert '{"in_backward": false}' in repr(model.emb.weight.grad)
        optimizer.step()
        assert not named_grads(model)


@pytest.mark.parametrize("assign", [None, torch.zeros(1)], ids=["dropped", "assigned"])
def test_dropping_a_gradient_that_backward_has_used_is_an_error_at_the_step(
    assign: Tensor | None, tmp_path: Path
) -> None:
    with offloaded("host", tmp_path, update={"in_backward": True}) as (model, optimizer):
        model(tokens(0)).backward()
        p = model.blocks[1].norm.weight
        p.grad = None if assign is None else assign.expand(p.shape).clone()
        with pytest.raises(
            StateError, match=r"blocks\.1\.norm\.weight\.grad was .* backward has already updated the weights"
        ):
            optimizer.step()
        optimizer.step()
        model(tokens(1)).backward()
        optimizer.step()


def test_the_plain_form_says_once_what_updates_in_backward_would_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "offloadzero"), offloaded("host", tmp_path) as (model, _):
        said = [r.getMessage() for r in caplog.records if "in_backward" in r.getMessage()]
        assert len(said) == 1
        assert "KiB" in said[0]
        model(tokens(0)).backward()
        assert named_grads(model)
    caplog.clear()
    of_no_use: list[tuple[str, dict[str, Any]]] = [
        ("host", {"gradient_clipping": 1.0}),
        ("host", {"update": {"in_backward": False}}),
        ("device", {}),  # gradients have their homes there in any case
    ]
    for placement, keys in of_no_use:
        with caplog.at_level(logging.INFO, "offloadzero"), offloaded(placement, tmp_path, **keys):
            assert not [r for r in caplog.records if "in_backward" in r.getMessage()]


def test_an_engine_drops_gradients_at_the_step(tmp_path: Path) -> None:
    config = engine_config("host", tmp_path, gradient_accumulation_steps=2, update={"in_backward": False})
    engine, *_ = offloadzero.initialize(model=make_model(), config=config)
    plain = make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    losses: dict[str, list[float]] = {"plain": [], "engine": []}
    for micro in range(12):
        loss = engine(tokens(micro))
        engine.backward(loss)
        if micro % 2:
            clip(engine.module)
        engine.step()
        losses["engine"].append(loss.item())
        assert bool(named_grads(engine.module)) is (micro % 2 == 0)
        loss = plain(tokens(micro))
        (loss / 2).backward()
        losses["plain"].append(loss.item())
        if micro % 2:
            clip(plain)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    engine.close()
    assert worst_relative_difference(losses["engine"], losses["plain"]) < TOLERANCE


def test_a_scripts_clipping_comes_before_the_configurations(tmp_path: Path) -> None:
    config = engine_config("host", tmp_path, gradient_clipping=0.05)
    engine, *_ = offloadzero.initialize(model=make_model(), config=config)
    engine.backward(engine(tokens(0)))
    clip(engine.module)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(0.1, rel=1e-4)
    engine.close()


def halve(engine: Any) -> None:
    for grad in grads(engine.module):
        grad.mul_(0.5)


def add_noise(engine: Any) -> None:
    for number, grad in enumerate(grads(engine.module)):
        grad.add_(0.001 * number)


def drop_some(engine: Any) -> None:
    engine.module.blocks[2].zero_grad()


def zero_some(engine: Any) -> None:
    engine.module.blocks[2].zero_grad(set_to_none=False)


@pytest.mark.parametrize("edit", [halve, add_noise, drop_some, zero_some])
@pytest.mark.parametrize("placement", ["resident", "host", "mixed"])
def test_what_earlier_micro_batches_brought_can_be_edited_before_an_update_in_backward(
    placement: str, edit: Callable[[Any], None], tmp_path: Path
) -> None:
    def run(placement: str, *, in_backward: bool) -> tuple[list[float], dict[str, Tensor]]:
        update = {"in_backward": in_backward}
        config = engine_config(placement, tmp_path, gradient_accumulation_steps=2, update=update)
        engine, *_ = offloadzero.initialize(model=make_model(), config=config)
        losses = []
        for micro in range(8):
            loss = engine(tokens(micro))
            engine.backward(loss)
            if micro % 2 == 0:
                edit(engine)
            engine.step()
            losses.append(loss.item())
        weights = final_weights(engine.module)
        engine.close()
        return losses, weights

    losses, weights = run(placement, in_backward=True)
    expected_losses, expected = run("resident", in_backward=False)
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_full_gradients_by_deepspeeds_names(tmp_path: Path) -> None:
    with offloaded("nvme", tmp_path, bf16={"enabled": True}) as (model, optimizer):
        p = model.blocks[0].up.weight
        assert safe_get_full_grad(p) is None
        model(tokens(0)).backward()
        grad = safe_get_full_grad(p)
        assert grad is not None
        assert (grad.dtype, grad.shape, grad.device.type) == (torch.float32, p.shape, "cpu")
        assert torch.equal(grad.bfloat16(), p.grad.clone())
        safe_set_full_grad(p, torch.full(p.shape, 0.25))
        assert torch.equal(p.grad.clone(), torch.full(p.shape, 0.25, dtype=torch.bfloat16))
        optimizer.zero_grad()
        safe_set_full_grad(p, torch.full(p.shape, 0.5))
        before = final_weights(model)
        optimizer.step()
        changed = [
            name for name, value in final_weights(model).items() if not torch.equal(value, before[name])
        ]
        assert changed == ["blocks.0.up.weight"]
        with pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight\.grad = \(1,\): shape"):
            safe_set_full_grad(p, torch.ones(1))


def test_local_gradients_by_deepspeeds_names(tmp_path: Path) -> None:
    """A rank's own part, as a vector: on one rank all of it."""
    with offloaded("host", tmp_path, bf16={"enabled": True}) as (model, optimizer):
        p = model.blocks[0].up.weight
        assert safe_get_local_grad(p) is None
        model(tokens(0)).backward()
        grad = safe_get_local_grad(p)
        assert grad is not None
        assert (grad.dtype, grad.shape) == (torch.float32, (p.numel(),))
        assert torch.equal(grad.view(p.shape).bfloat16(), p.grad.clone())
        safe_set_local_grad(p, torch.full((p.numel(),), 0.25))
        assert torch.equal(p.grad.clone(), torch.full(p.shape, 0.25, dtype=torch.bfloat16))
        optimizer.step()
        with pytest.raises(ConfigError, match=rf"blocks\.0\.up\.weight\.grad = \(1,\): {p.numel()} elements"):
            safe_set_local_grad(p, torch.ones(1))


# --- between micro batches ---


@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
def test_norms_and_factors_between_micro_batches(placement: str, tmp_path: Path) -> None:
    """On the device a norm is taken when the window closes: who asks before gets that of the value, as everywhere."""

    def run(where: str) -> tuple[list[float], dict[str, Tensor]]:
        keys = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5}
        torch.manual_seed(0)
        engine, *_ = offloadzero.initialize(model=make_model(), config=engine_config(where, tmp_path, **keys))
        seen = []
        for number in range(6):
            engine.backward(engine(tokens(number)))
            params = list(engine.module.parameters())
            if number % 3 < 2:
                seen += [float(param.grad.norm()) for param in params]
                seen.append(float(torch.nn.utils.clip_grad_norm_(params[::2], 0.1)))
                params[1].grad.mul_(2.5)
                expected = torch.linalg.vector_norm(params[1].grad.clone().double())
                assert float(params[1].grad.norm()) == pytest.approx(float(expected), rel=1e-3)
            engine.step()
        seen.append(float(engine.get_global_grad_norm()))
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.close()
        return seen, weights

    found, weights = run(placement)
    expected, expected_weights = run("host")
    assert found == pytest.approx(expected, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected_weights[name], rtol=1e-5, atol=1e-6)
