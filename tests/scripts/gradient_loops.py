"""Scripts that zero, accumulate, go backward several times and scale their losses: loops of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.scripts.common import (
    LR,
    MAX_NORM,
    NUM_STEPS,
    Result,
    Script,
    Wrap,
    loss_of,
    registering,
    start,
    tokens,
    train,
    weights_of,
)
from tests.scripts.gradients import grads

SCRIPTS: dict[str, Script] = {}
script = registering(SCRIPTS)


# --- zeroing and accumulating ---


def accumulated(zero: Callable[[nn.Module, Any], Any], *, num_micro: int = 3, **options: Any) -> Script:
    """Several backwards and then one step; `zero` begins the next window."""
    return lambda wrap: train(*start(wrap, **options), num_micro=num_micro, clips=True, zero=zero)


SCRIPTS |= {
    "accumulate": accumulated(lambda _, optimizer: optimizer.zero_grad()),
    "accumulate_model_zero_grad": accumulated(lambda model, _: model.zero_grad()),
    "accumulate_zero_grad_to_zeros": accumulated(lambda _, optimizer: optimizer.zero_grad(set_to_none=False)),
    "accumulate_model_zero_grad_to_zeros": accumulated(lambda model, _: model.zero_grad(set_to_none=False)),
    "accumulate_zero_by_loop": accumulated(lambda model, _: [grad.zero_() for grad in grads(model)]),
    "accumulate_zero_by_list": accumulated(lambda model, _: torch._foreach_zero_(grads(model))),
    "accumulate_over_all_steps": accumulated(lambda *_: None, num_micro=1, lr=LR / 3),
    "model_zero_grad": accumulated(lambda model, _: model.zero_grad(), num_micro=1),
}


@script
def zeros_are_seen(wrap: Wrap) -> Result:
    """zero_grad(set_to_none=False) leaves zeros, and a step over them still decays."""

    def zero(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        assert all(bool((p.grad == 0).all()) for p in model.parameters())
        optimizer.step()

    return train(*start(wrap), zero=zero)


@script
def step_without_backward(wrap: Wrap) -> Result:
    """A step with no gradient at all changes nothing in torch."""

    def zero(_model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        optimizer.step()

    return train(*start(wrap), zero=zero)


@script
def step_twice(wrap: Wrap) -> Result:
    """The gradients are still there: the second step uses them again."""

    def zero(_model: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(*start(wrap), clips=True, zero=zero)


@script
def skipped_steps(wrap: Wrap) -> Result:
    """A batch whose norm is too large is dropped, by zero_grad without a step."""
    model, optimizer = start(wrap)
    losses, norms, steps = [], [], []
    for step in range(2 * NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM).item()
        if norm < 1.62:
            optimizer.step()
            steps.append(float(step))
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm)
    assert len(steps) > 0
    return Result(losses, norms, weights_of(model), {"steps": torch.tensor(steps)})


@script
def dropped_between_backwards(wrap: Wrap) -> Result:
    """What the first backward of a step left is dropped: by the model, or one by one and in part."""

    def before(model: nn.Module, step: int) -> None:
        model(tokens(500 + step)).backward()
        if step % 2:
            model.zero_grad()
        else:
            for p in itertools.islice(model.parameters(), 5):
                p.grad = None

    return train(*start(wrap), before=before, clips=True)


@script
def scaled_between_backwards(wrap: Wrap) -> Result:
    """What earlier micro batches brought is scaled before the next one is added."""
    model, optimizer = start(wrap)
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
    return Result(losses, [], weights_of(model))


@script
def one_flat_buffer(wrap: Wrap) -> Result:
    """Every gradient is a view of it; it is cleared and scaled as a whole."""
    model, optimizer = start(wrap)
    params = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view(p.shape)
    return train(
        model,
        optimizer,
        num_micro=2,
        before=lambda *_: flat.zero_(),
        edit=lambda *_: flat.mul_(min(1.0, MAX_NORM / float(flat.norm()))),
        zero=lambda *_: None,
    )


# --- several backwards ---


@script
def backward_twice_through_one_graph(wrap: Wrap) -> Result:
    model, optimizer = start(wrap)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, norms, weights_of(model))


@script
def two_losses(wrap: Wrap) -> Result:
    """Two forwards, two graphs, two backwards."""
    model, optimizer = start(wrap)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        one, other = model(tokens(step)), model(tokens(300 + step))
        one.backward()
        other.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses += [one.item(), other.item()]
    return Result(losses, norms, weights_of(model))


@script
def two_losses_of_one_trunk(wrap: Wrap) -> Result:
    """One forward of the trunk, a loss that goes all the way down and one that stops in the head."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        hidden = model.hidden(tokens(step))
        one = hidden.pow(2).mean()
        other = model.head(hidden).logsumexp(-1).mean()
        one.backward(retain_graph=True)
        other.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses += [one.item(), other.item()]
    return Result(losses, [], weights_of(model))


