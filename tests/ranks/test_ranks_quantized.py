"""ZeRO++ over several ranks: losses near those of whole weights and gradients, wherever they live, with fewer bytes.

Six steps of a small GPT on real text; 300 with OFFLOADZERO_TEST_RANKS=all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.arithmetic import block_codes
from offloadzero.arithmetic.block_codes import INT4_BLOCK, PIECE_ELEMENTS
from offloadzero.config import load_config
from offloadzero.errors import ConfigError
from tests.support import sharded
from tests.support.ranks import Found, run_in_turn, run_ranks
from tests.support.sharded import digest
from tests.support.text import text_batch, text_model
from tests.support.training import make_config, merge, one_step

IS_LONG = os.environ.get("OFFLOADZERO_TEST_RANKS") == "all"
NUM_STEPS = 300 if IS_LONG else 6
NUM_EACH = 300 if IS_LONG else 3  # with one of the keys
NUM_ALIKE = 60 if IS_LONG else 3  # of trainings that have the numbers of another
TOLERANCE = 0.01  # relative, of the mean loss of the last tenth
MICRO_BATCH = 2

CODED = {"zero_quantized_weights": True}
NEAR = {"zero_hpz_partition_size": 2}
REDUCED = {"zero_quantized_gradients": True}
ALL = {**CODED, **NEAR, **REDUCED}


def config_of(placement: str, directory: Path, zero: dict[str, Any], **over: Any) -> dict[str, Any]:
    base = make_config(placement, directory, clipping=1.0, dtype="bf16", lr=2e-3)
    base["train_micro_batch_size_per_gpu"] = MICRO_BATCH
    base["offloadzero"]["units"] = {"min_leaf_elements": 4096}
    base["zero_optimization"].update(zero)
    return merge(base, over)


def train_text(rank: int, world_size: int, cases: dict[str, Any], directory: str) -> dict[str, Any]:
    """By case: losses, the bits of the weights, and bytes by channel."""
    torch.set_num_threads(1)
    found = {}
    for name, (placement, zero, num_steps) in cases.items():
        os.environ["LOCAL_WORLD_SIZE"] = name.partition("LOCAL_WORLD_SIZE=")[2] or str(world_size)
        block_codes.PIECE_ELEMENTS = 4096 if "pieces" in name else PIECE_ELEMENTS
        model = text_model()
        engine, *_ = offloadzero.initialize(model=model, config=config_of(placement, Path(directory), zero))
        losses = []
        for step in range(num_steps):
            losses.append(one_step(engine, *text_batch(step * world_size + rank, MICRO_BATCH)))
        engine.synchronize()  # what is reduced has been sent
        num_bytes: dict[str, int] = {}
        for key, count in engine.collectives().items():
            channel, kind = key.split()
            if kind in ("all-gather", "reduce-scatter", "all-to-all"):
                num_bytes[channel] = num_bytes.get(channel, 0) + count.num_bytes
        param = model.blocks[0].up.weight
        master = offloadzero.zero.safe_get_full_fp32_param(param).flatten()
        weights = dict(engine.module.state_dict())
        weight = weights["blocks.0.up.weight"].float().flatten()
        found[name] = {
            "losses": losses,
            "steps": num_steps,
            "weights": digest(weights),
            "bytes": num_bytes,
            "whole elements": sum(one.num_elements for one in engine._runtime.records if one.resident),
            "gathered elements": sum(one.num_elements for one in engine._runtime.records if one.is_gathered),
            "plan": {line.what: line.num_bytes for line in engine._runtime.plan.lines},
            "read error": ((weight - master).abs() / master.abs().clamp(min=1e-30)).max().item(),
        }
        engine.close()
    return found


def expect_near(by_rank: list[dict[str, Any]], case: str) -> None:
    """Its losses are near those with whole weights and gradients, and not the same."""
    found, expected = (
        sharded.global_losses([one[name]["losses"] for one in by_rank]) for name in (case, "whole")
    )
    assert found != expected[: len(found)], "nothing is quantised"
    num_last = max(1, len(found) // 10)
    last = slice(len(found) - num_last, len(found))
    assert sum(found[last]) == pytest.approx(sum(expected[last]), rel=TOLERANCE)


def expect_alike(by_rank: list[dict[str, Any]], cases: list[str]) -> None:
    """The cases are one training in several placements."""
    for found in by_rank:
        for case in CASES.keys() & set(cases):
            losses, expected = found[case]["losses"], found[cases[0]]["losses"]
            assert losses == expected[: len(losses)]
            assert found[case]["weights"] == by_rank[0][case]["weights"]
            if len(losses) == len(expected):
                assert found[case]["weights"] == found[cases[0]]["weights"]
            assert found[case]["read error"] <= 2.0**-8, "a read gives what the codes have made of a weight"


# Placement, keys of zero_optimization, steps.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "whole": ("resident", {}, NUM_STEPS),
    "coded": ("resident", CODED, NUM_EACH),
    "both host": ("host", {**CODED, "zero_hpz_partition_size": 4}, NUM_ALIKE),
    "one hop": ("resident", REDUCED, NUM_ALIKE),
    "two hops": ("resident", {**NEAR, **REDUCED}, NUM_EACH),
    "two hops by LOCAL_WORLD_SIZE=2": ("host", REDUCED, NUM_ALIKE),
    "one hop by LOCAL_WORLD_SIZE=1": ("host", REDUCED, NUM_ALIKE),
    "all": ("host", ALL, NUM_STEPS),
    "all in pieces": ("nvme", ALL, NUM_ALIKE),
}
if IS_LONG:
    CASES |= {
        "coded nvme": ("nvme", CODED, NUM_ALIKE),
        "near": ("resident", NEAR, NUM_ALIKE),
        "near nvme": ("nvme", NEAR, NUM_ALIKE),
        "all nvme": ("nvme", ALL, NUM_ALIKE),
        "two hops nvme": ("nvme", {**NEAR, **REDUCED}, NUM_ALIKE),
    }


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks has found."""
    directory = tmp_path_factory.mktemp("quantized")
    return run_ranks(train_text, 4, directory / "ranks", 4, CASES, str(directory), timeout_s=2000)


