"""kill -9 of one of four ranks: the others stop with a named error in time, and files are whole or gone.

OFFLOADZERO_TEST_KILLS of them (200 for the campaign), at random moments of every phase of a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from offloadzero.memory.swap_file import remove_stale_files
from tests.ranks.killed import PHASES, WORLD_SIZE, Case, state_digest
from tests.support.sharded import config_of, engine_of
from tests.support.tiny import script_environment
from tests.support.warm import run_warm

NUM_KILLS = int(os.environ.get("OFFLOADZERO_TEST_KILLS", "1"))
FIRST_SEED = int(os.environ.get("OFFLOADZERO_TEST_FIRST_SEED", "0"))
KILLS_PER_START = 10
TIMEOUT_S = 12.0  # of the process groups
RAISE_WITHIN_S = 6.0  # after it, on busy cores
END_WITHIN_S = 30.0  # the interpreter, too
# Which phase by seed: those that wait for the timeout come late.
ORDER = ("backward", "save", "build", "forward", "step", "close", "start")
# About as many Python calls as a phase makes, and the seconds it takes.
SIZES = {
    "start": (300, 0.3),
    "build": (40_000, 0.8),
    "forward": (6_000, 0.1),
    "backward": (6_000, 0.2),
    "step": (2_000, 0.05),
    "save": (20_000, 0.3),
    "close": (2_000, 0.1),
}
assert set(ORDER) == set(PHASES) == set(SIZES)


def draw_case(seed: int, directory: Path) -> Case:
    """The run number `seed`."""
    draw = random.Random(seed)
    phase = ORDER[seed % len(ORDER)]
    num_calls, delay_s = SIZES[phase]
    happens_once = phase in ("start", "build", "close")
    return Case(
        directory=str(directory / str(seed)),
        victim=draw.randrange(WORLD_SIZE),
        phase=phase,
        occurrence=0 if happens_once else draw.randrange(3),
        num_calls=draw.randrange(1, num_calls) if draw.random() < 0.6 else 0,
        delay_s=delay_s * draw.random(),
        stage=draw.choice((3, 3, 1)),
        has_port=draw.random() < 0.5,
        timeout_s=TIMEOUT_S,
    )


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_KILLS, KILLS_PER_START))
def test_a_kill_stops_the_others_and_leaves_files_whole(first: int, tmp_path: Path) -> None:
    seeds = range(first, min(first + KILLS_PER_START, FIRST_SEED + NUM_KILLS))
    cases = [draw_case(seed, tmp_path) for seed in seeds]
    (tmp_path / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    command = [sys.executable, "-m", "tests.ranks.killed", str(tmp_path / "cases.json")]
    done = run_warm(command, env=script_environment(), timeout_s=60 + 30 * len(cases))
    assert done.returncode == 0, done.stderr
    engine = engine_of(config_of("host", 0, tmp_path), seed=10_000)
    for seed, case, ends in zip(seeds, cases, json.loads(done.stdout), strict=True):
        what = f"seed {seed}: {case}"
        check_ends(case, ends, what)
        check_swap_files(Path(case.directory) / "swap", ends[case.victim]["pid"], what)
        check_checkpoint(engine, Path(case.directory), what)
    engine.close()
    print(f"killed in {dict(Counter(case.phase for case in cases))}")


def check_ends(case: Case, ends: list[dict[str, Any]], what: str) -> None:
    for rank, end in enumerate(ends):
        # torch puts the rank before the lines of a traceback.
        said = case.rank_file(rank).read_text().replace(f"[rank{rank}]: ", "")
        if rank == case.victim:
            assert end["status"] == signal.SIGKILL, f"{what}: {said}"
            continue
        assert end["status"] is not None, f"{what}: rank {rank} hangs\n{said}"
        assert end["after_s"] < TIMEOUT_S + END_WITHIN_S, f"{what}: rank {rank}: {end['after_s']} s\n{said}"
        code = os.waitstatus_to_exitcode(end["status"])
        if case.phase == "close" and code == 0:  # it had come to its end before
            continue
        assert code == 1, f"{what}: rank {rank}: {code}\n{said}"
        raised_s = end["raised_s"]
        assert raised_s is not None, f"{what}: rank {rank}: {said}"
        assert raised_s < TIMEOUT_S + RAISE_WITHIN_S, f"{what}: rank {rank}: {raised_s} s"
        assert "\noffloadzero.errors.RankError: " in said, f"{what}: rank {rank}: {said}"


def check_swap_files(directory: Path, victim: int, what: str) -> None:
    left = [path.name for path in directory.iterdir()]
    assert all(name.startswith(f"offloadzero-{victim}-") for name in left), f"{what}: {left}"
    remove_stale_files(directory)  # as the next start does
    assert not list(directory.iterdir()), what


def check_checkpoint(engine: Any, directory: Path, what: str) -> None:
    """The last that was saved, or the one that was being saved."""
    log = directory / "committed"
    committed = len(log.read_text().splitlines()) if log.exists() else 0
    if not (directory / "saved").exists():
        assert committed == 0, what
        return
    path, state = engine.load_checkpoint(directory / "saved")
    if path is None:
        assert committed == 0, what
        return
    assert state["number"] in (committed - 1, committed), what
    assert state_digest(engine) == state["digest"], what
