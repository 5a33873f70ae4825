"""The reports after each step: its bound, its printed line, its record, and the trace of chosen steps.

[Note: a step's record is written one step late]
The loss of a step is known when the device has computed it, and transfers that began in a step may end in the
next. So the record and the trace of step N are written when step N + 1 ends, or when the engine closes; no thread
waits for the device. The printed line needs neither and comes at once; on a device with streams it comes when the
device has run the step: [Note: the device's time].
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offloadzero.config import ObserveConfig
from offloadzero.observe import bound
from offloadzero.observe.collectives import CollectiveCount, since
from offloadzero.observe.forecast import ForecastCheck, MakeForecast
from offloadzero.observe.run_dir import RunDirectory, json_number
from offloadzero.observe.step_report import StepReport
from offloadzero.observe.timeline import Span, Timeline

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
        self._launched: deque[_Launched] = (
            deque()
        )  # the steps that have not run yet; reports come in their order
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
    ) -> None:
        """Begin the training: `description` holds for the whole run, `collectives` reads those of the ranks so far.

        `forecast` makes the forecast of a step, on the training thread when the first one has run, and may raise
        NoForecastError. `num_local_ranks` share the cores of this machine.
        """
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
        """Whether losses are recorded."""
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
            finished.record["loss"] = json_number(sum(values) / len(values))
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
            self._directory = None


def _collectives_in_json(counts: Mapping[str, CollectiveCount]) -> dict[str, Any]:
    """The field of a record; none with one process."""
    found = {key: {"calls": count.num_calls, "bytes": count.num_bytes} for key, count in counts.items()}
    return {"collectives": found} if found else {}


def step_line(report: StepReport, found: bound.Bound) -> str:
    """Return a line such as `step 12: 0.412 s, bound 0.391 s (nvme read), overlap 94.9 %, waits: fetch 12.1 ms`."""
    waits = [f"{name} {1e3 * seconds:.1f} ms" for name, seconds in bound.largest_waits(report.waits_s)]
    return (
        f"step {report.step}: {report.step_s:.3f} s, bound {found.seconds:.3f} s ({found.lane}), "
        f"overlap {found.efficiency(report.step_s):.1%}, waits: {', '.join(waits) or 'none'}"
    )
