"""The reports after each step: its bound, its printed line, its record and the trace of chosen steps, and their files.

[Note: a step's record is written one step late]
The loss of a step is known when the device has computed it, and transfers that began in a step may end in the
next. So the record and the trace of step N are written when step N + 1 ends, or when the engine closes; no thread
waits for the device. The printed line needs neither and comes at once; on a device with streams it comes when the
device has run the step: [Note: the device's time].

[Note: files of a run]
run.json       the run: format, device, cores, units, bytes per tier
steps.jsonl    one JSON object per step; a run that goes on from a checkpoint appends to it; locked while a run writes
forecast.json  the forecast of a step, where the run made one; a run that goes on makes its own anew
trace_step_N.json   the lanes of one step in the Trace Event Format, for ui.perfetto.dev or chrome://tracing

Spans of one lane that overlap, such as two reads in flight, go to tracks of their own with the same name: that
format wants the events of one track nested.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offloadzero.config import ObserveConfig
from offloadzero.errors import ConfigError
from offloadzero.observe import bound
from offloadzero.observe.bound import StepReport
from offloadzero.observe.collectives import CollectiveCount, since
from offloadzero.observe.forecast import ForecastCheck, MakeForecast
from offloadzero.observe.timeline import COMPUTE, LANES, WAIT, Span, Timeline

log = logging.getLogger("offloadzero.steps")

ReadLoss = Callable[[], float]
ReadCollectives = Callable[[], Mapping[str, CollectiveCount]]  # since the start


@dataclass
class _Finished:
    """A step that has ended and is not written yet."""

    report: StepReport
    record: dict[str, Any]
    losses: list[ReadLoss]
    spans: list[Span] = field(default_factory=list)  # of a step that is traced


@dataclass
class _Launched:
    """The facts about a step that the training thread knows when it has launched it."""

    losses: list[ReadLoss]
    launch_s: float
    cores_s: float  # CPU time of the process, over the cores it may use
    collectives: Mapping[str, CollectiveCount]


RESOLUTION_S = 1e-6  # of a step's end


class StepMonitor:
    """Turns each step's report and spans into the output that the configuration asks for."""

    def __init__(self, config: ObserveConfig) -> None:
        """Open the run directory. Raises ConfigError when it cannot be written."""
        self._config = config
        self._device_is_cpu = True
        self._num_cores: float = len(os.sched_getaffinity(0))
        self._directory = RunDirectory(config.run_dir) if config.run_dir is not None else None
        self._logs = log.isEnabledFor(logging.INFO)
        self.is_on = self._directory is not None or config.step_line or self._logs
        self.timeline = Timeline(is_on=self.is_on)
        self._rates = bound.BestRates()
        self._losses: list[ReadLoss] = []
        self._launched: deque[_Launched] = deque()  # steps that have not run; reports come in their order
        self._finished: _Finished | None = None
        self._read_collectives: ReadCollectives = dict
        self._collectives: Mapping[str, CollectiveCount] = {}  # when the last step ended
        self._process_cpu_s = time.process_time()
        self._check: ForecastCheck | None = None  # of the first steps; None: there is none, or it is done
        self.has_steps = False  # whether a step has ended on the training thread, of an engine that reports

    def begin(
        self,
        description: Mapping[str, Any],
        *,
        device_is_cpu: bool,
        collectives: ReadCollectives = dict,
        forecast: MakeForecast | None = None,
        num_local_ranks: int = 1,
        is_first: bool = True,
    ) -> None:
        """Begin the training: `description` holds for the whole run, `collectives` reads those of the ranks so far.

        `forecast` makes the forecast of a step, on the training thread when the first one has run, and may raise
        NoForecastError. `num_local_ranks` share the cores of this machine. Of several ranks the first one logs.
        """
        self._logs &= is_first
        if num_local_ranks > 1:
            self._num_cores /= num_local_ranks
        if forecast is not None and self.is_on:
            self._check = ForecastCheck(forecast)
        self._device_is_cpu = device_is_cpu
        self._read_collectives = collectives
        self._collectives = collectives()
        if self._directory is not None:
            self._directory.write_run({"num_cores": self._num_cores, **description})
        self.timeline.take(0)
        self._process_cpu_s = time.process_time()

    @property
    def wants_loss(self) -> bool:
        return self._directory is not None

    def add_loss(self, read: ReadLoss) -> None:
        """Add the loss of a micro batch of the running step; `read` is called when the next step has ended."""
        self.timeline.lap("loss")
        self._losses.append(read)

    def on_end(self) -> None:
        """Note the end of a step on the training thread; its report comes when it has run."""
        if not self.is_on:
            return
        self.has_steps = True
        if self.timeline.stream is None:  # else the clock of the streams has done it
            self.timeline.lap("step")
        losses, self._losses = self._losses, []
        now_s, before_s = time.process_time(), self._process_cpu_s
        self._process_cpu_s = now_s
        cores_s = (now_s - before_s) / self._num_cores
        before, self._collectives = self._collectives, self._read_collectives()
        counted = since(before, self._collectives)
        self._launched.append(_Launched(losses, self.timeline.take_launch_s(), cores_s, counted))

    def on_step(self, report: StepReport) -> StepReport:
        """Report a step that has run, on the training thread. Returns its report, with its bound where one is known."""
        if not self.is_on:
            return report
        launched = self._launched.popleft()
        found = self._account(report, launched)
        if self.timeline.stream is None:
            self.timeline.lap("observing", leaves_model=True)
        return replace(report, bound=found, collectives=launched.collectives)

    def _account(self, report: StepReport, launched: _Launched) -> bound.Bound:
        spans, is_full = self.timeline.take(report.step, until_s=report.end_s + RESOLUTION_S)
        uses = bound.use_by_lane(spans, nvme_shared=self._config.nvme_shared)
        self._rates.learn(uses)
        lanes_s = bound.lane_seconds(
            self._rates.seconds(uses),
            step_s=report.step_s,
            wait_s=report.total_wait_s,
            cores_s=launched.cores_s if self._device_is_cpu else None,
        )
        found = bound.step_bound(lanes_s)
        if self._logs or self._config.step_line:
            self._say(step_line(report, found))
        if self._directory is None and self._check is None:
            return found
        record = {
            "step": report.step,
            "step_s": report.step_s,
            "bound_s": found.seconds,
            "bound_lane": found.lane,
            "efficiency": found.efficiency(report.step_s),
            "lanes_s": found.lanes_s,
            "busy_s": {lane: use.busy_s for lane, use in uses.items()},
            "bytes": {lane: use.num_bytes for lane, use in uses.items()},
            "waits_s": report.waits_s,
            "launch_s": launched.launch_s,
            **_collectives_in_json(launched.collectives),
            **({"spans_lost": True} if is_full else {}),
        }
        if self._check is not None:
            self._compare(self._check, record)
        if self._directory is None:
            return found
        self._write(spans)
        traced = spans if self._is_traced(report.step) else []
        self._finished = _Finished(report, record, launched.losses, traced)
        return found

    def _is_traced(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self._config.trace_steps)

    def _compare(self, check: ForecastCheck, record: Mapping[str, Any]) -> None:
        """Hand a step to the check: at the first one there is a forecast, and after some what became of it is told."""
        was_planned = check.planned is not None
        is_done = check.add(record, self._rates.by_lane)
        if check.planned is not None and not was_planned and self._directory is not None:
            self._directory.write_forecast(check.planned.to_json())
        if not is_done:
            return
        self._check = None
        if check.found is not None:
            self._say(check.found.line)
        else:
            log.info("no forecast of a step to compare these with: %s", check.unknown)

    def _say(self, line: str) -> None:
        if self._logs:
            log.info("%s", line)
        if self._config.step_line:
            print(line, flush=True)

    def _write(self, later_spans: list[Span]) -> None:
        """Write the step before, whose loss is known now."""
        finished, self._finished = self._finished, None
        if finished is None or self._directory is None:
            return
        if finished.losses:
            values = [read() for read in finished.losses]
            loss = sum(values) / len(values)
            finished.record["loss"] = loss if math.isfinite(loss) else None  # JSON has no NaN
        self._directory.write_step(finished.record)
        if self._is_traced(finished.report.step):
            begun = (span for span in later_spans if span.start_s < finished.report.end_s)
            self._directory.write_trace(
                finished.report.step,
                [*finished.spans, *begun],
                start_s=finished.report.start_s,
                end_s=finished.report.end_s,
            )

    def close(self) -> None:
        """Write the last step; called when its transfers have ended."""
        if self._directory is not None:
            last = self._finished.report.step if self._finished is not None else 0
            self._write(self.timeline.take(last)[0])
            self._directory.close()
            self._directory = None


