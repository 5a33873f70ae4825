"""What scripts do in a durable run: interrupts, errors, checkpoints, evaluation. The last commit is exact."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero import AioError, CheckpointError, ConfigError, NonFiniteError, StateError
from offloadzero.core.fail_points import Point
from offloadzero.zero import GatheredParameters
from tests.durable.runs import KINDS, Kind, digest, make, train_step
from tests.support.faults import delays, fails, observes

NVME = KINDS["nvme"]


def ran(directory: Path, kind: Kind = NVME, *, num_steps: int = 2) -> Any:
    """An engine that has taken the first steps of a run, or goes on with one."""
    engine = make(kind, directory)
    first = 0 if (state := engine.resume()) is None else state["next"]
    take_steps(engine, kind, range(first, num_steps))
    return engine


def take_steps(engine: Any, kind: Kind, numbers: Iterable[int]) -> None:
    """Take these steps."""
    for number in numbers:
        train_step(engine, kind, number)


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
        with pytest.raises(KeyboardInterrupt):
            take_interrupted(engine, KINDS[kind], point)
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


def take_interrupted(engine: Any, kind: Kind, point: Point) -> None:
    """Take steps, with one SIGINT when the point is met; a kind that does not meet it has it after three steps."""
    numbers = itertools.count()
    with observes(point, before=lambda _: next(numbers) or os.kill(os.getpid(), signal.SIGINT)):
        for number in range(3):
            train_step(engine, kind, engine.global_steps + number)
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["nvme", "no clipping"])
def test_a_step_that_is_not_finite_is_dropped_and_the_run_goes_on(kind: str, tmp_path: Path) -> None:
    engine = ran(tmp_path, KINDS[kind])
    broken = Kind(top=KINDS[kind].top, bad_steps=(2,))
    with pytest.raises(NonFiniteError):
        take_steps(engine, broken, range(2, 4))
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
        take_steps(engine, NVME, range(4, 8))
    # What the drive has taken since is not known: the process may not make another commit.
    with pytest.raises((AioError, CheckpointError), match="Input/output error"):
        train_step(engine, NVME, 8)
    engine.close()
    assert found_again(tmp_path) == expected_next
    assert expected[0] == 3


def test_a_batch_size_that_the_script_has_set_comes_back(tmp_path: Path) -> None:
    """With the samples that were counted: the next process reads another one in the configuration."""
    kind, ends = KINDS["accumulation"], []
    for name, is_continued in (("whole", False), ("continued", True)):
        engine = ran(tmp_path / name, kind)
        assert engine.global_samples == 2 * 2 * 3
        engine.set_train_batch_size(4)
        train_step(engine, kind, 2)
        if is_continued:
            engine.close()
            engine = make(kind, tmp_path / name)
            engine.resume()
        assert (engine.get_batch_info(), engine.global_samples) == ((4, 2, 2), 16)
        train_step(engine, kind, 3)
        ends.append((engine.global_samples, digest(engine)))
        engine.close()
    assert ends[0] == ends[1]
    assert ends[0][0] == 20


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


def test_writes_between_a_step_and_a_save_are_of_no_commit(tmp_path: Path) -> None:
    """No commit is made of the step that is taken while a checkpoint is saved, nor later."""
    engine = ran(tmp_path)
    found = {2: digest(engine)}
    with delays("checkpoint.write", 0.02):
        engine.save_checkpoint(tmp_path / "saved", tag="a", wait=False)
        train_step(engine, NVME, 2)
        found[3] = digest(engine)
        with torch.no_grad(), GatheredParameters([engine.module.rare.weight], modifier_rank=0):
            engine.module.rare.weight.mul_(2)
        engine.save_checkpoint(tmp_path / "saved", tag="b", wait=False)
    engine.close()
    step, at = found_again(tmp_path)
    assert at == found[step], step


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
    engine.save_checkpoint(tmp_path / "saved", tag="a")
    engine.close()
    engine = make(NVME, tmp_path)
    engine.load_checkpoint(tmp_path / "saved", tag="a")
    with pytest.raises(StateError, match=r"resume\(\) must be called once, before the first step"):
        engine.resume()
    engine.close()
    engine = ran(tmp_path)
    with pytest.raises(StateError, match=r"resume\(\) must be called once, before the first step"):
        engine.resume()
    engine.close()
    plain = make(NVME, tmp_path / "plain", durable=False)
    with pytest.raises(ConfigError, match=r"offloadzero\.durable = False"):
        plain.resume()
    plain.close()


def test_a_step_that_was_applied_in_part_is_not_committed(tmp_path: Path) -> None:
    """Updates run in backward, and that the first layer's gradient is not finite is known after step() has begun."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "offloadzero": {
            "device": "cpu",
            "placement": "nvme",
            "nvme_path": str(tmp_path),
            "durable": True,
            "units": {"min_leaf_elements": 10},
        },
    }

    def start() -> Any:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(4)]
        return offloadzero.initialize(model=nn.Sequential(*layers), config=config)[0]

    def step(engine: Any, factor: float) -> None:
        first, *others = engine.module
        hidden = first(torch.ones(8, 96, dtype=torch.bfloat16))
        hidden.register_hook(lambda grad: grad * factor)
        for layer in others:
            hidden = layer(hidden)
        engine.backward(hidden.float().square().mean())
        engine.step()

    engine = start()
    for _ in range(2):
        step(engine, 1.0)
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    with delays("landing.measure", 0.2), suppress(NonFiniteError):
        step(engine, float("nan"))
    with pytest.raises(NonFiniteError, match="updates of 3 units were applied"):
        step(engine, 1.0)
    with suppress(NonFiniteError):
        engine.close()
    engine = start()
    engine.resume()
    assert engine.global_steps == 2
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, before[name]), name
    engine.close()
