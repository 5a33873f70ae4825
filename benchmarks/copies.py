"""The rates of memory and of the link to the device.

    python benchmarks/copies.py [--size 512MiB] [--time 20s] [--json FILE]

Reads (memchr), writes (memset) and copies (memmove, and the library's own copy) in host memory by threads, and, with
CUDA, copies between host and device, pinned and pageable, each way and both at once. A copy counts its bytes once.
Medians over interleaved rounds; the first round is a warm-up.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from offloadzero.cli.output import (
    Progress,
    check_output,
    print_lines,
    read_seconds,
    save_json,
    text_table,
)
from offloadzero.config.readers import read_num_bytes
from offloadzero.observe.texts import size_text
from offloadzero.planning.machine import describe_machine, describe_versions

if TYPE_CHECKING:
    from torch import Tensor

    from offloadzero.memory.device import Device, Stream

MIB = 1 << 20
MIN_SIZE = MIB
_PAGE = mmap.PAGESIZE

Transfer = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One row of the results. `num_bytes` are those that a call reads, writes or copies (a copy counts once)."""

    kind: str
    memory: str  # "dram" | "pinned" | "pageable"
    num_threads: int
    num_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description="The rates of memory, and of the link to the device.")
    parser.add_argument(
        "--size", default="512MiB", help="bytes of each buffer in host memory (default 512MiB)"
    )
    parser.add_argument("--time", default="20s", help="how long it may take (default 20s)")
    parser.add_argument("--json", metavar="FILE", help="every sample, the machine and the results")
    args = parser.parse_args()
    started_s = time.monotonic()
    num_bytes = read_num_bytes("--size", args.size, minimum=MIN_SIZE) // _PAGE * _PAGE
    time_s = read_seconds("--time", args.time, minimum=0.5)
    check_output("--json", args.json)
    machine, progress = describe_machine(), Progress(time_s)
    try:
        device = device_name()
        progress.phase("host memory")
        end_s = started_s + time_s * (0.5 if device else 1.0)
        results = measure(dram_cases(num_bytes, machine["num_cores"]), end_s, progress)
        if device:
            progress.phase("host and device")
            results += measure(device_cases(), started_s + time_s, progress)
    finally:
        progress.close()
    result = {
        "duration_s": time.monotonic() - started_s,
        "machine": machine,
        "device": device,
        "versions": describe_versions("offloadzero", "torch", "numpy"),
        "results": results,
    }
    print_lines(table(result))
    if args.json:
        save_json(args.json, result)


def device_name() -> str | None:
    """Return the name of the device in use; None if that is the CPU."""
    from offloadzero.memory.device import find_device

    return find_device(None).name()


# --- Host memory ---

# memset, memchr and memmove of the C library: called through ctypes, which releases the GIL.
_libc = ctypes.CDLL(None)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.memset.restype = ctypes.c_void_p
_libc.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.memchr.restype = ctypes.c_void_p
_libc.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.restype = ctypes.c_void_p
_ABSENT_BYTE = 0xFF


def read_all(address: int, num_bytes: int) -> None:
    """Read every byte by searching for one that does not occur. Raises AssertionError when it is found."""
    if _libc.memchr(address, _ABSENT_BYTE, num_bytes) is not None:
        raise AssertionError("the buffer holds the byte it must not hold: not all of it was read")


def dram_cases(num_bytes: int, num_cores: int) -> list[tuple[Case, Transfer]]:
    """Return reads, writes and copies of `num_bytes` by 1, 2, 4, ... threads."""
    import torch

    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= num_cores]
    if num_cores not in counts and num_cores <= 64:
        counts.append(num_cores)
    cases = []
    for num_threads in counts:
        for kind, transfer in _dram_transfers(target, source, num_threads).items():
            cases.append((Case(kind, "dram", num_threads, num_bytes), transfer))
    return cases


