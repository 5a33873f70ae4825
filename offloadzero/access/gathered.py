"""Parameters that a script has gathered: ordinary ones with memory of their own, from the begin of a block to its end.

[Note: gathered over several ranks]
Inside its block a gathered parameter is each rank's own memory, with all of its values: what a rank reads there, or
writes, sends nothing, so the ranks need not do the same with it. They must enter and leave the same blocks. Before a
value is read they tell each other what they gather, and whether each has the memory for it; that they leave they tell
before a value is compared or written.

At the end the values of the rank that may write are sent to all, and each rank writes its part of the homes and
masters, as of any value that all ranks write. What the others have written is lost, as in DeepSpeed, whose scripts
have one rank write, or all of them other random numbers. Where no rank may write, each looks for changes of its own.

A forward inside the block computes with what was written before it. With one process each module's forward looks for
that; over several ranks the outermost one does, as the modules inside need not be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from offloadzero.access.agreement import Announcements
from offloadzero.access.weight_access import Units, WeightAccess, bits, expect_alike
from offloadzero.core.interrupts import uninterrupted_throughout
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.store import TieredStore
from offloadzero.ranks.group import Group
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


class Place(NamedTuple):
    """A parameter and its record."""

    record: Record
    slot: ParamSlot


Left = list[tuple[Place, torch.Tensor]]  # parameters with the values that the script has left


class ScriptBlocks:
    """Makes parameters ordinary ones and back; what all ranks do there together."""

    def __init__(
        self,
        weights: WeightAccess,
        units: Units,
        *,
        group: Group,
        records: Sequence[Record],
        announcements: Announcements,
        store: TieredStore,
    ) -> None:
        """Make the first block possible. The ranks tell each other their acts by `announcements`."""
        self.weights = weights
        self._group = group
        self._records = records
        self._announcements = announcements
        self._store = store
        self.open: list[GatheredBlock] = []  # in which the script is, the innermost last
        self._units = units
        # Of gathered parameters: the version when the script's memory and the home were last the same.
        self._shown: dict[tuple[int, int], tuple[int, int]] = {}

    def gather(self, record: Record, slot: ParamSlot, memory: torch.Tensor) -> None:
        """Make a parameter an ordinary one with its exact values in `memory`, on the device, until `scatter`."""
        name = f"GatheredParameters of {slot.name} over the ranks"
        # The other ranks wait for this one until the block ends.
        with nullcontext() if self._group.is_alone else self._store.failures.whole(name):
            memory.copy_(self.weights.value(record, slot, is_exact=True))
            self._units.gather(record.index, slot.index, memory)

    def scatter(self, record: Record, slot: ParamSlot) -> torch.Tensor:
        """Undo `gather`; return the value that the parameter holds now."""
        return self._units.scatter(record.index, slot.index)

    def value(self, record: Record, slot: ParamSlot) -> torch.Tensor | None:
        """Return the memory of a gathered parameter; None of another one."""
        return self._units.gathered_in(record.index).get(slot.index)

    def note_shown(self, record: Record, slot: ParamSlot) -> None:
        """Note that a gathered parameter has the value of its home now."""
        self._shown[record.index, slot.index] = self._version(record, slot)

    def is_stale(self, record: Record, slot: ParamSlot) -> bool:
        """Whether the home of a gathered parameter has been written since, by a step say."""
        return self._shown[record.index, slot.index] != self._version(record, slot)

    def _version(self, record: Record, slot: ParamSlot) -> tuple[int, int]:
        return self.weights.num_updates(record) if slot.trainable else 0, slot.num_writes[SegmentKind.PARAM]

    def differs(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> bool:
        """Whether the parameter's bits, dtype or shape differ from those of `value`."""
        home = self.weights.read(record, slot)
        if (value.shape, value.dtype) != (home.shape, home.dtype):
            return True
        return not torch.equal(bits(value.detach().to("cpu").reshape(-1)), bits(home.reshape(-1)))

    def commit(self, indices: Collection[int]) -> None:
        """Write what a script has written into gathered parameters, before a forward that needs these records.

        Over several ranks all of it, where the outermost forward begins.
        """
        if self._group.is_alone:
            for block in reversed(self.open):
                block.commit(indices)
        elif not self._units.is_running:
            for block in reversed(self.open):
                block.commit()

    # --- what the ranks do together ---

    def is_modifier(self, modifier_rank: int) -> bool:
        """Whether this rank is the one that may write. Raises ConfigError where there is no such rank."""
        spec = self._group.spec
        if self._group.is_alone:
            return True  # a script for several ranks names any of them
        if not 0 <= modifier_rank < spec.world_size:
            allowed = f"None, or 0 to {spec.world_size - 1}: a rank among those that share the data"
            raise ConfigError("modifier_rank", modifier_rank, allowed)
        return modifier_rank == spec.rank

    def meet(self, act: str, block: GatheredBlock, *, gathers: bool = False) -> None:
        """Raise StateError on all ranks unless all do the same; `gathers`: with the same parameters."""
        if self._group.is_alone:  # the text and its wait would cost 0.3 ms in each forward inside of a block
            return
        num, first = len(block.places), block.places[0].slot.name
        label = f"GatheredParameters of {first}{f' and {num - 1} others' if num > 1 else ''}"
        text = f"{act} GatheredParameters of {num} parameters (modifier_rank={block.modifier_rank})"
        with self._store.clock.waiting("state access"), self._store.failures.handed_over():
            self._announcements.announce(text, label=label)
            if gathers:
                self._expect_same_places(block, label)

    def _expect_same_places(self, block: GatheredBlock, label: str) -> None:
        """Raise StateError unless all ranks gather the same parameters, after the same writes."""
        channel = self._group.states
        own = [
            (record.index << 32) + 2 * slot.index + (self.value(record, slot) is not None)
            for record, slot in block.places
        ]
        by_rank = channel.by_rank_unless_same([self._group.writes.value, *own], label)
        if by_rank is None:
            return
        writes, *places = zip(*by_rank, strict=True)
        for of_ranks in places:
            if len(set(of_ranks)) > 1:
                names = map(self._name_of, of_ranks)
                texts = [
                    f"rank {rank} gathers {name}" for rank, name in zip(channel.members, names, strict=True)
                ]
                raise StateError(
                    f"{', '.join(texts)} (this is rank {channel.rank}): all ranks must gather the same parameters"
                )
        channel.expect_same_writes(writes, label)

    def _name_of(self, number: int) -> str:
        """The name to a number that says which parameter a rank gathers, and whether it has gathered it before."""
        slot = self._records[number >> 32].slots[(number & 0xFFFFFFFF) // 2]
        return f"{slot.name} again" if number % 2 else slot.name

    def ranks_where(self, flags: Sequence[bool]) -> list[list[int]]:
        """The ranks on which each of `flags` holds. All ranks call this with as many."""
        if not flags:
            return []
        with self._store.clock.waiting("state access"), self._store.failures.handed_over():
            return self._group.states.ranks_where(flags, "GatheredParameters")

    def on_ranks(self, ranks: Sequence[int]) -> str:
        """Name these ranks in a message, where there are several."""
        return f" (ranks {[*ranks]})" if len(self._group.states.members) > 1 else ""

    def value_by(
        self, modifier_rank: int, record: Record, slot: ParamSlot, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the value that the parameter has on the rank that may write, in host memory."""
        told = torch.empty(slot.num_elements, dtype=record.dtype, device="cpu")
        if self.is_modifier(modifier_rank):
            told.copy_(value.detach().reshape(-1))
        with self._store.clock.waiting("state access"), self._store.failures.handed_over():
            self._group.states.broadcast(told, f"{slot.name}: GatheredParameters", source=modifier_rank)
        return told.view(slot.shape)


class GatheredBlock:
    """Parameters of one engine from `enter` to `leave`: [Note: gathered over several ranks]."""

    def __init__(
        self,
        blocks: ScriptBlocks,
        params: Iterable[tuple[Record, ParamSlot]],
        *,
        modifier_rank: int | None,
    ) -> None:
        """Prepare the block. `modifier_rank`: the rank, of those that share the data, whose writes stay; None: none."""
        self._blocks = blocks
        # A set of parameters has another order on each rank.
        self.places = sorted(
            (Place(*found) for found in params), key=lambda found: (found.record.index, found.slot.index)
        )
        self.modifier_rank = modifier_rank
        self._is_modifier = False
        self._own: list[Place] = []  # the others are gathered by a block around this one

    def enter(self) -> None:
        """Make the parameters ordinary ones. After an error some may be: the caller has them given up.

        Raises:
            ConfigError: there is no rank `modifier_rank`.
            StateError: over several ranks, these have not entered the same block, or one has no memory for it.
            RuntimeError: the device has no memory for all of them at once (torch.OutOfMemoryError).
        """
        blocks = self._blocks
        blocks.meet("enters", self, gathers=True)
        # Behind it all ranks have the same one: an error comes on all.
        self._is_modifier = self.modifier_rank is not None and blocks.is_modifier(self.modifier_rank)
        fresh = [place for place in self.places if blocks.value(*place) is None]
        memory, failure = self._take_memory(fresh)
        (without,) = blocks.ranks_where([failure is not None])
        if failure is not None:
            raise failure
        if without:
            names = ", ".join(place.slot.name for place in fresh)
            raise StateError(f"GatheredParameters of {names}: ranks {without} have no memory for them")
        for place, values in zip(fresh, memory, strict=True):
            self._gather(place, values)
        blocks.open.append(self)

    @uninterrupted_throughout
    def _gather(self, place: Place, values: torch.Tensor) -> None:
        self._blocks.gather(*place, values)
        self._blocks.note_shown(*place)
        self._own.append(place)

    def _take_memory(self, places: Sequence[Place]) -> tuple[list[torch.Tensor], RuntimeError | None]:
        """Take the memory of all parameters, while nothing is lost where there is too little; or return the error."""
        device = self._blocks.weights.device
        try:
            return [torch.empty(slot.shape, dtype=rec.dtype, device=device) for rec, slot in places], None
        except RuntimeError as error:  # torch.OutOfMemoryError; the CPU's allocator has none of its own
            return [], error

    def leave(self) -> list[str]:
        """Put the parameters away and commit what was written; return what was changed where nobody may write.

        Raises:
            ConfigError: the script has given a parameter memory of another shape or dtype. Nothing is committed then.
            StateError: a step inside has updated parameters, or the ranks have not left the same block.
        """
        stale = self._stale()
        left = self.give_up()
        self._blocks.meet("leaves", self)
        _expect_none_stale(stale)
        if self.modifier_rank is None:
            return self._changed(left)
        self._settle(self.modifier_rank, [*left, *self._still_gathered()])
        return []

    def give_up(self) -> Left:
        """Put the parameters away, as far as they are gathered; return the values that they have. Sends nothing."""
        blocks = self._blocks
        if self in blocks.open:
            blocks.open.remove(self)
        left = [(place, blocks.scatter(*place)) for place in self._own]
        self._own = []
        return left

    def commit(self, indices: Collection[int] | None = None) -> None:
        """Write what was written into the parameters of these records, None: of all, before a forward uses them.

        Raises ConfigError, StateError as `leave` does.
        """
        if self.modifier_rank is not None:
            self._blocks.meet("begins a forward inside", self)
            _expect_none_stale(self._stale())
            self._settle(self.modifier_rank, self._still_gathered(indices))

    def _stale(self) -> list[str]:
        """The names of gathered parameters whose homes have newer values than the script."""
        blocks = self._blocks
        gathered = (place for place in self.places if blocks.value(*place) is not None)
        return [place.slot.name for place in gathered if blocks.is_stale(*place)]

    def _still_gathered(self, indices: Collection[int] | None = None) -> Left:
        values = (
            (place, self._blocks.value(*place))
            for place in self.places
            if indices is None or place.record.index in indices
        )
        return [(place, value) for place, value in values if value is not None]

    def _settle(self, modifier_rank: int, left: Left) -> None:
        """Commit the values of the rank that may write, and show them where other ranks still look."""
        blocks = self._blocks
        misfits = [self._misfit(*found) for found in left]
        of_modifier = [self._is_modifier and misfit is not None for misfit in misfits]
        for (place, _), misfit, ranks in zip(left, misfits, blocks.ranks_where(of_modifier), strict=True):
            if ranks and misfit is not None:
                raise misfit
            if ranks:
                allowed = f"{place.record.dtype} {tuple(place.slot.shape)}"
                raise ConfigError(f"{place.slot.name}.data", f"that of rank {modifier_rank}", allowed)
        for ((record, slot), value), misfit in zip(left, misfits, strict=True):
            new = blocks.value_by(modifier_rank, record, slot, value)
            if blocks.differs(record, slot, new):  # else a backward may need the unit as it is
                blocks.weights.replace(record, slot, new)
            blocks.note_shown(record, slot)
            if not self._is_modifier and misfit is None:
                value.detach().copy_(new)

    def _changed(self, left: Left) -> list[str]:
        """The names of the parameters that differ from their homes."""
        blocks = self._blocks
        # All are compared: where the homes are divided, each takes the other ranks.
        differing = [blocks.differs(*place, value) for place, value in left]
        return [
            place.slot.name + blocks.on_ranks(ranks)
            for (place, _), ranks in zip(left, blocks.ranks_where(differing), strict=True)
            if ranks
        ]

    def _misfit(self, place: Place, value: torch.Tensor) -> ConfigError | None:
        """The error of memory that cannot be the parameter's."""
        try:
            expect_alike(place.slot.name, value, shape=place.slot.shape, dtype=place.record.dtype)
        except ConfigError as error:
            return error
        return None


def _expect_none_stale(names: Sequence[str]) -> None:
    """Raise StateError where the end of a block would undo the updates of a step, or another write."""
    if names:
        raise StateError(
            f"{', '.join(names)}: updated inside a GatheredParameters block, by step() or safe_set_full_fp32_param() "
            "say. The values of the block are older, and writes to them are dropped: end the block before such "
            "an update"
        )
