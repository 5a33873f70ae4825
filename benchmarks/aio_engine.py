"""The file engine against fio and DeepSpeed's aio handle, interleaved on one file and the same memory.

    python benchmarks/aio_engine.py --path DIRECTORY [--deepspeed-python PATH/bin/python] [--report FILE.md]

Virtual and shared drives change their speed from second to second, and on virtual machines even memory differs
in speed from page to page. So contenders take turns within a round, in a new order each round, on the same
physical memory (a file in /dev/shm that fio and the engine both map; DeepSpeed's locked tensors, which the
engine uses in the same process). The result is the median over the rounds of the ratio within a round.
Rounds in which the drive's counters show other traffic are repeated.

CPU time is that of the process in user and kernel mode (getrusage; fio's own figure for its job). Work that the
kernel does on its own threads is in no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import mmap
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from offloadzero.io.engine import AioEngine, AioFile, AioTicket  # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KINDS = ("read", "write", "mixed")
READ_PERCENT = 50  # of mixed traffic: a step reads 12 bytes per parameter on the drive, and writes them
OPERATION_SIZE = 16 * MIB  # of the engine: one segment of an update chunk (4M elements in fp32)
BARS = {"read": 0.97, "write": 0.97, "mixed": 0.95}
PAUSE_S = 0.2
MAX_FOREIGN = 1.03  # limit for the drive's bytes over those of the contenders
MAX_VOID_ROUNDS = 60


class Point(NamedTuple):
    block_size: int
    depth: int

    def __str__(self) -> str:
        size = f"{self.block_size // MIB} MiB" if self.block_size >= MIB else f"{self.block_size // KIB} KiB"
        return f"{size} / {self.depth}"


class Sample(NamedTuple):
    num_bytes: int
    gbps: float
    cpu_s_per_gb: float


Running = tuple[AioTicket, np.ndarray]

Contender = Callable[[str], Sample]
"""Moves `num_bytes` of "read", "write" or "mixed" traffic once."""


def is_read(kind: str, index: int) -> bool:
    """Whether the index-th operation is a read: of mixed traffic, every second one."""
    return kind == "read" or (kind == "mixed" and index % 2 == 0)


@contextlib.contextmanager
def measured(num_bytes: int) -> Iterator[list[Sample]]:
    """Append one sample of this process."""
    samples: list[Sample] = []
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    yield samples
    elapsed_s, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    samples.append(Sample(num_bytes, num_bytes / elapsed_s / 1e9, cpu_s / (num_bytes / 1e9)))


# --- The contenders ---


class SharedMemory:
    """Memory that another process can map too; fio removes the name it is given, so it gets a link."""

    def __init__(self, num_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="aio-engine-")
        self._path = Path(self._folder.name) / "memory"
        with self._path.open("wb") as file:
            file.truncate(num_bytes + MIB)
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.array = np.frombuffer(self._map, np.uint8)[:num_bytes]
        self.array[:] = np.random.default_rng(1).integers(0, 256, num_bytes, np.uint8)

    def link(self) -> Path:
        name = self._path.with_name("link")
        name.unlink(missing_ok=True)
        os.link(self._path, name)
        return name

    def close(self) -> None:
        self._folder.cleanup()


class Fio:
    """`fio --ioengine=io_uring --direct=1` on the file and the memory."""

    def __init__(self, path: Path, memory: SharedMemory, point: Point, num_bytes: int, *extra: str) -> None:
        self._path, self._memory, self._point, self._num_bytes = path, memory, point, num_bytes
        self._extra = extra

    def command(self, kind: str) -> list[str]:
        return [
            *("fio", "--name=point", f"--filename={self._path}", "--ioengine=io_uring", "--direct=1"),
            *([f"--rw={kind}"] if kind != "mixed" else ["--rw=rw", f"--rwmixread={READ_PERCENT}"]),
            *(f"--bs={self._point.block_size}", f"--iodepth={self._point.depth}"),
            *(f"--size={self._num_bytes}", f"--mem=mmapshared:{self._memory.link()}"),
            *("--output-format=json", *self._extra),
        ]

    def __call__(self, kind: str) -> Sample:
        done = subprocess.run(self.command(kind), capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        num_bytes = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        if job["error"] or num_bytes < 0.99 * self._num_bytes:
            raise RuntimeError(f"fio moved {num_bytes} bytes, error {job['error']}: {done.stderr}")
        elapsed_s = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Sample(num_bytes, num_bytes / elapsed_s / 1e9, cpu_s / (num_bytes / 1e9))


class Engine:
    """AioEngine on the same file and memory: operations of OPERATION_SIZE, twice the depth if memory allows."""

    def __init__(
        self,
        path: Path,
        memory: np.ndarray,
        point: Point,
        num_bytes: int,
        *,
        backend: str = "io_uring",
        is_registered: bool = True,
    ) -> None:
        num_operations = max(3, 2 * point.block_size * point.depth // OPERATION_SIZE)
        self._memory, self._num_bytes = memory[: num_operations * OPERATION_SIZE], num_bytes
        self.engine = AioEngine(backend=backend, block_size=point.block_size, queue_depth=point.depth)
        self._file: AioFile = self.engine.open(path)
        if is_registered and self.engine.register_parts(self._memory) < self._memory.nbytes:
            print(f"unregistered memory: {self.engine.buffers_reason}", file=sys.stderr)

    def __call__(self, kind: str) -> Sample:
        size = OPERATION_SIZE
        free = [self._memory[at : at + size] for at in range(0, len(self._memory), size)]
        running: list[Running] = []
        with measured(self._num_bytes) as samples:
            for index in range(self._num_bytes // size):
                if not free:
                    running[0][0].wait()
                    running = self._take_finished(running, free)
                memory = free.pop()
                move = self.engine.read if is_read(kind, index) else self.engine.write
                running.append((move(self._file, memory, offset=index * size), memory))
            for ticket, _ in running:
                ticket.wait()
        return samples[0]

    @staticmethod
    def _take_finished(running: list[Running], free: list[np.ndarray]) -> list[Running]:
        """Move the memory of finished operations to `free`; return the others."""
        still_running = []
        for ticket, memory in running:
            if ticket.done():
                ticket.wait()
                free.append(memory)
            else:
                still_running.append((ticket, memory))
        return still_running


# --- Taking turns ---


class Series(NamedTuple):
    """The samples of each contender, one per round."""

    samples: dict[str, list[Sample]]

    def gbps(self, name: str) -> float:
        return statistics.median(sample.gbps for sample in self.samples[name])

    def cpu_s_per_gb(self, name: str) -> float:
        return statistics.median(sample.cpu_s_per_gb for sample in self.samples[name])

    def ratio(self, name: str, reference: str) -> tuple[float, float, float]:
        """Return lower quartile, median and upper quartile over the rounds of the throughput ratio."""
        pairs = zip(self.samples[name], self.samples[reference], strict=True)
        ratios = [ours.gbps / theirs.gbps for ours, theirs in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return low, middle, high

    def cpu_ratio(self, name: str, reference: str) -> float:
        pairs = zip(self.samples[name], self.samples[reference], strict=True)
        return statistics.median(ours.cpu_s_per_gb / theirs.cpu_s_per_gb for ours, theirs in pairs)


def drive_bytes(path: Path) -> int | None:
    """Return the bytes that the drive under `path` has moved since the start of the machine; None if not counted."""
    device = path.stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not counters.exists():
        return None
    fields = counters.read_text().split()
    return 512 * (int(fields[2]) + int(fields[6]))


def take_turns(contenders: dict[str, Contender], kind: str, path: Path, num_rounds: int) -> Series:
    """Run each contender once per round, in a new order each round.

    A round in which the drive had other traffic is void and repeated, up to MAX_VOID_ROUNDS times.
    """
    rng = random.Random(0)
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    num_void = 0
    while len(next(iter(samples.values()))) < num_rounds:
        order = list(contenders)
        rng.shuffle(order)
        before, moved = drive_bytes(path), {}
        for name in order:
            time.sleep(PAUSE_S)
            moved[name] = contenders[name](kind)
        after, own = drive_bytes(path), sum(sample.num_bytes for sample in moved.values())
        is_void = before is not None and after is not None and after - before > own * MAX_FOREIGN
        if is_void and num_void < MAX_VOID_ROUNDS:
            num_void += 1
            continue
        for name, sample in moved.items():
            samples[name].append(sample)
    if num_void:
        print(f"{num_void} rounds repeated: others used the drive", file=sys.stderr)
    return Series(samples)


# --- Against fio ---


def best_point(path: Path, memory: SharedMemory, num_bytes: int) -> Point:
    """Find the best point of a small sweep, by the geometric mean of reading and writing."""
    points = [Point(size, depth) for size in (256 * KIB, MIB, 4 * MIB) for depth in (8, 16, 32)]
    scores: dict[Point, float] = {}
    for point in points:
        runner = Engine(path, memory.array, point, num_bytes)
        medians = [statistics.median(runner(kind).gbps for _ in range(3)) for kind in ("read", "write")]
        runner.engine.close()
        scores[point] = math.sqrt(medians[0] * medians[1])
        print(f"sweep {point}: read {medians[0]:.2f}, write {medians[1]:.2f} GB/s", file=sys.stderr)
    return max(scores, key=lambda point: scores[point])


def fio_section(path: Path, memory: SharedMemory, num_bytes: int, num_rounds: int) -> list[str]:
    first = Point(MIB, 32)
    points = {first: "", best_point(path, memory, num_bytes): " (best of the sweep)"}
    lines = ["## Against fio (io_uring, direct)", ""]
    for point, note in points.items():
        lines += [f"### Block size / depth {point}{note}", "", *TABLE_HEAD]
        contenders: dict[str, Contender] = {
            "fio": Fio(path, memory, point, num_bytes),
            "fio, fixed": Fio(path, memory, point, num_bytes, "--fixedbufs", "--registerfiles"),
            "engine": Engine(path, memory.array, point, num_bytes),
            "engine, unregistered": Engine(path, memory.array, point, num_bytes, is_registered=False),
        }
        for kind in KINDS:
            series = take_turns(contenders, kind, path, num_rounds)
            lines += [table_row(kind, name, series, "fio") for name in contenders]
            low, ratio, high = series.ratio("engine", "fio")
            cpu_ratio = series.cpu_ratio("engine", "fio")
            verdict = "met" if ratio >= BARS[kind] and cpu_ratio <= 1 else "MISSED"
            print(f"{point} {kind}: {ratio:.3f} [{low:.3f}, {high:.3f}], CPU {cpu_ratio:.2f}: {verdict}")
            print(f"  over fio, fixed: {series.ratio('engine', 'fio, fixed')[1]:.3f}")
        lines.append("")
        for contender in contenders.values():
            if isinstance(contender, Engine):
                contender.engine.close()
    return lines


TABLE_HEAD = [
    "| traffic | contender | GB/s | over fio: median [quartiles] | CPU s/GB | CPU over fio |",
    "| --- | --- | --- | --- | --- | --- |",
]


def table_row(kind: str, name: str, series: Series, reference: str) -> str:
    gbps, cpu_s = series.gbps(name), series.cpu_s_per_gb(name)
    if name == reference:
        return f"| {kind} | {name} | {gbps:.2f} | 1 | {cpu_s:.4f} | 1 |"
    low, ratio, high = series.ratio(name, reference)
    cpu_ratio = series.cpu_ratio(name, reference)
    return (
        f"| {kind} | {name} | {gbps:.2f} | {ratio:.3f} [{low:.3f}, {high:.3f}] "
        f"| {cpu_s:.4f} | {cpu_ratio:.2f} |"
    )


# --- The engine's own ways ---

WAYS: dict[str, tuple[str, bool]] = {
    "io_uring, buffers registered": ("io_uring", True),
    "io_uring, buffers not registered": ("io_uring", False),
    "native AIO": ("native_aio", False),
}


def ways_section(path: Path, memory: SharedMemory, num_rounds: int) -> list[str]:
    lines = ["## The engine's ways", "", "Ratios over the first line, within rounds.", ""]
    for point, num_bytes in {Point(4 * KIB, 64): 128 * MIB, Point(MIB, 32): GIB}.items():
        lines += [f"### Block size / depth {point}", "", *WAYS_HEAD]
        contenders: dict[str, Contender] = {
            name: Engine(path, memory.array, point, num_bytes, backend=backend, is_registered=is_registered)
            for name, (backend, is_registered) in WAYS.items()
        }
        reference = next(iter(WAYS))
        all_series = {kind: take_turns(contenders, kind, path, num_rounds) for kind in ("read", "write")}
        for name in WAYS:
            cells = [name]
            for series in all_series.values():
                ratio, cpu_s = series.ratio(name, reference)[1], series.cpu_s_per_gb(name)
                per_block_us = cpu_s * point.block_size / 1e9 * 1e6
                cells.append(f"{series.gbps(name):.2f} ({ratio:.2f})")
                cells.append(f"{cpu_s:.4f} ({per_block_us:.1f} us)")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
        for contender in contenders.values():
            contender.engine.close()  # type: ignore[attr-defined]
    return lines


WAYS_HEAD = [
    "| way | read GB/s | CPU s/GB (per block) | write GB/s | CPU s/GB (per block) |",
    "| --- | --- | --- | --- | --- |",
]


# --- Against DeepSpeed, in its interpreter ---


class Task(NamedTuple):
    """Tensors that are moved together."""

    name: str
    num_tensors: int
    num_bytes: int  # of each
    bar: float
    block_sizes: tuple[int, ...]  # that either side may choose from


TASKS = (
    Task("one tensor of 1 GiB", 1, GIB, 1.0, (MIB, 4 * MIB)),
    Task("1,000 tensors of 1 MiB", 1000, MIB, 1.5, (MIB,)),
)
HANDLE_DEPTH = 32  # of each of its threads
HANDLES = [(overlap, threads) for overlap in (True, False) for threads in (1, 2, 4)]


class DeepSpeedHandle:
    """DeepSpeed's aio handle: every tensor submitted, then one wait() for all of them."""

    def __init__(
        self, path: Path, tensors: list[Any], overlap: bool, num_threads: int, block_size: int = MIB
    ) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

        handle_type = AsyncIOBuilder().load(verbose=False).aio_handle
        self.handle = handle_type(block_size, HANDLE_DEPTH, False, overlap, num_threads)
        self.num_threads = num_threads
        self.path, self.tensors = str(path), tensors

    def __call__(self, kind: str) -> Sample:
        size = self.tensors[0].numel() if self.tensors else 0
        move = self.handle.async_pread if kind == "read" else self.handle.async_pwrite
        with measured(size * len(self.tensors)) as samples:
            for index, tensor in enumerate(self.tensors):
                if move(tensor, self.path, index * size) != 0:
                    raise RuntimeError(f"DeepSpeed refused tensor {index}")
            if self.handle.wait() != len(self.tensors):
                raise RuntimeError("DeepSpeed lost a tensor")
        return samples[0]


