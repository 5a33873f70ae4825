"""`offloadzero report`: a run directory as one HTML page, [Note: the page] in cli/output.py.

With --live the page follows the run, [Note: who may ask for the page] in cli/live.py.
"""

from __future__ import annotations

import argparse
import errno
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from offloadzero.cli.live import serve
from offloadzero.cli.output import check_output, make_page, print_lines, save_text, text_table
from offloadzero.cli.plan.command import FORMAT as PLAN_FORMAT
from offloadzero.cli.plan.command import FORMAT_VERSION as PLAN_FORMAT_VERSION
from offloadzero.errors import AioError, ConfigError
from offloadzero.observe.forecast import (
    MIN_STEPS,
    NUM_FIRST,
    Comparison,
    PlannedStep,
    compare,
    compared,
    parts_alone,
)
from offloadzero.observe.monitor import (
    FORECAST_FILE,
    FORECAST_FORMAT,
    FORMAT,
    FORMAT_VERSION,
    RUN_FILE,
    STEPS_FILE,
    TRACE_FILES,
    is_written,
)
from offloadzero.observe.texts import duration_text, size_text
from offloadzero.planning.result_file import load_json, parse_json

PAGE = "report.html"
MAX_POINTS = 600  # of a chart; longer runs are drawn as means of consecutive steps
MAX_SPANS = 20_000  # of a traced step
_MAX_NUMBER = 1e30
NUM_WARM_UP = 2  # steps that the summary leaves out when there are more

KEY = "--plan"

