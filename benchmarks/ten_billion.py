"""`examples/train_10b.py`, checked: ten billion parameters on one device, and a smaller run that resumes bit by bit.

    python benchmarks/ten_billion.py --directory /mnt/nvme                    # 52 GB of disk, tens of minutes
    python benchmarks/ten_billion.py --directory /tmp --parameters 100M --resumed-parameters 20M --no-rehearsal

Part one forecasts the seconds of a step and trains `--parameters` for `--steps` steps. It must have at least so many
parameters, losses that are finite and fall, a peak resident set within `--max-rss` and never more than `--max-disk` in
the directory. Part two trains `--resumed-parameters` twice, once without and once with a Ctrl-C in its second step,
after which it resumes: losses and the files of the last checkpoint must be the same bit by bit. Prints both as
Markdown. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from arguments import read_count  # noqa: E402

from offloadzero.config.readers import read_num_bytes  # noqa: E402

SCRIPT = ROOT / "examples" / "train_10b.py"
GIB = 1 << 30
NUM_RESUMED_STEPS = 4


@dataclass(frozen=True)
class Run:
    """The logs of one or more calls of the script."""

    starts: list[dict[str, Any]]  # one per call
    steps: list[dict[str, Any]]

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.steps]


def read_log(path: Path) -> Run:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return Run([row for row in rows if "step" not in row], [row for row in rows if "step" in row])


class LowWater:
    """The most that a directory's drive held, beyond its first usage, read once a second."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._first_free = self.least_free = shutil.disk_usage(directory).free
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_over.wait(1.0):
            self.least_free = min(self.least_free, shutil.disk_usage(self._directory).free)

    @property
    def num_bytes(self) -> int:
        return self._first_free - self.least_free

    def __enter__(self) -> LowWater:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def call(directory: Path, *options: str, interrupt_at: str | None = None) -> int:
    """Return the script's exit status; its output goes to stderr. SIGINT follows a line that begins with that."""
    command = [sys.executable, str(SCRIPT), *options]
    print(f"$ train_10b.py {' '.join(options)}", file=sys.stderr, flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            if interrupt_at is not None and line.startswith(interrupt_at):
                process.send_signal(signal.SIGINT)
                interrupt_at = None
    return process.returncode


def problems_of_size(run: Run, *, parameters: int, num_steps: int, max_rss_bytes: int) -> list[str]:
    """Return the expectations that a run did not meet."""
    found = []
    num_params, losses = run.starts[0]["num_params"], [loss for _, loss in run.losses]
    if num_params < parameters:
        found.append(f"{num_params:,} parameters are fewer than {parameters:,}")
    if len(losses) < num_steps:
        found.append(f"{len(losses)} steps of {num_steps}")
    if not all(map(math.isfinite, losses)):
        found.append(f"losses that are not finite: {losses}")
    elif losses and losses[-1] >= losses[0]:
        found.append(f"the loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}")
    peak = max((row["peak_rss_bytes"] for row in run.steps), default=0)
    if peak > max_rss_bytes:
        found.append(f"a peak resident set of {peak:,} bytes, {max_rss_bytes:,} are allowed")
    return found


def digests(directory: Path) -> dict[str, Any]:
    """Return the digests of the files with weights and states in a checkpoint."""
    files = json.loads((directory / "manifest.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.startswith("unit-")}


def table(run: Run) -> str:
    lines = [
        "| step | loss | seconds | bound | overlap | peak RSS |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['step']} | {row['loss']:.4f} | {row['step_s']:.1f} | {row['bound_s']:.1f} s ({row['bound_lane']}) | "
        f"{row['efficiency']:.1%} | {row['peak_rss_bytes'] / GIB:.2f} GiB |"
        for row in run.steps
    ]
    return "\n".join(lines)


def check_size(args: argparse.Namespace, directory: Path) -> list[str]:
    with LowWater(directory) as disk:
        options = ["--parameters", str(args.parameters), "--steps", str(args.steps), "--log", "size.jsonl"]
        options += ["--seq-len", str(args.seq_len), *(["--rehearse"] if args.rehearse else [])]
        status = call(directory, *options)
    if status != 0:
        return [f"train_10b.py ended with status {status}"]
    run = read_log(directory / "size.jsonl")
    start, planned = run.starts[0], run.starts[0]["planned_bytes"]
    print(f"\n{start['num_params']:,} parameters, built in {start['build_s']:.0f} s")
    if start["forecast_s"] is not None:
        forecast = start["forecast_s"]
        print(f"forecast: {forecast['build']:.0f} s to build, {forecast['step']:.1f} s per step")
    print(
        f"planned: host {planned['host'] / GIB:.2f} GiB, disk {planned['disk']:,} bytes; "
        f"disk taken at the most: {disk.num_bytes:,} bytes\n\n{table(run)}\n"
    )
    found = problems_of_size(
        run, parameters=args.parameters, num_steps=args.steps, max_rss_bytes=args.max_rss
    )
    if disk.num_bytes > args.max_disk:
        found.append(f"{disk.num_bytes:,} bytes of disk, {args.max_disk:,} are allowed")
    return found


def check_resuming(args: argparse.Namespace, directory: Path) -> list[str]:
    common = ["--parameters", str(args.resumed_parameters), "--steps", str(NUM_RESUMED_STEPS)]
    common += ["--seq-len", str(args.seq_len)]
    last = f"global_step{NUM_RESUMED_STEPS}"
    status = call(directory, *common, "--log", "whole.jsonl", "--save", "whole")
    if status != 0:
        return [f"the run without an interrupt ended with status {status}"]
    expected = digests(directory / "whole" / last)
    shutil.rmtree(directory / "whole")  # room for the other's
    parts = [*common, "--log", "parts.jsonl", "--save", "parts"]
    status = call(directory, *parts, "--progress-s", "0", interrupt_at="rank 0: step 2, forward, unit 1 ")
    num_before = len(read_log(directory / "parts.jsonl").steps)
    if status != 130:
        return [f"the interrupted run ended with status {status} after step {num_before}"]
    status = call(directory, *parts, "--resume", "parts")
    if status != 0:
        return [f"the resumed run ended with status {status}"]
    whole, resumed = read_log(directory / "whole.jsonl"), read_log(directory / "parts.jsonl")
    print(
        f"\n{whole.starts[0]['num_params']:,} parameters, interrupted after step {num_before} and resumed\n"
    )
    print(f"without an interrupt:\n\n{table(whole)}\n\nwith it:\n\n{table(resumed)}\n")
    found = []
    if whole.losses != resumed.losses:
        found.append(f"losses differ: {whole.losses} and {resumed.losses}")
    if digests(directory / "parts" / last) != expected:
        found.append("the files of the last checkpoint differ")
    return found


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    num_bytes = lambda text: read_num_bytes("bytes", text)  # noqa: E731
    parser.add_argument("--directory", type=Path, required=True, help="a folder of its own is made in it")
    parser.add_argument("--parameters", type=read_count, default="10B")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--resumed-parameters", type=read_count, default="3B")
    parser.add_argument(
        "--seq-len",
        type=int,
        default=128,
        help="less where cores multiply bfloat16 slowly, as those without AVX-512",
    )
    parser.add_argument(
        "--no-rehearsal", dest="rehearse", action="store_false", help="no forecast from two small models"
    )
    parser.add_argument("--max-rss", type=num_bytes, default=16 * GIB, help="16GiB when absent")
    parser.add_argument("--max-disk", type=num_bytes, default=70 * 10**9, help="70 GB when absent")
    parser.add_argument("--only", choices=("size", "resuming"), help="one of the two parts")
    return parser.parse_args(given)


def main() -> None:
    args = parse_arguments()
    found = []
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="ten-billion-") as name:
        directory = Path(name)
        (directory / "offload-files").mkdir()
        if args.only != "resuming":
            found += check_size(args, directory)
        if args.only != "size":
            found += check_resuming(args, directory)
    print("\n".join(f"NOT SHOWN: {problem}" for problem in found) or "all of it holds")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
