"""A process that goes to another directory: relative paths mean what they meant when they were given."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero import ConfigError
from offloadzero.config import load_config
from offloadzero.memory.swap_file import SwapFile
from tests.engine.leftovers import collect
from tests.support.faults import observes
from tests.support.tiny import make_engine, run_script, settings, tokens, train


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the process is when the test begins; `second` is beside it."""
    for name in ("first", "first/files", "second", "second/files"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    return tmp_path / "first"


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


ENDS: dict[str, Callable[[Any], Any]] = {
    "closed": lambda engine: engine.close(),
    "restored": lambda engine: engine.restore_model(),
    "dropped": id,  # and nothing else is done
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ["files", ".", "new", "../first/files"])
def test_no_file_is_left_in_the_first_directory(first: Path, end: str, name: str) -> None:
    """Activation files are made in the first step: after the change."""
    config = settings(name, activation_checkpoints={"tier": "nvme"})
    engine = make_engine(config)
    os.chdir(first.parent / "second")
    engine.backward(engine(tokens(0, batch=8, length=33)))
    engine.step()
    assert len(files_in(first)) == 2
    ENDS[end](engine)
    del engine
    if end == "dropped":
        collect(lambda: not files_in(first))
    assert files_in(first.parent) == []


def test_a_swap_file_by_itself(first: Path) -> None:
    file = SwapFile(Path("files"))
    os.chdir("..")
    file.remove()
    assert files_in(first) == []


def test_files_are_made_where_they_were_checked(first: Path) -> None:
    config = load_config(settings("files"))
    os.chdir(first.parent / "second")
    engine = make_engine(config)
    assert len(files_in(first)) == 1
    engine.close()


class Wanderer(nn.Module):
    """A constructor that changes the directory."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)
        os.chdir("../second")
        self.two = nn.Linear(64, 64)


def test_parameters_of_a_large_model_wait_where_it_was_said(
    first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offloadzero.zero.MIN_SPILL_ELEMENTS", 1)
    (first.parent / "second" / "files").rmdir()  # nothing can be made there
    torch.manual_seed(0)
    with offloadzero.zero.Init(config_dict_or_path=settings("files", bf16=None), remote_device="nvme"):
        model = Wanderer()
    os.chdir(first)
    torch.manual_seed(0)
    expected = Wanderer()
    with offloadzero.zero.GatheredParameters(list(model.parameters())):
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_run_is_recorded_in_one_place(first: Path) -> None:
    observe = {"run_dir": "run", "trace_steps": [2]}
    engine = make_engine(settings(placement="host", observe=observe))
    train(engine, num_steps=1)
    os.chdir("../second")
    train(engine, num_steps=2)
    engine.close()
    assert files_in(first.parent / "second") == []
    assert files_in(first) == ["run/run.json", "run/steps.jsonl", "run/trace_step_2.json"]


def test_a_checkpoint_is_written_in_one_place(first: Path) -> None:
    engine = make_engine(settings(placement="host"))
    train(engine, num_steps=1)

    def wander(_name: object) -> None:
        """Another thread may do so, and the directory is the process's."""
        os.chdir("../second")

    with observes("checkpoint.write", before=wander):
        engine.save_checkpoint("saved")
        os.chdir(first)
        engine.save_16bit_model("saved")
    assert files_in(first.parent / "second") == []
    os.chdir(first)
    assert engine.load_checkpoint("saved")[0] == str(first / "saved" / "global_step1")
    engine.close()


def test_a_directory_that_is_gone(first: Path) -> None:
    """Relative paths mean nothing there: a named error. Absolute ones do."""
    engine = make_engine(settings(placement="host"))
    os.chdir("files")
    (first / "files").rmdir()
    for key, use in (
        ("save_dir", lambda: engine.save_checkpoint("saved")),
        ("save_dir", lambda: engine.save_16bit_model("saved")),
        ("load_dir", lambda: engine.load_checkpoint("saved")),
        (r"offloadzero\.nvme_path", lambda: load_config(settings("."))),
        (
            r"offloadzero\.observe\.run_dir",
            lambda: make_engine(settings(placement="host", observe={"run_dir": "run"})),
        ),
    ):
        with pytest.raises(ConfigError, match=rf"^{key} = .*No such file or directory"):
            use()
    engine.save_checkpoint(first / "saved")
    engine.load_checkpoint(first / "saved")
    engine.close()


def test_sigterm_removes_the_file_all_the_same(first: Path) -> None:
    done = run_script(
        """
        import os, signal, sys
        from tests.support.tiny import make_engine, settings
        os.chdir(sys.argv[1])
        engine = make_engine(settings("files"))
        assert os.listdir("files")
        os.chdir("..")
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        first,
    )
    assert done.returncode == -15, done.stderr
    assert files_in(first) == []
