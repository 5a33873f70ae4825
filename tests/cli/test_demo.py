"""`offloadzero demo`: it trains, says what came of it, and the commands that it names run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from offloadzero.cli.demo import gpt_model
from offloadzero.cli.main import USER_ERROR, main, make_parser
from offloadzero.config import load_config


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of the sources."""
    text = gpt_model.Text(gpt_model.read_files(gpt_model.stdlib_sources(), max_bytes=1 << 20))
    monkeypatch.setattr(gpt_model.Text, "load", lambda: text)


def test_it_trains_with_all_states_in_files_and_shows_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert " as the device" in shown.splitlines()[0]
    assert re.search(r"^    /.*/offloadzero-demo/offloadzero-.*\.bin  [24][0-9.]+ MiB$", shown, re.MULTILINE)
    assert re.search(r"^step 4: loss [2-5]\.[0-9]{4}, [0-9,]+ tokens/s$", shown, re.MULTILINE)
    assert re.search(r"^validation loss [2-5]\.[0-9]{4} nats/byte after 4 steps, ", shown, re.MULTILINE)
    assert re.search(r"^A step takes .*; largest waits: ", shown, re.MULTILINE)
    assert re.search(r"^nvme read  +2[0-9.]+ MiB ", shown, re.MULTILINE)
    left = [path.name for path in Path("offloadzero-demo").iterdir()]
    assert sorted(re.sub(r"[0-9]+-[0-9]+", "N", name) for name in left) == ["config.json", "run-N"]

    commands = [shlex.split(line, comments=True) for line in shown.partition("Next:\n")[2].splitlines()]
    assert [words[:2] for words in commands] == [
        ["offloadzero", name] for name in ("report", "plan", "doctor")
    ]
    report, plan, doctor = (words[1:] for words in commands)
    assert main(report) == 0
    assert (Path(report[1]) / "report.html").stat().st_size > 10_000
    assert load_config(make_parser().parse_args(plan).config).notices == ()
    assert main([*doctor, "--json", "doctor.json"]) in (0, 1)


def test_a_configuration_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In host memory, of two micro batches; what else it observes is observed."""
    config = {
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "offloadzero": {"observe": {"trace_steps": [2]}},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert main(["demo", str(tmp_path / "demo"), "--config", str(file), "--steps", "2"]) == 0
    assert f"--config {file}" in capsys.readouterr().out
    (run_dir,) = (tmp_path / "demo").iterdir()
    assert (run_dir / "trace_step_2.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "tiny2"],
            "--model = 'tiny2': tiny, 160m, 400m, 1b, 7b, 10b, 13b (did you mean 'tiny'?)",
        ),
        (["--steps", "0"], "--steps = 0: at least 1"),
        (["a file"], "DIR = 'a file': a directory that can be made (File exists)"),
        (["--config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_of_the_user(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    assert main(["demo", *arguments]) == USER_ERROR
    assert message in capsys.readouterr().err
