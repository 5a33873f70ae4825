"""Reads and writes of `param.grad` over several ranks, where each has a part of the gradient.

[Note: param.grad over several ranks]
When backward has ended a gradient is the mean over the ranks, and each rank keeps its part. A read gathers the parts,
so all ranks read the same gradients in the same order, as they read the same weights ([Note: ranks say what they read]
in streaming/announcements.py). The norms of all gradients are gathered at once when the first one is asked for: so
`clip_grad_norm_` is one collective. An edit sends nothing. Each rank keeps its part of the value, or the factor, and
notes what it did: a rank that has edited otherwise is found at the next fetch or step.

Before that, in a hook say, a gradient is one rank's own, and belongs to no step: to read it there is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offloadzero.errors import StateError
from offloadzero.memory.checksums import crc32c_blocks
from offloadzero.memory.store import Segment
from offloadzero.memory.tickets import Ticket
from offloadzero.segments import SegmentKind
from offloadzero.sharding.parts import gather_parts
from offloadzero.sharding.ranks import Ranks
from offloadzero.step.param_grad import GradientAccess, ParamGradient
from offloadzero.step.record_gradient import RecordGradient
from offloadzero.streaming.announcements import Announcements
from offloadzero.torch_private import current_graph_task_id
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept import kept_parts, kept_place


class ReducedAccess(GradientAccess):
    """Reads and writes gradients of which each rank has a part: [Note: param.grad over several ranks]."""

    def __init__(self, *args: Any, ranks: Ranks, announcements: Announcements, **more: Any) -> None:
        """Make the access. The ranks tell each other by `announcements` what they read."""
        super().__init__(*args, **more)
        self._ranks = ranks
        self._announcements = announcements
        # The squared norms of what the homes hold on all ranks together, by record and slot; and the gradients then.
        self._sq_norms: dict[int, Sequence[float]] = {}
        self._measured: list[tuple[RecordGradient, Ticket]] = []

    def _expect_reachable(self, state: RecordGradient, slot: ParamSlot, source: ParamGradient) -> None:
        why = ""
        if self._ranks.across is not None:
            why = "in a mesh gradients are reduced unit by unit, and no rank has one to read or to edit"
        elif (
            current_graph_task_id() >= 0  # it may be reduced on this rank, and on another not yet
            or slot.index in state.arrived
            or source.contribution is not None
        ):
            why = "over several ranks a gradient is the mean of all ranks when backward has ended, not before"
        if why:
            raise StateError(
                f"{source.name}: {why}: engine.get_global_grad_norm() gives the norm of a step, gradient_clipping clips"
            )

    def store(self, state: RecordGradient, slot: ParamSlot, value: Tensor) -> None:
        """Make this rank's part of `value` its part of the gradient."""
        super().store(state, slot, value)
        self._measured = []
        data = value.detach().to("cpu", state.record.grad_dtype).contiguous().view(-1).view(torch.uint8)
        self._note_edit(state, slot, f"stored {zlib.crc32(crc32c_blocks(data).tobytes())}")

    def _read_home(self, state: RecordGradient, slot: ParamSlot, home: Segment) -> Tensor:
        record = state.record
        if record.shard.world_size == 1:
            return super()._read_home(state, slot, home)
        # The others wait for this rank until the block ends.
        with self._store.failures.whole(f"the read of {slot.name}.grad over the ranks"):
            self._announcements.announce_gradient(record, slot)
            flat = torch.empty(slot.num_elements, dtype=home.dtype, device="cpu")
            parts = kept_parts(record, slot, SegmentKind.GRAD, flat)
            with self._clock.waiting("gradient access"), self._store.failures.handed_over():
                if record.shard.rank in parts:
                    own, start = parts[record.shard.rank], kept_place(record, slot, SegmentKind.GRAD).start
                    if home.is_in_memory:
                        own.copy_(home.memory[start : start + own.numel()])
                    else:
                        self._store.read(home, own, start=start).wait()
                gather_parts(self._ranks.states, flat, parts, f"{slot.name}.grad")
        return flat

    def _sq_norm_at_home(self, state: RecordGradient, slot: ParamSlot) -> float:
        if state.record.shard.world_size == 1:
            return super()._sq_norm_at_home(state, slot)
        present = self._gradients.present()
        measured = [(gradient, gradient.landed) for gradient in present]
        if len(measured) != len(self._measured) or any(
            one is not other or landed is not before
            for (one, landed), (other, before) in zip(measured, self._measured, strict=True)
        ):
            self._gather_sq_norms(present)
            self._measured = measured
        return self._sq_norms[state.record.index][slot.index]

    def _gather_sq_norms(self, present: Sequence[RecordGradient]) -> None:
        with self._store.failures.whole("the norms of gradients over the ranks"):
            for gradient in present:
                self._wait_landed(gradient)
            self._announcements.announce_gradient_norms(len(present))
            norms = [norm for gradient in present for norm in gradient.sq_norms]
            own = torch.tensor(norms, dtype=torch.float64, device="cpu")
            with self._clock.waiting("gradient access"), self._store.failures.handed_over():
                self._ranks.states.all_reduce(own, "the norms of gradients")
        totals = iter(own.tolist())
        self._sq_norms = {
            gradient.record.index: [next(totals) for _ in gradient.sq_norms] for gradient in present
        }

    def _note_edit(self, state: RecordGradient, slot: ParamSlot, what: str) -> None:
        self._ranks.writes.note(zlib.crc32(f"{state.record.index} {slot.index} grad {what}".encode()))
