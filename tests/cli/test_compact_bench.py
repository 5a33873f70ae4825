"""`offloadzero bench adam`: a short run, its numbers, its mistakes."""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import sys
from pathlib import Path

import pytest

from offloadzero.cli import main
from offloadzero.cli.bench import adam
from offloadzero.errors import ConfigError, OffloadError
from offloadzero.native.kernels import Isa, active_isa, isa_supported

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "adam.py"


def parse(*arguments: str) -> argparse.Namespace:
    return main.make_parser().parse_args(["bench", "adam", *arguments])


def test_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "adam.json"
    args = parse("--params", str(1 << 20), "--rounds", "2", "--json", str(file))
    assert args.run(args) == 0
    result = json.loads(file.read_text())
    assert result["format"] == adam.FORMAT
    rows = result["results"]
    for row in rows:
        assert len(row["seconds"]) == 2
        rate = row["num_params"] / statistics.median(row["seconds"]) / 1e9
        assert row["gparam_per_s"] == pytest.approx(rate)
        assert row["gb_per_s"] == pytest.approx(rate * row["bytes_per_param"])
    ours = [row for row in rows if row["what"] == "ours"]
    assert {row["layout"] for row in ours} == {"fp32", "compact"}
    assert {row["isa"] for row in ours} == {isa.value for isa in Isa if isa_supported(isa)}
    for row in ours:
        ceilings = [
            other["gb_per_s"]
            for other in rows
            if other["what"].startswith("ceiling")
            and (other["layout"], other["num_threads"]) == (row["layout"], row["num_threads"])
        ]
        assert len(ceilings) == 2
        assert row["share_of_ceiling"] == pytest.approx(row["gb_per_s"] / max(ceilings))
    table = capsys.readouterr().out
    assert table.count("\n") == len(rows) + 3
    assert "ceiling, prefetched" in table


def test_records_survive_the_ceiling() -> None:
    """The stream inverts what it passes over; after a sample everything is as before, and the steps finite."""
    records = adam.Records(adam.IN_CACHE_PARAMS)
    for layout in ("fp32", "compact"):
        tensors = (*records.fp32, *records.compact, records.grad)
        before = [tensor.clone() for tensor in tensors]
        for _, sample in records.ceilings(layout, 2):
            assert sample() > 0
        assert all((a == b).all() for a, b in zip(tensors, before, strict=True))
        records.adam(layout, active_isa(), 2)[1]()
    assert records.fp32[0].isfinite().all()
    assert records.compact[0].isfinite().all()
    assert records.scales.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("--params", "1000000"), "--params"),
        (("--params", str(1 << 44)), "--params"),
        (("--rounds", "0"), "--rounds"),
        (("--json", "/nowhere/file"), "--json"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], key: str) -> None:
    args = parse(*arguments)
    with pytest.raises(ConfigError, match=f"^{key} "):
        args.run(args)


def peers(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Run the benchmark that has torch's and DeepSpeed's beside ours."""
    monkeypatch.setattr(sys, "argv", ["adam.py", "--params", str(1 << 20), "--rounds", "1", *words])
    runpy.run_path(str(BENCHMARK), run_name="__main__")


def test_torch_stands_beside_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers(monkeypatch)
    assert "torch fused AdamW" in capsys.readouterr().out


def test_interpreter_without_deepspeed_is_an_error_not_a_missing_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')  # no site-packages
    without.chmod(0o755)
    with pytest.raises(OffloadError, match="ended with status 1"):
        peers(monkeypatch, "--deepspeed-python", str(without))
    with pytest.raises(ConfigError, match=r"^--deepspeed-python "):
        peers(monkeypatch, "--deepspeed-python", "/nowhere/python")
