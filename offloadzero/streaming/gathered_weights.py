"""Weights and states of which each rank keeps a part, as scripts read, write and gather them."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.checksums import crc32c_blocks
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.tickets import Failures
from offloadzero.observe.clock import StepClock
from offloadzero.segments import SegmentKind
from offloadzero.sharding.parts import gather_parts
from offloadzero.sharding.ranks import Ranks
from offloadzero.streaming.announcements import Announcements
from offloadzero.streaming.block_acts import Block, BlockAct
from offloadzero.streaming.coded_gather import CodedGather
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.home_access import HomeAccess
from offloadzero.streaming.script_blocks import ScriptBlocks
from offloadzero.streaming.unit_changes import UnitChanges
from offloadzero.streaming.unit_reads import UnitReads
from offloadzero.streaming.weights import WeightAccess
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept import kept_parts, kept_place
from offloadzero.update.records import Record


class GatheredHomeAccess(HomeAccess):
    """Reads the parts of all ranks, which read the same ones in the same order: [Note: ranks say what they read]."""

    def __init__(
        self,
        store: TieredStore,
        changes: UnitChanges,
        *,
        clock: StepClock,
        ranks: Ranks,
        announcements: Announcements,
    ) -> None:
        super().__init__(store, changes, clock=clock)
        self._ranks = ranks
        self._announcements = announcements

    def write(self, record: Record, slot: ParamSlot, parts: Mapping[SegmentKind, torch.Tensor]) -> None:
        """Write this rank's part of `parts`. A rank that writes other values is found at the next fetch or step."""
        for kind, values in parts.items():
            data = values.detach().contiguous().view(torch.uint8)
            name = f"{record.index} {slot.index} {kind.value}".encode()
            self._ranks.writes.note(zlib.crc32(crc32c_blocks(data).tobytes(), zlib.crc32(name)))
        super().write(record, slot, parts)

    def write_step(self, record: Record, slot: ParamSlot, step: int) -> None:
        """Set the number of updates. A rank that sets another is found at the next fetch or step."""
        self._ranks.writes.note(zlib.crc32(f"{record.index} {slot.index} step {step}".encode()))
        super().write_step(record, slot, step)

    def _read_home(self, record: Record, slot: ParamSlot, segment: Segment, target: torch.Tensor) -> None:
        if record.shard.world_size == 1 or segment is record.whole_param:
            super()._read_home(record, slot, segment, target)
            return
        # The others wait for this rank until the block ends.
        with self._store.failures.whole(f"the read of {slot.name} over the ranks"):
            self._announcements.announce_read(record, slot, segment.kind)
            parts = kept_parts(record, slot, segment.kind, target)
            if record.shard.rank in parts:
                start = kept_place(record, slot, segment.kind).start
                self._store.read(segment, parts[record.shard.rank], start=start).wait()
            gather_parts(self._ranks.states, target, parts, f"{slot.name}.{segment.kind.value}")


class GatheredWeights(WeightAccess):
    """Weights that may come to a forward as codes, of which a script must neither write nor edit what they mean."""

    def __init__(self, *parts: Any, executor: Executor, coded: CodedGather) -> None:
        super().__init__(*parts)
        self._executor = executor
        self._coded = coded

    def value(self, record: Record, slot: ParamSlot, *, to_write: bool = False) -> torch.Tensor:
        """Return the parameter on the device; one that a script is to edit is exact, and not what its codes mean."""
        if not to_write or not self._coded.is_coded(record, slot):
            return super().value(record, slot, to_write=to_write)
        if slot.trainable:
            self._changes.expect_step_taken(record.index)
        return self.read(record, slot).to(self.device)

    def commit_forward(self, record: Record, places: Iterable[int]) -> None:
        """Write parameters that a forward has changed in place; StateError where it had only their codes."""
        slots = [record.slots[place] for place in places]
        names = ", ".join(slot.name for slot in slots if self._coded.is_coded(record, slot))
        if names:
            self._executor.forget_written(record.index)
            raise StateError(
                f"{names}: written in place in a forward, whose weights came as int8 codes "
                "(zero_optimization.zero_quantized_weights, zero_quantized_nontrainable_weights): the rest of the "
                "parameter would lose its exact values. Write it outside of the forward"
            )
        super().commit_forward(record, [slot.index for slot in slots])


