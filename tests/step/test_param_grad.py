"""Ordinary scripts that use `param.grad`, beside the same on plain torch, for every placement."""

from __future__ import annotations

import itertools
import signal
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from tests.support.cases import IN_FULL
from tests.support.plain_form import (
    ALL_PLACEMENTS,
    TOLERANCE,
    clip,
    final_weights,
    grads,
    make_model,
    make_optimizer,
    named_grads,
    offloaded,
    plain_config,
)
from tests.support.schedules import Slowness
from tests.support.tiny import tokens
from tests.support.training import worst_relative_difference

NUM_STEPS = 8 if IN_FULL else 4

Script = Callable[[nn.Module, torch.optim.Optimizer], list[float]]

# --- scripts ---


def each_step(edit: Callable[[nn.Module], Any], *, num_micro: int = 1) -> Script:
    """Backward, `edit(model)`, step; what `edit` returns is compared like a loss."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        seen = []
        for step in range(NUM_STEPS):
            for micro in range(num_micro):
                loss = model(tokens(10 * step + micro))
                loss.backward()
                seen.append(loss.item())
            result = edit(model)
            if result is not None:
                seen.append(float(result))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return script


def twice_scaled(model: nn.Module) -> None:
    for grad in grads(model):
        grad.mul_(0.3)
        grad.mul_(0.7)


def signed(model: nn.Module) -> None:
    for grad in grads(model):
        grad.add_(grad.sign(), alpha=0.01)


def noisy(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.grad is not None:
            p.grad += 0.01 * torch.randn(p.shape, generator=generator)


def assigned(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 0.5 + 0.001


def partly_dropped(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if "bias" in name:
            p.grad = None


def rows_zeroed(model: nn.Module) -> None:
    for grad in grads(model):
        grad[::2].zero_()


def statistics(model: nn.Module) -> Tensor:
    return torch.stack([grad.abs().mean() + grad.flatten()[0] for grad in grads(model)]).sum()


def forgetting(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """No zero_grad() at all."""
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        clip(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def zeroing(zero: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Script:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(NUM_STEPS):
            zero(model, optimizer)
            loss = model(tokens(step))
            loss.backward()
            clip(model)
            optimizer.step()
            losses.append(loss.item())
        return losses

    return script


def dropping_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The first micro batch of each step is dropped, in part by the model and in part one by one."""
    losses = []
    for step in range(NUM_STEPS):
        model(tokens(100 + step)).backward()
        if step % 2:
            model.zero_grad()
        else:
            for p in itertools.islice(model.parameters(), 5):
                p.grad = None
        loss = model(tokens(step))
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scaling_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """What earlier micro batches brought is scaled before the next one is added."""
    losses = []
    for step in range(NUM_STEPS):
        for micro in range(3):
            loss = model(tokens(10 * step + micro))
            loss.backward()
            losses.append(loss.item())
            for grad in grads(model):
                grad.mul_(0.3)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """SAM (Foret et al. 2020) with the sign in the place of the normalised gradient."""
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        losses.append(loss.item())
        moved = {}
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                moved[name] = 0.01 * p.grad.sign()
                p.add_(moved[name])
        optimizer.zero_grad()
        model(tokens(step)).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(moved[name])
        optimizer.step()
        optimizer.zero_grad()
    return losses


def scaled_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """torch.amp.GradScaler, whose scale grows; then the gradients of one step overflow."""
    overflowing = NUM_STEPS // 2
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    seen = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        factor = float("inf") if step == overflowing else 1.0
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        norm = clip(model)
        seen += [loss.item(), scaler.get_scale()] + ([norm.item()] if step != overflowing else [])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


