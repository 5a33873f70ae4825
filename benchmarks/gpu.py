"""Everything that needs a CUDA device, in parts of at most eight minutes; `gpu.sh` (`make gpu`) runs it.

    benchmarks/gpu.sh                 all parts in this order, or those that are named:
      build       the native modules
      tests       the tests that need no device and no development extras, several files at once
      rates       host memory, the link to the device, the optimizer's kernels, the drive
      gpu-tests   the tests marked gpu
      device      a device-resident baseline, which gives T_compute
      host        states in host memory
      auto        placement by budgets, and half of the states on the device
      nvme        states on the drive
      compact     compact states on the drive
      report      one table and one JSON (report.md, report.json) of what the parts have left in the folder

Needs torch, numpy, a C++ compiler and pytest, and says by name what else is missing. Models are as large as the free
memory and the drive allow, up to --largest. A part that fails leaves the figures of the others alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import gpu_machine  # noqa: E402
import gpu_report  # noqa: E402
import gpu_tests  # noqa: E402
from arguments import read_count, read_gib  # noqa: E402
from gpu_process import Deadline, Finished, end_with_signals, run_process  # noqa: E402

PARTS = ("build", "tests", "rates", "gpu-tests", "device", "host", "auto", "nvme", "compact", "report")
NEED_CUDA = ("gpu-tests", "device", "host", "auto", "nvme", "compact")
OK, FAILED, MISSING, NO_CUDA = 0, 1, 2, 3
MAX_PART_S = 480.0
CLOSING_S = 30.0  # of a run, from its last step: unpinning, removing files
TAKING_S = 60.0  # for --memory to be taken once
BUILDING_S = 60.0  # time of a run beside the traffic of its states, for sizing
TAIL_LINES = 25
LARGEST = "7.2B"  # so that "at least 7 billion" holds

# The name of each run of a part and its options of large_model.py. "{...}" are found when it begins.
RUNS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "device": (
        ("device", ("--placement", "device")),
        ("device, no clipping", ("--placement", "device", "--clipping", "0")),
    ),
    "host": (
        ("host", ("--placement", "host")),
        ("host, no clipping", ("--placement", "host", "--clipping", "0")),
    ),
    "auto": (
        ("auto", ("--placement", "auto")),
        ("auto, no clipping", ("--placement", "auto", "--clipping", "0")),
        ("host, half of the states on the device", ("--placement", "host", "--host-update-ratio", "0.5")),
    ),
    "nvme": (
        ("nvme", ("--placement", "nvme")),
        ("nvme, no clipping", ("--placement", "nvme", "--clipping", "0")),
    ),
    "compact": (
        ("nvme, compact", ("--placement", "nvme", "--state-layout", "compact")),
        (
            "nvme, compact, no clipping",
            ("--placement", "nvme", "--state-layout", "compact", "--clipping", "0"),
        ),
    ),
}
DRIVE_BYTES_PER_PARAM = {"nvme": 12.0, "compact": 5.2}


class Part:
    """The results of a part so far, written to its file after each step of it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.args = args
        self.deadline = Deadline(min(args.part_time_s, MAX_PART_S))
        args.out.mkdir(parents=True, exist_ok=True)
        self.log = args.out / f"{name}.log"
        self.log.write_text("")
        self._start_s = time.monotonic()
        self.found: dict[str, Any] = {
            "part": name,
            "status": "not finished",
            "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": describe_machine(args.device),
        }

    def save(self, **found: Any) -> None:
        """Add results to the file."""
        self.found |= {**found, "seconds": time.monotonic() - self._start_s}
        partial = self.args.out / f"{self.name}.json.partial"
        partial.write_text(json.dumps(self.found, indent=1) + "\n")
        partial.replace(self.args.out / f"{self.name}.json")

    def run(self, command: Sequence[str], *, deadline: Deadline | None = None) -> Finished:
        """Run a command of this part; its output goes to the log."""
        done = run_process(command, deadline=deadline or self.deadline)
        with self.log.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n{done.output}\n")
        return done


def describe_machine(device: str) -> dict[str, Any]:
    """Return the facts for the report. `device` is the requested one."""
    torch = sys.modules.get("torch")
    on_cuda = torch is not None and device != "cpu" and torch.cuda.is_available()
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch is not None and on_cuda else "cpu",
        "torch": torch.__version__ if torch is not None else None,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "host memory available": f"{gpu_machine.available_memory() / 2**30:.1f} GiB",
        **gpu_machine.link(),
    }


def status_of(done: Finished) -> str:
    """Return the status as text."""
    if done.timed_out:
        return f"timed out after {done.seconds:.0f} s"
    return "ok" if done.status == 0 else f"failed (status {done.status})"


