"""`examples/train_10b.py` at two million parameters: what it says beforehand, its steps, Ctrl-C, and going on."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offloadzero.config import load_config, settle_for_initialize
from offloadzero.errors import BudgetError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(EXAMPLES), str(ROOT / "benchmarks")]

import gpt_model  # noqa: E402
import llama_model  # noqa: E402
import needs  # noqa: E402
import rehearsal  # noqa: E402
import ten_billion  # noqa: E402
import train_10b  # noqa: E402

SENTENCE = b"the states live elsewhere and the numbers stay the same. "
OPTIONS = ("--parameters", "2M", "--seq-len", "32", "--data", "text")
NUM_PARAMS = 2_312_256


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the text, the shipped configuration at a rate for a small model, and the folder of the files.

    The example turns the log of steps on, for all that runs in this process.
    """
    steps = logging.getLogger("offloadzero.steps")
    level = steps.level
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(SENTENCE * 40)
    Path("offload-files").mkdir()
    config = json.loads(train_10b.CONFIG.read_text())
    config["scheduler"]["params"] |= {"warmup_min_lr": 2e-3, "warmup_max_lr": 2e-3}
    Path("config.json").write_text(json.dumps(config))
    yield tmp_path
    steps.setLevel(level)


def run(*options: str) -> int:
    status: int = train_10b.main(["--config", "config.json", *OPTIONS, *options])
    assert not list(Path("offload-files").iterdir())
    return status


def steps_of(log: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    return [row for row in rows if "step" in row]


def losses_of(log: str) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in steps_of(log)]


def interrupt(monkeypatch: pytest.MonkeyPatch, *, before_batches: tuple[int, ...]) -> None:
    """Ctrl-C before each of these batches, counted from 1; twice where one is named twice."""
    original, count = gpt_model.Text.batch, 0

    def batch(text: gpt_model.Text, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal count
        count += 1
        for _ in range(before_batches.count(count)):
            os.kill(os.getpid(), signal.SIGINT)
        return original(text, **options)

    monkeypatch.setattr(gpt_model.Text, "batch", batch)


def saved_values(directory: str, step: int) -> dict[str, bytes]:
    files = sorted(Path(directory, f"global_step{step}").glob("unit-*.safetensors"))
    assert files
    return {file.name: file.read_bytes() for file in files}


# --- sizes


@pytest.mark.parametrize("wanted", ["2M", "100M", "10B"])
def test_a_size_has_at_least_the_parameters_that_were_asked_for(wanted: str) -> None:
    min_params = train_10b.read_count(wanted)
    size = llama_model.size_of_at_least(min_params, vocab_size=256)
    with torch.device("meta"):
        count = sum(param.numel() for param in llama_model.Llama(size).parameters())
    assert count == llama_model.num_params(size)
    assert min_params <= count < 1.2 * min_params
    assert size.width % size.num_heads == 0


def test_a_shape_of_its_own_and_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    args = train_10b.parse_arguments(["--layers", "3", "--width", "192"])
    assert train_10b.model_size(args) == llama_model.LlamaSize(3, 192, 3, 3, 512, 256)
    for options, message in (
        (["--layers", "3"], "--layers and --width go together"),
        (["--layers", "3", "--width", "1088"], "--width 1088: a multiple of 128"),
        (["--parameters", "2M", "--rehearse"], "--rehearse: a model of more than 10 layers"),
        (["--parameters", "1000"], "no size has 1,000 parameters or a little more"),
        (["--parameters", "ten"], "'ten': a number, or one with K, M or B"),
        (["--layers", "0", "--width", "192"], "argument --layers: '0': a whole number from 1 on"),
        (["--layers", "3", "--width", "0"], "argument --width: '0': a whole number from 1 on"),
        (
            ["--layers", "3", "--width", "192", "--parameters", "2M"],
            "--parameters, or --layers and --width in its",
        ),
        (["--progress-s", "-1"], "argument --progress-s: '-1': seconds, from 0 on"),
        (["--progress-s", "nan"], "argument --progress-s: 'nan': seconds, from 0 on"),
        (["--parameters", "0"], "no size has 0 parameters or a little more"),
        (["--seq-len", "-1"], "argument --seq-len"),
        (["--steps", "0"], "argument --steps: '0': a whole number from 1 on"),
        (["--log", "nowhere/log"], "--log nowhere/log: there is no directory nowhere"),
        (["--save", "text/saved"], "/text is no directory"),
    ):
        with pytest.raises(SystemExit):
            train_10b.parse_arguments(options)
        assert message in capsys.readouterr().err


# --- what is needed


def needs_of(name: str, config: Any) -> needs.Needs:
    size = llama_model.size_of_at_least(train_10b.read_count(name), vocab_size=256)
    return needs.find_needs(size, config, batch_size=1, seq_len=128)


def test_ten_billion_fit_70_gigabytes_of_disk_and_16_gibibytes_of_memory() -> None:
    config = replace(settle_for_initialize(load_config(train_10b.CONFIG)), device="cpu")
    found = needs_of("10B", config)
    assert found.num_params >= 10_000_000_000
    assert found.plan.update_in_backward
    assert not found.plan.grads_have_homes
    assert found.swap_bytes < 70_000_000_000 < found.swap_bytes + found.checkpoint_bytes
    assert found.host_bytes < 16 << 30
    assert not config.notices


@pytest.mark.parametrize("layout", ["compact", "fp32"])
def test_what_is_said_beforehand_is_what_the_engine_takes(
    layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path("config.json").read_text())
    config["offloadzero"] |= {"state_layout": layout, "device": "cpu"}
    Path("config.json").write_text(json.dumps(config))
    seen: list[tuple[dict[str, int], str]] = []
    original = train_10b.build

    def build(*arguments: Any) -> Any:
        engine, model = original(*arguments)
        seen.append((engine.reserved_bytes(), engine.memory_table()))
        return engine, model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_10b, "build", build)
        assert run("--steps", "1", "--save", "saved") == 0
    found = needs_of("2M", settle_for_initialize(load_config("config.json")))
    ((reserved, table),) = seen
    assert {tier.value: found.plan.tier_bytes(tier) for tier in needs.TierName} == reserved
    assert table.startswith(found.plan.table())
    output = capsys.readouterr().out
    assert output.startswith(f"{NUM_PARAMS:,} parameters\n{found.plan.table()}\nbeside the plan: ")
    on_disk = sum(path.stat().st_size for path in Path("saved").rglob("*") if path.is_file())
    assert found.checkpoint_bytes == pytest.approx(on_disk, rel=0.01)


