"""The residency of units: those on the device, those of them that are protected, and those that leave next.

These are decisions without effects: offloadzero/streaming/unit_leases.py carries them out.

[Note: what protects a lease]
A lease may be given up when nothing reads it any more. A unit is protected while (1) a module that needs it is
in its forward (pins), (2) its fetch is on the way, or (3) it was touched from inside an operation: by the saved
tensors that the running node of backward unpacks, or by one of the last two parameters read outside the sites. The
third rule keeps an operation's first weight in place while its second, of another unit, is fetched. It ends early when
all gradients of the unit have arrived; in backward when another node uses a unit (a recomputation, say), as the nodes
before it have run; and in a forward when a site has no room otherwise, as the parameters read before have been used.
Otherwise a frozen unit, which gets no gradients, or one whose dtype a script has looked at, would stay protected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from offloadzero.core.torch_private import current_autograd_node, current_graph_task_id
from offloadzero.memory.arena import align_up, room_for
from offloadzero.schedule.prefetch import Move, choose_victims_at_once, next_uses, plan_prefetch
from offloadzero.schedule.trace import Trace
from offloadzero.streaming.leased_unit import FETCHING, HOME, LeasedUnit

# Plans kept for one order of use: so many, or for a longer order as many as it needs, as long as their keys take no
# more bytes than that.
MAX_PLANS = 2048
MAX_BYTES_OF_PLANS = 1 << 26


class ResidencyPolicy:
    """Knows the streamed units on the device, protects those in use, and plans which move, by the order of use."""

    def __init__(self, units: Sequence[LeasedUnit], *, arena_bytes: int, by_order: bool = False) -> None:
        """Begin with all streamed units at home.

        Args:
            arena_bytes: the bytes that their leases share.
            by_order: decide by the order of use alone, never by what has arrived: [Note: what a rank fetches].
        """
        self._units = units
        self._by_order = by_order
        # The number of running forwards of sites that need a unit, by unit.
        self.pins = [0] * len(units)
        self.streamed = [u.record.index for u in units if u.residency is not HOME]
        self._num_bytes = {index: align_up(units[index].num_bytes) for index in self.streamed}
        # The streamed records of a record's unit up to itself, by record.
        self.needed_with = self._records_of_units(arena_bytes)
        largest = max(self._num_bytes.values(), default=0)
        # Whether a recomputation may find no room while a node holds a weight.
        self.is_tight = arena_bytes < min(room_for((largest, largest)), sum(self._num_bytes.values()))
        self.present: frozenset[int] = frozenset()  # the streamed units that hold a lease
        self._present_bits = 0  # the same, a bit for each
        self.current = -1  # the unit that is used now, if any
        self.evaluating = False
        self.planned_use: int | None = None  # a unit whose coming use has been planned for, or None
        self.guarded: list[int] = []
        # The numbers of the backward and of the node of the last use; None: a forward.
        self._unpacking: tuple[int, int] | None = None
        self._trace = Trace(self.streamed)
        self._evaluation = Trace(self.streamed, there_and_back=False)
        self._lasting = {index for index in self.streamed if not units[index].record.num_trainable}
        # The order of use for which plans were made, the uses after it, and the plans by their other arguments.
        self._planned_order: tuple[int, ...] = ()
        self._after_order: tuple[int, ...] = ()
        self._plans: dict[tuple[Any, ...], list[Move]] = {}

    def _records_of_units(self, arena_bytes: int) -> dict[int, tuple[int, ...]]:
        """The streamed records of each record's unit up to itself, the largest first, where there is room for all.

        A site takes them in that order. Where backward needs a small one first, the larger ones are fetched before it,
        too.
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

    # --- the present units ---

    def entered(self, index: int) -> None:
        """Note that the unit holds a lease."""
        self.present |= {index}
        self._present_bits |= 1 << index
        self.planned_use = None

    def left(self, index: int) -> None:
        """Note that the unit holds no lease any more."""
        self.present -= {index}
        self._present_bits &= ~(1 << index)
        self.planned_use = None

    # --- the order of use ---

    def begin_use(self, index: int, *, evaluating: bool) -> None:
        """Note that the unit is used now."""
        self.current = index
        self.evaluating = evaluating
        (self._evaluation if evaluating else self._trace).advance(index)

    def end_use(self, index: int) -> None:
        """Note that no operation of this backward reads the unit any more."""
        if index in self.guarded:
            self.guarded.remove(index)
        if index == self.current:
            self.current = -1
            self._trace.end_use()  # the next micro batch may begin with this very unit

    def plan_ahead(self) -> None:
        """Take the last plan, made between two uses, for the plan of the second one, too."""
        if self.current < 0 and not self.evaluating:
            self.planned_use = self._trace.following()

    def finish_evaluation(self) -> None:
        """Close the order of the evaluations' uses; the next ones begin another."""
        self._evaluation.finish_step()

    def finish_step(self) -> None:
        """End the step: nothing is in use."""
        self._trace.finish_step()
        self.evaluating = False
        self.current = -1
        self.guarded.clear()

    def step_order(self, indices: Sequence[int]) -> list[int]:
        """Sort `indices` by their first use in a step; units that never leave the device come first."""
        distances = next_uses(self._trace.order)
        return sorted(indices, key=lambda index: (distances.get(index, -1), index))

    # --- protection ---

    def note_read(self, index: int, *, guard: bool) -> bool:
        """Note that the unit is needed now; `guard` protects it as long as the running operation may read it.

        Returns whether backward runs an operation on this thread.
        """
        # Nodes run one after another: an earlier one has read its unpacked tensors, and after backward all have.
        guarded = self.guarded
        if self.note_node():
            guarded.clear()
        is_in_node = self._unpacking is not None
        if guard:
            if index in guarded:
                guarded.remove(index)
            guarded.append(index)
            if not is_in_node:
                del guarded[:-2]
        return is_in_node

    def note_node(self) -> bool:
        """Note that the running operation reads what is guarded; return whether it is another than the last one."""
        node, before = current_autograd_node(), self._unpacking
        self._unpacking = None if node is None else (current_graph_task_id(), node._sequence_nr())
        return self._unpacking != before

    def unguard(self, indices: Collection[int]) -> None:
        """Note that the running operation reads other memory than these units."""
        self.guarded = [index for index in self.guarded if index not in indices]

    def end_guards(self) -> bool:
        """End all guards for a forward without room: earlier reads have been used. False if there were none."""
        had_guards = bool(self.guarded)
        self.guarded.clear()
        return had_guards

    def protected(self) -> frozenset[int]:
        """The units on the device that must not leave now: [Note: what protects a lease]."""
        protected = [self.current, *self.guarded]
        for index in self.present:
            unit = self._units[index]
            if self.pins[index] or (unit.residency is FETCHING and self._is_arriving(unit)):
                protected.append(index)
        return self.present.intersection(protected)

    def _is_arriving(self, unit: LeasedUnit) -> bool:
        """Whether the lease of a unit that is fetched is being written. After that an unused one may leave again."""
        return self._by_order or (unit.fetched is not None and not unit.fetched.done())

    # --- moves ---

    def _upcoming(self) -> tuple[int, ...]:
        """The uses that a fetch started now would serve; those of a running evaluation come first."""
        upcoming = self._trace.upcoming_in_step()
        return (*self._evaluation.upcoming_in_step(), *upcoming) if self.evaluating else upcoming

    def _plan_for(self, order: tuple[int, ...]) -> None:
        """Plan for another order of use, after which come the uses of the next step.

        First of these are units that no update makes stale, whose leases last until then.
        """
        if order != self._planned_order:
            self._after_order = (*(index for index in order if index in self._lasting), *order)
            self._plans.clear()
        self._planned_order = order

    def plan(self, free_bytes: int) -> Sequence[Move]:
        """Return the moves to start now. Most steps are like the one before and find its plans, in a quarter of the
        time.

        `free_bytes`: the bytes in no lease.
        """
        if len(self.present) == len(self.streamed):
            return ()
        if self._trace.order is not self._planned_order:
            self._plan_for(self._trace.order)
        protected = self.protected()
        # Sets as numbers: of 2,000 units one takes 270 bytes, and 400 of them in a set 16,000.
        key = (self._trace.cursor, self.current, free_bytes, self._present_bits, _bits(protected))
        plan = None if self.evaluating else self._plans.get(key)
        if plan is not None:
            return plan
        plan = plan_prefetch(
            self._upcoming(),
            later=self._after_order,
            num_bytes=self._num_bytes,
            present=self.present,
            protected=protected,
            in_use=self.current,
            free_bytes=free_bytes,
        )
        if not self.evaluating:
            if len(self._plans) >= self._max_plans():
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _max_plans(self) -> int:
        # A plan is made after a use and after its gradients, with fetches on the way or not.
        of_this_order = 4 * len(self._planned_order)
        bytes_of_key = 2 * (len(self._units) // 7 + 28)  # of two numbers
        return max(MAX_PLANS, min(of_this_order, MAX_BYTES_OF_PLANS // bytes_of_key))

    def victims(self, wanted: int) -> list[int]:
        """Choose the units that leave for `wanted` bytes that a use needs at once, in addition to free ones."""
        movable = self.present - self.protected()
        if self._trace.order is not self._planned_order:
            self._plan_for(self._trace.order)
        distances = next_uses(chain(self._upcoming(), self._after_order), among=movable)
        return choose_victims_at_once(movable, distances, num_bytes=self._num_bytes, wanted=wanted)


def _bits(indices: Collection[int]) -> int:
    """A set of units as a number with a bit for each: its hash and its comparison are those of a few bytes."""
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits
