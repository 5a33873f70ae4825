"""Contenders that take turns: each is one process, or one for each rank, that does steps on request.

A turn ends when all of its work is done, updates that go on in the background included, so nobody works in another's
turn. A sample is the time of a turn over its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

T = TypeVar("T")

Batches = list[tuple[Any, Any]]  # a step's micro batches of (tokens, targets)
RUN_DIR = "run"  # of offloadzero, beside its files
MIB = 1024 * 1024
MIN_AVAILABLE_BYTES = 1024 * MIB  # for the file cache and other programs
CLOSE_TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parent.parent


class Trainer(NamedTuple):
    """The calls by which a contender's process trains."""

    step: Callable[[Batches], Any]  # does one step; returns the loss of the last micro batch
    finish: Callable[[], None] = lambda: None  # waits for what steps have left in the background


# ---------------------------------------------------------------------------------------------------------
# The worker's side: one JSON line in (the number of steps), one JSON line out.


def take_channel() -> TextIO:
    """Return stdout as the channel to the parent; what frameworks print goes to stderr from now on (the log file)."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def serve(
    channel: TextIO,
    trainer: Trainer,
    next_batches: Callable[[], Batches],
    *,
    version: str,
    begin_turn: Callable[[], None] = lambda: None,
) -> None:
    """Do steps until stdin ends, and then end the process. `begin_turn` is called before the clock starts."""
    print(json.dumps({"version": version}), file=channel, flush=True)
    for line in sys.stdin:
        batches = [next_batches() for _ in range(int(line))]
        begin_turn()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        losses = [float(trainer.step(each)) for each in batches]
        trainer.finish()
        answer = {
            "step_s": (time.perf_counter() - start_s) / len(batches),
            "cpu_s": (time.process_time() - start_cpu_s) / len(batches),
            "losses": losses,
            "peak_rss_bytes": status_bytes("VmHWM"),
            "shared_bytes": status_bytes("RssShmem"),
        }
        print(json.dumps(answer), file=channel, flush=True)
    os._exit(0)  # nothing of the frameworks' shutdown is measured, and some of it hangs


def status_bytes(key: str) -> int:
    """Return a field of /proc/self/status; VmHWM is the peak resident set."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise KeyError(key)
    return int(match[1]) * 1024


# ---------------------------------------------------------------------------------------------------------
# The parent's side.


class ContenderError(Exception):
    """A contender died; the message is the end of its logs."""


@dataclass(frozen=True)
class Turn:
    """One turn of a contender, over its ranks."""

    step_s: float  # of the slowest rank
    cores_s: float  # CPU time of a step, of all ranks, over the machine's cores
    losses: list[float]  # of each step, the mean over the ranks
    peak_rss_bytes: int  # of the largest rank
    shared_bytes: int  # memory that a rank has in common with other processes

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]]) -> Turn:
        """Put the ranks' answers together."""
        return cls(
            step_s=max(answer["step_s"] for answer in answers),
            cores_s=sum(answer["cpu_s"] for answer in answers) / (os.cpu_count() or 1),
            losses=[
                statistics.fmean(losses)
                for losses in zip(*(answer["losses"] for answer in answers), strict=True)
            ],
            peak_rss_bytes=max(answer["peak_rss_bytes"] for answer in answers),
            shared_bytes=max(answer["shared_bytes"] for answer in answers),
        )