class EngineTask:
    """AioEngine on the same tensors: every tensor submitted, then a wait for each."""

    def __init__(self, path: Path, tensors: list[Any], queue_depth: int, block_size: int) -> None:
        self.engine = AioEngine(backend="io_uring", queue_depth=queue_depth, block_size=block_size)
        self.file, self.tensors = self.engine.open(path), tensors
        is_registered = [self.engine.register_parts(tensor) == tensor.nbytes for tensor in tensors]
        if not all(is_registered):
            print(f"unregistered memory: {self.engine.buffers_reason}", file=sys.stderr)

    def __call__(self, kind: str) -> Sample:
        size = self.tensors[0].numel()
        move = self.engine.read if kind == "read" else self.engine.write
        with measured(size * len(self.tensors)) as samples:
            tickets = [
                move(self.file, tensor, offset=index * size) for index, tensor in enumerate(self.tensors)
            ]
            for ticket in tickets:
                ticket.wait()
        return samples[0]


def deepspeed_worker(path: Path, num_rounds: int, answer: Path) -> None:
    """Write the section's lines as JSON. Runs in DeepSpeed's interpreter."""
    import deepspeed  # type: ignore[import-not-found]
    import torch

    lines = [
        f"DeepSpeed {deepspeed.__version__} on its own locked tensors, depth {HANDLE_DEPTH} per",
        "thread: with one thread (overlap_events on), and the fastest of its handles (overlap_events on and off,",
        "1, 2 and 4 threads; for the one tensor blocks of 1 and 4 MiB), which is the reference. The engine in the",
        "same process on the same tensors, registered, one thread: at its defaults (1 MiB, depth 32), with the",
        "larger blocks, and as deep as all threads of that handle.",
        "",
        TABLE_HEAD[0].replace("fio", "DeepSpeed").replace("traffic", "task"),
        TABLE_HEAD[1],
    ]
    for task in TASKS:
        keeper = DeepSpeedHandle(path, [], True, 1)
        example = torch.empty(0, dtype=torch.uint8)
        tensors = [
            keeper.handle.new_cpu_locked_tensor(task.num_bytes, example) for _ in range(task.num_tensors)
        ]
        for tensor in tensors:
            tensor.fill_(7)
        for kind in ("read", "write"):
            lines += deepspeed_rows(path, tensors, kind, task, num_rounds)
        for tensor in tensors:
            keeper.handle.free_cpu_locked_tensor(tensor)
    answer.write_text(json.dumps(lines))


