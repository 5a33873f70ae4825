"""A step of training, simulated: the schedule that runs it, in seconds that follow from rates.

[Note: the simulated step]
The bound says how long a step takes if all lanes work side by side all the time. In a step they wait for one another:
a fetch for a lease, for the update of its unit and for a buffer; the computation for the fetch; the update for the
gradient, or for the norm of all gradients; the gradient for a lease and a buffer on the host. The simulation has these
waits, which are those of the running engine (streaming/executor.py, step/landing.py, update/pipeline.py,
update/staging.py), with the fetches that the engine's own schedule starts where it starts them (fetches.py), and lets
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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from offloadzero.planning.memory_plan import NUM_STAGING_LEASES
from offloadzero.planning.step.discrete_events import Choice, Outcome, Queue, Speeds, Tasks, simulate
from offloadzero.planning.step.work import THROUGH_HOST_MEMORY, Lanes, StepWork, UnitUse

NUM_STEPS, MAX_STEPS = 3, 24  # that are simulated at first, and at most
ALIKE = 0.002  # the share by which two steps in turn may differ
MAX_MICRO = 3  # micro batches that are simulated
MAX_PIECES, PIECES_OF_STEP = 8, 200  # of one update, and of all of a step
MOST_LOST = 0.5  # of the cores' speed beside a drive; one that would take more is slower
_OF_ALL_CORES = frozenset((COMPUTE, UPDATE, DEVICE_UPDATE, LANDING))

# Queues by their rank: fetches go before what updates read, as they do in the file engine.
COMPUTES, LAUNCHES = Queue(COMPUTE), Queue(PYTHON)
FETCHES, INPUTS_IN, STATES_IN = Queue(H2D, 0), Queue(H2D, 1), Queue(H2D, 2)
GRADIENTS, INPUTS_OUT, STATES_OUT = Queue(D2H, 0), Queue(D2H, 1), Queue(D2H, 2)
LANDS, UPDATES, DEVICE_UPDATES = Queue(LANDING), Queue(UPDATE), Queue(DEVICE_UPDATE)
READS_OF_FETCHES, READS_OF_INPUTS = Queue(NVME_READ, 0), Queue(NVME_READ, 1)
READS_OF_GRADIENTS, READS_OF_STATES = Queue(NVME_READ, 2), Queue(NVME_READ, 3)
WRITES_OF_INPUTS, WRITES_OF_GRADIENTS = Queue(NVME_WRITE, 0), Queue(NVME_WRITE, 1)
WRITES_OF_STATES = Queue(NVME_WRITE, 2)


@dataclass(frozen=True)
class LaneRates:
    """The rates of one machine for one step's work."""

    bytes_per_s: Lanes
    forward_s: float = 0.0  # computation of a micro batch
    backward_s: float = 0.0
    launch_s: float = 0.0  # Python for each use of a unit
    drive_bytes_per_s: float | None = None  # both directions at once; None: they do not share
    # Of all that passes through the host's memory; None: no limit is known.
    host_bytes_per_s: float | None = None
    num_cores: int | None = None  # shared by all lanes; None: the device computes beside the host
    core_share: float = 1.0  # of the cores, which computation keeps busy
    # Where cores are shared:
    holds: Lanes = field(default_factory=dict)  # seconds that computation loses for each byte of a lane
    drive_hold_s: float = 0.0  # that it loses for each byte of the drive
    drive_beside: float = 1.0  # the part of its rate that the drive has beside work of all cores

    def seconds(self, lane: str, num_bytes: float) -> float:
        """Return the seconds of `num_bytes` on a lane of its own. KeyError: its rate is not known."""
        return num_bytes / self.bytes_per_s[lane] if num_bytes else 0.0


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
    """Simulate steps without clipping: of the updates that may be tried in backward those that begin in time are."""
    num_tried = sum(unit.is_tried for unit in work.units)
    found, num_begun = _steady_trying(work, rates, num_micro, num_tried)
    return found if num_begun == num_tried else _steady_trying(work, rates, num_micro, num_begun)[0]


def _steady_trying(
    work: StepWork, rates: LaneRates, num_micro: int, num_tried: int
) -> tuple[SimulatedStep, int]:
    """Simulate steps that try so many updates; return also how many of them begin before the step is decided."""
    num_steps = NUM_STEPS
    while True:
        steps = StepTasks(work, rates, num_micro, num_tried)
        ends = [steps.add() for _ in range(num_steps - 1)]
        first = len(steps.tasks)  # of the last step
        ends.append(steps.add())
        outcome = simulate(steps.tasks, _speeds(rates))
        before_s, start_s, end_s = (outcome.ends_s[task] for task in ends[-3:])
        is_steady = abs((end_s - start_s) - (start_s - before_s)) <= ALIKE * (end_s - start_s)
        is_steady = is_steady and _longest_lane_s(outcome, first) <= (1 + ALIKE) * (end_s - start_s)
        if is_steady or num_steps >= MAX_STEPS:
            decided_s = outcome.ends_s[steps.decided]
            num_begun = sum(outcome.starts_s[tried.begun] < decided_s for tried in steps.tried.values())
            return _last_step(outcome, ends[-1], start_s, end_s), num_begun
        num_steps *= 2