def bytes_of(by_rank: list[dict[str, Any]], case: str, channel: str) -> float:
    """What a channel has moved in a step."""
    found = by_rank[0][case]
    num_bytes: int = found["bytes"].get(channel, 0)
    return num_bytes / len(found["losses"])


def test_weights_as_codes(by_rank: list[dict[str, Any]]) -> None:
    expect_alike(by_rank, ["coded", "coded nvme", "both host"])
    expect_near(by_rank, "coded")
    whole = bytes_of(by_rank, "whole", "weights")
    more = 1 + 1 / by_rank[0]["coded"]["steps"]  # the last step ends with fetches for the next
    assert 0.5 / more < bytes_of(by_rank, "coded", "weights") / whole < 0.53 * more
    assert by_rank[0]["coded"]["plan"]["weight codes"] > 0


def test_copies_for_near_ranks_change_no_number(by_rank: list[dict[str, Any]]) -> None:
    """Each unit comes from all ranks once in a step; the last one ends with fetches for the next."""
    expect_alike(by_rank, ["whole", "near", "near nvme"])
    num_elements = by_rank[0]["whole"]["gathered elements"]
    least, most = 2 * num_elements, 2 * num_elements * (1 + 1 / NUM_ALIKE)
    for case in CASES.keys() & {"near", "near nvme", "two hops"}:
        most = 2 * num_elements * (1 + 1 / by_rank[0][case]["steps"])
        assert least <= bytes_of(by_rank, case, "weights") < most
        assert bytes_of(by_rank, case, "near_weights") >= 0.9 * least
    assert bytes_of(by_rank, "both host", "weights") < 0.53 * most
    assert by_rank[0]["two hops"]["plan"]["copies for near ranks"] == num_elements  # half, of two bytes each


def test_gradients_as_codes(by_rank: list[dict[str, Any]]) -> None:
    by_launcher = [case for case in CASES if "LOCAL_WORLD_SIZE" in case]
    expect_alike(by_rank, ["two hops", "two hops nvme", by_launcher[0]])
    expect_alike(by_rank, ["one hop", by_launcher[1]])
    expect_near(by_rank, "two hops")
    hops = [bytes_of(by_rank, "two hops", f"{place}_gradients") for place in ("near", "far")]
    # A quarter, and a scale of two bytes for each 64; between the two machines half of that for each of two ranks.
    coded = 2 * by_rank[0]["whole"]["gathered elements"] / 4 * (1 + 4 / INT4_BLOCK)
    assert hops == [coded, coded / 2]
    assert bytes_of(by_rank, "two hops", "gradients") < 0.1 * bytes_of(by_rank, "whole", "gradients")
    assert bytes_of(by_rank, "one hop", "near_gradients") == coded
    assert (
        bytes_of(by_rank, "one hop", "far_gradients")
        == bytes_of(by_rank, by_launcher[1], "near_gradients")
        == 0
    )
    assert bytes_of(by_rank, by_launcher[1], "far_gradients") == coded


