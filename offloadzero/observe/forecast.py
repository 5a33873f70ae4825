"""A run beside its forecast: a step's time, bytes and seconds by lane, and the cause of a departure.

[Note: what departs]
The run's figures are medians of its steps without the first ones, which record the order of use, and without those in
which nothing was updated where the forecast has updates: fp16 skips steps until it has found its loss scale, and they
take no time for their updates. Bytes are those that the lanes counted. Seconds of a lane are those in which it moved
anything; of `compute` and `cores`, which move nothing, those of the run's own bound. Where a step departs from its
forecast by more than DEVIATION, the lane whose seconds depart most, and in the direction of the step, is the cause.
With the CPU as the device several lanes of a run are parts of one lane of the forecast, the cores, which counts no time
in which they sleep: a part is the cause where no lane has half of the departure. Where no part has it either, the lanes
took the time that was forecast and overlapped otherwise, or other work had the cores: then the longest wait is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from offloadzero.errors import OffloadError
from offloadzero.observe.bound import NVME
from offloadzero.observe.texts import duration_text
from offloadzero.observe.timeline import COMPUTE, D2H, DEVICE_UPDATE, H2D, NVME_READ, NVME_WRITE, UPDATE

MIN_STEPS = 10  # of a run that is compared, without those that `compared` leaves out later
NUM_FIRST = 2  # of these, those that are left out
DEVIATION = 0.2
ENOUGH = 0.5  # of the step's departure: a lane with less is not all of the cause
PYTHON = "python"  # the thread that launches: hooks around each use of a unit
FILE_ENGINE = "file engine"  # the cores' work for the drive
OF_ONE_CORE = (H2D, D2H, PYTHON, FILE_ENGINE)  # work that keeps one of the cores busy
# No cause of a departure as parts of the cores' work: what others take of the cores is in their time, too.
_OF_TRAINING_THREAD = (COMPUTE, PYTHON)

Record = Mapping[str, Any]  # of a step: observe/monitor.py


class NoForecastError(OffloadError, RuntimeError):
    """There is no forecast of a run; the text says why."""


@dataclass(frozen=True)
class PlannedStep:
    """The forecast of a step. Lanes have the names of observe/timeline.py and observe/bound.py."""

    seconds: float
    lanes_s: Mapping[str, float]
    num_bytes: Mapping[str, float]
    lane: str = ""  # the longest one
    parts_s: Mapping[str, float] = field(default_factory=dict)  # by the work that shares the cores, if alone

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """The step in the run and in its forecast; tables by lane, in bytes and seconds."""

    step_s: float
    planned: PlannedStep
    num_steps: int
    cause: str  # empty where the step departs by DEVIATION at most
    lanes_s: Mapping[str, float]
    num_bytes: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return self.step_s / self.planned.seconds

    @property
    def lane(self) -> str:
        """The longest of the run's lanes that the forecast has, too."""
        both = self.lanes_s.keys() & self.planned.lanes_s.keys()
        return max(sorted(both), key=lambda name: self.lanes_s[name], default="")

    @property
    def sentence(self) -> str:
        off = self.ratio - 1
        text = (
            f"A step took {duration_text(self.step_s)} (median), {duration_text(self.planned.seconds)} were forecast: "
            f"{abs(off):.1%} {'more' if off >= 0 else 'less'}."
        )
        return f"{text} {self.cause}" if self.cause else text

    @property
    def line(self) -> str:
        """The line of the log: forecast, measured, their ratio, the longest lane of each, and the cause."""
        text = (
            f"forecast {duration_text(self.planned.seconds)} per step, measured {duration_text(self.step_s)} "
            f"(median of {self.num_steps} steps), ratio {self.ratio:.2f}; longest lane: forecast "
            f"{self.planned.lane or 'unknown'}, measured {self.lane or 'unknown'}."
        )
        return f"{text} {self.cause}" if self.cause else text

    @property
    def forecast_bytes(self) -> Mapping[str, float]:
        """The bytes that were forecast, with one lane for both directions of the drive where the run has one."""
        planned = self.planned.num_bytes
        if NVME not in self.num_bytes:
            return planned
        apart = {lane: size for lane, size in planned.items() if lane not in (NVME_READ, NVME_WRITE)}
        return {**apart, NVME: planned.get(NVME_READ, 0) + planned.get(NVME_WRITE, 0)}


def parts_alone(parts_s: Mapping[str, float], num_cores: int) -> dict[str, float]:
    """Return the seconds of each part of the cores' work on a clock, if it had the cores to itself."""
    return {lane: s * (num_cores if lane in OF_ONE_CORE else 1) for lane, s in parts_s.items()}


def compared(planned: PlannedStep, records: Sequence[Record]) -> list[Record]:
    """Return the steps of a run that are like the one that is forecast: [Note: what departs]."""
    return [record for record in records[NUM_FIRST:] if _is_alike(planned, record)]


