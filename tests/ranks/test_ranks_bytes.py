"""The bytes that each rank keeps and sends, against the formulas of the ZeRO paper.

Counted are the places that the tiers of real engines have given out, and the collectives that were issued. Two ranks
over gloo, and 1,024 of which one is there; one, four and 64 too with OFFLOADZERO_TEST_RANKS=all.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg
from torch import Tensor, nn

import offloadzero
from offloadzero.config import UnitConfig, load_config
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import StateError
from offloadzero.observe.collectives import CollectiveCount, since, volume_bytes
from offloadzero.planning.engine_plan import plan_records
from offloadzero.planning.model.shapes import read_model
from offloadzero.planning.zero_formulas import rank_bytes
from offloadzero.ranks.shard import ShardSpec
from offloadzero.streaming.building.units import cut_units
from offloadzero.update.spec import UpdateForm
from offloadzero.update.specs.adam import ADAM
from offloadzero.update.staging import StagedChunk
from tests.support.models import Stack, features
from tests.support.ranks import run_ranks
from tests.support.sharded import make_odd_model
from tests.support.training import make_config, merge

IS_LONG = os.environ.get("OFFLOADZERO_TEST_RANKS") == "all"
WORLD_SIZES = (1, 2, 4) if IS_LONG else (2,)
FAKE_WORLD_SIZES = (64, 1024) if IS_LONG else (1024,)
STAGES = (0, 1, 2, 3)
TOLERANCE = 0.02
# Bytes of optimizer states per bf16 parameter: K of the paper.
STATE_BYTES = {
    "fp32": 2 + 4 + 4,  # 16 bits beside the parameter, in the place of the paper's fp32 copy; two moments
    "compact": 1 + 1 + 1 + 2 * 4 / 128,  # codes, and two scales per block
}


class Block(nn.Module):
    """GPT's: 12 width² + 13 width parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.second = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out(torch.sigmoid(q) * k + v)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """Blocks between two matrices; forward gives the loss."""

    def __init__(self, width: int, *, vocabulary: int, num_blocks: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def small_padding() -> Model:
    """Each unit is a little less than whole shards of four ranks."""
    return Model(205, vocabulary=2476)


def small_padding_of_many() -> Model:
    """The same of 1,024 ranks."""
    return Model(590, vocabulary=7100, num_blocks=1)


def config_of(
    stage: int, layout: str, directory: Path | str, *, accumulation: int = 1, **over: Any
) -> dict[str, Any]:
    """Parameters in host memory where they are divided, states in files."""
    placement = {"states": "nvme"} if stage in (1, 2) else {"param": "host", "states": "nvme"}
    more = {
        "zero_optimization": {"stage": stage},
        "offloadzero": {"placement": placement, "state_layout": layout},
    }
    return merge(make_config("host", directory, clipping=1.0, accumulation=accumulation), merge(more, over))


def engine_of(model: nn.Module, config: dict[str, Any]) -> offloadzero.Engine:
    engine, *_ = offloadzero.initialize(model=model, config=config)
    return engine


def counted(engine: offloadzero.Engine) -> dict[str, int]:
    """Bytes of the places that the tiers have given out as homes."""
    found = Counter({"params": 0, "grads": 0, "states": 0})
    for record in engine._runtime.records:
        homes = {**record.segments, SegmentKind.PARAM: record.param_home}
        for kind, home in homes.items():
            what = {"param": "params", "grad": "grads"}.get(str(kind), "states")
            found[what] += home.extent.num_bytes if home.extent is not None else home.memory.nbytes
    return dict(found)


def by_formula(num_params: int, stage: int, num_ranks: int, layout: str) -> dict[str, float]:
    """Of one rank. Stage 1 keeps a shard of the gradients here, as stage 2 does."""
    return {
        "params": 2 * num_params / (num_ranks if stage == 3 else 1),
        "grads": 2 * num_params / (num_ranks if stage >= 1 else 1),
        "states": STATE_BYTES[layout] * num_params / (num_ranks if stage >= 1 else 1),
    }


def num_params(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


# --- what a rank reads ---


def count_chunks(rank: int, directory: str) -> list[int]:
    """Chunks whose states were read ahead in backward: those the update has taken, and those it has not."""
    counts = {True: 0, False: 0}
    matches = StagedChunk.matches

    def matching(chunk: StagedChunk, *wanted: Any) -> bool:
        found = matches(chunk, *wanted)
        counts[found] += 1
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedChunk, "matches", matching)
        engine = engine_of(Stack(), make_config("nvme", directory, clipping=1.0))
        for step in range(4):
            engine.backward(engine(features(2 * step + rank, rows=2)))
            engine.step()
        engine.close()
    return [counts[True], counts[False]]


def test_what_is_read_ahead_has_elements_of_the_rank(tmp_path: Path) -> None:
    """The first of two ranks keeps all of a small unit: the other's update has no chunk of it."""
    for taken, dropped in run_ranks(count_chunks, 2, tmp_path / "ranks", str(tmp_path)):
        assert taken
        assert not dropped


# --- what a rank keeps ---

ODD_UNITS = {"units": {"patterns": ["blocks.?"]}}


def units_of_odd() -> dict[str, list[list[int]]]:
    """By unit of OddModel: the sizes of its trainable parameters, and of its frozen ones."""
    units: dict[str, list[list[int]]] = {}
    for name, param in make_odd_model().named_parameters():
        root = name.rpartition(".")[0]
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else root
        sizes = units.setdefault(
            unit if unit in ("emb", "wide", "narrow") or "." in unit else "rest", [[], []]
        )
        sizes[not param.requires_grad].append(param.numel())
    return units


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def padded_homes(stage: int, num_ranks: int, layout: str) -> dict[str, int]:
    """Bytes of OddModel's homes on one rank, by hand.

    A parameter begins at a multiple of 64 bytes, or of a block of 128 elements. A rank has whole file blocks of each
    unit: 2,048 elements, or 4,096; of the rest, whose parameters stay whole, one such multiple. States are in files.
    """
    granule, block = (32, 2048) if layout == "fp32" else (128, 4096)
    divided = num_ranks if stage >= 1 else 1
    found = {"params": 0, "grads": 0, "states": 0}
    for unit, parts in units_of_odd().items():
        each = granule if unit == "rest" and divided > 1 else block
        trained, frozen = (up(sum(up(size, granule) for size in sizes), each * divided) for sizes in parts)
        is_whole = stage < 3 or unit == "rest"
        found["params"] += 2 * (trained + frozen) // (1 if is_whole else divided)
        kept = trained // divided
        found["grads"] += 2 * kept
        per_element = (2, 4, 4) if layout == "fp32" else (1, 1, 1)
        found["states"] += sum(up(size * kept, 4096) for size in per_element)
        found["states"] += 0 if layout == "fp32" else up(kept // 128 * 8, 4096)
    return found


# --- what the ranks send ---

SENT = (*((stage, 1) for stage in STAGES), (0, 3), (1, 3), (3, 3))  # stages and micro batches of a step


def second_step(engine: offloadzero.Engine, rank: int, num_micro: int) -> dict[str, CollectiveCount]:
    """The collectives of a step after the first one, which learns the order of use."""
    for _ in range(2):
        before = engine.collectives()
        for number in range(num_micro):
            generator = torch.Generator().manual_seed(10 * rank + number)
            engine.backward(engine(torch.randint(0, 2000, (2, 9), generator=generator)))
            engine.step()
        engine.synchronize()
        for unit in engine._runtime.executor.units:
            if unit.fetched is not None:
                unit.fetched.wait()
    return since(before, engine.collectives())


# Of the large model, as the formulas are; the odd one is counted in all of them, to the byte.
PADDED = {
    (stage, layout)
    for stage in STAGES
    for place, layout in enumerate(STATE_BYTES)
    if IS_LONG or (stage + place) % 2
}


def measure(rank: int, directory: str) -> dict[str, Any]:
    """Find what the rank keeps of both models, and what its second step sends, by case."""
    kept: dict[str, Any] = {}
    for layout in STATE_BYTES:
        for stage in STAGES:
            for name, model in (("small padding", small_padding()), ("odd", make_odd_model())):
                if name != "odd" and (stage, layout) not in PADDED:
                    continue
                units = ODD_UNITS if name == "odd" else {}
                engine = engine_of(model, config_of(stage, layout, directory, offloadzero=units))
                kept[f"{name} {stage} {layout}"] = counted(engine)
                runtime = engine._runtime
                told = rank_bytes(
                    runtime.records,
                    runtime.plan.placement,
                    grads_have_homes=runtime.plan.grads_have_homes,
                    gathers_params=stage == 3,
                )
                kept[f"told of {name} {stage} {layout}"] = [
                    told.formula,
                    told.whole,
                    told.padding,
                    told.total,
                ]
                kept[f"said of {name} {stage} {layout}"] = told.text() in engine.memory_table()
                engine.close()
    sent = {}
    run_dir = {"observe": {"run_dir": f"{directory}/run"}}
    for stage, num_micro in SENT:
        more = run_dir if (stage, num_micro) == (3, 1) else {}
        config = config_of(stage, "fp32", directory, accumulation=num_micro, offloadzero=more)
        engine = engine_of(small_padding(), config)
        sent[f"{stage} {num_micro}"] = second_step(engine, rank, num_micro)
        sent[f"total {stage} {num_micro}"] = engine.collectives()
        sent[f"report {stage} {num_micro}"] = dict(engine.last_step_report().collectives)
        engine.close()
    return {"kept": kept, "sent": sent}


@pytest.fixture(scope="module", params=WORLD_SIZES)
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, list[dict[str, Any]]]:
    """The number of ranks, their directory, and what each of them has found."""
    directory = tmp_path_factory.mktemp(f"bytes-{request.param}")
    found = run_ranks(measure, request.param, directory / "ranks", str(directory), timeout_s=240)
    return request.param, directory, found


@pytest.mark.parametrize("layout", list(STATE_BYTES))
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_keeps_what_the_formulas_say(
    measured: tuple[int, Path, list[dict[str, Any]]], stage: int, layout: str
) -> None:
    num_ranks, _, by_rank = measured
    expected = by_formula(num_params(small_padding()), stage, num_ranks, layout)
    for found in by_rank:
        if (stage, layout) in PADDED:
            kept = found["kept"][f"small padding {stage} {layout}"]
            assert kept == pytest.approx(expected, rel=TOLERANCE)
            assert all(kept[what] >= expected[what] for what in expected)
        assert found["kept"][f"odd {stage} {layout}"] == padded_homes(stage, num_ranks, layout)


@pytest.mark.parametrize("layout", list(STATE_BYTES))
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_told_is_what_the_tiers_have_given_out(
    measured: tuple[int, Path, list[dict[str, Any]]], stage: int, layout: str
) -> None:
    """Formula, what is not divided, and padding add up to it; the table says so where there are several ranks."""
    num_ranks, _, by_rank = measured
    units = units_of_odd()
    num_odd = sum(sum(sizes) for parts in units.values() for sizes in parts)
    num_trainable = sum(sum(trained) for trained, _ in units.values())
    divided, params_divided = num_ranks if stage >= 1 else 1, num_ranks if stage == 3 else 1
    formula = 2 * num_odd / params_divided + (2 + STATE_BYTES[layout]) * num_trainable / divided
    whole = 2 * sum(units["rest"][0]) * (1 - 1 / params_divided)
    for found in by_rank:
        kept = found["kept"]
        total = sum(kept[f"odd {stage} {layout}"].values())
        expected = [formula, whole, total - formula - whole, total]
        assert kept[f"told of odd {stage} {layout}"] == pytest.approx(expected)
        assert kept[f"said of odd {stage} {layout}"] == (num_ranks > 1)


@pytest.mark.parametrize(("stage", "num_micro"), SENT)
def test_ranks_send_what_the_papers_say(
    measured: tuple[int, Path, list[dict[str, Any]]], stage: int, num_micro: int
) -> None:
    """Volumes in bf16: Ψ is two bytes for each parameter."""
    num_ranks, _, by_rank = measured
    if num_ranks == 1:
        assert by_rank[0]["sent"][f"total {stage} {num_micro}"] == {}
        return
    sizes = [2 * sum(param.numel() for param in unit.parameters()) for unit in small_padding().children()]
    ends = sizes[0] + sizes[-1]  # the embedding, the head
    psi = sum(sizes)
    expected = {
        0: {"gradients all-reduce": num_micro * psi},
        1: {"gradients reduce-scatter": num_micro * psi, "updates all-gather": psi},
        # The head is used last in forward and first in backward, and the embedding's backward reads no weight.
        3: {"gradients reduce-scatter": num_micro * psi, "weights all-gather": num_micro * (2 * psi - ends)},
    }[1 if stage == 2 else stage]
    for found in by_rank:
        sent = {key: CollectiveCount(*count) for key, count in found["sent"][f"{stage} {num_micro}"].items()}
        large = {key: count for key, count in sent.items() if count.num_bytes > psi / 1000}
        assert {key: count.num_bytes for key, count in large.items()} == pytest.approx(
            expected, rel=TOLERANCE
        )
        papers = {0: 2 * num_micro, 1: num_micro + 1, 2: num_micro + 1, 3: 3 * num_micro}[stage] * psi
        spared = num_micro * ends if stage == 3 else 0
        assert volume_bytes(large) + spared == pytest.approx(papers, rel=TOLERANCE)
        assert volume_bytes(sent) - volume_bytes(large) < psi / 1000, "what the ranks agree on is little"
        if stage == 3:  # by each fetch 16 bytes to each rank
            num_fetches = sent["weights all-gather"].num_calls
            assert sent["orders all-to-all"] == (num_fetches, 16 * num_ranks * num_fetches)


def test_a_step_s_record_tells_its_collectives(
    measured: tuple[int, Path, list[dict[str, Any]]],
) -> None:
    """One that goes on when a step ends is counted in the next one."""
    num_ranks, directory, by_rank = measured
    if num_ranks == 1:
        return
    sent = by_rank[0]["sent"]
    records = [json.loads(line) for line in (directory / "run" / "steps.jsonl").read_text().splitlines()]
    counts = [record["collectives"] for record in records]
    assert {key: [count["calls"], count["bytes"]] for key, count in counts[1].items()} == sent["report 3 1"]
    for key in ("weights all-gather", "gradients reduce-scatter"):
        _, in_all = sent["total 3 1"][key]
        _, of_one = sent["3 1"][key]
        assert in_all - of_one <= sum(count[key]["bytes"] for count in counts) <= in_all
    assert by_rank[1]["sent"]["report 3 1"] == {}, "the first rank tells of the run"


@pytest.mark.parametrize(("dtype", "expected"), [("fp16", (2, 2, 12)), ("fp32", (4, 4, 8))])
def test_the_states_of_other_dtypes(dtype: str, expected: tuple[int, int, int], tmp_path: Path) -> None:
    """Bytes per parameter of one process: fp16 has the paper's fp32 copy, fp32 is its own."""
    model = small_padding()
    fp16 = {"enabled": dtype == "fp16", "loss_scale": 128.0}
    engine = engine_of(model, config_of(3, "fp32", tmp_path, bf16={"enabled": False}, fp16=fp16))
    kept = counted(engine)
    engine.close()
    psi = num_params(model)
    assert list(kept.values()) == pytest.approx([each * psi for each in expected], rel=TOLERANCE)
    assert list(kept) == ["params", "grads", "states"]


# --- many ranks, of which one is there ---


@pytest.fixture(params=FAKE_WORLD_SIZES)
def fake_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process group of so many, which answers for those that are not there."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    dist.init_process_group("fake", rank=request.param - 1, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", list(STATE_BYTES))
@pytest.mark.parametrize("stage", STAGES if IS_LONG else (1, 3))
def test_one_of_many_ranks_keeps_what_the_formulas_say(
    fake_ranks: int, stage: int, layout: str, tmp_path: Path
) -> None:
    model = small_padding_of_many()
    expected = by_formula(num_params(model), stage, fake_ranks, layout)
    engine = engine_of(model, config_of(stage, layout, tmp_path))
    kept = counted(engine)
    first, *_ = (line for line in engine.memory_table().splitlines() if line.startswith("rank "))
    engine.close()
    assert first.startswith(f"rank {fake_ranks - 1} of {fake_ranks}, stage {stage}: homes ")
    if (
        layout == "compact"
    ):  # a rank's 4,096 elements of a unit have 256 bytes of scales, in a file block of their own
        scale_bytes = 8 * 4096 * 1024 // (fake_ranks if stage else 1) // 128
        kept["states"] -= len(list(model.children())) * (up(scale_bytes, 4096) - scale_bytes)
    assert kept == pytest.approx(expected, rel=TOLERANCE)


