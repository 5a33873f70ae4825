"""What the system refuses while a checkpoint is written: a named error, nothing half-written, and the run goes on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offloadzero import AioError, BudgetError, CheckpointError, StateError
from offloadzero.core.fail_points import Point
from tests.support.checkpoints import contents, small_engine, train, whole_state
from tests.support.faults import fails, observes
from tests.support.tiny import run_script, small_disk


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    engine = small_engine(tmp_path / "nvme", "nvme")
    train(engine, 1)
    yield engine
    engine.close()


def saves(engine: Any, directory: Path) -> dict[str, Callable[[], Any]]:
    return {
        "checkpoint": lambda: engine.save_checkpoint(directory, tag="a"),
        "weights": lambda: engine.save_16bit_model(directory),
    }


@pytest.mark.parametrize("what", ["checkpoint", "weights"])
@pytest.mark.parametrize("path", ["/proc/nowhere", "/sys/nowhere", "/proc/self/nowhere/deeper"])
def test_a_directory_that_cannot_be_made(engine: Any, path: str, what: str) -> None:
    with pytest.raises(CheckpointError, match=r"^/(proc|sys)\S*: [A-Z].*: nothing was saved") as raised:
        saves(engine, Path(path))[what]()
    assert isinstance(raised.value.__cause__, OSError)
    train(engine, 1, first=1)


@pytest.mark.parametrize("what", ["checkpoint", "weights"])
def test_a_directory_that_is_read_only(engine: Any, tmp_path: Path, what: str) -> None:
    with small_disk(tmp_path / "disk", size="8m") as disk:
        saves(engine, disk)[what]()
        before = contents(disk)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError, match=r"disk\S*: Read-only file system: nothing was saved"):
            saves(engine, disk)[what]()
        with pytest.raises(CheckpointError, match=r"disk/new: Read-only file system: nothing was saved"):
            saves(engine, disk / "new")[what]()
        assert contents(disk) == before
        if what == "checkpoint":
            assert engine.load_checkpoint(disk)[0] == str(disk / "a")  # reading needs no writing
    train(engine, 1, first=1)


@pytest.mark.parametrize("what", ["checkpoint", "weights"])
def test_a_full_disk(engine: Any, tmp_path: Path, what: str) -> None:
    """On another filesystem than the swap file's; whichever file it is that does not fit any more."""
    with small_disk(tmp_path / "disk", size="1m") as disk:
        saves(engine, disk)[what]()
        before = contents(disk)
        num_free = os.statvfs(disk).f_bavail
        for num_blocks in range(8 if what == "checkpoint" else 1):
            filler = disk / "filler"
            filler.write_bytes(bytes(4096 * (num_free - num_blocks)))
            with pytest.raises((AioError, CheckpointError), match=r"disk/.*No space left on device"):
                saves(engine, disk)[what]()
            filler.unlink()
            assert contents(disk) == before, num_blocks
        saves(engine, disk)[what]()
        if what == "checkpoint":
            assert engine.load_checkpoint(disk)[0] == str(disk / "a")
    train(engine, 1, first=1)


def test_a_limit_on_file_sizes(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path / "saved", tag="a")
    before = contents(tmp_path / "saved")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(AioError, match=r"unit-0\d+\.safetensors\+0x\w+, \d+ bytes: File too large"):
            engine.save_checkpoint(tmp_path / "saved", tag="a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert contents(tmp_path / "saved") == before
    train(engine, 1, first=1)


def test_latest_that_cannot_be_written(engine: Any, tmp_path: Path) -> None:
    """The checkpoint is whole by then, and the error says so."""
    engine.save_checkpoint(tmp_path / "saved", tag="a")

    refused = fails("checkpoint.point", OSError(5, "Input/output error", "latest"))
    message = r"latest: Input/output error: .*saved/b is saved, but .*latest"
    with refused, pytest.raises(CheckpointError, match=message):
        engine.save_checkpoint(tmp_path / "saved", tag="b")
    assert engine.load_checkpoint(tmp_path / "saved")[0] == str(tmp_path / "saved" / "a")
    assert engine.load_checkpoint(tmp_path / "saved", tag="b")[0] == str(tmp_path / "saved" / "b")


def test_no_room_for_the_swap_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="8k") as disk:
        with pytest.raises(BudgetError, match=r"bytes are needed in \S*disk, [\d,]+ are free"):
            small_engine(disk, "nvme")
        assert os.listdir(disk) == []


def test_sigterm_while_saving(tmp_path: Path) -> None:
    """In the midst of the writing: the older one stays whole, the swap file goes, the next save clears up."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from tests.support.checkpoints import small_engine, train
        from tests.support.faults import observes
        engine = small_engine(Path(sys.argv[1]) / "nvme", "nvme")
        train(engine, 1)
        engine.save_checkpoint(sys.argv[1] + "/saved", tag="a")
        calls = []
        def kill(_name):
            calls.append(1)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
        with observes("checkpoint.write", after=kill):
            engine.save_checkpoint(sys.argv[1] + "/saved", tag="a")
    """
    done = run_script(script, tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert os.listdir(tmp_path / "nvme") == []
    engine = small_engine(tmp_path / "nvme", "nvme", seed=1)
    assert engine.load_checkpoint(tmp_path / "saved")[0] == str(tmp_path / "saved" / "a")
    engine.save_checkpoint(tmp_path / "saved", tag="b")
    assert sorted(os.listdir(tmp_path / "saved")) == ["a", "b", "latest"]
    engine.close()


# --- another process saves under the same tag while this one loads ---


REPLACED_AT: dict[str, tuple[Point, str | None]] = {
    "the manifest": ("checkpoint.check", None),
    "a header": ("checkpoint.read", "the header"),
    "a weight": ("checkpoint.read", "blocks.1.weight"),
    "a moment": ("checkpoint.read", "blocks.1.weight.exp_avg"),
    "a buffer": ("checkpoint.read", "seen"),
}


@pytest.mark.parametrize("at", REPLACED_AT)
def test_a_checkpoint_that_is_replaced_while_it_is_loaded(engine: Any, tmp_path: Path, at: str) -> None:
    """Values of two checkpoints never mix unseen, and before the first write nothing has changed."""
    saved = tmp_path / "saved"
    engine.save_checkpoint(saved, tag="a")
    train(engine, 2, first=1)
    other = small_engine(tmp_path / "nvme", seed=1)
    before = whole_state(other)

    is_replaced = False

    def replace(_name: object) -> None:
        nonlocal is_replaced
        if not is_replaced:
            is_replaced = True
            engine.save_checkpoint(saved, tag="a")

    point, about = REPLACED_AT[at]
    replacing = observes(point, before=replace, about=about)
    message = r"saved/a was replaced or removed while it was read"
    with replacing, pytest.raises(CheckpointError, match=message):
        other.load_checkpoint(saved, tag="a")
    if at in ("the manifest", "a header"):
        assert whole_state(other) == before
        other.load_checkpoint(saved, tag="a")
        assert train(other, 1) == train(engine, 1)
    else:
        with pytest.raises(StateError, match="mixture"):
            train(other, 1)
    other.close()