def deepspeed_rows(path: Path, tensors: list[Any], kind: str, task: Task, num_rounds: int) -> list[str]:
    best = best_handle(path, tensors, kind, task)
    depth = HANDLE_DEPTH * best.num_threads
    engines = {}
    for block_size in task.block_sizes:
        point = Point(block_size, HANDLE_DEPTH)
        engines[f"engine, {point}"] = EngineTask(path, tensors, HANDLE_DEPTH, block_size)
    if depth > HANDLE_DEPTH:
        point = Point(MIB, depth)
        engines[f"engine, {point}"] = EngineTask(path, tensors, depth, MIB)
    contenders: dict[str, Contender] = {
        "DeepSpeed, best": best,
        "DeepSpeed, 1 thread": DeepSpeedHandle(path, tensors, True, 1),
        **engines,
    }
    series = take_turns(contenders, kind, path, num_rounds)
    for name, engine in engines.items():
        engine.engine.close()
        ratios = [series.ratio(name, other)[1] for other in ("DeepSpeed, best", "DeepSpeed, 1 thread")]
        verdict = ["met" if ratio >= task.bar else "MISSED" for ratio in ratios]
        print(
            f"{kind}, {task.name}, {name}: {ratios[0]:.3f} x its best ({verdict[0]}), "
            f"{ratios[1]:.3f} x its one thread ({verdict[1]})",
            flush=True,
        )
    return [table_row(f"{kind}, {task.name}", name, series, "DeepSpeed, best") for name in contenders]


