"""Power failures: durable runs go on from what crash images leave, with all of a step's bits, and with the newest step.

OFFLOADZERO_TEST_DAMAGES of them (1000 for the campaign): [Note: crash images] in crash_images.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.durable.imaged import Case
from tests.durable.runs import KINDS
from tests.support.tiny import script_environment
from tests.support.warm import run_warm

NUM_IMAGES = int(os.environ.get("OFFLOADZERO_TEST_DAMAGES", "12"))
FIRST_SEED = int(os.environ.get("OFFLOADZERO_TEST_FIRST_SEED", "0"))
KINDS_OF_ONE = [
    *dict.fromkeys(
        ("host parameters", "script writes", *(name for name in KINDS if KINDS[name].num_ranks == 1))
    )
]
# A bug, the kind of run that has it in each step, and the moment at which it shows: with the first two in all images,
# with "no fdatasync" in 11 of 12 at least, with the last one in two of three (`Images` draws what is lost).
PLANTED = {
    "updates before the commit": ("nvme", "unnamed"),
    "present place written": ("no clipping", "unnamed"),
    "no fdatasync": ("nvme", "named"),
    "no fsync of names": ("nvme", "named"),
}
NUM_PLANTED_IMAGES = 12


def run(cases: Sequence[Case], directory: Path) -> list[dict[str, Any]]:
    """What was found in each."""
    (directory / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    command = [sys.executable, "-m", "tests.durable.imaged", str(directory / "cases.json")]
    timeout_s = 60 + 20 * len(cases) + 4 * sum(case.num_images for case in cases)
    done = run_warm(command, env=script_environment(), timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) == len(cases)
    return ends


def test_a_run_goes_on_from_what_a_power_failure_leaves(tmp_path: Path) -> None:
    num_runs = min(len(KINDS_OF_ONE), max(2, NUM_IMAGES // 40))
    cases = [
        Case(
            seed=FIRST_SEED + number,
            kind=KINDS_OF_ONE[(FIRST_SEED + number) % len(KINDS_OF_ONE)],
            directory=str(tmp_path / f"run {number}"),
            first=(2, 0, 3)[number % 3],
            num_images=NUM_IMAGES // num_runs,
        )
        for number in range(num_runs)
    ]
    for end in run(cases, tmp_path):
        assert not end["wrong"], f"seed {end['seed']}, {end['kind']}:\n" + "\n".join(end["wrong"])
        assert len(end["steps"]) > 1, end  # else they were images of one moment


@pytest.mark.parametrize("bug", PLANTED)
def test_a_run_that_orders_its_writes_otherwise_is_found(bug: str, tmp_path: Path) -> None:
    kind, moments = PLANTED[bug]
    (end,) = run([Case(1, kind, str(tmp_path / "run"), 2, NUM_PLANTED_IMAGES, bug, moments)], tmp_path)
    assert end["wrong"], end


def test_nothing_is_found_at_these_moments_without_a_bug(tmp_path: Path) -> None:
    cases = [
        Case(1, kind, str(tmp_path / f"run {number}"), 2, NUM_PLANTED_IMAGES // 2, moments=moments)
        for number, (kind, moments) in enumerate(dict.fromkeys(PLANTED.values()))
    ]
    for end in run(cases, tmp_path):
        assert not end["wrong"], end
