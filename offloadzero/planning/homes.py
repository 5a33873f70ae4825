"""Homes and sizes: of segments by the configuration's rules, of buffers, of checkpointed units' inputs, of a rank.

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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from offloadzero.arithmetic.device_math import norm_scratch_bytes
from offloadzero.config import OffloadConfig, PlacementRule
from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import ConfigError
from offloadzero.memory.arena import ALIGN_BYTES, align_up, room_for, staggered
from offloadzero.observe.texts import format_bytes
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import UpdateForm
from offloadzero.update.staging import device_bytes

# The home of each segment, by the index of its record. Records with trainable parameters have one for the gradient.
Placement = Mapping[tuple[int, SegmentKind], TierName]
_NUM_SHOWN = 8  # names of units in a message


def place(records: Sequence[Record], config: OffloadConfig) -> dict[tuple[int, SegmentKind], TierName]:
    """Return the home of every segment, gradients included (a gradient stays where its update runs).

    The scales of the compact layout live with the first state unless a rule names them.
    """
    if config.placement.auto:
        raise AssertionError('"auto" has no rules: choose_placement finds the homes')
    _expect_states(records, config.placement.rules)
    placement: dict[tuple[int, SegmentKind], TierName] = {}
    for record in records:
        homes = dict.fromkeys(record.layout, TierName.DEVICE)
        grad: TierName | None = None
        scales: TierName | None = None
        for rule in config.placement.rules:
            if _is_for(rule, record):
                homes.update({kind: tier for kind, tier in rule_homes(rule, record).items() if kind in homes})
                grad = rule.tiers.get(SegmentKind.GRAD, grad)
                scales = rule.tiers.get(SegmentKind.SCALES, scales)
        if SegmentKind.SCALES in homes:
            homes[SegmentKind.SCALES] = scales or homes[record.spec.states[0]]
        if record.resident:
            homes[SegmentKind.PARAM] = TierName.DEVICE
        placement.update({(record.index, kind): tier for kind, tier in homes.items()})
        if record.num_trainable:
            on_device = all(tier.is_device for tier in homes.values())
            default = TierName.DEVICE if on_device else TierName.HOST
            placement[record.index, SegmentKind.GRAD] = grad if grad and not on_device else default
    _move_share_to_device(records, config.placement.host_update_ratio, placement)
    return placement


def idle_rules(records: Sequence[Record], config: OffloadConfig) -> list[str]:
    """Say of each rule whose glob matches no unit that it places nothing: a misspelt one, as a rule.

    It is no error: one file may be for several models of a script, and for the parts of a pipeline.
    """
    names = list(dict.fromkeys(record.unit_name for record in records))
    shown = ", ".join(names[:_NUM_SHOWN]) + (", ..." if len(names) > _NUM_SHOWN else "")
    return [
        f"offloadzero.placement: a rule for the units {rule.units!r} places nothing: the model has no such unit, it "
        f"has {shown}"
        for rule in config.placement.rules
        if not any(_is_for(rule, record) for record in records)
    ]


def _is_for(rule: PlacementRule, record: Record) -> bool:
    """Whether a rule names the record's unit, or this one of the records that a unit has for its dtypes."""
    return any(fnmatchcase(name, rule.units) for name in (record.unit_name, record.name))


def rule_homes(rule: PlacementRule, record: Record) -> dict[SegmentKind, TierName]:
    """Return a rule's tier for each segment of a record: "states" first, then the segments that it names."""
    states = rule.tiers.get(SegmentKind.STATES)
    homes = {} if states is None else dict.fromkeys((SegmentKind.MASTER, *record.spec.states), states)
    return {**homes, **rule.tiers}


