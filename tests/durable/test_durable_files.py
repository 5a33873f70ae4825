"""The files of a durable run: whose they are, what of them is missed, what is refused, and that it changes nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero import AioError, CheckpointError, ConfigError, StateError
from offloadzero.memory.swap_file import read_kept_mark
from tests.durable.runs import KINDS, MIXED, Kind, Net, config_of, digest, make, train_step
from tests.support.ranks import run_ranks
from tests.support.tiny import small_disk, start_script

NVME = KINDS["nvme"]
RUN = "offloadzero-durable-rank0"
# A run whose forked child lives on; it is killed when it has said so.
WITH_A_CHILD = """
import os, sys, time
from tests.durable.runs import KINDS, make, train_step
engine = make(KINDS["nvme"], sys.argv[1])
engine.resume()
for number in range(2):
    train_step(engine, KINDS["nvme"], number)
child = os.fork()
if child == 0:
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def begin(directory: Path, kind: Kind = NVME, *, num_steps: int = 2) -> str:
    """Take the first steps of a run in another engine; the digest after them."""
    engine = make(kind, directory)
    for number in range(0 if (state := engine.resume()) is None else state["next"], num_steps):
        train_step(engine, kind, number)
    found = digest(engine)
    engine.close()
    return found


def refused_on(rank: int, directory: str) -> str:  # noqa: ARG001
    """The text of the refusal."""
    with pytest.raises(CheckpointError) as refused:
        make(NVME, directory)
    return str(refused.value)


def take_steps(engine: Any, numbers: Iterable[int]) -> None:
    """Take these steps."""
    for number in numbers:
        train_step(engine, NVME, number)


def expect_at(directory: Path, step: int, found: str, kind: Kind = NVME) -> None:
    """The run goes on after `step` with these values."""
    engine = make(kind, directory)
    state = engine.resume()
    assert state == {"next": step}
    assert engine.global_steps == step
    assert digest(engine) == found
    engine.close()


@pytest.mark.parametrize("name", ["nvme", "host"])
def test_a_second_process_is_refused_and_disturbs_nothing(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    engine = make(kind, tmp_path)
    engine.resume()
    for number in range(3):
        train_step(engine, kind, number)
        found = digest(engine)
        with pytest.raises(ConfigError, match=rf"nvme_path.*in which no other process trains: one has {RUN}"):
            make(kind, tmp_path)
    engine.close()
    expect_at(tmp_path, 3, found, kind)


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_run(tmp_path: Path) -> None:
    process = start_script(WITH_A_CHILD, tmp_path)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate()
    try:
        engine = make(NVME, tmp_path)
        assert engine.resume() in ({"next": 1}, {"next": 2})
        engine.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    found = begin(tmp_path)
    commit = tmp_path / RUN / "commit-2"
    assert len(list(commit.iterdir())) == 4
    for path in commit.iterdir():
        data = path.read_bytes()
        middle = len(data) // 2
        for damaged in (data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], data[:-1], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=rf"{path.name}|manifest"):
                make(NVME, tmp_path)
            path.write_bytes(data)
    expect_at(tmp_path, 2, found)


def test_a_swap_file_that_is_cut_or_another_is_refused(tmp_path: Path) -> None:
    found = begin(tmp_path)
    swap, copy = tmp_path / f"{RUN}.bin", tmp_path / "copy"
    shutil.copyfile(swap, copy)
    had = rf"{RUN}\.bin.* it had [\d,]+ bytes when its last commit was made"
    os.truncate(swap, swap.stat().st_size - 4096)
    for _ in range(2):  # a refusal leaves it as it is
        with pytest.raises(AioError, match=had):
            make(NVME, tmp_path)
    swap.unlink()
    with pytest.raises(AioError, match=had):
        make(NVME, tmp_path)
    data = bytearray(copy.read_bytes())
    data[16] ^= 1  # in the number of the file
    swap.write_bytes(data)
    with pytest.raises(CheckpointError, match="differs from this script in swap files"):
        make(NVME, tmp_path)
    swap.write_bytes(b"another program's" + bytes(8192))
    with pytest.raises(AioError, match="it is not a file of this package"):
        make(NVME, tmp_path)
    assert swap.read_bytes().startswith(b"another program's")
    swap.unlink()
    shutil.copyfile(copy, swap)
    expect_at(tmp_path, 2, found)


