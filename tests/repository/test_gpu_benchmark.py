"""`benchmarks/gpu.py` without a GPU: sizes, missing things, deadlines, the report, and its parts on the CPU."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.segments import TierName

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
HAS_CUDA = torch.cuda.is_available()
NATIVE_MODULES = ["offloadzero.io._aio", "offloadzero.native._kernels", "offloadzero.native._termination"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def module(name: str) -> Any:
    return importlib.import_module(name)


# --- sizes ---


@pytest.mark.parametrize(
    "max_params", [300_000, 20_000_000, 199_999_999, 200_000_000, 1_100_000_000, 7_200_000_000]
)
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


OPTIONS = {
    "device": ("--placement", "device"),
    "host": ("--placement", "host"),
    "no clipping": ("--placement", "host", "--clipping", "0"),
    "share": ("--placement", "host", "--host-update-ratio", "0.5"),
    "nvme": ("--placement", "nvme"),
    "compact": ("--placement", "nvme", "--state-layout", "compact"),
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_planned_bytes_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    large_model, machine = module("large_model"), module("gpu_machine")
    args = large_model.parse_arguments(["--device", "cpu", "--parameters", "300K", *OPTIONS[name]])
    settings = large_model.config(args, str(tmp_path))
    model = large_model.build_model(large_model.model_size(args), settings)
    engine = offloadzero.initialize(model=model, config=settings)[0]
    plan = engine.optimizer.runtime.plan
    found = machine.planned_bytes(settings, 300_000)
    assert found == {tier.value: plan.tier_bytes(tier) for tier in TierName}
    assert sum(found.values()) > 0
    engine.close()


def test_models_are_as_large_as_they_may_be(tmp_path: Path) -> None:
    machine, large_model = module("gpu_machine"), module("large_model")
    args = large_model.parse_arguments(["--device", "cuda", "--placement", "nvme"])
    settings = large_model.config(args, str(tmp_path))
    gib = 1 << 30
    allowed = machine.Limits(host=100 * gib, nvme=50 * gib, device=100 * gib)
    found = machine.largest_that_fits(settings, allowed, at_most=7_200_000_000)
    planned = machine.planned_bytes(settings, found)
    assert 44 * gib < planned["nvme"] <= 50 * gib
    assert not machine.fits(machine.planned_bytes(settings, int(found / 0.95)), allowed)
    assert machine.largest_that_fits(settings, allowed, at_most=1_000_000_000) == 1_000_000_000
    for tier in ("host", "nvme", "device"):
        limits = {"host": planned["host"], "nvme": planned["nvme"], "device": planned["device"]}
        assert machine.fits(planned, machine.Limits(**limits))
        assert not machine.fits(planned, machine.Limits(**{**limits, tier: planned[tier] - 1}))
    together = machine.Limits(host=planned["host"] + planned["device"], nvme=planned["nvme"], device=None)
    assert machine.fits(planned, together)
    assert not machine.fits(planned, machine.Limits(together.host - 1, together.nvme, None))
    with pytest.raises(ValueError, match="no size"):
        machine.largest_that_fits(settings, machine.Limits(1, 1, 1), at_most=1_000_000)


def test_a_drive_that_is_slow_gets_a_smaller_model() -> None:
    largest = module("gpu_machine").largest_in_time
    # 4 x 12 bytes read at 2 GB/s and written at 1: 72 ns per parameter.
    assert largest(bytes_per_param=12, read_gbps=2, write_gbps=1, num_steps=3, seconds=72) == 1_000_000_000


def test_what_a_drive_gives_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    read_gbps, write_gbps = module("gpu_machine").drive_gbps(tmp_path, num_bytes=128 << 20)
    assert 0 < read_gbps < 1000
    assert 0 < write_gbps < 1000
    assert os.listdir(tmp_path) == []


# --- what is missing ---


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = module("gpu_machine")
    assert machine.missing_to_run() == machine.missing_to_test() == machine.missing_to_build() == []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(machine.sysconfig, "get_config_var", lambda _: None)
    assert [found.name for found in machine.missing_to_build()] == ["a C++17 compiler", "Python.h"]
    find_spec = importlib.util.find_spec
    absent = {"numpy", "pytest"}
    monkeypatch.setattr(
        machine.importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name)
    )
    assert [found.name for found in machine.missing_to_run()] == ["numpy"]
    assert [found.name for found in machine.missing_to_test()] == ["pytest"]
    assert sys.executable in str(machine.missing_to_test()[0])
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    assert str(machine.missing_to_run()[1]) == f"torch 2.8 or later: {sys.executable} has 2.7.1+cu128"
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert [found.name for found in machine.missing_native_modules()] == NATIVE_MODULES


@pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_keeps_what_is_done(tmp_path: Path) -> None:
    (tmp_path / "build.json").write_text(json.dumps({"part": "build", "status": "failed (status 1)"}))
    done = run_gpu("host", "report", "--out", str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert f"no CUDA device: torch {torch.__version__}" in done.stdout
    assert "--device cpu" in done.stdout
    assert "build: failed" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason", "line"),
    [
        (["build", "host"], None, "CUDA device: a device"),
        (["build", "host"], "there is none", "no CUDA device (there is none): host will not be run"),
        (["build", "tests"], "there is none", "no CUDA device (there is none): what is asked for needs none"),
        (
            [],
            "there is none",
            "no CUDA device (there is none): gpu-tests, device, host, auto, nvme, compact will not be run; "
            "--device cpu runs device, host, auto, nvme, compact on the CPU",
        ),
        (
            ["gpu-tests", "host", "--device", "cpu"],
            None,
            "the CPU is the device, as --device cpu asks: gpu-tests will not be run",
        ),
    ],
)
def test_its_first_line_says_what_device_there_is(
    arguments: list[str],
    reason: str | None,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu, machine = module("gpu"), module("gpu_machine")
    monkeypatch.setattr(machine, "why_no_cuda", lambda: reason)
    monkeypatch.setattr(machine, "cuda_name", lambda: "a device")
    monkeypatch.setattr(gpu, "run_part", lambda name, _: print(f"== {name}") or gpu.OK)
    main_of(monkeypatch, *arguments, "--out", str(tmp_path))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(line)
    assert said[1].startswith("== ")


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done = run_gpu("hots", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "no such part: hots; the parts are build, tests" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nvme", "--parameters", "2X"], "argument --parameters: '2X': a positive number, K, M or B behind it: 20M"),
        (["nvme", "--parameters", "-1"], "argument --parameters: '-1': a positive number, K, M or B behind it"),
        (["nvme", "--parameters", "infB"], "argument --parameters: 'infB': a positive number"),
        (["nvme", "--parameters", "900B"], "--parameters: no size has 900,000,000,000 parameters or a little less"),
        (["nvme", "--largest", "1"], "--largest: no size has 1 parameters or a little less"),
        (["nvme", "--memory", "110GB"], "argument --memory: '110GB': a positive number, GiB behind it or bytes"),
        (["nvme", "--nvme-dir", "nowhere"], "--nvme-dir: {}/nowhere is not a directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    arguments = [str(tmp_path / given) if given == "nowhere" else given for given in arguments]
    with pytest.raises(SystemExit) as caught:
        main_of(monkeypatch, *arguments, "--device", "cpu", "--out", str(out))
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"gpu.sh: error: {words.format(tmp_path)}")
    assert not out.exists()


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    done = run_gpu("report", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr == f"gpu.sh: error: no part has left anything in {tmp_path / 'out'}\n"
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_is_no_traceback(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "large_model.py"),
        "--device",
        "cpu",
        "--parameters",
        "300K",
    ]
    command += ["--host-budget", "4096", "--nvme-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("large_model.py: error: offloadzero.budgets.host: ")
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


# --- building ---


def test_a_compiler_is_enough_to_build(tmp_path: Path) -> None:
    builder = module("gpu_build")
    names = sorted(extension.name for extension in builder.extensions())
    assert names == NATIVE_MODULES
    compiler = module("gpu_machine").compiler()
    commands: list[list[str]] = []
    builder.build(compiler, target=tmp_path / "all", run=lambda command: record(commands, command))
    sources = {Path(command[command.index("-c") + 1]).name for command in commands if "-c" in command}
    assert sources == {path.name for path in (ROOT / "csrc").glob("*/*.cpp")}
    (made,) = builder.build(compiler, only=["_termination"], target=tmp_path)
    loader = importlib.machinery.ExtensionFileLoader("_termination", str(made))
    spec = importlib.util.spec_from_loader("_termination", loader)
    assert spec is not None
    assert callable(importlib.util.module_from_spec(spec).add)
    assert builder.build(compiler, only=["_termination"], target=tmp_path) == []
    os.utime(made, (0, 0))
    assert builder.build(compiler, only=["_termination"], target=tmp_path) == [made]
    with pytest.raises(builder.BuildError, match="no-such-flag"):
        builder.build(f"{compiler} --no-such-flag", only=["_termination"], target=tmp_path / "other")


def record(commands: list[list[str]], command: list[str]) -> None:
    commands.append(command)
    Path(command[command.index("-o") + 1]).write_text("")


# --- deadlines ---


def test_a_deadline_ends_a_process_and_its_children(tmp_path: Path) -> None:
    process = module("gpu_process")
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); print('begun', flush=True); child.wait()"
    )
    done = process.run_process([sys.executable, "-c", script], deadline=process.Deadline(process.GRACE_S + 3))
    assert done.timed_out
    assert done.stdout == "begun\n"
    assert is_gone(int(pid_file.read_text()))
    quick = process.run_process(
        [sys.executable, "-c", "import sys; print('out'); sys.exit('err')"], deadline=process.Deadline(60)
    )
    assert (quick.status, quick.stdout, quick.stderr) == (1, "out\n", "err\n")


def test_sigterm_ends_what_runs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pids")
    test = tmp_path / "test_forever.py"
    test.write_text(
        f"import os, time\ndef test_a():\n    open({str(tmp_path / 'pids')!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    command = [
        sys.executable,
        str(SCRIPT),
        "tests",
        "--out",
        str(tmp_path / "out"),
        "--test-files",
        str(test),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = int((tmp_path / "pids").read_text())  # waits until the test is there
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert is_gone(pid)
    assert json.loads((tmp_path / "out" / "tests.json").read_text())["status"].startswith("SystemExit")


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


def test_each_file_of_tests_has_a_result_of_its_own(tmp_path: Path) -> None:
    tests, process = module("gpu_tests"), module("gpu_process")
    texts = {
        "good": "def test_a(): pass\ndef test_b():\n    import pytest\n    pytest.skip('no')",
        "bad": "def test_a(): pass\ndef test_b(): assert 1 == 2",
        "extra": "import no_such_extra\ndef test_a(): pass",
        "crash": "import os\ndef test_a(): os._exit(7)",
        "none": "import pytest\n@pytest.mark.gpu\ndef test_a(): pass",
    }
    files = []
    for name, text in texts.items():
        path = tmp_path / f"test_{name}.py"
        path.write_text(text)
        files.append(str(path))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    results = tests.run_files(
        files, marker="not gpu", num_processes=2, deadline=process.Deadline(100), log=tmp_path / "log"
    )
    assert [result.status for result in results] == ["passed", "failed", "left out", "failed", "left out"]
    assert (results[0].num_tests, results[0].num_skipped, results[1].num_failed) == (2, 1, 1)
    assert results[2].output == "needs no_such_extra"
    assert "assert 1 == 2" in results[1].output
    assert "assert 1 == 2" in (tmp_path / "log").read_text()
    found = tests.summary(results)
    assert (found["num_tests"], found["num_failed"], found["files failed"]) == (4, 1, 2)
    (late,) = tests.run_files(
        files[:1], marker="not gpu", num_processes=1, deadline=process.Deadline(-1), log=tmp_path / "log"
    )
    assert late.status == "not reached"


# --- the report ---


def result(step_s: float, flops: float, **lanes_s: float) -> dict[str, Any]:
    return {
        "num_params": 7_000_000_000,
        "median_step_s": step_s,
        "tokens_per_s": 100.0,
        "tflops": flops / step_s / 1e12,
        "flops_per_step": flops,
        "lanes_s": lanes_s,
        "waits_s": {"fetch": 0.25, "update": 0.5},
        "efficiency": 0.875,
        "reserved_bytes": {"device": 1 << 30, "host": 3 << 30},
    }


def test_the_bound_is_the_slowest_lane_or_the_baseline(tmp_path: Path) -> None:
    report = module("gpu_report")
    parts = {
        "device": [{"name": "device", "status": "ok", "result": result(2.0, 8e15, compute=2.0)}],
        "host": [
            {"name": "host", "status": "ok", "result": result(2.5, 8e15, compute=2.4, h2d=1.0, update=1.5)},
            {"name": "host, no clipping", "status": "timed out after 200 s", "error": "..."},
        ],
        "nvme": [
            {"name": "nvme", "status": "ok", "result": result(10.0, 4e15, **{"compute": 1, "nvme read": 8})}
        ],
    }
    for name, runs in parts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"part": name, "status": "ok", "runs": runs}))
    (tmp_path / "auto.json").write_text("{")
    text = report.write_report(tmp_path, ["build", "device", "host", "auto", "nvme"])
    written = json.loads((tmp_path / "report.json").read_text())
    device, host, late, nvme = written["runs"]
    assert (device["bound_lane"], device["bound_s"]) == ("T_compute", 2.0)
    assert (host["bound_lane"], host["bound_s"]) == ("T_compute", 2.0)
    assert host["overlap_efficiency"] == pytest.approx(0.8)
    assert host["of_device_resident"] == pytest.approx(0.8)
    assert (nvme["bound_lane"], nvme["bound_s"], nvme["overlap_efficiency"]) == ("nvme read", 8, 0.8)
    assert nvme["of_device_resident"] == pytest.approx(0.1)
    assert "bound_s" not in late
    assert "auto: unreadable" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 6
    assert len({len(row) for row in rows}) == 1
    assert "timed out after 200 s" in rows[4]
    assert "update 0.500 s" in rows[3]
    cells = [cell.strip() for cell in rows[3].split("|")]
    assert cells[1:4] == ["host", "7.00B", "2.500"]
    assert cells[9:13] == ["80.0%", "87.5%", "30.0%", "update 0.500 s"]
    assert cells[-4:-1] == ["1.00", "3.00", "0.00"]


def machine_of(device: str, **others: Any) -> dict[str, Any]:
    return {"date": "2026-01-01", "device": device, "torch": "2.13.0", "cores": 8, **others}


def report_of(tmp_path: Path, machines: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Text and JSON; each part has one run of its own name, of 1, 2, ... seconds."""
    for number, (name, machine) in enumerate(machines.items(), 1):
        run = {"name": name, "status": "ok", "result": result(float(number), 8e15, compute=0.5)}
        part = {"part": name, "status": "ok", "machine": machine, "runs": [run]}
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    text = module("gpu_report").write_report(tmp_path, list(machines))
    return text, json.loads((tmp_path / "report.json").read_text())