def tail(done: Finished) -> str:
    """Return the end of a process's output."""
    return "\n".join((done.stderr or done.stdout).splitlines()[-TAIL_LINES:])


# --- The parts: each returns whether all of it went well. ---


def build(part: Part) -> bool:
    """Build the native modules, in place."""
    done = part.run([sys.executable, str(ROOT / "benchmarks" / "gpu_build.py")])
    part.save(status=status_of(done))
    print(done.stdout if done.status == 0 else tail(done), end="")
    return done.status == 0


def run_tests(part: Part) -> bool:
    """Run the tests of the CPU as the device, or those of the device."""
    args = part.args

    def run(files: Sequence[str], marker: str, *, num_processes: int) -> list[gpu_tests.FileResult]:
        return gpu_tests.run_files(
            files, marker=marker, num_processes=num_processes, deadline=part.deadline, log=part.log
        )

    if part.name == "gpu-tests":
        results = run(gpu_tests.files_with("gpu"), "gpu", num_processes=1)
    else:
        files = args.test_files or gpu_tests.cpu_test_files()
        num_processes = len(os.sched_getaffinity(0))  # they wait as long as they compute
        results = run(files, "not gpu and not slow and not alone", num_processes=num_processes)
        alone = [file for file in files if file in gpu_tests.files_with("alone")]
        results += run(alone, "alone and not gpu and not slow", num_processes=1)
    found = gpu_tests.summary(results)
    bad = [result for result in results if result.status in ("failed", "timed out", "not reached")]
    part.save(status="ok" if not bad else f"{len(bad)} files did not pass", tests=found)
    for result in bad:
        print(f"--- {result.file}: {result.status}\n{result.output}")
    return not bad


def rates(part: Part) -> bool:
    """Measure the tables of `offloadzero bench`."""
    base = [sys.executable, "-m", "offloadzero", "bench"]
    nvme = ["nvme", str(part.args.nvme_dir), "--size", part.args.drive_size]
    commands = (
        ("bench copy", ["copy"], 40.0),
        ("bench nvme", nvme, 90.0),
        ("bench adam", ["adam", "--rounds", "5"], None),  # takes the time it takes
    )
    entries: list[dict[str, Any]] = []
    for name, options, wanted_s in commands:
        command = [*base, *options]
        if wanted_s is not None:
            command += ["--time", f"{max(5.0, min(wanted_s, part.deadline.left_s() / 3)):.0f}s"]
        done = part.run(command)
        entries.append({"name": name, "status": status_of(done), "text": done.stdout})
        print(f"{name}: {status_of(done)}\n{done.stdout if done.status == 0 else tail(done)}", flush=True)
        part.save(commands=entries)
    is_good = all(entry["status"] == "ok" for entry in entries)
    part.save(status="ok" if is_good else "not all of it went well")
    return is_good


def take_memory(part: Part) -> None:
    """Have the machine show the memory that it is said to have: see `gpu_machine.take_memory`."""
    wanted, shown = part.args.memory, gpu_machine.available_memory()
    if wanted is None or shown >= wanted:
        return
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_machine.py"), str(wanted)]
    done = part.run(command, deadline=Deadline(min(TAKING_S, part.deadline.left_s())))
    then = gpu_machine.available_memory()
    part.save(taken={"status": status_of(done), "available_before": shown, "available_then": then})
    words = f"{then / 2**30:.1f} GiB once {wanted / 2**30:.1f} GiB were taken ({status_of(done)})"
    print(f"host memory available: {shown / 2**30:.1f} GiB, {words}", flush=True)


def trainings(part: Part) -> bool:
    """Do the runs of a part, each in the time that is left to it."""
    take_memory(part)
    runs: list[dict[str, Any]] = []
    sizes: dict[str, Any] = {}
    # A run that had to be killed loses everything with its folder.
    with tempfile.TemporaryDirectory(dir=part.args.nvme_dir, prefix="gpu-run-") as folder:
        for number, (name, options) in enumerate(RUNS[part.name]):
            run_s = part.deadline.left_s() / (len(RUNS[part.name]) - number)
            runs.append(training(part, name, options, run_s=run_s, sizes=sizes, folder=folder))
            part.save(runs=runs, sizes=sizes)
            print(run_line(runs[-1]), flush=True)
    is_good = all("result" in run for run in runs)
    part.save(status="ok" if is_good else "not all runs went well")
    return is_good


def training(
    part: Part, name: str, options: Sequence[str], *, run_s: float, sizes: dict[str, Any], folder: str
) -> dict[str, Any]:
    """Do one run, and return its result."""
    try:
        command = command_of(part, options, run_s=run_s, sizes=sizes, folder=folder)
    except Exception as error:  # an error of one run must not lose the others' figures
        return {"name": name, "status": f"no size: {error}"}
    done = part.run(command, deadline=Deadline(run_s))
    entry = {"name": name, "status": status_of(done), "seconds": done.seconds, "command": shlex.join(command)}
    return entry | ({"result": json.loads(done.stdout)} if done.status == 0 else {"error": tail(done)})