def best_handle(path: Path, tensors: list[Any], kind: str, task: Task) -> DeepSpeedHandle:
    """Return the fastest of HANDLES in three interleaved turns."""
    handles = {
        f"overlap {overlap}, threads {threads}, block size {size}": DeepSpeedHandle(
            path, tensors, overlap, threads, size
        )
        for overlap, threads in HANDLES
        for size in task.block_sizes
    }
    series = take_turns(dict(handles), kind, path, 3)
    name = max(handles, key=series.gbps)
    print(f"DeepSpeed's best for {kind}: {name}, {series.gbps(name):.2f} GB/s", flush=True)
    return handles[name]


def deepspeed_section(python: str, path: Path, num_rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "lines.json"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"  # its ninja
        command = [
            python,
            __file__,
            "--worker",
            str(answer),
            "--path",
            str(path),
            "--rounds",
            str(num_rounds),
        ]
        subprocess.run(command, env=environment, check=True)
        return ["## Against DeepSpeed's aio handle", "", *json.loads(answer.read_text()), ""]


# --- The report ---


def filesystem_of(path: Path) -> str:
    """Return type and mount point, from /proc/mounts."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [m for m in mounts if path.resolve().is_relative_to(m[1])]
    device, _, kind = max(inside, key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


def environment_lines(path: Path) -> list[str]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else platform.machine()
    fio = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return [
        f"- date: {datetime.date.today()}",
        f"- machine: {os.cpu_count()} x {cpu}, {memory_gib:.0f} GiB; load before: {os.getloadavg()[0]:.1f}",
        f"- kernel: {platform.system()} {platform.release()}; filesystem: {filesystem_of(path)}",
        f"- {fio}; Python {platform.python_version()}; numpy {np.__version__}",
    ]


@contextlib.contextmanager
def filled_file(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Make a new file, written from end to end (reads of holes would touch no drive); removed afterwards."""
    if shutil.disk_usage(folder).free < 2 * num_bytes:
        raise SystemExit(f"{folder}: less than {2 * num_bytes} bytes are free")
    descriptor, name = tempfile.mkstemp(dir=folder, prefix="aio-engine-")
    try:
        chunk = np.random.default_rng(2).integers(0, 256, 16 * MIB, np.uint8).tobytes()
        for at in range(0, num_bytes, len(chunk)):
            os.pwrite(descriptor, chunk, at)
        os.fsync(descriptor)
        yield Path(name)
    finally:
        os.close(descriptor)
        os.unlink(name)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The file engine against fio and DeepSpeed's aio handle.")
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on the drive")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gib", type=int, default=1, help="GiB per sample against fio")
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--sections", default="fio,ways,deepspeed")
    parser.add_argument("--report", type=Path, help="where the tables go (standard output too)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        deepspeed_worker(arguments.path, arguments.rounds, arguments.worker)
        return
    sections = arguments.sections.split(",")
    command = " ".join(["python", "benchmarks/aio_engine.py", f"--rounds {arguments.rounds}"])
    num_bytes = arguments.gib * GIB
    lines = ["# The file engine, measured", "", *environment_lines(arguments.path)]
    lines += [f"- command: `{command} --gib {arguments.gib} --sections {arguments.sections}`", ""]
    with filled_file(arguments.path, max(num_bytes, GIB)) as path:
        memory = SharedMemory(128 * MIB)
        try:
            if "fio" in sections:
                lines += fio_section(path, memory, num_bytes, arguments.rounds)
            if "ways" in sections:
                lines += ways_section(path, memory, arguments.rounds)
        finally:
            memory.close()
        if "deepspeed" in sections and arguments.deepspeed_python:
            lines += deepspeed_section(arguments.deepspeed_python, path, arguments.rounds)
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
