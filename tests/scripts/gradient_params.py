"""Scripts with hooks on gradients, and such that choose which parameters train, which we may refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.scripts.common import (
    LM,
    LR,
    MAX_NORM,
    NUM_STEPS,
    Result,
    Script,
    Wrap,
    adamw,
    generator,
    registering,
    start,
    tokens,
    train,
    weights_of,
)

SCRIPTS: dict[str, Script] = {}
script = registering(SCRIPTS)


# --- hooks ---


def with_tensor_hooks(*, before: bool) -> Script:
    """p.register_hook scales and clips gradients as they appear, since before the model is handed over or after."""

    def hook_all(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(lambda grad: (0.1 * grad).clamp(-1e-3, 1e-3))

    def run(wrap: Wrap) -> Result:
        made = LM()
        if before:
            hook_all(made)
        model, optimizer = start(wrap, made)
        if not before:
            hook_all(model)
        return train(model, optimizer, clips=True)

    return run


def with_hooks(edit: Callable[[Tensor], Any]) -> Script:
    """A hook sees p.grad, added up over two micro batches, and may change it."""

    def run(wrap: Wrap) -> Result:
        model, optimizer = start(wrap)
        seen: dict[str, Tensor] = {}
        for name, p in model.named_parameters():

            def hook(param: Tensor, name: str = name) -> None:
                seen[name] = param.grad.norm()
                edit(param.grad)

            p.register_post_accumulate_grad_hook(hook)
        result = train(model, optimizer, num_micro=2, clips=True)
        return Result(result.losses, result.grad_norms, result.weights, {**seen})

    return run


SCRIPTS |= {
    "tensor hooks": with_tensor_hooks(before=False),
    "tensor hooks from before": with_tensor_hooks(before=True),
    "hooks that scale": with_hooks(lambda grad: grad.mul_(0.5)),
    "hooks that clamp": with_hooks(lambda grad: grad.clamp_(-0.05, 0.05)),
    "hooks that read": with_hooks(lambda grad: grad.div_(grad.norm() + 1)),
}


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
    result = train(model, optimizer, clips=True)
    return Result(result.losses, norms, result.weights)


class StoppedError(Exception):
    """Raised by a hook."""


def with_hook_that_raises(*, clips: bool) -> Script:
    """Backward ends in the middle; the script drops what there is, by the optimizer or the model, and goes on."""

    def run(wrap: Wrap) -> Result:
        model, optimizer = start(wrap)
        armed = False

        def hook(_: Tensor) -> None:
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
                if clips:
                    norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
                optimizer.step()
            except StoppedError:
                pass
            (optimizer if clips else model).zero_grad()
        return Result(losses, norms, weights_of(model))

    return run


SCRIPTS |= {
    "hook_that_raises": with_hook_that_raises(clips=True),
    "hook_that_raises_unclipped": with_hook_that_raises(clips=False),
}


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
    def before(model: nn.Module, step: int) -> None:
        model.use_branch = step % 2 == 0

    def edit(model: nn.Module, step: int) -> None:
        assert model.never.weight.grad is None
        assert (model.branch.weight.grad is None) == (step % 2 == 1)

    return train(*start(wrap, WithUnused()), before=before, edit=edit, clips=True)


@script
def tied_parameters(wrap: Wrap) -> Result:
    return train(*start(wrap, LM(tied=True)), clips=True)


def _train(params: Iterable[nn.Parameter], flag: bool) -> None:
    for p in params:
        p.requires_grad_(flag)


def unfreeze_first(model: nn.Module, step: int) -> None:
    if step == 3:
        _train(model.blocks[0].parameters(), True)


@script
def frozen_for_some_steps(wrap: Wrap) -> Result:
    """Trained, frozen from step 1, unfrozen at step 3: its moments and its count of steps wait."""
    model, optimizer = start(wrap)

    def at_step(model: nn.Module, step: int) -> None:
        if step in (1, 3):
            _train(model.blocks[1].parameters(), step == 3)
            _train(model.emb.parameters(), step == 3)

    return train(model, optimizer, before=at_step, clips=True)


@script
def groups_of_different_rates(wrap: Wrap) -> Result:
    made = LM()
    decayed = [p for p in made.parameters() if p.dim() > 1]
    others = [p for p in made.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-4)
    return train(*wrap(made, optimizer), clips=True)


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

    def at_step(model: nn.Module, step: int) -> None:
        if step == 3:
            _train(model.blocks[0].parameters(), True)
            optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 1e-2})

    return train(model, optimizer, before=at_step, clips=True)


@may_be_refused("blocks.0")
def unfrozen_without_optimizer(wrap: Wrap) -> Result:
    """Unfrozen later and in no group: torch gives it a gradient and trains it not. A word must be said."""
    made = LM()
    _train(made.blocks[0].parameters(), False)
    model, optimizer = start(wrap, made)
    return train(model, optimizer, before=unfreeze_first, clips=True)


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
    result = train(model, optimizer, clips=True)
    notes = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    return Result(result.losses, result.grad_norms, result.weights, notes)


@may_be_refused("state")
def optimizer_state_reset(wrap: Wrap) -> Result:
    """Moments cleared by hand in the middle."""
    model, optimizer = start(wrap)

    def at_step(_model: nn.Module, step: int) -> None:
        if step == 4:
            optimizer.state.clear()

    return train(model, optimizer, before=at_step, clips=True)


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
    return train(model, optimizer, before=unfreeze_first, clips=True)
