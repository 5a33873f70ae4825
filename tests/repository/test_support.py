"""What all tests rest on: loops over cases, pairs of a matrix, and the end of a test that hangs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import each_pair, loop_over
from tests.support.tiny import REPOSITORY


def test_each_case_runs_and_a_failure_names_its_own() -> None:
    seen: list[int] = []

    @loop_over({"one": (1, 1), "two": (2, 4), "three": (3, 8), "four": (4, 16)})
    def test_squares(number: int, square: int) -> None:
        """Of small numbers."""
        seen.append(number)
        assert number**2 == square

    assert (test_squares.__name__, test_squares.__doc__) == ("test_squares", "Of small numbers.")
    with pytest.raises(AssertionError, match=r"^three: assert \(3 \*\* 2\) == 8"):
        test_squares()
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 3), (2, 2, 2), (3, 4, 2, 3), (2, 1, 5, 2, 2)])
def test_each_two_values_meet_in_few_cells(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}.{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    cells = each_pair(*axes, in_full=False)
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(one, other):
            assert any(set(pair) <= set(cell) for cell in cells)
    largest = sorted((1, *sizes))
    assert len(cells) <= largest[-1] * largest[-2] + 3
    everything = list(itertools.product(*axes))
    assert each_pair(*axes, in_full=True) == everything
    assert [cell for cell in everything if cell in cells] == cells


# --- a test that hangs: where it does so is printed, and the run ends with it ---

HANGING = """
import threading

def wait_for_what_never_comes():
    threading.Event().wait()

def test_hangs():
    wait_for_what_never_comes()

def test_after():
    pass
"""


def run_hanging(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = directory / "test_hanging.py"
    file.write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OFFLOADZERO_TEST_HANG_S": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [*command, *options, str(file)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_it_is_said_where(tmp_path: Path) -> None:
    done = run_hanging(tmp_path)
    assert done.returncode == 1
    assert "in wait_for_what_never_comes" in done.stderr
    assert "in test_hangs" in done.stderr


def test_it_ends_a_run_with_workers(tmp_path: Path) -> None:
    """pytest-xdist 3.8, going on with another worker, may wait for ever for the rest of a file."""
    pytest.importorskip("xdist")
    done = run_hanging(tmp_path, "-n", "1", "--max-worker-restart", "0")
    assert done.returncode != 0
    assert "in wait_for_what_never_comes" in done.stderr
    assert "crashed while running 'test_hanging.py::test_hangs'" in done.stdout
