"""`offloadzero bench nvme`: the phases of a run, in the time it was given."""

from __future__ import annotations

import argparse
import datetime
import errno
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offloadzero.cli.bench import results
from offloadzero.cli.bench.results import (
    chunk_elements,
    coarse_points,
    max_in_flight_bytes,
    medians_by_point,
    phase_ends,
    ranked,
    reference_point,
    sample_seconds,
)
from offloadzero.cli.bench.traffic import (
    MIB,
    NUM_CHUNKS_IN_FLIGHT,
    STATE_BYTES_PER_PARAM,
    Point,
    RandomMemory,
    Sample,
    ScratchFile,
    Traffic,
    Workload,
    WriteAllowance,
    buckets,
    chunk_segments,
    pump,
)
from offloadzero.cli.output import Progress, check_output, read_seconds, show_result
from offloadzero.config.readers import read_num_bytes
from offloadzero.errors import AioError, ConfigError
from offloadzero.io.engine import AioBackend, AioEngine, AioFile
from offloadzero.observe.texts import size_text
from offloadzero.planning.machine import (
    MEMORY_FILESYSTEMS,
    describe_machine,
    describe_path,
    describe_versions,
)

MIN_SIZE = 16 * MIB
MIN_TIME_S = 1.0
WRITE_LIMIT_FACTOR = 32
_SUSTAINED_SHARE = 0.35  # of the bytes that may be written: kept for the phase after the sweep
_CONFIRM_SHARE = 0.5  # of those of the sweep
_MAX_MEMORY_BYTES = 320 * MIB
_LARGEST_OPERATION = 16 * MIB
_FREE_MARGIN_BYTES, _FREE_MARGIN_SHARE = 1024 * MIB, 0.05
_ORDER = (Traffic.MIXED, Traffic.READ, Traffic.WRITE)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "nvme",
        help="what a drive gives, at which setting, and the config block that uses it",
        description="Measures sequential reads and writes and the mixed traffic of an optimizer step on files "
        "of its own in each PATH, finds the best setting of the file engine, and prints the config block.",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a directory on each drive to measure")
    parser.add_argument("--size", default="4GiB", help="size of the file in each PATH (default 4GiB)")
    parser.add_argument("--time", default="60s", help="how long it may take: 60s, 2min (default 60s)")
    parser.add_argument(
        "--write-limit",
        metavar="SIZE",
        help=f"write no more than this to each PATH (default {WRITE_LIMIT_FACTOR} times --size)",
    )
    parser.add_argument("--json", metavar="FILE", help="everything, - for standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    result = measure_paths(
        args.paths, size=args.size, time_text=args.time, write_limit=args.write_limit, json=args.json
    )
    show_result(results.table(result), args.json, result)
    return 0


def measure_paths(
    paths: Sequence[str],
    *,
    size: str,
    time_text: str,
    write_limit: str | None = None,
    json: str | None = None,
) -> dict[str, Any]:
    """Do the whole run; the result is the content of --json. Raises AioError, ConfigError."""
    started_s = time.monotonic()
    if not paths:
        raise ConfigError("PATH", None, "name a directory of the drive to measure")
    # The size is a whole number of operations of every size that the sweep uses.
    num_bytes = read_num_bytes("--size", size, minimum=MIN_SIZE) // MIN_SIZE * MIN_SIZE
    time_s = read_seconds("--time", time_text, minimum=MIN_TIME_S)
    limit = WRITE_LIMIT_FACTOR * num_bytes
    if write_limit is not None:
        limit = read_num_bytes("--write-limit", write_limit, minimum=num_bytes)
    check_directories(paths)
    check_space(paths, num_bytes)
    check_output("--json", json)
    progress = Progress(time_s)
    progress.say(
        f"Writes at most {size_text(limit)} to each of {', '.join(paths)}, into one "
        f"file of {size_text(num_bytes)} that is removed at the end."
    )
    began = datetime.datetime.now(datetime.timezone.utc)
    described = [describe_path(path) for path in paths]
    machine = describe_machine()  # before the run's own load
    with ExitStack() as stack:
        files = [stack.enter_context(closing(ScratchFile(path))) for path in paths]
        run = _Run(files, described, progress, started_s, size=num_bytes, time_s=time_s, limit=limit)
        run.measure()
    result = {
        "format": results.FORMAT,
        "format_version": results.FORMAT_VERSION,
        "started_at": began.isoformat(timespec="seconds"),
        "duration_s": time.monotonic() - started_s,
        "arguments": {
            "paths": list(paths),
            "size_bytes": num_bytes,
            "time_s": time_s,
            "write_limit_bytes": limit * len(paths),
        },
        "machine": machine,
        "versions": describe_versions("offloadzero", "torch", "numpy", "aiofiles"),
        "paths": described,
        **run.to_json(),
    }
    return {**result, **results.conclude(result, run.samples)}