def test_all_three(by_rank: list[dict[str, Any]]) -> None:
    """Near whole weights and gradients, with 0.75 of the parameters' bytes across machines."""
    expect_alike(by_rank, ["all", "all nvme", "all in pieces"])
    expect_near(by_rank, "all")
    codes, in_pieces = (by_rank[0][case]["plan"]["gradient codes"] for case in ("all", "all in pieces"))
    assert in_pieces < codes
    num_bytes, rest_bytes = (2 * by_rank[0]["whole"][f"{what} elements"] for what in ("gathered", "whole"))
    # Of each unit's bytes a machine of two has a half itself; what its two ranks get from the others is added up.
    across = {}
    for case in ("whole", "all"):
        gathered = bytes_of(by_rank, case, "weights") / 2
        reduced = (bytes_of(by_rank, case, "gradients") - rest_bytes) / 2
        coded = 2 * bytes_of(by_rank, case, "far_gradients") / 2
        across[case] = (gathered + reduced + coded) / num_bytes
    assert 1.4 < across["whole"] < 1.6  # half of three times
    assert (
        0.75 / 2 < across["all"] < 0.75 / 2 * 1.1
    )  # with scales, vectors, and a first fetch for the next step


def train_odd(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """By placement: tied, frozen and unused parameters, and experts that only some ranks use."""
    found = {}
    for placement in ("resident", "nvme"):
        keys = {"zero_optimization": {**CODED, **REDUCED}}
        config = sharded.config_of(
            placement, 3, Path(directory), world_size=world_size, accumulation=2, **keys
        )
        engine = sharded.engine_of(config, seed=rank)
        losses = sharded.train(engine, rank, world_size, num_steps=3)
        found[placement] = [losses, digest(dict(engine.module.state_dict()))]
        engine.close()
    return found


def test_odd_units(tmp_path: Path) -> None:
    """Released leases hold NaN: what no rank has a gradient of must not reach the blocks beside it."""
    by_rank = run_ranks(train_odd, 3, tmp_path / "ranks", 3, str(tmp_path))
    engine = sharded.engine_of(sharded.config_of("resident", 0, tmp_path, accumulation=2))
    expected = sharded.train(engine, 0, 1, num_steps=3)
    engine.close()
    for found in by_rank:
        assert found["resident"] == found["nvme"]
        assert found["resident"][1] == by_rank[0]["resident"][1]
    losses = sharded.global_losses([found["resident"][0] for found in by_rank])
    assert losses == pytest.approx(expected, rel=5e-3)
    assert losses != pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two ranks finds by the functions below, one after the other in the same processes."""
    works = overflow, read_and_refuse, train_and_write, write_alone, start_apart
    return run_in_turn(works, 2, tmp_path_factory.mktemp("quantized"), timeout_s=100)


def overflow(rank: int, directory: str) -> list[Any]:
    """Steps skipped in fp16 with a scale that is too large on one rank's data, and what is trained then."""
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}
    config = config_of("host", Path(directory), {**CODED, **REDUCED}, bf16={"enabled": False}, fp16=fp16)
    engine, *_ = offloadzero.initialize(model=text_model(), config=config)
    losses = []
    for step in range(12):
        losses.append(one_step(engine, *text_batch(2 * step + rank, MICRO_BATCH)))
    assert losses[-1] < losses[0]
    found = [engine.skipped_steps, engine.loss_scale(), digest(dict(engine.module.state_dict()))]
    engine.close()
    return found


def test_an_overflow_is_seen_through_the_codes(of_two: Found) -> None:
    one, other = of_two["overflow"]
    assert one == other
    assert 1 <= one[0] < 12
    assert one[1] == 2.0 ** (22 - one[0])


def read_and_refuse(rank: int, directory: str) -> list[Any]:
    """Frozen weights alone as codes; a write in a forward; the plan."""
    model = text_model()
    before = digest(dict(model.state_dict()))
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    # All weights fit on the device: what is there is used again.
    zero = {"zero_quantized_nontrainable_weights": True, "stage3_max_live_parameters": 10**7}
    config = config_of("host", Path(directory), zero, bf16={"enabled": False})
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
            module.weight.fill_(0.25)

    with torch.no_grad():
        evaluated = engine(*text_batch(rank, MICRO_BATCH)).item()
    handle = model.blocks[1].up.register_forward_pre_hook(write)
    with pytest.raises(offloadzero.StateError, match=r"blocks\.1\.up\.weight: written in place in a forward"):
        engine(*text_batch(rank, MICRO_BATCH))
    handle.remove()
    with torch.no_grad():  # a script that goes on finds the weights without what it wrote
        assert engine(*text_batch(rank, MICRO_BATCH)).item() == evaluated
    engine.close()
    return [lines.get("weight codes", 0), loss.item()]


