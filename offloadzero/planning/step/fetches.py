"""When the fetches of a step start: the decisions of the running schedule, made for a whole step in advance.

They are those of `plan_prefetch` at the places where the engine asks for them (streaming/executor.py): when a use
begins, when backward has all gradients of a unit, and at the end of a step, when updates have made leases stale. What
is still on its way counts as there, so that the result does not depend on time. Leases lie where they do in a run:
[Note: leases of several sizes] in streaming/unit_leases.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

from offloadzero.memory.arena import Holes
from offloadzero.schedule.prefetch import (
    Evict,
    Move,
    choose_victims_at_once,
    next_uses,
    plan_prefetch,
)

# Micro batches after the present one that decisions look at. A unit is used in each or in none: in the next one all are
# found, and their uses after those in the one behind it.
NUM_AHEAD = 2
# Steps that are gone through until one begins as an earlier one did: of few units it is one of the first dozen. Of many
# there are fewer steps, with so many uses in one micro batch of each.
MAX_STEPS, MAX_USES = 16, 8192


class UseOfUnit(NamedTuple):
    """One use of a unit in a micro batch; `completes`: backward has its gradient then."""

    unit: int
    completes: bool = False
    makes_stale: bool = False  # in the last micro batch of a step: its update begins with it


class StartedFetch(NamedTuple):
    """A fetch that starts when the uses before the place `start` of a step have been launched."""

    start: int
    unit: int


def uses_of_micro_batch(
    forward: Sequence[int], backward: Sequence[int], *, trained: Collection[int], update_in_backward: bool
) -> list[UseOfUnit]:
    """Return the uses of a micro batch, of units that are fetched. Those `trained` have a gradient with their last."""
    last_use = {unit: place for place, unit in enumerate(backward)}
    uses = [UseOfUnit(unit) for unit in forward]
    for place, unit in enumerate(backward):
        completes = last_use[unit] == place and unit in trained
        uses.append(UseOfUnit(unit, completes, makes_stale=completes and update_in_backward))
    return uses


def fetches_in_order(
    uses: Sequence[UseOfUnit],
    num_bytes: Mapping[int, int],
    *,
    arena_bytes: int,
    kept: Collection[int] = (),
    times: int = 1,
) -> list[StartedFetch]:
    """Return the fetches of a step like those that a run settles to, in the order of their submission.

    Leases of `kept` units lie where the step before has left them. Where steps of several sizes take turns for that, it
    is the one that moves most.

    Args:
        uses: of the units in `num_bytes`, in a micro batch.
        num_bytes: bytes of each unit's lease.
        arena_bytes: the bytes that leases share.
        kept: units that no update makes stale: their leases last into the next step.
        times: micro batches of the step. Of many most are alike, and each kind is gone through once.
    """
    if not uses:
        return []
    schedule = _Schedule(uses, times, num_bytes, arena_bytes, kept)
    steps: dict[Leases, list[list[StartedFetch]]] = {}  # by what they begin with
    begun = schedule.leases()
    most = max(2, min(MAX_STEPS, MAX_USES // len(uses)))
    while begun not in steps and len(steps) < most:
        steps[begun] = schedule.run()
        begun = schedule.leases()
    settled = list(steps.values())[list(steps).index(begun) if begun in steps else -1 :]
    first, *others = max(settled, key=lambda step: sum(num_bytes[unit] for part in step for _, unit in part))
    starts = range(0, times * len(uses), len(uses))
    return first + [
        StartedFetch(begin + start, unit)
        for begin, part in zip(starts, others, strict=True)
        for start, unit in part
    ]


Leases = frozenset[tuple[int, int]]  # the units that have one, and their offsets


class _State(NamedTuple):
    """The leases at the end of a micro batch, and the fetches in it, whose places count from its begin."""

    offsets: dict[int, int]
    holes: Holes
    is_planned: bool
    fetches: list[StartedFetch]


class _Schedule:
    """The leases in the course of a step."""

    def __init__(
        self,
        uses: Sequence[UseOfUnit],
        times: int,
        num_bytes: Mapping[int, int],
        arena_bytes: int,
        kept: Collection[int],
    ) -> None:
        self._uses = uses
        self._times = times
        self._of_micro = [use.unit for use in uses]
        self._order: list[int] = []  # of the micro batch, and of those after it that decisions look at
        self._num_bytes = num_bytes
        self._largest = max(num_bytes.values(), default=0)
        self._holes = Holes(arena_bytes)
        self._offsets: dict[int, int] = {}  # of the leases, by unit
        self._kept = frozenset(kept)
        self._after = [*(unit for unit in self._of_micro if unit in self._kept), *self._of_micro]
        self._known: dict[tuple[Leases, bool, int], _State] = {}
        self.fetches: list[StartedFetch] = []

    def run(self) -> list[list[StartedFetch]]:
        """Run a step, after which leases of `kept` units alone are left.

        Returns the fetches before it, and those in each of its micro batches, whose places count from its begin.
        """
        self.fetches = []
        self._look_ahead(0)
        self._plan(0, following=0, current=None)
        parts = [self.fetches]
        is_planned = False
        for micro in range(self._times):
            num_ahead = self._look_ahead(micro)
            key = (self.leases(), is_planned, num_ahead)
            if key not in self._known:
                self._known[key] = self._go_through(is_planned=is_planned, is_last=not num_ahead)
            known = self._known[key]
            self._offsets, self._holes = dict(known.offsets), deepcopy(known.holes)
            is_planned = known.is_planned
            parts.append(known.fetches)
        self._leave(self._offsets.keys() - self._kept)
        return parts

    def leases(self) -> Leases:
        """Return the present leases. What lies where tells all holes."""
        return frozenset(self._offsets.items())

    def _look_ahead(self, micro: int) -> int:
        """Have decisions look at a micro batch and those after it; return the number of the latter."""
        num_ahead = min(self._times - micro - 1, NUM_AHEAD)
        self._order = self._of_micro * (1 + num_ahead)
        return num_ahead

    def _go_through(self, *, is_planned: bool, is_last: bool) -> _State:
        """Go through a micro batch. `is_planned`: for its first use, when the last one of the one before ended."""
        self.fetches = []
        planned = 0 if is_planned else -1  # the use that has been planned for when the one before it ended
        for place, use in enumerate(self._uses):
            if use.unit not in self._offsets:
                self._enter_on_demand(place)
                planned = -1
            if place != planned:
                self._plan(place, following=place + 1, current=use.unit)
            if use.completes:
                self._plan(place + 1, following=place + 1, current=None)
                planned = place + 1
            if use.makes_stale and is_last:
                self._leave({use.unit})
                planned = -1
        return _State(dict(self._offsets), deepcopy(self._holes), planned == len(self._uses), self.fetches)

    def _enter(self, place: int, unit: int) -> bool:
        size = self._num_bytes[unit]
        offset = self._holes.take(size, from_end=size < self._largest)
        if offset is None:
            return False
        self._offsets[unit] = offset
        self.fetches.append(StartedFetch(place, unit))
        return True

    def _leave(self, units: Collection[int]) -> None:
        for unit in sorted(units):
            offset = self._offsets.pop(unit, None)
            if offset is not None:
                self._holes.give(offset, self._num_bytes[unit])

    def _plan(self, start: int, *, following: int, current: int | None) -> None:
        if len(self._offsets) == len(self._num_bytes):
            return
        if not self._start(start, self._moves(following, current, self._holes.num_bytes)):
            self._start(start, self._moves(following, current, self._holes.largest_bytes))

    def _moves(self, following: int, current: int | None, free_bytes: int) -> Sequence[Move]:
        return plan_prefetch(
            self._order[following:],
            later=self._after,
            num_bytes=self._num_bytes,
            present=self._offsets.keys(),
            protected=() if current is None else (current,),
            in_use=current,
            free_bytes=free_bytes,
        )

    def _start(self, start: int, moves: Sequence[Move]) -> bool:
        for move in moves:
            if isinstance(move, Evict):
                self._leave({move.unit})
            elif not self._enter(start, move.unit):
                return False
        return True

    def _enter_on_demand(self, place: int) -> None:
        unit = self._order[place]
        upcoming = (*self._order[place + 1 :], *self._after)
        while not self._enter(place, unit):
            wanted = self._num_bytes[unit] - self._holes.num_bytes
            distances = next_uses(upcoming, among=self._offsets.keys())
            victims = choose_victims_at_once(
                self._offsets.keys(), distances, num_bytes=self._num_bytes, wanted=wanted
            )
            self._leave(victims)
