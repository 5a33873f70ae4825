"""What to fetch and what to give up: a pure function of the trace (floor 3; no torch).

The order of use is known, so the unit that leaves is the one whose next use is furthest away (Belady 1966),
and a fetch never displaces a unit that is needed earlier than the fetched one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Evict:
    """Give up the lease of `unit`."""

    unit: int


@dataclass(frozen=True)
class Fetch:
    """Start to fetch `unit`."""

    unit: int


Operation = Evict | Fetch


def next_uses(upcoming: Iterable[int]) -> dict[int, int]:
    """Distance of each unit's next use (0 = next); units that do not occur are absent."""
    distances: dict[int, int] = {}
    for distance, unit in enumerate(upcoming):
        distances.setdefault(unit, distance)
    return distances


def eviction_order(candidates: Collection[int], distances: Mapping[int, int]) -> list[int]:
    """`candidates` with the furthest next use first; a unit without a next use is furthest."""
    return sorted(candidates, key=lambda unit: (-distances.get(unit, 1 << 60), unit))


def plan_prefetch(
    upcoming: Iterable[int],
    *,
    num_bytes: Mapping[int, int],
    present: Collection[int],
    protected: Collection[int],
    free_bytes: int,
) -> list[Operation]:
    """The evictions and fetches worth starting now, in order.

    Args:
        upcoming: units in the order of their use after the present one.
        num_bytes: bytes of each unit's lease.
        present: units that hold a lease (ready or on their way).
        protected: present units that must not be given up now.
        free_bytes: bytes in no lease.
    """
    distances = next_uses(upcoming)
    held = set(present)
    operations: list[Operation] = []
    for unit in sorted(distances, key=distances.__getitem__):
        if unit in held:
            continue
        victims: list[int] = []
        gained = free_bytes
        for victim in eviction_order(held - set(protected), distances):
            if gained >= num_bytes[unit] or distances.get(victim, 1 << 60) <= distances[unit]:
                break
            victims.append(victim)
            gained += num_bytes[victim]
        if gained < num_bytes[unit]:
            break  # a later unit must not take the room this one waits for
        operations.extend(Evict(victim) for victim in victims)
        operations.append(Fetch(unit))
        held.difference_update(victims)
        held.add(unit)
        free_bytes = gained - num_bytes[unit]
    return operations