def command_of(
    part: Part, options: Sequence[str], *, run_s: float, sizes: dict[str, Any], folder: str
) -> list[str]:
    """Return the command of one run; `sizes` keeps values for the runs after it."""
    args = part.args
    base = ["--device", args.device, "--nvme-dir", folder, "--steps", str(args.steps)]
    base += ["--batch-size", str(args.batch_size), "--seq-len", str(args.seq_len)]
    base += ["--time-limit-s", str(int(max(run_s - CLOSING_S, 1.0)))]
    if "parameters" not in sizes:
        sizes["parameters"] = args.parameters or largest_of(part, options, run_s=run_s)
    command = [*base, "--parameters", str(sizes["parameters"]), *options]
    if "auto" in options and args.device == "cpu":
        # Half of the memory would hold it all.
        planned = planned_bytes(args, ("--placement", "device"), sizes["parameters"])
        command += ["--device-budget", str(planned["device"] // 3)]
    return [sys.executable, str(ROOT / "benchmarks" / "large_model.py"), *command]


def settings_of(args: argparse.Namespace, options: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a run."""
    import large_model

    given = ["--device", args.device, *options]
    return large_model.config(large_model.parse_arguments(given), str(args.nvme_dir))


def planned_bytes(args: argparse.Namespace, options: Sequence[str], num_parameters: int) -> dict[str, int]:
    """Return the planned bytes by tier."""
    return gpu_machine.planned_bytes(settings_of(args, options), num_parameters)


def largest_of(part: Part, options: Sequence[str], *, run_s: float) -> int:
    """Return the most parameters that memory, drive and time allow."""
    args = part.args
    if "auto" in options:  # what it cannot hold it puts on the drive: sized as the part `host`
        options = ("--placement", "host")
    at_most = args.largest
    if part.name in DRIVE_BYTES_PER_PARAM:
        read_gbps, write_gbps = gpu_machine.drive_gbps(args.nvme_dir)
        part.save(drive={"read_gbps": read_gbps, "write_gbps": write_gbps})
        in_time = gpu_machine.largest_in_time(
            bytes_per_param=DRIVE_BYTES_PER_PARAM[part.name],
            read_gbps=read_gbps,
            write_gbps=write_gbps,
            num_steps=3,
            seconds=max(run_s - BUILDING_S - CLOSING_S, 10.0),
        )
        at_most = min(at_most, in_time)
    allowed = gpu_machine.limits(
        args.nvme_dir, memory=args.memory, disk=args.disk, on_cuda=args.device != "cpu"
    )
    return gpu_machine.largest_that_fits(settings_of(args, options), allowed, at_most=at_most)


def run_line(entry: dict[str, Any]) -> str:
    """Return a run's result as a line of text."""
    if "result" not in entry:
        return f"{entry['name']}: {entry['status']}\n{entry.get('error', '')}".rstrip()
    result = entry["result"]
    return (
        f"{entry['name']}: {result['num_params']:,} parameters, {result['median_step_s']:.3f} s per step, "
        f"{result['tokens_per_s']:,.0f} tokens/s, {result['tflops']:.4g} TFLOPS"
    )


WORK: dict[str, Callable[[Part], bool]] = {
    "build": build,
    "tests": run_tests,
    "gpu-tests": run_tests,
    "rates": rates,
    **dict.fromkeys(RUNS, trainings),
}


# --- The command ---


def expect_prerequisites(name: str) -> list[gpu_machine.Missing]:
    """Return the prerequisites of the part that this machine lacks."""
    missing = gpu_machine.missing_to_run()
    if name == "build":
        return [*missing, *gpu_machine.missing_to_build()]
    if "tests" in name:
        missing += gpu_machine.missing_to_test()
    return [*missing, *gpu_machine.missing_native_modules()]


def run_part(name: str, args: argparse.Namespace) -> int:
    """Run one part and return its status; its file has the result, however it ends."""
    print(f"== {name}", flush=True)
    missing = expect_prerequisites(name)
    if missing:
        print("missing:", *missing, sep="\n  ")
        return MISSING
    if name in NEED_CUDA and args.device != "cpu":
        reason = gpu_machine.why_no_cuda()
        if reason is not None:
            print(
                f"no CUDA device: {reason}. This part, and all that are timed, need one; with --device cpu "
                "they run on the CPU as the device (--parameters 20M, for example)."
            )
            return NO_CUDA
    if name == "gpu-tests" and args.device == "cpu":
        print("left out: they need a CUDA device")
        return OK
    part = Part(name, args)
    try:
        is_good = WORK[name](part)
    except BaseException as error:
        part.save(status=f"{type(error).__name__}: {error}")
        raise
    print(f"== {name}: {part.found['status']}, {part.found['seconds']:.0f} s", flush=True)
    return OK if is_good else FAILED


def device_line(args: argparse.Namespace) -> str:
    """Name the device and the parts that will not run, before parts without a need for one take their minutes."""
    if args.device == "cpu":
        rest = "gpu-tests will not be run" if "gpu-tests" in args.parts else "all parts are run"
        return f"the CPU is the device, as --device cpu asks: {rest}"
    reason = gpu_machine.why_no_cuda()
    if reason is None:
        return f"CUDA device: {gpu_machine.cuda_name()}"
    left_out = [name for name in args.parts if name in NEED_CUDA]
    if not left_out:
        return f"no CUDA device ({reason}): what is asked for needs none"
    on_cpu = ", ".join(name for name in left_out if name in RUNS)
    advice = f"; --device cpu runs {on_cpu} on the CPU" if on_cpu else ""
    return f"no CUDA device ({reason}): {', '.join(left_out)} will not be run{advice}"


def run_all(args: argparse.Namespace) -> int:
    """Return the worst status. Without a device, or a prerequisite of all parts, the other parts are not tried."""
    worst = OK
    if args.parts != ["report"] and not gpu_machine.missing_to_run():
        print(device_line(args), flush=True)
    for name in args.parts:
        if name == "report":
            continue
        try:
            status = run_part(name, args)
        except Exception as error:
            print(f"== {name}: {type(error).__name__}: {error}", flush=True)
            status = FAILED
        worst = max(worst, status)
        if status in (MISSING, NO_CUDA):
            break
    if "report" not in args.parts and len(args.parts) == 1:
        return worst
    if not gpu_report.load_parts(args.out, list(WORK)):
        print(f"gpu.sh: error: no part has left anything in {args.out}", file=sys.stderr)
        return max(worst, MISSING)
    print(gpu_report.write_report(args.out, list(WORK)))
    print(f"{args.out}/report.md and report.json: {PHRASES[worst]}")
    return worst


PHRASES = {
    OK: "what was asked for went well",
    FAILED: "not all of what was asked for went well",
    MISSING: "something is missing here",
    NO_CUDA: "all that needs no CUDA device is done, the rest is not",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT", "runs/gpu"), help="OUT, else runs/gpu"
    )
    parser.add_argument(
        "--nvme-dir", type=Path, default=os.environ.get("NVME_DIR", "."), help="NVME_DIR, else here"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--parameters", type=read_count, help="of every model: 20M; else as many as fit")
    parser.add_argument("--largest", type=read_count, default=read_count(LARGEST), help=f"default {LARGEST}")
    parser.add_argument(
        "--memory",
        type=read_gib,
        help="host memory to size models for: 110GiB, taken once where less is free; else what is free",
    )
    parser.add_argument("--disk", type=read_gib, help="the same of the drive")
    parser.add_argument("--batch-size", type=int, help="default 8, on the CPU 1")
    parser.add_argument("--seq-len", type=int, help="default 2048, on the CPU 64")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--part-time-s", type=float, default=460.0, help=f"at most {MAX_PART_S:.0f}")
    parser.add_argument("--drive-size", default="2GiB", help="of the file of bench nvme")
    parser.add_argument("--test-files", nargs="+", metavar="FILE", help="of the part tests; else all")
    args = parser.parse_args()
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    args.parts = [name for name in PARTS if name in args.parts] if args.parts else list(PARTS)
    on_cpu = args.device == "cpu"
    args.batch_size = args.batch_size or (1 if on_cpu else 8)
    args.seq_len = args.seq_len or (64 if on_cpu else 2048)
    args.nvme_dir = args.nvme_dir.resolve()
    args.out = args.out if args.out.is_absolute() else ROOT / args.out
    for wrong in wrong_values(args):
        parser.error(wrong)
    return args


def wrong_values(args: argparse.Namespace) -> Iterator[str]:
    """Yield messages on values that no run could use, before the first part, which may take minutes."""
    if {"rates", *RUNS} & set(args.parts) and not args.nvme_dir.is_dir():
        yield f"--nvme-dir: {args.nvme_dir} is not a directory"
    if set(RUNS) & set(args.parts) and not gpu_machine.missing_to_run():
        from llama_model import size_with

        for option in ("parameters", "largest"):
            try:
                if getattr(args, option) is not None:
                    size_with(getattr(args, option))
            except ValueError as error:
                yield f"--{option}: {error}"


def main() -> int:
    args = parse_arguments()
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["PYTHONUNBUFFERED"] = "1"
    end_with_signals()
    return run_all(args)


if __name__ == "__main__":
    sys.exit(main())
