"""A record of runs tells when one of their bits is another."""

from __future__ import annotations

import copy
import json

from tests.support.recorded_runs import RANKS_RUNS, RUNS, differences, record


def test_a_run_is_recorded_the_same_twice_and_a_bit_is_seen() -> None:
    name = "host clipping accumulation"
    once, again = (record([name], num_steps=2) for _ in range(2))
    assert differences(json.loads(json.dumps(once)), again) == []
    run = once["runs"][name]
    assert len(run["losses"]) == 6
    assert run["weights"]
    assert {place.rpartition(".")[2] for place in run["states"]} >= {"exp_avg", "exp_avg_sq", "step"}
    for part in ("weights", "states"):
        changed = copy.deepcopy(once)
        place = next(iter(run[part]))
        changed["runs"][name][part][place] = "0" * 32
        assert differences(once, changed) == [f"/runs/{name}/{part}/{place}"]


def test_the_runs_are_of_every_placement_and_layout() -> None:
    assert len(RUNS) == 12
    assert {placement for placement, _, _ in RUNS.values()} == {"resident", "host", "nvme", "mixed"}
    assert len(RANKS_RUNS) == 12
    of_ranks = {(run.stage, run.placement) for run in RANKS_RUNS.values()}
    assert {stage for stage, _ in of_ranks} == {1, 2, 3}
    assert {placement for _, placement in of_ranks} == {"resident", "host", "nvme"}


def test_a_bit_of_the_second_rank_is_seen() -> None:
    name = "2 ranks, stage 3, nvme, codes and near copies"
    once, again = (record([name], num_steps=2) for _ in range(2))
    assert differences(once, again) == []
    first, second = (once["runs"][name][f"rank {rank}"] for rank in range(2))
    assert first["weights"] == second["weights"]
    assert first["losses"] != second["losses"]
    changed = copy.deepcopy(once)
    changed["runs"][name]["rank 1"]["losses"][-1] = "0x0p+0"
    assert differences(once, changed) == [f"/runs/{name}/rank 1/losses"]
