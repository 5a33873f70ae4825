"""When the fetches of a step start: the decisions of the running schedule, made for a whole step in advance.

They are those of `plan_prefetch` at the places where the engine asks for them (streaming/executor.py): when a use
begins, when backward has all gradients of a unit, and at the end of a step, when updates have made leases stale. What
is still on its way counts as there, so that the result does not depend on time. Leases lie where they do in a run:
[Note: leases of several sizes] in streaming/unit_leases.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from offloadzero.memory.arena import Holes
from offloadzero.schedule.prefetch import (
    Evict,
    Move,
    choose_victims_at_once,
    next_uses,
    plan_prefetch,
)


class UseOfUnit(NamedTuple):
    """One use of a unit in a step; `completes`: backward has its gradient then."""

    unit: int
    completes: bool = False
    makes_stale: bool = False  # its update begins with it


class StartedFetch(NamedTuple):
    """A fetch that starts when the uses before the place `start` of a step have been launched."""

    start: int
    unit: int


def fetches_in_order(
    uses: Sequence[UseOfUnit],
    num_bytes: Mapping[int, int],
    *,
    arena_bytes: int,
    kept: Collection[int] = (),
) -> list[StartedFetch]:
    """Return the fetches of a step that is like the one before it, in the order of their submission.

    Args:
        uses: of the units in `num_bytes`, all micro batches of a step.
        num_bytes: bytes of each unit's lease.
        arena_bytes: the bytes that leases share.
        kept: units that no update makes stale: their leases last into the next step.
    """
    if not uses:
        return []
    schedule = _Schedule(uses, num_bytes, arena_bytes, kept)
    schedule.run()  # the second step begins as every later one does
    schedule.run()
    return schedule.fetches


class _Schedule:
    """The leases in the course of a step."""

    def __init__(
        self,
        uses: Sequence[UseOfUnit],
        num_bytes: Mapping[int, int],
        arena_bytes: int,
        kept: Collection[int],
    ) -> None:
        self._uses = uses
        self._order = [use.unit for use in uses]
        self._num_bytes = num_bytes
        self._largest = max(num_bytes.values(), default=0)
        self._holes = Holes(arena_bytes)
        self._offsets: dict[int, int] = {}  # of the leases, by unit
        self._kept = frozenset(kept)
        self._after = [*(unit for unit in self._order if unit in self._kept), *self._order]
        self.fetches: list[StartedFetch] = []

    def run(self) -> None:
        """Run a step."""
        self.fetches = []
        self._leave(self._offsets.keys() - self._kept)
        self._plan(0, following=0, current=None)
        planned = -1  # the place of a use that has been planned for when the one before it ended
        for place, use in enumerate(self._uses):
            if use.unit not in self._offsets:
                self._enter_on_demand(place)
                planned = -1
            if place != planned:
                self._plan(place, following=place + 1, current=use.unit)
            if use.completes:
                self._plan(place + 1, following=place + 1, current=None)
                planned = place + 1
            if use.makes_stale:
                self._leave({use.unit})
                planned = -1

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
