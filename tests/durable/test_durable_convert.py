"""`offloadzero convert` of a durable run: what `save_checkpoint()` of the same step gives, bit by bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from offloadzero.cli.main import FAILURE, USER_ERROR, main
from tests.durable.runs import KINDS, MIXED, SAVED, Kind, digest, make, train_step
from tests.support.checkpoints import bits, contents
from tests.support.ranks import run_ranks
from tests.support.tiny import run_script, small_disk

RUN = "offloadzero-durable-rank0"
FP32 = {"bf16": {"enabled": False}}
COMPACT = {"state_layout": "compact"}
CASES = {
    **{
        name: KINDS[name]
        for name in ("nvme", "mixed", "device", "host", "compact", "fp16 mixed", "muon mixed")
    },
    **{name: KINDS[name] for name in ("adapter mixed", "sgd without momentum", "every second mixed")},
    "fp32 parameters": Kind(top=FP32),
    "compact mixed": Kind(MIXED, own=COMPACT),
}
IN_RANKS = {
    **{name: kind for name, kind in KINDS.items() if kind.num_ranks == 2 and not kind.saves},
    "two ranks stage 0": Kind(top={"zero_optimization": {"stage": 0}}, num_ranks=2),
    "two ranks compact": Kind(MIXED, top={"zero_optimization": {"stage": 3}}, own=COMPACT, num_ranks=2),
    "two ranks muon": Kind(top={**KINDS["muon"].top, "zero_optimization": {"stage": 3}}, num_ranks=2),
}
KILLED = """
import os, signal, sys
from contextlib import nullcontext
from pathlib import Path
from tests.durable.runs import KINDS, SAVED, make, train_step
from tests.support.faults import replaced

directory, kind, left = Path(sys.argv[1]), KINDS[sys.argv[2]], [int(sys.argv[3])]

def count(work, *given, **keys):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return work(*given, **keys)

engine = make(kind, directory)
engine.resume()
for number in range(9):
    with replaced("nvme.write", count) if number > 2 else nullcontext():
        train_step(engine, kind, number)
        engine.save_checkpoint(directory / SAVED, client_state=engine.client_state)