def available_backends() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the backends that work here, the one AUTO takes first, and a comment on each; ConfigError for none."""
    words: dict[str, str] = {}
    for backend in (AioBackend.IO_URING, AioBackend.NATIVE_AIO, AioBackend.AIOFILES):
        try:
            AioEngine(backend=backend.value).close()
            words[backend.value] = "available"
        except ConfigError as error:
            words[backend.value] = error.allowed
    names = tuple(name for name, word in words.items() if word == "available")
    if not names:
        raise ConfigError("backend", "auto", "no file engine works here: " + "; ".join(words.values()))
    return names, words


# --- Checks beforehand ---


def check_directories(paths: Sequence[str]) -> None:
    """Raise ConfigError unless each can be written to and lies on a drive of its own.

    Two directories of one drive would be measured as two drives. Filesystems in memory are no drives: there only the
    same directory may not be named twice.
    """
    directories: dict[tuple[int, int], str] = {}
    drives: dict[object, str] = {}
    for path in paths:
        if not Path(path).is_dir():
            what = "exists and is no directory" if os.path.lexists(path) else "does not exist"
            raise ConfigError("PATH", path, f"{what}: name a directory on a drive")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError("PATH", path, "the directory is not writable")
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in directories:
            raise ConfigError("PATH", path, f"is the same directory as {directories[identity]!r}")
        directories[identity] = path
        described = describe_path(path)
        if described["filesystem"] in MEMORY_FILESYSTEMS:
            continue
        drive = described["device"]["name"] if described["device"] else status.st_dev
        if drive in drives:
            other = drives[drive]
            raise ConfigError(
                "PATH", path, f"is on the same drive as {other!r}, which would count as two: name one"
            )
        drives[drive] = path


def check_space(paths: Sequence[str], num_bytes: int) -> None:
    """Raise ConfigError unless each filesystem has room for its files of `num_bytes` and keeps a margin.

    The margin is 5 % of the filesystem, 1 GiB at most.
    """
    wanted: dict[int, list[str]] = {}
    for path in paths:
        wanted.setdefault(os.stat(path).st_dev, []).append(path)
    for members in wanted.values():
        space = os.statvfs(members[0])
        margin = min(int(space.f_blocks * space.f_frsize * _FREE_MARGIN_SHARE), _FREE_MARGIN_BYTES)
        free = space.f_bavail * space.f_frsize
        needed = num_bytes * len(members)
        if needed + margin > free:
            raise ConfigError(
                "--size",
                num_bytes,
                f"{', '.join(members)}: {needed / MIB:,.0f} MiB are needed and {margin / MIB:,.0f} MiB stay "
                f"free, but {free / MIB:,.0f} MiB are free",
            )


# --- The run ---


class Shape(NamedTuple):
    """The sizes of a run's operations, chosen once from the drive's speed."""

    max_in_flight_bytes: int
    operation_bytes: int
    chunk_elements: int
    rate_bps: float


class _Run:
    def __init__(
        self,
        files: Sequence[ScratchFile],
        described: Sequence[dict[str, Any]],
        progress: Progress,
        started_s: float,
        *,
        size: int,
        time_s: float,
        limit: int,
    ) -> None:
        self._files, self._size, self._time_s = files, size, time_s
        self._progress, self._started_s = progress, started_s
        self._all = tuple(range(len(files)))
        self._in_memory = [entry["filesystem"] in MEMORY_FILESYSTEMS for entry in described]
        self._backends, self._backend_words = available_backends()
        self._allowance = WriteAllowance(limit * len(files))
        self._sustained_bytes = int((limit - size) * len(files) * _SUSTAINED_SHARE)
        self._memory = RandomMemory(min(_MAX_MEMORY_BYTES, max(size, 3 * _LARGEST_OPERATION)))
        self._refusals: dict[Point, str] = {}
        self._direct_reasons: dict[int, str] = {}
        self.samples: list[Sample] = []
        self._notes: list[str] = []
        self._shape = Shape(32 * MIB, MIB, 0, 200e6)
        # The time includes the work after the measurement: giving the files back, and the table.
        self._ends_s = phase_ends(time_s - min(0.3, 0.15 * time_s), num_paths=len(files))
        self._end_s = 0.0  # of the present phase
        self._sample_s = 0.0
        self._share_bytes = 0  # what a sample of the present phase may write
        self._is_short = False

    def measure(self) -> None:
        self._begin("fill", "first write")
        self._fill()
        self._begin("coarse", "coarse sweep")
        self._coarse()
        self._begin("confirm", "confirmation")
        self._confirm()
        if len(self._files) > 1:
            self._begin("scaling", "striping")
            self._scaling()
        self._begin("sustained", "sustained write")
        self._sustained()
        if self._allowance.left_bytes < self._shape.operation_bytes * 2:
            self._notes.append("the sustained write ended early at the write limit: --write-limit raises it")

    def to_json(self) -> dict[str, Any]:
        for file in self._files:
            if file.num_bytes < self._size:
                self._notes.append(
                    f"{file.directory}: {size_text(file.num_bytes)} of {size_text(self._size)} could be written in "
                    "time; only that was used"
                )
        return {
            "bytes_written": self._allowance.used_bytes,
            "backends": self._backend_words,
            "direct": [self._direct_reasons.get(index, "unknown") for index in self._all],
            "allocated_bytes": self._allocated,
            "shape": self._shape._asdict(),
            "refused_points": [
                {**point.to_json(), "reason": reason} for point, reason in self._refusals.items()
            ],
            "notes": self._notes,
            "samples": [sample.to_json() for sample in self.samples],
        }

    def _begin(self, phase: str, title: str) -> None:
        self._phase, self._end_s = phase, self._ends_s[phase]
        self._progress.phase(title)

    # --- Phases ---

    def _fill(self) -> None:
        """Write the files for the first time: later reads have data, and the drive's speed is known."""
        point = reference_point(self._backends[0])
        self._preallocate(point)
        for file in self._files:
            file.num_bytes = self._size
        seconds, max_bytes = self._end_s - self._elapsed_s(), self._size * len(self._files)
        sample = self._take(Traffic.WRITE, point, seconds=seconds, max_bytes=max_bytes, with_timeline=True)
        if sample is None:
            raise AioError(
                operation="pwrite",
                path=self._files[0].directory,
                offset=0,
                num_bytes=MIB,
                errno=errno.ETIMEDOUT,
                detail="nothing could be written in time: give more --time",
            )
        for file in self._files:
            file.num_bytes = min(file.cursor, self._size)
            file.cursor = 0
            file.sync()
        smallest = min(file.num_bytes for file in self._files)
        if smallest < 8 * MIB:
            raise ConfigError(
                "--time", self._time_s, f"only {size_text(smallest)} could be written: give more"
            )
        self._allocated = [file.allocated_bytes for file in self._files]
        in_flight = max_in_flight_bytes(sample.bytes_per_s, smallest)
        operation_bytes = 4 * MIB if in_flight >= 64 * MIB else MIB
        chunk = chunk_elements(in_flight, smallest)
        self._shape = Shape(in_flight, operation_bytes, chunk, sample.bytes_per_s)

    def _preallocate(self, point: Point) -> None:
        """Preallocate as the NVMe tier does; a filesystem without that goes without."""
        with AioEngine(**point.to_json()) as engine:
            for file in self._files:
                try:
                    with file.open(engine) as opened:
                        opened.preallocate(self._size)
                except AioError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                        raise

    def _coarse(self) -> None:
        points = coarse_points(
            self._backends,
            max_in_flight_bytes=self._shape.max_in_flight_bytes,
            max_threads=max(len(os.sched_getaffinity(0)), 2),
        )
        wanted = [(point, traffic) for point in points for traffic in _ORDER]
        left_s = self._end_s - self._elapsed_s()
        self._sample_s = sample_seconds(left_s, len(wanted), time_s=self._time_s)
        sweep_bytes = self._allowance.limit_bytes - self._allowance.used_bytes - self._sustained_bytes
        self._allowance.held_bytes = self._sustained_bytes + int(sweep_bytes * _CONFIRM_SHARE)
        for point, traffic in self._share_writes(wanted):
            if not self._fits():
                break
            self._take(traffic, point)

    def _confirm(self) -> None:
        """Measure the best of each traffic and the reference again and again in turn: their medians decide.

        Of mixed traffic these are the best two: one of them will be in the configuration.
        """
        candidates = ranked(self._scores(Traffic.MIXED))[:2]
        wanted = {
            traffic: dict.fromkeys([reference_point(self._backends[0]), *ranked(scores)[:1], *candidates])
            for traffic in _ORDER
            if (scores := self._scores(traffic))
        }
        self._allowance.held_bytes = self._sustained_bytes
        pairs = [(point, traffic) for traffic in wanted for point in wanted[traffic]]
        num_rounds = (self._end_s - self._elapsed_s()) / (1.5 * self._sample_s * max(len(pairs), 1))
        shared = self._share_writes(pairs, num_rounds=max(int(num_rounds), 1))
        self._rounds([partial(self._take, traffic, point) for point, traffic in shared])

    def _scaling(self) -> None:
        """Measure each path alone and all together, at the point that will be recommended (the default where none is).

        A path without the others, or the others without it, says nothing: the first round ends in the time of the
        later phase if it must.
        """
        point = results.chosen_point(self.samples, self._backends) or reference_point(self._backends[0])
        groups = [*((index,) for index in self._all), self._all]
        takes = [partial(self._take, traffic, point, paths=paths) for traffic in _ORDER for paths in groups]
        self._share_writes([(point, traffic) for traffic in _ORDER for _ in groups])
        self._end_s = self._ends_s["sustained"]
        self._rounds(takes, num_rounds=1)
        if not self._fits():
            self._notes.append("the paths were compared in less than one round: --time raises it")
        self._end_s = self._ends_s["scaling"]
        self._rounds(takes)

    def _sustained(self) -> None:
        """Write continuously for the rest of the time and of the allowance."""
        if self._is_short:
            self._notes.append(
                "the write limit left no mixed or write samples of some settings: --write-limit raises it"
            )
        self._allowance.held_bytes = 0
        best = (*ranked(self._scores(Traffic.WRITE)), reference_point(self._backends[0]))[0]
        seconds = self._end_s - self._elapsed_s()
        if seconds >= self._sample_s:
            # The drain and the last fdatasync are part of the time, too.
            seconds -= min(0.5, seconds / 4)
            self._take(Traffic.WRITE, best, seconds=seconds, with_timeline=True)

    # --- Samples ---

    @property
    def _round_bytes(self) -> int:
        """What mixed traffic has in flight: each of its slots reads so much of this in a row, and then writes it."""
        return NUM_CHUNKS_IN_FLIGHT * STATE_BYTES_PER_PARAM * self._shape.chunk_elements

    def _share_writes(
        self, wanted: Sequence[tuple[Point, Traffic]], *, num_rounds: int = 1
    ) -> list[tuple[Point, Traffic]]:
        """Divide what may be written in this phase among its samples; return those that get enough to be counted.

        Mixed traffic decides: where not all can be had, only the reference is measured with writes alone, and then the
        last points go without.
        """
        left_bytes, needed_bytes = max(self._allowance.left_bytes, 0), 2 * self._round_bytes
        writers = [pair for pair in wanted if pair[1] is not Traffic.READ]
        if len(writers) * needed_bytes > left_bytes:
            self._is_short = True
            reference = (reference_point(self._backends[0]), Traffic.WRITE)
            mixed = [pair for pair in writers if pair[1] is Traffic.MIXED]
            writers = [*mixed, *(pair for pair in writers if pair == reference)][: left_bytes // needed_bytes]
        num_writers = max(len(writers), 1)
        num_rounds = max(min(num_rounds, left_bytes // (needed_bytes * num_writers)), 1)
        self._share_bytes = left_bytes // (num_rounds * num_writers)
        return [pair for pair in wanted if pair[1] is Traffic.READ or pair in writers]

    def _most_bytes(
        self, traffic: Traffic, seconds: float, *, is_cached: bool, is_shared: bool
    ) -> int | None:
        """Return how much a sample may move, 0 where its share of the allowance is spent; None: no limit."""
        most = []
        if (
            is_cached
        ):  # The page cache takes writes far faster than the drive: its content has to be written out.
            least = 2 * self._round_bytes if traffic is Traffic.MIXED else 0
            most.append(max(int(self._shape.rate_bps * seconds), least))
        if is_shared and traffic is not Traffic.READ:
            share = min(self._share_bytes, self._allowance.left_bytes)
            if share < 2 * self._round_bytes:
                return 0
            # As much is read as written, and the last batch may go beyond.
            most.append(share if traffic is Traffic.WRITE else 2 * share - self._round_bytes)
        return min(most, default=None)

    def _take(
        self,
        traffic: Traffic,
        point: Point,
        *,
        seconds: float | None = None,
        paths: tuple[int, ...] | None = None,
        max_bytes: int | None = None,
        with_timeline: bool = False,
    ) -> Sample | None:
        """Measure in the present phase, and keep the sample. Raises AioError when an operation fails.

        None: the engine refuses the point (see `_refusals`), nothing could be counted in time, or too little may still
        be written.
        """
        seconds, paths = self._sample_s if seconds is None else seconds, self._all if paths is None else paths
        try:
            engine = AioEngine(**point.to_json())
        except ConfigError as error:
            self._refusals[point] = error.allowed
            return None
        try:
            engine.register_parts(self._memory.bytes)  # as training does with its buffers
            opened = [self._files[index].open(engine) for index in paths]
            if engine.backend is not AioBackend.AIOFILES:  # files of that backend never are direct
                for index, file in zip(paths, opened, strict=True):
                    self._direct_reasons.setdefault(index, file.direct_reason)
            sample = self._measured(engine, opened, paths, traffic, point, seconds, max_bytes, with_timeline)
        finally:
            engine.close(cancel=True)
        if sample is not None:
            self.samples.append(sample)
            self._progress.tick(
                f"{sample.traffic} {point.backend} {size_text(point.block_size)} x {point.queue_depth}: "
                f"{sample.bytes_per_s / 1e9:.2f} GB/s"
            )
        return sample

    def _measured(
        self,
        engine: AioEngine,
        opened: Sequence[AioFile],
        paths: tuple[int, ...],
        traffic: Traffic,
        point: Point,
        seconds: float,
        max_bytes: int | None,
        with_timeline: bool,
    ) -> Sample | None:
        files = [self._files[index] for index in paths]
        handles = zip(paths, opened, strict=True)
        cached = [self._files[i] for i, handle in handles if not handle.direct and not self._in_memory[i]]
        for file in cached:
            file.sync(drop_cache=True)
        if max_bytes is None:
            max_bytes = self._most_bytes(
                traffic, seconds, is_cached=bool(cached), is_shared=not with_timeline
            )
            if max_bytes == 0:
                return None
        workload = self._workload(files, traffic, point)
        begun_s = time.monotonic()
        is_whole = bool(cached) or with_timeline
        count = pump(
            *(engine, opened, workload, self._allowance),
            seconds=seconds,
            deadline_s=self._started_s + self._end_s,
            max_bytes=max_bytes,
            is_counted_whole=is_whole,
        )
        sync_s = None
        if count.bytes_written and is_whole:  # until all of it is on stable storage
            sync_begun_s = time.monotonic()
            for handle in opened:
                handle.sync()
            sync_s = time.monotonic() - sync_begun_s
        if cached and count.is_running:
            count.end(time.monotonic())
        if not count.latencies_s or count.seconds <= 0.0:
            return None
        if traffic is Traffic.MIXED and not count.bytes_written:
            return None  # reads alone are not that traffic
        p50, p99 = np.percentile(count.latencies_s, (50, 99)).tolist()
        return Sample(
            phase=self._phase,
            traffic=traffic.value,
            point=point,
            paths=paths,
            direct=all(handle.direct for handle in opened),
            started_s=begun_s - self._started_s,
            seconds=count.seconds,
            bytes_read=count.bytes_read,
            bytes_written=count.bytes_written,
            operation_bytes=workload.operation_bytes,
            num_operations=len(count.latencies_s),
            latency_p50_s=p50,
            latency_p99_s=p99,
            latency_max_s=max(count.latencies_s),
            cpu_s=count.cpu_s,
            timeline=buckets(count.timeline) if with_timeline else (),
            sync_s=sync_s,
        )

    def _workload(self, files: Sequence[ScratchFile], traffic: Traffic, point: Point) -> Workload:
        operation_bytes = max(self._shape.operation_bytes, point.block_size)
        segments = [(0, operation_bytes)]
        # One more than fill the queue: the engine has the next at hand while Python handles the last.
        num_slots = -(-point.in_flight_bytes // operation_bytes) + 1
        if traffic is Traffic.MIXED:
            segments, num_slots = chunk_segments(self._shape.chunk_elements), NUM_CHUNKS_IN_FLIGHT
        return Workload(files, traffic, segments=segments, num_slots=num_slots, memory=self._memory)

    def _scores(self, traffic: Traffic) -> dict[Point, float]:
        swept = results.of_sweep(self.samples, traffic)
        return medians_by_point((sample.point, sample.bytes_per_s) for sample in swept)

    def _rounds(self, takes: Sequence[Callable[[], Sample | None]], num_rounds: int | None = None) -> None:
        """Do the calls in turn, round after round, until the phase is over or a round has no result."""
        for _ in itertools.count() if num_rounds is None else range(num_rounds):
            taken = 0
            for take in takes:
                if not self._fits():
                    return
                taken += take() is not None
            if not taken:
                return

    def _fits(self) -> bool:
        """Whether another sample ends in this phase."""
        return self._elapsed_s() + 1.3 * self._sample_s <= self._end_s

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s
