"""Scripts that read, edit, replace, drop and accumulate gradients. Each is a plain loop with one idea in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.scripts.common import (
    LM,
    LR,
    MAX_NORM,
    NUM_STEPS,
    Result,
    Script,
    Wrap,
    adamw,
    start,
    tokens,
    weights_of,
)

Edit = Callable[
    [nn.Module, int], Any
]  # between backward and step; what it returns is noted if it is a tensor
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    """Register a script under its name."""
    SCRIPTS[function.__name__] = function
    return function


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


# --- hooks ---


@script
def tensor_hooks(wrap: Wrap) -> Result:
    """p.register_hook scales and clips gradients as they appear."""
    model, optimizer = start(wrap)
    for p in model.parameters():
        p.register_hook(lambda grad: (0.1 * grad).clamp(-1e-3, 1e-3))
    return _loop(model, optimizer)


@script
def tensor_hooks_from_before(wrap: Wrap) -> Result:
    """The hooks are there when the model is handed over."""
    made = LM()
    for p in made.parameters():
        p.register_hook(lambda grad: (0.1 * grad).clamp(-1e-3, 1e-3))
    return _loop(*start(wrap, made))


@script
def post_accumulate_hooks(wrap: Wrap) -> Result:
    """The hook sees p.grad, added up, and may change it."""
    model, optimizer = start(wrap)
    seen: dict[str, Tensor] = {}
    for name, p in model.named_parameters():

        def hook(param: Tensor, name: str = name) -> None:
            seen[name] = param.grad.norm()
            param.grad.mul_(0.01)

        p.register_post_accumulate_grad_hook(hook)
    result = _loop(model, optimizer)
    return Result(result.losses, [], result.weights, {**seen})


@script
def module_backward_hooks(wrap: Wrap) -> Result:
    """register_full_backward_hook logs and scales the gradient that flows on."""
    model, optimizer = start(wrap)
    norms: list[float] = []

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:  # noqa: ARG001
        norms.append(outputs[0].norm().item())
        return tuple(0.5 * grad for grad in inputs)

    for block in model.blocks:
        block.register_full_backward_hook(hook)
    result = _loop(model, optimizer)
    return Result(result.losses, norms, result.weights)


class StoppedError(Exception):
    """Raised by a hook."""


@script
def hook_that_raises(wrap: Wrap) -> Result:
    """Backward ends in the middle; the script drops what there is and goes on."""
    model, optimizer = start(wrap)
    armed = False

    def hook(grad: Tensor) -> None:  # noqa: ARG001
        if armed:
            raise StoppedError

    model.get_parameter("blocks.1.up.weight").register_hook(hook)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        armed = step in (1, 4)
        loss = model(tokens(step))
        losses.append(loss.item())
        try:
            loss.backward()
        except StoppedError:
            optimizer.zero_grad()
            continue
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, norms, weights_of(model))


@script
def hook_that_raises_unclipped(wrap: Wrap) -> Result:
    """The same where nothing is clipped, and model.zero_grad() clears."""
    model, optimizer = start(wrap)
    armed = False

    def hook(grad: Tensor) -> None:  # noqa: ARG001
        if armed:
            raise StoppedError

    model.get_parameter("blocks.1.up.weight").register_hook(hook)
    losses = []
    for step in range(NUM_STEPS):
        armed = step in (1, 4)
        loss = model(tokens(step))
        losses.append(loss.item())
        try:
            loss.backward()
            optimizer.step()
        except StoppedError:
            pass
        model.zero_grad()
    return Result(losses, [], weights_of(model))


@script
def forward_that_raises(wrap: Wrap) -> Result:
    """A forward that fails half way is repeated with another batch."""
    model, optimizer = start(wrap)
    armed = False

    def hook(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001
        if armed:
            raise StoppedError

    model.blocks[1].up.register_forward_pre_hook(hook)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        armed = step in (1, 4)
        try:
            loss = model(tokens(step))
        except StoppedError:
            armed = False
            loss = model(tokens(100 + step))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, norms, weights_of(model))


# --- which parameters train ---


class WithUnused(LM):
    """A branch that is used in every other step only, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(24, 24)
        self.never = nn.Linear(24, 24)
        self.use_branch = True

    def hidden(self, ids: Tensor) -> Tensor:
        h = super().hidden(ids)
        return h + self.branch(h) if self.use_branch else h


@script
def unused_parameters(wrap: Wrap) -> Result:
    model, optimizer = start(wrap, WithUnused())
    losses, norms = [], []
    for step in range(NUM_STEPS):
        model.use_branch = step % 2 == 0
        loss = model(tokens(step))
        loss.backward()
        assert model.never.weight.grad is None
        assert (model.branch.weight.grad is None) == (step % 2 == 1)
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, norms, weights_of(model))


