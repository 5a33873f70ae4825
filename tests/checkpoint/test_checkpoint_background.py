"""`save_checkpoint(wait=False)`: written while training goes on, to the bits of the step at which it was called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.errors import CheckpointError
from tests.support.checkpoints import train
from tests.support.faults import delays, fails
from tests.support.tiny import run_script

TWO_PLACES: dict[
    str, tuple[float, dict[str, Any]]
] = {  # the norm at which gradients are clipped, and own keys
    "versions": (1e6, {"versions": True}),
    "clipped": (1e-3, {"versions": True}),
    "durable": (1.0, {"durable": True}),
    "durable, in backward": (0.0, {"durable": True}),
    "parameters on the host": (1e6, {"versions": True, "placement": {"param": "host", "states": "nvme"}}),
}


def training(engine_of: Callable[..., Any], directory: Path, name: str, **keys: Any) -> offloadzero.Engine:
    directory.mkdir(exist_ok=True)
    max_norm, own = TWO_PLACES[name]
    own = {"placement": "nvme", "nvme_path": str(directory), "units": {"min_leaf_elements": 100}, **own}
    engine: offloadzero.Engine = engine_of(gradient_clipping=max_norm, offloadzero=own, **keys)
    return engine


@pytest.mark.parametrize("name", TWO_PLACES)
def test_training_goes_on_and_the_checkpoint_is_of_its_step(
    engine_of: Callable[..., Any], tmp_path: Path, faults: ExitStack, name: str
) -> None:
    engine = training(engine_of, tmp_path / "a", name)
    before, after = train(engine, 3), train(engine, 4, first=3)
    engine.close()

    faults.enter_context(delays("checkpoint.write", 0.01))
    engine = training(engine_of, tmp_path / "b", name)
    assert train(engine, 3) == before
    client_state = {"at": [3]}
    engine.save_checkpoint(tmp_path / "saved", client_state=client_state, wait=False)
    client_state["at"].append(4)  # the script goes on with it
    assert not (tmp_path / "saved" / "global_step3").exists()
    assert train(engine, 4, first=3) == after
    engine.finish_saving()
    engine.close()

    engine = training(engine_of, tmp_path / "c", name, seed=99)
    path, loaded = engine.load_checkpoint(tmp_path / "saved")
    assert (path, loaded) == (str(tmp_path / "saved" / "global_step3"), {"at": [3]})
    assert train(engine, 4, first=3) == after


def test_a_script_that_writes_meanwhile_does_not_change_it(
    engine_of: Callable[..., Any], tmp_path: Path, faults: ExitStack
) -> None:
    faults.enter_context(delays("checkpoint.write", 0.01))
    engine = training(engine_of, tmp_path / "a", "versions")
    train(engine, 2)
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.save_checkpoint(tmp_path / "saved", wait=False)
    for param in engine.module.parameters():
        param.data.zero_()
    train(engine, 1, first=2)
    engine.close()  # waits for it
    engine = training(engine_of, tmp_path / "b", "versions", seed=99)
    engine.load_checkpoint(tmp_path / "saved")
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_an_error_is_told_by_the_next_save_and_training_goes_on(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = training(engine_of, tmp_path / "a", "versions")
    before = train(engine, 2)
    with fails("checkpoint.write", OSError(28, "No space left on device"), about="blocks.0.weight"):
        engine.save_checkpoint(tmp_path / "saved", wait=False)
        after = train(engine, 2, first=2)
        with pytest.raises(CheckpointError, match=r"No space left on device.*nothing was saved"):
            engine.finish_saving()
    assert [entry.name for entry in (tmp_path / "saved").iterdir()] == []
    engine.save_checkpoint(tmp_path / "saved", wait=False)
    engine.close()
    assert (tmp_path / "saved" / "global_step4" / "manifest.json").exists()
    engine = training(engine_of, tmp_path / "b", "versions")
    assert train(engine, 2) == before
    assert train(engine, 2, first=2) == after


def test_an_error_that_no_call_has_raised_is_the_scripts_exit_status(tmp_path: Path) -> None:
    script = """
        import sys
        from tests.durable.runs import KINDS, make, train_step
        from tests.support.faults import fails
        engine = make(KINDS["nvme"], sys.argv[1], durable=False)
        train_step(engine, KINDS["nvme"], 0)
        with fails("checkpoint.commit", OSError(28, "No space left on device")):
            engine.save_checkpoint(sys.argv[1] + "/saved", wait=False)
            engine._checkpoints.background._written.wait()
        train_step(engine, KINDS["nvme"], 1)
        print("the end")
    """
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stdout) == (1, "the end\n")
    assert done.stderr.count("CheckpointError: ") == 1
    assert "saved: No space left on device: nothing was saved" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]  # the swap files are gone


def test_a_forked_child_that_ends_meanwhile_has_no_part_in_it(tmp_path: Path) -> None:
    script = """
        import os, sys, threading
        from tests.durable.runs import KINDS, make, train_step
        from tests.support.faults import observes
        engine = make(KINDS["nvme"], sys.argv[1], durable=False)
        train_step(engine, KINDS["nvme"], 0)
        has_ended = threading.Event()
        with observes("checkpoint.commit", before=lambda _: has_ended.wait(60)):
            engine.save_checkpoint(sys.argv[1] + "/saved", wait=False)
            if (child := os.fork()) == 0:
                engine.close()
                sys.exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            has_ended.set()
            engine.finish_saving()
    """
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_trials_go_on_behind_it(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine = training(engine_of, tmp_path / "a", "versions")
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved", wait=False)
    engine.finish_saving()
    train(engine, 1, first=1)
    engine.synchronize()
    records = [record for record in engine._runtime.records if record.has_versions]
    assert records
    assert {record.committed.value for record in records} == {"none"}
