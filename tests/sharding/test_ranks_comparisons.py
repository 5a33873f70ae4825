"""How ranks tell each other a few numbers: few ranks each to each, many in a reduction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from offloadzero.observe.collectives import ALL_REDUCE, ALL_TO_ALL, MOST_TELLING_EACH, comparison
from offloadzero.sharding import ranks
from offloadzero.step.reduced import _told
from tests.support.ranks import run_ranks
from tests.support.sharded import config_of, engine_of, said_of, train

NUMBERS = [-(2**62), 7, 2**61 - 1]
NORMS = [math.nan, 0.1, math.inf]


def tell(rank: int, directory: str, most: int) -> dict[str, Any]:
    with patch.object(ranks, "MOST_TELLING_EACH", most):
        engine = engine_of(config_of("host", 3, Path(directory), world_size=3))
        several = engine._runtime.several.ranks
        channel = several.control
        found = {
            "same": channel.by_rank_unless_same(NUMBERS, "the same"),
            "one": channel.by_rank_unless_same([*NUMBERS[:2], rank // 2], "one that differs"),
            "each": channel.by_rank([NUMBERS[rank], rank], "each one's"),
            "none": channel.by_rank([], "none"),
            "told": repr(_told(several.decisions, NORMS[rank], 5, [rank])),
            "trained": said_of(lambda: train(engine, rank, 3, num_steps=1)),
            "kinds": sorted(key for key in several.collectives() if key.startswith(("orders", "states"))),
        }
        if rank == 2:
            several.order.note(0)
        found["departed"] = said_of(lambda: train(engine, rank, 3, num_steps=1))
        engine.close()
    return found


@pytest.mark.parametrize(("most", "kind"), [(2, ALL_REDUCE), (3, ALL_TO_ALL)])
def test_each_rank_knows_the_numbers_of_all(tmp_path: Path, most: int, kind: str) -> None:
    for rank, found in enumerate(run_ranks(tell, 3, tmp_path / "ranks", str(tmp_path), most)):
        assert found["same"] is None
        assert found["one"] == [[*NUMBERS[:2], 0], [*NUMBERS[:2], 0], [*NUMBERS[:2], 1]]
        assert found["each"] == [[number, place] for place, number in enumerate(NUMBERS)]
        assert found["none"] == [[], [], []]
        assert found["told"] == "([nan, 0.1, inf], [5, 5, 5], [[0, 1, 2]])"
        assert found["trained"] == "nothing"
        assert found["kinds"] == [f"orders {kind}"]
        assert "the ranks fetch weights in different orders: ranks [2]" in found["departed"], rank


def test_what_is_planned_of_a_comparison_is_what_is_sent() -> None:
    assert comparison(MOST_TELLING_EACH, 2) == (ALL_TO_ALL, 16 * MOST_TELLING_EACH)
    assert comparison(MOST_TELLING_EACH + 1, 2) == (ALL_REDUCE, torch.zeros(2, 2, dtype=torch.int64).nbytes)


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_where_nobody_else_is_there_all_ranks_are_as_this_one(num_ranks: int) -> None:
    dist.init_process_group("fake", rank=1, world_size=num_ranks)
    try:
        several = ranks.make_ranks(torch.device("cpu"))
        assert several.control.by_rank_unless_same([5, -6], "numbers") is None
        assert several.control.by_rank([5, -6], "numbers") == [[5, -6]] * num_ranks
    finally:
        dist.destroy_process_group()