def test_machines_are_told_apart(tmp_path: Path) -> None:
    machines = {
        "device": machine_of("H200"),
        "host": machine_of("cpu"),
        "nvme": machine_of("H200", date="other"),
    }
    text, written = report_of(tmp_path, machines)
    names = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]
    assert names == ["device [A]", "host [B]", "nvme [A]"]
    header = text.partition("|")[0]
    first, second = header.index("Machine A: device, nvme\n"), header.index("Machine B: host\n")
    assert first < header.index("- device: H200") < second < header.index("- device: cpu")
    # Another machine's baseline is none.
    device, host, nvme = written["runs"]
    assert "of_device_resident" not in host
    assert "bound_s" not in host
    assert (device["of_device_resident"], nvme["of_device_resident"]) == (1.0, pytest.approx(1 / 3))
    assert "the fastest run of the part device: device [A]." in text


def test_one_machine_has_no_letter_and_its_baseline_is_named(tmp_path: Path) -> None:
    later = {"date": "2026-01-02", "host memory available": "3 GiB"}
    text, _ = report_of(tmp_path, {"device": machine_of("H200"), "host": machine_of("H200", **later)})
    names = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]
    assert names == ["device", "host"]
    assert "Machine" not in text
    assert text.count("- device: H200") == 1
    assert "- date: 2026-01-01" in text
    assert "T_compute and 'of device-resident' are by the fastest run of the part device: device." in text


