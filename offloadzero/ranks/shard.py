"""The part of a unit's flat elements that one rank keeps."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 1 << 16  # that are planned for


@dataclass(frozen=True)
class ShardSpec:
    """One rank of a group that divides flat elements evenly; in a group of one it keeps all of them.

    Sizes of undivided elements are called full, those of the rank's own part kept.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise AssertionError(f"rank {self.rank} of {self.world_size}")

    def kept_elements(self, full_elements: int) -> int:
        """The number of elements in this rank's part of `num_elements`."""
        kept, rest = divmod(full_elements, self.world_size)
        if rest:
            raise AssertionError(f"{full_elements} elements are no whole number of {self.world_size} shards")
        return kept

    def kept_range(self, full_elements: int) -> tuple[int, int]:
        """This rank's part [start, stop) of so many elements."""
        kept = self.kept_elements(full_elements)
        return self.rank * kept, (self.rank + 1) * kept

    def clipped(self, start: int, stop: int, full_elements: int) -> tuple[int, int]:
        """Return the part of [start, stop) that this rank keeps, counted from the begin of its own part.

        Where it keeps none of it, this is an empty range at the nearer end of its part.
        """
        first, last = self.kept_range(full_elements)
        return min(max(start, first), last) - first, min(max(stop, first), last) - first


WHOLE = ShardSpec()  # the spec of a process that trains alone


def kept_elements(num_elements: int, num_ranks: int) -> int:
    """The number of elements that each rank keeps of a parameter that waits for the engine.

    [Note: parameters in parts] in ranks/init_parts.py.
    """
    return num_elements // num_ranks + num_elements % num_ranks


def divides_states(stage: int) -> bool:
    """Whether a stage of ZeRO divides optimizer states; gradients are divided with them here, from stage 1 on."""
    return stage >= 1


def divides_params(stage: int) -> bool:
    """Whether a stage of ZeRO divides parameters as well."""
    return stage >= 3


def keeps_params_on_device(stage: int) -> bool:
    """Whether all parameters stay on each rank's device: where states are divided, but not the parameters."""
    return divides_states(stage) and not divides_params(stage)


def consecutive_groups(spec: ShardSpec, num_ranks: int) -> list[list[int]]:
    """Return the groups of so many consecutive ranks; none where each has one rank."""
    if num_ranks == 1:
        return []
    return [[*range(first, first + num_ranks)] for first in range(0, spec.world_size, num_ranks)]


def groups_of_equal_place(spec: ShardSpec, num_ranks: int) -> list[list[int]]:
    """Return the groups of ranks that have one place among so many consecutive ones; none where each has one rank."""
    if num_ranks == spec.world_size:
        return []
    return [[*range(place, spec.world_size, num_ranks)] for place in range(num_ranks)]
