"""Scripts that read and write weights between steps, in penalties and for evaluation.

None touches a gradient: that is the business of `gradients`.
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

from tests.scripts.common import LM, NUM_STEPS, Result, Script, Wrap, adamw, start, tokens, weights_of

Visit = Callable[[nn.Module, int], Any]  # right after step(); what it returns is noted if it is a tensor
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def train(model: nn.Module, optimizer: Any, visit: Visit | None = None, **hooks: Any) -> Result:
    """Backward, step, `visit`, zero_grad. `hooks`: before(model, step), penalty(model) -> Tensor."""
    losses, notes = [], {}
    for step in range(NUM_STEPS):
        if "before" in hooks:
            hooks["before"](model, step)
        loss = model(tokens(step))
        if "penalty" in hooks:
            loss = loss + hooks["penalty"](model)
        loss.backward()
        optimizer.step()
        if visit is not None:
            seen = visit(model, step)
            if isinstance(seen, Tensor):
                notes[f"step {step}"] = seen.detach().clone()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model), notes)


def after_step(visit: Visit) -> Script:
    """The loop with `visit` right after step()."""
    SCRIPTS[visit.__name__] = lambda wrap: train(*start(wrap), visit)
    return SCRIPTS[visit.__name__]


def before_forward(visit: Visit) -> Script:
    """The loop with `visit` at the begin of each step."""
    SCRIPTS[visit.__name__] = lambda wrap: train(*start(wrap), before=visit)
    return SCRIPTS[visit.__name__]


def penalty(function: Callable[[nn.Module], Tensor]) -> Script:
    """The loop with a term added to the loss."""
    SCRIPTS[function.__name__] = lambda wrap: train(*start(wrap), penalty=function)
    return SCRIPTS[function.__name__]


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


# --- reads ---


@after_step
def norms_after_step(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.stack([p.norm() for p in model.parameters()])


@after_step
def norms_of_data_after_step(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.stack([p.data.norm(2) for _, p in model.named_parameters()])


@after_step
def vector_after_step(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return parameters_to_vector(model.parameters())


@after_step
def numbers_after_step(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    rows = [(p.mean().item(), p.view(-1)[-1].item(), float(p.abs().max())) for p in model.parameters()]
    return torch.tensor(rows)


@after_step
def histograms_after_step(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.stack([torch.histc(p.detach().cpu(), 9, -1.0, 1.0) for p in model.parameters()])


@after_step
def numpy_after_step(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    return torch.tensor([float(p.detach().cpu().numpy().sum()) for p in model.parameters()])


@before_forward
def norms_before_forward(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    assert all(torch.isfinite(p).all() for p in model.parameters())


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

    def follow(model: nn.Module, step: int) -> None:  # noqa: ARG001
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)

    result = train(model, optimizer, follow)
    return Result(result.losses, [], result.weights, {str(i): value for i, value in enumerate(average)})


# --- writes ---


@after_step
def clamped_data(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


@after_step
def clamped_no_grad(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


@after_step
def clamped_one_block(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    with torch.no_grad():
        model.blocks[1].up.weight.clamp_(-0.05, 0.05)


@after_step
def clamped_foreach(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    with torch.no_grad():
        torch._foreach_clamp_min_(list(model.parameters()), -0.1)
        torch._foreach_mul_(list(model.parameters()), 0.99)


@after_step
def decayed_by_hand(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.98)


@after_step
def noise_added(model: nn.Module, step: int) -> Any:
    source = generator(step)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=source), alpha=0.01)


@after_step
def noise_by_data_plus_equals(model: nn.Module, step: int) -> Any:
    source = generator(step)
    for p in model.parameters():
        p.data += 0.01 * torch.randn(p.shape, generator=source)


@after_step
def data_assigned(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    for p in model.parameters():
        p.data = p.data * 0.98


@after_step
def rows_normalised(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    model.emb.weight.data = F.normalize(model.emb.weight.data, dim=1)
    model.head.weight.data.renorm_(2, 0, 0.5)


@after_step
def padding_row_zeroed(model: nn.Module, step: int) -> Any:  # noqa: ARG001
    model.emb.weight.data[0].zero_()
    with torch.no_grad():
        model.emb.weight[1] = 0.25
        model.blocks[0].up.weight[:, 3].fill_(0.5)
        model.blocks[2].down.weight.view(-1)[5] = -0.5


@script
def pruned_by_masks(wrap: Wrap) -> Result:
    model, optimizer = start(wrap)
    masks = {name: (p.detach().abs() > 0.05).float() for name, p in model.named_parameters() if p.dim() > 1}

    def mask_weights(model: nn.Module, step: int) -> None:  # noqa: ARG001
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)

    return train(model, optimizer, mask_weights)


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

    return train(model, optimizer, visit)


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

    return train(*start(wrap), visit)


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

    return train(model, optimizer, visit)


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

        return train(model, optimizer, visit)

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
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        noises = [0.01 * torch.randn(p.shape, generator=generator(step)) for p in model.parameters()]
        for p, noise in zip(model.parameters(), noises, strict=True):
            p.data.add_(noise)
        loss = model(tokens(step))
        loss.backward()
        for p, noise in zip(model.parameters(), noises, strict=True):
            p.data.sub_(noise)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@script
def data_kept_over_steps(wrap: Wrap) -> Result:
    """`p.data` taken once and written in every step: an old idiom of weight clipping."""
    model, optimizer = start(wrap)
    held = [p.data for p in model.parameters()]

    def visit(model: nn.Module, step: int) -> None:  # noqa: ARG001
        for data in held:
            data.clamp_(-0.1, 0.1)

    return train(model, optimizer, visit)


# --- penalties ---


@penalty
def l1_of_all(model: nn.Module) -> Tensor:
    return 1e-3 * sum(p.abs().sum() for p in model.parameters())


@penalty
def l2_of_all(model: nn.Module) -> Tensor:
    return 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


@penalty
def l2_of_some(model: nn.Module) -> Tensor:
    return 0.1 * model.blocks[1].up.weight.square().mean() + model.head.weight.norm()


@penalty
def l2_by_vector(model: nn.Module) -> Tensor:
    return 1e-2 * parameters_to_vector(model.parameters()).pow(2).sum()


@penalty
def orthogonality(model: nn.Module) -> Tensor:
    return sum((b.down.weight @ b.down.weight.T - torch.eye(24)).pow(2).mean() for b in model.blocks)


@penalty
def l2_by_functional_ops(model: nn.Module) -> Tensor:
    return sum(torch.linalg.vector_norm(p) + F.softplus(p).mean() for p in model.parameters())


@script
def elastic_weight_consolidation(wrap: Wrap) -> Result:
    """Pulled to where the model began, by the weights' own importance."""
    model, optimizer = start(wrap)
    began = {name: p.detach().clone() for name, p in model.named_parameters()}

    def pull(model: nn.Module) -> Tensor:
        return 5 * sum(((p - began[name]) ** 2).sum() for name, p in model.named_parameters())

    return train(model, optimizer, penalty=pull)


