"""What scripts do in a durable run: interrupts, errors, checkpoints, evaluation. The last commit is whole, and exact."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero import AioError, CheckpointError, ConfigError, NonFiniteError, StateError
from offloadzero.core.fail_points import Point, listening
from tests.durable.runs import KINDS, Kind, digest, make, train_step
from tests.support.faults import fails

NVME = KINDS["nvme"]


def ran(directory: Path, kind: Kind = NVME, *, num_steps: int = 2) -> Any:
    """An engine that has taken the first steps of a run, or goes on with one."""
    engine = make(kind, directory)
    first = 0 if (state := engine.resume()) is None else state["next"]
    for number in range(first, num_steps):
        train_step(engine, kind, number)
    return engine


def found_again(directory: Path, kind: Kind = NVME) -> tuple[int, str]:
    """The steps and the digest of the run as a new engine finds it."""
    engine = make(kind, directory)
    assert engine.resume() is not None
    found = engine.global_steps, digest(engine)
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["nvme", "no clipping", "host"])
def test_an_interrupt_anywhere_leaves_a_run_to_go_on_with(kind: str, tmp_path: Path) -> None:
    """In another place in each round: the run goes on in the process, and then in the next one."""
    points: list[Point] = ["step.step", "update.compute", "lane.launch", "update.stage", "landing.measure"]
    engine = ran(tmp_path, KINDS[kind])
    for point in points:
        with pytest.raises(KeyboardInterrupt), listening(interrupts_at(point)):
            for number in range(3):
                train_step(engine, KINDS[kind], engine.global_steps + number)
            raise KeyboardInterrupt  # the point is not met by this kind
        drop(engine)
        for _ in range(2):
            train_step(engine, KINDS[kind], engine.global_steps)
        expected = engine.global_steps, digest(engine)
        engine.close()
        assert found_again(tmp_path, KINDS[kind]) == expected, point
        engine = ran(tmp_path, KINDS[kind])
    engine.close()


def drop(engine: Any) -> None:
    """Begin a step anew, or close one of which a backward has updated weights already."""
    try:
        engine.zero_grad()
    except StateError:
        engine.step()


def interrupts_at(point: Point) -> Callable[[Point, Callable[..., Any], object], Callable[..., Any]]:
    """A listener that sends one SIGINT when the point is met."""
    left = [1]
    lock = threading.Lock()

    def listen(at: Point, work: Callable[..., Any], about: object) -> Callable[..., Any]:
        with lock:
            if at == point and left:
                left.clear()
                os.kill(os.getpid(), signal.SIGINT)
        return work

    return listen


@pytest.mark.parametrize("kind", ["nvme", "no clipping"])
def test_a_step_that_is_not_finite_is_dropped_and_the_run_goes_on(kind: str, tmp_path: Path) -> None:
    engine = ran(tmp_path, KINDS[kind])
    broken = Kind(top=KINDS[kind].top, bad_steps=(2,))
    with pytest.raises(NonFiniteError):
        train_step(engine, broken, 2)
        train_step(engine, broken, 3)
    engine.zero_grad()
    train_step(engine, KINDS[kind], 3)
    expected = engine.global_steps, digest(engine)
    engine.close()
    assert found_again(tmp_path, KINDS[kind]) == expected


@pytest.mark.parametrize("point", ["nvme.sync", "checkpoint.write"])
def test_a_commit_that_fails_stops_the_run_and_the_one_before_is_whole(point: Point, tmp_path: Path) -> None:
    engine = ran(tmp_path, num_steps=3)
    expected = engine.global_steps, digest(engine)
    train_step(engine, NVME, 3)  # when it returns the commit of the step before is made
    engine.close()
    expected_next = found_again(tmp_path)
    engine = ran(tmp_path)
    error = OSError(errno.EIO, "Input/output error")
    with fails(point, error), pytest.raises((AioError, CheckpointError), match="Input/output error"):
        for number in range(4, 8):
            train_step(engine, NVME, number)
    # What the drive has taken since is not known: the process may not make another commit.
    with pytest.raises((AioError, CheckpointError), match="Input/output error"):
        train_step(engine, NVME, 8)
    engine.close()
    assert found_again(tmp_path) == expected_next
    assert expected[0] == 3


def test_steps_are_those_of_the_engine(tmp_path: Path) -> None:
    engine = ran(tmp_path)
    loss = engine(torch.zeros(2, 5, dtype=torch.int64), uses_rare=False)
    engine.backward(loss)
    with pytest.raises(StateError, match=r"takes its steps by engine\.step\(\), which commits them"):
        engine.optimizer.step()
    engine.close()


def test_a_state_that_cannot_be_committed_is_refused_before_the_step(tmp_path: Path) -> None:
    engine = ran(tmp_path)
    before = digest(engine)
    engine.backward(engine(torch.zeros(2, 5, dtype=torch.int64), uses_rare=False))
    engine.client_state = {"next": object()}
    with pytest.raises(ConfigError, match=r"client_state\['next'\]"):
        engine.step()
    engine.zero_grad()
    assert engine.global_steps == 2
    engine.close()
    assert before


def test_checkpoints_go_their_own_way(tmp_path: Path) -> None:
    """One that is loaded takes the run back, by one step or by more; the run goes on from there."""
    saved = tmp_path / "saved"
    engine = ran(tmp_path)
    for number in range(2, 6):
        engine.save_checkpoint(saved, tag=f"t{number}")
        train_step(engine, NVME, number)
    for tag, step in (("t5", 5), ("t3", 3)):
        engine.load_checkpoint(saved, tag=tag)
        assert engine.global_steps == step
        train_step(engine, NVME, step)
        expected = engine.global_steps, digest(engine)
        engine.close()
        assert found_again(tmp_path) == expected
        engine = ran(tmp_path)
    # Without a step the run is where it was.
    engine.load_checkpoint(saved, tag="t2")
    engine.close()
    assert found_again(tmp_path) == expected


def test_evaluation_between_steps_changes_nothing_of_a_commit(tmp_path: Path) -> None:
    engine = ran(tmp_path, num_steps=3)
    expected = engine.global_steps, digest(engine)
    engine.eval()
    with torch.no_grad():
        engine(torch.zeros(2, 5, dtype=torch.int64), uses_rare=True)
    engine.close()
    assert found_again(tmp_path) == expected


def test_resume_comes_once_and_first(tmp_path: Path) -> None:
    engine = ran(tmp_path)
    engine.close()
    engine = ran(tmp_path)
    with pytest.raises(StateError, match=r"resume\(\): once, and before the first step"):
        engine.resume()
    engine.close()
    plain = make(NVME, tmp_path / "plain", durable=False)
    with pytest.raises(ConfigError, match="offloadzero.durable = False"):
        plain.resume()
    plain.close()
