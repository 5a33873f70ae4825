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

from offloadzero.cli import nvme_report
from offloadzero.cli.fio import fio_version, run_fio
from offloadzero.cli.nvme_sweep import (
    MIB,
    Point,
    Schedule,
    SweepLimits,
    Traffic,
    best,
    chunk_elements,
    coarse_points,
    finalists,
    max_in_flight_bytes,
    medians_by_point,
    next_refinement,
    plan_schedule,
    reference_point,
    sample_seconds,
)
from offloadzero.cli.nvme_traffic import Bench, RandomMemory, Request, Sample, Shape, WriteAllowance
from offloadzero.cli.output import check_output, print_lines, save_json
from offloadzero.cli.progress import Progress
from offloadzero.cli.scratch import (
    ScratchFile,
    check_directories,
    check_space,
    ending_signals_raise,
    scratch_files,
)
from offloadzero.cli.units import read_seconds, size_text
from offloadzero.config.parse import read_num_bytes
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
# The shares of the bytes that may be written which are kept for the phases after the sweep.
_SUSTAINED_SHARE = 0.35
_FIO_SHARE = 0.35
_MAX_MEMORY_BYTES = 320 * MIB
_LARGEST_OPERATION = 16 * MIB


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
    parser.add_argument(
        "--plot", metavar="FILE.png", help="throughput over block size and depth (matplotlib)"
    )
    parser.add_argument("--verify-with-fio", action="store_true", help="the same points by fio, interleaved")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), help="two results side by side; measures nothing"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OffloadError."""
    if args.compare:
        if args.paths:
            raise ConfigError("PATH", args.paths[0], "--compare measures nothing: leave PATH out")
        print_lines(nvme_report.compare_files(*args.compare))
        return 0
    if not args.paths:
        raise ConfigError("PATH", None, "name a directory of the drive to measure")
    started_s = time.monotonic()
    settings = _Settings(args)
    with ending_signals_raise():
        result = measure(settings, started_s)
    print_lines(nvme_report.table(result))
    if args.json:
        save_json(args.json, result)
    if args.plot:
        from offloadzero.cli.nvme_plot import plot

        plot(result, args.plot)
    return 0


def measure_paths(paths: Sequence[str], *, num_bytes: int, time_s: float, write_limit: int) -> dict[str, Any]:
    """Do a run over files of `num_bytes` as the command does, without printing its table. Raises OffloadError."""
    arguments = argparse.Namespace(
        paths=list(paths),
        size=str(num_bytes),
        time=f"{time_s:.3f}s",
        write_limit=str(write_limit),
        json=None,
        plot=None,
        verify_with_fio=False,
    )
    started_s = time.monotonic()
    with ending_signals_raise():
        return measure(_Settings(arguments), started_s)


class _Settings:
    """The arguments, checked before anything is written. Raises ConfigError."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.paths: list[str] = args.paths
        # The size is a whole number of operations of every size that the sweep uses.
        self.size = read_num_bytes("--size", args.size, minimum=MIN_SIZE) // MIN_SIZE * MIN_SIZE
        self.time_s = read_seconds("--time", args.time, minimum=MIN_TIME_S)
        self.write_limit = WRITE_LIMIT_FACTOR * self.size
        if args.write_limit is not None:
            self.write_limit = read_num_bytes("--write-limit", args.write_limit, minimum=self.size)
        check_directories(self.paths)
        check_space(self.paths, self.size)
        for key, path in (("--json", args.json), ("--plot", args.plot)):
            check_output(key, path)
        if args.plot:
            from offloadzero.cli.nvme_plot import check_plot

            check_plot(args.plot)
        # The time includes the work after the measurement: removing the files, the table, the plot.
        finish_s = min(0.3 + (1.2 if args.plot else 0.0), 0.15 * self.time_s)
        self.measuring_s = self.time_s - finish_s
        self.fio_version = fio_version() if args.verify_with_fio else None

    def to_json(self) -> dict[str, Any]:
        return {
            "paths": self.paths,
            "size_bytes": self.size,
            "time_s": self.time_s,
            "write_limit_bytes": self.write_limit * len(self.paths),
            "verify_with_fio": self.fio_version is not None,
        }