def _is_alike(planned: PlannedStep, record: Record) -> bool:
    """Whether a step has updates if the forecast one does: those of the step before, where they run in its forward."""
    return _has_updates(record["bytes"]) or not _has_updates(planned.num_bytes)


def _has_updates(num_bytes: Mapping[str, float]) -> bool:
    return any(num_bytes.get(lane) for lane in (UPDATE, DEVICE_UPDATE))


def compare(planned: PlannedStep, records: Sequence[Record]) -> Comparison:
    """Compare the steps of a run, of which `compared` has some, with their forecast: [Note: what departs]."""
    shown = compared(planned, records)
    step_s = statistics.median(record["step_s"] for record in shown)
    seconds = _medians([_seconds_of(record) for record in shown])
    waits_s = _medians([record["waits_s"] for record in shown])
    cause = ""
    if abs(step_s / planned.seconds - 1) > DEVIATION:
        cause = _cause(planned, seconds, waits_s, more_s=step_s - planned.seconds)
    return Comparison(
        step_s, planned, len(shown), cause, seconds, _medians([record["bytes"] for record in shown])
    )


def _seconds_of(record: Record) -> dict[str, float]:
    python = {PYTHON: record["launch_s"]} if "launch_s" in record else {}
    return {**record["lanes_s"], **record["busy_s"], **python}


def _cause(
    planned: PlannedStep, measured_s: Mapping[str, float], waits_s: Mapping[str, float], *, more_s: float
) -> str:
    """Say what made the step longer by `more_s`, or shorter."""
    found = _departing(planned.lanes_s, measured_s, more_s)
    parts_s = {part: s for part, s in planned.parts_s.items() if part not in _OF_TRAINING_THREAD}
    of_parts = _departing(parts_s, measured_s, more_s)
    if found is None and of_parts is None:
        return "No lane of the forecast was measured."
    candidates = [one for one in (found, of_parts) if one is not None]
    enough = [one for one in candidates if one[1] >= ENOUGH * abs(more_s)]
    lane, departs_s, forecast_s = (enough or candidates)[0]
    text = ""
    if departs_s > 0:
        text = (
            f"The lane that departs most is {lane}: {duration_text(measured_s[lane])}, "
            f"{duration_text(forecast_s)} were forecast."
        )
    return text if enough else f"{text} {_rest(more_s, waits_s, has_lane=bool(text))}".strip()


def _departing(
    planned_s: Mapping[str, float], measured_s: Mapping[str, float], more_s: float
) -> tuple[str, float, float] | None:
    """Return the lane that departs most in the step's direction, by how much, and its forecast."""
    sign = 1 if more_s > 0 else -1
    departs_s = {
        lane: sign * (measured_s[lane] - planned_s[lane])
        for lane in sorted(planned_s.keys() & measured_s.keys())
    }
    if not departs_s:
        return None
    lane = max(departs_s, key=lambda name: departs_s[name])
    return lane, departs_s[lane], planned_s[lane]


def _rest(more_s: float, waits_s: Mapping[str, float], *, has_lane: bool) -> str:
    """Say what no lane explains."""
    begin = "That is less than half of it: the" if has_lane else "The"
    if more_s < 0:
        return f"{begin} lanes overlapped more than was forecast."
    text = f"{begin} lanes overlapped less than was forecast, or other work had the cores"
    longest = max(sorted(waits_s), key=lambda name: waits_s[name], default=None)
    wait = "" if longest is None else f"; the longest wait is {longest}, {duration_text(waits_s[longest])}"
    return f"{text}{wait}."


def _medians(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median by name; a table without the name counts as 0."""
    names = {name for table in tables for name in table}
    return {name: statistics.median(table.get(name, 0.0) for table in tables) for name in names}


# Makes the forecast of a step from the best rates that the first one has shown, in bytes per second by lane.
MakeForecast = Callable[[Mapping[str, float]], PlannedStep]


class ForecastCheck:
    """Compares the first steps of a run with their forecast, once."""

    def __init__(self, make: MakeForecast) -> None:
        """Prepare the check. `make` is called when the first step has run, and may raise NoForecastError."""
        self._make = make
        self._records: list[Record] = []
        self.planned: PlannedStep | None = None
        self.unknown = ""  # the reason why there is no forecast
        self.found: Comparison | None = None

    def add(self, record: Record, rates: Mapping[str, float]) -> bool:
        """Take in a step; return whether these were enough. `rates`: the best so far, by lane."""
        if not self._records:
            try:
                self.planned = self._make(rates)
            except NoForecastError as error:
                self.unknown = str(error)
        if len(self._records) < NUM_FIRST or self.planned is None or _is_alike(self.planned, record):
            self._records.append(record)
        if len(self._records) < MIN_STEPS:
            return False
        if self.planned is not None:
            self.found = compare(self.planned, self._records)
        return True
