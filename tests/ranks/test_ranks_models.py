"""Models of transformers over several ranks, against plain torch on their global batch, and bitwise across placements.

A routed model on three ranks, two steps at stage 3; all models, up to four ranks, all stages and twenty steps
with OFFLOADZERO_TEST_RANKS=all.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from tests.scripts import test_models
from tests.support.ranks import run_ranks
from tests.support.sharded import digest, global_losses
from tests.support.training import make_config

NEEDED = importlib.util.find_spec("transformers")
pytestmark = pytest.mark.skipif(NEEDED is None, reason="needs transformers")

IS_LONG = os.environ.get("OFFLOADZERO_TEST_RANKS") == "all"
NUM_STEPS = 20 if IS_LONG else 2
WORLD_SIZES = (1, 2, 3, 4) if IS_LONG else (3,)
STAGES = (0, 1, 2, 3) if IS_LONG else (3,)
PLACEMENTS = ("resident", "host", "nvme") if IS_LONG else ("resident", "nvme")
ACCUMULATIONS = (1, 3) if IS_LONG else (3,)
GLOBAL_BATCH = 12  # any of the world sizes divides it
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
CLIPPING = 0.3  # less than the norm of every step
TOLERANCE = 1e-5  # relative, of fp32 losses


class RoutedLayer(nn.Module):
    """Each sequence takes the expert that its first token names: some are unused, others on each rank."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        made = [self.experts[number](self.norm(row)) for row, number in zip(x, which.tolist(), strict=True)]
        return x + torch.tanh(torch.stack(made))


class Routed(nn.Module):
    """forward(input_ids, labels).loss, as the models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(test_models.VOCABULARY, 32)
        self.layers = nn.ModuleList(RoutedLayer(32, 5) for _ in range(3))
        self.head = nn.Linear(32, test_models.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.emb(input_ids)
        for layer in self.layers:
            x = layer(x, input_ids[:, 0] % 5)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=loss)


MODELS: dict[str, Callable[[], nn.Module]] = {**test_models.MODELS, "routed": Routed}


def micro_batch(seed: int, rank: int, world_size: int) -> dict[str, Tensor]:
    """This rank's part of a global micro batch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, test_models.VOCABULARY, (GLOBAL_BATCH, test_models.LENGTH), generator=generator)
    ids = ids.chunk(world_size)[rank]
    return {"input_ids": ids, "labels": ids.clone()}


def model_of(name: str, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def train_plainly(name: str, accumulation: int) -> tuple[list[float], float]:
    """Losses of the global micro batches and the last norm, by torch alone."""
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    losses, norm = [], 0.0
    for step in range(NUM_STEPS):
        for part in range(accumulation):
            loss = model(**micro_batch(step * accumulation + part, 0, 1)).loss
            (loss / accumulation).backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIPPING).item()
        assert norm > CLIPPING, "nothing is clipped"
        optimizer.step()
        optimizer.zero_grad()
    return losses, norm


def train_all(rank: int, name: str, world_size: int, accumulation: int, directory: str) -> dict[str, Any]:
    """By stage and placement: losses, norm, and the bits of all weights and states."""
    found = {}
    for stage, placement in itertools.product(STAGES, PLACEMENTS):
        config = make_config(
            placement, Path(directory), clipping=CLIPPING, accumulation=accumulation, dtype=None
        )
        config["optimizer"]["params"] = OPTIONS
        config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // world_size
        config["zero_optimization"]["stage"] = stage
        if stage in (1, 2) and placement != "resident":
            config["offloadzero"]["placement"] = {"states": placement}
        engine, *_ = offloadzero.initialize(model=model_of(name, seed=rank), config=config)
        losses = []
        for seed in range(NUM_STEPS * accumulation):
            loss = engine(**micro_batch(seed, rank, world_size)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        states = engine.optimizer.state_dict()["state"]
        named = {f"{number} {key}": value for number, one in states.items() for key, value in one.items()}
        bits = digest({**engine.module.state_dict(), **named})
        found[f"{stage} {placement}"] = [losses, engine.get_global_grad_norm(), bits]
        engine.close()
    return found


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", MODELS if IS_LONG else ("routed",))
def test_ranks_train_a_model_as_torch_does(
    name: str, world_size: int, accumulation: int, tmp_path: Path
) -> None:
    expected, norm = train_plainly(name, accumulation)
    by_rank = run_ranks(
        train_all,
        world_size,
        tmp_path / "ranks",
        name,
        world_size,
        accumulation,
        str(tmp_path),
        timeout_s=580,
    )
    for stage in STAGES:
        first = by_rank[0][f"{stage} {PLACEMENTS[0]}"]
        for placement in PLACEMENTS:
            ranks = [found[f"{stage} {placement}"] for found in by_rank]
            assert global_losses([losses for losses, _, _ in ranks]) == pytest.approx(expected, rel=TOLERANCE)
            for _, measured, bits in ranks:
                assert measured == pytest.approx(norm, rel=10 * TOLERANCE)
                assert (measured, bits) == (first[1], first[2]), (stage, placement)
    assert not list(tmp_path.glob("*.bin")), "swap files are left"