@script
def penalty_before_the_forward(wrap: Wrap) -> Result:
    """The term is computed first, its graph used after the model's."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        term = 1e-3 * sum(p.abs().sum() for p in model.parameters())
        loss = model(tokens(step))
        (term + loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@script
def penalty_with_its_own_backward(wrap: Wrap) -> Result:
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        (1e-2 * sum(p.pow(2).sum() for p in model.parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


@script
def other_weights_through_functional_call(wrap: Wrap) -> Result:
    """The loss at weights that are a differentiable function of the model's."""
    model, optimizer = start(wrap)
    losses = []
    for step in range(NUM_STEPS):
        shrunk = {name: 0.9 * p for name, p in model.named_parameters()}
        loss = functional_call(model, shrunk, (tokens(step),))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(model))


# --- reparametrised modules, norms with state ---


@script
def weight_norm(wrap: Wrap) -> Result:
    made = LM()
    for block in made.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
    return train(*start(wrap, made))


@script
def spectral_norm(wrap: Wrap) -> Result:
    made = LM()
    for block in made.blocks:
        nn.utils.parametrizations.spectral_norm(block.up)
    return train(*start(wrap, made))


# --- moves ---


@script
def moved_to_where_it_is(wrap: Wrap) -> Result:
    """model.to("cpu"), .cpu(), .float() change nothing here."""
    model, optimizer = start(wrap)
    model = model.to("cpu").float().cpu()
    return train(model, optimizer)
