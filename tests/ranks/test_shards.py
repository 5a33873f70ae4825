"""What a rank keeps: every element of every segment is one rank's, in its place."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadzero.core.segments import SegmentKind
from offloadzero.errors import StateError
from offloadzero.ranks.shard import ShardSpec
from offloadzero.step.gradient_order import ReduceOrder
from offloadzero.update.kept_elements import gathered_regions, kept_params, kept_place, kept_regions
from offloadzero.update.records import Record, all_ranges, make_record, segment_slice, update_ranges
from offloadzero.update.specs.adam import ADAM

sizes = st.lists(st.sampled_from([0, 1, 2, 127, 128, 129, 511, 2048, 4097, 9000]), min_size=1, max_size=6)


def records_of(
    numbers: list[int], num_frozen: int, world_size: int, *, compact: bool, resident: bool = False
) -> list[Record]:
    """One for each rank, of the same parameters: the last `num_frozen` are frozen."""
    dtype = torch.bfloat16 if compact else torch.float32
    params = [
        (f"p{i}", torch.nn.Parameter(torch.zeros(n)), None if i >= len(numbers) - num_frozen else i % 2)
        for i, n in enumerate(numbers)
    ]
    return [
        make_record(
            0,
            "unit",
            dtype,
            params,
            spec=ADAM,
            shard=ShardSpec(rank, world_size),
            resident=resident,
            compact=compact,
        )
        for rank in range(world_size)
    ]


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 2), st.integers(2, 5), st.booleans(), st.booleans())
def test_each_element_is_kept_once(
    numbers: list[int], num_frozen: int, world_size: int, compact: bool, resident: bool
) -> None:
    """The homes of all ranks together give each slot back, and what is gathered is the whole record."""
    records = records_of(numbers, num_frozen, world_size, compact=compact, resident=resident)
    full = torch.arange(records[0].num_elements, dtype=torch.float64)
    homes = [kept_params(record, full) for record in records]
    for slot in records[0].slots:
        found = torch.full((slot.num_elements,), -1.0, dtype=torch.float64)
        for record, home in zip(records, homes, strict=True):
            place = kept_place(record, slot, SegmentKind.PARAM)
            part = found[place.skipped : place.skipped + place.num_elements]
            assert bool((part == -1).all()), "two ranks keep an element"
            part.copy_(home[place.start : place.start + place.num_elements])
        assert torch.equal(found, full[slot.offset : slot.offset + slot.num_elements])
    gathered = torch.zeros_like(full)
    for record, home in zip(records, homes, strict=True):
        for region, kept in zip(gathered_regions(record, gathered), kept_regions(record, home), strict=True):
            start, stop = record.shard.kept_range(region.numel())
            region[start:stop] = kept
    assert torch.equal(gathered, full)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(2, 5), st.booleans(), st.booleans())
def test_updates_of_all_ranks_are_the_update_of_one(
    numbers: list[int], world_size: int, compact: bool, resident: bool
) -> None:
    """Ranges, measured parts and scales of the shards, put together, are those of a record that is not divided."""
    records = records_of(numbers, 0, world_size, compact=compact, resident=resident)
    whole = records_of(numbers, 0, 1, compact=compact)[0]
    for ranges in (all_ranges, lambda record: update_ranges(record, record.trainable_slots)):
        group_of = torch.full((records[0].num_trainable,), -1)
        for record in records:
            first, _ = record.shard.kept_range(record.num_trainable)
            for part in ranges(record):
                assert 0 <= part.start < part.stop <= record.kept_trainable
                group_of[first + part.start : first + part.stop] = part.group_index
                if compact:
                    segment_slice(SegmentKind.SCALES, part.start, part.stop)  # raises inside a block
        for part in ranges(whole):
            assert bool((group_of[part.start : part.stop] == part.group_index).all())
    measured = [
        sum(stop - start for start, stop in parts)
        for parts in zip(*[r.kept_parts for r in records], strict=True)
    ]
    assert measured == [slot.num_elements for slot in whole.slots]
    for record in records:
        flat = [bound for part in record.kept_parts for bound in part]
        assert flat == sorted(flat), "the norms are taken in ascending order"


def test_a_complete_gradient_waits_for_those_before_it() -> None:
    order = ReduceOrder([0, 1, 2, 3])
    order.begin()
    assert order.complete(2, "c") == []
    assert order.complete(3, "d") == [3, 2]
    assert order.complete(0, "a") == []
    assert order.rest([0, 2, 3]) == [0]
    order.learn([3, 0, 2])
    order.begin()
    assert [order.complete(3, "d"), order.complete(2, "c"), order.complete(0, "a")] == [[3], [], [0, 2]]
    assert order.rest([0, 1, 2, 3]) == [1], "what is expected no more comes at the end, if some rank has it"
    with pytest.raises(StateError, match="c gets its gradients a second time in one backward"):
        order.complete(2, "c")


def test_ranks_that_complete_other_gradients_reduce_in_one_order() -> None:
    """The one has all at once, the other some at the end only."""
    one, other = ReduceOrder(range(5)), ReduceOrder(range(5))
    early = [one.complete(index, "") for index in (4, 3, 2, 1, 0)]
    late = [other.complete(index, "") for index in (4, 2, 0)]
    present = [0, 1, 2, 3, 4]
    first, second = [*chain(*early), *one.rest(present)], [*chain(*late), *other.rest(present)]
    assert first == second == [4, 3, 2, 1, 0]
    for order in (one, other):
        order.expect_only([0, 2, 4])
        order.begin()
    assert [other.complete(4, ""), other.complete(2, "")] == [[4], [2]]
    assert [one.complete(index, "") for index in (4, 3, 2)] == [[4], [], [2]]
    assert one.rest([2, 3, 4]) == other.rest([2, 3, 4]) == [3]
