"""Failing files, Ctrl-C, kill -9 and forks: a named error, the files removed, the process ended, nothing hangs.

Most cases are whole processes from start to exit. They are forked from one Python that has imported torch already
and has no engine yet, which makes them cheap; one that lives for PATIENCE_S is killed and counts as hanging.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offloadzero.errors import AioTimeoutError, StateError
from offloadzero.io.engine import AioEngine
from offloadzero.memory import swap_file
from offloadzero.memory.arena import BufferPool
from offloadzero.memory.lanes import Lane
from offloadzero.memory.tickets import Failures, Latch
from tests.engine.failing_processes import (
    INTERRUPTED_CASES,
    LAST_WRITE_CASES,
    PATIENCE_S,
    PLACEMENTS,
    Result,
    eio_cases,
    run_cases,
)
from tests.engine.leftovers import threads_of_ours
from tests.support.tiny import all_states, make_engine, run_script, settings, start_script, train


@pytest.fixture(scope="module")
def eio_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_cases([*eio_cases(), *LAST_WRITE_CASES], tmp_path_factory.mktemp("eio"))


@pytest.fixture(scope="module")
def interrupted_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_cases(INTERRUPTED_CASES, tmp_path_factory.mktemp("interrupted"))


NAMED = re.compile(
    r"AioError: (?P<tensor>\S+)\.(?P<segment>param|master|exp_avg|exp_avg_sq|grad) \(nvme\): "
    r"(?P<operation>pread|pwrite) (?P<file>\S+offloadzero-\S+\.bin)\+0x[0-9a-f]+, [0-9]+ bytes: Input/output error"
)
SEGMENTS = {"parameters": {"param"}, "states": {"exp_avg"}, "gradients": {"grad"}}


@pytest.mark.parametrize("case", eio_cases(), ids=lambda case: case["name"])
def test_a_failing_file_ends_the_process_with_a_named_error(
    eio_results: dict[str, Result], case: dict[str, Any]
) -> None:
    result = eio_results[case["name"]]
    assert result["status"] is not None, f"it hung: {result['output']}"
    assert result["status"] not in (0, -signal.SIGSEGV, -signal.SIGABRT), result["output"]
    assert result["files"] == []
    assert result["duration_s"] < 15
    named = NAMED.search(result["output"])
    assert named is not None, result["output"]
    if case["what"] in SEGMENTS:
        assert {named["segment"]} == SEGMENTS[case["what"]]


@pytest.mark.parametrize("what", list(PLACEMENTS))
def test_the_cases_reach_reads_and_writes(eio_results: dict[str, Result], what: str) -> None:
    """Else the test above would not say what it seems to."""
    outputs = [result["output"] for name, result in eio_results.items() if name.startswith(what)]
    found = [match for match in map(NAMED.search, outputs) if match is not None]
    assert {match["operation"] for match in found} == {"pread", "pwrite"}
    if what == "everything":
        assert {match["segment"] for match in found} >= {"param", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("case", LAST_WRITE_CASES, ids=lambda case: case["name"])
def test_a_failure_of_the_last_update_is_not_exit_status_0(
    eio_results: dict[str, Result], case: dict[str, Any]
) -> None:
    result = eio_results[case["name"]]
    assert result["status"] not in (None, 0), result["output"]
    assert result["files"] == []
    assert "TRAINED" in result["output"], "the failure came too early for this test"
    named = NAMED.search(result["output"])
    assert named is not None, result["output"]
    assert named["operation"] == "pwrite"


@pytest.mark.parametrize("case", INTERRUPTED_CASES, ids=lambda case: case["name"])
def test_ctrl_c_ends_the_process_and_removes_the_files(
    interrupted_results: dict[str, Result], case: dict[str, Any]
) -> None:
    result = interrupted_results[case["name"]]
    assert result["status"] is not None, f"it hung: {result['output']}"
    assert result["status"] == -signal.SIGINT, result["output"]
    assert result["files"] == []
    assert result["duration_s"] < 15
    assert "KeyboardInterrupt" in result["output"]


# --- in this process ---


def test_a_failure_stops_every_later_use(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, gradient_clipping=1.0))
    train(engine, num_steps=1)
    engine.synchronize()
    nvme = engine.optimizer.runtime.store.nvme
    assert nvme is not None
    nvme.engine.inject("errno", 1, 5)
    with pytest.raises(OSError, match="Input/output error"):
        train(engine, num_steps=2)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            train(engine, num_steps=1)
    with pytest.raises(OSError, match="Input/output error"):
        engine.synchronize()
    engine.close()  # the error has been seen
    assert os.listdir(tmp_path) == []


def test_a_part_that_fails_to_close_keeps_no_other_open(tmp_path: Path) -> None:
    """The run directory is gone when the last step's record is written."""
    run, files = tmp_path / "run", tmp_path / "files"
    files.mkdir()
    engine = make_engine(settings(files, observe={"run_dir": str(run)}))
    train(engine, num_steps=2)
    store = engine.optimizer.runtime.store
    arenas = [weakref.ref(arena.buffer) for arena in (store.device, store.host)]
    shutil.rmtree(run)
    with pytest.raises(FileNotFoundError):
        engine.close()
    assert os.listdir(files) == []
    with pytest.raises(RuntimeError, match="closed"):
        train(engine, num_steps=1)
    del engine, store
    gc.collect()
    assert [arena() for arena in arenas] == [None, None]