def test_one_of_many_ranks_keeps_little_of_the_small_rest_and_does_not_train(
    fake_ranks: int, tmp_path: Path
) -> None:
    """The rest is whole on each of them: a file block of it for each rank would be megabytes."""
    engine = engine_of(make_odd_model(), config_of(3, "fp32", tmp_path, offloadzero=ODD_UNITS))
    kept = counted(engine)
    (rest,) = (record for record in engine._runtime.records if record.resident)
    engine.backward(engine(torch.randint(0, 61, (2, 9))))
    engine.step()
    with pytest.raises(StateError, match="the ranks take different steps: "):
        engine.synchronize()
    engine.close()
    assert kept == padded_homes(3, fake_ranks, "fp32")
    assert rest.param_bytes <= 64 * fake_ranks < 2 * 2048 * fake_ranks


@pytest.mark.parametrize("layout", list(STATE_BYTES))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_of_seven_billion_over_many_ranks_has_little_padding(
    stage: int, layout: str, tmp_path: Path
) -> None:
    """Cut and planned as by the engine of each rank, without its numbers.

    A block has 197,640 elements for each of 1,024 ranks. In the compact layout that is 48.25 of the file blocks of its
    codes, and 3.06 of its scales.
    """
    tolerance = {"fp32": TOLERANCE, "compact": 0.025}[layout]
    model = read_model("llama:7b").on_meta()
    for num_ranks in (64, 1024):
        units = {"units": {"min_leaf_elements": UnitConfig().min_leaf_elements}}
        config = load_config(config_of(stage, layout, tmp_path, offloadzero=units), world_size=num_ranks)
        cut = cut_units(
            model,
            config.units,
            group_of={id(param): 0 for param in model.parameters()},
            param_dtype=torch.bfloat16,
            spec=ADAM,
            compact=layout == "compact",
            shard=ShardSpec(num_ranks - 1, num_ranks),
            gathers_params=stage == 3,
            is_reduced=True,
        )
        plan = plan_records(
            cut.records,
            config,
            together=cut.together,
            available={},
            form=UpdateForm.NATIVE,
            num_checkpointed=0,
        )
        told = rank_bytes(
            cut.records,
            plan.placement,
            grads_have_homes=plan.grads_have_homes,
            gathers_params=stage == 3,
        )
        expected = sum(by_formula(num_params(model), stage, num_ranks, layout).values())
        assert told.formula == pytest.approx(expected)
        assert told.total == pytest.approx(expected, rel=TOLERANCE if num_ranks == 64 else tolerance)
