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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from offloadzero.config import AioConfig, UpdateConfig

KIB = 1 << 10
MIB = 1 << 20

STATE_BYTES_PER_PARAM = 12  # read, and written
STEP_BYTES_PER_PARAM = 2 * STATE_BYTES_PER_PARAM

# Two medians that differ by less count as equal on a drive that other programs use as well.
TOLERANCE = 0.03


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

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Point:
        return Point(
            **{name: fields[name] for name in ("backend", "block_size", "queue_depth", "num_threads")}
        )


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
    return Point(
        backend,
        block_size=AioConfig.block_size,
        queue_depth=AioConfig.queue_depth,
        num_threads=AioConfig.num_threads,
    )


def coarse_points(limits: SweepLimits) -> list[Point]:
    """Return the grid, the most telling points first: the reference, block size by depth, backends, threads."""
    first = limits.backends[0]
    reference = reference_point(first)
    grid = [
        Point(first, block_size, queue_depth, 1)
        for queue_depth in (8, 64, 2)
        for block_size in (MIB, 256 * KIB, 4 * MIB, 16 * MIB)
    ]
    others = [replace(reference, backend=backend) for backend in limits.backends[1:]]
    threads = [replace(reference, num_threads=num_threads) for num_threads in (2, 4)]
    wanted = [*grid[:3], *others, *threads, *grid[3:]]
    # The reference is measured even where it holds more in flight than the drive can use.
    return [reference, *dict.fromkeys(point for point in wanted if limits.allows(point))]


def neighbours(point: Point, limits: SweepLimits) -> list[Point]:
    """Return the allowed points one step from `point`: block size, depth or threads doubled or halved, backends."""
    steps = [
        replace(point, block_size=point.block_size * 2),
        replace(point, queue_depth=point.queue_depth * 2),
        replace(point, block_size=point.block_size // 2),
        replace(point, queue_depth=point.queue_depth // 2),
        # These have the same bytes in flight in other pieces.
        replace(point, block_size=point.block_size * 2, queue_depth=point.queue_depth // 2),
        replace(point, block_size=point.block_size // 2, queue_depth=point.queue_depth * 2),
        replace(point, num_threads=point.num_threads * 2),
        replace(point, num_threads=point.num_threads // 2),
        *(replace(point, backend=backend) for backend in limits.backends if backend != point.backend),
    ]
    return [step for step in steps if limits.allows(step)]


def best(scores: Mapping[Point, float]) -> Point:
    """Return the point with the highest score; equal ones by the order of points, not by the mapping's."""
    return max(sorted(scores), key=lambda point: scores[point])


def next_refinement(scores: Mapping[Point, float], limits: SweepLimits) -> Point | None:
    """Return an unmeasured neighbour of the best point, None when the best is better than all its neighbours."""
    if not scores:
        return None
    return next((point for point in neighbours(best(scores), limits) if point not in scores), None)


def finalists(scores: Mapping[Point, float], num_points: int) -> list[Point]:
    """Return the `num_points` best, the best first."""
    return sorted(scores, key=lambda point: (-scores[point], point))[:num_points]


def recommend(
    medians: Mapping[Point, float], backends: Sequence[str], *, tolerance: float = TOLERANCE
) -> Point:
    """Return the cheapest point within `tolerance` of the best: fewest threads, AUTO's backend, least in flight."""
    limit = max(medians.values()) * (1.0 - tolerance)
    return min(
        (point for point, median in medians.items() if median >= limit),
        key=lambda point: (
            point.num_threads,
            list(backends).index(point.backend),
            point.in_flight_bytes,
            point.queue_depth,
        ),
    )


def medians_by_point(samples: Sequence[tuple[Point, float]]) -> dict[Point, float]:
    """Return the median rate of each point."""
    rates: dict[Point, list[float]] = {}
    for point, rate in samples:
        rates.setdefault(point, []).append(rate)
    return {point: statistics.median(values) for point, values in rates.items()}


# --- The use of the time ---


@dataclass(frozen=True)
class Schedule:
    """The end of each phase, in seconds from the start; one that is early leaves its time to those after it."""

    fill_s: float
    coarse_s: float
    refine_s: float
    confirm_s: float
    scaling_s: float
    fio_s: float
    sustained_s: float


def plan_schedule(time_s: float, *, num_paths: int, with_fio: bool) -> Schedule:
    """Split `time_s`; phases that do not apply get nothing."""
    shares = {
        "fill_s": 0.15,
        "coarse_s": 0.12 if with_fio else 0.28,
        "refine_s": 0.08 if with_fio else 0.16,
        "confirm_s": 0.07 if with_fio else 0.22,
        "scaling_s": 0.08 if num_paths > 1 else 0.0,
        "fio_s": 0.45 if with_fio else 0.0,
        "sustained_s": 0.19 if num_paths == 1 else 0.11,
    }
    scale = time_s / sum(shares.values())
    ends: dict[str, float] = {}
    end_s = 0.0
    for name, share in shares.items():
        end_s += share * scale
        ends[name] = end_s
    return Schedule(**ends)


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


# --- Traffic shaped like an optimizer step ---


@dataclass(frozen=True)
class StepChunk:
    """The place of one chunk of parameters: four segments in a row, as parts of `num_bytes`."""

    num_elements: int

    @property
    def num_bytes(self) -> int:
        return STATE_BYTES_PER_PARAM * self.num_elements

    def segments(self) -> Iterator[tuple[int, int]]:
        """The (offset, num_bytes) of parameter, remainder, first and second moment."""
        offset = 0
        for element_bytes in (2, 2, 4, 4):
            yield offset, element_bytes * self.num_elements
            offset += element_bytes * self.num_elements


NUM_CHUNKS_IN_FLIGHT = 4
MAX_CHUNK_ELEMENTS = UpdateConfig.chunk_elements
MIN_CHUNK_ELEMENTS = 4096  # its 2-byte segments are two blocks of 4 KiB


def chunk_elements(in_flight_bytes: int, file_bytes: int) -> int:
    """Return the parameters per record: the update's default, less on slow drives and in small files. A power of 2."""
    limit = min(in_flight_bytes, file_bytes // 2) // (NUM_CHUNKS_IN_FLIGHT * STATE_BYTES_PER_PARAM)
    power = 1 << (max(limit, MIN_CHUNK_ELEMENTS).bit_length() - 1)
    return min(power, MAX_CHUNK_ELEMENTS)


# --- The meaning of a rate ---


def step_seconds(num_params: float, *, mixed_bps: float, sustained_write_bps: float | None) -> float:
    """Return the seconds of file traffic in one optimizer step: [Note: step traffic]."""
    mixed_s = STEP_BYTES_PER_PARAM * num_params / mixed_bps
    if not sustained_write_bps:
        return mixed_s
    return max(mixed_s, STATE_BYTES_PER_PARAM * num_params / sustained_write_bps)


def params_in(seconds: float, *, mixed_bps: float, sustained_write_bps: float | None) -> float:
    """Return the number of parameters whose step takes `seconds`."""
    return seconds / step_seconds(1.0, mixed_bps=mixed_bps, sustained_write_bps=sustained_write_bps)
