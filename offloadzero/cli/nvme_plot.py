"""The plot of `bench nvme`: needs matplotlib, the extra `plot`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

from offloadzero.cli.nvme_report import saved_medians
from offloadzero.cli.nvme_sweep import Point
from offloadzero.cli.units import size_text
from offloadzero.errors import AioError, ConfigError

_TRAFFIC = (("read", "Sequential read"), ("write", "Sequential write"), ("mixed", "Optimizer step (1 : 1)"))
_COLORS = {"io_uring": "#1f77b4", "native_aio": "#d95f02", "aiofiles": "#7f7f7f"}
_GREY = "#555555"


def check_plot(path: str) -> None:
    """Raise ConfigError when a plot could not be made in the end."""
    if not path.endswith(".png"):
        raise ConfigError("--plot", path, "the name of a .png file")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot", path, 'needs matplotlib: pip install "offloadzero[plot]"')


def plot(result: Mapping[str, Any], path: str) -> None:
    """Plot throughput over block size and depth, and the long writes over time. Raises AioError."""
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
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise AioError(operation="write", path=path, offset=0, num_bytes=0, errno=error.errno or 0) from error


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