def _collectives_in_json(counts: Mapping[str, CollectiveCount]) -> dict[str, Any]:
    """The field of a record; none with one process."""
    found = {key: {"calls": count.num_calls, "bytes": count.num_bytes} for key, count in counts.items()}
    return {"collectives": found} if found else {}


def step_line(report: StepReport, found: bound.Bound) -> str:
    """Return a line such as `step 12: 0.412 s, bound 0.391 s (nvme read), overlap 94.9 %, waits: fetch 12.1 ms`."""
    longest = sorted(report.waits_s.items(), key=lambda item: (-item[1], item[0]))[:3]
    waits = [f"{name} {1e3 * seconds:.1f} ms" for name, seconds in longest]
    return (
        f"step {report.step}: {report.step_s:.3f} s, bound {found.seconds:.3f} s ({found.lane}), "
        f"overlap {found.efficiency(report.step_s):.1%}, waits: {', '.join(waits) or 'none'}"
    )


RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
FORECAST_FILE = "forecast.json"
TRACE_FILES = "trace_step_*.json"  # a glob; * is the step
FORMAT = "offloadzero.run"
FORECAST_FORMAT = "offloadzero.forecast"
FORMAT_VERSION = 1

_STEP_TRACK = 0
_TRACKS_PER_LANE = 1000


