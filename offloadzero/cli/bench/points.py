"""The decisions of `bench nvme`, on the next points and on the result: without files and clocks.

[Note: step traffic]
One optimizer step over P parameters that are on the drive in the `fp32` layout (bf16 parameter, 16-bit master
remainder, two fp32 moments) reads 2 + 2 + 4 + 4 = 12 bytes per parameter, and writes as many. Mixed traffic has
this ratio, so at a mixed rate of R bytes per second (both directions together) a step takes 24 P / R seconds. A
drive whose write rate falls to W once its cache is full takes 12 P / W at least. Forward and backward read 2 P bytes
each, on top; of parameters in memory that is left out, and 2 P in each direction of the update.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any

from offloadzero.config import AioConfig, UpdateConfig

KIB, MIB = 1 << 10, 1 << 20
STATE_BYTES_PER_PARAM = 12  # read, and written
SEGMENT_BYTES = (2, 2, 4, 4)  # of a parameter: itself, the remainder, the first and the second moment
TOLERANCE = 0.03  # medians that differ by less are equal on a drive that other programs use as well
NUM_CHUNKS_IN_FLIGHT = 4
MAX_CHUNK_ELEMENTS = UpdateConfig.chunk_elements
MIN_CHUNK_ELEMENTS = 4096  # its 2-byte segments are two blocks of 4 KiB


class Traffic(str, Enum):
    """The kind of traffic; MIXED is the update of one layer after the other, see [Note: step traffic]."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"


@dataclass(frozen=True, order=True)
class Point:
    """One setting of the file engine; the fields are the arguments of AioEngine."""

    backend: str
    block_size: int
    queue_depth: int
    num_threads: int

    @property
    def in_flight_bytes(self) -> int:
        """The bytes in the kernel at once."""
        return self.block_size * self.queue_depth

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SweepLimits:
    """The points that may be measured. `backends` are the available ones, the one AUTO takes first."""

    backends: tuple[str, ...]
    max_in_flight_bytes: int
    max_num_threads: int
    min_block_size: int = 64 * KIB
    max_block_size: int = 16 * MIB
    max_queue_depth: int = 256

    def allows(self, point: Point) -> bool:
        return (
            point.backend in self.backends
            and self.min_block_size <= point.block_size <= self.max_block_size
            and 1 <= point.queue_depth <= self.max_queue_depth
            and 1 <= point.num_threads <= min(self.max_num_threads, point.queue_depth)
            and point.in_flight_bytes <= self.max_in_flight_bytes
        )


def reference_point(backend: str) -> Point:
    """Return the engine's setting without a configuration; measured on every drive, to compare drives."""
    return Point(backend, AioConfig.block_size, AioConfig.queue_depth, AioConfig.num_threads)


def coarse_points(limits: SweepLimits) -> list[Point]:
    """Return the grid, the most telling points first: the reference, block size by depth, backends, threads."""
    first = limits.backends[0]
    reference = reference_point(first)
    sizes = (MIB, 256 * KIB, 4 * MIB, 16 * MIB)
    grid = [Point(first, block_size, depth, 1) for depth in (8, 64, 2) for block_size in sizes]
    others = [replace(reference, backend=backend) for backend in limits.backends[1:]]
    threads = [replace(reference, num_threads=num_threads) for num_threads in (2, 4)]
    wanted = [*grid[:3], *others, *threads, *grid[3:]]
    # The reference is measured even where it holds more in flight than the drive can use.
    return [reference, *dict.fromkeys(point for point in wanted if limits.allows(point))]


def neighbours(point: Point, limits: SweepLimits) -> list[Point]:
    """Return the allowed points one step from `point`: block size, depth or threads doubled or halved, backends."""
    size, depth, threads = point.block_size, point.queue_depth, point.num_threads
    steps = [
        *(replace(point, block_size=size * 2), replace(point, queue_depth=depth * 2)),
        *(replace(point, block_size=size // 2), replace(point, queue_depth=depth // 2)),
        # These have the same bytes in flight in other pieces.
        replace(point, block_size=size * 2, queue_depth=depth // 2),
        replace(point, block_size=size // 2, queue_depth=depth * 2),
        *(replace(point, num_threads=threads * 2), replace(point, num_threads=threads // 2)),
        *(replace(point, backend=backend) for backend in limits.backends if backend != point.backend),
    ]
    return [step for step in steps if limits.allows(step)]


def ranked(scores: Mapping[Point, float]) -> list[Point]:
    """Return the points, the best first; equal ones by the order of points, not by the mapping's."""
    return sorted(scores, key=lambda point: (-scores[point], point))


def next_refinement(scores: Mapping[Point, float], limits: SweepLimits) -> Point | None:
    """Return an unmeasured neighbour of the best point, None when the best is better than all its neighbours."""
    around = neighbours(ranked(scores)[0], limits) if scores else []
    return next((point for point in around if point not in scores), None)


def recommend(medians: Mapping[Point, float], backends: Sequence[str]) -> Point:
    """Return the cheapest point within TOLERANCE of the best: fewest threads, AUTO's backend, least in flight."""
    least = max(medians.values()) * (1.0 - TOLERANCE)

    def cost(point: Point) -> tuple[int, ...]:
        rank = list(backends).index(point.backend)
        return point.num_threads, rank, point.in_flight_bytes, point.queue_depth

    return min((point for point, median in medians.items() if median >= least), key=cost)


def medians_by_point(rates: Iterable[tuple[Point, float]]) -> dict[Point, float]:
    """Return the median rate of each point."""
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
        "coarse": 0.28,
        "refine": 0.16,
        "confirm": 0.22,
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


def chunk_segments(num_elements: int) -> list[tuple[int, int]]:
    """Return offset and bytes of the segments of a chunk of parameters, which lie in a row."""
    sizes = [element_bytes * num_elements for element_bytes in SEGMENT_BYTES]
    return list(zip(accumulate(sizes[:-1], initial=0), sizes, strict=True))


def step_seconds(num_params: float, *, mixed_bps: float, sustained_write_bps: float | None) -> float:
    """Return the seconds of file traffic in one optimizer step: [Note: step traffic]."""
    mixed_s = 2 * STATE_BYTES_PER_PARAM * num_params / mixed_bps
    written_s = STATE_BYTES_PER_PARAM * num_params / sustained_write_bps if sustained_write_bps else 0.0
    return max(mixed_s, written_s)
