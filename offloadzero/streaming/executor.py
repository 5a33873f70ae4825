"""The use of units: each is on the device before it is used, and changes only when it is in no use.

The residency policy decides which units are there, which stay and which leave; their leases carry that out. Code that
computes with a unit or writes it calls the executor.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import torch

from offloadzero.errors import BudgetError, StateError
from offloadzero.interrupts import uninterrupted
from offloadzero.memory.arena import Arena, BufferPool
from offloadzero.memory.lanes import order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.streaming.leased_unit import FETCHING, HOME, READY, RELEASED, LayoutViews, LeasedUnit
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_fetches import UnitFetches
from offloadzero.streaming.unit_leases import UnitLeases
from offloadzero.torch_private import current_autograd_node, outside_of_transforms
from offloadzero.update.flat_layout import slot_layout
from offloadzero.update.records import Record


class Executor:
    """Keeps units on the device while they are used, and unchanged."""

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
        self._clock = clock
        # With CUDA backward runs on a thread of autograd's, while the script's own thread may call, too.
        self._lock = threading.RLock()
        self.units = leased_units(records, store)
        self.residency = self._make_residency(unit_arena.num_bytes)
        self._fetches = self._make_fetches(staging)
        self.leases = UnitLeases(
            self.units,
            store,
            arena=unit_arena,
            residency=self.residency,
            fetches=self._fetches,
            clock=clock,
        )
        self._homes = [unit for unit in self.units if unit.residency is HOME]
        self.pins = self.residency.pins  # for reading
        self.gathered: set[int] = set()  # units of which a script has gathered some parameters
        self._updated_early: set[int] = set()  # units updated by this step's backward
        self._spoiled: set[int] = set()  # units in a forward whose lease has other values than their home
        self._num_forwards = 0  # the number of nested forwards of sites
        self._outermost_evaluates = False
        self._forward_thread = 0  # the thread of the running forward
        # [low, high): the addresses at which a saved tensor is a weight of this engine.
        self.address_range = (
            store.device.buffer.data_ptr(),
            store.device.buffer.data_ptr() + store.device.num_bytes,
        )

    def _make_residency(self, arena_bytes: int) -> ResidencyPolicy:
        return ResidencyPolicy(self.units, arena_bytes=arena_bytes)

    def _make_fetches(self, staging: BufferPool) -> UnitFetches:
        return UnitFetches(self._store, staging=staging, clock=self._clock)

    # --- use ---

    def touch(self, index: int, *, guard: bool = False, evaluating: bool = False) -> None:
        """Use unit `index` now: wait for it if it is not there, and start to fetch the next ones.

        `guard` protects it as long as the running operation may read it: [Note: what protects a lease].
        `evaluating`: the use is no part of a training step, and leaves the recorded order of steps alone.
        """
        unit = self.units[index]
        stream = self._store.accelerator.note_stream() if self._has_streams else None
        if unit.residency is HOME:
            if not unit.updated.done():
                with self._clock.waiting("update"), self._store.failures.handed_over():
                    order_compute_after(unit.updated)
            self._store.failures.check_readable()
            return
        with self._lock:
            residency = self.residency
            runs_node = residency.note_read(index, guard=guard)
            if index == residency.current and unit.residency is READY and stream in unit.arrived_for:
                return
            self._store.failures.check_readable()
            with uninterrupted:
                begun = None
                if self._has_streams:  # the kind of use on the timeline
                    what = "forward" if not guard else "backward" if runs_node else "read"
                    begun = self._clock.begin(what, unit.record.name)
                residency.begin_use(index, evaluating=evaluating)
                if unit.residency is RELEASED:
                    lease = self.leases.lease_on_demand(unit, ends_guards=not guard and not runs_node)
                    self.leases.start_fetch(unit, lease)
                if evaluating or index != residency.planned_use:
                    self.leases.prefetch()
                if unit.residency is FETCHING or stream not in unit.arrived_for:
                    self.leases.complete_fetch(unit, stream, since=begun)

    def uses_again(self, index: int, unit: LeasedUnit) -> bool:
        """Do `touch(guard=True)` in the case of most weights: the unit was used last, and nothing else is guarded.

        The running node does not matter: its guard would be dropped and set again. Nor does the lock: each look is
        whole, and a thread that changes what was seen could do so as well behind the lock's release.
        """
        residency = self.residency
        if index != residency.current or residency.guarded != [index] or unit.residency is not READY:
            return False
        stream = self._store.accelerator.note_stream() if self._has_streams else None
        if stream not in unit.arrived_for:
            return False
        residency.note_node()
        return True

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
        """Whether a use now belongs to no training step: the outermost forward runs without gradients.

        A forward without gradients inside one with them (a teacher, a target) is part of the step.
        """
        if self._num_forwards:
            return self._outermost_evaluates
        return not torch.is_grad_enabled() and current_autograd_node() is None

    def expect_no_capture(self) -> None:
        """Raise StateError where a forward begins inside the capture of a graph."""
        if self._has_streams and not self._num_forwards:
            self._store.accelerator.asynchronous.check_not_capturing()

    def enter_forward(self, indices: Sequence[int], *, is_root: bool) -> None:
        """Begin the forward of a site that needs `indices`; its parameters are ordinary ones until `leave_forward`.

        An error leaves everything as it was. The call must not be interrupted. Raises StateError while another thread
        is in a forward, and for a unit that backward has updated before `step()`.
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
            self.residency.finish_evaluation()
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
                f"{self.units[index].record.name}: its weights are those after the step already, as they are updated "
                'in backward: use them after step(), or set "offloadzero": {"update": {"in_backward": false}}'
            )

    def leave_forward(self, indices: Sequence[int]) -> None:
        """End the site's forward."""
        self._num_forwards -= 1
        for index in indices:
            self.unpin(index)

    def pin(self, index: int, *, evaluating: bool = False) -> None:
        """Touch a unit and keep it until `unpin`; the parameters then lie in the unit's memory."""
        unit = self.units[index]
        self.pins[index] += 1
        try:
            self.touch(index, evaluating=evaluating)
        except BaseException:
            self.pins[index] -= 1
            raise
        if self.pins[index] == 1:
            unit.enter_forward()

    def unpin(self, index: int) -> None:
        """End a `pin`. Raises StateError without one."""
        if self.pins[index] < 1:
            raise StateError(f"{self.units[index].record.name} is not pinned")
        self.pins[index] -= 1
        if not self.pins[index]:
            self.units[index].leave_forward()
            if index in self._spoiled:
                with self._lock:
                    self._spoiled.discard(index)
                    self._make_stale(self.units[index], self.units[index].updated, is_edit=True)

    def written_in_forward(self, index: int) -> list[int]:
        """The slots of a pinned unit whose parameters were written in place; none while another forward needs it."""
        return self.units[index].places_written() if self.pins[index] == 1 else []

    def forget_written(self, index: int) -> None:
        """Have the weights fetched again after the unit's forward: what was written in it does not go home."""
        self._spoiled.add(index)

    # --- reads outside of sites ---

    def on_device(self, index: int) -> torch.Tensor | None:
        """Return the unit's parameters for an operation now, shape (num_elements,); None where its home should be read.

        That is so between steps, when a fetch for one parameter would drive out units that the next step needs, and
        where every lease is in use.
        """
        unit = self.units[index]
        if unit.residency is not HOME and not self.is_running:
            return None  # in another thread's forward, too: units on the device may leave during the read
        if not self.pins[index]:
            try:
                with outside_of_transforms():
                    self.touch(index, guard=True, evaluating=self.is_evaluating)
            except BudgetError:  # every lease is in use
                return None
        return unit.flat

    def num_updates(self, index: int) -> int:
        """The number of the unit's updates begun so far."""
        return self.units[index].generation - self.units[index].edits

    def show(self, index: int, *, place: int, as_copy: bool) -> None:
        """Bring a unit to the device for a read of one parameter and point its parameters there.

        `as_copy`: that parameter points at a copy of its own, for a value that may be kept longer than the unit stays.
        """
        unit = self.units[index]
        if place in unit.gathered:  # a script has it in memory of its own
            return
        try:
            self.touch(index, guard=True, evaluating=self.is_evaluating)
        except BudgetError:  # every lease is in use: operations take it from its home
            return
        unit.show()
        if as_copy and unit.residency is not HOME:
            unit.show_copy(place)

    def gather(self, index: int, place: int, value: torch.Tensor) -> None:
        """Make the parameter of slot `place` an ordinary one in `value` until `scatter`."""
        self.units[index].gather(place, value)
        self.gathered.add(index)

    def scatter(self, index: int, place: int) -> torch.Tensor:
        """Undo `gather`; return the memory that the parameter has now."""
        unit = self.units[index]
        value = unit.scatter(place)
        if not unit.gathered:
            self.gathered.discard(index)
        return value

    def gathered_in(self, index: int) -> dict[int, torch.Tensor]:
        """The memory of the parameters that a script has gathered, by slot."""
        return self.units[index].gathered_now()

    def gradients_complete(self, index: int) -> None:
        """End the unit's use: no operation of this backward reads its weights any more."""
        with self._lock:
            self.residency.end_use(index)
            self.leases.prefetch()
            self.residency.plan_ahead()

    def read_home(self, unit: LeasedUnit) -> torch.Tensor:
        """Read the unit's parameters into memory of their own on the device, shape (num_elements,)."""
        return self._fetches.read_home(unit)

    # --- updates ---

    def update_ticket(self, index: int) -> Ticket:
        """The ticket of the unit's last update."""
        return self.units[index].updated

    def wait_updatable(self, index: int) -> None:
        """Block until the unit's weights can change: `begin_update` will not wait. Nothing has changed till then."""
        with self._lock:
            self.units[index].expect_no_late_write()
            self.leases.wait_arrived(self.units[index])

    def begin_update(self, index: int, ticket: Ticket, *, in_backward: bool = False) -> None:
        """Announce a change of the unit's trainable weights: its next use comes after `ticket`.

        `in_backward`: the script has not called step() yet, so it must not see them.
        """
        with self._lock:
            if in_backward:  # else `wait_updatable` has looked
                self.units[index].expect_no_late_write()
            self._make_stale(self.units[index], ticket)
            if in_backward:
                self._updated_early.add(index)

    def close_updates(self) -> None:
        """Forget the updates that backward has begun: their step is over, or will not be."""
        self._updated_early.clear()

    def reads(self) -> Ticket:
        """Return a ticket of the work that the calling thread has launched so far, which may read any weights."""
        return self._store.accelerator.computed()

    def begin_edit(self, index: int) -> None:
        """Announce that the caller is about to write any of the unit's weights.

        In its module's forward the unit stays, and the caller writes it there as well.
        """
        with self._lock:
            if self.pins[index]:
                return
            self.units[index].expect_no_late_write()
            self._make_stale(self.units[index], FINISHED, is_edit=True)

    def pinned_parameters(self, index: int) -> torch.Tensor | None:
        """The parameters of a unit whose module is in its forward, shape (num_elements,); else None."""
        return self.units[index].flat if self.pins[index] else None

    def _make_stale(self, unit: LeasedUnit, ticket: Ticket, *, is_edit: bool = False) -> None:
        with uninterrupted:
            self.leases.wait_arrived(unit)
            unit.change(ticket, is_edit=is_edit)
            if unit.residency is not HOME and unit.residency is not RELEASED:
                self.leases.release(unit)

    def step_order(self, indices: Sequence[int]) -> list[int]:
        """Sort `indices` by their first use in a step; units that never leave the device come first."""
        return self.residency.step_order(indices)

    def expect_no_late_write(self, index: int) -> None:
        """Raise if a write through a kept view has not reached the unit's home: [Note: kept views]."""
        self.units[index].expect_no_late_write()

    def _wait_for_kept(self) -> None:
        """Wait for updates of resident weights that scripts keep views of: step() returns with them done."""
        for unit in self._homes:
            if not unit.updated.done() and unit.stays_kept():
                with self._clock.waiting("update"), self._store.failures.handed_over():
                    order_compute_after(unit.updated)

    def finish_step(self) -> None:
        """End the step, all of whose updates have begun: start to fetch units for the next forward."""
        self._wait_for_kept()
        with self._lock:
            self._store.accelerator.end_step()
            self.residency.finish_step()
            self.leases.prefetch()

    def is_updated(self) -> bool:
        """Whether every update is home."""
        return all(unit.updated.done() for unit in self.units)

    def wait_updates(self) -> None:
        """Block until every update is home."""
        with self._clock.waiting("synchronize"), self._store.failures.handed_over():
            for unit in self.units:
                unit.updated.wait()
        self._store.failures.check_readable()


def leased_units(records: Sequence[Record], store: TieredStore) -> list[LeasedUnit]:
    """Make a unit for each record: on the device if its parameters live there, else released."""
    by_layout: dict[Hashable, LayoutViews] = {}
    units: list[LeasedUnit] = []
    for record in records:
        home = record.param_home
        layout = (record.dtype, record.num_trainable, record.num_elements, slot_layout(record.slots))
        stays = home.is_on_device and not record.is_gathered
        shared = by_layout.get(layout) if not stays else None
        unit = LeasedUnit(
            record,
            HOME if stays else RELEASED,
            shared or LayoutViews(record, store.accelerator.device),
            params=tuple(slot.param for slot in record.slots),
            home=home,
            num_bytes=record.param_bytes,
            owner=store.device.buffer.data_ptr(),
            frozen_from=record.num_trainable * record.dtype.itemsize,
        )
        if stays:
            unit.put_at(unit.layout_views.in_memory(home.memory))
        else:
            by_layout[layout] = unit.layout_views
        units.append(unit)
        unit.show()
    return units
