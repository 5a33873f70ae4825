"""`offloadzero bench nvme`: the phases of a run, in the time it was given."""

from __future__ import annotations

import argparse
import datetime
import errno
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from offloadzero.cli.bench import results
from offloadzero.cli.bench.points import (
    MIB,
    Point,
    SweepLimits,
    Traffic,
    chunk_elements,
    coarse_points,
    max_in_flight_bytes,
    medians_by_point,
    next_refinement,
    phase_ends,
    ranked,
    reference_point,
    sample_seconds,
)
from offloadzero.cli.bench.scratch import (
    ScratchFile,
    check_directories,
    check_space,
    ending_signals_raise,
    scratch_files,
)
from offloadzero.cli.bench.traffic import Bench, RandomMemory, Request, Sample, Shape, WriteAllowance
from offloadzero.cli.output import Progress, check_output, print_lines, read_seconds, save_json, size_text
from offloadzero.config.readers import read_num_bytes
from offloadzero.errors import AioError, ConfigError
from offloadzero.io.engine import AioBackend, AioEngine
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
_MAX_MEMORY_BYTES = 320 * MIB
_LARGEST_OPERATION = 16 * MIB
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
    parser.add_argument("--json", metavar="FILE", help="every sample, the machine and the results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OffloadError."""
    result = measure_paths(
        args.paths, size=args.size, time_text=args.time, write_limit=args.write_limit, json=args.json
    )
    print_lines(results.table(result))
    if args.json:
        save_json(args.json, result)
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
    try:
        with ending_signals_raise(), scratch_files(paths) as files:
            run = _Run(files, described, progress, started_s, size=num_bytes, time_s=time_s, limit=limit)
            run.measure()
    finally:
        progress.close()
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


class _Run:
    """The phases, one after the other."""

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
        self._backends, self._backend_words = available_backends()
        self._allowance = WriteAllowance(limit * len(files))
        self._allowance.held_bytes = int((limit - size) * len(files) * _SUSTAINED_SHARE)
        self._bench = Bench(
            files,
            in_memory=[entry["filesystem"] in MEMORY_FILESYSTEMS for entry in described],
            allowance=self._allowance,
            memory=RandomMemory(min(_MAX_MEMORY_BYTES, max(size, 3 * _LARGEST_OPERATION))),
            started_s=started_s,
        )
        self.samples: list[Sample] = []
        self._notes: list[str] = []
        self._shape = Shape(32 * MIB, MIB, 0, 200e6)
        # The time includes the work after the measurement: removing the files, and the table.
        self._ends_s = phase_ends(time_s - min(0.3, 0.15 * time_s), num_paths=len(files))
        self._end_s = 0.0  # of the present phase
        self._sample_s = 0.0

    def measure(self) -> None:
        self._begin("fill", "first write")
        self._fill()
        self._begin("coarse", "coarse sweep")
        self._coarse()
        self._begin("refine", "refinement")
        self._refine()
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
            "direct": [self._bench.direct_reasons.get(index, "unknown") for index in self._all],
            "allocated_bytes": self._allocated,
            "shape": self._shape._asdict(),
            "refused_points": [
                {**point.to_json(), "reason": reason} for point, reason in self._bench.refusals.items()
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
                path=self._files[0].path,
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
        most_threads = min(max(len(os.sched_getaffinity(0)), 2), 8)
        self._limits = SweepLimits(self._backends, in_flight, most_threads)

    def _preallocate(self, point: Point) -> None:
        """Preallocate as the NVMe tier does; a filesystem without that goes without."""
        with AioEngine(**point.to_json()) as engine:
            for file in self._files:
                file.check()
                try:
                    with engine.open(file.path) as opened:
                        opened.preallocate(self._size)
                except AioError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                        raise

    def _coarse(self) -> None:
        wanted = [(point, traffic) for point in coarse_points(self._limits) for traffic in _ORDER]
        left_s = self._end_s - self._elapsed_s()
        self._sample_s = sample_seconds(left_s, len(wanted), time_s=self._time_s)
        for point, traffic in wanted:
            if not self._fits():
                break
            self._take(traffic, point)

    def _refine(self) -> None:
        """Go uphill from the best point of each traffic, in turn, until none has an unmeasured neighbour."""
        is_moving = True
        while is_moving and self._fits():
            is_moving = False
            for traffic in _ORDER:
                scores = self._scores(traffic)
                refused = dict.fromkeys(self._bench.refusals, 0.0)
                point = next_refinement({**scores, **refused}, self._limits) if scores else None
                if point is not None and self._fits():
                    if self._take(traffic, point) is None and point not in self._bench.refusals:
                        return
                    is_moving = True

    def _confirm(self) -> None:
        """Measure the best of each traffic and the reference again and again in turn: their medians decide.

        Of mixed traffic these are the best two: one of them will be in the configuration.
        """
        candidates = ranked(self._scores(Traffic.MIXED))[:2]
        wanted = {
            traffic: dict.fromkeys([*ranked(scores)[:1], *candidates, reference_point(self._backends[0])])
            for traffic in _ORDER
            if (scores := self._scores(traffic))
        }
        self._rounds([partial(self._take, traffic, point) for traffic in wanted for point in wanted[traffic]])

    def _scaling(self) -> None:
        """Measure each path alone and all together, at the point that will be recommended.

        A path without the others, or the others without it, says nothing: the first round ends in the time of the
        later phase if it must.
        """
        point = results.chosen_point(self.samples, self._backends)
        groups = [*((index,) for index in self._all), self._all]
        takes = [partial(self._take, traffic, point, paths=paths) for traffic in _ORDER for paths in groups]
        self._end_s = self._ends_s["sustained"]
        self._rounds(takes, num_rounds=1)
        if not self._fits():
            self._notes.append("the paths were compared in less than one round: --time raises it")
        self._end_s = self._ends_s["scaling"]
        self._rounds(takes)

    def _sustained(self) -> None:
        """Write continuously for the rest of the time and of the allowance."""
        if self._allowance.left_bytes < self._shape.operation_bytes * 2:
            self._notes.append("writes of the sweep ended early at the write limit: --write-limit raises it")
        self._allowance.held_bytes = 0
        scores = self._scores(Traffic.WRITE)
        seconds = self._end_s - self._elapsed_s()
        if scores and seconds >= self._sample_s:
            # The drain and the last fdatasync are part of the time, too.
            seconds -= min(0.5, seconds / 4)
            self._take(Traffic.WRITE, ranked(scores)[0], seconds=seconds, with_timeline=True)

    # --- Samples ---

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
        """Measure in the present phase, and keep the sample."""
        request = Request(
            phase=self._phase,
            traffic=traffic,
            point=point,
            paths=self._all if paths is None else paths,
            seconds=self._sample_s if seconds is None else seconds,
            deadline_s=self._started_s + self._end_s,
            max_bytes=max_bytes,
            with_timeline=with_timeline,
        )
        sample = self._bench.sample(request, self._shape)
        if sample is not None:
            self.samples.append(sample)
            self._progress.tick(
                f"{sample.traffic} {point.backend} {size_text(point.block_size)} x {point.queue_depth}: "
                f"{sample.bytes_per_s / 1e9:.2f} GB/s"
            )
        return sample

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
