"""Activation checkpoints of each rank on its host or drive: the same bits as with the inputs on its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offloadzero.activations import store as activations
from offloadzero.core.segments import TierName
from offloadzero.zero import safe_get_full_fp32_param
from tests.support.ranks import run_ranks
from tests.support.sharded import config_of, digest, engine_of, train

TIERS = ("device", "host", "nvme")
PLANNED = {"input_bytes": "64KiB"}
# By number of ranks: stage, placement, keys laid over the configuration.
CASES: dict[int, dict[str, tuple[int, str, dict[str, Any]]]] = {
    2: {
        "stage 0, accumulation": (0, "host", {"accumulation": 2}),
        "stage 1": (1, "nvme", {"bf16": {"enabled": True}}),
        "stage 3, codes": (3, "nvme", {"zero_optimization": {"zero_quantized_weights": True}}),
    },
    3: {"stage 3, accumulation": (3, "host", {"accumulation": 2})},
}


def train_on_tiers(
    rank: int, world_size: int, cases: dict[str, tuple[int, str, dict[str, Any]]], directory: str
) -> dict[str, Any]:
    """By case: losses, norm and masters by tier, inputs planned and not; and the bytes that inputs have taken there."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "MIN_BYTES", 1)
        for name, (stage, placement, over) in cases.items():
            for tier in TIERS:
                for planned in ({}, PLANNED) if tier != "device" else ({},):
                    own = {"offloadzero": {"activation_checkpoints": {"tier": tier, **planned}}}
                    config = config_of(
                        placement, stage, Path(directory), world_size=world_size, **over, **own
                    )
                    engine = engine_of(config)
                    losses = train(engine, rank, world_size, num_steps=3)
                    params = dict(engine.module.named_parameters())
                    masters = digest({key: safe_get_full_fp32_param(param) for key, param in params.items()})
                    store = engine._runtime.activations
                    assert store is not None
                    taken = 0 if tier == "device" else store.reserved().get(TierName(tier), 0)
                    numbers = [losses, engine.get_global_grad_norm(), masters]
                    found[f"{name} {tier}{' planned' if planned else ''}"] = [numbers, taken]
                    engine.close()
    return found


@pytest.mark.parametrize("world_size", CASES)
def test_bits_are_those_with_inputs_on_the_device(world_size: int, tmp_path: Path) -> None:
    by_rank = run_ranks(
        train_on_tiers,
        world_size,
        tmp_path / "ranks",
        world_size,
        CASES[world_size],
        str(tmp_path),
        timeout_s=120,
    )
    for found in by_rank:
        for name in CASES[world_size]:
            expected, _ = found[f"{name} device"]
            for tier in TIERS[1:]:
                numbers, taken = found[f"{name} {tier}"]
                assert numbers == expected, (name, tier)
                assert taken > 0, (name, tier)
                assert found[f"{name} {tier} planned"] == [expected, 0], (name, tier)
