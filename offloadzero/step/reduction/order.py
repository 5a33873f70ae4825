"""The order in which gradients are reduced over the ranks: a pure function of facts that all ranks agree on.

[Note: when a gradient is reduced]
A unit's gradient may be reduced as soon as it is complete, and the ranks must do so in one order. So units are expected
in a certain order, and a complete gradient waits for those before it. A unit that some rank completes only at the end
of a backward (an expert that got no token there) would hold up all others. So at the end of each backward the ranks say
which units they had complete before, and a unit that was not is no longer expected. The units that are left then follow
in the records' order, if some rank has a gradient of them.

The first backward expects the reversed order in which the first rank's forward used the records, and then those that it
did not use; later ones expect the order that the first rank saw in it. The order of the records themselves would not
do: of a model whose embedding is made after its blocks all other gradients would wait for that of the embedding, the
last one, in memory that nothing plans.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from offloadzero.errors import StateError


class ReduceOrder:
    """Says which gradients of a backward are reduced next: [Note: when a gradient is reduced]."""

    def __init__(self, records: Iterable[int]) -> None:
        self._records = tuple(records)
        self._expected = self._records[::-1]
        self._next = 0  # index into the expected ones: those before it have gone
        self._complete: dict[int, None] = {}  # in the order of their completion

    @property
    def completed(self) -> Sequence[int]:
        """The records that were complete before the end of this backward, in their order."""
        return tuple(self._complete)

    def begin(self) -> None:
        """Begin a backward."""
        self._next = 0
        self._complete.clear()

    def complete(self, record: int, name: str) -> list[int]:
        """Note that a record's gradient is complete; return the records that are reduced now.

        Raises StateError where it is complete already in this backward.
        """
        if record in self._complete:
            raise StateError(
                f"{name} gets its gradients a second time in one backward (a reentrant checkpoint around a shared "
                "module?): over several ranks that is not built. Use use_reentrant=False"
            )
        self._complete[record] = None
        now = []
        while self._next < len(self._expected) and self._expected[self._next] in self._complete:
            now.append(self._expected[self._next])
            self._next += 1
        return now

    def rest(self, present: Collection[int]) -> list[int]:
        """Return the records to reduce at the end of the backward; `present`: some rank has a gradient of them."""
        late = [record for record in self._expected[self._next :] if record in present]
        return [
            *late,
            *(record for record in self._records if record in present and record not in self._expected),
        ]

    def learn(self, order: Sequence[int]) -> None:
        """Expect the records of `order` from now on."""
        self._expected = tuple(order)

    def expect_only(self, everywhere: Collection[int]) -> None:
        """Expect only the records that all ranks had complete before the end."""
        self._expected = tuple(record for record in self._expected if record in everywhere)
