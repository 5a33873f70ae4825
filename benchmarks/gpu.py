"""The first minutes on a GPU: is it right, is it fast, and where does the time go? `gpu.sh` (`make gpu`) runs it.

    benchmarks/gpu.sh first      300 s at most, in slices that end in time whatever happens in them:
      modules  30 s   the native modules, which are built where they are missing; what machine it is
      memory   20 s   of the host, taken once: some virtual machines get theirs as they use it
      right    45 s   a small GPT in all placements: bitwise alike, and near plain torch's numbers
      rates    30 s   matrix products, the link, pinning, the optimizer's kernels
      fast    140 s   a Llama of 7B from host memory, with exact clipping and without, and its computation alone
      where    30 s   one step of a part of it under torch's profiler
    benchmarks/gpu.sh second     240 s more: modules, memory, and rates where OUT has none of `first`, then
      large    65 s   13B, fp32 states on host and device
      compact  60 s   up to 20B, compact states there
      nvme     40 s   3B, or what the drive allows, with all states on it
      tests    25 s   memcheck of one training, and the tests marked gpu, file by file
    benchmarks/gpu.sh right      one slice, or some, each behind `modules`

Each slice writes what it finds into OUT/NAME.json at once, so that a slice that fails, stalls or is killed costs its
own results. The slices of a run share its time: what one leaves is the next ones'. At the end there is one table
(OUT/NAME.md), and a line for each thing that failed. Of an earlier run in OUT the files are NAME.before.*. Nothing is
installed. Needs torch, numpy and pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import gpu_report  # noqa: E402
from arguments import read_count, read_gib  # noqa: E402
from gpu_process import end_with_signals, run_process  # noqa: E402

CANNOT_RUN = 3  # exit status
MEMORY = "110GiB"  # of the host; taken once where a machine shows less
LOADING_S = 10.0  # of a process, before it takes memory
CLOSING_S = 25.0  # of a training, from its last step: unpinning, removing files
STEPS = ["--steps", "4", "--warmup", "1"]
Found = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One process of a slice. With a name its result is one of the slice's runs, else a part of the slice's own."""

    name: str
    command: list[str]

    @classmethod
    def of(cls, name: str, script: str, *options: object) -> Run:
        return cls(name, [sys.executable, str(ROOT / "benchmarks" / script), *map(str, options)])


# Yields the runs of a slice. What they have found so far is there when the next one is asked for.
Runs = Callable[[argparse.Namespace, Found], Iterator[Run]]


