"""Frozen weights that several ranks read from files in which they lie: each its own part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.mapped import frozen_bytes, in_place_bytes, loaded, saved
from tests.support.ranks import run_ranks
from tests.support.tiny import make_engine, settings, train

NUM_RANKS = 2


def train_in_place(rank: int, directory: str) -> dict[str, Any]:
    """By case: the losses with copies and in place, the bytes in place, and those of frozen weights."""
    place = Path(directory)
    found = {}
    for name in ("same files", "other values on rank 1", "memory on rank 1"):
        runs = []
        for mode in ("copy", "auto"):
            is_other = rank == 1 and name == "other values on rank 1"
            model = loaded(place / ("other" if is_other else "base"))
            if rank == 1 and name == "memory on rank 1":
                for param in model.parameters():
                    param.data = param.data.clone()
            config = settings(place, frozen_weights=mode, budgets={"device": "110KiB"})
            engine = make_engine(config, model)
            runs.append([train(engine, num_steps=3), in_place_bytes(engine), frozen_bytes(engine)])
            engine.close()
        found[name] = runs
    return found


def test_each_rank_reads_its_part_and_none_trains_on_other_values(tmp_path: Path) -> None:
    saved(tmp_path / "base", torch.bfloat16)
    saved(tmp_path / "other", torch.bfloat16, seed=2)
    by_rank = run_ranks(train_in_place, NUM_RANKS, tmp_path / "ranks", str(tmp_path), timeout_s=120)
    for rank, found in enumerate(by_rank):
        for name, ((copied, of_copy, num_frozen), (losses, in_place, _)) in found.items():
            assert losses == copied == by_rank[0]["same files"][0][0], name
            assert of_copy == 0
            # Parts are cut anywhere: a few elements more or less than half.
            is_here = name == "same files" or (rank == 0 and name == "other values on rank 1")
            assert abs(in_place - is_here * num_frozen / NUM_RANKS) < 0.1 * num_frozen, (name, rank)
    shared = sum(found["same files"][1][1] for found in by_rank)
    assert shared == by_rank[0]["same files"][1][2]
