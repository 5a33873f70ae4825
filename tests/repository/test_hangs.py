"""A test that hangs ends the process it is in: where it hangs is printed, and the run with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import REPOSITORY

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
