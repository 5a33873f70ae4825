"""Every command when its output goes nowhere: one line, the right status, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from offloadzero.cli.main import FAILURE, UNREAD, main
from tests.cli.test_report import step_record, write_run
from tests.support.tiny import REPOSITORY, script_environment
from tests.support.warm import WarmProcess, run_warm

COMMANDS = {
    "version": ["--version"],
    "help": ["bench", "nvme", "--help"],
    "report": ["report", "RUN"],
    "plan": ["plan", "--model", "64/1/4/101", "--config", "examples/configs/host.json", "--no-time"],
    "bench nvme": ["bench", "nvme", "/dev/shm", "--size", "16MiB", "--time", "1.5s"],
    "bench adam": ["bench", "adam", "--params", "1048576", "--rounds", "1"],
}


def command(name: str, tmp_path: Path) -> list[str]:
    run = write_run(tmp_path / "run", [step_record(1)])
    return [sys.executable, "-m", "offloadzero", *(part.replace("RUN", str(run)) for part in COMMANDS[name])]


def start(words: Sequence[str], stdout: int, stderr: int) -> subprocess.Popen[str]:
    environment = {**script_environment(), "PYTHONDEVMODE": ""}
    return WarmProcess(words, cwd=REPOSITORY, env=environment, stdout=stdout, stderr=stderr, text=True)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench adam"])
def test_a_reader_that_has_gone_is_no_error_to_speak_of(name: str, tmp_path: Path) -> None:
    """As in `offloadzero ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    process = start(command(name, tmp_path), writer, subprocess.PIPE)
    os.close(writer)
    _, err = process.communicate(timeout=120)
    assert process.returncode == UNREAD == 128 + 13, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert "offloadzero: " not in err


def test_neither_is_one_of_the_progress(tmp_path: Path) -> None:
    """As in `offloadzero ... 2>&1 | head -1`: nothing is left behind either."""
    reader, writer = os.pipe()
    os.close(reader)
    process = start(command("bench nvme", tmp_path), writer, writer)
    os.close(writer)
    assert process.wait(timeout=120) == UNREAD


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_under_the_output_is_named(name: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start(command(name, tmp_path), full.fileno(), subprocess.PIPE)
        _, err = process.communicate(timeout=120)
    assert process.returncode == FAILURE, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert err.splitlines()[-1] == "offloadzero: standard output: No space left on device"


@pytest.mark.parametrize("option", ["--json", "-o"])
def test_a_full_disk_under_a_file_is_named(tmp_path: Path, option: str) -> None:
    name = "report" if option == "-o" else "bench adam"
    words = [*command(name, tmp_path), option, "/dev/full"]
    done = run_warm(words, cwd=REPOSITORY, env=script_environment(), timeout_s=120)
    assert done.returncode == FAILURE
    assert done.stderr.splitlines()[-1].startswith("offloadzero: write /dev/full+0x0, ")
    assert "Traceback" not in done.stderr


def test_a_name_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    strange = os.fsencode(tmp_path) + b"/run-\xff-\xc3\xbc"
    run = write_run(Path(os.fsdecode(strange)), [step_record(1)])
    done = subprocess.run(
        [sys.executable, "-m", "offloadzero", "report", os.fsencode(run)],
        cwd=REPOSITORY,
        env={**script_environment(), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "run-\\udcff-\\xfc" in done.stdout


def test_a_result_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMANDS["bench adam"], "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rounds"] == 1
