"""What the mutations and their runs share: the places of the package that a run comes to, and the names of runs."""

from __future__ import annotations

Place = tuple[str, int]  # file, line of a statement

OF_RANKS = "ranks: "  # the names of runs of several ranks begin so
PLACES: set[Place] = set()


def note(file: str, line: int) -> None:
    """Note that a run is at a place, where the files have notes."""
    PLACES.add((file, line))
