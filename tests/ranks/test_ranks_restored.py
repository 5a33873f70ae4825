"""`restore_model()` where the ranks divide the states: each gets the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.zero import GatheredParameters, safe_get_full_fp32_param
from tests.support.ranks import run_ranks
from tests.support.sharded import config_of, digest, engine_of, make_odd_model, said_of, train

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
COMPACT: dict[str, Any] = {"offloadzero": {"state_layout": "compact"}, **BF16}
CASES: dict[int, dict[str, tuple[int, str, dict[str, Any]]]] = {
    2: {
        "stage 0, host": (0, "host", BF16),
        "stage 2, nvme": (2, "nvme", BF16),
        "stage 3, nvme": (3, "nvme", BF16),
    },
    3: {"stage 1, host": (1, "host", {}), "stage 3, compact": (3, "host", COMPACT)},
}


def restore(
    rank: int, world_size: int, cases: dict[str, tuple[int, str, dict[str, Any]]], directory: str
) -> dict[str, Any]:
    """By case: the masters of a trained engine, the model that it gave back, and how that trains on."""
    found = {}
    for name, (stage, placement, over) in cases.items():
        config = config_of(placement, stage, Path(directory), world_size=world_size, **over)
        engine = engine_of(config, seed=rank)
        train(engine, rank, world_size, num_steps=2)
        model = engine.module
        assert isinstance(model, torch.nn.Module)
        masters = {key: safe_get_full_fp32_param(param) for key, param in model.named_parameters()}
        with GatheredParameters(next(model.parameters())):
            refused = said_of(engine.restore_model)
        engine.restore_model()
        ordinary = make_odd_model()
        alike = all(
            (type(ours), ours.dtype, ours.device) == (type(theirs), theirs.dtype, theirs.device)
            for ours, theirs in zip(model.parameters(), ordinary.parameters(), strict=True)
        )
        values = {key: param.detach().clone() for key, param in model.named_parameters()}
        again, *_ = offloadzero.initialize(model=model, config=config)
        losses = train(again, rank, world_size, num_steps=1)
        again.close()
        found[name] = {
            "masters": digest(masters),
            "values": digest(values),
            "refused": refused,
            "alike": alike,
            "losses": losses,
        }
    return found


@pytest.mark.parametrize("world_size", CASES)
def test_each_rank_gets_the_whole_model(world_size: int, tmp_path: Path) -> None:
    by_rank = run_ranks(
        restore, world_size, tmp_path / "ranks", world_size, CASES[world_size], str(tmp_path), timeout_s=90
    )
    for found in by_rank:
        for name, of_case in found.items():
            assert of_case["values"] == of_case["masters"] == by_rank[0][name]["masters"], name
            assert of_case["alike"], name
            assert of_case["refused"].startswith("StateError: restore_model() inside of GatheredParameters")
            assert all(loss == loss for loss in of_case["losses"])  # numbers


def restore_alone(rank: int, directory: str) -> list[str]:
    """One rank gives the model back, the other reads a weight, and trains."""
    engine = engine_of(config_of("host", 3, Path(directory), world_size=2))
    weight = engine.module.get_parameter("wide.weight")
    texts = [said_of(engine.restore_model if rank else lambda: safe_get_full_fp32_param(weight))]
    texts.append(said_of(lambda: train(engine, rank, 2, num_steps=1)))
    return texts


def test_a_rank_that_restores_alone_is_an_error_on_all(tmp_path: Path) -> None:
    for text, later in run_ranks(restore_alone, 2, tmp_path / "ranks", str(tmp_path), timeout_s=40):
        assert text.startswith("StateError: rank 0 reads wide.weight (param), rank 1 reads "), text
        assert later != "nothing"