def sharpness_aware(perturb: Callable[[Tensor, Tensor], Tensor]) -> Script:
    """Up along the gradient, a second backward there, back, step (Foret et al. 2020)."""

    def edit(model: nn.Module, step: int) -> Tensor:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            moved = [perturb(p.grad, norm) for p in model.parameters()]
            for p, by in zip(model.parameters(), moved, strict=True):
                p.add_(by)
        model.zero_grad()
        model(tokens(step)).backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
        return norm

    return lambda wrap: train(*start(wrap), edit=edit)


def sharpness_aware_by_data(model: nn.Module, step: int) -> None:
    """The form of the first public implementation: old values kept, p.data written and restored."""
    old = {}
    for p in model.parameters():
        old[p] = p.data.clone()
        p.data.add_(0.01 * p.grad)
    model.zero_grad()
    model(tokens(step)).backward()
    for p in model.parameters():
        p.data = old[p]


def gradients_by_autograd_grad(model: nn.Module, step: int) -> None:
    """torch.autograd.grad gives them; the script assigns them."""
    found = torch.autograd.grad(model(tokens(step)), list(model.parameters()))
    for p, grad in zip(model.parameters(), found, strict=True):
        p.grad = 0.01 * grad


SCRIPTS |= {
    "SAM by the norm": sharpness_aware(lambda grad, norm: 0.05 * grad / (norm + 1e-12)),
    "SAM by the sign": sharpness_aware(lambda grad, _: 1e-3 * grad.sign()),
    "SAM by data": lambda wrap: train(*start(wrap), edit=sharpness_aware_by_data),
    "autograd.grad": lambda wrap: train(*start(wrap), edit=gradients_by_autograd_grad),
}


@script
def closure(wrap: Wrap) -> Result:
    """optimizer.step(closure), as L-BFGS and Lightning do."""
    model, optimizer = start(wrap)
    losses, norms = [], []

    for step in range(NUM_STEPS):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(tokens(step))
            loss.backward()
            norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
            return loss

        losses.append(optimizer.step(evaluate).item())
    return Result(losses, norms, weights_of(model))


# --- scaled losses ---


def scaled(*, unscales: bool, infinite_at: int | None = None) -> Script:
    """GradScaler, whose scale grows; the gradients of one step may overflow: it is skipped, and the scale halves."""

    def run(wrap: Wrap) -> Result:
        model, optimizer = start(wrap)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        losses, norms, scales = [], [], []
        for step in range(NUM_STEPS):
            loss = model(tokens(step))
            scaler.scale(loss * float("inf") if step == infinite_at else loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
                norm = clip_grad_norm_(model.parameters(), MAX_NORM).item()
                norms += [norm] if step != infinite_at else []
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        return Result(losses, norms, weights_of(model), {"scales": torch.tensor(scales)})

    return run


SCRIPTS |= {
    "GradScaler": scaled(unscales=True),
    "GradScaler without unscale_": scaled(unscales=False),
    "GradScaler over infinities": scaled(unscales=False, infinite_at=2),
    "GradScaler over infinities that are clipped": scaled(unscales=True, infinite_at=2),
}


@script
def autocast(wrap: Wrap) -> Result:
    """bf16 autocast over fp32 weights."""

    def cast(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, step)

    return train(*start(wrap), loss_of=cast, clips=True)


@script
def nonfinite_batch_dropped(wrap: Wrap) -> Result:
    """NaN in one backward, found by the script, which drops it and goes on."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        (loss * float("nan") if step == 2 else loss).backward()
        if torch.isfinite(clip_grad_norm_(model.parameters(), MAX_NORM)):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))
