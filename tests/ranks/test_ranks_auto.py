"""`"placement": "auto"` over several ranks: one choice on all of them, from what each one has at the same time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from offloadzero.core.segments import SegmentKind
from offloadzero.engine import runtime
from offloadzero.engine.build import open_store
from offloadzero.planning import engine_plan
from offloadzero.ranks.group import Group
from tests.support.ranks import run_ranks
from tests.support.sharded import config_of, digest, engine_of, said_of, train

BUDGETS = {1: "250KiB", 3: "140KiB"}  # of the device, by stage
LEAST = {1: 1100 << 10, 3: 895 << 10}  # of the second rank's host: with it no tier holds all


def choose(rank: int, stage: int, directory: str) -> dict[str, Any]:
    """Train with homes by name and with "auto", where this rank's machine has less memory than the other's."""
    found: dict[str, Any] = {}
    free_bytes = [1 << 30, 2 * LEAST[stage]][rank]  # of two ranks
    for name in ("resident", "auto"):
        config = config_of("resident", stage, Path(directory), world_size=2)
        if name == "auto":
            config["offloadzero"] |= {
                "placement": "auto",
                "placement_tokens": 24,
                "nvme_path": directory,
                "budgets": {"device": BUDGETS[stage]},
                "update": {"num_chunks_in_flight": 3},
            }
        with mock.patch.object(engine_plan, "available_host_bytes", return_value=free_bytes):
            engine = engine_of(config)
        losses = train(engine, rank, 2, num_steps=4)
        found[name] = losses, digest(engine.module_state_dict())
        of_engine = engine.optimizer.runtime
        homes = ((i, kind.value, tier.value) for (i, kind), tier in of_engine.plan.placement.items())
        found[f"homes of {name}"] = [[*home] for home in sorted(homes)]
        found[f"table of {name}"] = of_engine.memory_table()
        engine.close()
    with (
        mock.patch.object(engine_plan, "available_host_bytes", return_value=free_bytes),
        mock.patch.object(Group, "least", side_effect=list),
    ):
        found["not agreed"] = said_of(lambda: engine_of(config))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_choose_the_same_homes(stage: int, tmp_path: Path) -> None:
    by_rank = run_ranks(choose, 2, tmp_path, stage, str(tmp_path))
    first = by_rank[0]["homes of auto"]
    for found in by_rank:
        assert found["auto"] == found["resident"]
        assert found["homes of auto"] == first != found["homes of resident"]
        assert "goes by bytes: a step of several ranks is not simulated" in found["table of auto"]
        assert found["not agreed"].startswith(
            "ConfigError: offloadzero.placement = 'auto': homes by name: ranks [1], "
        )
    assert {tier for _, _, tier in first} == {"device", "host", "nvme"}
    homes_of_params = {tier for _, kind, tier in first if kind == SegmentKind.PARAM.value}
    assert homes_of_params == ({"device"} if stage == 1 else {"device", "host", "nvme"})


def look_late(rank: int, directory: str) -> bool:
    """Start an engine; the second rank looks at the memory late. Whether another has taken some by then."""
    taken, found = Path(directory, "taken"), list[bool]()

    def look() -> int:
        time.sleep(0.5 * rank)
        found.append(taken.exists())
        return 1 << 40

    def take(*given: Any, **keys: Any) -> Any:
        taken.touch()
        return open_store(*given, **keys)

    with (
        mock.patch.object(engine_plan, "available_host_bytes", look),
        mock.patch.object(runtime, "open_store", take),
    ):
        engine_of(config_of("resident", 1, Path(directory), world_size=2)).close()
    return any(found)


def test_all_ranks_look_at_the_memory_before_one_takes_some(tmp_path: Path) -> None:
    """A rank that looked later took its share of what the others had left, and refused to start."""
    assert run_ranks(look_late, 2, tmp_path, str(tmp_path)) == [False, False]
