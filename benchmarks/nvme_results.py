"""Results of `offloadzero bench nvme --json`: one as a plot, or two side by side.

python benchmarks/nvme_results.py RESULT.json --plot FILE.png     throughput over block size and depth (matplotlib)
python benchmarks/nvme_results.py A.json B.json                   both, and B/A, also at each point that both have
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offloadzero.cli.bench.results import FORMAT, FORMAT_VERSION, SWEEP_PHASES, medians_by_point
from offloadzero.cli.bench.traffic import Point, Traffic
from offloadzero.cli.output import print_lines, text_table
from offloadzero.observe.texts import size_text
from offloadzero.planning.result_file import load_json

_TRAFFIC = (("read", "Sequential read"), ("write", "Sequential write"), ("mixed", "Optimizer step (1 : 1)"))
_COLORS = {"io_uring": "#1f77b4", "native_aio": "#d95f02", "aiofiles": "#7f7f7f"}
_GREY = "#555555"


def main() -> None:
    parser = argparse.ArgumentParser(description="Results of `offloadzero bench nvme`: plotted, or compared.")
    parser.add_argument("results", nargs="+", metavar="RESULT.json", help="one, or two to compare")
    parser.add_argument("--plot", metavar="FILE.png", help="of the first one")
    args = parser.parse_args()
    loaded = [read(path) for path in args.results]
    if args.plot:
        plot(loaded[0], args.plot)
    if len(loaded) == 2:
        print_lines(compared(args.results, *loaded))


def read(path: str) -> dict[str, Any]:
    """Read a result. Raises ConfigError."""
    return load_json("RESULT", path, format_name=FORMAT, format_version=FORMAT_VERSION)


def saved_medians(result: Mapping[str, Any], traffic: str) -> dict[Point, float]:
    """Return the GB/s of each point that the sweep of a saved result has measured, in the order of points."""
    rates = [
        (Point(**sample["point"]), sample["gb_per_s"])
        for sample in result["samples"]
        if sample["traffic"] == traffic and sample["phase"] in SWEEP_PHASES
    ]
    return dict(sorted(medians_by_point(rates).items()))


# --- One result as a plot ---


def plot(result: Mapping[str, Any], path: str) -> None:
    """Plot throughput over block size and depth, and the long writes over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.15, 1.0))
    groups = {traffic: saved_medians(result, traffic) for traffic, _ in _TRAFFIC}
    largest = max((rate for rates in groups.values() for rate in rates.values()), default=1.0)
    sizes = sorted({point.block_size for rates in groups.values() for point in rates})
    for column, (traffic, title) in enumerate(_TRAFFIC):
        axes = figure.add_subplot(grid[0, column])
        axes.set_title(title, fontsize=10)
        axes.set_ylim(0.0, largest * 1.15)
        _set_sizes(axes, sizes)
        _plot_traffic(axes, result, traffic, groups[traffic])
        if column == 0:
            axes.set_ylabel("GB/s")
    _plot_writes(figure.add_subplot(grid[1, :]), result["samples"])
    figure.suptitle(_title(result), fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=100)


def _title(result: Mapping[str, Any]) -> str:
    paths = []
    for entry in result["paths"]:
        device = entry["device"] or {}
        words = filter(None, (entry["filesystem"], device.get("name"), device.get("model")))
        paths.append(f"{entry['path']} ({', '.join(words)})")
    lines = [", ".join(paths)]
    if result["meaning"]:
        text = result["meaning"]["text"]
        lines.append(text[0].upper() + text[1:])
    return "\n".join(lines)


def _set_sizes(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size).replace(" ", "\n") for size in sizes])
    axes.minorticks_off()
    if sizes:
        axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
    axes.set_xlabel("block size", fontsize=9)
    _plain(axes)


