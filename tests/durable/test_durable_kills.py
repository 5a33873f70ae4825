"""kill -9 of durable runs, again and again until they end: bit by bit as the undisturbed run, which is not durable.

OFFLOADZERO_TEST_KILLS of them (200 for the campaign), three or so in a run, of one kind of training after the other.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.durable.killed import Case
from tests.durable.runs import KINDS
from tests.support.tiny import script_environment
from tests.support.warm import run_warm

NUM_KILLS = int(os.environ.get("OFFLOADZERO_TEST_KILLS", "18"))
FIRST_SEED = int(os.environ.get("OFFLOADZERO_TEST_FIRST_SEED", "0"))
KILLS_PER_RUN = 3
# Those that differ most come first.
ORDER = (
    "host parameters",
    "two ranks, saves",
    "mixed",
    "fp16 mixed",
    "script writes",
    "adapter mixed",
    *sorted(KINDS),
)


def test_a_killed_run_ends_as_one_that_was_never_killed(tmp_path: Path) -> None:
    kinds = list(dict.fromkeys(ORDER))
    cases = [
        Case(seed, kinds[seed % len(kinds)], str(tmp_path / f"run {seed}"), KILLS_PER_RUN)
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_KILLS // KILLS_PER_RUN)
    ]
    (tmp_path / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    command = [sys.executable, "-m", "tests.durable.killed", str(tmp_path / "cases.json")]
    done = run_warm(command, env=script_environment(), timeout_s=60 + 40 * len(cases))
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [end["seed"] for end in ends] == [case.seed for case in cases]
    for end in ends:
        assert not end["wrong"], f"seed {end['seed']}, {end['kind']}: {end['lives']}\n" + "\n".join(
            end["wrong"]
        )
    num_killed = sum(end["num_killed"] for end in ends)
    print(f"{num_killed} kills in {len(ends)} runs")
    assert num_killed > NUM_KILLS // 3  # else they came too late