def test_an_engine_that_cannot_start_leaves_no_threads_and_files(tmp_path: Path) -> None:
    """The run's description cannot be written: its name is taken by a directory."""
    run, files = tmp_path / "run", tmp_path / "files"
    files.mkdir()
    (run / "run.json").mkdir(parents=True)
    before = threads_of_ours()
    with pytest.raises(IsADirectoryError):
        make_engine(settings(files, observe={"run_dir": str(run)}))
    assert threads_of_ours() == before
    assert os.listdir(files) == []


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    config = settings(None)
    config["offloadzero"]["nvme_path"] = [str(directory) for directory in directories]
    before = os.umask(0)
    try:
        engine = make_engine(config)
    finally:
        os.umask(before)
    for directory in directories:
        (name,) = os.listdir(directory)
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    engine.close()


# --- other processes ---

KILLED = """
    import os, signal, sys
    from tests.support.tiny import make_engine, settings, train
    engine = make_engine(settings(sys.argv[1]))
    train(engine, num_steps=2)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    living = make_engine(settings(tmp_path))
    (own,) = os.listdir(tmp_path)
    (tmp_path / "offloadzero-notes.txt").write_text("not ours to remove")
    (tmp_path / "another.bin").write_text("not ours to remove")
    foreign = {"offloadzero-notes.txt", "another.bin"}
    assert run_script(KILLED, tmp_path).returncode == -signal.SIGKILL
    (left,) = set(os.listdir(tmp_path)) - foreign - {own}
    following = make_engine(settings(tmp_path))
    present = set(os.listdir(tmp_path))
    assert left not in present
    assert own in present, "the file of an engine that lives was removed"
    assert len(present - foreign) == 2
    train(living, num_steps=1)
    living.close()
    following.close()
    assert set(os.listdir(tmp_path)) == foreign


def test_a_file_is_not_taken_for_stale_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts at the same time looks into the directory between any two steps of this one's start."""
    removed: list[Path] = []

    is_looking = False

    def looked_at(function: Any) -> Any:
        def look(*arguments: Any, **options: Any) -> Any:
            nonlocal is_looking
            result = function(*arguments, **options)
            if not is_looking:
                is_looking = True
                removed.extend(swap_file.remove_stale_files(tmp_path))
                is_looking = False
            return result

        return look

    monkeypatch.setattr(AioEngine, "open", looked_at(AioEngine.open))
    for name in ("open", "fchmod", "pwrite", "link"):
        monkeypatch.setattr(os, name, looked_at(getattr(os, name)))
    engine = make_engine(settings(tmp_path))
    assert removed == []
    train(engine, num_steps=1)
    assert "offloadzero-" in engine.memory_table()
    engine.close()
    assert os.listdir(tmp_path) == []


def test_the_file_of_another_living_process_stays(tmp_path: Path) -> None:
    script = """
        import sys
        from tests.support.tiny import make_engine, settings, train
        engine = make_engine(settings(sys.argv[1]))
        print("ready", flush=True)
        open(sys.argv[2]).read()
        train(engine, num_steps=2)
        engine.close()
        print("fine", flush=True)
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    directory = tmp_path / "nvme"
    directory.mkdir()
    process = start_script(script, directory, gate)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stderr and process.stderr.read()
        (theirs,) = os.listdir(directory)
        engine = make_engine(settings(directory))
        assert theirs in os.listdir(directory)
        engine.close()
        assert os.listdir(directory) == [theirs]
        gate.write_text("go")
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, stdout) == (0, "fine\n"), stderr
    finally:
        process.kill()
        process.wait()
    assert os.listdir(directory) == []


FORKING = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader, Dataset
    from tests.support.tiny import make_engine, settings, tokens, train

    class Tokens(Dataset):
        def __len__(self):
            return 12
        def __getitem__(self, index):
            return tokens(index, batch=1)[0]

    engine = make_engine(settings(sys.argv[1], gradient_clipping=1.0))
    losses = []
    loader = DataLoader(Tokens(), batch_size=2, num_workers=int(sys.argv[2]), multiprocessing_context=(
        "fork" if int(sys.argv[2]) else None))
    for turn in range(2):
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.synchronize()
    assert len(os.listdir(sys.argv[1])) == 1, "a worker's exit removed the file"
    engine.close()
    print(losses)
"""


