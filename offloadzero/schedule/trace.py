"""The order in which units are used (floor 3; no torch)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Trace:
    """The order of use of one optimizer step, taken as a cycle, with a cursor at the present use.

    It starts as a guess (the units forward, then backward) and is replaced at the end of every step by what
    was really used, so that a change of order costs at most one step of stalls.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self.order: list[int] = [*units, *reversed(units)]
        self.cursor = -1  # nothing was used yet
        self._recorded: list[int] = []

    def advance(self, unit: int, *, record: bool) -> None:
        """`unit` is used now. The cursor moves to its next occurrence; an unknown unit leaves it alone."""
        if record and (not self._recorded or self._recorded[-1] != unit):
            self._recorded.append(unit)
        if self.cursor >= 0 and self.order[self.cursor] == unit:
            return
        for distance in range(1, len(self.order) + 1):
            position = (self.cursor + distance) % len(self.order)
            if self.order[position] == unit:
                self.cursor = position
                return

    def upcoming(self) -> Iterator[int]:
        """The uses after the present one, for one turn of the cycle."""
        for distance in range(1, len(self.order) + 1):
            yield self.order[(self.cursor + distance) % len(self.order)]

    def upcoming_in_step(self) -> Iterator[int]:
        """The uses after the present one, up to the end of this step.

        What comes after the step is updated first: fetching it now would fetch weights that are stale then.
        """
        yield from self.order[self.cursor + 1 :]

    def finish_step(self) -> None:
        """The step is over: what was recorded is the order from now on."""
        if self._recorded:
            self.order = self._recorded
        self.cursor = -1
        self._recorded = []