def _plot_traffic(axes: Any, result: Mapping[str, Any], traffic: str, rates: Mapping[Point, float]) -> None:
    """Draw one line per depth over block size (one thread, AUTO's backend); other settings as marks."""
    first = next(name for name, word in result["backends"].items() if word == "available")
    lines: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for point, rate in rates.items():
        key = (point.backend, point.num_threads, point.queue_depth)
        lines.setdefault(key, []).append((point.block_size, rate))
    for (backend, num_threads, depth), places in lines.items():
        if backend == first and num_threads == 1:
            _draw_depth(axes, places, depth)
        else:
            _draw_other(axes, places, backend, num_threads, is_first=backend == first)
    _mark_chosen(axes, result, traffic)
    if rates:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(
            handles.values(),
            handles.keys(),
            fontsize=7,
            frameon=False,
            ncols=4,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.22),
            columnspacing=1.0,
            handletextpad=0.4,
        )


def _draw_depth(axes: Any, places: Sequence[tuple[int, float]], depth: int) -> None:
    from matplotlib import colormaps

    # Darker is deeper, the same in every plot: 1 to 256.
    color = colormaps["viridis"](0.9 * (1.0 - min(math.log2(depth) / 8, 1.0)))
    axes.plot(*zip(*places, strict=True), marker="o", markersize=4, color=color, label=f"depth {depth}")


def _draw_other(
    axes: Any,
    places: Sequence[tuple[int, float]],
    backend: str,
    num_threads: int,
    *,
    is_first: bool,
) -> None:
    what = f"{num_threads} threads" if is_first else backend
    axes.plot(
        *zip(*places, strict=True),
        linestyle="none",
        marker="^" if is_first else "s",
        markersize=5,
        markerfacecolor="none",
        color="#2ca02c" if is_first else _COLORS[backend],
        label=what,
    )


def _mark_chosen(axes: Any, result: Mapping[str, Any], traffic: str) -> None:
    for row in result["results"]["traffic"]:
        if row["traffic"] == traffic and "config" in row["roles"]:
            at = (row["point"]["block_size"], row["gb_per_s"])
            red = "#d62728"
            axes.plot(*at, "o", markersize=12, markerfacecolor="none", color=red, label="config")
            axes.annotate(
                f"{row['gb_per_s']:.2f}",
                at,
                xytext=(0, 11),
                textcoords="offset points",
                ha="center",
                color=red,
                bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )


def _plot_writes(axes: Any, samples: Sequence[Mapping[str, Any]]) -> None:
    """Draw both long writes over the bytes written, so that a cache that fills up shows its size."""
    for phase, label, color in (
        ("fill", "first write of the file", "#999999"),
        ("sustained", "sustained write", "#1f77b4"),
    ):
        for sample in (sample for sample in samples if sample["phase"] == phase):
            seconds, rates, start_s = [], [], 0.0
            for end_s, num_bytes in sample["timeline"][:-1]:
                rates.append(num_bytes / (end_s - start_s) / 1e9)
                seconds.append((start_s + end_s) / 2)
                start_s = end_s
            axes.plot(
                seconds,
                rates,
                color=color,
                linewidth=1.2,
                label=f"{label}, {size_text(sample['bytes_written'])}",
            )
    axes.set_title("Writing on and on", fontsize=10)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0.0)
    _plain(axes)
    if axes.lines:
        axes.legend(fontsize=8, frameon=False, loc="lower right")


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_GREY)


# --- Two results side by side ---

_Line = tuple[str, float, float]


def compared(paths: Sequence[str], a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return both results in a table."""
    names = ("A", "B")
    lines = [
        f"{name}: {path}, {_describe(one)}" for name, path, one in zip(names, paths, (a, b), strict=True)
    ]
    rows = [*_headline(a, b), *_same_points(a, b)]
    body = [
        [what, f"{of_a:.3g}", f"{of_b:.3g}", f"{of_b / of_a:.3f}" if of_a else ""]
        for what, of_a, of_b in rows
    ]
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


if __name__ == "__main__":
    main()
