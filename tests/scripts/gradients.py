"""Scripts that read, edit, replace and drop gradients between backward and step. Each has one idea in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from tests.scripts.common import MAX_NORM, Result, Script, Visit, Wrap, generator, start, tokens, train


def edited(edit: Visit) -> Script:
    """The plain loop with `edit` between backward and step."""
    return lambda wrap: train(*start(wrap), edit=edit)


def grads(model: nn.Module) -> list[Tensor]:
    """All gradients that are there."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def each(change: Callable[[Tensor], Any]) -> Visit:
    """Of each gradient."""
    return lambda model, _: [change(grad) for grad in grads(model)] and None


def assigned(make: Callable[[Tensor, torch.Generator], Tensor]) -> Visit:
    """`make` of each gradient in its place."""

    def edit(model: nn.Module, step: int) -> None:
        source = generator(step)
        for p in model.parameters():
            p.grad = make(p.grad, source)

    return edit


def stacked(read: Callable[[Tensor], Tensor]) -> Visit:
    """What is read of each gradient is noted."""
    return lambda model, _: torch.stack([read(grad) for grad in grads(model)])


def clip(**options: Any) -> Visit:
    arguments = {"max_norm": MAX_NORM, **options}
    return lambda model, _: clip_grad_norm_(model.parameters(), **arguments)


def clip_twice(model: nn.Module, _step: int) -> Tensor:
    first = clip_grad_norm_(model.parameters(), 0.5)
    return torch.stack([first, clip_grad_norm_(model.parameters(), 0.1)])


def total_norm_then_scale(model: nn.Module, _step: int) -> Tensor:
    norm = get_total_norm(grads(model))
    clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
    return norm


def scaled_then_clipped(model: nn.Module, _step: int) -> Tensor:
    for grad in grads(model):
        grad.mul_(0.3).mul_(0.7)
    return clip_grad_norm_(model.parameters(), MAX_NORM)


def augmented(model: nn.Module, step: int) -> None:
    source = generator(step)
    for p in model.parameters():
        p.grad *= 0.01
        p.grad += 0.01 * torch.randn(p.grad.shape, generator=source)


def masked(model: nn.Module, step: int) -> None:
    source = generator(step)
    for grad in grads(model):
        grad.mul_(torch.rand(grad.shape, generator=source) < 0.3)


def noise(model: nn.Module, step: int) -> None:
    source = generator(step)
    for grad in grads(model):
        grad.add_(torch.randn(grad.shape, generator=source), alpha=0.01)


def rows_written_through_a_view(model: nn.Module, _step: int) -> None:
    weight = model.get_parameter("emb.weight")
    weight.grad[:5] = 0.0
    weight.grad.view(-1)[-3:] = 0.25
    model.get_parameter("blocks.2.down.weight").grad[1].fill_(0.125)


def multiplied_in_a_list(model: nn.Module, _step: int) -> Tensor:
    torch._foreach_mul_(grads(model), 0.01)
    return torch.stack(torch._foreach_norm(grads(model)))


@torch.no_grad()
def decayed_by_hand(model: nn.Module, _step: int) -> None:
    for p in model.parameters():
        p.grad.add_(p, alpha=0.1)


def data_assigned(model: nn.Module, _step: int) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data.sign() * 1e-3


def dropped_for_some(model: nn.Module, step: int) -> None:
    """torch leaves such a parameter alone, its decay and its count of steps too."""
    if step % 2:
        for p in model.get_submodule("blocks.1").parameters():
            p.grad = None
        model.get_parameter("blocks.2.up.bias").grad = None


def dropped_for_all(model: nn.Module, step: int) -> None:
    if step % 3 == 1:
        for p in model.parameters():
            p.grad = None


def deleted(model: nn.Module, _step: int) -> None:
    del model.get_parameter("blocks.0.up.weight").grad


def zeroed(model: nn.Module, step: int) -> None:
    """Zero is not None: the moments decay and so does the weight."""
    if step % 2:
        for p in model.get_submodule("blocks.1").parameters():
            p.grad.zero_()


def kept_and_put_back(model: nn.Module, step: int) -> None:
    """Two backwards whose gradients are held apart, then combined."""
    first = [p.grad.detach().clone() for p in model.parameters()]
    model.zero_grad()
    model(tokens(1000 + step)).backward()
    for p, other in zip(model.parameters(), first, strict=True):
        p.grad = torch.where(p.grad * other > 0, p.grad + other, torch.zeros_like(other))


