"""The fewest moves after which a size is small enough, found without computing each.

[Note: moves that cannot be enough]
Each move frees bytes of its own, and the buffers that it makes necessary only grow with further moves. So the size
after more moves is at least the one that is known, less what they free: as long as that is too much they need not be
planned. A plan takes time in proportion to the units of a model, and one for each unit would take its square.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise


def first_enough(size_after: Callable[[int], int], freed: Sequence[int], enough: int) -> int:
    """Return the first number of moves with a size of at most `enough`, else the first with the smallest size.

    Args:
        size_after: bytes after so many moves, 0 to `len(freed) - 1`.
        freed: bytes that so many moves free together, before what they make necessary: `freed[0]` is 0.
        enough: bytes.
    """
    sizes: dict[int, int] = {}  # by number of moves
    number = 0
    while number < len(freed):
        sizes[number] = size_after(number)
        if sizes[number] <= enough:
            return number
        number = bisect_left(freed, freed[number] + sizes[number] - enough)
    return _first_smallest(size_after, freed, sizes)


def _first_smallest(size_after: Callable[[int], int], freed: Sequence[int], sizes: dict[int, int]) -> int:
    """Halve the ranges between known sizes, as long as one in between may be smaller, or as small and earlier."""
    last = len(freed) - 1
    if last not in sizes:
        sizes[last] = size_after(last)
    best = min(sizes, key=lambda number: (sizes[number], number))
    ends = sorted(sizes)
    ranges = list(pairwise(ends))
    while ranges:
        start, stop = ranges.pop()
        least = sizes[start] + freed[start] - freed[stop - 1]
        if stop - start < 2 or (least, start + 1) > (sizes[best], best):
            continue
        middle = (start + stop) // 2
        sizes[middle] = size_after(middle)
        best = min(best, middle, key=lambda number: (sizes[number], number))
        ranges += [(start, middle), (middle, stop)]
    return best
