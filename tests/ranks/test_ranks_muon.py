"""Ranks train by Muon as DistributedDataParallel does with torch.optim.Muon, at every stage and in every placement."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.update.specs.muon import MUON
from tests.support.cases import IN_FULL
from tests.support.matrices import batch_of, matrices, split, take_steps
from tests.support.ranks import run_ranks
from tests.support.sharded import digest
from tests.support.tiny import settings

pytestmark = pytest.mark.skipif(not MUON.classes, reason="torch.optim.Muon is there since torch 2.9")

STAGES, PLACEMENTS = (0, 1, 2, 3), ("device", "host", "nvme")
# By number of ranks: each stage and each placement, and of three, whose bits are not torch's, some of one stage.
CASES = {
    2: [(0, "nvme"), (1, "host"), (2, "device"), (3, "nvme")],
    3: [(0, "host"), (1, "device"), (1, "nvme"), (2, "nvme"), (3, "device"), (3, "host")],
}
if IN_FULL:
    CASES = {world_size: [*itertools.product(STAGES, PLACEMENTS)] for world_size in CASES}
NUM_STEPS = 3


def _batches(rank: int) -> range:
    return range(rank * NUM_STEPS, (rank + 1) * NUM_STEPS)


def train(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """By stage and placement: losses and the bits of weights and momenta. First of torch's own, under DDP."""
    found: dict[str, Any] = {}
    model = matrices()
    its = torch.optim.Muon(model.parameters(), lr=0.02)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    losses = take_steps(ddp, [its], _batches(rank))
    momenta = {str(n): its.state[p]["momentum_buffer"] for n, p in enumerate(model.parameters())}
    found["torch"] = [losses, digest(dict(model.state_dict())), digest(momenta)]
    for stage, placement in CASES[world_size]:
        homes: Any = placement if stage in (0, 3) else {"states": placement}
        config = settings(
            directory,
            placement=homes,
            bf16=None,
            zero_optimization={"stage": stage},
            units={"min_leaf_elements": 500},
        )
        model = matrices(seed=rank)  # the first rank's weights are those of all
        if rank == 0:
            model = matrices()
        muon = torch.optim.Muon(model.parameters(), lr=0.02)
        model, optimizer = offloadzero.offload(model, muon, config)
        losses = take_steps(model, [optimizer], _batches(rank))
        states = optimizer.state_dict()["state"]
        momenta = {str(number): of_one["momentum_buffer"] for number, of_one in states.items()}
        found[f"{stage} {placement}"] = [losses, digest(dict(model.state_dict())), digest(momenta)]
        optimizer.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_as_ddp_does_with_torchs_muon(world_size: int, tmp_path: Path) -> None:
    """Bit for bit with two ranks, whose mean is the same whatever adds it up; with three alike among themselves."""
    ranks = run_ranks(train, world_size, tmp_path / "ranks", world_size, str(tmp_path), timeout_s=90)
    for rank, found in enumerate(ranks):
        torchs = found.pop("torch")
        assert set(found) == {f"{stage} {placement}" for stage, placement in CASES[world_size]}
        for name, outcome in found.items():
            assert outcome[1:] == ranks[0][name][1:], (rank, name)
            assert outcome == next(other for key, other in found.items() if key[0] == name[0]), (rank, name)
            if world_size == 2:
                assert outcome == torchs, (rank, name)
            else:
                assert outcome[0] == pytest.approx(torchs[0], rel=2e-3), (rank, name)


def train_mixed(rank: int, directory: str) -> dict[str, Any]:
    """By case: losses and the bits of the weights, of Muon and AdamW by the JSON, through a checkpoint."""
    found: dict[str, Any] = {}
    for name, stage, placement, bf16 in (
        ("two", 2, {"states": "host"}, None),
        ("three", 3, "nvme", None),
        ("bf16", 3, "nvme", {"enabled": True}),
        ("bf16 on the device", 3, "device", {"enabled": True}),
    ):
        config = settings(
            directory,
            placement=placement,
            bf16=bf16,
            zero_optimization={"stage": stage},
            units={"min_leaf_elements": 500},
            optimizer={"type": "Muon", "params": {"lr": 0.02, "adam_lr": 2e-3, "weight_decay": 0.1}},
            gradient_clipping=0.5,
        )
        engine, *_ = offloadzero.initialize(model=matrices(mixed=True), config=config)
        losses = []
        for seed in _batches(rank):
            if seed % NUM_STEPS == NUM_STEPS - 1:
                engine.save_checkpoint(directory, tag=name)
                engine.load_checkpoint(directory, tag=name)
            loss = engine(batch_of(seed, mixed=True))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found[name] = [losses, digest(dict(engine.module.state_dict()))]
        engine.close()
    model = matrices(mixed=True)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    muons, others = split(model)
    its = [
        torch.optim.Muon(muons, lr=0.02, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
    ]
    found["torch"] = take_steps(ddp, its, _batches(rank), mixed=True, max_norm=0.5)
    return found


def test_ranks_train_matrices_by_muon_and_the_rest_by_adamw(tmp_path: Path) -> None:
    ranks = run_ranks(train_mixed, 2, tmp_path / "ranks", str(tmp_path), timeout_s=90)
    for found in ranks:
        assert found["two"][0] == found["three"][0]
        assert found["two"][1] == found["three"][1] == ranks[0]["two"][1]
        assert found["bf16"] == found["bf16 on the device"]
        assert found["two"][0] == pytest.approx(found["torch"], rel=2e-3)
