"""Scripts that replace parameters or modules after offloading, or compile the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from tests.scripts.common import (
    LM,
    Block,
    Result,
    Script,
    Wrap,
    adamw,
    start,
    train,
    weights_of,
)

MAY_BE_REFUSED: dict[str, tuple[Script, str]] = {}


def may_be_refused(words: str) -> Callable[[Script], Script]:
    """What torch takes and we may refuse, at that line, with a message that `words` (a pattern) is found in."""

    def register(function: Script) -> Script:
        MAY_BE_REFUSED[function.__name__] = (function, words)
        return function

    return register


@may_be_refused("assign|replaced")
def state_dict_assigned(wrap: Wrap) -> Result:
    """load_state_dict(assign=True) makes new parameters: torch's optimizer goes on with the old ones."""
    model, optimizer = start(wrap)
    saved = weights_of(model)

    def visit(model: nn.Module, step: int) -> None:
        if step == 4:
            model.load_state_dict(saved, assign=True)

    return train(model, optimizer, after=visit)


@may_be_refused("head")
def head_replaced(wrap: Wrap) -> Result:
    """A new head after offloading; the optimizer does not have it."""
    model, optimizer = start(wrap)
    torch.manual_seed(3)
    model.head = nn.Linear(24, 61, bias=False)
    return train(model, optimizer)


@may_be_refused("blocks")
def block_appended(wrap: Wrap) -> Result:
    """Another block after offloading."""
    model, optimizer = start(wrap)
    torch.manual_seed(3)
    model.blocks.append(Block())
    return train(model, optimizer)


@may_be_refused("bias")
def parameter_replaced(wrap: Wrap) -> Result:
    model, optimizer = start(wrap)
    model.blocks[1].up.bias = nn.Parameter(torch.full((49,), 0.1))
    return train(model, optimizer)


@may_be_refused("float64|double|dtype")
def model_in_double(wrap: Wrap) -> Result:
    """model.double() after offloading."""
    model, optimizer = start(wrap)
    return train(model.double(), optimizer)


@may_be_refused("weight")
def pruned_by_torch(wrap: Wrap) -> Result:
    """torch.nn.utils.prune after offloading."""
    model, optimizer = start(wrap)
    prune.l1_unstructured(model.blocks[1].up, "weight", amount=0.3)
    return train(model, optimizer)


@may_be_refused("weight")
def weight_norm_after_offloading(wrap: Wrap) -> Result:
    model, optimizer = start(wrap)
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)
    return train(model, optimizer)


@may_be_refused("weight")
def numpy_written(wrap: Wrap) -> Result:
    """Through the memory that numpy shares with a detached parameter."""

    def visit(model: nn.Module, step: int) -> None:  # noqa: ARG001
        model.blocks[1].up.weight.detach().numpy()[0] = 0.25

    return train(*start(wrap), after=visit)


# --- torch.compile ---


def compiled(how: str, *, before: bool) -> Script:
    """torch.compile of the model, of its blocks in the list, or of blocks in place; aot_eager compiles quickly."""

    def compile_(model: Any) -> Any:
        if how == "model":
            return torch.compile(model, backend="aot_eager")
        if how == "model in place":
            model.compile(backend="aot_eager")
        elif how == "blocks in place":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        elif how == "list of compiled blocks":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = torch.compile(block, backend="aot_eager")
        else:
            model.blocks = nn.ModuleList(torch.compile(b, backend="aot_eager") for b in model.blocks)
        return model

    def run(wrap: Wrap) -> Result:
        torch._dynamo.reset()
        made: Any = LM()
        if before:
            made = compile_(made)
        model, optimizer = wrap(made, adamw(made))
        if not before:
            model = compile_(model)
        result = train(model, optimizer)
        weights = {name.replace("_orig_mod.", ""): value for name, value in result.weights.items()}
        return Result(result.losses, [], weights)

    return run


COMPILED: dict[str, Script] = {
    f"{how}, {'before' if before else 'after'} offloading": compiled(how, before=before)
    for how in (
        "model",
        "model in place",
        "blocks in place",
        "list of compiled blocks",
        "new list of compiled blocks",
    )
    for before in (True, False)
}
