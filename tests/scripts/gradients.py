"""Scripts that read, edit, replace and drop gradients between backward and step. Each has one idea in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.scripts.common import (
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

Edit = Callable[
    [nn.Module, int], Any
]  # between backward and step; what it returns is noted if it is a tensor
SCRIPTS: dict[str, Script] = {}
script = registering(SCRIPTS)


def edited(edit: Edit) -> Script:
    """The plain loop with `edit` between backward and step, registered under the edit's name."""

    def run(wrap: Wrap) -> Result:
        model, optimizer = start(wrap)
        losses, notes = [], {}
        for step in range(NUM_STEPS):
            loss = model(tokens(step))
            loss.backward()
            seen = edit(model, step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if isinstance(seen, Tensor):
                notes[f"step {step}"] = seen.detach().clone()
        return Result(losses, [], weights_of(model), notes)

    SCRIPTS[edit.__name__] = run
    return run


def grads(model: nn.Module) -> list[Tensor]:
    """All gradients that are there."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


# --- edits in place ---


@edited
def clip_norm(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return clip_grad_norm_(model.parameters(), MAX_NORM)


@edited
def clip_norm_inf(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))


@edited
def clip_norm_1(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0, foreach=False)


@edited
def clip_norm_no_foreach(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return clip_grad_norm_(model.parameters(), MAX_NORM, foreach=False, error_if_nonfinite=True)


@edited
def clip_norm_of_every_layer(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.stack([clip_grad_norm_(child.parameters(), 0.05) for child in model.children()])


@edited
def clip_norm_of_one_parameter(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return clip_grad_norm_(model.get_parameter("blocks.1.up.weight"), 0.01)


@edited
def clip_twice(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    first = clip_grad_norm_(model.parameters(), 0.5)
    return torch.stack([first, clip_grad_norm_(model.parameters(), 0.1)])


@edited
def total_norm_then_scale(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    norm = torch.nn.utils.get_total_norm(grads(model))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
    return norm


@edited
def clip_value(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    clip_grad_value_(model.parameters(), 1e-3)


@edited
def grad_mul(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.grad.mul_(0.01)


@edited
def grad_times_equals(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.grad *= 0.01


@edited
def grad_div(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.grad.div_(3 * torch.tensor(30.0))


@edited
def grad_data_mul(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.grad.data.mul_(0.01)


@edited
def grad_mul_by_a_mask(model: nn.Module, step: int) -> Any:
    for p in model.parameters():
        p.grad.mul_(torch.rand(p.shape, generator=generator(step)) < 0.3)


@edited
def grad_clamp(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.grad.clamp_(-1e-3, 1e-3)


@edited
def grad_noise(model: nn.Module, step: int) -> Any:
    source = generator(step)
    for p in model.parameters():
        p.grad.add_(torch.randn(p.shape, generator=source), alpha=0.01)


@edited
def grad_noise_plus_equals(model: nn.Module, step: int) -> Any:
    source = generator(step)
    for p in model.parameters():
        p.grad += 0.01 * torch.randn(p.grad.shape, generator=source)


@edited
def grad_centralized(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        if p.grad.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


@edited
def grad_rows_written_through_a_view(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    weight = model.get_parameter("emb.weight")
    weight.grad[:5] = 0.0
    weight.grad.view(-1)[-3:] = 0.25
    model.get_parameter("blocks.2.down.weight").grad[1].fill_(0.125)


@edited
def grad_nan_to_num(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        torch.nan_to_num_(p.grad, nan=0.0)
        p.grad.mul_(0.01)


@edited
def grad_foreach(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    torch._foreach_mul_(grads(model), 0.01)
    return torch.stack(torch._foreach_norm(grads(model)))


@edited
def grad_copied_in_place(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.grad.copy_(p.grad.sign() * 1e-3)


@edited
def grad_decayed_by_hand(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    with torch.no_grad():
        for p in model.parameters():
            p.grad.add_(p, alpha=0.1)


# --- assigned, dropped ---


@edited
def grad_assigned(model: nn.Module, step: int) -> Any:
    source = generator(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=source) * 0.01


@edited
def grad_assigned_from_itself(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.grad = p.grad * 0.01


@edited
def grad_data_assigned(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.grad.data = p.grad.data.sign() * 1e-3


@edited
def grad_dropped_for_some(model: nn.Module, step: int) -> Any:
    """torch leaves such a parameter alone, its decay and its count of steps too."""
    if step % 2:
        for p in model.get_submodule("blocks.1").parameters():
            p.grad = None
        model.get_parameter("blocks.2.up.bias").grad = None


@edited
def grad_dropped_for_all(model: nn.Module, step: int) -> Any:
    if step % 3 == 1:
        for p in model.parameters():
            p.grad = None


@edited
def grad_deleted(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    del model.get_parameter("blocks.0.up.weight").grad


@edited
def grad_zeroed(model: nn.Module, step: int) -> Any:
    """Zero is not None: the moments decay and so does the weight."""
    if step % 2:
        for p in model.get_submodule("blocks.1").parameters():
            p.grad.zero_()


@edited
def grad_kept_and_put_back(model: nn.Module, step: int) -> Any:
    """Two backwards whose gradients are held apart, then combined."""
    first = [p.grad.detach().clone() for p in model.parameters()]
    model.zero_grad()
    model(tokens(1000 + step)).backward()
    for p, other in zip(model.parameters(), first, strict=True):
        p.grad = torch.where(p.grad * other > 0, p.grad + other, torch.zeros_like(other))


# --- read ---


@edited
def norm_of_every_parameter(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.stack([p.grad.norm() for p in model.parameters()])


@edited
def norm_of_detached_and_data(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.stack(
        [
            x
            for p in model.parameters()
            for x in (p.grad.detach().norm(2), p.grad.data.norm(1), p.grad.abs().max())
        ]
    )


@edited
def histogram(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.stack([torch.histc(p.grad, bins=7, min=-0.02, max=0.02) for p in model.parameters()])


@edited
def all_finite(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    return torch.tensor([bool(torch.isnan(p.grad).any()) for p in model.parameters()])


@edited
def flat_vector(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.cat([p.grad.view(-1) for p in model.parameters()])


@edited
def numbers(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    values = [
        (p.grad.sum().item(), p.grad.view(-1)[0].item(), p.grad.float().std().item())
        for p in model.parameters()
    ]
    return torch.tensor(values)


@edited
def as_numpy(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.stack([torch.tensor(float((p.grad.cpu().numpy() ** 2).sum())) for p in model.parameters()])


@edited
def signal_to_noise(model: nn.Module, step: int) -> Any:
    """Gradients of two batches compared, read while both are added up."""
    first = [p.grad.clone() for p in model.parameters()]
    model(tokens(1000 + step)).backward()
    pairs = zip(model.parameters(), first, strict=True)
    return torch.stack([torch.dot((p.grad - one).flatten(), one.flatten()) for p, one in pairs])


@script
def read_after_step(wrap: Wrap) -> Result:
    """Logged after step() and before zero_grad()."""
    model, optimizer = start(wrap)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]))
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        losses.append(loss.item())
    return Result(losses, [], weights_of(model), {"norms": torch.stack(norms)})