class Contender:
    """The processes of a contender, idle until steps are requested."""

    def __init__(
        self, name: str, command: Sequence[str], workdir: Path, *, environments: Sequence[Mapping[str, str]]
    ) -> None:
        """Start one process for each of `environments`, which share the cores equally, and wait until all are ready.

        `command` is an interpreter, a script and the options that say what to train.
        """
        self.name = name
        self.nvme_path = workdir / name
        self.nvme_path.mkdir(parents=True, exist_ok=True)
        self.log_paths = [workdir / f"{name}.{rank}.log" for rank in range(len(environments))]
        shared = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(environments))),
            # DeepSpeed runs `ninja` by name.
            "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.processes = []
        for path, environment in zip(self.log_paths, environments, strict=True):
            with path.open("w") as log:
                process = subprocess.Popen(
                    [*command, "--worker", name, "--nvme-path", str(self.nvme_path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **shared, **environment},
                )
            self.processes.append(process)
        try:
            self.version: str = self._answers()[0]["version"]
        except ContenderError:
            self.close()
            raise

    def take_turn(self, num_steps: int) -> Turn:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{num_steps}\n")
            process.stdin.flush()
        return Turn.of(self._answers())

    def drive_s(self, *, num_warmup: int) -> list[float]:
        """Return the least time that each timed step of ours needs for its file traffic (of the first rank), but that
        of the last, whose record is still open; for other frameworks nothing."""
        path = self.nvme_path / RUN_DIR / "steps.jsonl"
        lines = path.read_text().splitlines()[num_warmup:] if path.exists() else []
        lanes_s = [json.loads(line)["lanes_s"] for line in lines]
        return [max((s for lane, s in lanes.items() if "nvme" in lane), default=0.0) for lanes in lanes_s]

    def close(self) -> None:
        """End the processes, by force where they do not."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self.processes:
            try:
                process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.nvme_path, ignore_errors=True)

    def _answers(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                tails = ["\n".join(path.read_text().splitlines()[-30:]) for path in self.log_paths]
                raise ContenderError(f"{self.name} ended:\n" + "\n---\n".join(tails))
            answers.append(json.loads(line))
        return answers


@dataclass
class Result:
    """The result of one contender: samples and peaks of its timed turns, losses of all."""

    version: str = ""
    step_s: list[float] = field(default_factory=list)
    cores_s: list[float] = field(default_factory=list)
    drive_s: list[float] = field(default_factory=list)  # of offloadzero's timed steps
    losses: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    shared_bytes: int = 0

    def add(self, turn: Turn, *, is_warmup: bool = False) -> None:
        if not is_warmup:
            self.step_s.append(turn.step_s)
            self.cores_s.append(turn.cores_s)
        self.losses += turn.losses
        self.peak_rss_bytes = max(self.peak_rss_bytes, turn.peak_rss_bytes)
        self.shared_bytes = max(self.shared_bytes, turn.shared_bytes)

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def bound_s(self) -> float:
        """The least time that the cores, and for offloadzero the drive, allow a step."""
        return max(statistics.median(self.cores_s), statistics.median(self.drive_s or [0.0]))


Start = Callable[[str], Contender]
Report = Callable[[dict[str, Result], list[str]], str]  # is given the lines on machine and versions, too


def measure(args: argparse.Namespace, start: Start) -> dict[str, Result]:
    """Measure contenders that all live at once and take turns, after the warm-up of all."""
    results: dict[str, Result] = {}
    contenders: list[Contender] = []
    try:
        for name in args.contenders:
            contender = start(name)
            contenders.append(contender)
            results[name] = Result(contender.version)
            results[name].add(contender.take_turn(args.warmup), is_warmup=True)
            print(f"{name}: {args.warmup} warm-up steps done", flush=True)
            expect_memory(name)
        for round_number in range(1, args.rounds + 1):
            for contender in shuffled(contenders, round_number):
                turn = contender.take_turn(args.steps)
                results[contender.name].add(turn)
                print(
                    f"round {round_number}/{args.rounds} {contender.name}: {turn.step_s:.2f} s/step",
                    flush=True,
                )
        for contender in contenders:
            results[contender.name].drive_s += contender.drive_s(num_warmup=args.warmup)
    finally:
        for contender in contenders:
            contender.close()
    return results


def shuffled(contenders: Sequence[T], round_number: int) -> list[T]:
    """Return the contenders in another order in each round: a drive is slower after one that has written to it."""
    return random.Random(round_number).sample(contenders, len(contenders))


def measure_restarted(args: argparse.Namespace, start: Start) -> dict[str, Result]:
    """Measure with one contender alive at a time, started anew and warmed up in every round."""
    results: dict[str, Result] = {}
    for round_number in range(1, args.rounds + 1):
        for name in shuffled(args.contenders, round_number):
            contender = start(name)
            try:
                result = results.setdefault(name, Result(contender.version))
                result.add(contender.take_turn(args.warmup), is_warmup=True)
                turn = contender.take_turn(args.steps)
                result.add(turn)
                result.drive_s += contender.drive_s(num_warmup=args.warmup)
            finally:
                contender.close()
            print(f"round {round_number}/{args.rounds} {name}: {turn.step_s:.2f} s/step", flush=True)
    return {name: results[name] for name in args.contenders}


def run(args: argparse.Namespace, start: Callable[[str, Path], Contender], report: Report) -> None:
    """Measure and write the report; `start` is given a contender's name and a directory for its files and logs."""
    if args.deepspeed_python is None:
        args.contenders = [name for name in args.contenders if not name.startswith("deepspeed")]
    args.nvme_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.nvme_path, prefix="side_by_side-") as folder:
        workdir = Path(folder)
        take_turns = measure_restarted if args.restart_workers else measure
        try:
            results = take_turns(args, lambda name: start(name, workdir))
        except ContenderError as error:
            sys.exit(str(error))
        text = re.sub(r"\n{3,}", "\n\n", report(results, environment_lines(results, workdir))) + "\n"
    args.output.write_text(text)
    print(text)


