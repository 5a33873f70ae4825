"""The tasks of a step on each lane, and what each of them waits for: those of [Note: the simulated step].

The waits are those of the running engine: streaming/executor.py (fetches), step/landing.py (gradients),
update/pipeline.py and update/staging.py (updates).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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
from offloadzero.planning.lane_simulation import Choice, Queue, Tasks
from offloadzero.planning.step_fetches import fetches_in_order, uses_of_micro_batch
from offloadzero.planning.step_work import LaneRates, Lanes, StepWork, UnitUse

MAX_PIECES, PIECES_OF_STEP = 8, 200  # of one update, and of all of a step

# Queues by their rank: fetches go before what updates read, as they do in the file engine.
COMPUTES, LAUNCHES = Queue(COMPUTE), Queue(PYTHON)
FETCHES, INPUTS_IN, STATES_IN = Queue(H2D, 0), Queue(H2D, 1), Queue(H2D, 2)
GRADIENTS, INPUTS_OUT, STATES_OUT = Queue(D2H, 0), Queue(D2H, 1), Queue(D2H, 2)
LANDS, UPDATES, DEVICE_UPDATES = Queue(LANDING), Queue(UPDATE), Queue(DEVICE_UPDATE)
READS_OF_FETCHES, READS_OF_INPUTS = Queue(NVME_READ, 0), Queue(NVME_READ, 1)
READS_OF_GRADIENTS, READS_OF_STATES = Queue(NVME_READ, 2), Queue(NVME_READ, 3)
WRITES_OF_INPUTS, WRITES_OF_GRADIENTS = Queue(NVME_WRITE, 0), Queue(NVME_WRITE, 1)
WRITES_OF_STATES = Queue(NVME_WRITE, 2)


class _Updated:
    """The tasks of one update: its first one, the one with which its values are known, and the one that brings them
    home."""

    def __init__(self, begun: int, values: int, home: int) -> None:
        self.begun = begun
        self.values = values
        self.home = home


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

    def __init__(self, work: StepWork, rates: LaneRates, num_micro: int) -> None:
        """Prepare steps of so many micro batches."""
        self.tasks = Tasks()
        self._work, self._rates, self._num_micro = work, rates, num_micro
        self._last_use = {use.unit: place for place, use in enumerate(work.backward)}
        self._fetches = self._fetches_by_place()
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
        self._param_staging = _Buffers(work.num_param_staging)
        self._slots = _Buffers(work.num_slots)
        self._window = _Buffers(max(1, work.num_slots - 1))  # pieces that are read before they are updated

    # --- what is the same in each step ---

    def _fetches_by_place(self) -> dict[int, list[int]]:
        """The units whose fetches start before the use at a place, in their order."""
        work = self._work
        sizes = {number: unit.lease_bytes for number, unit in enumerate(work.units) if unit.lease_bytes}
        trained = {number for number in sizes if work.units[number].trains}
        uses = uses_of_micro_batch(
            [use.unit for use in work.forward if use.unit in sizes],
            [use.unit for use in work.backward if use.unit in sizes],
            trained=trained,
            update_in_backward=work.update_in_backward,
        )
        all_uses = (*work.forward, *work.backward)
        places = [place for place, use in enumerate(all_uses) if use.unit in sizes]  # of `uses` among all
        by_place: dict[int, list[int]] = {}
        for start, number in fetches_in_order(
            uses, sizes, arena_bytes=work.arena_bytes, kept=sizes.keys() - trained, times=self._num_micro
        ):
            micro, before = divmod(start - 1, len(uses))  # the use that it follows
            place = micro * len(all_uses) + places[before] + 1 if start else 0
            by_place.setdefault(place, []).append(number)
        return by_place

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
        """Add the tasks of a step, and return the one that ends its backward."""
        work = self._work
        of_micro = len(work.forward) + len(work.backward)
        for micro in range(self._num_micro):
            self._forward(micro * of_micro)
            # The states that the step's updates read first may be read from here on.
            self._ahead_from = self._computed
            self._num_ahead = 0 if work.update_in_backward else work.num_slots
            self._backward(micro * of_micro + len(work.forward), closes=micro == self._num_micro - 1)
        if self._computed is None:
            raise AssertionError("a step without any use of a unit")
        last = self._computed
        if not work.update_in_backward:
            decided = self.tasks.join([last, *self._landed.values()])
            for number in self._order:
                self._update(number, decided)
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
            of_step = self._num_micro * (len(self._work.forward) + len(self._work.backward))
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
            self._update(number, landed)
            landed = self._updated[number].values
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

    def _update(self, number: int, ready: int) -> None:
        """Add the update of a unit, whose gradient or decision is `ready`."""
        unit = self._work.units[number]
        on_device_s = self._seconds(unit.update, DEVICE_UPDATE)
        if on_device_s:
            task = self.tasks.add(DEVICE_UPDATES, on_device_s, [ready], unit.name)
            self._updated[number] = _Updated(task, task, task)
            return
        count = self._num_pieces[number]
        pieces = [self._piece(number, count, ready) for _ in range(count)]
        values, homes = pieces[-1][1], [home for *_, home in pieces]
        home = homes[0] if count == 1 else self.tasks.join([values, *homes])
        self._updated[number] = _Updated(pieces[0][0], values, home)

    def _piece(self, number: int, count: int, ready: int) -> tuple[int, int, int]:
        """Add one of `count` pieces of an update: return its first task, its arithmetic, and its last task."""
        unit, name = self._work.units[number], self._work.units[number].name
        seconds = {lane: self._seconds(unit.update, lane) / count for lane in unit.update}
        update_s = seconds.get(UPDATE, 0.0)
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
        task = self.tasks.add(UPDATES, update_s, [ready, *reads], name)
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
