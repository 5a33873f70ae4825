"""Several ranks on the simulated device: bitwise what the same ranks come to on the CPU, and no race.

Their collectives run on streams of their own: [Note: collectives that run later]. One script and one planted bug; with
OFFLOADZERO_TEST_RANKS=all every run of tests/simulated/ranks_runs.py, and OFFLOADZERO_TEST_SCHEDULES random ones.
tests/simulated/mutations.py takes away each order that the parts for several ranks ask for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero.memory.transfer import Fetcher
from offloadzero.step.landing import Landing
from tests.simulated.collectives import Work
from tests.simulated.ranks_runs import RUNS, SCRIPTS, RanksRun, draw_run, of, play, play_simulated
from tests.support.ranks import run_ranks

ALL = os.environ.get("OFFLOADZERO_TEST_RANKS") == "all"
NUM_RANDOM = int(os.environ.get("OFFLOADZERO_TEST_SCHEDULES", "0")) // 5  # for each number of ranks
AT_ONCE = 10  # in one set of processes
FEW = ("codes and copies", "gathered", "inputs away", "inputs in parts", "use_before_the_collective")


# --- planted bugs ---


def use_before_the_collective(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the event behind a collective."""
    patch.setattr(Work, "wait", lambda _: None)


def staging_buffer_before_the_gather_has_read_it(patch: pytest.MonkeyPatch) -> None:
    """The next unit's shard is read from its file into memory from which this one is yet to be copied and gathered."""
    unstage = Fetcher._unstage

    def early(fetcher: Fetcher, staged: Any, read: Any, target: torch.Tensor) -> None:
        read.wait()
        fetcher._staged_by.give_back(staged.buffer)
        staged.buffer = None
        unstage(fetcher, staged, read, target)

    patch.setattr(Fetcher, "_unstage", early)


class _Gone:
    """In the place of a pool to which a lease has gone back already."""

    def give_back(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def gradient_lease_before_its_reduction(patch: pytest.MonkeyPatch) -> None:
    """The next gradient's values come to it while this one's are yet to be reduced."""
    send = Landing.send

    def early(landing: Landing, brought: Any, *given: Any, **more: Any) -> None:
        if not brought.lease.temporary:
            brought.leases.give_back(brought.lease)
            brought = brought._replace(leases=_Gone())
        send(landing, brought, *given, **more)

    patch.setattr(Landing, "send", early)


PLANTED = {
    plant.__name__: of({"param": "nvme", "states": "host"}, slow=("fetch",), planted=plant)
    for plant in (
        use_before_the_collective,
        staging_buffer_before_the_gather_has_read_it,
        gradient_lease_before_its_reduction,
    )
}


# --- the comparison ---


def compare(rank: int, names: list[str], first_seed: int, directory: str) -> dict[str, list[list[str]]]:
    """By run: where the simulated one differs from that on the CPU, and its races."""
    found = {}
    for seed, name in enumerate(names, first_seed):
        run, files = run_of(name), Path(directory) / f"{seed}"
        expected = play(run, rank, files.with_suffix(".cpu"))
        numbers, races = play_simulated(run, rank, files, seed)
        is_error = isinstance(numbers, str)
        different = [numbers] if is_error else [key for key in expected if numbers[key] != expected[key]]
        found[name] = [different, races]
    return found


def run_of(name: str) -> RanksRun:
    """By name; "random SEED of WORLD_SIZE" is drawn."""
    if name.startswith("random"):
        _, seed, _, world_size = name.split()
        return draw_run(int(seed), int(world_size))
    return {**RUNS, **SCRIPTS, **PLANTED}[name]


def expect(names: list[str], directory: Path, *, first_seed: int = 0) -> None:
    """On the simulated device as on the CPU, on each rank; of one with a bug the checker says so, without any luck."""
    (world_size,) = {run_of(name).world_size for name in names}
    timeout_s = 60 + 20.0 * len(names)
    by_rank = run_ranks(
        compare, world_size, directory / "ranks", names, first_seed, str(directory), timeout_s=timeout_s
    )
    for seed, name in enumerate(names, first_seed):
        found = [of_rank[name] for of_rank in by_rank]
        if run_of(name).planted is None:
            assert found == [[[], []]] * world_size, f"{name}, seed {seed}: {run_of(name)}"
        else:
            assert any(races for _, races in found), f"{name}: the checker sees no race"


def test_two_ranks(tmp_path: Path) -> None:
    expect(list(FEW), tmp_path)


@pytest.mark.skipif(not ALL, reason="OFFLOADZERO_TEST_RANKS=all")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_runs(world_size: int, tmp_path: Path) -> None:
    expect(
        [name for name in {**RUNS, **SCRIPTS, **PLANTED} if run_of(name).world_size == world_size], tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("first", range(0, NUM_RANDOM, AT_ONCE))
def test_random_runs(first: int, world_size: int, tmp_path: Path) -> None:
    seeds = range(first, min(first + AT_ONCE, NUM_RANDOM))
    expect([f"random {seed} of {world_size}" for seed in seeds], tmp_path, first_seed=first)