def test_where_the_device_is_the_cpu_its_cores_take_the_place_of_the_baseline() -> None:
    bound = module("gpu_report").bound
    assert bound(result(2.0, 8e15, compute=1.9, cores=1.5, **{"nvme read": 1.0}), 1e15) == ("cores", 1.5)
    assert bound(result(2.0, 8e15, compute=1.9, h2d=1.5), None) == ("h2d", 1.5)
    assert bound(result(2.0, 8e15, compute=1.9), None) is None


# --- the parts, on the CPU ---


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
    for name, value in (
        ("PYTHONPATH", str(ROOT)),
        ("PYTHONUNBUFFERED", "1"),
        ("OMP_WAIT_POLICY", "passive"),
        ("OMP_NUM_THREADS", "1"),
    ):
        monkeypatch.setenv(name, value)
    status: int = gpu.main()
    return status


def test_a_part_runs_with_the_cpu_as_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, out = tmp_path / "drive", tmp_path / "out"
    files.mkdir()
    runs = module("gpu").RUNS["nvme"]
    assert [("--clipping" in options) for _, options in runs] == [False, True]
    monkeypatch.setitem(module("gpu").RUNS, "nvme", runs[1:])
    arguments = [
        "nvme",
        "report",
        "--device",
        "cpu",
        "--parameters",
        "300K",
        "--steps",
        "3",
        "--seq-len",
        "16",
    ]
    assert main_of(monkeypatch, *arguments, "--out", str(out), "--nvme-dir", str(files)) == 0
    (run,) = json.loads((out / "report.json").read_text())["runs"]
    assert (run["name"], run["status"]) == ("nvme, no clipping", "ok")
    assert run["bound_s"] > 0
    assert run["result"]["reserved_bytes"]["nvme"] > 10 * run["result"]["num_params"]
    assert run["result"]["clipping"] == 0.0
    assert "| nvme, no clipping |" in (out / "report.md").read_text()
    assert os.listdir(files) == []


