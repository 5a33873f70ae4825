"""A run beside its forecast of `offloadzero plan --json`: a step's time, bytes and seconds by lane.

[Note: what departs]
The run's figures are medians of its steps without the first ones. Bytes are those that the lanes counted. Seconds of a
lane are those in which it moved anything; of `compute` and `cores`, which move nothing, those of the run's own bound.
Where a step departs from its forecast by more than DEVIATION, the lane whose seconds depart most is named as the cause.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offloadzero.cli.output import text_table
from offloadzero.cli.plan import FORMAT, FORMAT_VERSION
from offloadzero.cli.units import duration_text, size_text
from offloadzero.errors import ConfigError
from offloadzero.observe.bound import NVME
from offloadzero.observe.timeline import NVME_READ, NVME_WRITE
from offloadzero.planning.result_file import load_json

KEY = "--plan"
MIN_STEPS = 10  # of a run that is compared
NUM_FIRST = 2  # of these, those that are left out
DEVIATION = 0.2


@dataclass(frozen=True)
class PlannedStep:
    """The forecast of a step."""

    seconds: float
    lanes_s: Mapping[str, float]
    num_bytes: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """The step in the run and in its forecast; `lanes` are rows of a table."""

    step_s: float
    forecast_s: float
    cause: str  # empty where the step departs by DEVIATION at most
    lanes: Sequence[Sequence[str]]

    @property
    def sentence(self) -> str:
        """The comparison in one sentence."""
        off = self.step_s / self.forecast_s - 1
        text = (
            f"A step took {duration_text(self.step_s)} (median), {duration_text(self.forecast_s)} were forecast: "
            f"{abs(off):.1%} {'more' if off >= 0 else 'less'}."
        )
        return f"{text} {self.cause}" if self.cause else text

    def lines(self) -> list[str]:
        """Return the sentence and the table."""
        header = ["lane", "bytes forecast", "measured", "seconds forecast", "measured"]
        return [self.sentence, *text_table(header, self.lanes)]


def read_planned_step(path: str) -> PlannedStep:
    """Read the forecast of a plan. Raises ConfigError."""
    plan = load_json(KEY, path, format_name=FORMAT, format_version=FORMAT_VERSION)
    found, traffic = plan.get("forecast"), plan.get("traffic")
    phases: list[Any] = list(traffic.values()) if isinstance(traffic, dict) else [None]
    if not isinstance(found, dict) or not _is_positive(found.get("seconds")):
        raise ConfigError(KEY, path, "a plan with a forecast of the step's time: this one has none")
    tables = [found.get("lanes_s"), *phases]
    if not all(isinstance(table, dict) and all(map(_is_number, table.values())) for table in tables):
        raise ConfigError(KEY, path, "is damaged: lanes and traffic are tables of numbers")
    num_bytes: dict[str, float] = {}
    for lanes in phases:
        for lane, size in lanes.items():
            num_bytes[lane] = num_bytes.get(lane, 0) + size
    return PlannedStep(found["seconds"], found["lanes_s"], num_bytes)


def compare(planned: PlannedStep, records: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare steps with their forecast: [Note: what departs]. Raises ConfigError where they are too few."""
    if len(records) < MIN_STEPS:
        raise ConfigError("RUN_DIR", f"{len(records)} steps", f"at least {MIN_STEPS} beside {KEY}")
    shown = records[NUM_FIRST:]
    step_s = statistics.median(record["step_s"] for record in shown)
    num_bytes = _medians([record["bytes"] for record in shown])
    seconds = _medians([{**record["lanes_s"], **record["busy_s"]} for record in shown])
    forecast_bytes = _in_lanes_of(planned.num_bytes, num_bytes)
    cause = ""
    if abs(step_s / planned.seconds - 1) > DEVIATION:
        cause = _cause(planned.lanes_s, seconds)
    lanes = [
        [
            lane,
            *(_text(size_text, table.get(lane)) for table in (forecast_bytes, num_bytes)),
            *(_text(duration_text, table.get(lane)) for table in (planned.lanes_s, seconds)),
        ]
        for lane in sorted({*forecast_bytes, *num_bytes, *planned.lanes_s})
    ]
    return Comparison(step_s, planned.seconds, cause, lanes)


def _cause(forecast_s: Mapping[str, float], measured_s: Mapping[str, float]) -> str:
    both = sorted(forecast_s.keys() & measured_s.keys())
    if not both:
        return "No lane of the forecast was measured."
    lane = max(both, key=lambda name: abs(measured_s[name] - forecast_s[name]))
    return (
        f"The lane that departs most is {lane}: {duration_text(measured_s[lane])}, "
        f"{duration_text(forecast_s[lane])} were forecast."
    )


def _in_lanes_of(planned: Mapping[str, float], measured: Mapping[str, float]) -> Mapping[str, float]:
    """Add up both directions of the drive where the run has one lane for them (`nvme_shared`)."""
    if NVME not in measured:
        return planned
    apart = {lane: size for lane, size in planned.items() if lane not in (NVME_READ, NVME_WRITE)}
    return {**apart, NVME: planned.get(NVME_READ, 0) + planned.get(NVME_WRITE, 0)}


def _medians(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median by name; a table without the name counts as 0."""
    names = {name for table in tables for name in table}
    return {name: statistics.median(table.get(name, 0.0) for table in tables) for name in names}


def _text(form: Any, value: float | None) -> str:
    return "" if value is None else str(form(value))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e30


def _is_positive(value: object) -> bool:
    return _is_number(value) and value != 0