def expect_memory(name: str) -> None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if match is not None and int(match[1]) * 1024 < MIN_AVAILABLE_BYTES:
        raise ContenderError(
            f"less than {MIN_AVAILABLE_BYTES // MIB} MiB of memory left after {name}: "
            "use --restart-workers, or fewer --contenders"
        )


def free_port() -> int:
    """Return a port for a process group."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ---------------------------------------------------------------------------------------------------------
# The report.


def table(results: Mapping[str, Result], *, memory: str) -> str:
    """Return the figures as a table; `memory` is the title of the column of peak resident sets."""
    first = next(iter(results))
    lines = [
        f"| contender | median s/step | min - max | over {first} | bound s, over the step | {memory} | losses |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        losses = " ".join(f"{loss:.3f}" for loss in result.losses[:4])
        lines.append(
            f"| {name} | {result.median_s:.2f} | {min(result.step_s):.2f} - {max(result.step_s):.2f} "
            f"| {result.median_s / results[first].median_s:.2f} "
            f"| {result.bound_s:.2f}, {result.bound_s / result.median_s:.0%} "
            f"| {result.peak_rss_bytes / 1024**3:.2f} | {losses} |"
        )
    return "\n".join(lines)


def ratios(results: Mapping[str, Result], pairs: Sequence[tuple[str, str]]) -> str:
    """Return the ratios of the first of each pair of contenders to the second, where both ran."""
    lines = []
    for ours, theirs in pairs:
        if ours in results and theirs in results:
            a, b = results[ours], results[theirs]
            memory = a.peak_rss_bytes / b.peak_rss_bytes
            lines.append(f"- {ours} to {theirs}: {b.median_s / a.median_s:.2f}x steps/s, {memory:.2f}x RSS")
    return "\n".join(lines)


def agreement(results: Mapping[str, Result], *, num_steps: int = 5, tolerance: float = 0.05) -> str:
    """Say whether the first losses of all contenders differ by less than `tolerance` nats (bf16 rounding)."""
    columns = zip(*(result.losses[:num_steps] for result in results.values()), strict=True)
    if all(max(losses) - min(losses) < tolerance for losses in columns):
        return "The first losses of all contenders agree (same seed and data; rounding differs)."
    return "The first losses of all contenders DO NOT AGREE: the contenders do not do the same work."


def environment_lines(results: Mapping[str, Result], workdir: Path) -> list[str]:
    """Return date, hardware and versions."""
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    models = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    filesystem = subprocess.run(
        ["df", "--output=fstype", str(workdir)], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    versions = ", ".join(dict.fromkeys(result.version for result in results.values()))
    return [
        f"- date: {date.today().isoformat()}",
        f"- machine: {models[0] if models else platform.machine()}, {os.cpu_count()} cores, "
        f"{int(memory[1]) / 1024**2 if memory else 0:.0f} GiB, filesystem {filesystem}",
        f"- kernel: {platform.release()}; Python {platform.python_version()}; {versions}",
    ]


def command_line(args: argparse.Namespace) -> str:
    """Return the command of this run without the paths of this machine."""
    command = shlex.join(["python", *sys.argv])
    for path, name in ((args.deepspeed_python, "DEEPSPEED_PYTHON"), (ROOT, "."), (Path.home(), "~")):
        command = command.replace(str(path), name)
    return command


# ---------------------------------------------------------------------------------------------------------
# The options that all scripts have.


def parser(description: str | None, *, contenders: Sequence[str], output: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--contenders", nargs="+", choices=contenders, default=list(contenders))
    add("--deepspeed-python", help="interpreter that has deepspeed; without it, left out")
    add("--model", default="160m", help="a size of examples/gpt_model.py")
    add("--batch-size", type=int, default=4, help="of one micro batch, over all ranks")
    add("--seq-len", type=int, default=256)
    add("--micro-batches", type=int, default=1, help="per optimizer step")
    add("--clipping", type=float, default=1.0, help="0 for none")
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=4, help="timed steps per contender and round")
    add("--warmup", type=int, default=3, help="untimed steps after a contender starts")
    add("--restart-workers", action="store_true", help="one contender in memory at a time")
    add("--nvme-path", type=Path, default=Path("offload-files"), help="where files go")
    add("--output", type=Path, default=ROOT / "benchmarks" / output)
    add("--worker", choices=contenders, help=argparse.SUPPRESS)
    return options
