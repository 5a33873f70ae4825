"""The samples of `bench nvme` as medians, a config block, a sentence and a table; two results compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offloadzero.cli.nvme_sweep import (
    STATE_BYTES_PER_PARAM,
    Point,
    Traffic,
    best,
    medians_by_point,
    params_in,
    recommend,
    reference_point,
    step_seconds,
)
from offloadzero.cli.nvme_traffic import Sample
from offloadzero.cli.output import text_table
from offloadzero.cli.units import size_text
from offloadzero.errors import ConfigError
from offloadzero.observe.texts import duration_text
from offloadzero.planning.machine import MEMORY_FILESYSTEMS
from offloadzero.planning.result_file import load_json

FORMAT = "offloadzero.bench.nvme"
FORMAT_VERSION = 1
SWEEP_PHASES = ("coarse", "refine", "confirm")
STEP_TIME_S = 10.0

Row = dict[str, Any]


# --- From samples to numbers ---


def deciding_samples(samples: Sequence[Sample], traffic: Traffic) -> list[Sample]:
    """Return the samples of the confirmation, as the sweep's may be lucky; without any, the sweep's."""
    ours = [s for s in samples if s.traffic == traffic.value and s.tool == "offloadzero"]
    confirmed = [sample for sample in ours if sample.phase == "confirm"]
    return confirmed or [sample for sample in ours if sample.phase in SWEEP_PHASES]


def medians(samples: Sequence[Sample], traffic: Traffic) -> dict[Point, float]:
    """Return the bytes per second of each point that was confirmed."""
    return medians_by_point([(s.point, s.bytes_per_s) for s in deciding_samples(samples, traffic)])


def saved_medians(result: Mapping[str, Any], traffic: str) -> dict[Point, float]:
    """Return the GB/s of each point that the sweep of a saved result has measured, in the order of points."""
    rates = [
        (Point.from_json(sample["point"]), sample["gb_per_s"])
        for sample in result["samples"]
        if sample["traffic"] == traffic and sample["phase"] in SWEEP_PHASES
    ]
    return dict(sorted(medians_by_point(rates).items()))


def chosen_point(samples: Sequence[Sample], backends: Sequence[str]) -> Point:
    """Return the setting to recommend: the best for mixed traffic, or for another where there is none."""
    for traffic in (Traffic.MIXED, Traffic.READ, Traffic.WRITE):
        rates = medians(samples, traffic)
        if rates:
            return recommend(rates, backends)
    return reference_point(backends[0])


def conclude(result: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the parts of the result that follow from the samples: results, meaning, config."""
    backends = [name for name, word in result["backends"].items() if word == "available"]
    chosen = chosen_point(samples, backends)
    rows = [
        row
        for traffic in Traffic
        for row in _traffic_rows(samples, traffic, chosen, reference_point(backends[0]))
    ]
    sustained = _long_write(samples, "sustained")
    return {
        "results": {
            "traffic": rows,
            "first_write": _long_write(samples, "fill"),
            "sustained_write": sustained,
            "striping": _striping_rows(samples),
            "fio": _fio_rows(samples),
        },
        "config": config_block(chosen, backends),
        "meaning": _meaning(medians(samples, Traffic.MIXED).get(chosen), sustained, result["paths"]),
    }


