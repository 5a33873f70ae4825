"""Backwards for the gradients of parameters that are away: torch.autograd.grad() and backward(inputs=...)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from offloadzero.core.torch_private import DisableTorchFunctionSubclass


def run_backward(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    away: tuple[type[torch.Tensor], ...],
) -> Any:
    """Run `torch.autograd.grad` or `torch.autograd.backward`, among whose tensors are some of the classes `away`.

    Hooks, Functions and recomputations of the script's run inside and read weights, so torch functions must be on
    there. The inputs are therefore given by their places in the graph, which no torch function answers for.
    """
    of_grad = func is torch.autograd.grad
    inputs = args[1] if of_grad else keywords.get("inputs") or ()
    with DisableTorchFunctionSubclass():
        tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
        has_places = all(one.requires_grad and (of_grad or one.is_leaf) for one in tensors)
        if not has_places or any(isinstance(one, away) for one in args[0]):
            return func(*args, **keywords)  # most of these are errors of torch's
        places = tuple(get_gradient_edge(one) if isinstance(one, away) else one for one in inputs)
    if not of_grad:
        return func(*args, **{**keywords, "inputs": places})
    if not keywords.get("materialize_grads"):
        return func(args[0], places, *args[2:], **keywords)
    found = func(args[0], places, *args[2:], **{**keywords, "allow_unused": True, "materialize_grads": False})
    in_graph = bool(keywords.get("create_graph"))
    return tuple(
        torch.zeros_like(one, requires_grad=in_graph) if grad is None else grad
        for one, grad in zip(inputs, found, strict=True)
    )
