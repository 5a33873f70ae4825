"""The order in which units are used, recorded without torch.

[Note: departures]
A step that uses another unit than the order has next has left something out, put something in, or turned around early.
The cursor then goes on at the first of these places that exists: where a remembered order continues that began in the
same way; where the order has the last two uses one after the other; at the unit's next use. The last of them is a mere
guess: if the use after it is the one that would have come without the departure, the cursor goes back there. So a
change of order costs a stall or two where it happens, and a change that recurs now and then costs no more each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence

NUM_REMEMBERED = 8  # steps
MAX_USES = 1 << 16  # recorded of one step: a loop that never calls step() must not fill memory


class _Places:
    """The places of each use in an order: a step all of whose uses depart from it must not look through it at each."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order
        self._of: dict[int, list[int]] = {}
        self._after: dict[tuple[int, int], list[int]] = {}  # by the use before, and the use
        for place, unit in enumerate(order):
            self._of.setdefault(unit, []).append(place)
            if place:
                self._after.setdefault((order[place - 1], unit), []).append(place)

    def of(self, unit: int, start: int) -> int | None:
        """The first use of `unit` from `start` on; where there is none, that from the beginning on."""
        return _first_from(self._of.get(unit), start)

    def after(self, previous: int | None, unit: int, start: int) -> int | None:
        """The same of those that come right after a use of `previous`."""
        return None if previous is None else _first_from(self._after.get((previous, unit)), start)


def _first_from(places: list[int] | None, start: int) -> int | None:
    if places is None:
        return None
    index = bisect_left(places, start)
    return places[index] if index < len(places) else places[0]


class Trace:
    """The order of use of one optimizer step (or one evaluation), with a cursor at the present use.

    It starts as a guess: the units forward and, `there_and_back`, backward. The real orders of some steps are
    remembered. A step begins with the most frequent of them, and of equally frequent ones with the latest.
    """

    def __init__(self, units: Sequence[int], *, there_and_back: bool = True) -> None:
        self.order: tuple[int, ...] = (*units, *reversed(units)) if there_and_back else tuple(units)
        self.cursor = -1  # nothing has been used yet
        self._sure = -1  # the last cursor that was no guess
        self._present: int | None = None
        self._recorded: list[int] = []
        self._past: deque[tuple[int, ...]] = deque(maxlen=NUM_REMEMBERED)  # the latest first
        self._alike: list[tuple[int, ...]] = []  # remembered orders that may have begun as this step has
        self._places = _Places(())  # of the order that was departed from last

    def advance(self, unit: int) -> None:
        """Move the cursor to where the order has this use of `unit`, which happens now: [Note: departures]."""
        if unit == self._present:
            return
        previous, self._present = self._present, unit
        if len(self._recorded) < MAX_USES:
            self._recorded.append(unit)
        for sure in (self.cursor, self._sure):
            if sure + 1 < len(self.order) and self.order[sure + 1] == unit:
                self.cursor = self._sure = sure + 1
                return
        if not self._take_up_known_order():
            self._depart(previous, unit)

    def end_use(self) -> None:
        """End the present use: if the next one is of the same unit, it is a use of its own."""
        self._present = None

    def _take_up_known_order(self) -> bool:
        """Follow a remembered order that begins as this step has, if there is one."""
        if self._alike:
            begun = tuple(self._recorded)
            self._alike = [order for order in self._alike if order[: len(begun)] == begun]
        if self._alike:
            self.order = self._alike[0]
            self.cursor = self._sure = len(self._recorded) - 1
        return bool(self._alike)

    def _depart(self, previous: int | None, unit: int) -> None:
        order, start = self.order, self._sure + 1
        if self._places.order is not order:
            self._places = _Places(order)
        # After the last use the order begins anew: more micro batches than before.
        place = self._places.of(unit, start)
        after_previous = self._places.after(previous, unit, start)
        if after_previous is not None:
            self.cursor = self._sure = after_previous
        elif place is not None and (place >= start or start == len(order)):
            self.cursor = place
        else:
            self.cursor = self._sure

    def upcoming(self) -> Iterator[int]:
        """The uses after the present one, for one turn of the cycle."""
        for distance in range(1, len(self.order) + 1):
            yield self.order[(self.cursor + distance) % len(self.order)]

    def upcoming_in_step(self) -> tuple[int, ...]:
        """The uses after the present one, up to the end of this step.

        Units used after the step are updated first: weights fetched for them now would be stale by then.
        """
        return self.order[self.cursor + 1 :]

    def following(self) -> int | None:
        """The use after the present one, if this step has one."""
        position = self.cursor + 1
        return self.order[position] if position < len(self.order) else None

    def finish_step(self) -> None:
        """End the step, and remember the order that was recorded."""
        if self._recorded:
            self._past.appendleft(tuple(self._recorded))
        # Of equally frequent orders Counter keeps the one it met first, the latest, in front.
        self._alike = [order for order, _ in Counter(self._past).most_common()]
        if self._alike:
            self.order = self._alike[0]
        self.cursor = self._sure = -1
        self._present = None
        self._recorded = []
