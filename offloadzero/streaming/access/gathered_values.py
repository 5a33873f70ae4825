"""The blocks of a script in which parameters are gathered, and the values that these have there: gathered_block.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

import torch

from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.tickets import Failures
from offloadzero.observe.clock import StepClock
from offloadzero.ranks.group import Group
from offloadzero.streaming.access.agreed_reads import Announcements
from offloadzero.streaming.access.collective_acts import Block, BlockAct
from offloadzero.streaming.access.unit_reads import UnitReads
from offloadzero.streaming.access.weights import WeightAccess, bits
from offloadzero.streaming.coded_gather import CodedGather
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


class ScriptBlocks:
    """Makes parameters ordinary ones and back; all ranks enter and leave: [Note: gathered over several ranks]."""

    def __init__(
        self,
        weights: WeightAccess,
        reads: UnitReads,
        *,
        group: Group,
        coded: CodedGather,
        records: Sequence[Record],
        announcements: Announcements,
        clock: StepClock,
        failures: Failures,
    ) -> None:
        """Make the first block possible. The ranks tell each other their acts by `announcements`."""
        self.weights = weights
        self._group = group
        self._coded = coded
        self._records = records
        self._announcements = announcements
        self._clock = clock
        self._failures = failures
        self.open: list[Block] = []  # in which the script is, the innermost last
        self._reads = reads
        # Of gathered parameters: the history when the script's memory and the home were last the same.
        self._shown: dict[tuple[int, int], tuple[int, int]] = {}

    def gather(self, record: Record, slot: ParamSlot, memory: torch.Tensor) -> None:
        """Make a parameter an ordinary one with its exact values in `memory`, on the device, until `scatter`."""
        with ExitStack() as together:
            if not self._group.is_alone:  # the others wait for this rank until the block ends
                name = f"GatheredParameters of {slot.name} over the ranks"
                together.enter_context(self._failures.whole(name))
            is_coded = self._coded.is_coded(record, slot)
            memory.copy_(self.weights.value(record, slot, to_write=is_coded))
            self._reads.gather(record.index, slot.index, memory)

    def scatter(self, record: Record, slot: ParamSlot) -> torch.Tensor:
        """Undo `gather`; return the value that the parameter holds now."""
        return self._reads.scatter(record.index, slot.index)

    def value(self, record: Record, slot: ParamSlot) -> torch.Tensor | None:
        """Return the memory of a gathered parameter; None of another one."""
        return self._reads.gathered_in(record.index).get(slot.index)

    def note_shown(self, record: Record, slot: ParamSlot) -> None:
        """Note that a gathered parameter has the value of its home now."""
        self._shown[record.index, slot.index] = self._history(record, slot)

    def is_stale(self, record: Record, slot: ParamSlot) -> bool:
        """Whether the home of a gathered parameter has been written since, by a step say."""
        return self._shown[record.index, slot.index] != self._history(record, slot)

    def _history(self, record: Record, slot: ParamSlot) -> tuple[int, int]:
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
        elif not self._reads.is_computing:
            for block in reversed(self.open):
                block.commit()

    # --- what several ranks do together ---

    def is_modifier(self, modifier_rank: int) -> bool:
        """Whether this rank is the one that may write. Raises ConfigError where there is no such rank."""
        spec = self._group.spec
        if self._group.is_alone:
            return True
        if not 0 <= modifier_rank < spec.world_size:
            allowed = f"None, or 0 to {spec.world_size - 1}: a rank among those that share the data"
            raise ConfigError("modifier_rank", modifier_rank, allowed)
        return modifier_rank == spec.rank

    def meet(self, act: BlockAct, block: Block) -> None:
        """Raise StateError on all ranks unless all do the same; where they enter, with the same parameters."""
        if self._group.is_alone:
            return
        num, modifier = len(block.places), act.number_of(block.modifier_rank)
        first = block.places[0].slot.name
        label = f"GatheredParameters of {first}{f' and {num - 1} others' if num > 1 else ''}"
        with self._clock.waiting("state access"), self._failures.handed_over():
            self._announcements.announce_block(act, num, modifier, label=label)
            if act is BlockAct.ENTERS:
                self._expect_same_places(block, label)

    def _expect_same_places(self, block: Block, label: str) -> None:
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
        channel, by_rank = self._group.states, None
        if not self._group.is_alone:
            with self._clock.waiting("state access"), self._failures.handed_over():
                by_rank = channel.by_rank_unless_same([*map(int, flags)], "GatheredParameters")
        if by_rank is None:
            return [[*channel.members] if flag else [] for flag in flags]
        columns = zip(*by_rank, strict=True)
        return [[rank for rank, it in zip(channel.members, each, strict=True) if it] for each in columns]

    def on_ranks(self, ranks: Sequence[int]) -> str:
        """Name these ranks in a message, where there are several."""
        return "" if self._group.is_alone else f" (ranks {[*ranks]})"

    def value_by(
        self, modifier_rank: int, record: Record, slot: ParamSlot, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the value that the parameter has on the rank that may write; another rank's is in host memory."""
        if self._group.is_alone:
            return value
        told = torch.empty(slot.num_elements, dtype=record.dtype, device="cpu")
        if self.is_modifier(modifier_rank):
            told.copy_(value.detach().to("cpu").reshape(-1))
        with self._clock.waiting("state access"), self._failures.handed_over():
            self._group.states.broadcast(told, f"{slot.name}: GatheredParameters", source=modifier_rank)
        return told.view(slot.shape)
