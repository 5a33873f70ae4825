"""A run beside its forecast: that of `offloadzero plan --json`, or the one that the run made of itself.

[Note: what departs] in observe/forecast.py says how the two are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offloadzero.cli.output import text_table
from offloadzero.cli.plan import FORMAT, FORMAT_VERSION
from offloadzero.cli.units import size_text
from offloadzero.errors import ConfigError
from offloadzero.observe.forecast import (
    MIN_STEPS,
    NUM_FIRST,
    Comparison,
    PlannedStep,
    Record,
    compare,
    compared,
    parts_alone,
)
from offloadzero.observe.run_dir import FORECAST_FILE, FORECAST_FORMAT
from offloadzero.observe.run_dir import FORMAT_VERSION as RUN_FORMAT_VERSION
from offloadzero.observe.texts import duration_text
from offloadzero.planning.result_file import load_json

KEY = "--plan"


def compare_run(planned: PlannedStep, records: Sequence[Record]) -> Comparison:
    """Compare a run with the plan that is named beside it. Raises ConfigError where its steps are too few."""
    if len(records) < MIN_STEPS:
        raise ConfigError("RUN_DIR", f"{len(records)} steps", f"at least {MIN_STEPS} beside {KEY}")
    if not has_enough(planned, records):
        num_alike = len(compared(planned, records))
        allowed = f"at least {MIN_STEPS - NUM_FIRST} with updates after the first {NUM_FIRST} beside {KEY}"
        raise ConfigError("RUN_DIR", f"{num_alike} of {len(records)} steps", allowed)
    return compare(planned, records)


def has_enough(planned: PlannedStep, records: Sequence[Record]) -> bool:
    """Whether so many steps are like the forecast one as a comparison takes."""
    return len(compared(planned, records)) >= MIN_STEPS - NUM_FIRST


def compared_lines(found: Comparison) -> list[str]:
    """Return the sentence and the table by lane."""
    header = ["lane", "bytes forecast", "measured", "seconds forecast", "measured"]
    of_bytes, planned_s = (found.forecast_bytes, found.num_bytes), found.planned.lanes_s
    names = {*found.forecast_bytes, *found.num_bytes, *planned_s}
    rows = [
        [
            name,
            *(_text(size_text, table.get(name)) for table in of_bytes),
            *(_text(duration_text, table.get(name)) for table in (planned_s, found.lanes_s)),
        ]
        for name in sorted(names)
    ]
    return [found.sentence, *text_table(header, rows)]


def read_planned_step(path: str) -> PlannedStep:
    """Read the forecast of a plan. Raises ConfigError."""
    plan = load_json(KEY, path, format_name=FORMAT, format_version=FORMAT_VERSION)
    found, traffic = plan.get("forecast"), plan.get("traffic")
    phases: list[Any] = list(traffic.values()) if isinstance(traffic, dict) else [None]
    if not isinstance(found, dict) or not _is_positive(found.get("seconds")):
        raise ConfigError(KEY, path, "a plan with a forecast of the step's time: this one has none")
    parts_s = found.get("parts_s", {})
    if not all(map(_is_table, (found.get("lanes_s"), parts_s, *phases))):
        raise ConfigError(KEY, path, "is damaged: lanes and traffic are tables of numbers")
    num_bytes: dict[str, float] = {}
    for lanes in phases:
        for lane, size in lanes.items():
            num_bytes[lane] = num_bytes.get(lane, 0) + size
    hardware = plan.get("hardware")
    num_cores = hardware.get("num_cores") if isinstance(hardware, dict) else None
    alone_s = parts_alone(parts_s, num_cores) if isinstance(num_cores, int) and num_cores > 0 else {}
    lane = found.get("lane")
    return PlannedStep(
        found["seconds"], found["lanes_s"], num_bytes, lane if isinstance(lane, str) else "", alone_s
    )


def read_own_forecast(directory: Path) -> PlannedStep | None:
    """Read the forecast that a run made of itself; None where it made none. Raises ConfigError."""
    path = directory / FORECAST_FILE
    if not path.exists():
        return None
    found = load_json("RUN_DIR", str(path), format_name=FORECAST_FORMAT, format_version=RUN_FORMAT_VERSION)
    tables = [found.get(name) for name in ("lanes_s", "num_bytes", "parts_s")]
    lane = found.get("lane")
    if not _is_positive(found.get("seconds")) or not all(map(_is_table, tables)) or not isinstance(lane, str):
        raise ConfigError("RUN_DIR", str(path), "is damaged: not the forecast of a step")
    return PlannedStep(found["seconds"], found["lanes_s"], found["num_bytes"], lane, found["parts_s"])


def _text(form: Any, value: float | None) -> str:
    return "" if value is None else str(form(value))


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e30


def _is_positive(value: object) -> bool:
    return _is_number(value) and value != 0
