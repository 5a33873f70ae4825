"""The use of units: each is on the device before it is used, and changes only when it is in no use.

The residency policy decides which units are there, which stay and which leave; their leases carry that out. Code that
computes with a unit or reads one calls the executor, code that changes one its `changes` (unit_changes.py).

[Note: where a refused step is told]
After a step whose gradients are not finite a script may go on, from the line where it got the error. That must be the
same line on all ranks: between two such lines a rank may have begun a fetch that the others never issue. One process
raises the error as soon as it knows it, and where the first units are frozen their forward waits for nothing. Several
ranks wait for the decision where a step's forward begins, and in `zero_grad()`; the weights of trainable units are not
there before it in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

import torch

from offloadzero.core.interrupts import uninterrupted
from offloadzero.core.torch_private import active_ddp_module, current_autograd_node, outside_of_transforms
from offloadzero.errors import BudgetError, ConfigError, StateError
from offloadzero.memory.arena import Arena, BufferPool
from offloadzero.memory.device import Stream
from offloadzero.memory.lanes import order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.ranks.group import Group
from offloadzero.streaming.leased_unit import FETCHING, HOME, READY, RELEASED, LayoutViews, LeasedUnit
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_changes import UnitChanges
from offloadzero.streaming.unit_gather import UnitGather
from offloadzero.streaming.unit_leases import UnitLeases
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
        group: Group,
        gather: UnitGather,
    ) -> None:
        """Make the units, their leases and fetches. `gather` makes units whole that come in shards."""
        self._store = store
        self._is_alone = group.is_alone
        self._gather = gather
        self._has_streams = store.accelerator.has_streams
        # With CUDA backward runs on a thread of autograd's, while the script's own thread may call, too.
        self._lock = threading.RLock()
        self.units = leased_units(records, store)
        self.residency = ResidencyPolicy(
            self.units, arena_bytes=unit_arena.num_bytes, by_order=not self._is_alone
        )
        self.leases = UnitLeases(
            self.units,
            store,
            arena=unit_arena,
            residency=self.residency,
            staging=staging,
            gather=gather,
        )
        self.pins = self.residency.pins  # for reading
        self.changes = UnitChanges(self.units, self.leases, gather, store, pins=self.pins, lock=self._lock)
        self._spoiled: set[int] = set()  # units in a forward whose lease has other values than their home
        self._num_forwards = 0  # the number of nested forwards of sites
        self._outermost_evaluates = False
        self._forward_thread = 0  # the thread of the running forward
        self._params = frozenset(id(slot.param) for record in records for slot in record.slots)
        self._decided: Ticket = FINISHED  # the decision over the last step
        # Units by the order of their first forward, until that is asked for; None: it has been, or nobody asks.
        self._entered: dict[int, None] | None = None if self._is_alone else {}
        # [low, high): the addresses at which a saved tensor is a weight of this engine.
        self.address_range = (
            store.device.buffer.data_ptr(),
            store.device.buffer.data_ptr() + store.device.num_bytes,
        )

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
                with self._store.clock.waiting("update"), self._store.failures.handed_over():
                    order_compute_after(unit.updated)
            self._store.failures.check_readable()
            return
        with self._lock:
            residency = self.residency
            runs_node = residency.note_read(index, guard=guard)
            if index == residency.current and unit.residency is READY and stream in unit.arrived_for:
                return
            self._store.failures.check_readable()
            self._bring(unit, stream, guard=guard, runs_node=runs_node, evaluating=evaluating)

    @uninterrupted
    def _bring(
        self, unit: LeasedUnit, stream: Stream | None, *, guard: bool, runs_node: bool, evaluating: bool
    ) -> None:
        residency, index = self.residency, unit.record.index
        begun = None
        if self._has_streams:  # the kind of use on the timeline
            what = "forward" if not guard else "backward" if runs_node else "read"
            begun = self._store.clock.begin(what, unit.record.name)
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
        is in a forward, and for a unit that backward has updated before `step()`; what `_meet_others` raises.
        """
        if not self._num_forwards:
            self._store.failures.expect_own()
            if not self._is_alone:
                self._meet_others()
            self._forward_thread = threading.get_ident()
        elif self._forward_thread != threading.get_ident():
            raise StateError(
                "a forward began while another thread is in a forward of this model: only one thread at a time may "
                "compute with an offloaded model (others may read its weights: state_dict(), parameters())"
            )
        self.changes.expect_forward_may_begin(indices)
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
        if self._entered is not None and not evaluating:
            self._entered.update(dict.fromkeys(indices))

    def _meet_others(self) -> None:
        """Begin an outermost forward over several ranks: [Note: where a refused step is told].

        Raises NonFiniteError where the last step was refused, on all ranks here, and ConfigError where
        DistributedDataParallel is around the model.
        """
        wrapper = active_ddp_module()
        if wrapper is not None and any(id(param) in self._params for param in wrapper.module.parameters()):
            allowed = (
                "the module in it: its gradients are averaged over the ranks here. accelerate's prepare() and the "
                "Trainer of transformers leave a model unwrapped that offload() got before them"
            )
            raise ConfigError("model", type(wrapper).__name__, allowed)
        if not self.is_evaluating:
            if not self._decided.done():
                with self._store.clock.waiting("decision"), self._store.failures.handed_over():
                    self._decided.wait()
            self._store.failures.check()

    def step_decided_by(self, decided: Ticket) -> None:
        """Let no forward of the next step begin before `decided`, over several ranks."""
        self._decided = decided

    def take_entered(self) -> list[int]:
        """Return the units of this rank's first forwards, in their order; over several ranks it is noted until then."""
        entered, self._entered = self._entered, None
        return list(entered or ())

    def call_before_backward(self, call: Callable[[], None] | None) -> None:
        """Have `call` called before each fetch that a backward asks other ranks for; None: no longer."""
        self._gather.before_backward = call

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
                    self.changes.make_stale(self.units[index], self.units[index].updated, is_edit=True)

    def written_in_forward(self, index: int) -> list[int]:
        """The slots of a pinned unit whose parameters were written in place; none while another forward needs it."""
        return self.units[index].places_written() if self.pins[index] == 1 else []

    def forget_written(self, index: int) -> None:
        """Have the weights fetched again after the unit's forward: what was written in it does not go home."""
        self._spoiled.add(index)

    def end_use(self, index: int) -> None:
        """End the unit's use, if it is in use: no operation of this backward reads its weights any more."""
        with self._lock:
            self.residency.end_use(index)
            self.leases.prefetch()
            self.residency.plan_ahead()

    def read_home(self, unit: LeasedUnit) -> torch.Tensor:
        """Read the unit's parameters into memory of their own on the device, shape (num_elements,)."""
        return self.leases.read_home(unit)

    # --- reads outside of the module's forward, and parameters that a script has gathered ---

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

    def pinned_parameters(self, index: int) -> torch.Tensor | None:
        """The parameters of a unit whose module is in its forward, shape (num_elements,); else None."""
        return self.units[index].flat if self.pins[index] else None

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

    def scatter(self, index: int, place: int) -> torch.Tensor:
        """Undo `gather`; return the memory that the parameter has now."""
        return self.units[index].scatter(place)

    def gathered_in(self, index: int) -> dict[int, torch.Tensor]:
        """The memory of the parameters that a script has gathered, by slot."""
        return self.units[index].gathered_now()

    # --- steps ---

    def step_order(self, indices: Sequence[int]) -> list[int]:
        """Sort `indices` by their first use in a step; units that never leave the device come first."""
        return self.residency.step_order(indices)

    def finish_step(self) -> None:
        """End the step, all of whose updates have begun: start to fetch units for the next forward."""
        self.changes.wait_for_kept()
        with self._lock:
            self._store.accelerator.end_step()
            self.residency.finish_step()
            self.leases.prefetch()


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