def _expect_states(records: Sequence[Record], rules: Iterable[PlacementRule]) -> None:
    """Raise ConfigError for a state that the optimizer of no record has which the rule is for."""
    for rule in rules:
        specs = {r.spec.name: r.spec for r in records if r.num_trainable and _is_for(rule, r)}
        known = {SegmentKind.STATES, *(kind for spec in specs.values() for kind in spec.kinds)}
        for kind, tier in rule.tiers.items():
            if specs and kind not in known:
                allowed = "; ".join(
                    f"states of {spec.name}: {', '.join(spec.states)}" for spec in specs.values()
                )
                raise ConfigError(f"offloadzero.placement.{kind}", tier.value, allowed)


def _move_share_to_device(
    records: Sequence[Record], host_ratio: float, placement: dict[tuple[int, SegmentKind], TierName]
) -> None:
    """Move the last records' updates to the device, as Twin-Flow (ZeRO-Offload++) does.

    Their updates are the first that backward makes possible. A record is moved while the share stays within
    1 - `host_ratio` of all trainable elements.
    """
    if host_ratio >= 1.0:
        return
    total = sum(record.num_trainable for record in records)
    allowed = (1.0 - host_ratio) * total
    for record in reversed(records):
        if record.num_trainable and record.num_trainable <= allowed:
            allowed -= record.num_trainable
            for kind in (*record.layout, SegmentKind.GRAD):
                placement[record.index, kind] = TierName.DEVICE


def largest_of(sizes: Iterable[int]) -> int:
    """The bytes of a buffer for one at a time of these; 0 where there are none."""
    return align_up(max(sizes, default=0))


def grad_home_bytes(record: Record) -> int:
    """The bytes of a gradient at home or in passing, in the dtype in which it is added up."""
    return record.kept_trainable * record.grad_dtype.itemsize


def unit_lease_bytes(
    streamed: Sequence[Record],
    config: OffloadConfig,
    together: Sequence[Collection[int]],
    *,
    taken: int,
    recomputes: bool,
) -> int:
    """The bytes for unit leases: the rest of the device budget, else the largest need and the units prefetched.

    `recomputes`: backward runs forwards of sites while an operation that waits for them holds a weight. Within a
    device budget that is too small for both it holds a copy: [Note: weights that find no room] in
    streaming/saved_weights.py.
    """
    if not streamed:
        return 0
    sizes = {record.index: align_up(record.param_bytes) for record in streamed}
    total = sum(sizes.values())
    groups = ([sizes[index] for index in group if index in sizes] for group in together)
    largest = max(sizes.values())
    at_least = max(largest, *map(room_for, groups), 0)
    if recomputes and config.budgets.device is None:
        at_least = max(at_least, min(room_for((largest, largest)), total))
    if config.budgets.device is not None:
        wanted = (config.budgets.device - taken) // ALIGN_BYTES * ALIGN_BYTES
    elif config.max_live_parameters is not None:
        wanted = align_up(config.max_live_parameters * streamed[0].dtype.itemsize)
    else:
        wanted = at_least + largest * config.units.prefetch_units
    return max(at_least, min(total, wanted))


def update_scratch_bytes(records: Sequence[Record], placement: Placement, form: UpdateForm) -> int:
    """The scratch of the updates on the device, which run one after another."""
    sizes = []
    for record in records:
        if not record.num_trainable:
            continue
        is_there = _updates_on_device(record, placement)
        if record.spec.takes_whole:
            # Ranks have different parameters of a record, and plan the same.
            sizes += [_whole_step_bytes(record, slot, is_there=is_there) for slot in record.trainable_slots]
        elif is_there:
            sizes.append(record.spec.scratch_bytes(form, record.kept_trainable, compact=record.compact))
    return largest_of(sizes)


def _whole_step_bytes(record: Record, slot: ParamSlot, *, is_there: bool) -> int:
    """The scratch of a step of one whole parameter, and its place on the device where it does not live there."""
    step = record.spec.step_scratch_bytes(slot.shape)
    return step if is_there else step + device_bytes(record, record.padded(slot.num_elements))