@script
def tied_parameters(wrap: Wrap) -> Result:
    return _loop(*start(wrap, LM(tied=True)))


def _loop(model: nn.Module, optimizer: Any, at_step: Callable[[int], Any] | None = None) -> Result:
    losses, norms = [], []
    for step in range(NUM_STEPS):
        if at_step is not None:
            at_step(step)
        loss = model(tokens(step))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, norms, weights_of(model))


def _train(params: Iterable[nn.Parameter], flag: bool) -> None:
    for p in params:
        p.requires_grad_(flag)


@script
def frozen_for_some_steps(wrap: Wrap) -> Result:
    """Trained, frozen from step 2, unfrozen at step 5: its moments and its count of steps wait."""
    model, optimizer = start(wrap)

    def at_step(step: int) -> None:
        if step in (2, 5):
            _train(model.blocks[1].parameters(), step == 5)
            _train(model.emb.parameters(), step == 5)

    return _loop(model, optimizer, at_step)


@script
def groups_of_different_rates(wrap: Wrap) -> Result:
    made = LM()
    decayed = [p for p in made.parameters() if p.dim() > 1]
    others = [p for p in made.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-4)
    return _loop(*wrap(made, optimizer))


SCRIPTS_THAT_MAY_BE_REFUSED: dict[str, tuple[Script, str]] = {}


def may_be_refused(words: str) -> Callable[[Script], Script]:
    """What torch takes and we may refuse, at that line, with a message that `words` (a pattern) is found in."""

    def register(function: Script) -> Script:
        SCRIPTS_THAT_MAY_BE_REFUSED[function.__name__] = (function, words)
        return function

    return register


@may_be_refused("group")
def added_group(wrap: Wrap) -> Result:
    """add_param_group for parameters that the optimizer did not have."""
    made = LM()
    _train(made.blocks[0].parameters(), False)
    model, optimizer = start(wrap, made)

    def at_step(step: int) -> None:
        if step == 3:
            _train(model.blocks[0].parameters(), True)
            optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 1e-2})

    return _loop(model, optimizer, at_step)


@may_be_refused("blocks.0")
def unfrozen_without_optimizer(wrap: Wrap) -> Result:
    """Unfrozen later and in no group: torch gives it a gradient and trains it not. A word must be said."""
    made = LM()
    _train(made.blocks[0].parameters(), False)
    model, optimizer = start(wrap, made)
    return _loop(
        model, optimizer, lambda step: _train(model.blocks[0].parameters(), True) if step == 3 else None
    )


@may_be_refused("optimizer")
def optimizer_of_a_part(wrap: Wrap) -> Result:
    """The optimizer has the blocks only; the rest has gradients, which count for nothing."""
    made = LM()
    params = list(made.blocks.parameters())
    model, optimizer = wrap(made, torch.optim.AdamW(params, lr=LR, eps=1e-4))
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        clip_grad_norm_(model.blocks.parameters(), MAX_NORM)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@may_be_refused("state")
def optimizer_state_read(wrap: Wrap) -> Result:
    """optimizer.state[p], as loggers read it."""
    model, optimizer = start(wrap)
    result = _loop(model, optimizer)
    notes = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    return Result(result.losses, result.grad_norms, result.weights, notes)


@may_be_refused("state")
def optimizer_state_reset(wrap: Wrap) -> Result:
    """Moments cleared by hand in the middle."""
    model, optimizer = start(wrap)

    def at_step(step: int) -> None:
        if step == 4:
            optimizer.state.clear()

    return _loop(model, optimizer, at_step)


@may_be_refused("backward|create_graph")
def gradient_penalty_on_inputs(wrap: Wrap) -> Result:
    """create_graph=True: a second backward through the first."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        hidden = torch.randn(4, 24, generator=generator(step)).requires_grad_()
        h = hidden
        for block in model.blocks:
            h = block(h)
        loss = model.norm(h).pow(3).mean()
        (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
        total = loss + slope.pow(2).sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return Result(losses, [], weights_of(model))


@may_be_refused("grad")
def gradients_kept_over_zero_grad(wrap: Wrap) -> Result:
    """The gradient itself, no copy, is kept over zero_grad and the next backward, and assigned again."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        first = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        model(tokens(1000 + step)).backward()
        for p, other in zip(model.parameters(), first, strict=True):
            p.grad = other
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@may_be_refused("blocks.0")
def frozen_then_unfrozen(wrap: Wrap) -> Result:
    """Frozen when handed over, but with the optimizer from the start, as torch has it; trains from step 3."""
    made = LM()
    optimizer = adamw(made)
    _train(made.blocks[0].parameters(), False)
    model, optimizer = wrap(made, optimizer)
    return _loop(
        model, optimizer, lambda step: _train(model.blocks[0].parameters(), True) if step == 3 else None
    )