class SharedBlocks(ScriptBlocks):
    """Blocks that all ranks enter and leave together: [Note: gathered over several ranks]."""

    def __init__(
        self,
        weights: WeightAccess,
        reads: UnitReads,
        *,
        executor: Executor,
        coded: CodedGather,
        ranks: Ranks,
        records: Sequence[Record],
        announcements: Announcements,
        clock: StepClock,
        failures: Failures,
    ) -> None:
        super().__init__(weights, reads)
        self._executor = executor
        self._coded = coded
        self._ranks = ranks
        self._records = records
        self._announcements = announcements
        self._clock = clock
        self._failures = failures

    def gather(self, record: Record, slot: ParamSlot, memory: torch.Tensor) -> None:
        """Make a parameter an ordinary one with its exact values in `memory`."""
        # The others wait for this rank until the block ends.
        with self._failures.whole(f"GatheredParameters of {slot.name} over the ranks"):
            is_coded = self._coded.is_coded(record, slot)
            memory.copy_(self.weights.value(record, slot, to_write=is_coded))
            self._reads.gather(record.index, slot.index, memory)

    def commit(self, indices: Collection[int]) -> None:  # noqa: ARG002
        """Write what a script has written into gathered parameters, all of them, where the outermost forward begins."""
        if not self._executor.is_running:
            for block in reversed(self.open):
                block.commit()

    def is_modifier(self, modifier_rank: int) -> bool:
        """Whether this rank is the one that may write. Raises ConfigError where there is no such rank."""
        spec = self._ranks.spec
        if not 0 <= modifier_rank < spec.world_size:
            allowed = f"None, or 0 to {spec.world_size - 1}: a rank among those that share the data"
            raise ConfigError("modifier_rank", modifier_rank, allowed)
        return modifier_rank == spec.rank

    def meet(self, act: BlockAct, block: Block) -> None:
        """Raise StateError on all ranks unless all do the same; where they enter, with the same parameters."""
        num, modifier = len(block.places), act.number_of(block.modifier_rank)
        first = block.places[0].slot.name
        label = f"GatheredParameters of {first}{f' and {num - 1} others' if num > 1 else ''}"
        with self._clock.waiting("state access"), self._failures.handed_over():
            self._announcements.announce_block(act, num, modifier, label=label)
            if act is BlockAct.ENTERS:
                self._expect_same_places(block, label)

    def _expect_same_places(self, block: Block, label: str) -> None:
        """Raise StateError unless all ranks gather the same parameters, after the same writes."""
        channel = self._ranks.states
        own = [
            (record.index << 32) + 2 * slot.index + (self.value(record, slot) is not None)
            for record, slot in block.places
        ]
        by_rank = channel.by_rank_unless_same([self._ranks.writes.value, *own], label)
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
        channel = self._ranks.states
        with self._clock.waiting("state access"), self._failures.handed_over():
            by_rank = channel.by_rank_unless_same([*map(int, flags)], "GatheredParameters")
        if by_rank is None:
            return [[*channel.members] if flag else [] for flag in flags]
        columns = zip(*by_rank, strict=True)
        return [[rank for rank, it in zip(channel.members, each, strict=True) if it] for each in columns]

    def on_ranks(self, ranks: Sequence[int]) -> str:
        """Name these ranks in a message."""
        return f" (ranks {[*ranks]})"

    def value_by(
        self, modifier_rank: int, record: Record, slot: ParamSlot, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the value that the parameter has on the rank that may write, in host memory."""
        told = torch.empty(slot.num_elements, dtype=record.dtype, device="cpu")
        if self.is_modifier(modifier_rank):
            told.copy_(value.detach().to("cpu").reshape(-1))
        with self._clock.waiting("state access"), self._failures.handed_over():
            self._ranks.states.broadcast(told, f"{slot.name}: GatheredParameters", source=modifier_rank)
        return told.view(slot.shape)
