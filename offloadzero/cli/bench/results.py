"""The decisions of `bench nvme`, on what to measure and on the result: medians, a config block, a sentence, a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from offloadzero.cli.bench.traffic import (
    KIB,
    MIB,
    NUM_CHUNKS_IN_FLIGHT,
    STATE_BYTES_PER_PARAM,
    Point,
    Sample,
    Traffic,
)
from offloadzero.cli.output import text_table
from offloadzero.config import AioConfig, UpdateConfig
from offloadzero.observe.texts import duration_text, size_text
from offloadzero.planning.machine import MEMORY_FILESYSTEMS

FORMAT = "offloadzero.bench.nvme"
FORMAT_VERSION = 1
SWEEP_PHASES = ("coarse", "confirm")
STEP_TIME_S = 10.0
TOLERANCE = 0.03  # medians that differ by less are equal on a drive that other programs use as well
MAX_CHUNK_ELEMENTS = UpdateConfig.chunk_elements
MIN_CHUNK_ELEMENTS = 4096  # its 2-byte segments are two blocks of 4 KiB

Row = dict[str, Any]


# --- What to measure ---


def reference_point(backend: str) -> Point:
    """Return the engine's setting without a configuration; measured on every drive, to compare drives."""
    return Point(backend, AioConfig.block_size, AioConfig.queue_depth, AioConfig.num_threads)


def coarse_points(backends: Sequence[str], *, max_in_flight_bytes: int, max_threads: int) -> list[Point]:
    """Return the grid, the most telling points first: the reference, block size by depth, backends, threads.

    `backends` are the available ones, the one AUTO takes first.
    """
    first = backends[0]
    reference = reference_point(first)
    sizes = (MIB, 256 * KIB, 4 * MIB, 16 * MIB)
    grid = [Point(first, block_size, depth, 1) for depth in (8, 64, 2) for block_size in sizes]
    others = [replace(reference, backend=backend) for backend in backends[1:]]
    threads = [replace(reference, num_threads=number) for number in (2, 4) if number <= max_threads]
    wanted = [*grid[:3], *others, *threads, *grid[3:]]
    # The reference is measured even where it holds more in flight than the drive can use.
    return [
        reference,
        *dict.fromkeys(point for point in wanted if point.in_flight_bytes <= max_in_flight_bytes),
    ]


def ranked(scores: Mapping[Point, float]) -> list[Point]:
    """Return the points, the best first; equal ones by the order of points, not by the mapping's."""
    return sorted(scores, key=lambda point: (-scores[point], point))


def recommend(medians: Mapping[Point, float], backends: Sequence[str]) -> Point:
    """Return the cheapest point within TOLERANCE of the best: fewest threads, AUTO's backend, least in flight."""
    least = max(medians.values()) * (1.0 - TOLERANCE)

    def cost(point: Point) -> tuple[int, ...]:
        rank = list(backends).index(point.backend)
        return point.num_threads, rank, point.in_flight_bytes, point.queue_depth

    return min((point for point, median in medians.items() if median >= least), key=cost)


def medians_by_point(rates: Iterable[tuple[Point, float]]) -> dict[Point, float]:
    by_point: dict[Point, list[float]] = {}
    for point, rate in rates:
        by_point.setdefault(point, []).append(rate)
    return {point: statistics.median(values) for point, values in by_point.items()}


def phase_ends(time_s: float, *, num_paths: int) -> dict[str, float]:
    """Split the time: the end of each phase, in seconds from the start.

    A phase that is early leaves its time to those after it; one that does not apply gets nothing.
    """
    shares = {
        "fill": 0.15,
        "coarse": 0.36,
        "confirm": 0.30,
        "scaling": 0.08 if num_paths > 1 else 0.0,
        "sustained": 0.19 if num_paths == 1 else 0.11,
    }
    scale = time_s / sum(shares.values())
    return {name: scale * end for name, end in zip(shares, accumulate(shares.values()), strict=True)}


def sample_seconds(available_s: float, num_samples: int, *, time_s: float) -> float:
    """Return the seconds of a sample such that `num_samples`, each with its warm-up and drain, fit.

    It is at least a quarter of a second, in runs of less than 25 seconds a hundredth of the run: then fewer fit.
    """
    return min(max(available_s / max(num_samples, 1) / 1.5, min(0.25, time_s / 100)), 0.5)


