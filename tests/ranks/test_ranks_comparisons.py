"""How ranks tell each other a few numbers: few ranks each to each, many in a reduction."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

import offloadzero
from offloadzero.access import home_access
from offloadzero.core.launch import launched_local_size
from offloadzero.errors import ConfigError
from offloadzero.observe import collectives
from offloadzero.observe.collectives import ALL_REDUCE, ALL_TO_ALL, BROADCAST, MOST_TELLING_EACH, comparison
from offloadzero.ranks import process_groups
from offloadzero.ranks.process_groups import _told
from offloadzero.zero import safe_get_full_fp32_param
from tests.support.ranks import run_ranks
from tests.support.sharded import config_of, digest, engine_of, micro_batch, said_of, train

NUMBERS = [-(2**62), 7, 2**61 - 1]
NORMS = [math.nan, 0.1, math.inf]


def read(engine: offloadzero.Engine) -> dict[str, str]:
    return digest({name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()})


def tell(rank: int, directory: str, most: int) -> dict[str, Any]:
    with patch.object(collectives, "MOST_TELLING_EACH", most):
        engine = engine_of(config_of("host", 3, Path(directory), world_size=3))
        group = engine._runtime.group
        channel = group.control
        found = {
            "same": channel.by_rank_unless_same(NUMBERS, "the same"),
            "one": channel.by_rank_unless_same([*NUMBERS[:2], rank // 2], "one that differs"),
            "each": channel.by_rank([NUMBERS[rank], rank], "each one's"),
            "none": channel.by_rank([], "none"),
            "told": repr(_told(group.decisions, NORMS[rank], 5, [rank])),
            "read": read(engine),
            "trained": said_of(lambda: train(engine, rank, 3, num_steps=1)),
            "kinds": sorted(key for key in group.collectives() if key.startswith(("orders", "states"))),
        }
        if rank == 2:
            group.order.note(0)
        found["departed"] = said_of(lambda: train(engine, rank, 3, num_steps=1))
        engine.close()
    return found


@pytest.mark.parametrize(("most", "kind"), [(2, ALL_REDUCE), (3, ALL_TO_ALL)])
def test_each_rank_knows_the_numbers_of_all(tmp_path: Path, most: int, kind: str) -> None:
    alone = engine_of(config_of("host", 3, tmp_path))
    values = read(alone)
    alone.close()
    for rank, found in enumerate(run_ranks(tell, 3, tmp_path / "ranks", str(tmp_path), most)):
        assert found["same"] is None
        assert found["one"] == [[*NUMBERS[:2], 0], [*NUMBERS[:2], 0], [*NUMBERS[:2], 1]]
        assert found["each"] == [[number, place] for place, number in enumerate(NUMBERS)]
        assert found["none"] == [[], [], []]
        assert found["read"] == values
        assert found["told"] == "([nan, 0.1, inf], [[0, 1, 2]])"
        assert found["trained"] == "nothing"
        states = {ALL_REDUCE: [ALL_REDUCE], ALL_TO_ALL: [ALL_TO_ALL, BROADCAST]}[kind]
        assert found["kinds"] == [f"orders {kind}", *(f"states {each}" for each in states)]
        assert "the ranks fetch weights in different orders: ranks [2]" in found["departed"], rank


def test_what_is_planned_of_a_comparison_is_what_is_sent() -> None:
    assert comparison(MOST_TELLING_EACH, 2) == (ALL_TO_ALL, 16 * MOST_TELLING_EACH)
    assert comparison(MOST_TELLING_EACH + 1, 2) == (ALL_REDUCE, torch.zeros(2, 2, dtype=torch.int64).nbytes)


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_where_nobody_else_is_there_an_engine_starts_and_does_not_train(
    num_ranks: int, tmp_path: Path
) -> None:
    dist.init_process_group("fake", rank=1, world_size=num_ranks)
    try:
        engine = engine_of(config := config_of("host", 3, tmp_path, world_size=2))
        group = engine._runtime.group
        assert group.control.by_rank_unless_same([5, -6], "numbers") is None
        assert group.least([5, -6]) == [5, -6]
        assert group.is_on_some(True)
        assert not group.is_on_some(False)
        engine.backward(engine(micro_batch(1, 1, 2)))
        engine.step()
        assert "the ranks take different steps" in said_of(engine.synchronize)
        engine.close()
        other = engine_of(config)
        assert "the other ranks' parts are not there" in said_of(lambda: read(other))
        other.close()
    finally:
        dist.destroy_process_group()


def read_and_close(rank: int, directory: str) -> str:
    engine = engine_of(config_of("host", 3, Path(directory), world_size=3))
    weight = engine.module.get_parameter("blocks.0.norm.weight")  # the first rank keeps all of it
    gather = home_access.gather_parts

    def late(*given: Any) -> None:
        if rank == 2:
            time.sleep(1.0)  # the others close meanwhile, and it looks for ends again: LOOK_AGAIN_S
        gather(*given)

    with patch.object(home_access, "gather_parts", late):
        said = said_of(lambda: safe_get_full_fp32_param(weight))
    engine.close()
    return said


def test_a_rank_that_closes_after_a_read_does_not_end_that_of_a_late_one(tmp_path: Path) -> None:
    assert run_ranks(read_and_close, 3, tmp_path / "ranks", str(tmp_path)) == ["nothing"] * 3


def count_together(rank: int, directory: str) -> list[int]:
    """The ranks on a machine: on one, on two without a launcher, and as a launcher says it to some."""
    found, machines = [], {"one": ["a"] * 3, "two": ["a", "b", "b"], "launched": ["a", "b", "b"]}
    for name, of_ranks in machines.items():
        if name == "launched" and rank < 2:
            os.environ["LOCAL_WORLD_SIZE"] = "7"
        with patch.object(process_groups, "machine", lambda: of_ranks[rank]):  # noqa: B023
            engine = engine_of(config_of("host", 3, Path(directory), world_size=3))
        found.append(engine._runtime.group.local_world_size)
        engine.close()
    return found


def test_ranks_without_a_launcher_find_those_on_their_machine(tmp_path: Path) -> None:
    """On many machines each had a share of its cores and memory as if all ranks were on it."""
    found = run_ranks(count_together, 3, tmp_path / "ranks", str(tmp_path))
    assert found == [[3, 1, 7], [3, 2, 7], [3, 2, 2]]


def test_a_wrong_number_of_ranks_on_a_machine_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE = 'two'"):
        launched_local_size()