Record = dict[str, Any]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="make one HTML page of a run directory",
        description='Makes one self-contained HTML page of the directory that "offloadzero": {"observe": '
        '{"run_dir": ...}} names: memory by tier, the lanes of traced steps, loss, waits, step times and bounds.',
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the directory")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("-o", "--output", metavar="FILE", help="the page (default RUN_DIR/report.html)")
    way.add_argument(
        "--live",
        action="store_true",
        help="serve the page to this machine's browser until Ctrl-C; it follows the run",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="of 127.0.0.1, beside --live (default: any that is free)"
    )
    parser.add_argument(
        "--plan", metavar="FILE", help="the forecast beside it: a file of `offloadzero plan --json`"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    directory = Path(args.run_dir)
    planned = None if args.plan is None else read_planned_step(args.plan)
    if args.live:
        data = live_data(directory, planned)
        print_lines([data["live"]])
        serve(make_page(PAGE, data), lambda: live_data(directory, planned), port=args.port)
        return 0
    output = args.output or str(directory / "report.html")
    description = read_description(directory)
    check_output("--output", output)
    steps = read_steps(directory / STEPS_FILE)
    if planned is not None:
        expect_enough(planned, steps.records)
    compared = compared_with(directory, planned, steps.records)
    data = page_data(directory, description, steps, compared)
    save_text(output, make_page(PAGE, data))
    lines = [] if compared is None else compared_lines(compared)
    print_lines([data["summary"], *lines, f"written to {output}"])
    return 0


def read_description(directory: Path) -> dict[str, Any]:
    """Read run.json. Raises ConfigError."""
    path = str(directory / RUN_FILE)
    found = load_json("RUN_DIR", path, format_name=FORMAT, format_version=FORMAT_VERSION)
    if not _are_tiers(found.get("tiers", {})):
        raise ConfigError(
            "RUN_DIR", str(directory), f"{RUN_FILE} is damaged: tiers are lists of what and num_bytes"
        )
    return found


def compared_with(
    directory: Path, planned: PlannedStep | None, records: Sequence[Record]
) -> Comparison | None:
    """Compare the run with a plan, else with the forecast that it made of itself, once it has steps enough."""
    planned = planned or read_own_forecast(directory)
    return compare(planned, records) if planned is not None and has_enough(planned, records) else None


# --- a run that goes on ---


def live_data(directory: Path, planned: PlannedStep | None) -> dict[str, Any]:
    """Return the page's data as the run has written them so far, and under "live" what is known of the run itself."""
    has_begun, is_running = (directory / RUN_FILE).exists(), is_written(directory)
    description = read_description(directory) if has_begun else {}
    steps = read_steps(directory / STEPS_FILE, is_running=is_running is not False)
    if not has_begun:
        live = f"The run has not begun: there is no {RUN_FILE} in {directory}."
    elif is_running is None:
        live = "Whether the run goes on is not known: its file system has no locks."
    elif is_running:
        live = "The run goes on, and this page follows it."
    else:
        live = (
            f"The run was killed while it wrote a line of {STEPS_FILE}."
            if steps.is_cut
            else "The run has ended."
        )
    compared = compared_with(directory, planned, steps.records)
    return {**page_data(directory, description, steps, compared), "live": live}


def _are_tiers(tiers: object) -> bool:
    return isinstance(tiers, dict) and all(
        isinstance(lines, list) and all(map(_is_tier_line, lines)) for lines in tiers.values()
    )


def _is_tier_line(line: object) -> bool:
    return isinstance(line, dict) and isinstance(line.get("what"), str) and _is_number(line.get("num_bytes"))


def page_data(
    directory: Path, description: Mapping[str, Any], steps: Steps, compared: Comparison | None
) -> dict[str, Any]:
    records, num_unreadable, _ = steps
    traces, notes = read_traces(directory)
    if num_unreadable:
        notes.append(f"Lines of {STEPS_FILE} that cannot be read (a run that was killed?): {num_unreadable}.")
    if any(record.get("spans_lost") for record in records):
        notes.append("Some steps recorded more spans than fit in memory: their bytes and bounds are too low.")
    tiles = facts(records, description)
    if compared is not None:
        notes.append(compared.sentence)
        tiles.insert(1, ["forecast", duration_text(compared.planned.seconds)])
    return {
        "title": directory.resolve().name,
        "summary": summary(records),
        "facts": tiles,
        "tiers": description.get("tiers", {}),
        "lane_columns": LANE_COLUMNS,
        "lanes": lane_rows(records),
        "steps": series(records),
        "traces": traces,
        "notes": notes,
    }


# --- reading ---


class Steps(NamedTuple):
    records: list[Record]  # in order of their steps
    num_unreadable: int  # lines that are no records
    is_cut: bool  # whether the last line has no end


def read_steps(path: Path, *, is_running: bool = False) -> Steps:
    """Read the records. While the run goes on a last line without an end is one that is being written: left out.

    A run that goes on from an earlier step, as after a crash, replaces the records from there on.
    """
    records: list[Record] = []
    num_unreadable = 0
    text = _text(path) if path.exists() else ""
    lines = text.splitlines()
    is_cut = bool(text) and not text.endswith("\n")
    for line in lines[:-1] if is_cut and is_running else lines:
        record = _step_record(line)
        if record is None:
            num_unreadable += 1
            continue
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    return Steps(records, num_unreadable, is_cut)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise AioError(
            operation="read", path=str(path), offset=0, num_bytes=0, errno=error.errno or errno.EIO
        ) from error


def _step_record(line: str) -> Record | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    numbers = ("step", "step_s", "bound_s", "efficiency")
    tables = ("lanes_s", "busy_s", "bytes", "waits_s")
    is_whole = all(_is_number(record.get(key)) for key in numbers) and all(
        isinstance(record.get(key), dict) and all(map(_is_number, record[key].values())) for key in tables
    )
    return record if is_whole else None


def _is_number(value: object) -> bool:
    """Whether a run can have measured the number: sums of such numbers stay finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER


def read_traces(directory: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the traced steps in order, and a sentence for each that cannot be shown whole."""
    traces, notes = [], []
    for path in directory.glob(TRACE_FILES):
        try:
            trace, num_left_out = _read_trace(path, path.stat().st_mtime_ns)
        except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # Any damage shows as one of these errors where a value is used.
            notes.append(f"{path.name} cannot be read.")
            continue
        traces.append(trace)
        if num_left_out:
            notes.append(f"{path.name}: the {num_left_out} shortest spans are left out of this page.")
    return sorted(traces, key=lambda trace: trace["step"]), notes


@lru_cache(maxsize=64)
def _read_trace(path: Path, _mtime_ns: int) -> tuple[dict[str, Any], int]:
    """Read a trace once, as long as its file is the same: a page that follows a run asks often."""
    return compact_trace(parse_json(path.read_text(encoding="utf-8"))["traceEvents"])


def compact_trace(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], int]:
    """Return a trace for the page as lanes of [start, length, name, bytes, track, wait], and how many spans are left
    out.

    Times in microseconds after the step's start; names are indices into `names`.
    """
    lane_of = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    (step,) = (event for event in spans if event["cat"] == "step")
    spans = sorted((e for e in spans if e is not step), key=lambda event: -event["dur"])
    num_left_out = max(len(spans) - MAX_SPANS, 0)
    names: dict[str, int] = {}
    lanes: dict[str, dict[str, Any]] = {}
    for event in sorted(spans[:MAX_SPANS], key=lambda event: (event["tid"], event["ts"])):
        lane = str(lane_of[event["tid"]])
        entry = lanes.setdefault(lane, {"name": lane, "tracks": [], "spans": []})
        if event["tid"] not in entry["tracks"]:
            entry["tracks"].append(event["tid"])
        name = names.setdefault(str(event["name"]), len(names))
        num_bytes = int(event["args"].get("bytes", 0))
        start_us = round(event["ts"] - step["ts"], 3)
        track = entry["tracks"].index(event["tid"])
        is_wait = int(event["cat"] == "wait")
        entry["spans"].append([start_us, event["dur"], name, num_bytes, track, is_wait])
    shown = [
        {"name": lane["name"], "num_tracks": len(lane["tracks"]), "spans": lane["spans"]}
        for lane in lanes.values()
    ]
    number = int(str(step["name"]).removeprefix("step "))
    return {"step": number, "length_us": step["dur"], "names": list(names), "lanes": shown}, num_left_out


