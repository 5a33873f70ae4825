"""Counts of the ranks' collectives and of their bytes.

[Note: bytes of a collective]
Counted are the bytes of the whole tensor, of which each rank has a part before or after: an all-gather of n bf16
parameters counts 2 n, whatever the number of ranks. On a ring each of N ranks sends (N - 1) / N of that, and twice as
much in an all-reduce, which is a reduce-scatter and an all-gather; hence its weight in `volume_bytes`. These are the
units of the ZeRO papers, in which a data-parallel step costs 2 and one of stage 3 costs 3 times the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_REDUCE = "all-reduce"
ALL_TO_ALL = "all-to-all"
BROADCAST = "broadcast"
SCATTER = "scatter"

# Up to so many ranks tell each of the others their few numbers; more use a reduction. Between two ranks of one machine
# gloo's takes 2.3 times as long, between eight 1.15 times, and between sixteen it is faster:
# benchmarks/host_collectives.md.
MOST_TELLING_EACH = 8

KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, SCATTER)


def tells_each(num_ranks: int) -> bool:
    """Whether so many ranks tell each other a few numbers each to each, else in a reduction."""
    return num_ranks <= MOST_TELLING_EACH


def comparison(num_ranks: int, num_values: int) -> tuple[str, int]:
    """The kind and the bytes of the collective in which ranks find whether each has the same int64 values."""
    if tells_each(num_ranks):
        return ALL_TO_ALL, num_ranks * num_values * 8
    return ALL_REDUCE, 2 * num_values * 8


class CollectiveCount(NamedTuple):
    """Calls, and the bytes of their whole tensors: [Note: bytes of a collective]."""

    num_calls: int = 0
    num_bytes: int = 0


class CollectiveCounter:
    """Counts the collectives of one thread by kind; any thread may read."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(KINDS, CollectiveCount())  # its keys stay: others read while this counts

    def add(self, kind: str, num_bytes: int) -> None:
        num_calls, before = self._counts[kind]
        self._counts[kind] = CollectiveCount(num_calls + 1, before + num_bytes)

    @property
    def counts(self) -> dict[str, CollectiveCount]:
        """The counts since the start, of the kinds that were issued."""
        return {kind: count for kind, count in self._counts.items() if count.num_calls}


def since(
    before: Mapping[str, CollectiveCount], now: Mapping[str, CollectiveCount]
) -> dict[str, CollectiveCount]:
    """The counts between two readings."""
    found = {}
    for key, (num_calls, num_bytes) in now.items():
        calls_before, bytes_before = before.get(key, (0, 0))
        if num_calls > calls_before:
            found[key] = CollectiveCount(num_calls - calls_before, num_bytes - bytes_before)
    return found


def volume_bytes(counts: Mapping[str, CollectiveCount]) -> int:
    """The bytes in the unit of the papers; keys end with the kind: [Note: bytes of a collective]."""
    return sum((2 if key.endswith(ALL_REDUCE) else 1) * count.num_bytes for key, count in counts.items())
