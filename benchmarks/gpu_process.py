"""Processes that end at a deadline, with everything they started, and whose lines of JSON are read as they come."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 3.0  # before the end: for SIGTERM, then SIGKILL; files go with the folder of the run, in gpu.py


def run_process(
    command: Sequence[str],
    *,
    end_s: float,
    tell: Callable[[Mapping[str, Any]], None],
    log: Path,
) -> str:
    """Run a process to its end, or to `end_s` on time.monotonic(); return how it ended: "ok" or what was wrong.

    Each object in JSON that it prints as a line goes to `tell` at once; all else that it says is added to `log`.
    """
    if end_s - time.monotonic() < GRACE_S:
        return "not begun: no time was left"
    with log.open("a") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        _running.add(process)
        reader = threading.Thread(target=_read, args=(process, tell, log), daemon=True)
        reader.start()
        try:
            status: int | None = process.wait(max(end_s - GRACE_S - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
            _running.discard(process)
            reader.join(
                1.0
            )  # what was printed before an end by SIGTERM, too; another holder of the pipe may live on
    if status is None:
        return "timed out"
    return "ok" if status == 0 else f"exit status {status}" if status > 0 else f"killed by signal {-status}"


def _read(process: subprocess.Popen[str], tell: Callable[[Mapping[str, Any]], None], log: Path) -> None:
    if process.stdout is None:
        raise AssertionError("the process is not piped")
    for line in process.stdout:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            tell(found)
        else:
            with log.open("a") as said:
                said.write(line)


_running: set[subprocess.Popen[str]] = set()


def end_with_signals() -> None:
    """Let SIGTERM and SIGHUP end the running processes, which are in sessions of their own, and then this one."""

    def end(number: int, _: object) -> None:
        for process in list(_running):
            _signal_group(process, signal.SIGTERM)
        sys.exit(128 + number)  # the parent ends the rest

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def _end_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S - 1.0)
    _signal_group(process, signal.SIGKILL)
    with contextlib.suppress(
        subprocess.TimeoutExpired
    ):  # to give up many gigabytes of pinned memory takes seconds
        process.wait(5.0)


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