def test_second_places_are_taken_where_the_drive_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With clipping they let updates begin in backward. A drive without room for them was refused."""
    text = json.loads(Path("config.json").read_text()) | {"gradient_clipping": 1.0}
    Path("config.json").write_text(json.dumps(text))
    config = settle_for_initialize(load_config("config.json"))
    roomy = needs_of("2M", config)
    monkeypatch.setattr(needs, "drive_bytes", lambda _: roomy.swap_bytes - 1)
    tight = needs_of("2M", config)
    assert tight.swap_bytes < roomy.swap_bytes
    assert ("second places" in tight.plan.table(), "second places" in roomy.plan.table()) == (False, True)


def test_a_disk_without_room_is_refused_with_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = needs_of("2M", settle_for_initialize(load_config("config.json")))
    free = found.swap_bytes + found.checkpoint_bytes - 4096
    monkeypatch.setattr(
        needs.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_flag=0)
    )
    assert run("--plan") == 0
    assert run("--plan", "--save", "saved") == 1
    error = capsys.readouterr().err
    free = free // 4096 * 4096
    both = found.swap_bytes + found.checkpoint_bytes
    assert (
        f"{both:,} bytes are needed ({found.swap_bytes:,} for the swap file, {found.checkpoint_bytes:,} for a "
        f"checkpoint), {free:,} are free, {both - free:,} short"
    ) in error
    assert "a smaller model, or a shorter --seq-len" in error


@pytest.mark.parametrize(("model", "smaller"), [("10B", "3B"), ("3B", "300M"), ("30M", None), ("2M", None)])
def test_the_model_that_a_refusal_offers_is_smaller(
    model: str, smaller: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It offered one of 3 billion parameters for each, also for one of 2 million."""
    config = settle_for_initialize(load_config("config.json"))
    monkeypatch.setattr(needs, "host_bytes_before", lambda: 1 << 20)
    with pytest.raises(BudgetError) as caught:
        needs.check(needs_of(model, config), config, save=None)
    offered = re.findall(r"--parameters (\w+)", str(caught.value))
    assert offered == ([] if smaller is None else [smaller])


def test_host_memory_that_is_too_small_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "host_bytes_before", lambda: 1 << 20)
    assert run() == 1
    assert re.search(
        r"^BudgetError: host memory: about [0-9.]+ [MG]iB are needed, [0-9.]+ MiB are available$",
        capsys.readouterr().err,
        re.MULTILINE,
    )


