"""Training loops and awkward models that tests of streaming share, and the comparison of their runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import models
from tests.support.cases import IN_FULL
from tests.support.models import Stack, TiedLM, features, tokens
from tests.support.training import (
    Loop,
    Outcome,
    assert_same,
    make_config,
    run_engine,
    run_plain,
    worst_relative_difference,
)

NUM_STEPS = 4 if IN_FULL else 3


def steps(
    forward: Callable[[Any, int], Tensor],
    num_steps: int = NUM_STEPS,
    *,
    between: Callable[[Any, int], list[float]] = lambda *_: [],
    after: Callable[[Any, int], list[float]] = lambda *_: [],
) -> Loop:
    """Forward, `between`, backward, step, `after`: what the two give is compared as the losses are."""

    def loop(engine: Any) -> list[float]:
        seen = []
        for seed in range(num_steps):
            loss = forward(engine, seed)
            seen += between(engine, seed)
            engine.backward(loss)
            engine.step()
            seen += [loss.item(), *after(engine, seed)]
        return seen

    return loop


def take_inputs(make_input: Callable[[int], Tensor], num_steps: int = NUM_STEPS) -> Loop:
    """The plain training loop over `make_input(0)`, `make_input(1)`, ..."""
    return steps(lambda engine, seed: engine(make_input(seed)), num_steps)


def check_everywhere(
    make_model: Callable[[], nn.Module],
    loop: Loop,
    directory: Path,
    *,
    placements: tuple[str, ...] = ("nvme", "host"),
    dtypes: tuple[str | None, ...] = ("bf16", None),
    tolerance: float = 2e-5,
    **options: Any,
) -> Outcome:
    """Bitwise equal in every dtype and near plain torch in fp32, if that is the last; gives the last outcome.

    The placements take turns: each is compared in one of the dtypes, or in all of them in the full runs.
    """
    reference = Outcome([], {}, {})
    for turn, dtype in enumerate(dtypes):
        reference = run_engine(make_model, loop, make_config("resident", directory, dtype=dtype, **options))
        for placement in placements if IN_FULL else placements[turn :: len(dtypes)]:
            config = make_config(placement, directory, dtype=dtype, **options)
            assert_same(run_engine(make_model, loop, config), reference)
    if dtypes[-1] is not None:
        return reference
    expected = run_plain(make_model, loop, make_config("resident", directory, dtype=None, **options))
    assert worst_relative_difference(reference.losses, expected.losses) < tolerance
    for name, value in expected.weights.items():
        torch.testing.assert_close(reference.weights[name], value, rtol=1e-4, atol=1e-5)
    return reference


LIVE = {"zero_optimization": {"stage3_max_live_parameters": 12_000}}  # two or three units
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[str, Any]]] = {
    "plain blocks": (Stack, features, {}),
    "tied head": (TiedLM, tokens, {}),
    "functional head": (models.FunctionalHeadLM, tokens, {}),
    "shared reader": (models.SharedReader, features, LIVE),
    "checkpointing": (models.CheckpointedStack, features, {}),
    "checkpointing inside": (lambda: Stack(models.InnerCheckpointBlock), features, {}),
    "lora": (lambda: Stack(models.LoraBlock), features, {}),
    "frozen middle": (models.FrozenMiddle, features, {}),
    "frozen front": (models.FrozenFront, features, {}),
    "unused parameters": (models.WithUnusedBlock, features, {}),
    "blocks used twice": (models.SharedBlocks, features, {}),
    "structured outputs": (models.StructuredStack, features, {}),
    "outputs without gradient": (models.NoGradOutputs, features, {}),
    "odd sizes": (models.OddSizes, features, {}),
    "torch's transformer": (models.TorchTransformer, tokens, {}),
}