def measure(settings: _Settings, started_s: float) -> dict[str, Any]:
    """Do the whole run; the result is the content of --json. Raises AioError, ConfigError, FioError."""
    progress = Progress(settings.time_s)
    progress.say(
        f"Writes at most {size_text(settings.write_limit)} to each of {', '.join(settings.paths)}, into one "
        f"file of {size_text(settings.size)} that is removed at the end."
    )
    began = datetime.datetime.now(datetime.timezone.utc)
    described = [describe_path(path) for path in settings.paths]
    machine = describe_machine()  # before the run's own load
    try:
        with scratch_files(settings.paths) as files:
            run = _Run(settings, files, described, progress, started_s)
            run.measure()
    finally:
        progress.close()
    result = {
        "format": nvme_report.FORMAT,
        "format_version": nvme_report.FORMAT_VERSION,
        "started_at": began.isoformat(timespec="seconds"),
        "duration_s": time.monotonic() - started_s,
        "arguments": settings.to_json(),
        "machine": machine,
        "versions": {
            **describe_versions("offloadzero", "torch", "numpy", "aiofiles"),
            "fio": settings.fio_version,
        },
        "paths": described,
        **run.to_json(),
    }
    return {**result, **nvme_report.conclude(result, run.samples)}


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
        settings: _Settings,
        files: Sequence[ScratchFile],
        described: Sequence[dict[str, Any]],
        progress: Progress,
        started_s: float,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._started_s = started_s
        self._all = tuple(range(len(files)))
        self._files = files
        self._backends, self._backend_words = available_backends()
        self._allowance = WriteAllowance(settings.write_limit * len(files))
        self._hold(_SUSTAINED_SHARE + (_FIO_SHARE if settings.fio_version else 0.0))
        self._bench = Bench(
            files,
            in_memory=[entry["filesystem"] in MEMORY_FILESYSTEMS for entry in described],
            allowance=self._allowance,
            memory=RandomMemory(min(_MAX_MEMORY_BYTES, max(settings.size, 3 * _LARGEST_OPERATION))),
            started_s=started_s,
        )
        self.samples: list[Sample] = []
        self._notes: list[str] = []
        self._shape = Shape(32 * MIB, MIB, 0, 0.0)

    def measure(self) -> None:
        schedule = plan_schedule(
            self._settings.measuring_s,
            num_paths=len(self._files),
            with_fio=self._settings.fio_version is not None,
        )
        self._fill(schedule)
        self._coarse(schedule)
        self._refine(schedule)
        self._confirm(schedule)
        if len(self._files) > 1:
            self._scaling(schedule)
        if self._settings.fio_version is not None:
            self._verify(schedule)
        self._sustained(schedule)
        if self._allowance.left_bytes < self._shape.operation_bytes * 2:
            self._note("the sustained write ended early at the write limit: --write-limit raises it")

    def to_json(self) -> dict[str, Any]:
        for index, file in enumerate(self._files):
            if file.num_bytes < self._settings.size:
                self._note(
                    f"{self._settings.paths[index]}: {size_text(file.num_bytes)} of "
                    f"{size_text(self._settings.size)} could be written in time; only that was used"
                )
        return {
            "bytes_written": self._allowance.used_bytes,
            "backends": self._backend_words,
            "direct": [self._bench.direct_reasons.get(index, "unknown") for index in self._all],
            "allocated_bytes": self._allocated,
            "shape": vars(self._shape),
            "refused_points": [
                {**point.to_json(), "reason": reason} for point, reason in self._bench.refusals.items()
            ],
            "notes": self._notes,
            "samples": [sample.to_json() for sample in self.samples],
        }

    def _hold(self, share: float) -> None:
        """Keep a share of the bytes that may be written, after the first write, for later."""
        spare_bytes = (self._settings.write_limit - self._settings.size) * len(self._files)
        self._allowance.held_bytes = int(spare_bytes * share)

    # --- Phases ---

    def _fill(self, schedule: Schedule) -> None:
        """Write the files for the first time: later reads have data, and the drive's speed is known."""
        self._progress.phase("first write")
        size = self._settings.size
        point = reference_point(self._backends[0])
        self._preallocate(point, size)
        for file in self._files:
            file.num_bytes = size
        sample = self._take(
            "fill",
            Traffic.WRITE,
            point,
            seconds=schedule.fill_s - self._elapsed_s(),
            deadline_s=schedule.fill_s,
            max_bytes=size * len(self._files),
            with_timeline=True,
            shape=Shape(32 * MIB, MIB, 0, 200e6),
        )
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
            file.num_bytes = min(file.cursor, size)
            file.cursor = 0
            file.sync()
        smallest = min(file.num_bytes for file in self._files)
        if smallest < 8 * MIB:
            raise ConfigError(
                "--time", self._settings.time_s, f"only {size_text(smallest)} could be written: give more"
            )
        self._allocated = [file.allocated_bytes for file in self._files]
        in_flight = max_in_flight_bytes(sample.bytes_per_s, smallest)
        self._shape = Shape(
            max_in_flight_bytes=in_flight,
            operation_bytes=4 * MIB if in_flight >= 64 * MIB else MIB,
            chunk_elements=chunk_elements(in_flight, smallest),
            rate_bps=sample.bytes_per_s,
        )
        self._limits = SweepLimits(
            backends=self._backends,
            max_in_flight_bytes=in_flight,
            max_num_threads=min(max(len(os.sched_getaffinity(0)), 2), 8),
        )

    def _preallocate(self, point: Point, size: int) -> None:
        """Preallocate as the NVMe tier does; a filesystem without that goes without."""
        with AioEngine(**point.to_json()) as engine:
            for file in self._files:
                file.check()
                try:
                    with engine.open(file.path) as opened:
                        opened.preallocate(size)
                except AioError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                        raise

    def _coarse(self, schedule: Schedule) -> None:
        self._progress.phase("coarse sweep")
        wanted = [(point, traffic) for point in coarse_points(self._limits) for traffic in _ORDER]
        self._sample_s = sample_seconds(
            schedule.coarse_s - self._elapsed_s(), len(wanted), time_s=self._settings.time_s
        )
        for point, traffic in wanted:
            if not self._fits(schedule.coarse_s):
                break
            self._take("coarse", traffic, point, deadline_s=schedule.coarse_s)

    def _refine(self, schedule: Schedule) -> None:
        """Go uphill from the best point of each traffic, in turn, until none has an unmeasured neighbour."""
        self._progress.phase("refinement")
        is_moving = True
        while is_moving and self._fits(schedule.refine_s):
            is_moving = False
            for traffic in _ORDER:
                scores = self._scores(traffic)
                refused = dict.fromkeys(self._bench.refusals, 0.0)
                point = next_refinement({**scores, **refused}, self._limits) if scores else None
                if point is not None and self._fits(schedule.refine_s):
                    taken = self._take("refine", traffic, point, deadline_s=schedule.refine_s)
                    if taken is None and point not in self._bench.refusals:
                        return
                    is_moving = True

    def _confirm(self, schedule: Schedule) -> None:
        """Measure the best of each traffic and the reference again and again in turn: their medians decide.

        Of mixed traffic these are the best two: one of them will be in the configuration.
        """
        self._progress.phase("confirmation")
        reference = reference_point(self._backends[0])
        candidates = finalists(self._scores(Traffic.MIXED), 2)
        wanted = {
            traffic: list(dict.fromkeys([*finalists(scores, 1), *candidates, reference]))
            for traffic in _ORDER
            if (scores := self._scores(traffic))
        }
        self._until(
            schedule.confirm_s,
            [
                partial(self._take, "confirm", traffic, point, deadline_s=schedule.confirm_s)
                for traffic, points in wanted.items()
                for point in points
            ],
        )

    def _scaling(self, schedule: Schedule) -> None:
        """Measure each path alone and all together, at the point that will be recommended.

        A path without the others, or the others without it, says nothing: the first round ends in the time of the
        later phases if it must.
        """
        self._progress.phase("striping")
        point = self.chosen()
        groups = [*((index,) for index in self._all), self._all]

        def takes(deadline_s: float) -> list[Callable[[], Sample | None]]:
            return [
                partial(self._take, "scaling", traffic, point, deadline_s=deadline_s, paths=paths)
                for traffic in _ORDER
                for paths in groups
            ]

        self._until(schedule.sustained_s, takes(schedule.sustained_s), num_rounds=1)
        if not self._fits(schedule.sustained_s):
            self._note("the paths were compared in less than one round: --time raises it")
        self._until(schedule.scaling_s, takes(schedule.scaling_s))

    def _verify(self, schedule: Schedule) -> None:
        """Measure with this engine and with fio in pairs, in alternating order, at the best point and the reference."""
        self._progress.phase("fio")
        self._hold(_SUSTAINED_SHARE)
        reference = reference_point(self._backends[0])
        wanted = [
            (traffic, point)
            for traffic in _ORDER
            if (scores := nvme_report.medians(self.samples, traffic))
            for point in dict.fromkeys([best(scores), self.chosen(), reference])
        ]
        order = itertools.cycle((True, False))
        while True:
            is_ours_first = next(order)
            num_before = len(self.samples)
            for traffic, point in wanted:
                # fio itself takes more than half a second to start and to end.
                if not self._fits(schedule.fio_s, 2.6 * self._sample_s + 1.0):
                    return
                self._take_pair(traffic, point, schedule.fio_s, is_ours_first=is_ours_first)
            if len(self.samples) == num_before:
                return

    def _take_pair(self, traffic: Traffic, point: Point, deadline_s: float, *, is_ours_first: bool) -> None:
        """Take a pair, which is kept only when both samples exist."""
        ours = partial(self._measure, "verify", traffic, point, deadline_s=deadline_s)
        fio = partial(self._measure_by_fio, traffic, point)
        pair = [take() for take in ((ours, fio) if is_ours_first else (fio, ours))]
        if None not in pair:
            for sample in pair:
                self._keep(sample)

    def _measure_by_fio(self, traffic: Traffic, point: Point) -> Sample | None:
        return run_fio(
            point,
            traffic,
            self._files,
            paths=self._all,
            seconds=self._sample_s,
            rate_bps=max(self._scores(traffic).values(), default=self._shape.rate_bps),
            allowance=self._allowance,
            run_started_s=self._started_s,
        )

    def _sustained(self, schedule: Schedule) -> None:
        """Write continuously for the rest of the time and of the allowance."""
        self._progress.phase("sustained write")
        if self._allowance.left_bytes < self._shape.operation_bytes * 2:
            self._note("writes of the sweep ended early at the write limit: --write-limit raises it")
        self._hold(0.0)
        scores = self._scores(Traffic.WRITE)
        seconds = schedule.sustained_s - self._elapsed_s()
        if not scores or seconds < self._sample_s:
            return
        # The drain and the last fdatasync are part of the time, too.
        seconds -= min(0.5, seconds / 4)
        self._take(
            "sustained",
            Traffic.WRITE,
            best(scores),
            seconds=seconds,
            deadline_s=schedule.sustained_s,
            with_timeline=True,
        )

    # --- Samples ---

    def chosen(self) -> Point:
        """The point that the results recommend."""
        return nvme_report.chosen_point(self.samples, self._backends)

    def _take(self, phase: str, traffic: Traffic, point: Point, **options: Any) -> Sample | None:
        """Measure and keep the sample; the options are those of _measure."""
        return self._keep(self._measure(phase, traffic, point, **options))

    def _measure(
        self,
        phase: str,
        traffic: Traffic,
        point: Point,
        *,
        deadline_s: float,
        seconds: float | None = None,
        paths: tuple[int, ...] | None = None,
        max_bytes: int | None = None,
        with_timeline: bool = False,
        shape: Shape | None = None,
    ) -> Sample | None:
        request = Request(
            phase=phase,
            traffic=traffic,
            point=point,
            paths=self._all if paths is None else paths,
            seconds=self._sample_s if seconds is None else seconds,
            deadline_s=self._started_s + deadline_s,
            max_bytes=max_bytes,
            with_timeline=with_timeline,
            is_counted_whole=phase == "verify",
        )
        return self._bench.sample(request, shape or self._shape)

    def _keep(self, sample: Sample | None) -> Sample | None:
        if sample is not None:
            self.samples.append(sample)
            point = sample.point
            self._progress.tick(
                f"{sample.tool if sample.tool == 'fio' else ''} {sample.traffic} {point.backend} "
                f"{size_text(point.block_size)} x {point.queue_depth}: {sample.bytes_per_s / 1e9:.2f} GB/s"
            )
        return sample

    def _scores(self, traffic: Traffic) -> dict[Point, float]:
        return medians_by_point(
            [
                (sample.point, sample.bytes_per_s)
                for sample in self.samples
                if sample.traffic == traffic.value
                and sample.tool == "offloadzero"
                and sample.phase in nvme_report.SWEEP_PHASES
            ]
        )

    def _until(
        self, end_s: float, takes: Sequence[Callable[[], Sample | None]], num_rounds: int | None = None
    ) -> None:
        """Do the calls in turn, round after round, until the time is over or a round has no result."""
        for _ in itertools.count() if num_rounds is None else range(num_rounds):
            taken = 0
            for take in takes:
                if not self._fits(end_s):
                    return
                taken += take() is not None
            if not taken:
                return

    def _fits(self, end_s: float, seconds: float | None = None) -> bool:
        """Whether another sample ends before `end_s`."""
        return self._elapsed_s() + (1.3 * self._sample_s if seconds is None else seconds) <= end_s

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _note(self, text: str) -> None:
        self._notes.append(text)


_ORDER = (Traffic.MIXED, Traffic.READ, Traffic.WRITE)
