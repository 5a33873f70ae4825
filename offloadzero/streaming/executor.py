"""Which units are on the device, and their way there (floor 5).

[Note: what protects a lease]
A lease may be given up when nothing reads it any more. A unit is protected while (1) a module that needs it is
in its forward (pins), (2) its fetch is on the way, or (3) it was touched from inside an operation: by the saved
tensors that the running node of backward unpacks, or by one of the last two parameters read outside the sites. The
third rule is what keeps an operation's first weight in place while its second, of another unit, is fetched. It ends
early when all gradients of the unit have arrived, in backward when another node uses a unit (a recomputation, say):
the nodes before it have run; and in a forward when a site has no room otherwise: what was read before has been used.
Without that a frozen unit, which gets no gradients, or one whose dtype a script has looked at, would stay protected.

The plan has room for what sites need together; a node of backward may need more, weights of several units. What finds
no room then is read from its home into memory of its own. While the node waits for a recomputation, which needs the
room for its sites, it holds such a copy from the start. (Where the configuration has units checkpointed, the plan
has room for both unless a device budget is too small for that.)

Work launched on a stream is covered by fences: a fetch into a lease waits, on its stream, for what had been launched
on the [Note: streams that compute] when the lease was given up.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Collection, Hashable, Sequence
from itertools import chain
from typing import Any

import torch

from offloadzero.config import SegmentKind
from offloadzero.errors import BudgetError, StateError
from offloadzero.interrupts import uninterrupted
from offloadzero.memory.arena import Arena, BufferPool, Lease, align_up, room_for
from offloadzero.memory.device import Stream
from offloadzero.memory.lanes import order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.observe.stream_clock import Mark
from offloadzero.optim.records import Record, slot_layout
from offloadzero.schedule.prefetch import (
    Evict,
    Move,
    choose_victims,
    eviction_order,
    next_uses,
    plan_prefetch,
)
from offloadzero.schedule.trace import Trace
from offloadzero.streaming.leased_unit import (
    FETCHING,
    HOME,
    READY,
    RELEASED,
    LeasedUnit,
    Looks,
    SavedWeight,
)
from offloadzero.streaming.unit_fetches import UnitFetches
from offloadzero.torch_private import current_autograd_node, current_graph_task_id

MAX_PLANS = 2048  # kept of an order of use


class Executor:
    """Fetches units before they are used, gives up those whose next use is furthest away."""

    def __init__(
        self,
        records: Sequence[Record],
        store: TieredStore,
        *,
        unit_arena: Arena,
        staging: BufferPool,
        clock: StepClock,
    ) -> None:
        self._store = store
        self._has_streams = store.accelerator.has_streams
        self._arena = unit_arena
        self._clock = clock
        # With CUDA backward runs on a thread of autograd's, beside what the script's own thread may do meanwhile.
        self._lock = threading.RLock()
        self._fetches = UnitFetches(store, staging=staging, clock=clock)
        self._units: list[LeasedUnit] = []
        # By unit: in how many running forwards of sites that need it. For reading.
        self.pins = [0] * len(records)
        self.gathered: set[int] = set()  # the units some of whose parameters a script has gathered
        self._updated_early: set[int] = set()  # by this step's backward
        self._num_forwards = 0  # of sites, one inside the other
        self._outermost_evaluates = False
        self._forward_thread = 0  # of the running forward
        looks: dict[Hashable, Looks] = {}
        for record in records:
            home = record.segments[SegmentKind.PARAM]
            layout = (record.dtype, record.num_trainable, slot_layout(record.slots))
            stays = home.is_on_device
            shared = looks.get(layout) if not stays else None
            unit = LeasedUnit(
                record,
                HOME if stays else RELEASED,
                shared or Looks(record, store.accelerator.device),
                params=tuple(slot.param for slot in record.slots),
                home=home,
                num_bytes=record.param_bytes,
                owner=store.device.buffer.data_ptr(),
                frozen_from=record.num_trainable * record.dtype.itemsize,
            )
            if stays:
                unit.put_at(home.memory)
            else:
                looks[layout] = unit.looks
            self._units.append(unit)
            unit.show()
        self._streamed = [u.record.index for u in self._units if u.residency is not HOME]
        homes = [u for u in self._units if u.residency is HOME]
        homes.sort(key=lambda unit: unit.address)
        self._homes = [unit.record.index for unit in homes]
        self._home_addresses = [unit.address for unit in homes]
        self._num_bytes = {index: align_up(self._units[index].num_bytes) for index in self._streamed}
        self._unit_of = self._records_of_units(records)
        largest = max(self._num_bytes.values(), default=0)
        # Whether a recomputation may find no room beside a weight.
        self._is_tight = unit_arena.num_bytes < min(
            room_for((largest, largest)), sum(self._num_bytes.values())
        )
        self._present: frozenset[int] = frozenset()  # the streamed units that hold a lease
        self._trace = Trace(self._streamed)
        self._evaluation = Trace(self._streamed, there_and_back=False)
        self._evaluating = False
        self._lasting = {index for index in self._streamed if not records[index].num_trainable}
        # The order of use that plans were made for, the uses after it, and the plans by what else they depend on.
        self._planned_order: tuple[int, ...] = ()
        self._after_order: tuple[int, ...] = ()
        self._plans: dict[tuple[Any, ...], list[Move]] = {}
        self._current = -1
        self._planned_use: int | None = None  # of the unit whose use to come has been planned for, if one has
        self._guarded: list[int] = []
        self._unpacking: tuple[int, int] | None = None  # backward and node of the last use; None: a forward
        # [low, high): addresses at which a saved tensor is a weight of ours.
        self.address_range = (
            store.device.buffer.data_ptr(),
            store.device.buffer.data_ptr() + store.device.num_bytes,
        )

    def _records_of_units(self, records: Sequence[Record]) -> dict[int, tuple[int, ...]]:
        """By record: the streamed ones of its unit up to itself, the largest first, where there is room for all.

        A site takes them in that order. Where backward needs a small one first the large ones come before it, too.
        """
        units: dict[str, list[int]] = {}
        for index in sorted(self._streamed, key=lambda index: (-self._num_bytes[index], index)):
            units.setdefault(records[index].unit_name, []).append(index)
        fitting = [
            unit
            for unit in units.values()
            if room_for(self._num_bytes[index] for index in unit) <= self._arena.num_bytes
        ]
        return {index: tuple(unit[: place + 1]) for unit in fitting for place, index in enumerate(unit)}

    # --- use ---

    def touch(self, index: int, *, guard: bool = False, evaluating: bool = False) -> None:
        """Unit `index` is used now: wait for it if it is not there, and start what comes next.

        `guard` protects it as long as the running operation may read it: [Note: what protects a lease].
        `evaluating`: the use is no part of a training step, and leaves the recorded order of steps alone.
        """
        unit = self._units[index]
        stream = self._store.accelerator.note_stream() if self._has_streams else None
        if unit.residency is HOME:
            if not unit.updated.done():
                with self._clock.waiting("update"), self._store.failures.handed_over():
                    order_compute_after(unit.updated)
            self._store.failures.check_readable()
            return
        with self._lock:
            # Nodes run one after another: what an earlier one unpacked it has read, and after backward all have.
            node = self._running_node()
            if node != self._unpacking:
                self._unpacking = node
                self._guarded.clear()
            if guard:
                if index in self._guarded:
                    self._guarded.remove(index)
                self._guarded.append(index)
                if node is None:
                    del self._guarded[:-2]
            if index == self._current and unit.residency is READY and stream in unit.arrived_for:
                return
            self._store.failures.check_readable()
            with uninterrupted:
                what = "forward" if not guard else "read" if node is None else "backward"
                self._use(unit, stream, what, evaluating=evaluating, ends_guards=not guard and node is None)

    def _use(
        self, unit: LeasedUnit, stream: Stream | None, what: str, *, evaluating: bool, ends_guards: bool
    ) -> None:
        """`what` it is used in, for the timeline."""
        begun = self._clock.begin(what, unit.record.name) if self._has_streams else None
        index = unit.record.index
        self._current = index
        self._evaluating = evaluating
        (self._evaluation if evaluating else self._trace).advance(index)
        if unit.residency is RELEASED:
            self._start_fetch(unit, self._lease_on_demand(unit, ends_guards=ends_guards))
        if evaluating or index != self._planned_use:
            self._prefetch()
        if unit.residency is FETCHING or stream not in unit.arrived_for:
            self._complete_fetch(unit, stream, since=begun)

    def _uses_again(self, unit: LeasedUnit) -> bool:
        """Take what `touch(guard=True)` finds for most weights: the unit used last, and nothing else is guarded.

        Whichever node runs now: what it guards would be dropped and guarded again.
        """
        index = unit.record.index
        if index != self._current:
            return False
        stream = self._store.accelerator.note_stream() if self._has_streams else None
        with self._lock:
            if index != self._current or self._guarded != [index]:
                return False
            if unit.residency is not READY or stream not in unit.arrived_for:
                return False
            self._unpacking = self._running_node()
            return True

    @staticmethod
    def _running_node() -> tuple[int, int] | None:
        """The node that backward runs on this thread: the number of the backward, and the node's own."""
        node = current_autograd_node()
        return None if node is None else (current_graph_task_id(), node._sequence_nr())

    # --- forwards of sites ---

    @property
    def is_running(self) -> bool:
        """Whether a site is in its forward, or backward runs an operation on this thread."""
        is_in_forward = self._num_forwards and self._forward_thread == threading.get_ident()
        return bool(is_in_forward) or current_autograd_node() is not None

    @property
    def is_in_forward(self) -> bool:
        """Whether a site is in its forward."""
        return self._num_forwards > 0

    @property
    def is_evaluating(self) -> bool:
        """Whether a use now is no part of a training step: the outermost forward runs without gradients.

        A forward without gradients inside one with them (a teacher, a target) is part of the step.
        """
        if self._num_forwards:
            return self._outermost_evaluates
        return not torch.is_grad_enabled() and current_autograd_node() is None

    def expect_no_capture(self) -> None:
        """StateError where a forward begins inside the capture of a graph."""
        if self._has_streams and not self._num_forwards:
            self._store.accelerator.asynchronous.check_not_capturing()

    def enter_forward(self, indices: Sequence[int], *, is_root: bool) -> None:
        """A site that needs `indices` begins its forward; its parameters are ordinary ones until `leave_forward`.

        What is raised leaves everything as it was. Not to be interrupted.
        """
        if not self._num_forwards:
            self._forward_thread = threading.get_ident()
        elif self._forward_thread != threading.get_ident():
            raise StateError(
                "a forward began while another thread is in this model's: one thread at a time computes with an "
                "offloaded model (others may read its weights: state_dict(), parameters())"
            )
        if self._updated_early and current_autograd_node() is None:
            for index in indices:
                self.expect_step_taken(index)
        evaluating = self.is_evaluating
        if evaluating and not self._num_forwards and is_root:
            self._evaluation.finish_step()  # uses up to the next one are recorded as its order
        pinned: list[int] = []
        try:
            for index in indices:
                self.pin(index, evaluating=evaluating)
                pinned.append(index)
            if not evaluating:
                self._store.failures.check()  # the decision over the last step was waited for
        except BaseException:
            for index in pinned:
                self.unpin(index)
            raise
        if not self._num_forwards:
            self._outermost_evaluates = evaluating
        self._num_forwards += 1

    def expect_step_taken(self, index: int) -> None:
        """Raise if backward has updated the unit and step() has not been called: a script would see the new weights."""
        if index in self._updated_early and self._store.failures.stop is None:
            raise StateError(
                f"{self._units[index].record.name}: its weights are those after the step already, as they are updated "
                'in backward: use them after step(), or set "offloadzero": {"update": {"in_backward": false}}'
            )

    def leave_forward(self, indices: Sequence[int]) -> None:
        """The site's forward is over."""
        self._num_forwards -= 1
        for index in indices:
            self.unpin(index)

    def pin(self, index: int, *, evaluating: bool = False) -> None:
        """Touch and keep until `unpin`; the parameters are those of the unit."""
        unit = self._units[index]
        self.pins[index] += 1
        try:
            self.touch(index, evaluating=evaluating)
        except BaseException:
            self.pins[index] -= 1
            raise
        if self.pins[index] == 1:
            unit.enter_forward()

    def unpin(self, index: int) -> None:
        """The site's forward is over."""
        if self.pins[index] < 1:
            raise StateError(f"{self._units[index].record.name} is not pinned")
        self.pins[index] -= 1
        if not self.pins[index]:
            self._units[index].leave_forward()

    def written_in_forward(self, index: int) -> list[int]:
        """The slots of a pinned unit whose parameters were written in place; empty while another forward needs it."""
        return self._units[index].places_written() if self.pins[index] == 1 else []

    # --- reads outside of sites ---

    def on_device(self, index: int) -> torch.Tensor | None:
        """The unit's parameters for an operation now, shape (num_elements,); None where a read of the home is better.

        That is between steps, when a fetch for one parameter would drive out what the next step needs, and where every
        lease is in use.
        """
        unit = self._units[index]
        if unit.residency is not HOME and not self.is_running:
            return None  # in another thread's forward, too: what is on the device may leave while it is read
        if not self.pins[index]:
            try:
                self.touch(index, guard=True, evaluating=self.is_evaluating)
            except BudgetError:  # every lease is in use
                return None
        return unit.flat

    def num_updates(self, index: int) -> int:
        """Of the unit, begun so far."""
        return self._units[index].generation - self._units[index].edits

    def show(self, index: int, *, place: int, as_copy: bool) -> None:
        """Bring a unit to the device for a read of one parameter and point its parameters there.

        `as_copy`: that parameter at a copy of its own, for what may be kept longer than the unit stays.
        """
        unit = self._units[index]
        try:
            self.touch(index, guard=True, evaluating=self.is_evaluating)
        except BudgetError:  # every lease is in use: operations take it from its home
            return
        unit.show()
        if as_copy and unit.residency is not HOME:
            unit.show_copy(place)

    def gather(self, index: int, place: int, value: torch.Tensor) -> None:
        """The parameter of slot `place` is an ordinary one in `value` until `scatter`."""
        self._units[index].gather(place, value)
        self.gathered.add(index)

    def scatter(self, index: int, place: int) -> torch.Tensor:
        """Undo `gather`; gives the memory that the parameter has now."""
        unit = self._units[index]
        value = unit.scatter(place)
        if not unit.gathered:
            self.gathered.discard(index)
        return value

    def gathered_in(self, index: int) -> dict[int, torch.Tensor]:
        """By slot: the memory of the parameters that a script has gathered."""
        return self._units[index].gathered

    def gradients_complete(self, index: int) -> None:
        """No operation of this backward reads the unit's weights any more."""
        with self._lock:
            if index in self._guarded:
                self._guarded.remove(index)
            if index == self._current:
                self._current = -1
                self._trace.end_use()  # the next micro batch may begin with this very unit
            self._prefetch()
            if self._current < 0 and not self._evaluating:
                self._planned_use = self._trace.following()  # between two uses the plan is that of the second

    # --- saved tensors ---

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in device memory of ours."""
        low, high = self.address_range
        return low <= tensor.data_ptr() < high

    def save(self, tensor: torch.Tensor, address: int) -> SavedWeight:
        """A handle for a tensor that is a weight; `address` is its `data_ptr()`."""
        unit = self._units[self._current]  # most likely
        if not 0 <= address - unit.address < unit.num_bytes:  # `unit.holds(address)`, in half the time
            unit = self._unit_at(address)
        return unit.save(tensor, address)

    def _unit_at(self, address: int) -> LeasedUnit:
        """The unit whose parameters on the device hold `address`."""
        home = bisect_right(self._home_addresses, address) - 1
        for index in chain((self._homes[home],) if home >= 0 else (), self._present):
            if self._units[index].holds(address):
                return self._units[index]
        raise StateError("a tensor saved for backward lies in a released lease")

    def load(self, saved: SavedWeight, *, may_recompute: bool = False) -> torch.Tensor:
        """The weight that `saved` stands for, fetched again if need be.

        `may_recompute`: forwards may run before the operation that it is for.
        """
        index = saved.unit
        unit = self._units[index]
        unit.expect_as_saved(saved)
        needed = self._unit_of.get(index, (index,))
        if not may_recompute and len(needed) == 1 and self._uses_again(unit):
            return saved.view.of(unit)
        try:
            for index in needed:
                self.touch(index, guard=True)
        except BudgetError:  # every lease is in use
            return saved.view.view_in(self._fetches.read_home(unit))
        weight = saved.view.of(unit)
        if may_recompute and self._is_tight:
            self._guarded = [index for index in self._guarded if index not in needed]
            return weight.clone()
        return weight

    # --- updates ---

    def update_ticket(self, index: int) -> Ticket:
        """The last update of the unit."""
        return self._units[index].updated

    def wait_updatable(self, index: int) -> None:
        """Block until the unit's weights can change: `begin_update` will not wait. Nothing has changed till then."""
        with self._lock:
            self._units[index].expect_no_late_write()
            self._wait_arrived(self._units[index])

    def begin_update(self, index: int, ticket: Ticket, *, in_backward: bool = False) -> None:
        """The unit's trainable weights are about to change: its next use comes after `ticket`.

        `in_backward`: before the script has called step(), so it must not see them yet.
        """
        with self._lock:
            if in_backward:  # else `wait_updatable` has looked
                self._units[index].expect_no_late_write()
            self._make_stale(self._units[index], ticket)
            if in_backward:
                self._updated_early.add(index)

    def close_updates(self) -> None:
        """The step whose updates backward has begun is over, or will not be."""
        self._updated_early.clear()

    def reads(self) -> Ticket:
        """Done when what the calling thread has launched so far, which may read any weights, has run."""
        return self._store.accelerator.computed()

    def begin_edit(self, index: int) -> None:
        """Any of the unit's weights are about to be written by the caller.

        In its module's forward the unit stays, and the caller writes it there as well.
        """
        with self._lock:
            if self.pins[index]:
                return
            self._units[index].expect_no_late_write()
            self._make_stale(self._units[index], FINISHED)
            self._units[index].edits += 1

    def pinned_parameters(self, index: int) -> torch.Tensor | None:
        """The parameters of a unit whose module is in its forward, shape (num_elements,); else None."""
        return self._units[index].flat if self.pins[index] else None

    def _make_stale(self, unit: LeasedUnit, ticket: Ticket) -> None:
        with uninterrupted:
            self._wait_arrived(unit)
            unit.updated = ticket
            unit.generation += 1
            if unit.residency is not HOME and unit.residency is not RELEASED:
                self._release(unit)

    def _wait_arrived(self, unit: LeasedUnit) -> None:
        """Block until nothing writes the unit's lease."""
        if unit.residency is HOME:
            return
        if self.pins[unit.record.index]:
            raise StateError(f"{unit.record.name} is updated while its module is in its forward")
        if unit.residency is FETCHING and unit.fetched is not None and not unit.fetched.done():
            with self._clock.waiting("fetch"), self._store.failures.handed_over():
                unit.fetched.wait()

    def step_order(self, indices: Sequence[int]) -> list[int]:
        """`indices` in the order in which a step uses them first; what never leaves the device comes first."""
        distances = next_uses(self._trace.order)
        return sorted(indices, key=lambda index: (distances.get(index, -1), index))

    def expect_no_late_write(self, index: int) -> None:
        """Raise if the home of the unit lacks what was written through a kept view: [Note: kept views]."""
        self._units[index].expect_no_late_write()

    def _wait_for_kept(self) -> None:
        """What scripts keep of resident weights shows the update as soon as step() has returned."""
        for index in self._homes:
            unit = self._units[index]
            if not unit.updated.done() and unit.stays_kept():
                with self._clock.waiting("update"), self._store.failures.handed_over():
                    order_compute_after(unit.updated)

    def finish_step(self) -> None:
        """All updates of this step have begun: start what the next forward needs."""
        self._wait_for_kept()
        with self._lock:
            self._store.accelerator.end_step()
            self._trace.finish_step()
            self._evaluating = False
            self._current = -1
            self._guarded.clear()
            self._prefetch()

    def wait_updates(self) -> None:
        """Block until every update is home."""
        with self._clock.waiting("synchronize"), self._store.failures.handed_over():
            for unit in self._units:
                unit.updated.wait()
        self._store.failures.check_readable()

    # --- fetch and release ---

    def _protected(self) -> frozenset[int]:
        protected = [self._current, *self._guarded]
        for index in self._present:
            if self.pins[index] or self._is_arriving(self._units[index]):
                protected.append(index)
        return self._present.intersection(protected)

    @staticmethod
    def _is_arriving(unit: LeasedUnit) -> bool:
        """Whether its lease is being written: once that is over, a unit that nobody used may leave again."""
        return unit.residency is FETCHING and unit.fetched is not None and not unit.fetched.done()

    def _upcoming(self) -> tuple[int, ...]:
        """The uses that a fetch started now would serve; those of a running evaluation come first."""
        upcoming = self._trace.upcoming_in_step()
        return (*self._evaluation.upcoming_in_step(), *upcoming) if self._evaluating else upcoming

    def _later(self) -> tuple[int, ...]:
        """The uses of the next step: by units that no update makes stale, for which their lease lasts; by others."""
        order = self._trace.order
        if order is not self._planned_order:
            if order != self._planned_order:
                self._after_order = (*(index for index in order if index in self._lasting), *order)
                self._plans.clear()
            self._planned_order = order
        return self._after_order

    def _plan(self) -> list[Move]:
        """What to start now. Most steps are like the one before and find its plans, in a quarter of the time."""
        later, protected, free_bytes = self._later(), self._protected(), self._arena.free_bytes
        key = (self._trace.cursor, self._current, free_bytes, self._present, protected)
        plan = None if self._evaluating else self._plans.get(key)
        if plan is not None:
            return plan
        plan = plan_prefetch(
            self._upcoming(),
            later=later,
            num_bytes=self._num_bytes,
            present=self._present,
            protected=protected,
            in_use=self._current,
            free_bytes=free_bytes,
        )
        if not self._evaluating:
            if len(self._plans) == MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _prefetch(self) -> None:
        if len(self._present) == len(self._streamed):
            return
        for move in self._plan():
            unit = self._units[move.unit]
            if isinstance(move, Evict):
                unit.expect_no_late_write()
                self._release(unit)
                continue
            lease = self._arena.try_lease(unit.num_bytes, unit.record.name)
            if lease is None:
                return  # the free bytes lie in several holes; the next use tries again
            self._start_fetch(unit, lease)

    def _lease_on_demand(self, unit: LeasedUnit, *, ends_guards: bool) -> Lease:
        """`ends_guards`: a forward begins, so what was read outside of forwards has been used."""
        name, size = unit.record.name, unit.num_bytes
        while (lease := self._arena.try_lease(size, name)) is None:
            movable = self._present - self._protected()
            distances = next_uses(chain(self._upcoming(), self._later()), among=movable)
            wanted = align_up(size) - self._arena.free_bytes
            victims = choose_victims(movable, distances, num_bytes=self._num_bytes, wanted=wanted)
            # Enough is free, in several holes: one more must go.
            victims = victims or eviction_order(movable, distances)[:1]
            if victims:
                for victim in victims:
                    self._units[victim].expect_no_late_write()
                    self._release(self._units[victim])
                continue
            arriving = [u for u in self._units if u.residency is FETCHING]
            if not arriving and ends_guards and self._guarded:
                self._guarded.clear()
                continue
            if not arriving:
                raise self._no_room(name, size)
            for other in arriving:  # fetched for later: their room is needed now
                self._complete_fetch(other, self._store.accelerator.note_stream())
        return lease

    def _no_room(self, name: str, size: int) -> BudgetError:
        kept = [self._units[i].record.name for i in sorted(self._protected()) if self._units[i].lease]
        return BudgetError(
            f"{name}: {size:,} bytes do not fit beside {', '.join(kept) or 'nothing'}, which are in use "
            f"({self._arena.free_bytes:,} of {self._arena.num_bytes:,} bytes of unit leases are free): "
            "raise offloadzero.budgets.device or cut smaller units"
        )

    def _start_fetch(self, unit: LeasedUnit, lease: Lease) -> None:
        with self._store.failures.whole(f"the fetch of {unit.record.name}"):
            self._submit_fetch(unit, lease)

    def _submit_fetch(self, unit: LeasedUnit, lease: Lease) -> None:
        target = lease.view(unit.record.dtype, unit.record.num_elements)
        unit.fetched = self._fetches.submit(unit, target)
        unit.lease = lease
        unit.arrived_for = []
        unit.put_at(target)
        unit.residency = FETCHING
        self._present |= {unit.record.index}
        self._planned_use = None

    def _complete_fetch(self, unit: LeasedUnit, stream: Stream | None, *, since: Mark | None = None) -> None:
        if unit.fetched is None:
            raise AssertionError(f"{unit.record.name} is not being fetched")
        if not unit.fetched.done():
            with self._store.failures.handed_over(), self._clock.waiting("fetch", since=since):
                unit.fetched.order_compute()
        self._store.failures.check_readable()  # one that has failed is done
        unit.residency = READY
        unit.arrived_for.append(stream)

    def _release(self, unit: LeasedUnit) -> None:
        if unit.lease is None:
            raise AssertionError(f"{unit.record.name} holds no lease")
        lease, unit.lease = unit.lease, None
        views = unit.views
        unit.put_at(None)
        unit.residency = RELEASED
        self._present -= {unit.record.index}
        self._planned_use = None
        if unit.shown_at:
            unit.show()  # placeholders
        if views is not None:
            try:
                unit.give_up(views)
            except StateError as error:
                self._store.failures.record(
                    error
                )  # a release may be half of something: the next use raises it
        if self._store.poison:
            self._store.accelerator.join_streams()  # they may still read what is about to be poisoned
        lease.release()

    @property
    def resident_units(self) -> Collection[str]:
        """Names of the units on the device now (for reports and tests)."""
        return [u.record.name for u in self._units if u.residency is not RELEASED]
