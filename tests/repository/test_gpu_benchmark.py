"""`benchmarks/gpu.py` without a GPU: sizes, the machine, slices that fail or stall, the report, whole runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero.planning import machine as probe

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def module(name: str) -> Any:
    return importlib.import_module(name)


# --- sizes ---


@pytest.mark.parametrize("max_params", [300_000, 199_999_999, 200_000_000, 7_200_000_000])
def test_the_largest_size_within_a_number_of_parameters(max_params: int) -> None:
    llama = module("llama_model")
    size = llama.size_with(max_params)
    with torch.device("meta"):
        model = llama.Llama(size)
    count = sum(param.numel() for param in model.parameters())
    assert count == llama.num_params(size)
    assert 0.75 * max_params < count <= max_params
    assert size.width % size.num_heads == 0


def test_no_size_is_small_enough() -> None:
    with pytest.raises(ValueError, match="1,000"):
        module("llama_model").size_with(1000)


@pytest.mark.parametrize("options", [("nvme",), ("auto",), ("host", "--state-layout", "compact")])
def test_models_are_as_large_as_they_may_be(options: tuple[str, ...], tmp_path: Path) -> None:
    fitting, large_model = module("fitting"), module("large_model")
    args = large_model.parse_arguments(["--device", "cuda", "--placement", *options])
    settings = large_model.config(args, str(tmp_path))
    settings["offloadzero"]["budgets"] = {"host": 40 * GIB, "device": 30 * GIB, "nvme": 50 * GIB}
    found = fitting.largest_that_fits(settings, at_most=40_000_000_000)
    assert 2e9 < found < 20e9
    assert fitting._fits(settings, found)
    assert not fitting._fits(settings, int(found * 1.04))
    assert fitting.largest_that_fits(settings, at_most=1_000_000_000) == 1_000_000_000
    settings["offloadzero"]["budgets"] = {"host": 1, "device": 1, "nvme": 1}
    with pytest.raises(ValueError, match="no size"):
        fitting.largest_that_fits(settings, at_most=1_000_000)


def test_a_drive_that_is_slow_gets_a_smaller_model() -> None:
    largest = module("fitting").largest_in_time
    # 4 x 12 bytes read at 2 GB/s and written at 1: 72 ns per parameter.
    assert largest(bytes_per_param=12, read_gbps=2, write_gbps=1, num_steps=3, seconds=72) == 1_000_000_000


def test_what_a_drive_gives_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    read_gbps, write_gbps = module("fitting").drive_gbps(tmp_path, num_bytes=128 << 20)
    assert 0 < read_gbps < 1000
    assert 0 < write_gbps < 1000
    assert os.listdir(tmp_path) == []


# --- the machine ---


def test_memory_that_a_machine_does_not_show_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may get its memory as it uses it; an engine goes by what it shows."""
    machine = module("gpu_machine")
    monkeypatch.setattr(machine, "GIB", 1 << 20)
    monkeypatch.setattr(machine, "LEAST_FREE", 1 << 20)
    monkeypatch.setattr(machine, "PATIENCE_S", 0.1)
    shown = [64 << 20]
    monkeypatch.setattr(probe, "available_host_bytes", lambda: shown[0])
    assert machine.take_memory(32 << 20, seconds=5) == 0, "it is there"
    assert machine.take_memory(80 << 20, seconds=5) == 80 << 20
    shown[0] = 1 << 20
    assert machine.take_memory(80 << 20, seconds=5) == 0, "there is no more"
    monkeypatch.setattr(machine, "PATIENCE_S", 60.0)
    begun_s = time.monotonic()
    assert machine.take_memory(80 << 20, seconds=0.2) == 0
    assert time.monotonic() - begun_s < 5


