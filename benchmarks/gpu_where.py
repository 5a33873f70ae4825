"""Where a step's time goes on the stream that computes: one step under torch's profiler.

    python benchmarks/gpu_where.py --device cuda --layers 8 --trace OUT/trace.json.gz

Prints one line of JSON: the longest gaps between kernels of the stream that computes, with what ran on the host
meanwhile; launches and host waits per unit; the time in each hook of the library. With the CPU as the device the
operations of the training thread take the place of kernels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]

import large_model  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from offloadzero.observe import timeline  # noqa: E402

NUM_GAPS = 10
NUM_MEANWHILE = 3  # things on the host that are named for a gap
MAX_TRACE_BYTES = 10 << 20
HOOK = "hook: "
KERNELS = ("kernel", "gpu_memset")
OF_DRIVER = ("cuda_runtime", "cuda_driver")
ON_HOST = ("cpu_op", "user_annotation")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
NUM_WARMUP_STEPS = 2

Event = Mapping[str, Any]  # of the Trace Event Format: "ts" and "dur" in microseconds


class Named(timeline._Launching):
    """The timeline's timer of hooks, which has a name in the trace, too: that of the function that it is in.

    The time of a hook is that of the timeline, without waits and without what a script does inside of it, less the
    hooks inside of it.
    """

    own_us: ClassVar[dict[str, list[float]]] = {}  # calls' times by hook
    _inside = threading.local()  # a list of the seconds of hooks in each hook that is under way

    def __enter__(self) -> None:
        caller = sys._getframe(1).f_code
        self._name = getattr(caller, "co_qualname", caller.co_name)
        self._range = record_function(HOOK + self._name)
        self._range.__enter__()
        self._under_way().append(0.0)
        self._before_s = self._timeline.launch_s
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        took_s, under_way = self._timeline.launch_s - self._before_s, self._under_way()
        self.own_us.setdefault(self._name, []).append((took_s - under_way.pop()) * 1e6)
        if under_way:
            under_way[-1] += took_s
        self._range.__exit__(None, None, None)

    def _under_way(self) -> list[float]:
        return self._inside.__dict__.setdefault("seconds", [])  # type: ignore[no-any-return]


def profiled_step(args: argparse.Namespace, directory: str) -> tuple[list[dict[str, Any]], int]:
    """Return the events of one step, and the number of units."""
    timeline._Launching = Named  # type: ignore[misc]
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and args.device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    generator = torch.Generator().manual_seed(0)
    path = Path(directory) / "trace.json"
    with large_model.offloaded(args, directory) as (step, found):
        draw = lambda: [large_model.draw(args, found["size"]["vocab_size"], generator)]  # noqa: E731
        for _ in range(NUM_WARMUP_STEPS):
            step(draw()).item()
        Named.own_us.clear()
        with profile(activities=activities) as profiler:
            step(draw()).item()
        profiler.export_chrome_trace(str(path))
        num_units = found["size"]["num_layers"] + 2  # the embedding and the head
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "dur" in event], num_units


def busiest(events: Iterable[Event], key: Any) -> Any:
    """Return the key that has the most time."""
    times: dict[Any, float] = defaultdict(float)
    for event in events:
        times[key(event)] += event["dur"]
    return max(times, key=lambda name: times[name], default=None)


def computing(events: Sequence[Event]) -> list[Event]:
    """Return the kernels of the stream that computes; with the CPU as the device the operations of its thread."""
    kernels = [event for event in events if event.get("cat") in KERNELS]
    if kernels:
        stream = busiest(kernels, lambda event: event["args"].get("stream"))
        return [event for event in kernels if event["args"].get("stream") == stream]
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    thread = busiest(operations, lambda event: event["tid"])
    return [event for event in operations if event["tid"] == thread]


def gaps(events: Sequence[Event]) -> list[tuple[float, float, str]]:
    """Return all times in which nothing computed, the longest first: length, begin, what computed next."""
    found, end_us = [], None
    for event in sorted(computing(events), key=lambda event: event["ts"]):
        if end_us is not None and event["ts"] > end_us:
            found.append((event["ts"] - end_us, end_us, event["name"]))
        end_us = max(end_us or 0.0, event["ts"] + event["dur"])
    return sorted(found, reverse=True)


def longest_gaps(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the longest gaps, and what the host did for most of each."""
    on_host = [event for event in events if event.get("cat") in ON_HOST] + calls_of_launching(events)
    begin_us = min(event["ts"] for event in events)
    return [
        {
            "us": length,
            "at_us": start - begin_us,
            "before": name[:60],
            "meanwhile": _meanwhile(on_host, start, start + length),
        }
        for length, start, name in gaps(events)[:NUM_GAPS]
    ]


def _meanwhile(on_host: Iterable[Event], start: float, end: float) -> list[str]:
    shares: dict[str, float] = defaultdict(float)
    for event in on_host:
        shares[event["name"]] += max(0.0, min(end, event["ts"] + event["dur"]) - max(start, event["ts"]))
    longest = sorted(shares.items(), key=lambda item: -item[1])[:NUM_MEANWHILE]
    return [f"{name[:50]} {us:.0f} us" for name, us in longest if us > 0]


def calls_of_launching(events: Sequence[Event]) -> list[Event]:
    """Return the driver's calls from threads that launch kernels: those of the lanes sleep in it for most of a step."""
    calls = [event for event in events if event.get("cat") in OF_DRIVER]
    launching = {event["tid"] for event in calls if "Launch" in event["name"]}
    return [event for event in calls if event["tid"] in launching]


def per_unit(events: Sequence[Event], num_units: int) -> dict[str, float]:
    """Return launches and waits of the host for the device, by name and unit."""
    counts: Counter[str] = Counter()
    for event in calls_of_launching(events):
        name = event["name"]
        counts["launches" if "Launch" in name else name if name in WAITS else ""] += 1
    return {name: count / num_units for name, count in counts.items() if name}


def hooks() -> dict[str, dict[str, float]]:
    """Return calls and microseconds by hook, the longest first."""
    ordered = sorted(Named.own_us.items(), key=lambda item: -sum(item[1]))
    return {name: {"calls": len(times), "us": sum(times)} for name, times in ordered}


def save_trace(events: Sequence[Event], path: Path) -> None:
    """Write the trace, without its shortest operations where it would be larger than MAX_TRACE_BYTES."""
    kept = list(events)
    while True:
        packed = gzip.compress(json.dumps({"traceEvents": kept}).encode())
        if len(packed) <= MAX_TRACE_BYTES:
            break
        kept = sorted(kept, key=lambda event: -event["dur"])[: len(kept) * 2 // 3]
    path.write_bytes(packed)


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--trace", type=Path, required=True)
    given, rest = own.parse_known_args()
    args = large_model.parse_arguments(rest)
    with tempfile.TemporaryDirectory(dir=args.nvme_dir, prefix="gpu-where-") as directory:
        events, num_units = profiled_step(args, directory)
    of_stream = computing(events)
    begin_us, end_us = min(e["ts"] for e in of_stream), max(e["ts"] + e["dur"] for e in of_stream)
    found = {
        "step_us": end_us - begin_us,
        "idle_us": sum(length for length, _, _ in gaps(events)),
        "gaps": longest_gaps(events),
        "per_unit": per_unit(events, num_units),
        "hooks": hooks(),
        "num_units": num_units,
    }
    print(json.dumps(found), flush=True)
    save_trace(events, given.trace)


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    main()
