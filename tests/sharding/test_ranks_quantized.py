"""ZeRO++ over several ranks: losses near those of whole weights and gradients, wherever they live, with fewer bytes.

Thirty steps of a small GPT on real text; 300 with OFFLOADZERO_TEST_RANKS=all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.errors import ConfigError
from tests.support.ranks import run_ranks
from tests.support.sharded import digest
from tests.support.text import text_batch, text_model
from tests.support.training import make_config, merge

IS_LONG = os.environ.get("OFFLOADZERO_TEST_RANKS") == "all"
NUM_STEPS = 300 if IS_LONG else 30
TOLERANCE = 0.01  # relative, of the mean loss of the last tenth
MICRO_BATCH = 2

CODED = {"zero_quantized_weights": True}


def config_of(placement: str, directory: Path, zero: dict[str, Any], **over: Any) -> dict[str, Any]:
    base = make_config(placement, directory, clipping=1.0, dtype="bf16", lr=2e-3)
    base["train_micro_batch_size_per_gpu"] = MICRO_BATCH
    base["offloadzero"]["units"] = {"min_leaf_elements": 4096}
    base["zero_optimization"].update(zero)
    return merge(base, over)


def train_text(
    rank: int, world_size: int, cases: dict[str, Any], num_steps: int, directory: str
) -> dict[str, Any]:
    """By case (placement, zero keys): losses, the bits of the weights, and bytes by channel."""
    torch.set_num_threads(1)
    found = {}
    for name, (placement, zero) in cases.items():
        model = text_model()
        engine, *_ = offloadzero.initialize(model=model, config=config_of(placement, Path(directory), zero))
        losses = []
        for step in range(num_steps):
            loss = engine(*text_batch(step * world_size + rank, MICRO_BATCH))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.synchronize()  # what is reduced has been sent
        num_bytes: dict[str, int] = {}
        for key, count in engine.collectives().items():
            channel, kind = key.split()
            if kind in ("all-gather", "reduce-scatter", "all-to-all"):
                num_bytes[channel] = num_bytes.get(channel, 0) + count.num_bytes
        param = model.blocks[0].up.weight
        master = offloadzero.zero.safe_get_full_fp32_param(param).flatten()
        weight = engine.module.state_dict()["blocks.0.up.weight"].float().flatten()
        found[name] = {
            "losses": losses,
            "weights": digest(dict(engine.module.state_dict())),
            "bytes": num_bytes,
            "read error": ((weight - master).abs() / master.abs().clamp(min=1e-30)).max().item(),
        }
        engine.close()
    return found


def last_losses(by_rank: list[dict[str, Any]], case: str) -> float:
    """The mean over the ranks and the last tenth of the steps."""
    num_last = NUM_STEPS // 10
    losses = [sum(found[case]["losses"][-num_last:]) / num_last for found in by_rank]
    return sum(losses) / len(losses)


def expect_alike(by_rank: list[dict[str, Any]], cases: list[str]) -> None:
    """The cases are one training in several placements."""
    for found in by_rank:
        for case in cases:
            assert found[case]["losses"] == found[cases[0]]["losses"]
            assert found[case]["weights"] == by_rank[0][cases[0]]["weights"]
            assert found[case]["read error"] <= 2.0**-8, "a read gives what the codes have made of a weight"


@pytest.mark.parametrize("world_size", [2, 4] if IS_LONG else [2])
def test_weights_as_codes(tmp_path: Path, world_size: int) -> None:
    cases = {
        "whole": ("resident", {}),
        "resident": ("resident", CODED),
        "nvme": ("nvme", CODED),
    }
    by_rank = run_ranks(
        train_text, world_size, tmp_path / "ranks", world_size, cases, NUM_STEPS, str(tmp_path), timeout_s=500
    )
    expect_alike(by_rank, ["resident", "nvme"])
    assert by_rank[0]["resident"]["losses"] != by_rank[0]["whole"]["losses"], "nothing is quantised"
    assert last_losses(by_rank, "resident") == pytest.approx(last_losses(by_rank, "whole"), rel=TOLERANCE)
    whole, coded = (by_rank[0][case]["bytes"]["weights"] for case in ("whole", "resident"))
    assert 0.5 < coded / whole < 0.53


def read_and_refuse(rank: int, directory: str) -> list[Any]:
    """Frozen weights alone as codes; a write in a forward; the plan."""
    model = text_model()
    before = digest(dict(model.state_dict()))
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    config = config_of(
        "host", Path(directory), {"zero_quantized_nontrainable_weights": True}, bf16={"enabled": False}
    )
    engine, *_ = offloadzero.initialize(model=model, config=config)
    assert digest(dict(engine.module.state_dict())) == before
    loss = engine(*text_batch(rank, MICRO_BATCH))
    engine.backward(loss)
    engine.step()
    frozen = {name: value for name, value in engine.module.state_dict().items() if "blocks.1." in name}
    assert digest(frozen) == {name: value for name, value in before.items() if name in frozen}
    lines = {line.what: line.num_bytes for line in engine._runtime.plan.lines}
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = 3.5  # outside of its forward: from the exact values
    now = dict(engine.module.state_dict())["blocks.1.up.weight"].clone()
    now[0, 0] = text_model().blocks[1].up.weight[0, 0]
    assert digest({"blocks.1.up.weight": now}) == {"blocks.1.up.weight": before["blocks.1.up.weight"]}

    def write(module: torch.nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.weight[0, 0] = 1.0

    handle = model.blocks[1].up.register_forward_pre_hook(write)
    with pytest.raises(offloadzero.StateError, match=r"blocks\.1\.up\.weight: written in place in a forward"):
        engine(*text_batch(rank, MICRO_BATCH))
    handle.remove()
    engine.close()
    return [lines.get("weight codes", 0), loss.item()]


def test_weights_that_do_not_train(tmp_path: Path) -> None:
    found = run_ranks(read_and_refuse, 2, tmp_path / "ranks", str(tmp_path))
    exact = text_model()(*text_batch(0, MICRO_BATCH)).item()
    for num_bytes, _ in found:
        assert num_bytes > 0
    assert found[0][1] == pytest.approx(exact, rel=1e-3)
    assert found[0][1] != pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_stage_3_alone(key: str, tmp_path: Path) -> None:
    config = config_of("resident", tmp_path, {"stage": 2, key: True})
    with pytest.raises(
        ConfigError, match=rf"zero_optimization\.{key} = True: needs zero_optimization.stage 3"
    ):
        offloadzero.initialize(model=text_model(), config=config)


def test_one_process_sends_nothing(tmp_path: Path) -> None:
    losses = []
    for zero in ({}, CODED):
        engine, *_ = offloadzero.initialize(model=text_model(), config=config_of("host", tmp_path, zero))
        assert engine.zero_quantized_weights() is bool(zero)
        loss = engine(*text_batch(0, MICRO_BATCH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        assert not [line for line in engine._runtime.plan.lines if line.what == "weight codes"]
        engine.close()
    assert losses[0] == losses[1]