def test_modules_that_lie_there_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, commands = module("gpu_machine"), []
    assert machine.make_modules() == "used as they are"
    monkeypatch.setattr(machine, "NATIVE_MODULES", ("native._no_such",))
    monkeypatch.setattr(machine.subprocess, "run", lambda command, **_: commands.append(command))
    with pytest.raises(ModuleNotFoundError, match="_no_such"):  # the stand-in builds nothing
        machine.make_modules()
    assert commands[0][1:] == [str(ROOT / "setup.py"), "--quiet", "build_ext", "--inplace", "--force"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    done = run_gpu("rates", "first", "--out", str(tmp_path))
    assert done.returncode == 3
    assert done.stderr == (
        f"gpu.sh: error: missing: a CUDA device: torch {torch.__version__} finds none; --device cpu needs none\n"
    )
    assert "right" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frist"], "no such thing: frist; there are first, second, modules, memory, rates, large"),
        (["first", "--parameters", "2X"], "argument --parameters: '2X': a positive number, K, M or B behind it: 20M"),
        (["first", "--memory", "110GB"], "argument --memory: '110GB': a positive number, GiB behind it or bytes"),
        (["first", "--nvme-dir", "nowhere"], "--nvme-dir: {}/nowhere is not a directory"),
        (["first", "--batch-size", "-3"], "argument --batch-size: '-3': a positive number"),
        (["first", "--out", "/proc/here"], "--out: [Errno 2] No such file or directory: '/proc/here'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / given) if given == "nowhere" else given for given in arguments]
    done = run_gpu("--device", "cpu", "--out", str(tmp_path / "out"), *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"gpu.sh: error: {words.format(tmp_path)}")
    assert not (tmp_path / "out").exists()


# --- processes ---


def run_process(script: str, log: Path, *, seconds: float = 60.0) -> tuple[str, list[Mapping[str, Any]]]:
    told: list[Mapping[str, Any]] = []
    command = [sys.executable, "-c", textwrap.dedent(script)]
    end_s = time.monotonic() + seconds
    status = module("gpu_process").run_process(command, end_s=end_s, tell=told.append, log=log)
    assert time.monotonic() < end_s + 2
    return status, told


def test_lines_of_json_are_told_and_the_rest_is_logged(tmp_path: Path) -> None:
    status, told = run_process("print('{\"a\": 1}'); print('[2]'); print('said')", tmp_path / "log")
    assert (status, told) == ("ok", [{"a": 1}])
    assert (tmp_path / "log").read_text() == "[2]\nsaid\n"
    # By itself: what a process says of its end may stand within a line that it has printed.
    assert run_process("import sys; sys.exit('why')", tmp_path / "log") == ("exit status 1", [])
    assert (tmp_path / "log").read_text() == "[2]\nsaid\nwhy\n"
    assert run_process("pass", tmp_path / "log") == ("ok", [])
    assert run_process("pass", tmp_path / "log", seconds=0.5) == ("not begun: no time was left", [])
    status, told = run_process(
        "import os; print('{}', flush=True); os.kill(os.getpid(), 9)", tmp_path / "log"
    )
    assert (status, told) == ("killed by signal 9", [{}])


def test_a_deadline_ends_a_process_that_ignores_it_and_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
        import signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(pid_file)!r}, "w").write(str(child.pid))
        print("{{}}", flush=True)
        while True:
            child.wait()
    """
    assert run_process(script, tmp_path / "log", seconds=8) == ("timed out", [{}])
    assert is_gone(int(pid_file.read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process that was killed ends: a busy machine takes its time."""
    until_s = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < until_s:
        time.sleep(0.01)
    return not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- slices ---

GOOD = "print('{\"found\": 1}', flush=True)"
BAD = {
    "fails": f"{GOOD}; raise RuntimeError('the whole story')",
    "stalls": f"{GOOD}; import time; time.sleep(600)",
    "is killed": f"{GOOD}; import os; os.kill(os.getpid(), 9)",
}
STATUS = {"fails": "exit status 1", "stalls": "timed out", "is killed": "killed by signal 9"}


