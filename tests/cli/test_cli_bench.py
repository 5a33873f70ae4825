"""`offloadzero bench`: what it measures, what it refuses, what it leaves behind (nothing)."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadzero.cli.bench import nvme, traffic
from offloadzero.cli.bench.results import (
    chunk_elements,
    coarse_points,
    config_block,
    max_in_flight_bytes,
    phase_ends,
    ranked,
    recommend,
    reference_point,
    step_seconds,
)
from offloadzero.cli.bench.traffic import MIB, Point, chunk_segments
from offloadzero.cli.main import main
from offloadzero.cli.output import read_seconds
from offloadzero.config import load_config
from offloadzero.errors import ConfigError
from offloadzero.io.engine import AioEngine
from offloadzero.observe.texts import duration_text, size_text

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
BACKENDS = ("io_uring", "native_aio", "aiofiles")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_config_block_loads_as_its_point(backend: str) -> None:
    """A point's depth is of all threads, the key's of each."""
    point = Point(backend, block_size=256 * 1024, queue_depth=7, num_threads=3)
    aio = load_config(config_block(point, BACKENDS)).aio
    assert (aio.block_size, aio.queue_depth, aio.num_threads) == (256 * 1024, 3, 3)
    assert aio.backend == ("auto" if backend == "io_uring" else backend)


# --- Other filesystems, several paths, the outputs ---


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm")
def test_memory_is_called_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nvme", str(SHM), "--size", "16MiB", "--time", "1.5s"]) == 0
    out, err = capsys.readouterr()
    assert "in memory: no drive is measured" in out
    assert '"queue_depth"' in out
    assert "Writes at most 512 MiB" in err


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """A directory in memory: what a run gets done in its time does not hang on a busy drive."""
    with tempfile.TemporaryDirectory(dir=SHM) as path:
        yield Path(path)


def test_two_paths_alone_and_together(
    tmp_path: Path, shm_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [shm_path / "a", shm_path / "b"]
    for path in paths:
        path.mkdir()
    file = tmp_path / "result.json"
    arguments = [*map(str, paths), "--size", "16MiB", "--time", "3s", "--json", str(file)]
    assert main(["bench", "nvme", *arguments]) == 0
    rows = json.loads(file.read_text())["results"]["striping"]
    assert {tuple(row["paths"]) for row in rows} == {(0,), (1,), (0, 1)}
    assert "all together" in capsys.readouterr().out


# --- Every exit gives the space back ---


def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    """Not even a name while it runs: the kernel frees the file with its last descriptor."""
    command = [sys.executable, "-m", "offloadzero", "bench", "nvme", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--size", "16MiB", "--time", "60s"], cwd=ROOT, stderr=subprocess.PIPE
    ) as run:
        descriptors, deadline_s = Path(f"/proc/{run.pid}/fd"), time.monotonic() + 20.0
        while not any(str(tmp_path) in os.readlink(one) for one in descriptors.iterdir() if one.is_symlink()):
            assert run.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert os.listdir(tmp_path) == []
        run.kill()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("nth", [1, 200])
def test_a_full_disk_is_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nth: int
) -> None:
    begun = [0]

    class FullDisk(AioEngine):
        def write(self, *args: Any, **options: Any) -> Any:
            begun[0] += 1
            if begun[0] == nth:
                self.inject("errno", 1, errno.ENOSPC)
            return super().write(*args, **options)

    monkeypatch.setattr(nvme, "AioEngine", FullDisk)
    assert main(["bench", "nvme", str(tmp_path), "--size", "16MiB", "--time", "4s"]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(("offloadzero: pwrite ", "offloadzero: pread "))
    assert f"{tmp_path}/(the benchmark's file)" in err
    assert "No space left on device" in err
    assert os.listdir(tmp_path) == []


# --- What is refused ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a directory"),
        (["HERE/missing"], "does not exist"),
        (["HERE/file"], "no directory"),
        (["HERE", "HERE/."], "the same directory"),
        (["HERE", "--size", "1MiB"], "at least"),
        (["HERE", "--size", "4G"], "--size = '4G'"),
        (["HERE", "--size", "4096TiB"], "are free"),
        (["HERE", "--time", "soon"], "a time such as"),
        (["HERE", "--time", "0.5s"], "at least 1 s"),
        (["HERE", "--write-limit", "1MiB"], "--write-limit"),
        (["HERE", "--json", "HERE/none/x.json"], "not a file that can be written"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "file").write_text("not json")
    before = sorted(os.listdir(tmp_path))
    assert main(["bench", "nvme", *(part.replace("HERE", str(tmp_path)) for part in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("offloadzero: ")
    assert words in err
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([".", "."], "is the same directory as '.'"),
        (["a", "./a"], "is the same directory as 'a'"),
        (["a", "link"], "is the same directory as 'a'"),
        (["a", "b"], "is on the same drive as 'a', which would count as two: name one"),
    ],
)
def test_one_drive_is_not_counted_as_two(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    paths: list[str],
    words: str,
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    drive = {"filesystem": "ext4", "device": {"name": "nvme0n1"}}
    monkeypatch.setattr(nvme, "describe_path", lambda path: {**drive, "path": path})
    assert main(["bench", "nvme", *map(str, paths)]) == 2
    assert f"PATH = {paths[1]!r}: {words}" in capsys.readouterr().err
    monkeypatch.setattr(nvme, "describe_path", lambda _: {"filesystem": "nfs", "device": None})
    assert main(["bench", "nvme", *map(str, paths)]) == 2
    assert words in capsys.readouterr().err


def test_a_directory_that_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() == 0:  # to whom everything is
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        tmp_path.chmod(0o500)
    assert main(["bench", "nvme", str(tmp_path)]) == 2
    assert "not writable" in capsys.readouterr().err


def test_paths_on_one_filesystem_need_room_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = os.statvfs(tmp_path)
    free = 100 * MIB // space.f_frsize
    fields = list(space)
    fields[2], fields[4] = 200 * MIB // space.f_frsize, free  # blocks, available
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    (tmp_path / "b").mkdir()
    nvme.check_space([str(tmp_path)], 90 * MIB)  # and 10 MiB, 5 %, stay free
    with pytest.raises(ConfigError, match="are needed"):
        nvme.check_space([str(tmp_path)], 91 * MIB)
    with pytest.raises(ConfigError, match="are needed"):
        nvme.check_space([str(tmp_path), str(tmp_path / "b")], 50 * MIB)


def test_the_write_limit_holds(tmp_path: Path, shm_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--size", "16MiB", "--write-limit", "40MiB", "--time", "2s", "--json", str(file)]
    assert main(["bench", "nvme", str(shm_path), *arguments]) == 0
    result = json.loads(file.read_text())
    assert 16 * MIB <= result["bytes_written"] <= 40 * MIB
    assert any("--write-limit" in note for note in result["notes"])


def test_each_mixed_sample_has_writes_where_few_are_allowed(shm_path: Path, tmp_path: Path) -> None:
    """Once the allowance was spent reads alone passed for mixed traffic, and chose the setting."""
    file = tmp_path / "result.json"
    arguments = ["--size", "16MiB", "--write-limit", "96MiB", "--time", "4s", "--json", str(file)]
    assert main(["bench", "nvme", str(shm_path), *arguments]) == 0
    result = json.loads(file.read_text())
    mixed = [sample for sample in result["samples"] if sample["traffic"] == "mixed"]
    assert all(sample["bytes_written"] > 0 for sample in mixed)
    first = result["samples"][1]["point"]
    assert len({json.dumps(sample["point"]) for sample in mixed}) > 1
    assert {sample["phase"] for sample in mixed if sample["point"] == first} == {"coarse", "confirm"}
    assert result["config"]


def test_nothing_is_recommended_where_the_default_has_no_mixed_rate(
    shm_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    arguments = ["--size", "16MiB", "--write-limit", "20MiB", "--time", "2s", "--json", str(file)]
    assert main(["bench", "nvme", str(shm_path), *arguments]) == 0
    result = json.loads(file.read_text())
    assert "mixed" not in {sample["traffic"] for sample in result["samples"]}
    assert (result["config"], result["meaning"]) == (None, None)
    out = capsys.readouterr().out
    assert "No setting is recommended: mixed traffic of the default setting was not measured" in out
    assert '"aio"' not in out


# --- Decisions ---


@given(
    st.sampled_from([BACKENDS, BACKENDS[1:], BACKENDS[:1]]),
    st.integers(8 * MIB, 256 * MIB),
    st.integers(2, 8),
)
def test_coarse_points_are_allowed_and_differ(
    backends: tuple[str, ...], most_bytes: int, most_threads: int
) -> None:
    points = coarse_points(backends, max_in_flight_bytes=most_bytes, max_threads=most_threads)
    assert points[0] == reference_point(backends[0])
    assert len(set(points)) == len(points)
    assert all(
        point.in_flight_bytes <= most_bytes and point.num_threads <= most_threads for point in points[1:]
    )
    assert {point.backend for point in points} <= set(backends)


points = st.builds(
    Point,
    backend=st.sampled_from(BACKENDS),
    block_size=st.sampled_from([65536, MIB, 16 * MIB]),
    queue_depth=st.sampled_from([1, 8, 64]),
    num_threads=st.integers(1, 4),
)


@given(st.dictionaries(points, st.floats(0.1, 10.0), min_size=1))
def test_the_recommendation_is_nearly_the_best_and_no_dearer(medians: dict[Point, float]) -> None:
    chosen = recommend(medians, BACKENDS)
    top = ranked(medians)[0]
    assert medians[chosen] >= 0.97 * medians[top] * (1 - 1e-12)
    assert chosen.num_threads <= top.num_threads


@given(st.floats(1.0, 3600.0), st.integers(1, 8))
def test_the_phases_fill_the_time(time_s: float, num_paths: int) -> None:
    ends = list(phase_ends(time_s, num_paths=num_paths).values())
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(time_s)


@given(st.floats(1e6, 2e11), st.integers(8 * MIB, 1 << 40))
def test_sizes_fit_the_file_and_the_memory(rate_bps: float, file_bytes: int) -> None:
    in_flight = max_in_flight_bytes(rate_bps, file_bytes)
    assert in_flight <= min(256 * MIB, file_bytes // 4)
    num_elements = chunk_elements(in_flight, file_bytes)
    segments = chunk_segments(num_elements)
    assert 4 * 12 * num_elements <= max(in_flight, 4 * 12 * 4096)
    assert all(offset % 4096 == 0 and size % 4096 == 0 for offset, size in segments)
    assert sum(size for _, size in segments) == 12 * num_elements


def test_a_step_takes_the_slower_of_mixed_and_sustained() -> None:
    assert step_seconds(1e9, mixed_bps=2.4e9, sustained_write_bps=None) == pytest.approx(10.0)
    assert step_seconds(1e9, mixed_bps=2.4e9, sustained_write_bps=0.6e9) == pytest.approx(20.0)


def test_the_warm_up_does_not_count() -> None:
    class Ticket:
        operation, num_bytes = "pread", 7

    batch = traffic._Batch(0, 0.0, [Ticket()], [0.5])  # type: ignore[list-item]
    count = traffic.Count(num_warmup_batches=2)
    count.complete([batch], 1.0)
    assert not count.is_running
    count.complete([batch, batch], 2.0)  # the clock starts here, with none of these
    assert (count.bytes_read, count.seconds) == (0, 0.0)
    count.complete([batch], 4.0)
    assert (count.bytes_read, count.seconds, count.latencies_s) == (7, 2.0, [0.5])


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 100)), min_size=1, max_size=300))
def test_buckets_keep_every_byte(steps: list[tuple[float, int]]) -> None:
    timeline, now_s = [], 0.0
    for step_s, num_bytes in steps:
        now_s += step_s
        timeline.append((now_s, num_bytes))
    buckets = traffic.buckets(timeline)
    assert sum(num_bytes for _, num_bytes in buckets) == sum(num_bytes for _, num_bytes in steps)
    assert len(buckets) <= 121
    assert buckets[-1][0] == now_s


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("2min", 120), ("1.5 min", 90), ("90", 90), ("1h", 3600)]
)
def test_times(text: str, seconds: float) -> None:
    assert read_seconds("--time", text, minimum=1.0) == seconds


def test_words_for_sizes_and_durations() -> None:
    assert [size_text(n) for n in (512, 4096, 1536 * 1024, 4 << 30)] == [
        "512 B",
        "4 KiB",
        "1.5 MiB",
        "4 GiB",
    ]
    assert [duration_text(s) for s in (2.5, 0.00125, 430e-6)] == ["2.5 s", "1.25 ms", "430 us"]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["bench", "--help"], ["bench", "nvme", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    assert "--write-limit" in capsys.readouterr().out


def test_the_nvme_tool_does_not_load_torch() -> None:
    code = "import sys, offloadzero.cli.main; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert nvme.MIN_SIZE == 16 * MIB


def test_the_tools_memory_is_of_the_kind_that_trains() -> None:
    """Small pages gave a third of the drive's rate; advice for huge ones has no effect on memory that is shared."""
    memory = traffic.RandomMemory(8 << 20)
    address = memory.bytes.ctypes.data
    mapped, flags = "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapped = line
        elif line.startswith("VmFlags"):
            start, end = (int(part, 16) for part in mapped.split()[0].split("-"))
            if start <= address < end:
                flags = line
                break
    assert mapped.split()[1] == "rw-p"
    assert " hg " in f"{flags} "
