"""One run of `offloadzero bench nvme`, looked at from all sides: its time is measured, so nothing else runs then."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from offloadzero.cli.bench import nvme
from offloadzero.cli.bench.traffic import MIB, Point, Traffic
from offloadzero.cli.main import main
from offloadzero.config import load_config
from offloadzero.errors import ConfigError
from offloadzero.io.engine import AioEngine
from tests.cli.test_cli_bench import BACKENDS

pytestmark = pytest.mark.alone


class CountingEngine(AioEngine):
    """Adds up what the engines themselves say they moved."""

    totals: ClassVar[dict[str, int]] = {"bytes_read": 0, "bytes_written": 0, "fixed": 0}

    def close(self, *, cancel: bool = False) -> None:
        if not self._is_closed:
            super().close(cancel=cancel)
            for name in self.totals:
                self.totals[name] += self.stats()[name]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of eight seconds; everything it printed and wrote."""
    place = tmp_path_factory.mktemp("drive")
    keep = place / "keep.bin"
    keep.write_bytes(b"mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme, "AioEngine", CountingEngine)
        begun_s = time.monotonic()
        arguments = ["bench", "nvme", str(place), "--size", "32MiB", "--time", "8s"]
        status = main([*arguments, "--json", str(place / "result.json")])
        seconds = time.monotonic() - begun_s
    assert status == 0
    result = json.loads((place / "result.json").read_text())
    return {"place": place, "result": result, "seconds": seconds, "totals": dict(CountingEngine.totals)}


def test_the_run_leaves_nothing_but_its_result(run: dict[str, Any]) -> None:
    assert sorted(os.listdir(run["place"])) == ["keep.bin", "result.json"]
    assert (run["place"] / "keep.bin").read_bytes() == b"mine"


def test_the_run_honours_the_time(run: dict[str, Any]) -> None:
    # 10 %, and what a busy machine takes on top.
    assert run["seconds"] < 8.0 * 1.1 + 1.0
    assert run["result"]["duration_s"] <= run["seconds"]


def test_bytes_written_are_those_the_engines_wrote(run: dict[str, Any]) -> None:
    result = run["result"]
    assert result["bytes_written"] == run["totals"]["bytes_written"]
    assert result["bytes_written"] <= result["arguments"]["write_limit_bytes"] == 32 * 32 * MIB


def test_the_memory_is_registered_as_that_of_training_is(run: dict[str, Any]) -> None:
    if run["result"]["backends"]["io_uring"] != "available":
        pytest.skip("no io_uring")
    with AioEngine(backend="io_uring") as engine:
        can_register = engine.register_parts(bytearray(4096)) > 0
    assert can_register == (run["totals"]["fixed"] > 0)


def test_the_files_were_written_not_holes(run: dict[str, Any]) -> None:
    first = run["result"]["samples"][0]
    assert first["phase"] == "fill"
    assert first["bytes_written"] == 32 * MIB
    assert run["result"]["allocated_bytes"] >= [32 * MIB]


def test_every_sample_is_whole(run: dict[str, Any]) -> None:
    result = run["result"]
    kinds = {(sample["phase"], sample["traffic"]) for sample in result["samples"]}
    assert {("coarse", traffic.value) for traffic in Traffic} <= kinds
    for sample in result["samples"]:
        num_bytes = sample["bytes_read"] + sample["bytes_written"]
        assert num_bytes > 0
        assert sample["seconds"] > 0
        assert sample["gb_per_s"] == pytest.approx(num_bytes / sample["seconds"] / 1e9)
        assert 0 < sample["latency_p50_s"] <= sample["latency_p99_s"] <= sample["latency_max_s"]
        assert (sample["bytes_read"] > 0) <= (sample["traffic"] != "write")
        assert (sample["bytes_written"] > 0) <= (sample["traffic"] != "read")
        assert sample["cpu_s"] >= 0
    starts = [sample["started_s"] for sample in result["samples"]]
    assert starts == sorted(starts)


def test_the_result_describes_the_machine(run: dict[str, Any]) -> None:
    result = run["result"]
    assert result["format"] == "offloadzero.bench.nvme"
    assert result["machine"]["kernel"].endswith(os.uname().release)
    assert result["machine"]["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert result["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(result["backends"]) == set(BACKENDS)
    asked = subprocess.run(
        ["df", "--output=fstype", str(run["place"])], capture_output=True, text=True, check=True
    )
    assert result["paths"][0]["filesystem"] == asked.stdout.split()[-1]
    assert result["paths"][0]["total_bytes"] == shutil.disk_usage(run["place"]).total


def test_the_config_block_loads(run: dict[str, Any]) -> None:
    block = run["result"]["config"]
    config = load_config({"train_micro_batch_size_per_gpu": 1, **block})
    point = Point(config.aio.backend, config.aio.block_size, config.aio.queue_depth, config.aio.num_threads)
    assert point.block_size == block["aio"]["block_size"]
    assert not [notice for notice in config.notices if "aio" in notice]
    rows = [row["point"] for row in run["result"]["results"]["traffic"] if "config" in row["roles"]]
    assert rows
    for row in rows:
        depth_per_thread = -(-row["queue_depth"] // row["num_threads"])
        assert (row["block_size"], depth_per_thread, row["num_threads"]) == (
            point.block_size,
            point.queue_depth,
            point.num_threads,
        )


def test_the_meaning_follows_from_the_rates(run: dict[str, Any]) -> None:
    meaning = run["result"]["meaning"]
    by_mixed = meaning["mixed_gb_per_s"] * 10.0 / 24
    by_write = (meaning["sustained_write_gb_per_s"] or float("inf")) * 10.0 / 12
    assert meaning["num_params"] / 1e9 == pytest.approx(min(by_mixed, by_write))
    assert "billion parameters at 10 seconds per step" in meaning["text"]


def test_a_result_is_plotted_and_compared(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    nvme_results = importlib.import_module("nvme_results")
    first = run["place"] / "result.json"
    faster = json.loads(first.read_text())
    for row in (*faster["results"]["traffic"], *faster["samples"]):
        row["gb_per_s"] *= 2
    second, image = tmp_path / "faster.json", tmp_path / "plot.png"
    second.write_text(json.dumps(faster))
    capsys.readouterr()
    words = ["nvme_results", str(first), str(second), "--plot", str(image)]
    monkeypatch.setattr(sys, "argv", words)
    nvme_results.main()
    assert image.read_bytes().startswith(b"\x89PNG\r\n")
    lines = capsys.readouterr().out.splitlines()
    rates = [line for line in lines if "GB/s" in line and "sustained" not in line and "first" not in line]
    rates = [line for line in rates if "CPU" not in line]
    assert len(rates) > 5
    assert all(line.endswith("2.000") for line in rates), rates
    assert all(line.endswith("1.000") for line in lines if "p99" in line)
    second.write_text(json.dumps({**faster, "format_version": 99}))
    with pytest.raises(ConfigError, match="format_version"):
        nvme_results.main()