@pytest.mark.parametrize("what", list(BAD))
def test_a_slice_costs_its_own_results(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shares the time: what one leaves is the next one's."""
    gpu = module("gpu")

    def slice_of(name: str, script: str, seconds: float) -> Any:
        run = gpu.Run("", [sys.executable, "-c", script])
        return gpu.Slice(name, seconds, lambda *_: iter([run]))

    parts = (slice_of("one", GOOD, 8), slice_of("two", BAD[what], 2), slice_of("three", GOOD, 8))
    monkeypatch.setitem(gpu.SETS, "first", parts)
    begun_s = time.monotonic()
    assert main_of(monkeypatch, "first", "--device", "cpu", "--out", str(tmp_path)) == 1
    assert time.monotonic() - begun_s < 18
    found = json.loads((tmp_path / "first.json").read_text())["slices"]
    assert [found[name]["found"] for name in ("one", "two", "three")] == [1, 1, 1]
    assert [found[name]["status"] for name in ("one", "two", "three")] == ["ok", STATUS[what], "ok"]
    assert not list(tmp_path.glob("gpu-run-*"))
    said = capsys.readouterr().out
    assert re.search(f"FAILED two: .*{STATUS[what]}", said)
    assert (tmp_path / "first.md").read_text() in said
    if what == "fails":
        assert "Traceback" in found["two"]["error"]
        assert "FAILED two: RuntimeError: the whole story: exit status 1" in said


def test_an_error_of_a_slice_of_our_own_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a slice follow from what it has found so far."""
    gpu = module("gpu")

    def runs(_: Any, found: dict[str, Any]) -> Any:
        yield gpu.Run("named", [sys.executable, "-c", GOOD])
        assert found["runs"]["named"] == {"found": 1, "status": "ok"}
        raise OSError("no such program")

    good = gpu.Slice("good", 8, lambda *_: iter([gpu.Run("", [sys.executable, "-c", GOOD])]))
    monkeypatch.setitem(gpu.SETS, "first", (gpu.Slice("one", 8, runs), good))
    assert main_of(monkeypatch, "first", "--device", "cpu", "--out", str(tmp_path)) == 1
    found = json.loads((tmp_path / "first.json").read_text())["slices"]
    assert found["one"]["status"] == "OSError: no such program"
    assert "Traceback" in found["one"]["error"]
    assert found["good"]["status"] == "ok"


def test_sigterm_ends_what_runs(tmp_path: Path) -> None:
    """And what was found by then is in the file."""
    os.mkfifo(tmp_path / "pids")
    tell_pid = f"open({str(tmp_path / 'pids')!r}, 'w').write(str(os.getpid()))"
    stalling = f"{GOOD}; import os, time; {tell_pid}; time.sleep(600)"
    script = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "benchmarks")!r})
        import gpu
        runs = lambda *_: iter([gpu.Run("", [sys.executable, "-c", {stalling!r}])])
        gpu.SETS["first"] = (gpu.Slice("one", 100, runs),)
        sys.argv = ["gpu.py", "first", "--device", "cpu", "--out", {str(tmp_path / "out")!r}]
        sys.exit(gpu.main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.DEVNULL)
    pid = int((tmp_path / "pids").read_text())  # waits until it is there
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert is_gone(pid)
    assert json.loads((tmp_path / "out" / "first.json").read_text())["slices"]["one"]["found"] == 1


# --- the report ---


def run_of(step_s: float, **more: Any) -> dict[str, Any]:
    return {
        "status": "ok",
        "num_params": 7_000_000_000,
        "median_step_s": step_s,
        "step_s": [9.0, step_s - 0.1, step_s, step_s + 0.1],
        "warmup": 1,
        "tokens_per_s": 16384 / step_s,
        "flops_per_step": 8e14,
        "tflops": 800 / step_s,
        **more,
    }


def whole(**slices: Any) -> dict[str, Any]:
    """What a run finds in which all goes well, but for `slices`."""
    waits = {"fetch": 0.25, "update": 0.5}
    lanes = {"compute": 2.4, "h2d": 1.0, "update": 1.5}
    planned = {"forecast": {"seconds": 2.25, "lane": "compute"}, "lanes_s": lanes, "waits_s": waits}
    gap = {"us": 50.0, "at_us": 1000.0, "before": "kernel", "meanwhile": ["cudaEventSynchronize 40 us"] * 3}
    found = {
        "modules": {"modules": "used as they are", "machine": {"device": "H200", "host_gib": 110.0}},
        "memory": {},
        "right": {
            "triton": "the host kernel's bits",
            "cases": {f"case {n}": {"problem": None, "of_torch": 1e-4 * n} for n in range(8)},
        },
        "rates": {"rates": {"matmul_tflops": 800.0, "h2d_gbps": 55.0}},
        "fast": {
            "runs": {
                "host, clipping": run_of(2.5, **planned),
                "computation alone": run_of(2.0),
                "host, no clipping": run_of(2.2, **planned),
            }
        },
        "where": {
            "gaps": [gap] * 10,
            "per_unit": {"launches": 120.0},
            "hooks": {"_enter": {"calls": 10, "us": 900.0}},
            "num_units": 10,
            "step_us": 1e6,
            "idle_us": 1e5,
        },
    }
    return {
        "slices": {name: {"status": "ok", **one} for name, one in {**found, **slices}.items()},
        "seconds": 250.0,
    }


def test_the_table_says_what_was_found() -> None:
    text = module("gpu_report").text_of(whole())
    lines = text.splitlines()
    assert len(lines) <= 40
    assert lines[0] == "machine: device H200, host_gib 110.0"
    assert (
        "right: 8 of 8 trainings bitwise as with all states on the device, at most 7.0e-04 (1e-3 is allowed)"
        in text
    )
    assert "rates: matrix product 800 TFLOPS, h2d 55.0" in text
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    host = dict(zip(table[0], table[2], strict=True))
    assert host == {
        "run": "host, clipping",
        "parameters": "7B",
        "s/step": "2.500 (2.400-2.600)",
        "forecast": "2.250 (compute)",
        "tokens/s": "6,554",
        "TFLOPS 8P": "320",
        "6P": "240",
        "of matmul": "40.0%",
        "of alone": "80.0%",
        "bound s": "2.000",
        "by": "T_compute",
        "overlap": "80.0%",
    }
    alone = dict(zip(table[0], table[3], strict=True))
    assert (alone["run"], alone["bound s"], alone["overlap"]) == ("computation alone", "", "")
    assert "waits, host, clipping: update 500 ms, fetch 250 ms" in text
    assert "where: a step of 1000.0 ms, idle 10.0%; per unit: launches 120.0" in text
    assert "hooks, us per unit: _enter 90" in text
    assert text.count("idle 50 us at 1.0 ms before kernel: cudaEventSynchronize") == 10
    assert lines[-1] == "250 s in all; all went well"


def test_the_table_stays_short_where_all_fails() -> None:
    report = module("gpu_report")
    wrong = {f"case {n}": {"problem": "not bitwise", "of_torch": 1.0} for n in range(32)}
    failed = {
        name: {"status": "exit status 1", "error": "Traceback\nlong\nValueError: why"} for name in "abcdefgh"
    }
    text = report.text_of(whole(right={"cases": wrong, "status": "exit status 1"}, **failed))
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 180
    assert "right: 0 of 32" in text
    assert "WRONG: case 0: not bitwise" in text
    assert "WRONG: 29 more" in text
    late = {"right": {"cases": {"a": {"error": "OSError: no space"}}, "status": "exit status 1"}}
    assert "NOT RUN: a: OSError: no space" in report.text_of({"slices": late})
    assert text.count("ValueError: why") == len(failed)
    assert "not all went well" in text
    assert report.text_of({"slices": {}}) == "\n"
    unfinished = {"fast": {"status": "timed out", "runs": {"host, clipping": {"status": "timed out"}}}}
    assert "| host, clipping | " in report.text_of({"slices": unfinished})


def test_where_the_device_is_the_cpu_its_cores_take_the_place_of_the_computation_alone() -> None:
    bound = module("gpu_report").bound
    lanes = {"compute": 1.9, "cores": 1.5, "nvme read": 1.0}
    assert bound(run_of(2.0, lanes_s=lanes), 1e15) == ("cores", 1.5)
    assert bound(run_of(2.0, lanes_s={"compute": 1.9, "h2d": 1.5}), None) == ("h2d", 1.5)
    assert bound(run_of(2.0, lanes_s={"compute": 1.9}), None) is None


# --- where the time goes ---


def event(name: str, start: float, end: float, category: str = "kernel", **more: Any) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": end - start, "cat": category, "tid": 1, "args": more}


def test_gaps_of_the_stream_that_computes(tmp_path: Path) -> None:
    where = module("gpu_where")
    events = [
        event("a", 100, 150, stream=7),
        event("inside a", 110, 120, stream=7),
        event("b", 180, 300, stream=7),
        event("c", 301, 400, stream=7),
        event("copy", 150, 180, stream=9),
        {
            **event("cudaEventSynchronize", 0, 400, "cuda_runtime"),
            "tid": 2,
        },  # a lane's thread, which only waits
        event("cudaEventSynchronize", 140, 170, "cuda_runtime"),
        event("cudaLaunchKernel", 170, 172, "cuda_runtime"),
        event("cudaLaunchKernel", 175, 176, "cuda_runtime"),
    ]
    longest, short = where.longest_gaps(events)
    assert longest == {
        "us": 30,
        "at_us": 180 - 30 - 0,
        "before": "b",
        "meanwhile": ["cudaEventSynchronize 20 us", "cudaLaunchKernel 3 us"],
    }
    assert (short["us"], short["before"], short["meanwhile"]) == (1, "c", [])
    assert where.per_unit(events, 2) == {"cudaEventSynchronize": 0.5, "launches": 1.0}
    where.save_trace(events, tmp_path / "small.json.gz")
    whole_size = (tmp_path / "small.json.gz").stat().st_size
    many = [event(f"{n * 7919 % 10007}", n, n + n % 5) for n in range(20_000)]
    where.MAX_TRACE_BYTES, most = 20 * whole_size, where.MAX_TRACE_BYTES
    try:
        where.save_trace(many, tmp_path / "large.json.gz")
    finally:
        where.MAX_TRACE_BYTES = most
    assert whole_size < (tmp_path / "large.json.gz").stat().st_size <= 20 * whole_size


# --- running it ---


def run_gpu(*arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def main_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`gpu.py` in this process."""
    gpu = module("gpu")
    monkeypatch.setattr(gpu, "end_with_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    monkeypatch.chdir(ROOT)
    for name in ("PYTHONPATH", "PYTHONUNBUFFERED", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    status: int = gpu.main()
    return status
