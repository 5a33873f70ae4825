"""Which modules become units, and how a unit's parameters lie in its record."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offloadzero.config import UnitConfig
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError
from offloadzero.ranks.shard import ShardSpec
from offloadzero.streaming.building.units import UnitCut, cut_units
from offloadzero.update.records import Record, all_ranges, make_record, update_ranges
from offloadzero.update.specs.adam import ADAM
from tests.support.tiny import Block, TinyModel

REST = "(rest)"


def cut(model: nn.Module, *, dtype: torch.dtype | None = None, groups: Any = None, **keys: Any) -> UnitCut:
    group_of = groups if groups is not None else {id(param): 0 for param in model.parameters()}
    return cut_units(model, UnitConfig(**keys), group_of=group_of, param_dtype=dtype, spec=ADAM)


def contents(result: UnitCut) -> dict[str, list[str]]:
    return {record.name: [slot.name for slot in record.slots] for record in result.records}


def assert_partition(model: nn.Module, result: UnitCut) -> None:
    """Every parameter is in exactly one record."""
    placed = [id(slot.param) for record in result.records for slot in record.slots]
    assert sorted(placed) == sorted({id(param) for param in model.parameters()})
    assert [record.index for record in result.records] == list(range(len(result.records)))
    assert len({record.name for record in result.records}) == len(result.records)


# --- the cut ---


def module_of(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block(8) for _ in range(count))


def untied() -> nn.Module:
    model = TinyModel()
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())
    return model


def shared_twice() -> nn.Module:
    shared = Block(8)
    return module_of(blocks=nn.ModuleList([shared, Block(8), shared]))


FOUR = [f"blocks.{i}" for i in range(4)]
CUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "blocks, large leaves and the rest": (TinyModel, {"min_leaf_elements": 1000}, ["emb", *FOUR, REST]),
    "small leaves join the rest": (TinyModel, {"min_leaf_elements": 10**9}, [REST, *FOUR]),
    "an untied head": (untied, {"min_leaf_elements": 1000}, ["emb", *FOUR, REST, "head"]),
    "the outermost containers": (
        lambda: module_of(stages=nn.ModuleList(module_of(inner=blocks(2)) for _ in range(3))),
        {},
        ["stages.0", "stages.1", "stages.2"],
    ),
    "two stacks": (
        lambda: module_of(encoder=blocks(2), decoder=nn.Sequential(*blocks(2))),
        {},
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1"],
    ),
    "a Sequential of different classes is none": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
        {"min_leaf_elements": 50},
        ["0", REST, "2"],
    ),
    "members without parameters do not hide one": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout()),
        {},
        ["0", "2"],
    ),
    "a block at two positions": (shared_twice, {}, ["blocks.0", "blocks.1"]),
    "patterns": (
        TinyModel,
        {"patterns": ("blocks.*.up", "emb"), "min_leaf_elements": 10**9},
        ["emb", REST, *(f"{name}.up" for name in FOUR)],
    ),
    "an outer match takes the inner one": (
        TinyModel,
        {"patterns": ("blocks.0", "blocks.0.*"), "min_leaf_elements": 10**9},
        [REST, "blocks.0"],
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_model_is_cut(name: str) -> None:
    make, keys, expected = CUTS[name]
    model = make()
    result = cut(model, **keys)
    assert_partition(model, result)
    found = list(contents(result))
    assert [name for name in found if name != REST] == [name for name in expected if name != REST]
    assert (REST in found) == (REST in expected)


def test_the_rest_is_resident_and_stands_where_its_first_module_does() -> None:
    result = cut(TinyModel(), min_leaf_elements=1000)
    assert list(contents(result)) == ["emb", *FOUR, REST]
    assert [record.resident for record in result.records] == [False] * 5 + [True]
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    assert list(contents(cut(model, min_leaf_elements=50))) == ["0", REST, "2"]


def test_a_single_module_without_children() -> None:
    model = nn.Linear(8, 8)
    result = cut(model, min_leaf_elements=1)
    assert_partition(model, result)
    assert [record.resident for record in result.records] == [True], (
        "nothing is repeated, nothing is streamed"
    )


def test_which_unit_has_a_parameter() -> None:
    model = TinyModel()
    model.scale = nn.Parameter(torch.ones(3))
    model.blocks[1].gate = nn.Parameter(torch.ones(()))
    found = contents(cut(model, min_leaf_elements=1000))
    assert found["emb"] == ["emb.weight"], "the tied head belongs to the first that uses it"
    assert set(found[REST]) == {"scale", "norm.weight", "norm.bias"}
    assert "blocks.1.gate" in found["blocks.1"]


def test_a_stack_inside_a_named_part() -> None:
    model = nn.Sequential(OrderedDict(model=nn.ModuleDict({"layers": nn.ModuleList([Block(8), Block(8)])})))
    names = list(contents(cut(model)))
    assert all(name.startswith("model") for name in names)
    assert_partition(model, cut(model))


def test_a_pattern_without_a_match_names_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"blcks.*matches no module"):
        cut(TinyModel(), patterns=("blcks",))


def test_dtypes_are_kept_apart_or_cast() -> None:
    model = TinyModel()
    model.blocks[0].norm.to(torch.float32)
    model.blocks[0].up.to(torch.bfloat16)
    kept = [record for record in cut(model).records if record.name.startswith("blocks.0")]
    assert {record.dtype for record in kept} == {torch.float32, torch.bfloat16}
    assert len({record.name for record in kept}) == 2
    cast = [record for record in cut(model, dtype=torch.bfloat16).records if "blocks.0" in record.name]
    assert [record.dtype for record in cast] == [torch.bfloat16]


def test_frozen_parameters_are_in_no_group() -> None:
    model = TinyModel()
    model.blocks[0].requires_grad_(False)
    result = cut(model)
    record = next(record for record in result.records if record.name == "blocks.0")
    assert record.num_trainable == 0
    assert set(record.layout) == {SegmentKind.PARAM}


# --- records ---


def check_layout(record: Record) -> None:
    item = record.dtype.itemsize
    end = 0
    for slot in record.slots:
        assert slot.offset * item % 64 == 0, "kernels want the alignment of torch's allocator"
        assert slot.offset >= end, "parameters overlap"
        end = slot.offset + slot.num_elements
        if slot.trainable:
            assert end <= record.num_trainable
        else:
            assert slot.offset >= record.num_trainable
    assert end <= record.num_elements
    assert record.num_trainable <= record.num_elements
    for count in (record.num_trainable, record.num_elements):
        assert count * item % 4096 == 0, "segments are whole blocks"
    trainable = [slot.trainable for slot in record.slots]
    assert trainable == sorted(trainable, reverse=True), "trainable parameters come first"
    groups = [slot.group_index for slot in record.slots if slot.group_index is not None]
    assert groups == sorted(groups)


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
members = st.lists(st.tuples(shapes, st.sampled_from([None, 0, 1, 2])), min_size=1, max_size=8)


def record_of(parts: list[tuple[tuple[int, ...], int | None]], dtype: torch.dtype) -> Record:
    params = [
        (f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype)), group) for i, (shape, group) in enumerate(parts)
    ]  # fmt: skip
    return make_record(0, "unit", dtype, params, spec=ADAM)


@given(members, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
@settings(max_examples=100)
def test_record_layout(parts: list[tuple[tuple[int, ...], int | None]], dtype: torch.dtype) -> None:
    record = record_of(parts, dtype)
    check_layout(record)
    assert record.num_params == sum(int(torch.Size(shape).numel()) for shape, _ in parts)
    flat = torch.arange(record.num_elements, dtype=torch.float64)
    for slot in record.slots:
        view = slot.view_in(flat)
        assert view.shape == slot.shape
        if view.numel():
            assert view.reshape(-1)[0] == slot.offset
    padding = torch.zeros(record.num_trainable, dtype=torch.bool)
    for start, stop in record.padding:
        padding[start:stop] = True
    for slot in record.trainable_slots:
        assert not padding[slot.offset : slot.offset + slot.num_elements].any()


@given(members, st.data())
@settings(max_examples=100)
def test_update_ranges_cover_each_parameter_once(
    parts: list[tuple[tuple[int, ...], int | None]], data: st.DataObject
) -> None:
    record = record_of(parts, torch.bfloat16)
    slots = [slot for slot in record.trainable_slots if data.draw(st.booleans())]
    for slot in slots:
        slot.step = data.draw(st.integers(0, 2))
    factors = {slot.index: 0.5 for slot in slots if data.draw(st.booleans())}
    covered = torch.zeros(record.num_trainable, dtype=torch.int64)
    for part in update_ranges(record, slots, factors=factors):
        covered[part.start : part.stop] += 1
        for slot in record.slots:
            inside = slot.num_elements and part.start <= slot.offset < part.stop
            if inside:
                assert slot in slots, f"{slot.name} takes no part"
                assert (part.group_index, part.step) == (slot.group_index, slot.step)
                assert part.factor == factors.get(slot.index, 1.0)
    assert bool((covered <= 1).all())
    for slot in slots:
        assert bool((covered[slot.offset : slot.offset + slot.num_elements] == 1).all())


@given(members, st.data())
@settings(max_examples=100)
def test_all_ranges_are_the_ranges_of_all(
    parts: list[tuple[tuple[int, ...], int | None]], data: st.DataObject
) -> None:
    record = record_of(parts, torch.bfloat16)
    most = data.draw(st.integers(0, 1))  # often equal
    for slot in record.trainable_slots:
        slot.step = data.draw(st.integers(0, most))
    assert all_ranges(record) == update_ranges(record, record.trainable_slots)


def test_neighbours_with_equal_hyperparameters_are_one_range() -> None:
    record = record_of([((5,), 0), ((7, 3), 0), ((2,), 1), ((9,), None)], torch.bfloat16)
    ranges = update_ranges(record, record.trainable_slots)
    assert [(part.start, part.group_index) for part in ranges] == [(0, 0), (64, 1)]
    record.slots[1].step = 4
    assert len(update_ranges(record, record.trainable_slots)) == 3


@pytest.mark.parametrize(
    ("dtype", "master", "num_bytes"),
    [(torch.bfloat16, torch.int16, 12), (torch.float16, torch.float32, 14), (torch.float32, None, 12)],
)
def test_bytes_per_parameter(dtype: torch.dtype, master: torch.dtype | None, num_bytes: int) -> None:
    """DESIGN: state layouts."""
    layout = record_of([((4096,), 0)], dtype).layout
    assert layout.get(SegmentKind.MASTER, (None, 0))[0] == master
    assert sum(kind_dtype.itemsize * count for kind_dtype, count in layout.values()) == num_bytes * 4096


# --- what a rank keeps ---


@given(world_size=st.integers(1, 9), kept=st.integers(0, 1000))
def test_the_shards_of_all_ranks_are_the_whole(world_size: int, kept: int) -> None:
    shards = [ShardSpec(rank, world_size) for rank in range(world_size)]
    ranges = [shard.kept_range(kept * world_size) for shard in shards]
    assert [stop - start for start, stop in ranges] == [kept] * world_size
    assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), kept * world_size]
    with pytest.raises(AssertionError, match=f"no whole number of {world_size + 1} shards"):
        ShardSpec(0, world_size + 1).kept_elements(kept * (world_size + 1) + 1)
    with pytest.raises(AssertionError, match=f"rank {world_size} of {world_size}"):
        ShardSpec(world_size, world_size)


def test_a_shard_has_segments_of_its_own_part_under_the_layout_of_the_whole() -> None:
    """Which is longer by what makes each shard a whole number of file blocks in the smallest dtype."""
    params = [("w", nn.Parameter(torch.zeros(10_000)), 0), ("frozen", nn.Parameter(torch.zeros(300)), None)]
    whole = make_record(0, "unit", torch.bfloat16, params, spec=ADAM)
    half = make_record(0, "unit", torch.bfloat16, params, spec=ADAM, shard=ShardSpec(1, 2))
    assert (whole.num_elements, whole.num_trainable) == (12_288, 10_240)
    assert (half.num_elements, half.num_trainable) == (16_384, 12_288)
    assert half.kept_trainable == 6_144
    assert half.trainable_parts == whole.trainable_parts
    kept = {kind: count for kind, (_, count) in half.layout.items()}
    assert kept == {kind: 8_192 if kind is SegmentKind.PARAM else 6_144 for kind in whole.layout}
    assert all(half.layout[kind][0] == dtype for kind, (dtype, _) in whole.layout.items())