class RunDirectory:
    """Writes the files of one run; a line is in the file when `write_step` returns."""

    def __init__(self, path: Path) -> None:
        """Open the directory. Raises ConfigError when it cannot be written."""
        self.path = path
        try:
            self.path = path = path.absolute()  # the process may change its directory
            path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path / STEPS_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")  # a run before this one was killed while it wrote a line
        except OSError as error:
            raise ConfigError(
                "offloadzero.observe.run_dir", str(path), f"a directory to write to: {error.strerror}"
            ) from error
        self._lock()

    def _lock(self) -> None:
        """Take the lock of `is_written`, of which one that asks or another engine may hold up the first attempt."""
        with contextlib.suppress(OSError):  # a file system without locks: then nobody can know
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """End the run: `is_written` says so."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked process has the same lock
        os.close(self._descriptor)

    def write_run(self, description: Mapping[str, Any]) -> None:
        """Write the facts that hold for the whole run, of which there is no forecast yet."""
        (self.path / FORECAST_FILE).unlink(missing_ok=True)
        value = {"format": FORMAT, "format_version": FORMAT_VERSION, **description}
        (self.path / RUN_FILE).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    def write_forecast(self, forecast: Mapping[str, Any]) -> None:
        value = {"format": FORECAST_FORMAT, "format_version": FORMAT_VERSION, **forecast}
        (self.path / FORECAST_FILE).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    def write_step(self, record: Mapping[str, Any]) -> None:
        self._lock()
        with (self.path / STEPS_FILE).open("a", encoding="utf-8") as steps:
            steps.write(json.dumps(record, allow_nan=False) + "\n")

    def write_trace(self, step: int, spans: Iterable[Span], *, start_s: float, end_s: float) -> None:
        """Write the lanes of one step that ran from `start_s` to `end_s`."""
        value = trace_events(step, spans, start_s=start_s, end_s=end_s)
        (self.path / TRACE_FILES.replace("*", str(step))).write_text(json.dumps(value), encoding="utf-8")


def is_written(directory: Path) -> bool | None:
    """Whether a run has the directory open: it holds a lock on the file of the steps, and none when it is killed.

    None on a file system that cannot tell.
    """
    try:
        with (directory / STEPS_FILE).open("rb") as steps:
            fcntl.flock(steps, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def tracks(spans: Sequence[Span]) -> list[int]:
    """Return for each span the track of its lane: the first on which it overlaps no span before it."""
    ends_s: list[float] = []
    result = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start_s, spans[i].end_s)):
        start_s = spans[index].start_s
        track = next((t for t, end_s in enumerate(ends_s) if end_s <= start_s), len(ends_s))
        if track == len(ends_s):
            ends_s.append(0.0)
        ends_s[track] = spans[index].end_s
        result[index] = track
    return result


def trace_events(step: int, spans: Iterable[Span], *, start_s: float, end_s: float) -> dict[str, Any]:
    """Return the Trace Event Format's JSON object. Time zero is the first span's start or the step's."""
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(COMPUTE if span.lane == WAIT else span.lane, []).append(span)
    zero_s = min([start_s, *(span.start_s for group in by_lane.values() for span in group)])
    events = [_metadata("process_name", 0, {"name": "offloadzero"}), *_track(_STEP_TRACK, "step")]
    events.append(_event(_STEP_TRACK, f"step {step}", "step", start_s - zero_s, end_s - start_s, {}))
    for order, lane in enumerate(LANES):
        group = by_lane.get(lane, [])
        numbers = tracks(group)
        first = (order + 1) * _TRACKS_PER_LANE
        for number in sorted(set(numbers)):
            events += _track(first + number, lane)
        for span, number in zip(group, numbers, strict=True):
            is_wait = span.lane == WAIT
            name = f"wait: {span.name}" if is_wait else span.name
            arguments = {"bytes": span.num_bytes} if span.num_bytes else {}
            at_s, length_s = span.start_s - zero_s, span.end_s - span.start_s
            events.append(_event(first + number, name, span.lane, at_s, length_s, arguments))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    track: int, name: str, category: str, at_s: float, length_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": track,
        "ts": round(at_s * 1e6, 3),
        "dur": round(length_s * 1e6, 3),
        "name": name,
        "cat": category,
        "args": arguments,
    }


def _metadata(name: str, track: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": track, "name": name, "args": arguments}


def _track(track: int, lane: str) -> list[dict[str, Any]]:
    return [
        _metadata("thread_name", track, {"name": lane}),
        _metadata("thread_sort_index", track, {"sort_index": track}),
    ]
