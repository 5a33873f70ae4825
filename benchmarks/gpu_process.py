"""Processes that end at a deadline, with everything they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GRACE_S = 5.0  # from SIGTERM, on which files are removed, to SIGKILL


class Deadline:
    """A point in time."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Return the seconds until then; negative afterwards."""
        return self._end_s - time.monotonic()


@dataclass(frozen=True)
class Finished:
    """The result of a process; `status` is None when the deadline ended it."""

    status: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        """Whether the deadline ended it."""
        return self.status is None

    @property
    def output(self) -> str:
        """The text of both streams, stdout first."""
        return f"{self.stdout}{self.stderr}"


def run_process(
    command: Sequence[str], *, deadline: Deadline, environment: Mapping[str, str] | None = None
) -> Finished:
    """Run a process to its end or to the deadline."""
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
        )
        _running.add(process)
        try:
            status: int | None = process.wait(max(deadline.left_s() - GRACE_S, 0.1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
            _running.discard(process)
        stdout.seek(0)
        stderr.seek(0)
        return Finished(status, stdout.read(), stderr.read(), time.monotonic() - start_s)


_running: set[subprocess.Popen[bytes]] = set()


def end_with_signals() -> None:
    """Let SIGTERM and SIGHUP end the running processes, which are in sessions of their own, and then this one."""

    def end(number: int, _: object) -> None:
        for process in list(_running):
            _signal_group(process, signal.SIGTERM)
        sys.exit(128 + number)  # the parent ends the rest

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