def test_a_run_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, process = module("gpu"), module("gpu_process")
    good = json.dumps(result(2.0, 8e15, compute=2.0))
    outcomes = iter(
        [
            process.Finished(None, "", "step 0\nstep 1", 200.0),
            process.Finished(0, good, "", 5.0),
            process.Finished(2, "", "what it said", 1.0),
        ]
    )
    commands: list[list[str]] = []

    def run(command: list[str], *, deadline: Any) -> Any:
        assert 100 < deadline.left_s() < 460
        commands.append(command)
        return next(outcomes)

    monkeypatch.setattr(gpu, "run_process", run)
    arguments = ["auto", "--device", "cpu", "--parameters", "300K", "--out", str(tmp_path)]
    assert main_of(monkeypatch, *arguments) == gpu.FAILED
    found = json.loads((tmp_path / "auto.json").read_text())
    assert [run["status"] for run in found["runs"]] == ["timed out after 200 s", "ok", "failed (status 2)"]
    assert found["runs"][0]["error"] == "step 0\nstep 1"
    assert found["runs"][1]["result"]["median_step_s"] == 2.0
    assert found["status"] == "not all runs went well"
    budgets = [command[command.index("--device-budget") + 1] for command in commands[:2]]
    assert budgets[0] == budgets[1]
    assert "--host-update-ratio" in commands[2]