def all_finite(model: nn.Module, _step: int) -> Tensor:
    assert all(torch.isfinite(grad).all() for grad in grads(model))
    return torch.tensor([bool(torch.isnan(grad).any()) for grad in grads(model)])


def numbers(grad: Tensor) -> Tensor:
    return torch.tensor([grad.sum().item(), grad.view(-1)[0].item(), grad.float().std().item()])


def signal_to_noise(model: nn.Module, step: int) -> Tensor:
    """Gradients of two batches compared, read while both are added up."""
    first = [p.grad.clone() for p in model.parameters()]
    model(tokens(1000 + step)).backward()
    pairs = zip(model.parameters(), first, strict=True)
    return torch.stack([torch.dot((p.grad - one).flatten(), one.flatten()) for p, one in pairs])


def read_after_step(wrap: Wrap) -> Result:
    """Logged after step() and before zero_grad()."""
    return train(*start(wrap), clips=True, after=stacked(lambda grad: grad.norm()))


EDITS: dict[str, Visit] = {
    "clip_grad_norm_": clip(),
    "clip_grad_norm_ by the largest": clip(max_norm=0.01, norm_type=float("inf")),
    "clip_grad_norm_ by the sum, one by one": clip(max_norm=1.0, norm_type=1.0, foreach=False),
    "clip_grad_norm_ one by one": clip(foreach=False, error_if_nonfinite=True),
    "clip_grad_norm_ of the whole list": clip(foreach=True),
    "clip_grad_norm_ of every layer": lambda model, _: torch.stack(
        [clip_grad_norm_(child.parameters(), 0.05) for child in model.children()]
    ),
    "clip_grad_norm_ of one parameter": lambda model, _: clip_grad_norm_(
        model.get_parameter("blocks.1.up.weight"), 0.01
    ),
    "clip_grad_norm_ twice": clip_twice,
    "clip_grad_norm_ after scaling": scaled_then_clipped,
    "get_total_norm": lambda model, _: get_total_norm(grads(model)),
    "get_total_norm, then clipped with it": total_norm_then_scale,
    "clip_grad_value_": lambda model, _: clip_grad_value_(model.parameters(), 1e-3),
    "mul_ twice": each(lambda grad: grad.mul_(0.03).mul_(0.7)),
    "powers of two": each(lambda grad: grad.mul_(8).div_(2).mul_(0.003)),
    "div_": each(lambda grad: grad.div_(3 * torch.tensor(30.0))),
    "data.mul_": each(lambda grad: grad.data.mul_(0.01)),
    "clamp_": each(lambda grad: grad.clamp_(-1e-3, 1e-3)),
    "copy_": each(lambda grad: grad.copy_(grad.sign() * 1e-3)),
    "add_ of its own sign": each(lambda grad: grad.add_(grad.sign(), alpha=0.01)),
    "nan_to_num_": each(lambda grad: torch.nan_to_num_(grad, nan=0.0).mul_(0.01)),
    "every second row zeroed": each(lambda grad: grad[::2].zero_()),
    "centralized": each(lambda grad: grad.sub_(grad.mean(dim=-1, keepdim=True))),
    "*= and +=": augmented,
    "mul_ by a mask": masked,
    "noise": noise,
    "rows written through a view": rows_written_through_a_view,
    "_foreach_mul_": multiplied_in_a_list,
    "decayed by hand": decayed_by_hand,
    "assigned": assigned(lambda grad, source: torch.randn(grad.shape, generator=source) * 0.01),
    "assigned from itself": assigned(lambda grad, _: grad * 0.5 + 0.001),
    "data assigned": data_assigned,
    "dropped for some": dropped_for_some,
    "dropped for all": dropped_for_all,
    "deleted": deleted,
    "zeroed": zeroed,
    "kept and put back": kept_and_put_back,
    "read: norms": stacked(lambda grad: grad.norm()),
    "read: norms of what is detached": stacked(
        lambda grad: torch.stack([grad.detach().norm(2), grad.data.norm(1), grad.abs().max()])
    ),
    "read: histograms": stacked(lambda grad: torch.histc(grad, bins=7, min=-0.02, max=0.02)),
    "read: all finite": all_finite,
    "read: one vector": lambda model, _: torch.cat([grad.view(-1) for grad in grads(model)]),
    "read: numbers": stacked(numbers),
    "read: numpy": stacked(lambda grad: torch.tensor(float((grad.cpu().numpy() ** 2).sum()))),
    "read: signal to noise": signal_to_noise,
}
SCRIPTS: dict[str, Script] = {
    **{name: edited(edit) for name, edit in EDITS.items()},
    "read: after the step": read_after_step,
}