def test_forked_dataloader_workers_change_nothing(tmp_path: Path) -> None:
    alone = run_script(FORKING, tmp_path, 0)
    assert alone.returncode == 0, alone.stderr
    forked = run_script(FORKING, tmp_path, 2)
    assert forked.returncode == 0, forked.stderr
    assert forked.stdout == alone.stdout
    assert os.listdir(tmp_path) == []


def test_the_host_arena_is_not_given_to_forked_children(tmp_path: Path) -> None:
    """open(2): direct I/O on a private mapping and fork() do not go together unless MADV_DONTFORK is set."""
    engine = make_engine(settings(tmp_path))
    address = engine.optimizer.runtime.store.host.buffer.data_ptr()
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert "dc" in flags
    engine.close()


def test_states_survive_a_slow_disk(tmp_path: Path) -> None:
    """Delays of single blocks reorder completions; they must not change a bit."""
    results = []
    for delayed in (False, True):
        engine = make_engine(settings(tmp_path, update={"chunk_elements": 4096}))
        nvme = engine.optimizer.runtime.store.nvme
        assert nvme is not None
        if delayed:
            for nth in range(1, 600, 3):
                nvme.engine.inject("delay", nth, 1 + nth % 7)
        started_s = time.monotonic()
        losses = train(engine, num_steps=3)
        results.append((losses, all_states(engine)))
        assert time.monotonic() - started_s < PATIENCE_S
        engine.close()
    assert results[0][0] == results[1][0]
    assert all(bool((results[0][1][key] == results[1][1][key]).all()) for key in results[0][1])


def test_a_failure_that_only_a_background_thread_met_counts_as_unseen() -> None:
    """Or close() would keep it to itself: a lane that waits for a buffer looks up, the caller knows nothing."""
    failures = Failures()
    pool = BufferPool((), failures=failures)
    lane = Lane("stage", failures)
    ticket = lane.submit(lambda: pool.give_back(pool.take()))
    failures.record(OSError("the drive is gone"))
    with pytest.raises(OSError, match="the drive is gone"):
        ticket.wait()
    lane.close()
    assert not failures.was_raised
    with pytest.raises(OSError, match="the drive is gone"), failures.handed_over():
        pool.take()
    assert failures.was_raised


def test_a_lane_of_a_closed_engine_says_what_is_closed() -> None:
    """A thread that reads while another closes comes here between the question and the copy."""
    lane = Lane("state-d2h", Failures())
    lane.close()
    with pytest.raises(
        StateError, match=r"^b\.weight: the engine of this model is closed \(lane state-d2h\)"
    ):
        lane.submit(lambda: None, label="b.weight")


def test_a_latch_can_be_set_in_a_child_that_was_forked_while_another_thread_set_one() -> None:
    with Latch._setting:  # what a lane does for some hundred nanoseconds a task
        pid = os.fork()
        if pid == 0:
            signal.alarm(5)
            Latch().set()
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_drive_that_hangs_is_named_in_time(tmp_path: Path) -> None:
    """A transfer that takes longer than the configuration allows ends the training; nothing is used afterwards."""
    engine = make_engine(settings(tmp_path, aio={"transfer_timeout_s": 0.5}))
    train(engine, num_steps=2)
    engine.synchronize()
    nvme = engine.optimizer.runtime.store.nvme
    assert nvme is not None
    nvme.engine.inject("delay", 1, 3_600_000)
    started_s = time.monotonic()
    with pytest.raises(AioTimeoutError) as caught:
        train(engine, num_steps=3)
    assert time.monotonic() - started_s < PATIENCE_S
    text = str(caught.value)
    assert re.match(r"\S+ \(nvme\): p(read|write) .*\.bin\+0x[0-9a-f]+, \d+ bytes: ", text), text
    assert str(nvme.files[0][0]) in text
    assert text.endswith("not complete after 0.5 s (transfer_timeout_s)")
    reads: Callable[[], Any] = lambda: [param.clone() for param in engine.module.parameters()]  # noqa: E731
    for use in (lambda: train(engine, num_steps=1), engine.synchronize, reads):
        with pytest.raises(AioTimeoutError):
            use()
    nvme.engine.close(cancel=True)  # ends the delay: the drive answers
    engine.close()
    assert list(tmp_path.iterdir()) == []