# --- the page's content ---


def steady(records: Sequence[Record]) -> Sequence[Record]:
    """Return the steps without the first ones, which record the order of use and fill the caches."""
    return records[NUM_WARM_UP:] if len(records) > NUM_WARM_UP else records


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def summary(records: Sequence[Record]) -> str:
    if not records:
        return "No step has been recorded yet."
    shown = steady(records)
    step_s = _median(r["step_s"] for r in shown)
    efficiency = _median(r["efficiency"] for r in shown)
    lanes = [str(r.get("bound_lane", "")) for r in shown]
    lane = max(set(lanes), key=lanes.count)
    total_s = sum(r["step_s"] for r in shown)
    waits: Counter[str] = Counter()
    for record in shown:
        waits.update(record["waits_s"])
    text = ", ".join(f"{name} {s / total_s:.1%}" for name, s in waits.most_common(3) if total_s > 0)
    return (
        f"A step takes {duration_text(step_s)} (median); {lane} alone needs {efficiency:.1%} of that; "
        f"largest waits: {text or 'none'}."
    )


def facts(records: Sequence[Record], description: Mapping[str, Any]) -> list[list[str]]:
    """Return label and value of the tiles on top."""
    shown = steady(records)
    tiles = []
    if shown:
        wait = _median(sum(r["waits_s"].values()) / r["step_s"] if r["step_s"] else 0.0 for r in shown)
        tiles += [
            ["step (median)", duration_text(_median(r["step_s"] for r in shown))],
            ["bound (median)", duration_text(_median(r["bound_s"] for r in shown))],
            ["overlap efficiency", f"{_median(r['efficiency'] for r in shown):.1%}"],
            ["in named waits", f"{wait:.1%}"],
        ]
        num_units = description.get("num_units")
        if _is_number(num_units) and num_units and all(_is_number(r.get("launch_s")) for r in shown):
            launch_s = _median(r["launch_s"] for r in shown) / float(str(num_units))
            tiles.append(["hooks per unit", duration_text(launch_s)])
    tiles.append(["steps", str(len(records))])
    parameters = description.get("num_parameters")
    if _is_number(parameters):
        tiles.append(["parameters", f"{parameters:,}"])
    tiles.append(["device", str(description.get("device", "unknown"))])
    if description.get("file_engine"):
        tiles.append(["file engine", str(description["file_engine"])])
    return tiles


LANE_COLUMNS = ("lane", "bytes per step", "busy", "of the step", "rate", "least time")


def lane_rows(records: Sequence[Record]) -> list[list[str]]:
    """Return a row of LANE_COLUMNS for each lane: medians, and the busy time's share of the step."""
    shown = steady(records)
    rows = []
    for lane in sorted({lane for r in shown for lane in (*r["bytes"], *r["lanes_s"])}):
        of_lane = [r for r in shown if lane in r["bytes"]]
        num_bytes = _median(r["bytes"][lane] for r in of_lane)
        busy_s = _median(r["busy_s"].get(lane, 0.0) for r in of_lane)
        share = _median(r["busy_s"].get(lane, 0.0) / r["step_s"] if r["step_s"] else 0.0 for r in of_lane)
        least = [r["lanes_s"][lane] for r in shown if lane in r["lanes_s"]]
        rows.append(
            [
                lane,
                size_text(num_bytes) if of_lane else "",
                duration_text(busy_s) if of_lane else "",
                f"{share:.1%}" if of_lane else "",
                f"{num_bytes / busy_s / 1e9:.2f} GB/s" if of_lane and busy_s > 0 else "",
                duration_text(_median(least)) if least else "",
            ]
        )
    return rows


