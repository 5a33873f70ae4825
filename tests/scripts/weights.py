"""Scripts that read and write weights between steps, in penalties and for evaluation.

None touches a gradient: that is the business of `gradients`. Each way to one weight is in the access table of
tests/access; here a script goes that way over a whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.scripts.common import (
    LM,
    NUM_STEPS,
    Result,
    Script,
    Visit,
    Wrap,
    adamw,
    generator,
    loss_of,
    registering,
    start,
    tokens,
    train,
    weights_of,
)

SCRIPTS: dict[str, Script] = {}
script = registering(SCRIPTS)


def after_step(visit: Visit) -> Script:
    """The loop with `visit` right after step()."""
    SCRIPTS[visit.__name__] = lambda wrap: train(*start(wrap), after=visit)
    return SCRIPTS[visit.__name__]


def all_written(write: Callable[[nn.Parameter, torch.Generator], Any]) -> Script:
    """Every parameter is written right after step()."""

    def visit(model: nn.Module, step: int) -> None:
        source = generator(step)
        for p in model.parameters():
            write(p, source)

    return lambda wrap: train(*start(wrap), after=visit)


def with_penalty(penalty: Callable[[nn.Module], Tensor]) -> Script:
    """A term is added to the loss."""
    return lambda wrap: train(*start(wrap), loss_of=lambda model, step: loss_of(model, step) + penalty(model))


# --- reads ---


@after_step
def norms_after_step(model: nn.Module, _step: int) -> Any:
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return torch.stack([p.norm() + p.data.norm(2) for p in model.parameters()])


@after_step
def numbers_after_step(model: nn.Module, _step: int) -> Any:
    rows = [
        (p.mean().item(), p.view(-1)[-1].item(), float(p.detach().cpu().numpy().sum()))
        for p in model.parameters()
    ]
    return torch.tensor(rows)


@after_step
def evaluated(model: nn.Module, step: int) -> Any:
    """eval(), no_grad, inference_mode, train()."""
    model.eval()
    with torch.no_grad():
        one = model(tokens(700 + step))
    with torch.inference_mode():
        other = model(tokens(800 + step))
    model.train()
    return torch.tensor([one.item(), other.item()])


@after_step
def evaluated_with_other_weights(model: nn.Module, step: int) -> Any:
    """functional_call with weights scaled by hand."""
    scaled = {name: 0.9 * p.detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        return functional_call(model, scaled, (tokens(900 + step),))


@script
def polyak_target(wrap: Wrap) -> Result:
    """A target network follows the model, as in reinforcement learning, and gives the labels."""
    made = LM()
    target = copy.deepcopy(made).requires_grad_(False)
    model, optimizer = wrap(made, adamw(made))
    losses = []
    for step in range(NUM_STEPS):
        ids = tokens(step)
        with torch.no_grad():
            wanted = target.hidden(ids)
        loss = model(ids) + F.mse_loss(model.hidden(ids), wanted)
        loss.backward()
        optimizer.step()
        for theirs, ours in zip(target.parameters(), model.parameters(), strict=True):
            theirs.data.copy_(0.5 * theirs.data + 0.5 * ours.data)
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model), weights_of(target))


@script
def ema_foreach(wrap: Wrap) -> Result:
    """torch._foreach_lerp_ over all parameters."""
    model, optimizer = start(wrap)
    average = [p.detach().clone() for p in model.parameters()]

    def follow(model: nn.Module, _step: int) -> None:
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)

    result = train(model, optimizer, after=follow)
    return Result(result.losses, [], result.weights, {str(i): value for i, value in enumerate(average)})


# --- writes ---


@torch.no_grad()
def clamped(p: nn.Parameter, _: torch.Generator) -> None:
    p.clamp_(-0.1, 0.1)


def noise_by_plus_equals(p: nn.Parameter, source: torch.Generator) -> None:
    p.data += 0.01 * torch.randn(p.shape, generator=source)


def data_assigned(p: nn.Parameter, _: torch.Generator) -> None:
    p.data = p.data * 0.98


SCRIPTS |= {
    "clamped": all_written(clamped),
    "noise by data +=": all_written(noise_by_plus_equals),
    "data assigned": all_written(data_assigned),
}


@after_step
@torch.no_grad()
def written_in_lists(model: nn.Module, _step: int) -> None:
    torch._foreach_clamp_min_(list(model.parameters()), -0.1)
    torch._foreach_mul_(list(model.parameters()), 0.99)


@after_step
def rows_normalised(model: nn.Module, _step: int) -> None:
    model.emb.weight.data = F.normalize(model.emb.weight.data, dim=1)
    model.head.weight.data.renorm_(2, 0, 0.5)


@after_step
def padding_row_zeroed(model: nn.Module, _step: int) -> None:
    model.emb.weight.data[0].zero_()
    with torch.no_grad():
        model.emb.weight[1] = 0.25
        model.blocks[0].up.weight[:, 3].fill_(0.5)
        model.blocks[2].down.weight.view(-1)[5] = -0.5


@script
def pruned_by_masks(wrap: Wrap) -> Result:
    model, optimizer = start(wrap)
    masks = {name: (p.detach().abs() > 0.05).float() for name, p in model.named_parameters() if p.dim() > 1}

    def mask_weights(model: nn.Module, _step: int) -> None:
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)

    return train(model, optimizer, after=mask_weights)


@script
def initialised_after_offloading(wrap: Wrap) -> Result:
    """model.apply(init), as the constructors of older code do at the end."""
    model, optimizer = start(wrap)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.01)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)

    torch.manual_seed(5)
    model.apply(init)
    return train(model, optimizer)


@script
def reset_parameters_in_the_middle(wrap: Wrap) -> Result:
    def before(model: nn.Module, step: int) -> None:
        if step == 3:
            torch.manual_seed(6)
            model.head.reset_parameters()
            model.blocks[1].down.reset_parameters()

    return train(*start(wrap), before=before)


@script
def rolled_back(wrap: Wrap) -> Result:
    """load_state_dict of an earlier state."""
    model, optimizer = start(wrap)
    saved = weights_of(model)

    def visit(model: nn.Module, step: int) -> None:
        if step == 4:
            model.load_state_dict(saved)

    return train(model, optimizer, after=visit)


@script
def line_search_by_vector(wrap: Wrap) -> Result:
    """Two candidates along a direction are tried with vector_to_parameters; the better one stays."""

    def visit(model: nn.Module, step: int) -> Tensor:
        here = parameters_to_vector(model.parameters()).detach().clone()
        direction = torch.randn(here.shape, generator=generator(step)) * 0.01
        found = []
        with torch.no_grad():
            for factor in (-1.0, 1.0):
                vector_to_parameters(here + factor * direction, model.parameters())
                found.append(model(tokens(600 + step)))
            best = -1.0 if found[0] < found[1] else 1.0
            vector_to_parameters(here + best * direction, model.parameters())
        return torch.stack(found)

    return train(*start(wrap), after=visit)


@script
def lookahead(wrap: Wrap) -> Result:
    """Slow weights: every third step the fast ones go back half way."""
    model, optimizer = start(wrap)
    slow = [p.detach().clone() for p in model.parameters()]

    def visit(model: nn.Module, step: int) -> None:
        if step % 3 == 2:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)

    return train(model, optimizer, after=visit)


def swapped(swap: Callable[[nn.Module, list[Tensor]], list[Tensor]]) -> Script:
    """Every second step the average's weights are put in, evaluated, and the trained ones put back."""

    def run(wrap: Wrap) -> Result:
        model, optimizer = start(wrap)
        average = [p.detach().clone() for p in model.parameters()]

        def visit(model: nn.Module, step: int) -> Tensor | None:
            with torch.no_grad():
                for a, p in zip(average, model.parameters(), strict=True):
                    a.lerp_(p, 0.2)
                if step % 2:
                    return None
                kept = swap(model, average)
                loss = model(tokens(400 + step))
                swap(model, kept)
            return loss

        return train(model, optimizer, after=visit)

    return run