def test_a_text_that_is_too_short_is_refused_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_10b, "build", lambda *_: pytest.fail("it builds"))
    Path("empty").mkdir()
    for options, message in (
        (("--data", "nowhere"), "--data = 'nowhere': a file, or a directory with files: it does not exist"),
        (("--data", "empty"), "--data = 'empty': a file, or a directory with files: there is no text"),
        (("--seq-len", "5000"), "--seq-len = 5000: less than the 2,052 bytes of text"),
    ):
        assert run(*options) == 1
        assert f"ConfigError: {message}" in capsys.readouterr().err


# --- steps


def test_a_run_learns_and_says_how_fast_and_what_bounds_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--steps", "6", "--log", "log") == 0
    losses = [loss for _, loss in losses_of("log")]
    assert losses[0] == pytest.approx(math.log(256), abs=0.5)
    assert losses[-1] < losses[0] - 1
    output = capsys.readouterr().out
    line = r"^step 6/6: loss [0-9.]+, [0-9.]+ s, bound [0-9.]+ s \([a-z ]+\), overlap [0-9.]+%, peak RSS [0-9.]+ GiB$"
    assert re.search(line, output, re.MULTILINE)
    assert (
        f"\n{NUM_PARAMS:,} parameters, steps 1 to 6: loss {losses[0]:.4f} to {losses[-1]:.4f}, peak RSS "
        in output
    )
    for row in steps_of("log"):
        assert row["report_step"] == row["step"]
        assert 0 < row["bound_s"] <= row["step_s"] * 1.5
        assert row["peak_rss_bytes"] > 0


def test_progress_names_each_unit_once_in_each_direction(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--steps", "1", "--progress-s", "0") == 0
    found = re.findall(
        r"^rank 0: step 1, (\w+), unit (\d+) of 7, [0-9.]+ s so far$", capsys.readouterr().out, re.MULTILINE
    )
    forward, backward = (
        [("forward", str(n)) for n in range(1, 8)],
        [("backward", str(n)) for n in range(7, 0, -1)],
    )
    assert found == forward + backward


def test_progress_is_quiet_between_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--steps", "2", "--progress-s", "600") == 0
    assert "rank 0" not in capsys.readouterr().out


def test_a_rehearsal_is_a_straight_line_through_what_two_small_models_took() -> None:
    found = rehearsal.extrapolate(rehearsal.Seconds(6, 4.0, 2.0), rehearsal.Seconds(10, 6.0, 5.0), 46)
    assert found == rehearsal.Seconds(46, 24.0, 32.0)


def test_a_rehearsal_on_a_busy_machine_gives_a_bound_and_says_so() -> None:
    """More layers that seem to take less time: a line through both would end below zero."""
    fewer, more = rehearsal.Seconds(6, 5.0, 3.0), rehearsal.Seconds(10, 4.5, 3.5)
    found = rehearsal.extrapolate(fewer, more, 60)
    assert found == rehearsal.Seconds(60, 60 * 5.0 / 6, 3.0 + 54 * 0.5 / 4)
    (line,) = rehearsal.falling(fewer, more)
    assert line.startswith("10 layers took 4.50 s to build and 6 took 5.00 s: the machine was busy")
    assert rehearsal.falling(rehearsal.Seconds(6, 1.0, 1.0), rehearsal.Seconds(10, 1.0, 2.0)) == []


def test_a_rehearsal_trains_two_small_models_as_the_large_one_will_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def run_here(command: list[str], **_: Any) -> None:
        calls.append(command[2:])
        assert train_10b.main(command[2:]) == 0

    monkeypatch.setattr(rehearsal.subprocess, "run", run_here)
    options = ["--width", "64", "--seq-len", "32", "--data", "text", "--config", "config.json"]
    assert train_10b.main([*options, "--layers", "11", "--steps", "1", "--log", "log", "--rehearse"]) == 0
    (start, _) = map(json.loads, Path("log").read_text().splitlines())
    output = capsys.readouterr().out
    for call, num_layers in zip(calls, (6, 10), strict=True):
        assert call[call.index("--layers") + 1] == str(num_layers)
        assert [call[call.index(name) + 1] for name in options[::2]] == options[1::2]
        size = llama_model.shape_of(64, num_layers, vocab_size=256)
        assert f"\n{llama_model.num_params(size):,} parameters, steps 1 to 3: " in output
    forecast = start["forecast_s"]
    assert f"forecast: {forecast['build']:.0f} s to build, {forecast['step']:.1f} s per step\n" in output


def test_a_rehearsal_that_fails_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_10b, "__file__", "no-such-script.py")
    options = ["--width", "64", "--layers", "11", "--config", "config.json", "--rehearse"]
    assert train_10b.main(options) == 1
    assert capsys.readouterr().err == "the rehearsal ended with status 2\n"


