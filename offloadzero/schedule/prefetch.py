"""The choice of units to fetch and to give up: a pure function of the trace, without torch.

[Note: as few fetches as possible, each early]
The order of use is known, so the unit that leaves is the one whose next use is furthest away (Belady 1966), seen
from the use before the one that the fetch is for: that is the latest moment at which the fetch must start, with the
unit of that use in place. A fetch starts as soon as its victim is not needed before that use, which for a stack of
layers is many uses ahead. It does not start by taking another victim that is needed sooner and would have to come back
(Cao, Felten, Karlin, Li 1995: prefetching as early as possible costs fetches that prefetching as Belady replaces does
not). So a fetch never displaces a unit that is needed earlier than the fetched one, and no order of fetches in which
every unit arrives before its use has fewer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Evict:
    """Give up the lease of `unit`."""

    unit: int


@dataclass(frozen=True)
class Fetch:
    """Start to fetch `unit`."""

    unit: int


Move = Evict | Fetch

NEVER = 1 << 60  # the distance of a use that never comes


def next_uses(upcoming: Iterable[int], *, among: Collection[int] | None = None) -> dict[int, int]:
    """The distance of the next use (0 = next) of each unit, or of those `among` them; unused units are absent."""
    if among is None:
        return {unit: distance for distance, unit in reversed(list(enumerate(upcoming)))}
    distances: dict[int, int] = {}
    sought = set(among)
    for distance, unit in enumerate(upcoming):
        if unit in sought:
            distances[unit] = distance
            sought.remove(unit)
            if not sought:
                break
    return distances


def eviction_order(candidates: Collection[int], distances: Mapping[int, int]) -> list[int]:
    """`candidates` with the furthest next use first; a unit without a next use is furthest."""
    return sorted(candidates, key=lambda unit: (-distances.get(unit, NEVER), unit))


def choose_victims(
    candidates: Collection[int], distances: Mapping[int, int], *, num_bytes: Mapping[int, int], wanted: int
) -> list[int]:
    """Choose which of `candidates` to give up for `wanted` bytes: those with the furthest next uses, and no more.

    Of units of different sizes the furthest may be too small to matter once a nearer, larger one leaves: it
    then stays. All candidates are given up if they are not enough.
    """
    victims: list[int] = []
    gained = 0
    for victim in eviction_order(candidates, distances):
        if gained >= wanted:
            break
        victims.append(victim)
        gained += num_bytes[victim]
    for victim in reversed(victims.copy()):
        if gained - num_bytes[victim] >= wanted:
            victims.remove(victim)
            gained -= num_bytes[victim]
    return victims


def choose_victims_at_once(
    candidates: Collection[int], distances: Mapping[int, int], *, num_bytes: Mapping[int, int], wanted: int
) -> list[int]:
    """Choose the units that leave for a use that found no room, `wanted` bytes short of it in all.

    Where that is none, enough bytes are free, but in several holes: one unit leaves.
    """
    victims = choose_victims(candidates, distances, num_bytes=num_bytes, wanted=wanted)
    return victims or eviction_order(candidates, distances)[:1]


def plan_prefetch(
    upcoming: Sequence[int],
    *,
    later: Sequence[int] = (),
    num_bytes: Mapping[int, int],
    present: Collection[int],
    protected: Collection[int],
    in_use: int | None = None,
    free_bytes: int,
) -> list[Move]:
    """The evictions and fetches worth starting now, in order: [Note: as few fetches as possible, each early].

    Args:
        upcoming: units in the order of their use after the present one.
        later: uses after those. Nothing is fetched for them yet, but a unit in them stays longer than one that is not.
        num_bytes: bytes of each unit's lease.
        present: units that hold a lease (ready or on their way).
        protected: present units that must not be given up now.
        in_use: the protected unit that may be given up after the present use.
        free_bytes: bytes that no lease holds.
    """
    held = set(present)
    staying = set(protected) - {in_use}
    needed = set(protected)  # now, or before the use that the loop looks at
    previous = in_use
    moves: list[Move] = []
    for position, unit in enumerate(upcoming):
        if unit not in held:
            victims: list[int] = []
            wanted = num_bytes[unit] - free_bytes
            if wanted > 0:
                movable = held - staying - {previous}
                if sum(num_bytes[other] for other in movable - needed) < wanted:
                    break  # most calls end here: the following uses are a whole step ahead
                distances = next_uses(chain(upcoming[position:], later), among=movable)
                for other in needed:  # of units without a next use, those needed before leave last
                    distances.setdefault(other, NEVER - 1)
                victims = choose_victims(movable, distances, num_bytes=num_bytes, wanted=wanted)
            gained = free_bytes + sum(num_bytes[victim] for victim in victims)
            if gained < num_bytes[unit] or not needed.isdisjoint(victims):
                break  # a later unit must not take the room this one waits for
            moves.extend(Evict(victim) for victim in victims)
            moves.append(Fetch(unit))
            held.difference_update(victims)
            held.add(unit)
            free_bytes = gained - num_bytes[unit]
        needed.add(unit)
        previous = unit
    return moves
