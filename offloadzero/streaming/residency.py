"""The residency of units: which are on the device, which of them are protected, and which leave next (floor 5).

These are decisions, without effects: offloadzero/streaming/unit_leases.py does what is decided here.

[Note: what protects a lease]
A lease may be given up when nothing reads it any more. A unit is protected while (1) a module that needs it is
in its forward (pins), (2) its fetch is on the way, or (3) it was touched from inside an operation: by the saved
tensors that the running node of backward unpacks, or by one of the last two parameters read outside the sites. The
third rule is what keeps an operation's first weight in place while its second, of another unit, is fetched. It ends
early when all gradients of the unit have arrived, in backward when another node uses a unit (a recomputation, say):
the nodes before it have run; and in a forward when a site has no room otherwise: what was read before has been used.
Without that a frozen unit, which gets no gradients, or one whose dtype a script has looked at, would stay protected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from offloadzero.memory.arena import align_up, room_for
from offloadzero.schedule.prefetch import Move, choose_victims, eviction_order, next_uses, plan_prefetch
from offloadzero.schedule.trace import Trace
from offloadzero.streaming.leased_unit import FETCHING, HOME, LeasedUnit
from offloadzero.torch_private import current_autograd_node, current_graph_task_id

MAX_PLANS = 2048  # kept of an order of use


class ResidencyPolicy:
    """Knows the streamed units on the device, protects those in use, and plans by the order of use which move."""

    def __init__(self, units: Sequence[LeasedUnit], *, arena_bytes: int) -> None:
        """`arena_bytes`: those that the units' leases share."""
        self._units = units
        # By unit: in how many running forwards of sites that need it.
        self.pins = [0] * len(units)
        self.streamed = [u.record.index for u in units if u.residency is not HOME]
        self._num_bytes = {index: align_up(units[index].num_bytes) for index in self.streamed}
        # By record: the streamed ones of its unit up to itself.
        self.needed_with = self._records_of_units(arena_bytes)
        largest = max(self._num_bytes.values(), default=0)
        # Whether a recomputation may find no room beside a weight.
        self.is_tight = arena_bytes < min(room_for((largest, largest)), sum(self._num_bytes.values()))
        self.present: frozenset[int] = frozenset()  # the streamed units that hold a lease
        self.current = -1  # the unit that is used now, if any
        self.evaluating = False
        self.planned_use: int | None = None  # of the unit whose use to come has been planned for, if one has
        self.guarded: list[int] = []
        self.unpacking: tuple[int, int] | None = None  # backward and node of the last use; None: a forward
        self._trace = Trace(self.streamed)
        self._evaluation = Trace(self.streamed, there_and_back=False)
        self._lasting = {index for index in self.streamed if not units[index].record.num_trainable}
        # The order of use that plans were made for, the uses after it, and the plans by what else they depend on.
        self._planned_order: tuple[int, ...] = ()
        self._after_order: tuple[int, ...] = ()
        self._plans: dict[tuple[Any, ...], list[Move]] = {}

    def _records_of_units(self, arena_bytes: int) -> dict[int, tuple[int, ...]]:
        """By record: the streamed ones of its unit up to itself, the largest first, where there is room for all.

        A site takes them in that order. Where backward needs a small one first the large ones come before it, too.
        """
        units: dict[str, list[int]] = {}
        for index in sorted(self.streamed, key=lambda index: (-self._num_bytes[index], index)):
            units.setdefault(self._units[index].record.unit_name, []).append(index)
        fitting = [
            unit
            for unit in units.values()
            if room_for(self._num_bytes[index] for index in unit) <= arena_bytes
        ]
        return {index: tuple(unit[: place + 1]) for unit in fitting for place, index in enumerate(unit)}

    # --- what is there ---

    def entered(self, index: int) -> None:
        """The unit holds a lease."""
        self.present |= {index}
        self.planned_use = None

    def left(self, index: int) -> None:
        """The unit holds none any more."""
        self.present -= {index}
        self.planned_use = None

    # --- the order of use ---

    def begin_use(self, index: int, *, evaluating: bool) -> None:
        """The unit is used now."""
        self.current = index
        self.evaluating = evaluating
        (self._evaluation if evaluating else self._trace).advance(index)

    def end_use(self, index: int) -> None:
        """No operation of this backward reads the unit any more."""
        if index in self.guarded:
            self.guarded.remove(index)
        if index == self.current:
            self.current = -1
            self._trace.end_use()  # the next micro batch may begin with this very unit

    def plan_ahead(self) -> None:
        """Between two uses: what was planned last is the plan of the second one, too."""
        if self.current < 0 and not self.evaluating:
            self.planned_use = self._trace.following()

    def finish_evaluation(self) -> None:
        """The uses of evaluations up to the next one are recorded as the order of that."""
        self._evaluation.finish_step()

    def finish_step(self) -> None:
        """The step is over: nothing is in use."""
        self._trace.finish_step()
        self.evaluating = False
        self.current = -1
        self.guarded.clear()

    def step_order(self, indices: Sequence[int]) -> list[int]:
        """`indices` in the order in which a step uses them first; what never leaves the device comes first."""
        distances = next_uses(self._trace.order)
        return sorted(indices, key=lambda index: (distances.get(index, -1), index))

    # --- what is protected ---

    def note_read(self, index: int, *, guard: bool) -> bool:
        """The unit is needed now; `guard` protects it as long as the running operation may read it.

        Gives whether backward runs an operation on this thread.
        """
        # Nodes run one after another: what an earlier one unpacked it has read, and after backward all have.
        node = running_node()
        guarded = self.guarded
        if node != self.unpacking:
            self.unpacking = node
            guarded.clear()
        if guard:
            if index in guarded:
                guarded.remove(index)
            guarded.append(index)
            if node is None:
                del guarded[:-2]
        return node is not None

    def unguard(self, indices: Collection[int]) -> None:
        """The running operation reads other memory."""
        self.guarded = [index for index in self.guarded if index not in indices]

    def end_guards(self) -> bool:
        """A forward begins that has no room: what was read outside of forwards has been used. False if nothing was."""
        had_guards = bool(self.guarded)
        self.guarded.clear()
        return had_guards

    def protected(self) -> frozenset[int]:
        """The units on the device that must not leave now: [Note: what protects a lease]."""
        protected = [self.current, *self.guarded]
        for index in self.present:
            if self.pins[index] or self._is_arriving(self._units[index]):
                protected.append(index)
        return self.present.intersection(protected)

    @staticmethod
    def _is_arriving(unit: LeasedUnit) -> bool:
        """Whether its lease is being written: once that is over, a unit that nothing used may leave again."""
        return unit.residency is FETCHING and unit.fetched is not None and not unit.fetched.done()

    # --- what moves ---

    def _upcoming(self) -> tuple[int, ...]:
        """The uses that a fetch started now would serve; those of a running evaluation come first."""
        upcoming = self._trace.upcoming_in_step()
        return (*self._evaluation.upcoming_in_step(), *upcoming) if self.evaluating else upcoming

    def _later(self) -> tuple[int, ...]:
        """The uses of the next step: by units that no update makes stale, for which their lease lasts; by others."""
        order = self._trace.order
        if order is not self._planned_order:
            if order != self._planned_order:
                self._after_order = (*(index for index in order if index in self._lasting), *order)
                self._plans.clear()
            self._planned_order = order
        return self._after_order

    def plan(self, free_bytes: int) -> Sequence[Move]:
        """The moves to start now. Most steps are like the one before and find its plans, in a quarter of the time.

        `free_bytes`: those in no lease.
        """
        if len(self.present) == len(self.streamed):
            return ()
        later, protected = self._later(), self.protected()
        key = (self._trace.cursor, self.current, free_bytes, self.present, protected)
        plan = None if self.evaluating else self._plans.get(key)
        if plan is not None:
            return plan
        plan = plan_prefetch(
            self._upcoming(),
            later=later,
            num_bytes=self._num_bytes,
            present=self.present,
            protected=protected,
            in_use=self.current,
            free_bytes=free_bytes,
        )
        if not self.evaluating:
            if len(self._plans) == MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def victims(self, wanted: int) -> list[int]:
        """The units that leave for `wanted` bytes that a use needs at once, beside those that are free."""
        movable = self.present - self.protected()
        distances = next_uses(chain(self._upcoming(), self._later()), among=movable)
        victims = choose_victims(movable, distances, num_bytes=self._num_bytes, wanted=wanted)
        # Enough is free, in several holes: one more must go.
        return victims or eviction_order(movable, distances)[:1]


def running_node() -> tuple[int, int] | None:
    """The node that backward runs on this thread: the number of the backward, and the node's own."""
    node = current_autograd_node()
    return None if node is None else (current_graph_task_id(), node._sequence_nr())