def _swap_by_copy(model: nn.Module, others: list[Tensor]) -> list[Tensor]:
    kept = [p.detach().clone() for p in model.parameters()]
    for p, other in zip(model.parameters(), others, strict=True):
        p.data.copy_(other)
    return kept


def _swap_by_assignment(model: nn.Module, others: list[Tensor]) -> list[Tensor]:
    kept = []
    for p, other in zip(model.parameters(), others, strict=True):
        kept.append(p.data.clone())
        p.data = other.clone()
    return kept


def _swap_by_exchange(model: nn.Module, others: list[Tensor]) -> list[Tensor]:
    """Without a copy: the tensors themselves change places."""
    kept = []
    for p, other in zip(model.parameters(), others, strict=True):
        kept.append(p.data)
        p.data = other
    return kept


SCRIPTS |= {
    "average_swapped_by_copy": swapped(_swap_by_copy),
    "average_swapped_by_assignment": swapped(_swap_by_assignment),
    "average_swapped_by_exchange": swapped(_swap_by_exchange),
}


@script
def weight_noise_around_backward(wrap: Wrap) -> Result:
    """Noise is added before the forward and taken off after backward."""

    def add(model: nn.Module, step: int, sign: int = 1) -> None:
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, generator=generator(step)), alpha=0.01 * sign)

    return train(*start(wrap), before=add, edit=lambda model, step: add(model, step, -1))