def scaled_loss_without_unscale(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    seen = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    def closure(step: int) -> Callable[[], float]:
        def run() -> float:
            optimizer.zero_grad()
            loss = model(tokens(step))
            loss.backward()
            clip(model)
            return loss.item()

        return run

    return [float(optimizer.step(closure(step))) for step in range(NUM_STEPS)]


def with_hooks(edit: Callable[[nn.Parameter], None]) -> Script:
    """A script's own hook on each gradient, registered after offloading; two micro batches per step."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        handles = [p.register_post_accumulate_grad_hook(edit) for p in model.parameters()]
        losses = each_step(clip, num_micro=2)(model, optimizer)
        for handle in handles:
            handle.remove()
        return losses

    return script


def hook_scale(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def hook_clamp(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.05, 0.05)


def hook_norm(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.div_(p.grad.norm() + 1)


def own_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """One flat buffer that every gradient is a view of, cleared and scaled as a whole."""
    params = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    offset = 0
    for p in params:
        p.grad = flat[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    losses = []
    for step in range(NUM_STEPS):
        flat.zero_()
        for micro in range(2):
            loss = model(tokens(10 * step + micro))
            loss.backward()
            losses.append(loss.item())
        flat.mul_(min(1.0, 0.1 / float(flat.norm())))
        optimizer.step()
    return losses


def freezing(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A block is frozen for some steps."""
    losses = []
    for step in range(NUM_STEPS):
        for p in model.blocks[1].parameters():
            p.requires_grad_(not NUM_STEPS // 4 <= step <= NUM_STEPS // 2)
        loss = model(tokens(step))
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def swapping(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Gradients of two batches, taken apart and put together again."""
    losses = []
    for step in range(NUM_STEPS):
        kept = []
        for micro in range(2):
            loss = model(tokens(10 * step + micro))
            loss.backward()
            losses.append(loss.item())
            kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.zero_grad()
        for p, one, other in zip(model.parameters(), *kept, strict=True):
            p.grad = torch.minimum(one, other)
        optimizer.step()
        optimizer.zero_grad()
    return losses


SCRIPTS: dict[str, Script] = {
    "clip_grad_norm_": each_step(clip),
    "clip_grad_norm_ of the whole list": each_step(lambda model: clip(model, foreach=True)),
    "clip_grad_norm_ of three micro batches": each_step(clip, num_micro=3),
    "clip_grad_norm_ after scaling": each_step(lambda model: (twice_scaled(model), clip(model))[1]),
    "clip_grad_value_": each_step(lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01)),
    "get_total_norm": each_step(lambda model: torch.nn.utils.get_total_norm(grads(model))),
    "two factors": each_step(twice_scaled),
    "division": each_step(lambda model: [grad.div_(3) for grad in grads(model)] and None),
    "powers of two": each_step(
        lambda model: [grad.mul_(8).div_(2).mul_(0.3) for grad in grads(model)] and None
    ),
    "foreach": each_step(lambda model: torch._foreach_mul_(grads(model), 0.4) and None),
    "sign": each_step(signed),
    "noise": each_step(noisy),
    "assigned": each_step(assigned),
    "partly dropped": each_step(partly_dropped),
    "rows zeroed": each_step(rows_zeroed),
    "statistics": each_step(statistics),
    "no zero_grad": forgetting,
    "zero_grad first": zeroing(lambda _, optimizer: optimizer.zero_grad()),
    "zero_grad to zero": zeroing(lambda _, optimizer: optimizer.zero_grad(set_to_none=False)),
    "model.zero_grad": zeroing(lambda model, _: model.zero_grad()),
    "model.zero_grad to zero": zeroing(lambda model, _: model.zero_grad(set_to_none=False)),
    "foreach zero": zeroing(lambda model, _: torch._foreach_zero_(grads(model)) if grads(model) else None),
    "dropping between micro batches": dropping_between,
    "scaling between micro batches": scaling_between,
    "SAM": sharpness_aware,
    "GradScaler": scaled_loss,
    "GradScaler without unscale_": scaled_loss_without_unscale,
    "closure": with_closure,
    "hooks that scale": with_hooks(hook_scale),
    "hooks that clamp": with_hooks(hook_clamp),
    "hooks that read": with_hooks(hook_norm),
    "own buffer": own_buffer,
    "freezing": freezing,
    "swapping": swapping,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_numbers_of_plain_torch_wherever_the_states_live(
    name: str, tmp_path: Path
) -> None:
    script = SCRIPTS[name]
    plain = make_model()
    expected = script(plain, make_optimizer(plain))
    outcomes = {}
    for placement in ALL_PLACEMENTS:
        with offloaded(placement, tmp_path) as (model, optimizer):
            seen = script(model, optimizer)
            outcomes[placement] = seen, final_weights(model)
    assert worst_relative_difference(outcomes["resident"][0], expected) < TOLERANCE
    for placement, (seen, weights) in outcomes.items():
        assert seen == outcomes["resident"][0], placement
        for key, value in weights.items():
            assert torch.equal(value, outcomes["resident"][1][key]), (placement, key)


@pytest.mark.parametrize("name", ["clip_grad_norm_ of three micro batches", "scaling between micro batches", "noise",
                                  "no zero_grad", "zero_grad to zero", "model.zero_grad", "swapping"])  # fmt: skip
def test_random_delays_change_nothing(name: str, tmp_path: Path, faults: ExitStack) -> None:
    with offloaded("resident", tmp_path) as (model, optimizer):
        expected = SCRIPTS[name](model, optimizer), final_weights(model)
    faults.enter_context(Slowness(zlib.crc32(name.encode())).everywhere())
    for placement in ("host", "mixed"):
        with offloaded(placement, tmp_path) as (model, optimizer):
            assert SCRIPTS[name](model, optimizer) == expected[0]
            for key, value in final_weights(model).items():
                assert torch.equal(value, expected[1][key]), (placement, key)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
def test_gradients_from_before_offload_are_added_to_in_the_dtype_that_the_model_gets(
    placement: str, precision: dict[str, Any], tmp_path: Path
) -> None:
    model, plain = make_model(), make_model()
    for each in (model, plain):
        each(tokens(0)).backward()
    _, optimizer = offloadzero.offload(
        model, make_optimizer(model), plain_config(placement, tmp_path, **precision)
    )
    if precision:
        plain.bfloat16()  # its gradients, too
        plain.load_state_dict(model.state_dict())  # rounded where two values are equally near
    for each in (model, plain):
        each(tokens(1)).backward()
    for (name, grad), (_, expected) in zip(
        named_grads(model).items(), named_grads(plain).items(), strict=True
    ):
        assert torch.equal(grad.clone(), expected), name
    optimizer.close()


def test_a_start_that_is_interrupted_leaves_gradients_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of frozen parameters, too, which are cast with the others."""
    model = make_model()
    model(tokens(0)).backward()
    frozen = model.blocks[0].up.weight.requires_grad_(requires_grad=False)
    before = named_grads(model)
    config = plain_config("host", tmp_path, bf16={"enabled": True})
    cast = Tensor.to

    def interrupted(self: Tensor, *args: Any, **keywords: Any) -> Tensor:
        result = cast(self, *args, **keywords)
        if any(self is grad for grad in before.values()):  # the handler holds it back until all are cast
            signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offloadzero.offload(model, make_optimizer(model), config)
    after = named_grads(model)
    assert after.keys() == before.keys()
    assert all(after[name] is grad for name, grad in before.items())
    _, optimizer = offloadzero.offload(model, make_optimizer(model), config)
    assert frozen.grad is not None
    assert frozen.grad.dtype == torch.bfloat16
    optimizer.close()
