"""The formulas of ZeRO and ZeRO-Infinity, and what a rank keeps beside them.

[Note: the formulas of ZeRO]
Mixed-precision Adam keeps 2 bytes of parameter, 2 of gradient and K of states for each of Ψ parameters (Rajbhandari et
al. 2020, section 3). Over N ranks a rank keeps (2 + 2 + K) Ψ at stage 0, (2 + 2 + K/N) Ψ at stage 1, (2 + (2 + K)/N) Ψ
at stage 2 and (2 + 2 + K)/N Ψ at stage 3. K is 12 in the paper: an fp32 copy of the parameter and two moments. Here the
fp32 layout keeps 16 bits beside a bf16 parameter in the place of the copy, so K is 10. It is 3 1/16 in the compact
layout, the paper's 12 for fp16 parameters, and 8 for fp32 ones, which take 4 + 4 themselves.

Three things differ. Stage 1 keeps a shard of the gradients, as stage 2 does. At stage 3 the small rest (norms, biases)
stays whole on each device. And there is padding: each parameter begins at a multiple of 64 bytes, or of a block of the
compact layout, and the shards of a unit are whole blocks of a file, up to 2,048 elements more for each rank (4,096 in
the compact layout, whose scales are whole blocks, too). Those of the small rest are only in their files.

[Note: efficiency by bandwidth]
ZeRO-Infinity (arXiv 2104.07857) asks how fast memory must be that is not the device's. Its arithmetic intensity is the
operations of a step for each byte that moves to or from that memory. While bytes move, nothing is computed, so
the efficiency is the share of the time in which the device computes. It is 1/2 where moving takes as long as computing,
which a schedule that overlaps both can hide completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError
from offloadzero.memory.arena import align_up
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.placement_rules import Placement
from offloadzero.update.records import Record

STAGES = (0, 1, 2, 3)
PARAM_BYTES = 2
GRAD_BYTES = 2
STATE_BYTES = 12  # fp32 master weight, two fp32 moments


def state_bytes(num_trained: float, *, stage: int, num_ranks: int, num_frozen: float = 0) -> float:
    """Return the bytes of parameters, gradients and optimizer states that one rank holds by ZeRO's formulas.

    `num_trained` parameters have all three, `num_frozen` ones are parameters alone. Raises ConfigError for a stage that
    does not exist.
    """
    if stage not in STAGES:
        raise ConfigError("zero_optimization.stage", stage, "0, 1, 2 or 3")
    divided = {0: 0, 1: STATE_BYTES, 2: STATE_BYTES + GRAD_BYTES, 3: STATE_BYTES + GRAD_BYTES + PARAM_BYTES}
    whole = PARAM_BYTES + GRAD_BYTES + STATE_BYTES - divided[stage]
    of_frozen = PARAM_BYTES * num_frozen / (num_ranks if stage == 3 else 1)
    return num_trained * (whole + divided[stage] / num_ranks) + of_frozen


def efficiency_unoverlapped(flops_per_byte: float, *, bytes_per_s: float, flops_per_s: float) -> float:
    """Return the share of the time in which a device of `flops_per_s` computes if nothing overlaps."""
    fed = flops_per_byte * bytes_per_s
    return fed / (fed + flops_per_s)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of homes; the first three by the formulas, of which a rank's part need be no whole number.

    [Note: the formulas of ZeRO]
    """

    params: float
    grads: float
    states: float
    whole: float  # of parameters, more than the formula has: they are not divided
    total: int  # of all homes

    @property
    def formula(self) -> float:
        return self.params + self.grads + self.states

    @property
    def padding(self) -> float:
        """The rest: borders of parameters, and file blocks."""
        return self.total - self.formula - self.whole

    def text(self) -> str:
        parts = {"parameters": self.params, "gradients": self.grads, "states": self.states}
        by_formula = " + ".join(f"{name} {format_bytes(round(size))}" for name, size in parts.items())
        beyond = {"parameters that are not divided": self.whole, "padding": self.padding}
        more = [f"{format_bytes(round(size))} {name}" for name, size in beyond.items() if round(size)]
        return f"homes {format_bytes(self.total)}: {'; '.join([f'ZeRO {by_formula}', *more])}"


def rank_bytes(
    records: Sequence[Record], placement: Placement, *, grads_have_homes: bool, gathers_params: bool
) -> RankBytes:
    """Add up the homes of this rank. `gathers_params`: the stage is 3."""
    params = grads = states = whole = 0.0
    total = 0
    for record in records:
        num_params = sum(slot.num_elements for slot in record.slots)
        num_trainable = sum(slot.num_elements for slot in record.trainable_slots)
        num_ranks = record.shard.world_size
        all_params = num_params * record.dtype.itemsize
        params += all_params / num_ranks if gathers_params else all_params
        if gathers_params and not record.is_gathered:
            whole += all_params - all_params / num_ranks
        states += num_trainable * _state_bytes(record) / num_ranks
        homes = dict(record.layout)
        if num_trainable and (grads_have_homes or placement[record.index, SegmentKind.GRAD].is_device):
            grads += num_trainable * record.grad_dtype.itemsize / num_ranks
            homes[SegmentKind.GRAD] = (record.grad_dtype, record.kept_trainable)
        for kind, (dtype, count) in homes.items():
            num_bytes = count * dtype.itemsize
            on_file = placement[record.index, kind].is_file
            total += align_up(num_bytes) if on_file else num_bytes
    return RankBytes(params, grads, states, whole, total)


def _state_bytes(record: Record) -> float:
    """K, the bytes of states of one element of a record."""
    of_params = (SegmentKind.PARAM, SegmentKind.SCALES)
    whole = sum(dtype.itemsize for kind, (dtype, _) in record.layout.items() if kind not in of_params)
    scales = num_scales(COMPACT_BLOCK) * torch.float32.itemsize / COMPACT_BLOCK if record.compact else 0.0
    return whole + scales