def _longest_lane_s(outcome: Outcome, first: int) -> float:
    """The most time that a lane takes for a step's tasks: steps may be shorter for a while, and pile up work."""
    lanes_s: dict[str, float] = {}
    for number, queue in list(enumerate(outcome.tasks.queues))[first:]:
        if queue is not None:
            own_s = outcome.ends_s[number] - outcome.starts_s[number]
            lanes_s[queue.lane] = lanes_s.get(queue.lane, 0.0) + own_s
    return max(lanes_s.values(), default=0.0)


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


# --- the tasks of a step ---


class _Updated(NamedTuple):
    """The tasks of one update: its first one, the one with which its values are known, and the one after which they are
    home."""

    begun: int
    values: int
    home: int


class _Buffers:
    """Buffers that are taken in turn: each task waits for the one that gives the buffer back that it takes."""

    def __init__(self, number: int) -> None:
        self._given_back: deque[int] = deque(maxlen=max(1, number))

    def free(self) -> int | None:
        """Return the task after which the next buffer is free; None: one is."""
        is_full = len(self._given_back) == self._given_back.maxlen
        return self._given_back[0] if is_full else None

    def take(self, until: int) -> None:
        """Take the next buffer until a task has ended."""
        self._given_back.append(until)


class StepTasks:
    """Adds one step after the other to `tasks`."""

    def __init__(self, work: StepWork, rates: LaneRates, num_micro: int, num_tried: int) -> None:
        self.tasks = Tasks()
        self._num_tried = num_tried
        self.tried: dict[int, _Updated] = {}  # updates of the last backward, by unit
        self.decided = 0  # the task after which the last step is decided
        self._work, self._rates, self._num_micro = work, rates, num_micro
        self._last_use = {use.unit: place for place, use in enumerate(work.backward)}
        self._fetches: dict[int, list[int]] = {}  # units, by the number of uses before their fetches start
        for start, number in work.fetches(num_micro):
            self._fetches.setdefault(start, []).append(number)
        self._num_pieces = self._pieces()
        self._order = self._order_of_updates()
        # The last tasks so far:
        self._computed: int | None = None
        self._uses: list[int] = []
        self._arrived: dict[int, int] = {}  # fetches, by unit
        self._updated: dict[int, _Updated] = {}
        self._landed: dict[int, int] = {}
        self._inputs: list[int] = []  # those that have been sent, and not come back
        self._ahead_from: int | None = None
        self._num_ahead = 0
        self._holding: list[int | None] = []  # what the next computation waits for, since a buffer does
        self._landing_after: int | None = None
        # Buffers:
        self._grad_leases = _Buffers(work.num_grad_leases)
        self._passing = _Buffers(work.num_passing)
        self._grad_staging = _Buffers(work.num_grad_staging)
        self._param_staging = _Buffers(NUM_STAGING_LEASES)
        self._slots = _Buffers(work.num_slots)
        self._window = _Buffers(max(1, work.num_slots - 1))  # pieces that are read before they are updated

    # --- what is the same in each step ---

    def _pieces(self) -> list[int]:
        """The number of pieces of each update, by unit."""
        most = min(MAX_PIECES, max(1, PIECES_OF_STEP // max(1, len(self._work.units))))
        return [min(most, unit.num_chunks) if _is_staged(unit.update) else 1 for unit in self._work.units]

    def _order_of_updates(self) -> list[int]:
        """The units in the order of the next forward, those that never leave the device first."""
        first_use: dict[int, int] = {}
        for place, use in enumerate(self._work.forward):
            if self._work.units[use.unit].lease_bytes:
                first_use.setdefault(use.unit, place)
        trained = [number for number, unit in enumerate(self._work.units) if unit.trains]
        return sorted(trained, key=lambda number: (first_use.get(number, -1), number))

    # --- a step ---

    def add(self) -> int:
        work = self._work
        of_micro = len(work.uses)
        for micro in range(self._num_micro):
            self._forward(micro * of_micro)
            # The states that the step's updates read first may be read from here on.
            self._ahead_from = self._computed
            self._num_ahead = 0 if work.update_in_backward or self._num_tried else work.num_slots
            self.tried = {}
            self._backward(micro * of_micro + len(work.forward), closes=micro == self._num_micro - 1)
        if self._computed is None:
            raise AssertionError("a step without any use of a unit")
        last = self._computed
        if not work.update_in_backward:
            self.decided = self.tasks.join([last, *self._landed.values()])
            for number, tried in self.tried.items():
                home = self.tasks.join([self.decided, tried.home])
                self._updated[number] = _Updated(tried.begun, home, home)  # too early to deliver
            for number in self._order:
                if number not in self.tried:
                    self._updated[number] = self._update(number, self.decided)
        return last

    def _forward(self, place: int) -> None:
        for number, use in enumerate(self._work.forward):
            self._start_fetches(place + number)
            self._compute(use, self._rates.forward_s)
            if use.inputs:
                self._send_inputs(use)

    def _backward(self, place: int, *, closes: bool) -> None:
        work, last_use = self._work, self._last_use
        away = deque(use for use in work.backward if use.inputs)
        coming: deque[int] = deque()  # inputs, in the order in which backward needs them
        for number, use in enumerate(work.backward):
            self._start_fetches(place + number)
            unit = work.units[use.unit]
            completes = last_use[use.unit] == number and unit.trains
            waits_for = [self._grad_leases.free()] if completes and unit.shares_leases else []
            if use.inputs:
                while away and len(coming) <= work.inputs_ahead:
                    coming.append(self._fetch_inputs(away.popleft()))
                waits_for.append(coming.popleft())
            self._compute(use, self._rates.backward_s, waits_for)
            if completes:
                self._gradient(use.unit, closes=closes)
        for number, unit in enumerate(work.units):  # those whose weights backward does not need
            if unit.trains and number not in last_use:
                self._gradient(number, closes=closes)

    def _compute(self, use: UnitUse, phase_s: float, waits_for: Sequence[int | None] = ()) -> None:
        unit, rates = self._work.units[use.unit], self._rates
        after: list[int | None] = [*waits_for, *self._holding]
        self._holding = []
        if unit.lease_bytes:
            after.append(self._arrived.get(use.unit))
        elif use.unit in self._updated:
            after.append(self._updated[use.unit].home)
        if rates.launch_s:
            # With the CPU as the device the thread that launches is the one that computes. Else it is at most a step
            # ahead of the device.
            of_step = self._num_micro * len(self._work.uses)
            earlier = self._computed
            if rates.num_cores is None:
                earlier = self._uses[-of_step] if len(self._uses) >= of_step else None
            after.append(self.tasks.add(LAUNCHES, rates.launch_s, [earlier], unit.name))
        self._computed = self.tasks.add(COMPUTES, use.share * phase_s, [self._computed, *after], unit.name)
        self._uses.append(self._computed)

    # --- fetches ---

    def _start_fetches(self, place: int) -> None:
        for number in self._fetches.get(place, ()):
            self._arrived[number] = self._fetch(number)

    def _fetch(self, number: int) -> int:
        unit, updated = self._work.units[number], self._updated.get(number)
        read_s = self._seconds(unit.fetch, NVME_READ)
        copy_s = self._seconds(unit.fetch, H2D)
        if not read_s:
            home = None if updated is None else updated.home
            return self.tasks.add(FETCHES, copy_s, [self._computed, home], unit.name)
        asked = self.tasks.join([self._computed])
        choice, after = None, [asked, self._param_staging.free()]
        if updated is not None and unit.trains_whole:
            choice = Choice(asked, updated.begun, updated.values, updated.home)
        elif updated is not None:
            after.append(updated.home)
        read = self.tasks.add(READS_OF_FETCHES, read_s, after, unit.name, choice=choice)
        copied = self.tasks.add(FETCHES, copy_s, [read], unit.name)
        self._param_staging.take(copied)
        return copied

    # --- inputs of checkpointed units ---

    def _send_inputs(self, use: UnitUse) -> None:
        rates, name = self._rates, self._work.units[use.unit].name
        sent = self.tasks.add(INPUTS_OUT, rates.seconds(D2H, use.inputs), [self._computed], name)
        if self._work.inputs_on_file:
            sent = self.tasks.add(WRITES_OF_INPUTS, rates.seconds(NVME_WRITE, use.inputs), [sent], name)
        self._inputs.append(sent)

    def _fetch_inputs(self, use: UnitUse) -> int:
        """Fetch the inputs that the forward has sent last, of those that are still away."""
        rates, name = self._rates, self._work.units[use.unit].name
        sent = self._inputs.pop() if self._inputs else None
        after = [self._computed, sent]
        if self._work.inputs_on_file:
            after = [self.tasks.add(READS_OF_INPUTS, rates.seconds(NVME_READ, use.inputs), after, name)]
        return self.tasks.add(INPUTS_IN, rates.seconds(H2D, use.inputs), after, name)

    # --- gradients ---

    def _gradient(self, number: int, *, closes: bool) -> None:
        """Bring a unit's gradient home, and begin its update where that runs in backward."""
        unit, work = self._work.units[number], self._work
        landed = self._computed
        buffers = self._grad_staging if unit.is_staged else self._passing
        takes_buffer = unit.is_staged or unit.passes
        copy_s = self._seconds(unit.gradient, D2H)
        if copy_s:
            free = buffers.free() if takes_buffer else None
            self._holding.append(free)
            landed = self.tasks.add(GRADIENTS, copy_s, [landed, free], unit.name)
            if unit.shares_leases:
                self._grad_leases.take(landed)
        landed = self._land(number, landed)
        self._landed[number] = landed
        if unit.is_staged:
            self._grad_staging.take(landed)
        if closes and work.update_in_backward:
            self._updated[number] = self._update(number, landed)
            landed = self._updated[number].values
        elif closes and unit.is_tried and len(self.tried) < self._num_tried:
            self.tried[number] = self._update(number, landed)
        if unit.passes and not unit.is_staged:
            self._passing.take(landed)

    def _land(self, number: int, brought: int | None) -> int:
        """Add a gradient up and measure it. The landing thread waits for its file, too."""
        unit = self._work.units[number]
        after = [brought, self._landing_after]
        read_s, write_s = (self._seconds(unit.gradient, lane) for lane in (NVME_READ, NVME_WRITE))
        if read_s:
            after = [self.tasks.add(READS_OF_GRADIENTS, read_s, after, unit.name)]
        landing_s = self._seconds(unit.gradient, LANDING)
        if unit.measured_on_device and self._rates.num_cores is None:
            landing_s = 0.0  # at the speed of the device's memory
        landed = self.tasks.add(LANDS, landing_s, after, unit.name) if landing_s else self.tasks.join(after)
        if write_s:
            landed = self.tasks.add(WRITES_OF_GRADIENTS, write_s, [landed], unit.name)
            self._landing_after = landed
        return landed

    # --- updates ---

    def _update(self, number: int, ready: int) -> _Updated:
        """Add the update of a unit, whose gradient or decision is `ready`."""
        unit = self._work.units[number]
        on_device_s = self._seconds(unit.update, DEVICE_UPDATE)
        if on_device_s and not _is_staged(unit.update):
            task = self.tasks.add(DEVICE_UPDATES, on_device_s, [ready], unit.name)
            return _Updated(task, task, task)
        count = self._num_pieces[number]
        pieces = [self._piece(number, count, ready) for _ in range(count)]
        values, homes = pieces[-1][1], [home for *_, home in pieces]
        home = homes[0] if count == 1 else self.tasks.join([values, *homes])
        return _Updated(pieces[0][0], values, home)

    def _piece(self, number: int, count: int, ready: int) -> tuple[int, int, int]:
        """Add one of `count` pieces of an update: return its first task, its arithmetic, and its last task."""
        unit, name = self._work.units[number], self._work.units[number].name
        seconds = {lane: self._seconds(unit.update, lane) / count for lane in unit.update}
        update_s = seconds.get(UPDATE, 0.0) + seconds.get(DEVICE_UPDATE, 0.0)
        if not _is_staged(unit.update):
            task = self.tasks.add(UPDATES, update_s, [ready], name)
            return task, task, task
        before = self._updated.get(number)
        after = [self._slots.free(), self._window.free(), None if before is None else before.home]
        # [Note: reading ahead]: slots that are free are filled while backward runs.
        num_chunks = -(-unit.num_chunks // count)
        is_ahead = self._num_ahead >= num_chunks
        self._num_ahead = self._num_ahead - num_chunks if is_ahead else 0
        after.append(self._ahead_from if is_ahead else ready)
        reads = [
            self.tasks.add(queue, seconds[queue.lane], after, name)
            for queue in (READS_OF_STATES, STATES_OUT)
            if seconds.get(queue.lane)
        ]
        queue = (
            DEVICE_UPDATES if update_s and not seconds.get(UPDATE) else UPDATES
        )  # whole matrices: on the device
        task = self.tasks.add(queue, update_s, [ready, *reads], name)
        writes = [
            self.tasks.add(queue, seconds[queue.lane], [task], name)
            for queue in (WRITES_OF_STATES, STATES_IN)
            if seconds.get(queue.lane)
        ]
        home = writes[0] if len(writes) == 1 else self.tasks.join([task, *writes])
        self._window.take(task)
        self._slots.take(home)
        first = task if is_ahead or not reads else reads[0]
        return first, task, home

    def _seconds(self, num_bytes: Lanes, lane: str) -> float:
        return self._rates.seconds(lane, num_bytes.get(lane, 0.0))


def _is_staged(update: Lanes) -> bool:
    """Whether an update brings states to memory of the host, and back."""
    return any(update.get(lane) for lane in (NVME_READ, NVME_WRITE, H2D, D2H))
