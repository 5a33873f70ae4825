"""`bench nvme --compare`: two results side by side (floor 7)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from offloadzero.cli.nvme_report import FORMAT, FORMAT_VERSION
from offloadzero.cli.output import load_json, text_table
from offloadzero.cli.units import size_text
from offloadzero.errors import ConfigError

_SWEEP_PHASES = ("coarse", "refine", "confirm")
_Line = tuple[str, float, float]


def compare_files(first: str, second: str) -> list[str]:
    """Raises ConfigError when one of them is not a result of `bench nvme --json`."""
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
        # Whatever the damage was, it shows as one of these where a value is used.
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
    """GB/s at the points that both have measured."""
    first, second = _medians(a), _medians(b)
    for key in first:
        if key in second:
            traffic, backend, block_size, queue_depth, num_threads = key
            setting = f"{backend} {size_text(block_size)} x {queue_depth}, threads {num_threads}"
            yield f"{traffic} {setting}: GB/s", first[key], second[key]


def _medians(result: Mapping[str, Any]) -> dict[tuple[str, str, int, int, int], float]:
    rates: dict[tuple[str, str, int, int, int], list[float]] = {}
    for sample in result["samples"]:
        if sample["phase"] in _SWEEP_PHASES:
            point = sample["point"]
            key = (
                sample["traffic"],
                point["backend"],
                point["block_size"],
                point["queue_depth"],
                point["num_threads"],
            )
            rates.setdefault(key, []).append(sample["gb_per_s"])
    return {key: statistics.median(rates[key]) for key in sorted(rates)}