"""


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def save_steps(rank: int, kind: Kind, directory: str, num_steps: int) -> None:
    """Go on with a run up to so many steps, and save a checkpoint beside it."""
    del rank
    engine = make(kind, directory)
    state = engine.resume()
    for number in range(0 if state is None else state["next"], num_steps):
        train_step(engine, kind, number)
    saved = Path(directory) / SAVED
    engine.save_checkpoint(saved, client_state=engine.client_state, exclude_frozen_parameters=kind.is_adapter)
    engine.close()


def tensors_in(directory: Path) -> dict[str, Any]:
    return {
        name: (tensor.dtype, tensor.shape, bits(tensor))
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def meta_in(directory: Path) -> dict[str, Any]:
    return {**json.loads((directory / "meta.json").read_text()), "saved_unix_ns": 0}


def expect_same(run: Path, out: Path, step: int, *, is_adapter: bool = False) -> None:
    """The run becomes what its checkpoint of that step is, and a folder what that becomes; the run stays."""
    before = contents(run)
    out.mkdir()
    assert convert(run, out / "checkpoint", "--to", "checkpoint") == 0
    tag = f"global_step{step}"
    made, saved = out / "checkpoint" / tag, run / SAVED / tag
    assert tensors_in(made) == tensors_in(saved)
    assert meta_in(made) == meta_in(saved)
    if not is_adapter:
        for dtype in ("saved", "bf16"):
            assert convert(run / RUN, out / dtype, "--dtype", dtype) == 0
            assert convert(saved, out / f"{dtype} of saved", "--dtype", dtype) == 0
            assert tensors_in(out / dtype) == tensors_in(out / f"{dtype} of saved")
    assert contents(run) == before


@pytest.mark.parametrize("name", CASES)
def test_a_run_becomes_what_its_checkpoint_becomes(name: str, tmp_path: Path) -> None:
    """After an even number of steps and after an odd one: the states are in the one place and in the other."""
    kind, run = CASES[name], tmp_path / "run"
    every = int(kind.own.get("durable", 1))
    for num_steps in (2, 3):
        save_steps(0, kind, str(run), num_steps * every)
        expect_same(run, tmp_path / str(num_steps), num_steps * every, is_adapter=kind.is_adapter)


@pytest.mark.parametrize("name", IN_RANKS)
def test_the_parts_of_two_ranks_are_put_together(name: str, tmp_path: Path) -> None:
    kind, run = IN_RANKS[name], tmp_path / "run"
    run_ranks(save_steps, 2, tmp_path / "ranks", kind, str(run), 3)
    expect_same(run, tmp_path / "out", 3)
    shutil.rmtree(run / "offloadzero-durable-rank1")
    assert convert(run, tmp_path / "alone") == FAILURE


def test_a_checkpoint_of_a_run_is_trained_on_with_the_same_bits(tmp_path: Path) -> None:
    """In another placement: the generators alone are not in it."""
    kind = Kind(own={"durable": True})
    save_steps(0, kind, str(tmp_path / "run"), 3)
    (tmp_path / "run" / "offloadzero-durable-rank1").mkdir()  # of a start on two ranks, which was refused
    assert convert(tmp_path / "run", tmp_path / "saved", "--to", "checkpoint") == 0
    found = []
    for directory in (tmp_path / "saved", tmp_path / "run" / SAVED):
        engine = make(Kind("host"), tmp_path / "other", durable=False)
        _, state = engine.load_checkpoint(directory)
        assert state == {"next": 3}
        train_step(engine, kind, 3)
        found.append(digest(engine))
        engine.close()
    assert found[0] == found[1]


def test_stripes_over_several_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = [tmp_path / "run", tmp_path / "second"]
    kind = Kind(own={"nvme_path": list(map(str, directories))})
    save_steps(0, kind, str(directories[0]), 3)
    expect_same(directories[0], tmp_path / "out", 3)
    directories[1].rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert convert(directories[0], tmp_path / "again") == FAILURE
    assert f"{directories[1] / RUN}.bin: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "num_writes"), [("nvme", 3), ("mixed", 9), ("no clipping", 14)])
def test_what_a_kill_leaves_is_converted(name: str, num_writes: int, tmp_path: Path) -> None:
    """It comes in the middle of a later step's updates, which have written some of the other places."""
    run = tmp_path / "run"
    run.mkdir()
    assert run_script(KILLED, run, name, num_writes).returncode == -signal.SIGKILL
    assert convert(run, tmp_path / "out", "--to", "checkpoint") == 0
    (made,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert tensors_in(made) == tensors_in(run / SAVED / made.name)


def test_a_run_that_is_at_work_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make(KINDS["nvme"], tmp_path)
    engine.resume()
    train_step(engine, KINDS["nvme"], 0)
    assert convert(tmp_path, tmp_path / "out") == USER_ERROR
    error = capsys.readouterr().err
    assert f"SRC = '{tmp_path}': a directory in which no other process trains: one has {RUN}" in error
    train_step(engine, KINDS["nvme"], 1)
    engine.close()
    assert convert(tmp_path, tmp_path / "out") == 0
    make(KINDS["nvme"], tmp_path).close()  # the run is free again


def test_a_drive_that_has_become_read_only_is_read(tmp_path: Path) -> None:
    """As after an error of the drive."""
    with small_disk(tmp_path / "disk", size="8m") as disk:
        save_steps(0, KINDS["nvme"], str(disk), 3)
        time.sleep(0.5)  # the kernel closes what an io_uring held some moments after its end
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        expect_same(disk, tmp_path / "out", 3)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        make(KINDS["nvme"], disk).close()


def test_one_commit_is_refused_with_the_directory_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(0, KINDS["nvme"], str(tmp_path / "run"), 1)
    commit = tmp_path / "run" / RUN / "commit-1"
    assert convert(commit, tmp_path / "out") == USER_ERROR
    expected = f"SRC = '{commit}': {tmp_path / 'run'}, the directory of the run of which this is one commit"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_its_frozen_weights_becomes_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(0, KINDS["adapter mixed"], str(tmp_path), 1)
    assert convert(tmp_path, tmp_path / "out") == USER_ERROR
    error = capsys.readouterr().err
    assert "A durable run has what is trained alone, without " in error
    assert "resume() it with the model that has these" in error
    assert not (tmp_path / "out").exists()


def test_damage_is_named_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_steps(0, KINDS["mixed"], str(run), 2)
    swap, commit = run / f"{RUN}.bin", run / RUN / "commit-2"

    def expect_refused(named: str) -> None:
        assert convert(run, tmp_path / "out") == FAILURE
        assert named in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    for path in sorted(commit.iterdir()):
        whole = path.read_bytes()
        middle = len(whole) // 2
        for damaged in (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], whole[:-1], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            expect_refused(str(path))
            path.write_bytes(whole)
    whole = swap.read_bytes()
    os.truncate(swap, len(whole) - 4096)
    expect_refused(f"{swap} has {len(whole) - 4096:,} bytes; {len(whole):,} belong to {commit}")
    swap.unlink()
    expect_refused(f"{swap}: No such file or directory")
    swap.write_bytes(whole[:16] + bytes([whole[16] ^ 1]) + whole[17:])
    expect_refused(f"{swap} is not the swap file that {commit} needs")
    swap.write_bytes(whole)
    shutil.copytree(run / RUN, tmp_path / "before")
    save_steps(0, KINDS["mixed"], str(run), 4)
    now = swap.read_bytes()
    swap.write_bytes(whole)
    expect_refused(f"{swap} has states from before the commit {commit.parent / 'commit-4'}")
    swap.write_bytes(now)
    shutil.rmtree(run / RUN)
    shutil.copytree(tmp_path / "before", run / RUN)
    expect_refused(f"{swap} has states from after the commit {commit}")
    shutil.rmtree(commit)
    expect_refused("the ranks have no commit in common; by rank they have [[]]")
