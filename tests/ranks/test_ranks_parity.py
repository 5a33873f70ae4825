"""Several ranks train as one process does on their global batch, wherever their shards live."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import offloadzero
from offloadzero.core.segments import SegmentKind
from offloadzero.update import wire_codes as wire
from tests.support.ranks import run_ranks
from tests.support.sharded import GLOBAL_BATCH, config_of, digest, engine_of, global_losses, train

STAGES = (0, 1, 2, 3)
PLACEMENTS = ("resident", "host", "nvme")
IS_LONG = os.environ.get("OFFLOADZERO_TEST_RANKS") == "all"
ACCUMULATIONS = {2: (1, 3) if IS_LONG else (1,), 3: (3,)}  # by the number of ranks
NUM_STEPS = 2
TOLERANCE = 1e-5  # relative, of fp32 losses


def train_all(
    rank: int, world_size: int, cases: list[tuple[int, str, int]], directory: str
) -> dict[str, Any]:
    """By case: losses, norm, and the bits of weights and states. And what orders sets of strings in this process."""
    found: dict[str, Any] = {"hashes": hash("a string")}
    for stage, placement, accumulation in cases:
        config = config_of(
            placement, stage, Path(directory), world_size=world_size, accumulation=accumulation
        )
        engine = engine_of(config, seed=rank)  # the first rank's weights are those of all
        losses = train(engine, rank, world_size, num_steps=NUM_STEPS)
        weights = digest(dict(engine.module.state_dict()))
        states = {
            f"{number} {name}": value
            for number, of_one in engine.optimizer.state_dict()["state"].items()
            for name, value in of_one.items()
        }
        found[f"{stage} {placement} {accumulation}"] = {
            "losses": losses,
            "norm": engine.get_global_grad_norm(),
            "weights": weights,
            "states": digest(states),
        }
        engine.close()
    return found


BF16 = {"bf16": {"enabled": True}}
# In fewer bits than fp32: the parameters, their states, or what goes between the ranks.
FEWER_BITS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "compact": {**BF16, "offloadzero": {"state_layout": "compact"}},
    "wire": {"communication_data_type": "bf16"},
    "wire of more bits": {**BF16, "communication_data_type": "fp32"},
}


def train_in_fewer_bits(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """By case and placement: losses and the bits of the weights; and what the engine says of its ranks."""
    found: dict[str, Any] = {}
    for name, over in FEWER_BITS.items():
        for placement in ("resident", "nvme"):
            config = config_of(placement, 3, Path(directory), world_size=world_size, accumulation=2, **over)
            # Where parameters are on files gradients go in many pieces: the numbers are the same.
            with patch.object(wire, "MAX_PIECE_BYTES", 4096 if placement == "nvme" else wire.MAX_PIECE_BYTES):
                engine = engine_of(config, seed=rank)
            pieces = [line for line in engine._runtime.plan.lines if line.what == "gradient pieces"]
            assert bool(pieces) == ("wire" in name)
            assert all(line.num_bytes == 4096 for line in pieces) == (placement == "nvme" or not pieces)
            losses = train(engine, rank, world_size, num_steps=NUM_STEPS)
            found[f"{name} {placement}"] = [losses, digest(dict(engine.module.state_dict()))]
            param = engine.module.wide.weight
            found["master"] = offloadzero.zero.safe_get_full_fp32_param(param).double().sum().item()
            names = ("world_size", "dp_world_size", "global_rank")
            calls = ("get_data_parallel_rank", "train_batch_size")
            found["names"] = [getattr(engine, name) for name in names]
            found["names"] += [getattr(engine, name)() for name in calls]
            found["data"] = [int(one) for batch in engine.deepspeed_io(range(GLOBAL_BATCH)) for one in batch]
            engine.close()
    return found


def train_with_shares(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """By stage, tier and the share of the update off the device: losses, bits, and how many units have it on it."""
    found: dict[str, Any] = {}
    for stage, device, ratio in itertools.product((1, 3), ("cpu", "nvme"), (1.0, 0.5)):
        config = config_of("host", stage, Path(directory), world_size=world_size)
        del config["offloadzero"]["placement"]
        home = {"device": device, "nvme_path": directory}
        config["zero_optimization"]["offload_optimizer"] = {**home, "ratio": ratio, "super_offload": True}
        if stage == 3:
            config["zero_optimization"]["offload_param"] = home
        engine = engine_of(config, seed=rank)
        moments = [
            record.segments[SegmentKind("exp_avg")]
            for record in engine._runtime.records
            if record.num_trainable
        ]
        on_device = sum(segment.tier.is_device for segment in moments)
        losses = train(engine, rank, world_size, num_steps=NUM_STEPS)
        bits = digest(dict(engine.module.state_dict()))
        found[f"{stage} {device} {ratio}"] = [losses, bits, on_device]
        engine.close()
    return found


def test_a_share_of_the_update_on_the_device_changes_no_bit(tmp_path: Path) -> None:
    for found in run_ranks(train_with_shares, 2, tmp_path / "ranks", 2, str(tmp_path), timeout_s=90):
        for stage, device in itertools.product((1, 3), ("cpu", "nvme")):
            *expected, without = found[f"{stage} {device} 1.0"]
            *shared, with_share = found[f"{stage} {device} 0.5"]
            assert shared == expected
            assert (without, with_share > 1) == (0, True)


def test_ranks_train_in_fewer_bits(tmp_path: Path) -> None:
    """bf16 keeps 8 of them: the means of two ranks' gradients are rounded elsewhere than those of one process."""
    ranks = run_ranks(train_in_fewer_bits, 2, tmp_path / "ranks", 2, str(tmp_path), timeout_s=90)
    for name, over in FEWER_BITS.items():
        engine = engine_of(config_of("resident", 0, tmp_path, accumulation=2, **over))
        expected = train(engine, 0, 1, num_steps=NUM_STEPS)
        engine.close()
        one, other = ([found[f"{name} {place}"] for found in ranks] for place in ("resident", "nvme"))
        assert one == other
        assert one[0][1] == one[1][1]
        losses = global_losses([losses for losses, _ in one])
        assert losses == pytest.approx(expected, rel=5e-3)
        if name == "wire":
            assert losses[2:] != pytest.approx(expected[2:], rel=TOLERANCE), (
                "it goes in the gradients' own dtype"
            )
    assert ranks[0]["master"] == ranks[1]["master"]
    assert [found["names"] for found in ranks] == [[2, 2, rank, rank, 2 * GLOBAL_BATCH] for rank in range(2)]
    assert sorted(ranks[0]["data"] + ranks[1]["data"]) == list(range(GLOBAL_BATCH))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_as_one_process(tmp_path: Path, world_size: int) -> None:
    """Bitwise alike on all ranks and in all placements of a stage. Strings have other hashes on the last of two."""
    stages = STAGES if IS_LONG or world_size == 2 else (3,)
    cases = [
        (stage, placement, accumulation)
        for stage in stages
        for placement in PLACEMENTS
        for accumulation in ACCUMULATIONS[world_size]
    ]
    by_rank = run_ranks(
        train_all,
        world_size,
        tmp_path / "ranks",
        world_size,
        cases,
        str(tmp_path),
        timeout_s=90,
        own_interpreter=IS_LONG or world_size == 2,
    )
    is_alike = "PYTHONHASHSEED" in os.environ or not (IS_LONG or world_size == 2)
    assert is_alike or by_rank[0]["hashes"] != by_rank[-1]["hashes"]
    for accumulation in ACCUMULATIONS[world_size]:
        engine = engine_of(config_of("resident", 0, tmp_path, accumulation=accumulation))
        expected = train(engine, 0, 1, num_steps=NUM_STEPS)
        norm = engine.get_global_grad_norm()
        engine.close()
        for stage in stages:
            of_stage = [
                [found[f"{stage} {placement} {accumulation}"] for found in by_rank]
                for placement in PLACEMENTS
            ]
            for ranks in of_stage:
                losses = global_losses([found["losses"] for found in ranks])
                assert losses == pytest.approx(expected, rel=TOLERANCE)
                assert ranks[0]["norm"] == pytest.approx(norm, rel=TOLERANCE)
                for found in ranks:
                    alike = ("norm", "weights", "states")
                    assert [found[key] for key in alike] == [of_stage[0][0][key] for key in alike]
            by_placement = [[found["losses"] for found in ranks] for ranks in of_stage]
            assert by_placement == [by_placement[0]] * len(PLACEMENTS)