OTHERS: dict[str, tuple[Kind, str]] = {
    "placement": (Kind(MIXED), "differs from this script in segments of embed"),
    "no swap file": (Kind("host"), "differs from this script in swap files"),
    "optimizer": (
        Kind(top={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}),
        "differs from this script in optimizer of",
    ),
    "model": (Kind(is_adapter=True), "differs from this script in parameters of"),
    "layout of states": (Kind(own={"state_layout": "compact"}), "differs from this script in segments of"),
    "larger model": (Kind(num_ranks=2), "differs from this script in parameters of"),
}


def test_a_run_of_another_model_or_configuration_is_refused_and_stays(tmp_path: Path) -> None:
    found = begin(tmp_path)
    swap = tmp_path / f"{RUN}.bin"
    num_bytes = swap.stat().st_size
    for other, said in OTHERS.values():
        with pytest.raises(CheckpointError, match=f"commit-2: the durable run in this directory {said}"):
            make(other, tmp_path)
        assert swap.stat().st_size == num_bytes
    engine = make(Kind(top={"scheduler": None}), tmp_path)
    with pytest.raises(
        CheckpointError, match="saved with WarmupLR, the engine has no schedule: a durable run goes on"
    ):
        engine.resume()
    engine.close()
    expect_at(tmp_path, 2, found)