# --- its end and its way on


def test_ctrl_c_ends_the_step_saves_and_the_run_goes_on_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "4", "--log", "whole.jsonl", "--save", "whole") == 0
    with monkeypatch.context() as patch:
        interrupt(patch, before_batches=(2,))
        assert run("--steps", "4", "--log", "parts.jsonl", "--save", "parts") == 130
    assert [step for step, _ in losses_of("parts.jsonl")] == [1, 2]
    captured = capsys.readouterr()
    assert "stopping when this step has ended; once more: at once" in captured.err
    assert "saved step 2 to parts" in captured.out
    assert run("--steps", "4", "--log", "parts.jsonl", "--resume", "parts", "--save", "parts") == 0
    assert losses_of("parts.jsonl") == losses_of("whole.jsonl")
    assert saved_values("parts", 4) == saved_values("whole", 4)
    assert saved_values("parts", 2) != saved_values("whole", 4)


def test_a_second_ctrl_c_ends_it_at_once_and_removes_the_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, before_batches=(2, 2))
    before = signal.getsignal(signal.SIGINT)
    assert run("--steps", "4", "--log", "log", "--save", "saved") == 130
    assert capsys.readouterr().err.endswith("stopped at once: nothing was saved\n")
    assert [step for step, _ in losses_of("log")] == [1]
    assert not Path("saved").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_checkpoint_that_is_not_there_or_of_another_run_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--resume", "nowhere") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "CheckpointError: nowhere: there is no checkpoint (no file 'latest')\n"
    assert run("--steps", "1", "--save", "saved") == 0
    assert run("--steps", "2", "--resume", "saved", "--seed", "1") == 1
    assert "global_step1 is of another run: it has " in capsys.readouterr().err


# --- its check


def rows(*losses: float, peak_rss_bytes: int = 100) -> ten_billion.Run:
    steps = [
        {"step": step, "loss": loss, "peak_rss_bytes": peak_rss_bytes}
        for step, loss in enumerate(losses, start=1)
    ]
    return ten_billion.Run([{"num_params": 20}], steps)


def test_the_check_names_all_that_a_run_did_not_show() -> None:
    def problems(run: ten_billion.Run, parameters: int = 20) -> list[str]:
        found: list[str] = ten_billion.problems_of_size(
            run, parameters=parameters, num_steps=3, max_rss_bytes=100
        )
        return found

    assert problems(rows(5.0, 5.5, 4.0)) == []
    assert problems(rows(5.0, 4.0, 5.0)) == ["the loss did not fall: 5.0000 to 5.0000"]
    assert problems(rows(5.0, math.nan, 4.0)) == ["losses that are not finite: [5.0, nan, 4.0]"]
    assert problems(rows(5.0, 4.0)) == ["2 steps of 3"]
    assert problems(rows(5.0, 4.5, 4.0), parameters=21) == ["20 parameters are fewer than 21"]
    assert problems(rows(5.0, 4.5, 4.0, peak_rss_bytes=101)) == [
        "a peak resident set of 101 bytes, 100 are allowed"
    ]


def test_the_check_reads_what_the_script_writes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--directory=.", "--parameters=2M", "--no-rehearsal", "--max-rss=1MiB", "--seq-len=32"]
    *_, problem = ten_billion.check_size(ten_billion.parse_arguments(options), Path.cwd())
    assert problem.endswith("bytes, 1,048,576 are allowed")
    output = capsys.readouterr().out
    assert f"\n{NUM_PARAMS:,} parameters, built in " in output
    assert (
        len(re.findall(r"^\| [123] \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ s \([a-z ]+\) \|", output, re.MULTILINE))
        == 3
    )


def test_the_check_sees_another_checkpoint() -> None:
    assert run("--steps", "1", "--save", "one") == 0
    assert run("--steps", "1", "--save", "same") == 0
    assert run("--steps", "1", "--save", "other", "--seed", "1") == 0
    one, same, other = (ten_billion.digests(Path(name, "global_step1")) for name in ("one", "same", "other"))
    assert one == same
    assert one.keys() == other.keys()
    assert one != other
