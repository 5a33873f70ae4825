"""The files of an observed run: run.json, steps.jsonl, forecast.json, trace_step_N.json.

[Note: files of a run]
run.json       the run: format, device, cores, units, bytes per tier
steps.jsonl    one JSON object per step; a run that goes on from a checkpoint appends to it
forecast.json  the forecast of a step, where the run made one; a run that goes on makes its own anew
trace_step_N.json   the lanes of one step in the Trace Event Format, for ui.perfetto.dev or chrome://tracing

Spans of one lane that overlap, such as two reads in flight, go to tracks of their own with the same name: that
format wants the events of one track nested.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offloadzero.errors import ConfigError
from offloadzero.observe.timeline import COMPUTE, LANES, WAIT, Span

RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
FORECAST_FILE = "forecast.json"
TRACE_FILES = "trace_step_*.json"  # a glob; * is the step
FORMAT = "offloadzero.run"
FORECAST_FORMAT = "offloadzero.forecast"
FORMAT_VERSION = 1

_STEP_TRACK = 0
_TRACKS_PER_LANE = 1000


def trace_file_name(step: int) -> str:
    """Return the name of the trace of a step."""
    return TRACE_FILES.replace("*", str(step))


class RunDirectory:
    """Writes the files of one run; a line is in the file when `write_step` returns."""

    def __init__(self, path: Path) -> None:
        """Open the directory. Raises ConfigError when it cannot be written."""
        self.path = path
        try:
            self.path = path = path.absolute()  # the process may change its directory
            path.mkdir(parents=True, exist_ok=True)
            (path / STEPS_FILE).open("a").close()
        except OSError as error:
            raise ConfigError(
                "offloadzero.observe.run_dir", str(path), f"a directory to write to: {error.strerror}"
            ) from error

    def write_run(self, description: Mapping[str, Any]) -> None:
        """Write the facts that hold for the whole run, of which there is no forecast yet."""
        (self.path / FORECAST_FILE).unlink(missing_ok=True)
        value = {"format": FORMAT, "format_version": FORMAT_VERSION, **description}
        (self.path / RUN_FILE).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    def write_forecast(self, forecast: Mapping[str, Any]) -> None:
        """Write the forecast of the run's step."""
        value = {"format": FORECAST_FORMAT, "format_version": FORMAT_VERSION, **forecast}
        (self.path / FORECAST_FILE).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    def write_step(self, record: Mapping[str, Any]) -> None:
        """Write one step's line."""
        with (self.path / STEPS_FILE).open("a", encoding="utf-8") as steps:
            steps.write(json.dumps(record, allow_nan=False) + "\n")

    def write_trace(self, step: int, spans: Iterable[Span], *, start_s: float, end_s: float) -> None:
        """Write the lanes of one step that ran from `start_s` to `end_s`."""
        value = trace_events(step, spans, start_s=start_s, end_s=end_s)
        (self.path / trace_file_name(step)).write_text(json.dumps(value), encoding="utf-8")


def json_number(value: float | None) -> float | None:
    """Return a number for JSON, which knows no NaN and no infinity: null stands for both."""
    return value if value is not None and math.isfinite(value) else None


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
