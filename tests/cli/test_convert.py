"""`offloadzero convert`: what it recognises, what it refuses, and what it says meanwhile."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from offloadzero import CheckpointError
from offloadzero.checkpoint.format.torch_file import Foreign, TorchFile
from offloadzero.cli import output
from offloadzero.cli.main import FAILURE, USER_ERROR, main
from offloadzero.cli.output import ProgressBar
from tests.support.checkpoints import contents
from tests.support.tiny import script_environment

DEEPSPEED = Path(__file__).parents[1] / "checkpoint" / "deepspeed_files" / "stage-3-fp32" / "checkpoint"


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    save_file({"weight": torch.arange(6.0).view(2, 3)}, made / "model.safetensors")
    return made


def test_each_kind_is_recognised_with_and_without_its_tag(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_deepspeed = "DeepSpeed's ZeRO stage 3 at step 3, ranks: 2, 327 parameters"
    for number, (source, what) in enumerate(
        [
            (DEEPSPEED, of_deepspeed),
            (DEEPSPEED / "global_step3", of_deepspeed),
            (folder, "a folder of weights in 1 file, 6 parameters"),
            (tmp_path / "0", "a checkpoint of step 3, 327 parameters"),
            (tmp_path / "1" / "global_step3", "a checkpoint of step 3, 327 parameters"),
        ]
    ):
        assert convert(source, tmp_path / str(number)) == 0
        printed = capsys.readouterr()
        assert f"{source}: " in printed.out
        assert what in printed.out
        assert str(tmp_path / str(number)) in printed.out
    assert (tmp_path / "2" / "latest").read_text() == "global_step0"
    assert (tmp_path / "3" / "model.safetensors").exists()


def test_a_folder_that_deepspeed_saved_into_is_its_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the Trainer of transformers makes them."""
    shutil.copytree(DEEPSPEED, folder, dirs_exist_ok=True)
    assert convert(folder, tmp_path / "out") == 0
    assert "ZeRO stage 3" in capsys.readouterr().out


def test_what_it_does_not_take_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    refused: dict[str, tuple[object, ...]] = {
        "--to = 'folder': SRC is one already": (folder, "--to", "folder"),
        "--dtype = 'bf16': goes with --to folder": (folder, "--dtype", "bf16"),
        "--max-shard-size = '1GB': goes with --to folder": (DEEPSPEED, "--max-shard-size", "1GB"),
        "--like = ": (DEEPSPEED, "--to", "folder", "--like", tmp_path / "empty"),
        "--max-shard-size = '5G': a whole number of bytes": (DEEPSPEED, "--max-shard-size", "5G"),
        "SRC = ": (tmp_path / "nowhere",),
    }
    before = contents(tmp_path)
    for message, words in refused.items():
        assert convert(words[0], tmp_path / "out", *words[1:]) == USER_ERROR
        assert message in capsys.readouterr().err
    assert convert(tmp_path / "empty", tmp_path / "out") == FAILURE
    assert (
        "no checkpoint of offloadzero, none of DeepSpeed's, no durable run, and no folder"
        in capsys.readouterr().err
    )
    assert contents(tmp_path) == before


def test_a_checkpoint_with_adapters_does_not_become_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its names are PEFT's: what is loaded from such a folder would be random."""
    made = tmp_path / "folder"
    made.mkdir()
    save_file({"base_model.model.w.lora_A.default.weight": torch.ones(2, 3)}, made / "model.safetensors")
    assert convert(made, tmp_path / "checkpoint") == 0
    capsys.readouterr()
    assert convert(tmp_path / "checkpoint", tmp_path / "out") == USER_ERROR
    assert "save_pretrained() of the model writes them" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_objects_of_numpy_in_a_file_are_stood_in_for(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    torch.save({"best": np.float64(0.1), "array": np.arange(3), "weight": torch.ones(2)}, path)
    values = TorchFile(path).values
    assert isinstance(values["array"], Foreign)
    assert torch.equal(values["weight"], torch.ones(2))


def test_what_a_file_fills_is_a_dict_and_a_list(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    counts = defaultdict(list, {"a": [1, 2], "b": []})
    torch.save({"counts": counts, "last": deque([1.5, "x"], maxlen=3), "weight": torch.ones(2)}, path)
    values = TorchFile(path).values
    assert values["counts"] == {"a": [1, 2], "b": []}
    assert values["last"] == [1.5, "x"]
    torch.save({"mine": _Terminals([1])}, path)
    with pytest.raises(
        CheckpointError, match=r"Can only append to lists, but got .*test_convert\._Terminals"
    ):
        TorchFile(path)


class _Terminals(list[int]):
    """A class of a program's own."""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stream: io.StringIO, **every: Any) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(ProgressBar, "_DRAW_EVERY_S", 0.0)
        monkeypatch.setattr(output, "_LINE_EVERY_S", every.get("every_s", 0.0))
        with ProgressBar(4096) as bar:
            bar.add(1024)
            bar.add(3072)
        return stream.getvalue()

    drawn = shown(_Terminal()).split("\r")
    assert [text.count("#") for text in drawn] == [0, 7, 30, 30]
    assert " 25% of 4.00 KiB, " in drawn[1]
    assert drawn[-1].endswith("\n")
    lines = shown(io.StringIO()).splitlines()
    assert [line.split(" of ")[0] for line in lines] == [" 25%", "100%"]
    assert shown(io.StringIO(), every_s=60.0) == ""


def test_the_command_line_is_read_without_torch() -> None:
    script = "import sys, offloadzero.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], env=script_environment(), check=True)
