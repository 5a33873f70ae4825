"""The plain form on a small model, and plain torch beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from tests.support.tiny import TinyModel, settings, tokens
from tests.support.training import PLACEMENTS

# Homes of gradients: the device, the host, and all three.
ALL_PLACEMENTS = ("resident", "host", "mixed")
# Losses in fp32, where both sides do the same operations but for the order in which squares are summed up.
TOLERANCE = 2e-6


def make_model() -> TinyModel:
    torch.manual_seed(1)
    return TinyModel(width=16, num_blocks=4)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )


def plain_config(placement: str, directory: Path, **keys: Any) -> dict[str, Any]:
    return settings(
        directory,
        placement=PLACEMENTS.get(placement, placement),
        **{"bf16": None, "optimizer": None, **keys},
    )


@contextmanager
def offloaded(
    placement: str, directory: Path, **keys: Any
) -> Iterator[tuple[TinyModel, offloadzero.OffloadedOptimizer]]:
    model = make_model()
    _, optimizer = offloadzero.offload(
        model, make_optimizer(model), plain_config(placement, directory, **keys)
    )
    try:
        yield model, optimizer
    finally:
        optimizer.close()


Script = Callable[[Any, Any], list[float]]  # (model, optimizer) -> numbers that it has seen


def expect_as_torch(
    script: Script,
    placement: str,
    directory: Path,
    *,
    make: Callable[[], nn.Module] = make_model,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer,
    prepare: Callable[[nn.Module], Any] = lambda _: None,
    before: bool = True,
    seen: Mapping[str, float] = MappingProxyType({"rel": 1e-5}),
    weights: Mapping[str, float] = MappingProxyType({}),
    **keys: Any,
) -> None:
    """What the script sees, and the weights that it leaves, are those of torch alone.

    `prepare(model)` is called before offload() or after it. `seen` and `weights` are tolerances of pytest.approx and of
    torch.testing.assert_close.
    """
    plain = make()
    prepare(plain)
    expected = script(plain, make_optimizer(plain))
    model = make()
    if before:
        prepare(model)
    _, optimizer = offloadzero.offload(
        model, make_optimizer(model), plain_config(placement, directory, **keys)
    )
    try:
        if not before:
            prepare(model)
        assert script(model, optimizer) == pytest.approx(expected, **seen)
        torch.testing.assert_close(final_weights(model), final_weights(plain), **weights)
    finally:
        optimizer.close()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain_steps(model: Any, optimizer: Any, seeds: Iterable[int], **batch: int) -> list[float]:
    """The losses of a plain loop."""
    losses = []
    for seed in seeds:
        loss = model(tokens(seed, **batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def named_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def clip(model: nn.Module, **options: Any) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)


def final_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def engine_config(placement: str, directory: Path, **keys: Any) -> dict[str, Any]:
    params = {"lr": 1e-2, "weight_decay": 0.1}
    return settings(
        directory,
        placement=PLACEMENTS[placement],
        **{"bf16": None, "optimizer": {"type": "AdamW", "params": params}, **keys},
    )