def test_weights_that_do_not_train(of_two: Found) -> None:
    found = of_two["read_and_refuse"]
    exact = text_model()(*text_batch(0, MICRO_BATCH)).item()
    for num_bytes, _ in found:
        assert num_bytes > 0
    assert found[0][1] == pytest.approx(exact, rel=1e-3)
    assert found[0][1] != pytest.approx(exact, rel=1e-7)


def train_and_write(rank: int, directory: str) -> list[list[Any]]:
    """The same without and with copies: a script writes in forwards and between, and evaluates; two micro batches."""
    found = []
    for zero in ({}, NEAR):
        model = text_model()
        config = config_of("nvme", Path(directory), zero, gradient_accumulation_steps=2)
        engine, *_ = offloadzero.initialize(model=model, config=config)

        def write(module: torch.nn.Module, _: Any) -> None:
            with torch.no_grad():
                module.bias.add_(0.125)

        model.blocks[0].norm1.register_forward_pre_hook(write)
        losses = []
        for step in range(6):
            batch = text_batch(10 * step + rank, MICRO_BATCH)
            loss = engine(*batch)
            engine.backward(loss)
            if step == 3:
                with torch.no_grad():
                    model.blocks[1].down.weight[3] = 0.5
            engine.step()
            with torch.no_grad():
                losses += [loss.item(), engine(*batch).item()]
        engine.save_checkpoint(directory, tag="a")
        engine.load_checkpoint(directory, tag="a")
        with torch.no_grad():
            losses.append(engine(*text_batch(rank, MICRO_BATCH)).item())
        found.append([losses, digest(dict(engine.module.state_dict()))])
        engine.close()
    return found


def start_apart(rank: int, directory: str) -> list[str]:
    """What ranks say whose keys differ."""
    said = []
    for zero in (NEAR, REDUCED):
        config = config_of("host", Path(directory), zero if rank else {})
        with pytest.raises(ConfigError) as caught:
            offloadzero.initialize(model=text_model(), config=config)
        said.append(str(caught.value))
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + rank)
    with pytest.raises(
        ConfigError, match=r"zero_quantized_gradients = True: machines with equally many ranks"
    ):
        offloadzero.initialize(model=text_model(), config=config_of("host", Path(directory), REDUCED))
    return said


def test_ranks_with_other_keys(of_two: Found) -> None:
    by_rank = of_two["start_apart"]
    for said in by_rank:
        for text, key in zip(said, (*NEAR, *REDUCED), strict=True):
            assert f"zero_optimization.{key} = " in text
            assert "the same on all ranks: ranks [1] have another than rank 0" in text


def write_alone(rank: int, directory: str) -> str:
    """What ranks say of which one has written a weight: it has no copy of what the others gather from theirs."""
    model = text_model()
    engine, *_ = offloadzero.initialize(model=model, config=config_of("host", Path(directory), NEAR))
    engine(*text_batch(0, MICRO_BATCH))
    if rank:
        weight = model.blocks[0].up.weight
        offloadzero.zero.safe_set_full_fp32_param(weight, torch.ones(weight.shape))
    with pytest.raises(offloadzero.StateError) as caught:
        engine(*text_batch(0, MICRO_BATCH))
    return str(caught.value)


def test_a_write_of_one_rank_is_told(of_two: Found) -> None:
    for said in of_two["write_alone"]:
        assert "scripts of ranks [1] have written other values" in said


def test_copies_are_those_of_the_present_weights(of_two: Found) -> None:
    for without, with_copies in of_two["train_and_write"]:
        assert with_copies == without


REFUSED = [
    ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights = True: needs .*stage 3"),
    (
        {"stage": 0, "zero_quantized_nontrainable_weights": True},
        "zero_quantized_nontrainable_weights = True: needs .*stage 3",
    ),
    ({"stage": 2, "zero_quantized_gradients": True}, "zero_quantized_gradients = True: needs .*stage 3"),
    ({"stage": 1, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size = 2: needs .*stage 3; it is 1"),
    (
        {"stage": 3, "zero_hpz_partition_size": 4},
        "zero_hpz_partition_size = 4: ranks of a machine, by which the 6 ranks can be divided",
    ),
]


@pytest.mark.parametrize(("zero", "said"), REFUSED, ids=[said.split()[0] for _, said in REFUSED])
def test_what_is_refused(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, world_size=6)


def test_one_process_sends_nothing(tmp_path: Path) -> None:
    losses = []
    for zero in ({}, CODED):
        engine, *_ = offloadzero.initialize(model=text_model(), config=config_of("host", tmp_path, zero))
        assert engine.zero_quantized_weights() is bool(zero)
        losses.append(one_step(engine, *text_batch(0, MICRO_BATCH)))
        assert not [line for line in engine._runtime.plan.lines if line.what == "weight codes"]
        engine.close()
    assert losses[0] == losses[1]
