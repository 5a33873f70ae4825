"""Stacks with torch's AdamW for tests of their weights, and steps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.models import Stack, features


def build(make_model: Callable[[], nn.Module] = Stack) -> nn.Module:
    torch.manual_seed(5)
    return make_model()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def step(model: nn.Module, optimizer: Any, seed: int) -> float:
    loss = model(features(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def assert_same_weights(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    expected = dict(reference.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))