@script
def data_kept_over_steps(wrap: Wrap) -> Result:
    """`p.data` taken once and written in every step: an old idiom of weight clipping."""
    model, optimizer = start(wrap)
    held = [p.data for p in model.parameters()]

    def visit(_model: nn.Module, _step: int) -> None:
        for data in held:
            data.clamp_(-0.1, 0.1)

    return train(model, optimizer, after=visit)


# --- penalties ---


SCRIPTS |= {
    "l1 of all": with_penalty(lambda model: 1e-3 * sum(p.abs().sum() for p in model.parameters())),
    "l2 by a vector": with_penalty(
        lambda model: 1e-2 * parameters_to_vector(model.parameters()).pow(2).sum()
    ),
    "norms": with_penalty(
        lambda model: sum(torch.linalg.vector_norm(p) + F.softplus(p).mean() for p in model.parameters())
    ),
}


@script
def elastic_weight_consolidation(wrap: Wrap) -> Result:
    """Pulled to where the model began, by the weights' own importance."""
    made = LM()
    began = {name: p.detach().clone() for name, p in made.named_parameters()}

    def pull(model: nn.Module) -> Tensor:
        return 5 * sum(((p - began[name]) ** 2).sum() for name, p in model.named_parameters())

    return train(*start(wrap, made), loss_of=lambda model, step: loss_of(model, step) + pull(model))


@script
def penalty_before_the_forward(wrap: Wrap) -> Result:
    """The term is computed first, its graph used after the model's."""

    def term_and_loss(model: nn.Module, step: int) -> Tensor:
        term = 1e-3 * sum(p.abs().sum() for p in model.parameters())
        return term + loss_of(model, step)

    return train(*start(wrap), loss_of=term_and_loss)


@script
def penalty_with_its_own_backward(wrap: Wrap) -> Result:
    def edit(model: nn.Module, _step: int) -> None:
        (1e-2 * sum(p.pow(2).sum() for p in model.parameters())).backward()

    return train(*start(wrap), edit=edit)


@script
def other_weights_through_functional_call(wrap: Wrap) -> Result:
    """The loss at weights that are a differentiable function of the model's."""

    def at_shrunk(model: nn.Module, step: int) -> Tensor:
        shrunk = {name: 0.9 * p for name, p in model.named_parameters()}
        return functional_call(model, shrunk, (tokens(step),))  # type: ignore[no-any-return]

    return train(*start(wrap), loss_of=at_shrunk)


# --- reparametrised modules, norms with state ---


def reparametrised(register: Callable[[nn.Module], Any]) -> Script:
    def run(wrap: Wrap) -> Result:
        made = LM()
        for block in made.blocks:
            register(block.up)
        return train(*start(wrap, made))

    return run


SCRIPTS |= {
    "weight_norm": reparametrised(nn.utils.parametrizations.weight_norm),
    "spectral_norm": reparametrised(nn.utils.parametrizations.spectral_norm),
}


# --- moves ---


@script
def moved_to_where_it_is(wrap: Wrap) -> Result:
    """model.to("cpu"), .cpu(), .float() change nothing here."""
    model, optimizer = start(wrap)
    model = model.to("cpu").float().cpu()
    return train(model, optimizer)