def series(records: Sequence[Record]) -> dict[str, Any]:
    """Return the charts' data: at most MAX_POINTS points, each the mean of `group` consecutive steps."""
    group = -(-len(records) // MAX_POINTS) or 1
    groups = [records[i : i + group] for i in range(0, len(records), group)]
    names = sorted({name for record in records for name in record["waits_s"]})
    has_loss = any("loss" in record for record in records)

    def mean(values: Iterable[float | None]) -> float | None:
        found = [value for value in values if value is not None and _is_number(value)]
        return sum(found) / len(found) if found else None

    return {
        "group": group,
        "step": [g[-1]["step"] for g in groups],
        "step_s": [mean(r["step_s"] for r in g) for g in groups],
        "bound_s": [mean(r["bound_s"] for r in g) for g in groups],
        "waits_s": {name: [mean(r["waits_s"].get(name, 0.0) for r in g) for g in groups] for name in names},
        "loss": [mean(r.get("loss") for r in g) for g in groups] if has_loss else None,
    }


# --- beside a forecast: that of `offloadzero plan --json`, or the one that the run made of itself ---


def expect_enough(planned: PlannedStep, records: Sequence[Record]) -> None:
    """Raise ConfigError where a run has too few steps to be compared with the plan that is named beside it."""
    if len(records) < MIN_STEPS:
        raise ConfigError("RUN_DIR", f"{len(records)} steps", f"at least {MIN_STEPS} beside {KEY}")
    if not has_enough(planned, records):
        num_alike = len(compared(planned, records))
        allowed = f"at least {MIN_STEPS - NUM_FIRST} with updates after the first {NUM_FIRST} beside {KEY}"
        raise ConfigError("RUN_DIR", f"{num_alike} of {len(records)} steps", allowed)


def has_enough(planned: PlannedStep, records: Sequence[Record]) -> bool:
    """Whether so many steps are like the forecast one as a comparison takes."""
    return len(compared(planned, records)) >= MIN_STEPS - NUM_FIRST


def compared_lines(found: Comparison) -> list[str]:
    header = ["lane", "bytes forecast", "measured", "seconds forecast", "measured"]
    of_bytes, of_seconds = (found.forecast_bytes, found.num_bytes), (found.planned.lanes_s, found.lanes_s)
    rows = [
        [
            name,
            *(size_text(table[name]) if name in table else "" for table in of_bytes),
            *(duration_text(table[name]) if name in table else "" for table in of_seconds),
        ]
        for name in sorted({*found.forecast_bytes, *found.num_bytes, *found.planned.lanes_s})
    ]
    return [found.sentence, *text_table(header, rows)]


def read_planned_step(path: str) -> PlannedStep:
    """Read the forecast of a plan. Raises ConfigError."""
    plan = load_json(KEY, path, format_name=PLAN_FORMAT, format_version=PLAN_FORMAT_VERSION)
    found, traffic = plan.get("forecast"), plan.get("traffic")
    if not isinstance(found, dict) or not _is_amount(found.get("seconds")) or not found["seconds"]:
        raise ConfigError(KEY, path, "a plan with a forecast of the step's time: this one has none")
    phases: list[Any] = list(traffic.values()) if isinstance(traffic, dict) else [None]
    parts_s = found.get("parts_s", {})
    if not all(map(_is_table, (found.get("lanes_s"), parts_s, *phases))):
        raise ConfigError(KEY, path, "is damaged: lanes and traffic are tables of numbers")
    num_bytes: dict[str, float] = {}
    for lane, size in (item for lanes in phases for item in lanes.items()):
        num_bytes[lane] = num_bytes.get(lane, 0) + size
    hardware = plan.get("hardware")
    num_cores = hardware.get("num_cores") if isinstance(hardware, dict) else None
    alone_s = parts_alone(parts_s, num_cores) if isinstance(num_cores, int) and num_cores > 0 else {}
    lane = found.get("lane")
    named = lane if isinstance(lane, str) else ""
    return PlannedStep(found["seconds"], found["lanes_s"], num_bytes, named, alone_s)


def read_own_forecast(directory: Path) -> PlannedStep | None:
    """Read the forecast that a run made of itself; None where it made none. Raises ConfigError."""
    path = directory / FORECAST_FILE
    if not path.exists():
        return None
    found = load_json("RUN_DIR", str(path), format_name=FORECAST_FORMAT, format_version=FORMAT_VERSION)
    seconds, lane = found.get("seconds"), found.get("lane")
    tables = [found.get(name) for name in ("lanes_s", "num_bytes", "parts_s")]
    is_whole = _is_amount(seconds) and seconds and isinstance(lane, str) and all(map(_is_table, tables))
    if not is_whole:
        raise ConfigError("RUN_DIR", str(path), "is damaged: not the forecast of a step")
    return PlannedStep(found["seconds"], found["lanes_s"], found["num_bytes"], str(lane), found["parts_s"])


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_amount, value.values()))


def _is_amount(value: object) -> bool:
    return _is_number(value) and value >= 0  # type: ignore[operator]
