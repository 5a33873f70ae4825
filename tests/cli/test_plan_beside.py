"""The measurements of computation with other work beside it: how long they take, and what they leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadzero.cli.bench.traffic import MIB
from offloadzero.cli.plan import computation as beside
from offloadzero.cli.plan.computation import copies_beside, drive_beside


def computes_for(seconds: float) -> Callable[[], object]:
    return lambda: time.sleep(seconds)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("TURN_S", 0.02),
        ("COPY_BYTES", MIB),
        ("FILE_BYTES", 32 * MIB),
        ("MEMORY_BYTES", 8 * MIB),
        ("STATE_ELEMENTS", 1 << 16),
        ("WRITE_LIMIT_BYTES", 256 * MIB),
    ):
        monkeypatch.setattr(beside, name, value)


@pytest.mark.usefixtures("small")
def test_a_slow_computation_has_fewer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five turns of a micro batch of 0.6 s, of four micro batches each, took 50 s for copies alone."""
    turns = list[float]()
    turn = beside._turn

    def noted(*arguments: object) -> tuple[float, float]:
        turns.append(arguments[2])  # type: ignore[arg-type]
        return turn(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(beside, "_turn", noted)
    assert copies_beside(computes_for(0.01)) > 0
    assert len(turns) == beside.NUM_TURNS
    assert min(turns) >= 0.04, "four micro batches"
    monkeypatch.setattr(beside, "MOST_BESIDE_S", 0.1)
    monkeypatch.setattr(beside, "MOST_TURN_S", 0.1)
    for seconds, expected in ((0.05, 0.1), (0.2, 0.2)):
        turns.clear()
        assert copies_beside(computes_for(seconds)) > 0
        assert len(turns) == 1
        assert expected <= turns[0] < 4 * seconds


@pytest.mark.usefixtures("small")
def test_a_fast_drive_has_writes_left_for_the_time_beside_a_slow_computation(tmp_path: Path) -> None:
    """It used all of them up by itself, and nothing was known of it."""
    found = drive_beside(computes_for(0.3), tmp_path)
    assert found is not None
    assert 0 < found.share <= 1
    assert found.hold_s_per_byte > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("num_calls", [0, 1, 3])
def test_an_interrupt_leaves_no_file_and_no_thread(num_calls: int, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    calls = list[int]()

    def compute() -> None:
        if len(calls) == num_calls:
            raise KeyboardInterrupt
        calls.append(1)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        drive_beside(compute, tmp_path)
    assert not list(tmp_path.iterdir())
    assert not set(threading.enumerate()) - threads