def test_directories_in_another_order_do_not_begin_anew(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    in_order = Kind(own={"nvme_path": [first, second]})
    found = begin(tmp_path, in_order)
    for paths in ([second, first], [second]):
        with pytest.raises(
            ConfigError,
            match=r"nvme_path.*whose commits are not in the first directory: name the directories of that run",
        ):
            make(Kind(own={"nvme_path": paths}), tmp_path)
    with pytest.raises(CheckpointError, match="has files in 2 directories, and nvme_path names 1"):
        make(Kind(own={"nvme_path": [first]}), tmp_path)
    expect_at(tmp_path, 2, found, in_order)


def test_a_buffer_that_no_commit_keeps_is_refused_at_the_start(tmp_path: Path) -> None:
    model = Net(31)
    model.register_buffer("frequencies", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"frequencies has dtype torch\.complex128, which safetensors"):
        offloadzero.initialize(model=model, config=config_of(NVME, tmp_path))
    assert begin(tmp_path) == begin(tmp_path)


def test_commits_of_ranks_that_are_elsewhere_now_do_not_begin_anew(tmp_path: Path) -> None:
    found = begin(tmp_path)
    for there, here in ((RUN, "offloadzero-durable-rank4"), ("offloadzero-durable-rank4", RUN)):
        if here == RUN:
            with pytest.raises(CheckpointError, match=r"durable-rank4.* none is of a rank that is here now"):
                make(NVME, tmp_path)
            shutil.rmtree(tmp_path / RUN)
        (tmp_path / there).rename(tmp_path / here)
        (tmp_path / f"{there}.bin").rename(tmp_path / f"{here}.bin")
    expect_at(tmp_path, 2, found)


def test_a_copy_of_the_directory_is_a_run_of_its_own(tmp_path: Path) -> None:
    found = begin(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    ahead = begin(tmp_path / "one", num_steps=4)
    expect_at(tmp_path / "two", 2, found)
    # An old commit beside the new one is another time's, and is cleared away.
    shutil.copytree(tmp_path / "two" / RUN / "commit-2", tmp_path / "one" / RUN / "commit-2")
    expect_at(tmp_path / "one", 4, ahead)
    assert not (tmp_path / "one" / RUN / "commit-2").exists()


def test_commits_of_before_beside_the_swap_file_of_now_are_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    shutil.copytree(tmp_path / RUN, tmp_path / "copy")
    found = begin(tmp_path, num_steps=4)
    (tmp_path / RUN).rename(tmp_path / "present")
    (tmp_path / "copy").rename(tmp_path / RUN)
    with pytest.raises(
        CheckpointError,
        match=rf"{RUN}\.bin has states from after the commit .*commit-2: they are not of one run",
    ):
        make(NVME, tmp_path)
    shutil.rmtree(tmp_path / RUN)
    (tmp_path / "present").rename(tmp_path / RUN)
    expect_at(tmp_path, 4, found)


def test_a_swap_file_of_before_beside_the_commits_of_now_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    swap = tmp_path / f"{RUN}.bin"
    before = swap.read_bytes()
    found = begin(tmp_path, num_steps=4)
    now = swap.read_bytes()
    swap.write_bytes(before)
    with pytest.raises(
        CheckpointError,
        match=rf"{RUN}\.bin has states from before the commit .*commit-4: they are not of one run",
    ):
        make(NVME, tmp_path)
    swap.write_bytes(now)
    expect_at(tmp_path, 4, found)


def test_a_mark_that_a_kill_has_left_behind_catches_up(tmp_path: Path) -> None:
    """Or a second kill between a commit and its mark would leave it two behind."""
    found = begin(tmp_path)
    for number in (1, 2):
        with (tmp_path / f"{RUN}.bin").open("r+b") as file:
            file.seek(256)
            file.write(number.to_bytes(8, "little"))
        expect_at(tmp_path, 2, found)
        assert read_kept_mark(tmp_path / f"{RUN}.bin").last_commit == 2


def test_a_swap_file_that_has_grown_since_is_the_runs(tmp_path: Path) -> None:
    """Frozen weights move there when a script writes them, perhaps after the last commit."""
    found = begin(tmp_path)
    with (tmp_path / f"{RUN}.bin").open("ab") as file:
        file.write(bytes(4096))
    expect_at(tmp_path, 2, found)


def test_a_filesystem_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(AioError, match=rf"lock .*{RUN}.*: No locks available"):
        make(NVME, tmp_path)


def test_a_run_that_is_removed_begins_anew(tmp_path: Path) -> None:
    first = begin(tmp_path)
    for path in tmp_path.glob(f"{RUN}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert begin(tmp_path) == first


def test_training_without_resume_is_refused_where_a_run_is_found(tmp_path: Path) -> None:
    found = begin(tmp_path)
    engine = make(NVME, tmp_path)
    with pytest.raises(
        StateError,
        match=r"durable run in .*commit-2, which ended after step 2: call engine\.resume\(\) to continue it",
    ):
        train_step(engine, NVME, 0)
    with pytest.raises(StateError, match=r"save_checkpoint\(\): .*commit-2, which ended after step 2"):
        engine.save_checkpoint(tmp_path / "saved")  # its counters would be those of no step
    engine.close()
    expect_at(tmp_path, 2, found)


@pytest.mark.parametrize("name", ["nvme", "auto"])
def test_a_drive_that_is_read_only_or_full(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    with small_disk(tmp_path / "disk", size="8m") as disk:
        found = begin(disk, kind)
        time.sleep(0.5)  # the kernel closes what an io_uring held some moments after its end
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ConfigError, match="is not writable: the filesystem is mounted read-only"):
            make(kind, disk)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        expect_at(disk, 2, found, kind)
        engine = make(kind, disk)
        engine.resume()
        fill(disk / "other")
        with pytest.raises((AioError, CheckpointError), match=rf"{RUN}.*No space left on device"):
            take_steps(engine, range(2, 5))
        with pytest.raises((AioError, CheckpointError, StateError)):
            train_step(engine, kind, 4)
        engine.close()
        expect_at(disk, 2, found, kind)  # which needs no space
        (disk / "other").unlink()
        begin(disk, kind, num_steps=4)


def fill(path: Path) -> None:
    """Leave no byte free."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


def test_a_run_of_one_rank_does_not_go_on_over_two(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    found = begin(run)
    texts = run_ranks(refused_on, 2, tmp_path / "ranks", str(run))
    assert len(texts) == 2
    for text in texts:
        assert "the run there is of 1 ranks, and these are 2: start as many, or remove" in text
    expect_at(run, 2, found)