def max_in_flight_bytes(rate_bps: float, file_bytes: int) -> int:
    """Return at most the bytes that the drive moves in 0.2 s, so that a sample ends soon after it is told to.

    They are at least 8 MiB, at most 256 MiB and a quarter of the files (transfers in flight must not overlap).
    """
    return min(max(int(rate_bps * 0.2), 8 * MIB), 256 * MIB, file_bytes // 4)


def chunk_elements(in_flight_bytes: int, file_bytes: int) -> int:
    """Return the parameters per record: the update's default, less on slow drives and in small files. A power of 2."""
    limit = min(in_flight_bytes, file_bytes // 2) // (NUM_CHUNKS_IN_FLIGHT * STATE_BYTES_PER_PARAM)
    power = 1 << (max(limit, MIN_CHUNK_ELEMENTS).bit_length() - 1)
    return min(power, MAX_CHUNK_ELEMENTS)


# --- From samples to numbers ---


def of_sweep(samples: Sequence[Sample], traffic: Traffic) -> list[Sample]:
    return [sample for sample in samples if sample.traffic == traffic and sample.phase in SWEEP_PHASES]


def medians(samples: Sequence[Sample], traffic: Traffic) -> dict[Point, float]:
    """Return the bytes per second of each point that decides."""
    return medians_by_point((sample.point, sample.bytes_per_s) for sample in _deciding(samples, traffic))


def _deciding(samples: Sequence[Sample], traffic: Traffic) -> list[Sample]:
    """Return the samples of the confirmation, as the sweep's may be lucky; without any, the sweep's."""
    swept = of_sweep(samples, traffic)
    return [sample for sample in swept if sample.phase == "confirm"] or swept


def chosen_point(samples: Sequence[Sample], backends: Sequence[str]) -> Point | None:
    """Return the best setting for mixed traffic; None where that of the default, to compare with, was not measured."""
    rates = medians(samples, Traffic.MIXED)
    return recommend(rates, backends) if reference_point(backends[0]) in rates else None


def conclude(result: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the parts of the result that follow from the samples: results, meaning, config."""
    backends = [name for name, word in result["backends"].items() if word == "available"]
    chosen, reference = chosen_point(samples, backends), reference_point(backends[0])
    sustained = _long_write(samples, "sustained")
    return {
        "results": {
            "traffic": [row for kind in Traffic for row in _traffic_rows(samples, kind, chosen, reference)],
            "first_write": _long_write(samples, "fill"),
            "sustained_write": sustained,
            "striping": _striping_rows(samples),
        },
        "config": config_block(chosen, backends) if chosen else None,
        "meaning": _meaning(
            medians(samples, Traffic.MIXED)[chosen] if chosen else None, sustained, result["paths"]
        ),
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


def _traffic_rows(
    samples: Sequence[Sample], traffic: Traffic, chosen: Point | None, reference: Point
) -> list[Row]:
    rates = medians(samples, traffic)
    roles: dict[Point, list[str]] = {}
    configured = [chosen] if chosen else []
    for role, points in (("best", ranked(rates)[:1]), ("config", configured), ("default", [reference])):
        for point in points:
            roles.setdefault(point, []).append(role)
    rows = []
    for point, names in roles.items():
        group = [sample for sample in _deciding(samples, traffic) if sample.point == point]
        group = group or [sample for sample in of_sweep(samples, traffic) if sample.point == point]
        if group:
            rows.append({"traffic": traffic.value, "roles": names, **_summary(group)})
    return rows


def _summary(group: Sequence[Sample]) -> Row:
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
    sample, timeline = found[-1], found[-1].timeline
    has_parts = len(timeline) >= 10 and sample.direct
    rate = sample.bytes_per_s / 1e9
    return {
        "point": sample.point.to_json(),
        "seconds": sample.seconds,
        "bytes_written": sample.bytes_written,
        "gb_per_s": rate,
        "burst_gb_per_s": _rate(timeline, 0, len(timeline) // 5) if has_parts else None,
        "sustained_gb_per_s": _rate(timeline, len(timeline) // 2, None) if has_parts else rate,
        "sync_s": sample.sync_s,
    }


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
        {"traffic": traffic, "paths": list(paths), **_summary(group)}
        for (traffic, paths), group in sorted(groups.items())
    ]


def _meaning(
    mixed_bps: float | None, sustained: Row | None, paths: Sequence[Mapping[str, Any]]
) -> Row | None:
    if mixed_bps is None:
        return None
    write_bps = sustained["sustained_gb_per_s"] * 1e9 if sustained else None
    billion_s = step_seconds(1e9, mixed_bps=mixed_bps, sustained_write_bps=write_bps)
    num_params = STEP_TIME_S / billion_s * 1e9
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


def step_seconds(num_params: float, *, mixed_bps: float, sustained_write_bps: float | None) -> float:
    """Return the seconds of file traffic in one optimizer step: [Note: step traffic]."""
    mixed_s = 2 * STATE_BYTES_PER_PARAM * num_params / mixed_bps
    written_s = STATE_BYTES_PER_PARAM * num_params / sustained_write_bps if sustained_write_bps else 0.0
    return max(mixed_s, written_s)


# --- From numbers to text ---


def table(result: Mapping[str, Any]) -> list[str]:
    results = result["results"]
    lines = [*_heading(result), "", *_traffic_table(results["traffic"])]
    lines += ["", *_write_lines(results)]
    if results["striping"]:
        lines += ["", *_striping_table(results["striping"], result["arguments"]["paths"])]
    if result["notes"]:
        lines += ["", *(f"note: {note}" for note in result["notes"])]
    if result["config"] is None:
        why = "mixed traffic of the default setting was not measured: give more --time or a higher --write-limit"
        return [*lines, "", f"No setting is recommended: {why}"]
    lines += ["", *_meaning_lines(result["meaning"])]
    return [*lines, "", "For the configuration:", "", *json.dumps(result["config"], indent=2).splitlines()]


def _heading(result: Mapping[str, Any]) -> list[str]:
    machine = result["machine"]
    lines = []
    for path, direct in zip(result["paths"], result["direct"], strict=True):
        device = path["device"]
        words = [path["filesystem"] or "unknown filesystem"]
        if device:
            words.append(" ".join(filter(None, (device["name"], device["model"]))))
        lines.append(f"{path['path']}: {', '.join(words)}; {_direct_words(path, direct)}")
    memory = size_text(machine["memory_bytes"]) if machine["memory_bytes"] else "unknown memory"
    virtual = ", virtual machine" if machine["is_virtual_machine"] else ""
    lines.append(f"{machine['cpu']}, {machine['num_cores']} cores, {memory}, {machine['kernel']}{virtual}")
    unavailable = [f"{name} ({word})" for name, word in result["backends"].items() if word != "available"]
    if unavailable:
        lines.append(f"not available: {', '.join(unavailable)}")
    written = size_text(result["bytes_written"])
    lines.append(f"{result['duration_s']:.0f} s, {len(result['samples'])} samples, {written} written")
    return lines


def _direct_words(path: Mapping[str, Any], direct: str) -> str:
    if path["filesystem"] in MEMORY_FILESYSTEMS:  # newer kernels accept O_DIRECT there, too
        return "in memory: no drive is measured"
    if direct == "O_DIRECT":
        return "O_DIRECT, past the page cache"
    return f"no O_DIRECT ({direct}): through the page cache, which is dropped before and written out within"


def _traffic_table(rows: Sequence[Row]) -> list[str]:
    header = ["traffic", "setting", "backend", "block", "depth", "threads", "GB/s", "min-max"]
    header += ["operation", "p50", "p99", "CPU s/GB", "n"]
    body = [
        [
            *(row["traffic"], " = ".join(row["roles"]), row["point"]["backend"]),
            *(size_text(row["point"]["block_size"]), str(row["point"]["queue_depth"])),
            *(str(row["point"]["num_threads"]), f"{row['gb_per_s']:.2f}"),
            f"{row['gb_per_s_min']:.2f}-{row['gb_per_s_max']:.2f}",
            *(size_text(row["operation_bytes"]), duration_text(row["latency_p50_s"])),
            *(duration_text(row["latency_p99_s"]), f"{row['cpu_s_per_gb']:.3f}", str(row["num_samples"])),
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


def _meaning_lines(meaning: Row) -> list[str]:
    per_billion_s, capacity = meaning["step_s_per_billion_params"], meaning["capacity_params"] / 1e9
    times = ", ".join(f"{count} billion {duration_text(count * per_billion_s)}" for count in (1, 7, 13, 70))
    return [
        f"{meaning['text'][0].upper()}{meaning['text'][1:]}.",
        f"(Files alone, per step: {times}; the free space holds {capacity:.3g} billion.)",
    ]
