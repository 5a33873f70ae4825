"""Experts at stage 3, of which each rank has others: refused with what to do, and trained as leaf modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.ranks import channel
from offloadzero.zero import get_z3_leaf_modules, set_z3_leaf_modules, z3_leaf_parameter
from tests.support.ranks import Found, run_in_turn
from tests.support.sharded import WIDTH, config_of, digest, global_losses, said_of
from tests.support.training import merge, one_step

NUM_EXPERTS = 4
NUM_STEPS = 3
CLIPPING = 1.0
PLACEMENTS = ("resident", "host", "nvme")
LEAF_CLASS = {"zero_optimization": {"leaf_module": {"classes": ["Experts"]}}}


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 29)
        self.down = nn.Linear(29, WIDTH)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Each token goes to the expert that its number names, by a share that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero().squeeze(-1)
            if len(rows):  # another expert than its tokens' is not called
                out = out.index_add(0, rows, expert(x[rows]) * shares[rows, number, None])
        return x + out


class Mixture(nn.Module):
    """Its blocks are of two classes, so the default cut has each expert as a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList([Dense(), Experts(), Dense(), Experts()])
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, tokens % NUM_EXPERTS)
        return nn.functional.cross_entropy(self.head(x), tokens.roll(1))


def tokens_of(seed: int, rank: int) -> Tensor:
    """Those of the first rank go to experts 0 and 1, those of the other to 3, and at times to 1 as well."""
    draw = torch.randint(0, 10, (12,), generator=torch.Generator().manual_seed(2 * seed + rank)) * NUM_EXPERTS
    return (
        draw + torch.arange(12) % 2 if rank == 0 else draw + (3 if seed % 2 else 1 + torch.arange(12) % 2 * 2)
    )


def config_for(placement: str, directory: str, **over: Any) -> dict[str, Any]:
    config = config_of(placement, 3, Path(directory), world_size=2, gradient_clipping=CLIPPING)
    del config["offloadzero"]["units"]["patterns"]
    return merge(config, over)


def train_mixture(rank: int, model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    engine, *_ = offloadzero.initialize(model=model, config=config)
    units = sorted({record.unit_name for record in engine._runtime.records})
    try:
        losses = [one_step(engine, tokens_of(seed, rank)) for seed in range(NUM_STEPS)]
        with torch.no_grad():
            losses.append(engine(tokens_of(NUM_STEPS, rank)).item())
        return {"losses": losses, "weights": digest(engine.module.state_dict()), "units": units}
    finally:
        said_of(engine.close)


def train_without_leaves(rank: int, directory: str) -> str:
    with patch.object(channel, "WAITED_S", 0.0):
        return said_of(lambda: train_mixture(rank, Mixture(), config_for("host", directory)))


def train_with_leaves(rank: int, directory: str) -> dict[str, dict[str, Any]]:
    """By placement, and on the host also by the other ways to say it."""
    found = {}
    for placement in PLACEMENTS:
        model = Mixture()
        assert len(set_z3_leaf_modules(model, [Experts])) == 2
        found[placement] = train_mixture(rank, model, config_for(placement, directory))
    found["by class"] = train_mixture(rank, Mixture(), config_for("host", directory, **LEAF_CLASS))
    by_name = {"zero_optimization": {"leaf_module": {"names": ["blocks.1"], "name_suffixes": ["3"]}}}
    found["by name"] = train_mixture(rank, Mixture(), config_for("host", directory, **by_name))
    patterns = {"offloadzero": {"units": {"patterns": ["blocks.[13]"]}}}
    found["by patterns"] = train_mixture(rank, Mixture(), config_for("host", directory, **patterns))
    return found


def say_what_is_a_leaf(rank: int, directory: str) -> dict[str, Any]:  # noqa: ARG001
    model = Mixture()
    engine, *_ = offloadzero.initialize(model=model, config=config_for("host", directory, **LEAF_CLASS))
    names = {id(module): name for name, module in model.named_modules()}
    said = {
        "modules": [names[id(module)] for module in get_z3_leaf_modules(engine.module)],
        "parameters": [name for name, param in model.named_parameters() if z3_leaf_parameter(param)],
        "late": said_of(lambda: set_z3_leaf_modules(model, [Dense])),
    }
    engine.close()
    return said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    works: tuple[Callable[..., Any], ...] = (train_without_leaves, train_with_leaves, say_what_is_a_leaf)
    return run_in_turn(works, 2, tmp_path_factory.mktemp("experts"))


def test_ranks_that_route_differently_are_told_what_to_do(found: Found) -> None:
    for text in found["train_without_leaves"]:
        assert "StateError" in text or "RankError" in text
        assert "the ranks fetch weights in different orders" in text
        for remedy in ("zero.set_z3_leaf_modules(model, [", "leaf_module", "offloadzero.units.patterns"):
            assert remedy in text


def test_experts_of_a_leaf_module_train_as_on_one_device(found: Found) -> None:
    """Beside plain torch, whose batch is that of both ranks."""
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for seed in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = torch.stack([model(tokens_of(seed, rank)) for rank in range(2)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        losses.append(loss.item())
    losses.append(torch.stack([model(tokens_of(NUM_STEPS, rank)) for rank in range(2)]).mean().item())
    by_rank = found["train_with_leaves"]
    for way in by_rank[0]:
        assert by_rank[0][way]["weights"] == by_rank[1][way]["weights"]
        assert global_losses([of_rank[way]["losses"] for of_rank in by_rank]) == pytest.approx(
            losses, rel=1e-5
        )


def test_where_they_live_and_how_it_is_said_changes_no_bit(found: Found) -> None:
    for of_rank in found["train_with_leaves"]:
        for way, outcome in of_rank.items():
            assert outcome["losses"] == of_rank["resident"]["losses"], way
            assert outcome["weights"] == of_rank["resident"]["weights"], way
            assert {"blocks.1", "blocks.3"} <= set(outcome["units"]), way
            assert not [name for name in outcome["units"] if name.startswith(("blocks.1.", "blocks.3."))]


def test_the_engine_says_what_is_a_leaf(found: Found) -> None:
    expected = [
        name for name, _ in Mixture().named_parameters() if name.startswith(("blocks.1.", "blocks.3."))
    ]
    for said in found["say_what_is_a_leaf"]:
        assert said["modules"] == ["blocks.1", "blocks.3"]
        assert said["parameters"] == expected
        assert said["late"].startswith("StateError: leaf modules are set before initialize() or offload()")
