"""Checkpoints of several ranks: written once, readable at any number of ranks, stage and placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import run_ranks
from tests.support.sharded import GLOBAL_BATCH, config_of, digest, engine_of, micro_batch, train


def state_of(engine: Any) -> dict[str, str]:
    """The bits of all weights and optimizer states."""
    states = engine.optimizer.state_dict()["state"]
    named = {f"{number}.{name}": value for number, one in states.items() for name, value in one.items()}
    return digest({**engine.module.state_dict(), **named})


def save(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    engine = engine_of(config_of("nvme", 3, Path(directory), world_size=world_size), seed=rank)
    train(engine, rank, world_size, num_steps=2)
    engine.save_checkpoint(directory, tag="of two")
    engine.save_16bit_model(directory)
    loss = engine(micro_batch(9, rank, world_size)).item()
    found = {"state": state_of(engine), "loss": loss, "steps": engine.global_steps}
    engine.close()
    return found


def load(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """At every stage, from weights of their own; what is not there, or not the same, is refused on all ranks."""
    found = {}
    for stage, placement in ((0, "host"), (2, "host"), (3, "resident")):
        engine = engine_of(config_of(placement, stage, Path(directory), world_size=world_size), seed=7)
        engine.load_checkpoint(directory)
        found[str(stage)] = [state_of(engine), engine.global_steps]
        try:
            engine.load_checkpoint(directory if rank else "/nonexistent", tag="of two")
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {error}"
        try:
            engine.load_checkpoint(directory if rank != 1 else f"{directory}/other")
        except Exception as error:
            found["another"] = f"{type(error).__name__}: {error}"
        assert state_of(engine) == found[str(stage)][0]
        train(engine, rank, world_size, num_steps=1)
        engine.close()
    return found


def test_a_checkpoint_of_two_ranks_is_one_of_any_number(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, tmp_path / "save", 2, str(tmp_path))
    assert saved[0]["state"] == saved[1]["state"]
    engine = engine_of(config_of("resident", 0, tmp_path), seed=5)
    engine.load_checkpoint(tmp_path)
    assert (state_of(engine), engine.global_steps) == (saved[0]["state"], 2)
    with torch.no_grad():
        losses = [engine(micro_batch(9, rank, 2)).item() for rank in range(2)]
    engine.close()
    assert torch.allclose(torch.tensor(losses), torch.tensor([found["loss"] for found in saved]), rtol=1e-5)
    assert GLOBAL_BATCH % 3 == 0
    other = engine_of(config_of("resident", 0, tmp_path), seed=6)
    other.save_checkpoint(tmp_path / "other", tag="global_step2")
    other.close()
    loaded = run_ranks(load, 3, tmp_path / "load", 3, str(tmp_path))
    for found in loaded:
        for stage in "023":
            assert found[stage] == [saved[0]["state"], 2]
    refusals = [found["refused"] for found in loaded]
    assert refusals[0].startswith("CheckpointError: there is no checkpoint 'of two' in /nonexistent")
    for text in refusals[1:]:
        assert text.startswith(
            "RankError: load_checkpoint(), before anything has changed, has failed on ranks [0]"
        )
    for found in loaded:
        assert "ranks [1] load another checkpoint than rank 0" in found["another"]
        assert found["another"].startswith(f"CheckpointError: {tmp_path}")