def config_block(point: Point, backends: Sequence[str]) -> dict[str, Any]:
    """Return the keys for `offloadzero.initialize`; the backend only where it is not AUTO's choice."""
    block: dict[str, Any] = {
        "aio": {
            "block_size": point.block_size,
            "queue_depth": -(-point.queue_depth // point.num_threads),  # the key is for each thread
            "intra_op_parallelism": point.num_threads,
        }
    }
    if point.backend != backends[0]:
        block["offloadzero"] = {"aio": {"backend": point.backend}}
    return block


def _traffic_rows(samples: Sequence[Sample], traffic: Traffic, chosen: Point, reference: Point) -> list[Row]:
    rates = medians(samples, traffic)
    roles: dict[Point, list[str]] = {}
    for role, point in (("best", best(rates) if rates else None), ("config", chosen), ("default", reference)):
        if point is not None:
            roles.setdefault(point, []).append(role)
    everything = [
        s
        for s in samples
        if s.traffic == traffic.value and s.tool == "offloadzero" and s.phase in SWEEP_PHASES
    ]
    rows = []
    for point, names in roles.items():
        group = [s for s in deciding_samples(samples, traffic) if s.point == point]
        group = group or [s for s in everything if s.point == point]
        if group:
            rows.append({"traffic": traffic.value, "roles": names, **summary(group)})
    return rows


def summary(group: Sequence[Sample]) -> Row:
    """Return the medians over the samples of one point and one kind of traffic."""
    rates = [sample.bytes_per_s / 1e9 for sample in group]
    return {
        "point": group[0].point.to_json(),
        "direct": all(sample.direct for sample in group),
        "num_samples": len(group),
        "gb_per_s": statistics.median(rates),
        "gb_per_s_min": min(rates),
        "gb_per_s_max": max(rates),
        "operation_bytes": group[0].operation_bytes,
        "latency_p50_s": statistics.median(sample.latency_p50_s for sample in group),
        "latency_p99_s": statistics.median(sample.latency_p99_s for sample in group),
        "cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in group),
    }


def _long_write(samples: Sequence[Sample], phase: str) -> Row | None:
    """Return the rate in the first fifth of the time and in the second half: bytes over time."""
    found = [sample for sample in samples if sample.phase == phase]
    if not found:
        return None
    sample = found[-1]
    row = {
        "point": sample.point.to_json(),
        "seconds": sample.seconds,
        "bytes_written": sample.bytes_written,
        "gb_per_s": sample.bytes_per_s / 1e9,
        "burst_gb_per_s": None,
        "sustained_gb_per_s": sample.bytes_per_s / 1e9,
        "sync_s": sample.sync_s,
    }
    if len(sample.timeline) >= 10 and sample.direct:
        row["burst_gb_per_s"] = _rate(sample.timeline, 0, len(sample.timeline) // 5)
        row["sustained_gb_per_s"] = _rate(sample.timeline, len(sample.timeline) // 2, None)
    return row


def _rate(timeline: Sequence[tuple[float, int]], first: int, last: int | None) -> float:
    """Return the GB/s in the intervals [first, last)."""
    begin_s = timeline[first - 1][0] if first else 0.0
    part = timeline[first:last]
    return sum(num_bytes for _, num_bytes in part) / (part[-1][0] - begin_s) / 1e9


def _striping_rows(samples: Sequence[Sample]) -> list[Row]:
    groups: dict[tuple[str, tuple[int, ...]], list[Sample]] = {}
    for sample in samples:
        if sample.phase == "scaling":
            groups.setdefault((sample.traffic, sample.paths), []).append(sample)
    return [
        {"traffic": traffic, "paths": list(paths), **summary(group)}
        for (traffic, paths), group in sorted(groups.items())
    ]


def _fio_rows(samples: Sequence[Sample]) -> list[Row]:
    """Return the medians of the ratios of the pairs, the engine's over fio's."""
    groups: dict[tuple[str, Point], dict[str, list[Sample]]] = {}
    for sample in samples:
        if sample.phase == "verify":
            group = groups.setdefault((sample.traffic, sample.point), {"offloadzero": [], "fio": []})
            group[sample.tool].append(sample)
    rows = []
    for (traffic, point), group in groups.items():
        pairs = list(zip(group["offloadzero"], group["fio"], strict=False))
        if pairs:
            rows.append(
                {
                    "traffic": traffic,
                    "point": point.to_json(),
                    "num_pairs": len(pairs),
                    "gb_per_s": statistics.median(ours.bytes_per_s / 1e9 for ours, _ in pairs),
                    "fio_gb_per_s": statistics.median(fio.bytes_per_s / 1e9 for _, fio in pairs),
                    "ratio": statistics.median(ours.bytes_per_s / fio.bytes_per_s for ours, fio in pairs),
                    "cpu_s_per_gb": statistics.median(ours.cpu_s_per_gb for ours, _ in pairs),
                    "fio_cpu_s_per_gb": statistics.median(fio.cpu_s_per_gb for _, fio in pairs),
                }
            )
    return rows


def _meaning(
    mixed_bps: float | None, sustained: Row | None, paths: Sequence[Mapping[str, Any]]
) -> Row | None:
    if mixed_bps is None:
        return None
    write_bps = sustained["sustained_gb_per_s"] * 1e9 if sustained else None
    num_params = params_in(STEP_TIME_S, mixed_bps=mixed_bps, sustained_write_bps=write_bps)
    billion_s = step_seconds(1e9, mixed_bps=mixed_bps, sustained_write_bps=write_bps)
    what = "this drive sustains" if len(paths) == 1 else f"these {len(paths)} paths together sustain"
    return {
        "mixed_gb_per_s": mixed_bps / 1e9,
        "sustained_write_gb_per_s": write_bps / 1e9 if write_bps else None,
        "step_s": STEP_TIME_S,
        "num_params": num_params,
        "step_s_per_billion_params": billion_s,
        "capacity_params": sum(path["free_bytes"] for path in paths) / STATE_BYTES_PER_PARAM,
        "text": f"{what} the optimizer states of {num_params / 1e9:.3g} billion parameters at "
        f"{STEP_TIME_S:g} seconds per step",
    }


# --- From numbers to text ---


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the result as text."""
    results = result["results"]
    lines = [*_heading(result), "", *_traffic_table(results["traffic"])]
    lines += ["", *_write_lines(results)]
    if results["striping"]:
        lines += ["", *_striping_table(results["striping"], result["arguments"]["paths"])]
    if results["fio"]:
        lines += ["", *_fio_table(results["fio"])]
    if result["notes"]:
        lines += ["", *(f"note: {note}" for note in result["notes"])]
    lines += ["", *_meaning_lines(result["meaning"])]
    lines += ["", "For the configuration:", "", *json.dumps(result["config"], indent=2).splitlines()]
    return lines


def _heading(result: Mapping[str, Any]) -> list[str]:
    machine = result["machine"]
    lines = []
    for path, direct in zip(result["paths"], result["direct"], strict=True):
        device = path["device"]
        words = [path["filesystem"] or "unknown filesystem"]
        if device:
            words.append(" ".join(filter(None, (device["name"], device["model"]))))
        lines.append(f"{path['path']}: {', '.join(words)}; {direct_words(path, direct)}")
    memory = size_text(machine["memory_bytes"]) if machine["memory_bytes"] else "unknown memory"
    virtual = ", virtual machine" if machine["is_virtual_machine"] else ""
    lines.append(f"{machine['cpu']}, {machine['num_cores']} cores, {memory}, {machine['kernel']}{virtual}")
    unavailable = [f"{name} ({word})" for name, word in result["backends"].items() if word != "available"]
    if unavailable:
        lines.append(f"not available: {', '.join(unavailable)}")
    lines.append(
        f"{result['duration_s']:.0f} s, {len(result['samples'])} samples, "
        f"{size_text(result['bytes_written'])} written"
    )
    return lines


def direct_words(path: Mapping[str, Any], direct: str) -> str:
    if path["filesystem"] in MEMORY_FILESYSTEMS:  # newer kernels accept O_DIRECT there, too
        return "in memory: no drive is measured"
    if direct == "O_DIRECT":
        return "O_DIRECT, past the page cache"
    return f"no O_DIRECT ({direct}): through the page cache, which is dropped before and written out within"


def _point_cells(point: Mapping[str, Any]) -> list[str]:
    return [
        point["backend"],
        size_text(point["block_size"]),
        str(point["queue_depth"]),
        str(point["num_threads"]),
    ]


_POINT_HEADER = ("backend", "block", "depth", "threads")


def _traffic_table(rows: Sequence[Row]) -> list[str]:
    header = (
        "traffic",
        "setting",
        *_POINT_HEADER,
        "GB/s",
        "min-max",
        "operation",
        "p50",
        "p99",
        "CPU s/GB",
        "n",
    )
    body = [
        [
            row["traffic"],
            " = ".join(row["roles"]),
            *_point_cells(row["point"]),
            f"{row['gb_per_s']:.2f}",
            f"{row['gb_per_s_min']:.2f}-{row['gb_per_s_max']:.2f}",
            size_text(row["operation_bytes"]),
            duration_text(row["latency_p50_s"]),
            duration_text(row["latency_p99_s"]),
            f"{row['cpu_s_per_gb']:.3f}",
            str(row["num_samples"]),
        ]
        for row in rows
    ]
    return text_table(header, body, num_left=3)


def _write_lines(results: Mapping[str, Any]) -> list[str]:
    lines = []
    first, sustained = results["first_write"], results["sustained_write"]
    if first:
        lines.append(
            f"first write of the file: {first['gb_per_s']:.2f} GB/s over {size_text(first['bytes_written'])}"
        )
    if sustained:
        burst = f"{sustained['burst_gb_per_s']:.2f} GB/s at first, " if sustained["burst_gb_per_s"] else ""
        sync = f", fdatasync {duration_text(sustained['sync_s'])}" if sustained["sync_s"] is not None else ""
        lines.append(
            f"sustained write: {burst}{sustained['sustained_gb_per_s']:.2f} GB/s in the end, after "
            f"{size_text(sustained['bytes_written'])} in {sustained['seconds']:.1f} s{sync}"
        )
    return lines


def _striping_table(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    alone: dict[str, float] = {}
    for row in rows:
        if len(row["paths"]) == 1:
            alone[row["traffic"]] = alone.get(row["traffic"], 0.0) + row["gb_per_s"]
    body = []
    for row in rows:
        is_all = len(row["paths"]) > 1
        share = f"{row['gb_per_s'] / alone[row['traffic']]:.2f}" if is_all and row["traffic"] in alone else ""
        name = "all together" if is_all else names[row["paths"][0]]
        body.append([row["traffic"], name, f"{row['gb_per_s']:.2f}", share, str(row["num_samples"])])
    return text_table(("traffic", "path", "GB/s", "of the sum", "n"), body, num_left=2)


def _fio_table(rows: Sequence[Row]) -> list[str]:
    header = ("traffic", *_POINT_HEADER, "GB/s", "fio GB/s", "ratio", "CPU s/GB", "fio CPU s/GB", "pairs")
    body = [
        [
            row["traffic"],
            *_point_cells(row["point"]),
            f"{row['gb_per_s']:.2f}",
            f"{row['fio_gb_per_s']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['cpu_s_per_gb']:.3f}",
            f"{row['fio_cpu_s_per_gb']:.3f}",
            str(row["num_pairs"]),
        ]
        for row in rows
    ]
    return ["fio is always fio's io_uring:", *text_table(header, body, num_left=2)]


def _meaning_lines(meaning: Row | None) -> list[str]:
    if meaning is None:
        return ["mixed traffic was not measured: give more --time or a higher --write-limit"]
    times = ", ".join(
        f"{billions:g} billion {duration_text(billions * meaning['step_s_per_billion_params'])}"
        for billions in (1, 7, 13, 70)
    )
    capacity = meaning["capacity_params"] / 1e9
    return [
        f"{meaning['text'][0].upper()}{meaning['text'][1:]}.",
        f"(Files alone, per step: {times}; the free space holds {capacity:.3g} billion.)",
    ]


# --- Two results side by side ---

_Line = tuple[str, float, float]


def compare_files(first: str, second: str) -> list[str]:
    """Compare two results. Raises ConfigError when one of them is none of `bench nvme --json`."""
    results = [
        load_json("--compare", path, format_name=FORMAT, format_version=FORMAT_VERSION)
        for path in (first, second)
    ]
    names = ("A", "B")
    try:
        lines = [
            f"{name}: {path}, {_describe(result)}"
            for name, path, result in zip(names, (first, second), results, strict=True)
        ]
        rows = [*_headline(*results), *_same_points(*results)]
        body = [[what, f"{a:.3g}", f"{b:.3g}", f"{b / a:.3f}" if a else ""] for what, a, b in rows]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Any damage shows as one of these errors where a value is used.
        raise ConfigError("--compare", f"{first}, {second}", f"not whole: {error!r:.200}") from error
    return [*lines, "", *text_table(("", *names, "B/A"), body)]


def _describe(result: Mapping[str, Any]) -> str:
    paths = ", ".join(result["arguments"]["paths"])
    machine = result["machine"]
    return f"{paths} on {machine['cpu']}, {machine['kernel']}, {result['started_at']}"


def _headline(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[_Line]:
    for traffic in ("read", "write", "mixed"):
        rows = [_row(result, traffic) for result in (a, b)]
        if rows[0] and rows[1]:
            for key, unit, scale in (
                ("gb_per_s", "GB/s", 1.0),
                ("latency_p50_s", "p50 ms", 1e3),
                ("latency_p99_s", "p99 ms", 1e3),
                ("cpu_s_per_gb", "CPU s/GB", 1.0),
            ):
                yield f"{traffic} at its best: {unit}", rows[0][key] * scale, rows[1][key] * scale
    for key in ("first_write", "sustained_write"):
        values = [result["results"][key] for result in (a, b)]
        if values[0] and values[1]:
            words = key.replace("_", " ")
            yield f"{words}: GB/s", values[0]["sustained_gb_per_s"], values[1]["sustained_gb_per_s"]
    if a["meaning"] and b["meaning"]:
        what = f"billion parameters at {a['meaning']['step_s']:g} s per step"
        yield what, a["meaning"]["num_params"] / 1e9, b["meaning"]["num_params"] / 1e9


def _row(result: Mapping[str, Any], traffic: str) -> Mapping[str, Any] | None:
    rows = [row for row in result["results"]["traffic"] if row["traffic"] == traffic]
    return max(rows, key=lambda row: row["gb_per_s"], default=None)


def _same_points(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[_Line]:
    """Return the GB/s at the points that both have measured."""
    for traffic in Traffic:
        first, second = (saved_medians(result, traffic.value) for result in (a, b))
        for point, rate in first.items():
            if point in second:
                setting = f"{point.backend} {size_text(point.block_size)} x {point.queue_depth}"
                what = f"{traffic.value} {setting}, threads {point.num_threads}: GB/s"
                yield what, rate, second[point]
