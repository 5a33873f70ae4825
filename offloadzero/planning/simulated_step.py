"""A step of training, simulated: the schedule that runs it, in seconds that follow from rates.

[Note: the simulated step]
The bound says how long a step takes if all lanes work side by side all the time. In a step they wait for one another:
a fetch for a lease, for the update of its unit and for a buffer; the computation for the fetch; the update for the
gradient, or for the norm of all gradients; the gradient for a lease and a buffer on the host. The simulation has these
waits, with the fetches that the engine's own schedule starts where it starts them (planning/step_fetches.py), and lets
each lane do one thing at a time in its order. It leaves out what is smaller than a unit: an update of what lies on a
drive goes in a few pieces, not in all its chunks, and what a unit computes is its share of the parameters.

A step is the time from the end of one backward to the end of the next, once two steps in turn are alike. Of many micro
batches three are simulated: the others take as long as the one in the middle.

With the CPU as the device the cores are shared, a drive may have a limit for both directions, and so may the host's
memory for all that passes through it. Then lanes that run at the same time slow each other down, and a faster lane may,
now and then, make a step slower by what it takes from a lane that others wait for. Where nothing is shared, a higher
rate never makes a step slower, but for the drive's reads, where fetches go before the states of updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offloadzero.observe.forecast import PYTHON
from offloadzero.observe.timeline import (
    COMPUTE,
    D2H,
    DEVICE_UPDATE,
    H2D,
    LANDING,
    NVME_READ,
    NVME_WRITE,
    UPDATE,
)
from offloadzero.planning.lane_simulation import Outcome, Speeds, simulate
from offloadzero.planning.step_tasks import StepTasks
from offloadzero.planning.step_work import THROUGH_HOST_MEMORY, LaneRates, Lanes, StepWork

NUM_STEPS, MAX_STEPS = 3, 24  # that are simulated at first, and at most
ALIKE = 0.002  # the share by which two steps in turn may differ
MAX_MICRO = 3  # micro batches that are simulated
MOST_LOST = 0.5  # of the cores' speed beside a drive; one that would take more is slower
_OF_ALL_CORES = frozenset((COMPUTE, UPDATE, DEVICE_UPDATE, LANDING))


class LaneSpan(NamedTuple):
    """A task on a lane, in seconds since the step's begin; parts outside of the step are cut off."""

    lane: str
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """A step as it is simulated: [Note: the simulated step]."""

    seconds: float
    busy_s: Lanes  # the seconds in which the lane works
    critical_s: Lanes  # of the chain of tasks that the step waits for, by lane
    spans: tuple[LaneSpan, ...]  # of at most MAX_MICRO micro batches
    spared_s: float = 0.0  # of the drive's reads, if alone: parameters that updates deliver

    @property
    def lane(self) -> str:
        """The lane that has most of the chain that the step waits for."""
        return max(sorted(self.critical_s), key=lambda lane: self.critical_s[lane], default="")


def simulate_step(work: StepWork, rates: LaneRates) -> SimulatedStep:
    """Simulate a step that is like the one before it: [Note: the simulated step]."""
    if work.num_micro <= MAX_MICRO:
        return _steady(work, rates, work.num_micro)
    few, one_more = (_steady(work, rates, number) for number in (MAX_MICRO - 1, MAX_MICRO))
    times = work.num_micro - MAX_MICRO

    def many(of_few: float, of_one_more: float) -> float:
        return of_one_more + times * (of_one_more - of_few)

    return SimulatedStep(
        seconds=many(few.seconds, one_more.seconds),
        busy_s={lane: many(few.busy_s.get(lane, 0.0), s) for lane, s in one_more.busy_s.items()},
        critical_s={lane: many(few.critical_s.get(lane, 0.0), s) for lane, s in one_more.critical_s.items()},
        spans=one_more.spans,
        spared_s=one_more.spared_s,
    )


def _steady(work: StepWork, rates: LaneRates, num_micro: int) -> SimulatedStep:
    num_steps = NUM_STEPS
    while True:
        steps = StepTasks(work, rates, num_micro)
        ends = [steps.add() for _ in range(num_steps)]
        outcome = simulate(steps.tasks, _speeds(rates))
        before_s, start_s, end_s = (outcome.ends_s[task] for task in ends[-3:])
        is_steady = abs((end_s - start_s) - (start_s - before_s)) <= ALIKE * (end_s - start_s)
        if is_steady or num_steps >= MAX_STEPS:
            return _last_step(outcome, ends[-1], start_s, end_s)
        num_steps *= 2