def modules(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    yield Run.of("", "gpu_machine.py", "look", args.device)


def memory(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    if args.device != "cpu":
        seconds = max(args.end_s - time.monotonic() - LOADING_S, 1.0)
        yield Run.of("", "gpu_machine.py", "take", args.memory, seconds)


def right(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    yield Run.of("", "gpu_right.py", "--device", args.device, "--nvme-dir", args.nvme_dir)


def rates(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    if not (args.out / "hardware.json").exists():
        yield Run.of("", "gpu_rates.py", "--device", args.device, "--hardware", args.out / "hardware.json")


def training(args: argparse.Namespace, name: str, *options: object) -> Run:
    """Return a run of large_model.py, with its forecast where the rates are known."""
    base = ["--device", args.device, "--nvme-dir", args.nvme_dir, *STEPS]
    base += ["--batch-size", args.batch_size, "--seq-len", args.seq_len]
    base += ["--end-s", args.end_s - CLOSING_S]
    if (args.out / "hardware.json").exists() and "none" not in options:
        base += ["--hardware", args.out / "hardware.json"]
    return Run.of(name, "large_model.py", *base, *options)


def fast(args: argparse.Namespace, found: Found) -> Iterator[Run]:
    size: list[object] = ["--parameters", args.parameters or "6.8B", "--fit"]
    yield training(args, "host, clipping", *size, "--placement", "host")
    clipped = found.get("runs", {}).get("host, clipping", {}).get("num_params")
    if clipped is not None:
        size = ["--parameters", clipped]
    yield training(args, "computation alone", *size[:2], "--placement", "none")
    yield training(args, "host, no clipping", *size, "--placement", "host", "--clipping", 0)


def where(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    size = ["--model", "7b", "--layers", 4] if args.parameters is None else ["--parameters", args.parameters]
    base = ["--device", args.device, "--nvme-dir", args.nvme_dir, "--clipping", 0]
    base += ["--batch-size", args.batch_size, "--seq-len", args.seq_len]
    yield Run.of("", "gpu_where.py", "--trace", args.out / "trace.json.gz", *base, *size)


def large(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    yield training(
        args,
        "fp32, host + device",
        "--parameters",
        args.parameters or "13.1B",
        "--fit",
        "--placement",
        "auto",
    )


def compact(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    size = ["--parameters", args.parameters or "20B", "--fit", "--placement", "auto"]
    yield training(args, "compact, host + device", *size, "--state-layout", "compact")


def nvme(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    size = ["--parameters", args.parameters or "3B", "--fit", "--drive-time-s", 25]
    yield training(args, "nvme", *size, "--placement", "nvme", "--clipping", 0)


def tests(args: argparse.Namespace, _: Found) -> Iterator[Run]:
    if args.device != "cpu":
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is not None:
            case = ["--only", "host, half on the device: plain, clipping"]
            checked = Run.of("", "gpu_right.py", "--device", args.device, "--nvme-dir", args.nvme_dir, *case)
            options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
            yield Run("memcheck", [sanitizer, *options, *checked.command])
        for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
            options = ["-q", "-p", "no:cacheprovider", "-m", "gpu", str(path)]
            yield Run(path.name, [sys.executable, "-m", "pytest", *options])


@dataclass(frozen=True)
class Slice:
    """A part of a run with its seconds."""

    name: str
    seconds: float
    runs: Runs


SETS = {
    "first": (
        Slice("modules", 30, modules),
        Slice("memory", 20, memory),
        Slice("right", 45, right),
        Slice("rates", 30, rates),
        Slice("fast", 140, fast),
        Slice("where", 30, where),
    ),
    "second": (
        Slice("modules", 15, modules),
        Slice("memory", 10, memory),
        Slice("rates", 25, rates),
        Slice("large", 65, large),
        Slice("compact", 60, compact),
        Slice("nvme", 40, nvme),
        Slice("tests", 25, tests),
    ),
}
SLICES = {part.name: part for parts in reversed(SETS.values()) for part in parts}


class Results:
    """What has been found so far, in a file that is whole at each instant."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self._path = args.out / f"{name}.json"
        self.log = args.out / f"{name}.log"
        self._table = args.out / f"{name}.md"
        for path in (self._path, self.log, self._table):
            if path.exists():
                path.replace(path.with_suffix(f".before{path.suffix}"))
        self.log.write_text("")
        self.found: Found = {"format": "offloadzero.gpu", "format_version": 2, "slices": {}}
        self._saves = threading.Lock()  # what a run tells is saved by the thread that reads it

    def save(self) -> None:
        partial = self._path.with_suffix(".partial")
        with self._saves:
            partial.write_text(json.dumps(self.found, indent=1) + "\n")
            partial.replace(self._path)

    def tell(self) -> None:
        """Print the table, and keep it."""
        text = gpu_report.text_of(self.found)
        self._table.write_text(text)
        print(f"{text}\n{self._table}, {self._path.name}, {self.log.name}", flush=True)

    def run(self, part: Slice, end_s: float, args: argparse.Namespace) -> None:
        """Run a slice."""
        start_s = time.monotonic()
        found: Found = {"status": "not finished"}
        args.end_s = end_s
        self.found["slices"][part.name] = found
        self.save()
        problems, status = [], "skipped"
        try:
            for run in part.runs(args, found):
                status = self._run_one(run, found, end_s)
                if status != "ok":
                    problems.append(f"{run.name}: {status}" if run.name else status)
        except Exception as error:  # of this slice alone
            found["error"] = traceback.format_exc()
            problems.append(f"{type(error).__name__}: {error}")
        found |= {"status": "; ".join(problems) or status, "seconds": time.monotonic() - start_s}
        self.save()

    def _run_one(self, run: Run, found: Found, end_s: float) -> str:
        """Run a process of a slice that has found `found` so far; return how it ended."""
        mine = found if not run.name else found.setdefault("runs", {}).setdefault(run.name, {})

        def tell(news: Mapping[str, Any]) -> None:
            for key, value in news.items():  # what comes bit by bit is one table
                is_table = isinstance(value, dict) and isinstance(mine.get(key), dict)
                mine[key] = {**mine[key], **value} if is_table else value
            self.save()

        with self.log.open("a") as log:
            log.write(f"$ {shlex.join(run.command)}\n")
        said = self.log.stat().st_size
        status = run_process(run.command, end_s=end_s, tell=tell, log=self.log)
        if status != "ok":
            mine["error"] = self.log.read_text(errors="replace")[said:][-4000:]
        if run.name:
            mine["status"] = status
        self.save()
        return status


def run_set(name: str, parts: Sequence[Slice], args: argparse.Namespace) -> int:
    """Run slices, one after the other, each until the end of its time at the latest; return the exit status."""
    results, begun_s, window_s = Results(args, name), time.monotonic(), 0.0
    if name in ("first", "rates"):
        (args.out / "hardware.json").unlink(missing_ok=True)
    slices = results.found["slices"]
    try:
        for part in parts:
            window_s += part.seconds
            print(f"== {part.name}", flush=True)
            results.run(part, begun_s + window_s, args)
            found = slices[part.name]
            print(f"   {found['status']}, {found['seconds']:.0f} s", flush=True)
            if part.name == "modules" and "modules" not in found:  # nothing runs without them
                missing = found.get(
                    "missing", "native modules that load (python setup.py build_ext --inplace)"
                )
                print(f"gpu.sh: error: missing: {missing}", file=sys.stderr)
                return CANNOT_RUN
    finally:  # after Ctrl-C, too
        results.found["seconds"] = time.monotonic() - begun_s
        results.save()
        results.tell()
    return 0 if all(found["status"] in ("ok", "skipped") for found in slices.values()) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", metavar="WHAT", help=", ".join([*SETS, *SLICES]))
    parser.add_argument(
        "--out", type=Path, help="default $OUT, else runs/gpu, with the CPU as the device runs/cpu"
    )
    parser.add_argument(
        "--nvme-dir", type=Path, default=os.environ.get("NVME_DIR", "."), help="default $NVME_DIR, else here"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parameters", type=read_count, help="of every model: 20M; else as the slices say")
    parser.add_argument(
        "--memory", type=read_gib, default=read_gib(MEMORY), help=f"to take of the host, default {MEMORY}"
    )
    parser.add_argument("--batch-size", type=read_count, help="default 8, on the CPU 1")
    parser.add_argument("--seq-len", type=read_count, help="default 2048, on the CPU 64")
    args = parser.parse_args()
    unknown = [name for name in args.what if name not in {**SETS, **SLICES}]
    if unknown:
        parser.error(f"no such thing: {', '.join(unknown)}; there are {', '.join([*SETS, *SLICES])}")
    on_cpu = args.device == "cpu"
    args.batch_size = args.batch_size or (1 if on_cpu else 8)
    args.seq_len = args.seq_len or (64 if on_cpu else 2048)
    args.nvme_dir = args.nvme_dir.resolve()
    usual = os.environ.get("OUT") or ROOT / "runs" / ("cpu" if on_cpu else "gpu")
    args.out = Path(args.out or usual).resolve()
    if not args.nvme_dir.is_dir():
        parser.error(f"--nvme-dir: {args.nvme_dir} is not a directory")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return args


def main() -> int:
    args = parse_arguments()
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["PYTHONUNBUFFERED"] = "1"
    end_with_signals()
    status = 0
    # A process that had to be killed loses everything with the folder.
    with tempfile.TemporaryDirectory(dir=args.nvme_dir, prefix="gpu-run-") as folder:
        args.nvme_dir = folder
        for name in args.what:
            alone = () if name == "modules" else (SLICES["modules"],)
            parts = SETS.get(name) or (*alone, SLICES[name])
            try:
                status = max(status, run_set(name, parts, args))
            except KeyboardInterrupt:
                return 130
            if status == CANNOT_RUN:
                break
    return status


if __name__ == "__main__":
    sys.exit(main())