def _dram_transfers(target: Tensor, source: Tensor, num_threads: int) -> dict[str, Transfer]:
    from offloadzero.native.kernels import copy

    num_bytes = source.numel()
    share = -(-num_bytes // num_threads // _PAGE) * _PAGE
    ranges = [(start, min(share, num_bytes - start)) for start in range(0, num_bytes, share)]
    pool = ThreadPoolExecutor(num_threads)
    to, origin = target.data_ptr(), source.data_ptr()

    def each(function: Callable[[int, int], object]) -> Transfer:
        def transfer() -> None:
            for future in [pool.submit(function, start, size) for start, size in ranges]:
                future.result()

        return transfer

    return {
        "read": each(lambda start, size: read_all(origin + start, size)),
        "write": each(lambda start, size: _libc.memset(to + start, 0, size)),
        "copy (libc)": each(lambda start, size: _libc.memmove(to + start, origin + start, size)),
        "copy (native)": lambda: copy(target, source, num_threads=num_threads),
    }


# --- Host and device ---

_DEVICE_SIZES = (MIB, 8 * MIB, 32 * MIB, 256 * MIB)


def device_cases(device: Device | None = None) -> list[tuple[Case, Transfer]]:
    """Return copies between host and device, the default one if None; "both" is one each way and counts both."""
    import torch

    from offloadzero.memory.device import find_device

    cases = []
    if device is None:
        device = find_device(None)
    for num_bytes in _DEVICE_SIZES:
        there = [device.allocate(num_bytes).zero_() for _ in range(2)]
        device.synchronize()
        for memory, is_pinned in (("pinned", True), ("pageable", False)):
            here = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
            for kind, transfer in _device_transfers(device, here, there).items():
                total = num_bytes * (2 if kind == "both" else 1)
                cases.append((Case(kind, memory, 0, total), transfer))
    return cases


def _device_transfers(device: Device, here: Sequence[Tensor], there: Sequence[Tensor]) -> dict[str, Transfer]:
    """Return calls that end when the bytes have arrived; small sizes repeat within one call's measurement."""
    streams = [_stream(device) for _ in range(2)]

    def h2d() -> None:
        with device.launching_on(streams[0]):
            device.copy(there[0], here[0])

    def d2h() -> None:
        with device.launching_on(streams[1]):
            device.copy(here[1], there[1])

    def finished(*starts: Transfer) -> Transfer:
        def transfer() -> None:
            for start in starts:
                start()
            for stream in streams:
                stream.synchronize()

        return transfer

    return {"h2d": finished(h2d), "d2h": finished(d2h), "both": finished(h2d, d2h)}


def _stream(device: Device) -> Stream:
    stream = device.new_stream("copy")
    if stream is None:
        raise AssertionError("copies to a device without streams are not measured")
    return stream


# --- Samples and the table ---


def measure(
    cases: Sequence[tuple[Case, Transfer]], deadline_s: float, progress: Progress
) -> list[dict[str, Any]]:
    """Run rounds over all cases, interleaved, until the deadline, after one that warms up. At least one counts."""
    seconds: dict[Case, list[float]] = {case: [] for case, _ in cases}
    for _, transfer in cases:
        transfer()
    while True:
        for case, transfer in cases:
            begun_s = time.perf_counter()
            transfer()
            seconds[case].append(time.perf_counter() - begun_s)
        progress.tick(f"{len(next(iter(seconds.values())))} rounds")
        if time.monotonic() >= deadline_s:
            break
    return [
        {
            **asdict(case),
            "num_samples": len(times),
            "gb_per_s": case.num_bytes / statistics.median(times) / 1e9,
            "gb_per_s_max": case.num_bytes / min(times) / 1e9,
            "seconds": times,
        }
        for case, times in seconds.items()
    ]


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as text."""
    machine = result["machine"]
    dram = [row for row in result["results"] if row["memory"] == "dram"]
    lines = [
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['kernel']}; device: {result['device'] or 'none'}",
        "",
        f"Host memory, buffers of {size_text(dram[0]['num_bytes'])}, GB/s (a copy counts its bytes once):",
        *_pivot(dram, "num_threads", "threads", str),
    ]
    for memory in ("pinned", "pageable"):
        rows = [row for row in result["results"] if row["memory"] == memory]
        if rows:
            lines += ["", f"Host and device, {memory}, GB/s (both: the sum of the two ways):"]
            for row in rows:  # `size` is that of one way
                row.setdefault("size", row["num_bytes"] // (2 if row["kind"] == "both" else 1))
            lines += _pivot(rows, "size", "size", size_text)
    return lines


def _pivot(rows: Sequence[dict[str, Any]], key: str, name: str, show: Callable[[Any], str]) -> list[str]:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    values = list(dict.fromkeys(row[key] for row in rows))
    rates = {(row["kind"], row[key]): row["gb_per_s"] for row in rows}
    body = [[show(value), *(f"{rates[kind, value]:.2f}" for kind in kinds)] for value in values]
    return text_table((name, *kinds), body)


if __name__ == "__main__":
    main()