def _last_step(outcome: Outcome, last: int, start_s: float, end_s: float) -> SimulatedStep:
    tasks, spans, busy_s = outcome.tasks, list[LaneSpan](), dict[str, float]()
    for number, queue in enumerate(tasks.queues):
        begun_s, ended_s = max(outcome.starts_s[number], start_s), min(outcome.ends_s[number], end_s)
        if queue is not None and ended_s > begun_s:
            spans.append(LaneSpan(queue.lane, tasks.labels[number], begun_s - start_s, ended_s - start_s))
            busy_s[queue.lane] = busy_s.get(queue.lane, 0.0) + ended_s - begun_s
    return SimulatedStep(
        seconds=end_s - start_s,
        busy_s=busy_s,
        critical_s=outcome.critical_s(last, since_s=start_s),
        spans=tuple(spans),
        spared_s=sum(
            tasks.seconds[number] for number in outcome.spared if start_s < outcome.ends_s[number] <= end_s
        ),
    )


def _speeds(rates: LaneRates) -> Speeds | None:
    """Return the speeds of lanes that run at once: they share a drive, and with the CPU as the device its cores."""
    if rates.num_cores is None and rates.drive_bytes_per_s is None and rates.host_bytes_per_s is None:
        return None
    read, write = (rates.bytes_per_s.get(lane, 0.0) for lane in (NVME_READ, NVME_WRITE))
    drive = {NVME_READ: read, NVME_WRITE: write}

    def speeds(lanes: Sequence[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        of_drive = [lane for lane in lanes if lane in drive]
        if len(of_drive) == len(drive) and rates.drive_bytes_per_s is not None:
            found = dict.fromkeys(of_drive, min(1.0, rates.drive_bytes_per_s / (read + write)))
        if rates.host_bytes_per_s is not None:
            found |= _through_memory(lanes, found, rates.bytes_per_s, rates.host_bytes_per_s)
        if rates.num_cores is None:
            return found
        of_drive_s = {lane: found.get(lane, 1.0) for lane in of_drive}
        if not _OF_ALL_CORES.isdisjoint(lanes):
            of_drive_s = {lane: rates.drive_beside * speed for lane, speed in of_drive_s.items()}
        lost = rates.drive_hold_s * sum(speed * drive[lane] for lane, speed in of_drive_s.items())
        if lost > MOST_LOST:
            of_drive_s = {lane: MOST_LOST / lost * speed for lane, speed in of_drive_s.items()}
            lost = MOST_LOST
        return found | of_drive_s | _of_cores(lanes, rates, rates.num_cores, 1.0 - lost)

    return speeds


def _of_cores(lanes: Sequence[str], rates: LaneRates, num_cores: int, left: float) -> dict[str, float]:
    """Return the speeds of lanes that share the cores, of which the part `left` is theirs.

    What runs beside computation has the width with which, as long as it lasts, computation loses what it was measured
    to lose, and without a measurement the time of the other work: lost = (1 - speed) / speed for each of its seconds.
    """
    widths = dict.fromkeys(_OF_ALL_CORES, float(num_cores))
    others = dict.fromkeys((H2D, D2H, PYTHON), 1.0 if _OF_ALL_CORES.isdisjoint(lanes) else float(num_cores))
    if COMPUTE in lanes:
        idle = 1.0 - rates.core_share
        widths[COMPUTE] = rates.core_share * num_cores
        for lane in lanes:
            if lane != COMPUTE and (lane in widths or lane in others):
                lost = rates.holds[lane] * rates.bytes_per_s[lane] if lane in rates.holds else 1.0
                others[lane] = num_cores * (lost + idle)
    widths |= others
    shared = [lane for lane in lanes if lane in widths]
    wanted = sum(widths[lane] for lane in shared)
    return dict.fromkeys(shared, left * min(1.0, num_cores / wanted)) if wanted else {}


def _through_memory(lanes: Sequence[str], found: Lanes, bytes_per_s: Lanes, most: float) -> dict[str, float]:
    """Return the speeds of lanes that pass through the host's memory, which moves so many bytes per second at most."""
    speeds = {lane: found.get(lane, 1.0) for lane in lanes if lane in THROUGH_HOST_MEMORY}
    wanted = sum(speed * bytes_per_s.get(lane, 0.0) for lane, speed in speeds.items())
    return {lane: speed * min(1.0, most / wanted) for lane, speed in speeds.items()} if wanted else {}