def norms_scratch_bytes(records: Sequence[Record], placement: Placement, form: UpdateForm) -> int:
    """The scratch of the norms of gradients on the device, which are taken one after another."""
    if form is UpdateForm.NATIVE:  # the kernel that takes norms in host memory widens as it reads
        return 0
    on_device = [r for r in records if r.num_trainable and placement[r.index, SegmentKind.GRAD].is_device]
    return largest_of(norm_scratch_bytes(r.kept_parts) for r in on_device)


def _updates_on_device(record: Record, placement: Placement) -> bool:
    kinds = (*record.layout, SegmentKind.GRAD)
    return all(placement[record.index, kind].is_device for kind in kinds)


def update_slot_bytes(records: Sequence[Record], config: OffloadConfig, placement: Placement) -> int:
    """The bytes of one update slot: the staged segments of one chunk, of the record with the most."""
    largest = 0
    for record in records:
        if not record.num_trainable or _updates_on_device(record, placement):
            continue
        layout = record.layout
        tiers = {kind: placement[record.index, kind] for kind in layout}
        grad_tier = placement[record.index, SegmentKind.GRAD]
        staged = {kind: dtype for kind, (dtype, _) in layout.items() if not tiers[kind].is_host_memory}
        if not grad_tier.is_host_memory:
            staged[SegmentKind.GRAD] = record.grad_dtype
        needed = 0
        for kind, dtype in staged.items():  # the first chunk is the largest
            part = record.chunk_slice(kind, 0, record.most_chunk_elements(config.update.chunk_elements))
            needed += staggered((part.stop - part.start) * dtype.itemsize)
        largest = max(largest, needed)
    return largest


MIN_BYTES = 4096  # smaller inputs stay on the device: a copy costs more than their memory
NUM_INPUT_STAGING = 2  # buffers in each direction between device and file
INPUT_BYTES_KEY = "offloadzero.activation_checkpoints.input_bytes"
# Calls whose inputs are fetched ahead, by their tier.
INPUTS_AHEAD = {TierName.DEVICE: 1, TierName.HOST: 1, TierName.NVME: 2}


def may_leave(tensor: torch.Tensor, *, min_bytes: int = MIN_BYTES) -> bool:
    """Whether an input moves; parameters, masks, indices, small and strided inputs do not."""
    return (
        tensor.is_floating_point()
        and tensor.nbytes >= min_bytes
        and not (tensor.is_leaf and tensor.requires_grad)
        and _is_dense(tensor)
    )


def input_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two inputs of a graph share if they are the same tensor, as long as both of them live."""
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, in any order: empty_like then keeps the strides."""
    return (
        tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


@dataclass(frozen=True)
class InputPlan:
    """The bytes for the inputs of checkpointed units until backward, by tier; `input_bytes` are those of one call."""

    tier: TierName
    input_bytes: int
    kept_bytes: int  # those of one call that this rank keeps; fewer where ranks divide inputs
    device: int  # the memory for inputs that come back
    host: int
    nvme: int

    def tier_bytes(self, tier: TierName) -> int:
        return {TierName.DEVICE: self.device, TierName.HOST: self.host, TierName.NVME: self.nvme}[tier]


def input_plan(config: OffloadConfig, num_checkpointed: int) -> InputPlan | None:
    """Plan the inputs of so many units; None: none leave the device, or their size is not given."""
    checkpointing = config.activation_checkpoints
    if checkpointing is None or checkpointing.input_bytes is None or not num_checkpointed:
        return None
    tier, each = checkpointing.tier, align_up(checkpointing.input_bytes)
    kept = align_up(-(-each // config.num_input_parts))
    is_on_host = tier.is_host_memory
    return InputPlan(
        tier=tier,
        input_bytes=each,
        kept_bytes=kept,
        device=(1 + INPUTS_AHEAD[tier]) * each,
        host=num_checkpointed * kept if is_on_host else 2 * NUM_INPUT_STAGING * kept,
        nvme=0 if is_on_host else num_checkpointed * kept,
    )


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
