"""The least time that a step can take on this machine, its share of the time taken, and the report of both.

[Note: the bound]
T_bound = max over the lanes of T_lane; overlap efficiency = T_bound / T_step.

T_lane of a lane that moves bytes is its bytes of the step over the best rate that one of the steps so far has
shown. A step's rate is its bytes over the time in which the lane had at least one transfer running.
T_compute is the time of the step without its named waits: on the training thread, or where the device has streams
on those that compute, [Note: the device's time].

Where the device is the CPU, computation, copies, landings and updates share the cores, and what counts is their
sum. Wall times of threads that take each other's turns would count a second twice, so the sum is the process's CPU
time over the cores it may use (`cores`). Beside it the drive and the collectives are lanes of their own.

Any slowness of the training thread that is no named wait, due to another process on its cores say, counts
as computation: the efficiency says how well transfers and updates hide, not how fast the computation is.

On a device with streams a step begins and ends when the device gets there, and a wait is the time for which its stream
stood still: a fetch that is there before the stream reaches it costs nothing. A thread that launches too
slowly makes the stream idle inside a unit; that counts as computation, as its own slowness does on the CPU.

A collective begins on a rank when that issues it, and ends when all have: in the time between, the rank may wait for
the others. So the rate of `collectives` is the best that one of them has shown, not that of a whole step; their time in
a step may be much longer than their bytes need.

A drive reads and writes at once, so each direction is a lane of its own; a virtual drive often has one limit for
both. `"observe": {"nvme_shared": true}` makes them one lane, `nvme`. That bound is the higher one: set it only
where `offloadzero bench nvme` has shown that mixed traffic is no faster than reads or writes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offloadzero.observe.collectives import CollectiveCount
from offloadzero.observe.timeline import COLLECTIVES, COMPUTE, NVME_READ, NVME_WRITE, WAIT, Span

NVME = "nvme"
CORES = "cores"
NVME_LANES = (NVME, NVME_READ, NVME_WRITE)


@dataclass(frozen=True)
class LaneUse:
    """One lane in one step: the bytes it moved and the seconds in which it moved any."""

    num_bytes: int
    busy_s: float
    best_rate: float | None = None  # of one transfer, where not the lane's but that is the rate


@dataclass(frozen=True)
class Bound:
    """The bound of a step: `seconds` is the largest of `lanes_s`, and `lane` has it."""

    seconds: float
    lane: str
    lanes_s: Mapping[str, float]

    def efficiency(self, step_s: float) -> float:
        return self.seconds / step_s if step_s > 0 else 0.0


def busy_seconds(intervals: Iterable[tuple[float, float]], *, start_s: float, end_s: float) -> float:
    """The seconds of [start_s, end_s] that at least one of the intervals covers."""
    busy_s, reached_s = 0.0, start_s
    for low_s, high_s in sorted(intervals):
        low_s, high_s = max(low_s, reached_s), min(high_s, end_s)
        if high_s > low_s:
            busy_s += high_s - low_s
            reached_s = high_s
    return busy_s


def use_by_lane(spans: Iterable[Span], *, nvme_shared: bool) -> dict[str, LaneUse]:
    """Return bytes and busy seconds of the lanes that move bytes, over the spans' whole length."""
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        if span.lane in (COMPUTE, WAIT):
            continue
        lane = NVME if nvme_shared and span.lane in NVME_LANES else span.lane
        by_lane.setdefault(lane, []).append(span)
    uses = {}
    for lane, group in by_lane.items():
        first_s, last_s = min(span.start_s for span in group), max(span.end_s for span in group)
        busy_s = busy_seconds(((s.start_s, s.end_s) for s in group), start_s=first_s, end_s=last_s)
        best = max(map(_rate_of, group)) if lane == COLLECTIVES else None
        uses[lane] = LaneUse(sum(span.num_bytes for span in group), busy_s, best)
    return uses


def _rate_of(span: Span) -> float:
    return span.num_bytes / (span.end_s - span.start_s) if span.end_s > span.start_s else 0.0


class BestRates:
    """The best rate of each lane so far, in bytes per second."""

    def __init__(self) -> None:
        self.by_lane: dict[str, float] = {}

    def learn(self, uses: Mapping[str, LaneUse]) -> None:
        for lane, use in uses.items():
            if use.busy_s > 0:
                rate = use.num_bytes / use.busy_s if use.best_rate is None else use.best_rate
                self.by_lane[lane] = max(self.by_lane.get(lane, 0.0), rate)

    def seconds(self, uses: Mapping[str, LaneUse]) -> dict[str, float]:
        """Return the least seconds each lane needs for the bytes of `uses`; lanes without a rate are left out."""
        rates = self.by_lane
        return {lane: use.num_bytes / rates[lane] for lane, use in uses.items() if rates.get(lane, 0.0) > 0}


def lane_seconds(
    transfers_s: Mapping[str, float], *, step_s: float, wait_s: float, cores_s: float | None
) -> dict[str, float]:
    """Return the seconds by lane; `cores_s` is None where the device is not the CPU: [Note: the bound]."""
    compute_s = max(step_s - wait_s, 0.0)
    if cores_s is None:
        return {COMPUTE: compute_s, **transfers_s}
    apart = {lane: seconds for lane, seconds in transfers_s.items() if lane in (*NVME_LANES, COLLECTIVES)}
    return {COMPUTE: compute_s, CORES: cores_s, **apart}


def step_bound(lanes_s: Mapping[str, float]) -> Bound:
    """Return the bound, which the slowest lane sets; `lanes_s` must not be empty."""
    lane = max(lanes_s, key=lambda name: lanes_s[name])
    return Bound(lanes_s[lane], lane, dict(lanes_s))


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: its wall time, and the seconds for which the computation stood still, by wait.

    It began at `start_s` on time.perf_counter(). `bound` is the least time that its busiest lane needs; None where
    nothing is recorded (`offloadzero.observe`, or the logger `offloadzero.steps` at level INFO). So are `collectives`,
    those that this rank of several has issued from the end of the step before to that of this one.
    """

    step: int
    step_s: float
    waits_s: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    bound: Bound | None = None
    collectives: Mapping[str, CollectiveCount] = field(default_factory=dict)

    @property
    def total_wait_s(self) -> float:
        return sum(self.waits_s.values())

    @property
    def efficiency(self) -> float | None:
        return None if self.bound is None else self.bound.efficiency(self.step_s)

    @property
    def end_s(self) -> float:
        """The time of its end, on time.perf_counter()."""
        return self.start_s + self.step_s
