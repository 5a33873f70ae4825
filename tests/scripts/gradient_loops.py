"""Scripts that zero, accumulate, go backward several times and scale their losses: loops of their own."""

from __future__ import annotations

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
    registering,
    start,
    tokens,
    weights_of,
)

SCRIPTS: dict[str, Script] = {}
script = registering(SCRIPTS)


# --- zeroing and accumulating ---


def accumulated(
    zero: Callable[[nn.Module, Any], None], *, num_micro_steps: int = 3, **options: Any
) -> Script:
    """Several backwards and then one step; `zero` begins the next window."""

    def run(wrap: Wrap) -> Result:
        model, optimizer = start(wrap, **options)
        losses, norms = [], []
        for step in range(NUM_STEPS):
            for micro_step in range(num_micro_steps):
                loss = model(tokens(10 * step + micro_step)) / num_micro_steps
                loss.backward()
                losses.append(loss.item())
            norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            zero(model, optimizer)
        return Result(losses, norms, weights_of(model))

    return run


def zero_by_loop(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


SCRIPTS |= {
    "accumulate": accumulated(lambda _, optimizer: optimizer.zero_grad()),
    "accumulate_model_zero_grad": accumulated(lambda model, _: model.zero_grad()),
    "accumulate_zero_grad_to_zeros": accumulated(lambda _, optimizer: optimizer.zero_grad(set_to_none=False)),
    "accumulate_model_zero_grad_to_zeros": accumulated(lambda model, _: model.zero_grad(set_to_none=False)),
    "accumulate_zero_by_loop": accumulated(lambda model, _: zero_by_loop(model)),
    "accumulate_over_all_steps": accumulated(lambda *_: None, num_micro_steps=1, lr=LR / 3),
    "model_zero_grad": accumulated(lambda model, _: model.zero_grad(), num_micro_steps=1),
}


@script
def zeros_are_seen(wrap: Wrap) -> Result:
    """zero_grad(set_to_none=False) leaves zeros, and a step over them still decays."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(bool((p.grad == 0).all()) for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@script
def step_without_backward(wrap: Wrap) -> Result:
    """A step with no gradient at all changes nothing in torch."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        optimizer.step()
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@script
def step_twice(wrap: Wrap) -> Result:
    """The gradients are still there: the second step uses them again."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


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
def zero_grad_between_backwards(wrap: Wrap) -> Result:
    """model.zero_grad() drops what the first backward left."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        model(tokens(500 + step)).backward()
        model.zero_grad()
        loss = model(tokens(step))
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


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


def _sam(wrap: Wrap, perturb: Callable[[Tensor, Tensor], Tensor]) -> Result:
    model, optimizer = start(wrap)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                moved.append(perturb(p.grad, norm))
                p.add_(moved[-1])
        optimizer.zero_grad()
        model(tokens(step)).backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return Result(losses, norms, weights_of(model))


@script
def sam_by_norm(wrap: Wrap) -> Result:
    """Sharpness-aware minimisation: up along the gradient, a second backward there, back, step."""
    return _sam(wrap, lambda grad, norm: 0.05 * grad / (norm + 1e-12))


@script
def sam_by_sign(wrap: Wrap) -> Result:
    return _sam(wrap, lambda grad, norm: 1e-3 * grad.sign())  # noqa: ARG005


@script
def sam_with_data(wrap: Wrap) -> Result:
    """The form of the first public implementation: old values kept, p.data written and restored."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        old = {}
        for p in model.parameters():
            old[p] = p.data.clone()
            p.data.add_(0.01 * p.grad)
        optimizer.zero_grad()
        model(tokens(step)).backward()
        for p in model.parameters():
            p.data = old[p]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@script
def gradients_by_autograd_grad(wrap: Wrap) -> Result:
    """torch.autograd.grad gives them; the script assigns them."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        found = torch.autograd.grad(loss, list(model.parameters()))
        for p, grad in zip(model.parameters(), found, strict=True):
            p.grad = 0.01 * grad
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


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


# --- GradScaler ---


@script
def grad_scaler(wrap: Wrap) -> Result:
    """scale, unscale_, clip, step, update."""
    model, optimizer = start(wrap)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    losses, norms, scales = [], [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return Result(losses, norms, weights_of(model), {"scales": torch.tensor(scales)})


@script
def grad_scaler_without_unscale(wrap: Wrap) -> Result:
    model, optimizer = start(wrap)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@script
def grad_scaler_skips_infinities(wrap: Wrap) -> Result:
    """An overflow in step 2: that step is skipped, the scale halves, the script goes on."""
    model, optimizer = start(wrap)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses, scales = [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        if step == 2:
            scaler.scale(loss * torch.tensor(float("inf"))).backward()
        else:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return Result(losses, [], weights_of(model), {"scales": torch.tensor(scales)})


@script
def autocast(wrap: Wrap) -> Result:
    """bf16 autocast over fp32 weights."""
    model, optimizer = start(wrap)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens(step))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, norms, weights_of(model))


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
