"""The blocks of a script in which parameters are gathered, and the values that these have there: gathered_block.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from offloadzero.streaming.block_acts import Block, BlockAct
from offloadzero.streaming.unit_reads import UnitReads
from offloadzero.streaming.weights import WeightAccess, bits
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


class ScriptBlocks:
    """Makes parameters ordinary ones and back; with one process the acts of all ranks together are its own."""

    def __init__(self, weights: WeightAccess, reads: UnitReads) -> None:
        self.weights = weights
        self.open: list[Block] = []  # in which the script is, the innermost last
        self._reads = reads
        # Of gathered parameters: the history when the script's memory and the home were last the same.
        self._shown: dict[tuple[int, int], tuple[int, int]] = {}

    def gather(self, record: Record, slot: ParamSlot, memory: torch.Tensor) -> None:
        """Make a parameter an ordinary one in `memory`, on the device and in its shape, until `scatter`."""
        memory.copy_(self.weights.value(record, slot))
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
        return self.weights.num_updates(record) if slot.trainable else 0, slot.num_writes

    def differs(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> bool:
        """Whether the parameter's bits, dtype or shape differ from those of `value`."""
        home = self.weights.read(record, slot)
        if (value.shape, value.dtype) != (home.shape, home.dtype):
            return True
        return not torch.equal(bits(value.detach().to("cpu").reshape(-1)), bits(home.reshape(-1)))

    def commit(self, indices: Collection[int]) -> None:
        """Write what a script has written into gathered parameters, before a forward that needs these records."""
        for block in reversed(self.open):
            block.commit(indices)

    # --- what several ranks do together ---

    def is_modifier(self, modifier_rank: int) -> bool:  # noqa: ARG002
        """Whether this rank is the one that may write."""
        return True

    def meet(self, act: BlockAct, block: Block) -> None:
        """Raise StateError unless all ranks do the same."""

    def ranks_where(self, flags: Sequence[bool]) -> list[list[int]]:
        """The ranks on which each of `flags` holds. All ranks call this."""
        return [[0] if flag else [] for flag in flags]

    def on_ranks(self, ranks: Sequence[int]) -> str:  # noqa: ARG002
        """Name these ranks in a message, where there are several."""
        return ""

    def value_by(
        self,
        modifier_rank: int,  # noqa: ARG002
        record: Record,  # noqa: ARG002
        slot: ParamSlot,  # noqa: ARG002
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return the value that the parameter has on the rank that may write."""
        return value
