"""A record of runs tells when one of their bits is another."""

from __future__ import annotations

import copy
import json

from tests.support.recorded_runs import RUNS, differences, record


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
