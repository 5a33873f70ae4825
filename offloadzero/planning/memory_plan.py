"""The home of each segment and the bytes of each tier, decided before the first step.

[Note: gradients in passing]
Without clipping a gradient passes through a host buffer on its way to its update, and backward waits for one where
updates are slower. More than two buffers would end backward earlier, but no step: updates run one after the other in
the order of backward, and the next forward begins with the unit that is updated last. One gradient lands while another
is read by its update: that takes two.

[Note: moves that cannot be enough]
Each move frees bytes of its own, and the buffers that it makes necessary only grow with further moves. So the size
after more moves is at least the one that is known, less what they free: as long as that is too much they need not be
planned. A plan takes time in proportion to the units of a model, and one for each unit would take its square.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypedDict

from offloadzero.config import OffloadConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import BudgetError
from offloadzero.memory.arena import ALIGN_BYTES, align_up, staggered
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.buffer_bytes import (
    grad_home_bytes,
    largest_of,
    norms_scratch_bytes,
    unit_lease_bytes,
    update_scratch_bytes,
    update_slot_bytes,
)
from offloadzero.planning.checkpointed_inputs import INPUT_BYTES_KEY, InputPlan, input_plan
from offloadzero.planning.placement_rules import Placement, place
from offloadzero.planning.update_rules import (
    Versions,
    keeps_gradients,
    second_places,
    updates_in_backward,
    versioned_records,
)
from offloadzero.ranks.shard import divides_params, kept_elements
from offloadzero.update.kept_elements import param_parts
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES, UpdateForm
from offloadzero.update.wire_codes import (
    gradient_code_bytes,
    gradient_piece_bytes,
    near_copy_bytes,
    weight_code_bytes,
)

NUM_GRAD_LEASES = 2  # one being filled by backward, one on its way
NUM_PASSING_GRADS = 2  # [Note: gradients in passing]
NUM_GRAD_STAGING = 3  # one being copied to, one being added, one that backward takes without a wait
NUM_STAGING_LEASES = 2  # one being read from a file, one being copied to the device
_HOME = "home: "  # the lines of what has a home, by kind


@dataclass(frozen=True)
class PlanLine:
    """One row of the table of bytes."""

    tier: TierName
    what: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The homes, and the buffers between them. Sizes in bytes; a lease size of 0 means that none is needed."""

    placement: Placement
    lines: tuple[PlanLine, ...]
    update_in_backward: bool
    grads_have_homes: bool
    unit_lease_bytes: int  # the part of the device arena from which units are leased
    device_grad_bytes: int  # one gradient lease on the device, of those that units take turns in
    own_grad_bytes: Mapping[int, int]  # by record: the gradient lease that belongs to it alone
    device_form: UpdateForm  # of the updates on the device
    update_scratch_bytes: int  # of the updates on the device, which run one after another
    norm_scratch_bytes: int  # of the norms of gradients on the device, which are taken one after another
    host_grad_bytes: int  # one passing gradient lease on the host
    num_host_grads: int
    grad_staging_bytes: int  # one buffer for a gradient that is added to one at home
    num_grad_staging: int
    param_staging_bytes: int
    slot_bytes: int
    num_slots: int
    inputs: InputPlan | None  # None: no inputs wait off the device, or their size is not given
    weight_code_bytes: int = 0  # of weights that are gathered as codes, one unit after another
    gradient_code_bytes: int = 0  # the same for gradients that are reduced as codes
    gradient_piece_bytes: int = 0  # of one that is reduced in another dtype
    # By record: the part of its weights that this rank keeps for the ranks of its machine, and where.
    near_copies: Mapping[int, tuple[TierName, int]] = field(default_factory=dict)
    versioned: frozenset[int] = frozenset()  # the records whose updates are tried: [Note: versions]
    second_places: frozenset[tuple[int, SegmentKind]] = frozenset()  # the segments with two places, by record
    choice: tuple[str, ...] = ()  # sentences on how "auto" has chosen by time, and what would be slower

    def tier_bytes(self, tier: TierName) -> int:
        return sum(line.num_bytes for line in self.lines if line.tier is tier)

    @property
    def grads_on_files(self) -> bool:
        """Whether some gradients have their home on nvme."""
        return self.grads_have_homes and any(
            kind is SegmentKind.GRAD and tier.is_file for (_, kind), tier in self.placement.items()
        )

    def holds_homes(self, tier: TierName) -> bool:
        """Whether anything has its home in `tier`."""
        return any(line.tier is tier and line.what.startswith(_HOME) for line in self.lines)

    @property
    def home_bytes(self) -> int:
        """Everything that has a home, in all tiers: no buffer, no lease."""
        return sum(line.num_bytes for line in self.lines if line.what.startswith(_HOME))

    @property
    def kept_grad_bytes(self) -> int:
        """The bytes for keeping gradients. Those whose update runs on the device have their home there in any case."""
        kept = f"{_HOME}{SegmentKind.GRAD.value}"
        return sum(line.num_bytes for line in self.lines if line.what == kept and not line.tier.is_device)

    def table(self) -> str:
        rows = []
        for tier in TierName:
            total = self.tier_bytes(tier)
            if not total:
                continue
            rows.append(f"{tier.value:<8}{format_bytes(total):>12}")
            rows += [
                f"    {line.what:<28}{format_bytes(line.num_bytes):>12}"
                for line in self.lines
                if line.tier is tier and line.num_bytes
            ]
        return "\n".join(rows)


def waits_on_nvme(config: OffloadConfig) -> bool:
    """Whether parameters made under zero.Init wait on the drive until the engine takes them over.

    With "auto" their homes are known only when all of them exist: until then they must not fill the memory.
    """
    placement = config.placement
    of_params = [rule.tiers[SegmentKind.PARAM] for rule in placement.rules if SegmentKind.PARAM in rule.tiers]
    return (placement.auto and bool(config.nvme_paths)) or any(tier.is_file for tier in of_params)


def nvme_bytes_with_waiting(records: Iterable[Record], plan: MemoryPlan, config: OffloadConfig) -> int:
    """A rank's most bytes on the drive where parameters wait there: before any is taken over, or with the last unit.

    They wait in the dtype in which they were made, which may have more bytes than their home, each in a file of its
    own; of several ranks each has a part of them.
    """
    num_ranks = config.world_size if divides_params(config.zero_stage) else 1
    waiting = [
        sum(
            align_up(kept_elements(slot.num_elements, num_ranks) * slot.param.itemsize)
            for slot in record.slots
            if slot.source is None
        )
        for record in records
    ]
    return max(plan.tier_bytes(TierName.NVME) + max(waiting, default=0), sum(waiting))


class _Sheet:
    def __init__(self) -> None:
        self.lines: list[PlanLine] = []

    def add(self, tier: TierName, what: str, num_bytes: int) -> None:
        if num_bytes:
            self.lines.append(PlanLine(tier, what, num_bytes))

    def total(self, tier: TierName) -> int:
        return sum(line.num_bytes for line in self.lines if line.tier is tier)


class Needs(TypedDict, total=False):
    """What a plan needs to know beside records and configuration: arguments of `plan_memory`."""

    together: Sequence[Collection[int]]
    form: UpdateForm
    num_checkpointed: int


def plan_memory(
    records: Sequence[Record],
    config: OffloadConfig,
    *,
    together: Sequence[Collection[int]] = (),
    placement: Placement | None = None,
    form: UpdateForm = UpdateForm.NATIVE,
    num_checkpointed: int = 0,
    available: Mapping[TierName, int] = MappingProxyType({}),
) -> MemoryPlan:
    """Place every segment and size every buffer.

    Args:
        available: bytes by tier, where they are known: "versions": "auto" has second places only if these are enough.
        num_checkpointed: units whose inputs wait for backward.
        together: record indices that must be on the device at once, in the order of their use.
        placement: the home of every segment, unless it follows from the configuration's rules.
        form: the form of the updates on the device.

    Raises BudgetError, with the table, when a budget is too small.
    """

    homes = place(records, config) if placement is None else placement
    host_budget = config.budgets.host
    may_move = placement is None and bool(config.nvme_paths)

    def plan_with(versions: Versions) -> MemoryPlan:
        def plan_of(homes: Placement) -> MemoryPlan:
            return _plan(records, config, homes, together, form, num_checkpointed, versions)

        plan = plan_of(homes)
        if may_move and host_budget is not None and plan.tier_bytes(TierName.HOST) > host_budget:
            plan = _move_grads_to_nvme(records, plan, host_budget, plan_of)
        return plan

    plan = plan_with(Versions.STATES_ON_NVME)
    if config.versions is None and plan.versioned:
        plain = plan_with(Versions.NONE)
        choices = (plan, plan_with(Versions.ALL_ON_NVME))
        plan = next((plan for plan in choices if _has_room(plan, plain, config, available)), plain)
    _check_budgets(plan, config)
    return plan


FREE_HOST_TENTHS = 5  # of the memory that a machine has, to which second places may fill it


def _has_room(
    plan: MemoryPlan, plain: MemoryPlan, config: OffloadConfig, available: Mapping[TierName, int]
) -> bool:
    """Whether second places fit beside all else, which stays where it is in the `plain` plan.

    They are no need: a drive keeps room for as much again as is needed, a checkpoint or another training.
    """
    if any(plain.placement[key] is not tier for key, tier in plan.placement.items()):
        return False
    for tier in (TierName.HOST, TierName.NVME):
        needed, budget = plan.tier_bytes(tier), getattr(config.budgets, tier.value)
        if needed == plain.tier_bytes(tier):
            continue
        if budget is not None and needed > budget:
            return False
        if tier.is_host_memory and TierName.DEVICE not in available:  # the device's memory is the host's
            needed += plan.tier_bytes(TierName.DEVICE)
        free = available.get(tier)
        if free is not None and tier.is_host_memory:
            free = free * FREE_HOST_TENTHS // 10
        elif free is not None:
            free -= plain.tier_bytes(tier)
        if free is not None and needed > free:
            return False
    return True


def _move_grads_to_nvme(
    records: Sequence[Record],
    plan: MemoryPlan,
    host_budget: int,
    plan_of: Callable[[Placement], MemoryPlan],
) -> MemoryPlan:
    """Move gradients that are kept until the step to NVMe if need be: those needed last go first.

    Where that does not make it fit, return the smaller of two that do not: buffers for the file may take more than all
    of them free.
    """
    if not plan.grads_have_homes:
        return plan
    moved = [
        r
        for r in reversed(records)
        if r.num_trainable and plan.placement[r.index, SegmentKind.GRAD].is_host_memory
    ]
    plans = {0: plan}

    def host_bytes_after(number: int) -> int:
        if number not in plans:
            away = {(record.index, SegmentKind.GRAD): TierName.NVME for record in moved[:number]}
            plans[number] = plan_of({**plan.placement, **away})
        return plans[number].tier_bytes(TierName.HOST)

    freed = accumulate((staggered(grad_home_bytes(record)) for record in moved), initial=0)
    return plans[first_enough(host_bytes_after, list(freed), host_budget)]


def _plan(
    records: Sequence[Record],
    config: OffloadConfig,
    placement: Placement,
    together: Sequence[Collection[int]],
    form: UpdateForm,
    num_checkpointed: int,
    versions: Versions,
) -> MemoryPlan:
    sheet = _Sheet()
    _add_homes(sheet, records, placement, keeps_gradients(config))
    versioned = versioned_records(records, config, placement, versions)
    second = second_places(records, config, placement, versioned)
    for tier in (TierName.HOST, TierName.NVME):
        sheet.add(tier, "second places", _second_bytes(records, placement, tier, second))
    inputs = input_plan(config, num_checkpointed)
    on_device = _add_device_buffers(
        sheet,
        records,
        config,
        placement,
        together=together,
        form=form,
        fetched_inputs=0 if inputs is None else inputs.device,
        recomputes=num_checkpointed > 0,
    )
    on_host = _add_host_buffers(sheet, records, config, placement)
    _add_inputs_and_checksums(sheet, config, inputs)
    return MemoryPlan(
        placement=placement,
        lines=tuple(sheet.lines),
        update_in_backward=updates_in_backward(config),
        grads_have_homes=keeps_gradients(config),
        device_form=form,
        inputs=inputs,
        versioned=versioned,
        second_places=second,
        **on_device,
        **on_host,
    )


def _second_bytes(
    records: Sequence[Record], at: Placement, tier: TierName, second: Collection[object]
) -> int:
    return sum(
        _home_bytes(tier, num_elements * dtype.itemsize)
        for record in records
        for kind, (dtype, num_elements) in record.layout.items()
        if at[record.index, kind] is tier and (record.index, kind) in second
    )


def _home_bytes(tier: TierName, num_bytes: int) -> int:
    return staggered(num_bytes) if tier.is_host_memory else align_up(num_bytes)


def _streamed(records: Sequence[Record], placement: Placement) -> list[Record]:
    """The records whose parameters come to the device for each use."""
    return [r for r in records if r.is_gathered or not placement[r.index, SegmentKind.PARAM].is_device]


def _leaving(records: Sequence[Record], placement: Placement) -> list[Record]:
    """The records whose gradients are not made in their homes."""
    return [
        r
        for r in records
        if r.num_trainable and (r.is_reduced or not placement[r.index, SegmentKind.GRAD].is_device)
    ]


def _add_device_buffers(
    sheet: _Sheet,
    records: Sequence[Record],
    config: OffloadConfig,
    placement: Placement,
    *,
    together: Sequence[Collection[int]],
    form: UpdateForm,
    fetched_inputs: int,
    recomputes: bool,
) -> dict[str, Any]:
    """Size the buffers of the device, fields of a `MemoryPlan`; unit leases come last, and take what is left."""
    leaving = _leaving(records, placement)
    grad_bytes = {r.index: align_up(r.num_trainable * r.dtype.itemsize) for r in leaving}
    # A resident record may have parameters at both ends of the model: it would keep a lease for all of backward.
    own_grad_bytes = {r.index: grad_bytes[r.index] for r in leaving if r.resident}
    device_grad_bytes = largest_of(grad_bytes[r.index] for r in leaving if not r.resident)
    update_scratch = update_scratch_bytes(records, placement, form)
    norm_scratch = norms_scratch_bytes(records, placement, form)
    weight_codes = largest_of(weight_code_bytes(r, config.zero_plus_plus) for r in records)
    gradient_codes = largest_of(gradient_code_bytes(r, config.zero_plus_plus) for r in records)
    wire_dtype = DTYPES[config.communication_dtype]
    gradient_pieces = largest_of(gradient_piece_bytes(r, wire_dtype) for r in leaving)
    near_copies = _near_copies(records, config, placement)

    device = TierName.DEVICE
    grad_leases = NUM_GRAD_LEASES * device_grad_bytes + sum(own_grad_bytes.values())
    sheet.add(device, "gradient leases", grad_leases)
    sheet.add(device, "update scratch", update_scratch)
    sheet.add(device, "norm scratch", norm_scratch)
    sheet.add(device, "weight codes", weight_codes)
    sheet.add(device, "gradient codes", gradient_codes)
    sheet.add(device, "gradient pieces", gradient_pieces)
    for tier in (device, TierName.HOST):
        sizes = (align_up(num_bytes) for home, num_bytes in near_copies.values() if home is tier)
        sheet.add(tier, "copies for near ranks", sum(sizes))
    sheet.add(device, "activation fetches", fetched_inputs)
    unit_leases = unit_lease_bytes(
        _streamed(records, placement), config, together, taken=sheet.total(device), recomputes=recomputes
    )
    sheet.add(device, "unit leases", unit_leases)
    return {
        "unit_lease_bytes": unit_leases,
        "device_grad_bytes": device_grad_bytes,
        "own_grad_bytes": own_grad_bytes,
        "update_scratch_bytes": update_scratch,
        "norm_scratch_bytes": norm_scratch,
        "weight_code_bytes": weight_codes,
        "gradient_code_bytes": gradient_codes,
        "gradient_piece_bytes": gradient_pieces,
        "near_copies": near_copies,
    }


def _add_host_buffers(
    sheet: _Sheet, records: Sequence[Record], config: OffloadConfig, placement: Placement
) -> dict[str, Any]:
    """Size the buffers of the host, fields of a `MemoryPlan`, those for activation checkpoints apart."""
    leaving, grads_have_homes = _leaving(records, placement), keeps_gradients(config)
    from_files = [r for r in _streamed(records, placement) if placement[r.index, SegmentKind.PARAM].is_file]
    param_staging_bytes = largest_of(
        r.kept_param_bytes + (ALIGN_BYTES if param_parts(r) else 0) for r in from_files
    )
    passing = [r for r in leaving if not grads_have_homes or placement[r.index, SegmentKind.GRAD].is_file]
    host_grad_bytes = largest_of(grad_home_bytes(r) for r in passing)
    num_host_grads = NUM_PASSING_GRADS if host_grad_bytes else 0
    added = leaving if grads_have_homes else []
    grad_staging_bytes = largest_of(r.kept_trainable * r.dtype.itemsize for r in added)
    num_grad_staging = NUM_GRAD_STAGING if config.batch.gradient_accumulation_steps > 1 else 1
    slot_bytes = update_slot_bytes(records, config, placement)
    num_slots = max(2, config.update.num_chunks_in_flight) if slot_bytes else 0

    host = TierName.HOST
    sheet.add(host, "parameter staging", NUM_STAGING_LEASES * param_staging_bytes)
    sheet.add(host, "gradients in passing", num_host_grads * host_grad_bytes)
    sheet.add(host, "gradient staging", num_grad_staging * grad_staging_bytes)
    sheet.add(host, "update staging", num_slots * slot_bytes)
    return {
        "host_grad_bytes": host_grad_bytes,
        "num_host_grads": num_host_grads,
        "grad_staging_bytes": grad_staging_bytes,
        "num_grad_staging": num_grad_staging,
        "param_staging_bytes": param_staging_bytes,
        "slot_bytes": slot_bytes,
        "num_slots": num_slots,
    }


def _add_inputs_and_checksums(sheet: _Sheet, config: OffloadConfig, inputs: InputPlan | None) -> None:
    """Add what activation checkpoints take off the device, and the checksums of all files."""
    checksums = checksum_bytes(sheet.total(TierName.NVME))
    if inputs is not None:
        what = "checkpoints" if inputs.tier.is_host_memory else "staging"
        sheet.add(TierName.HOST, f"activation {what}", inputs.host)
        sheet.add(TierName.NVME, "activation checkpoints", inputs.nvme)
        checksums += checksum_bytes(inputs.nvme)  # a file of its own
    if config.aio.checksums:
        sheet.add(TierName.HOST, "checksums of nvme", checksums)


def _near_copies(
    records: Sequence[Record], config: OffloadConfig, placement: Placement
) -> dict[int, tuple[TierName, int]]:
    """Return by record where the part of its copy is that this rank keeps, and its bytes: [Note: hpZ copies]."""
    found = {}
    for record in records:
        num_bytes = near_copy_bytes(record, config.zero_plus_plus)
        is_on_device = placement[record.index, SegmentKind.PARAM].is_device
        if num_bytes:
            found[record.index] = (TierName.DEVICE if is_on_device else TierName.HOST, num_bytes)
    return found


def _add_homes(
    sheet: _Sheet, records: Sequence[Record], placement: Placement, grads_have_homes: bool
) -> None:
    totals: dict[tuple[TierName, SegmentKind], int] = {}

    def add(tier: TierName, kind: SegmentKind, num_bytes: int) -> None:
        totals[tier, kind] = totals.get((tier, kind), 0) + _home_bytes(tier, num_bytes)

    for record in records:
        layout = record.layout
        for kind, (dtype, num_elements) in layout.items():
            tier = placement[record.index, kind]
            parts = param_parts(record) if kind is SegmentKind.PARAM and tier.is_file else []
            swapped = (
                [part.num_elements for part in parts if part.source is None] if parts else [num_elements]
            )
            for count in swapped:
                add(tier, kind, count * dtype.itemsize)
        if record.num_trainable:
            tier = placement[record.index, SegmentKind.GRAD]
            if grads_have_homes or tier.is_device:
                add(tier, SegmentKind.GRAD, grad_home_bytes(record))
    for kind in dict.fromkeys(kind for record in records for kind in record.spec.kinds):
        for tier in TierName:
            sheet.add(tier, f"{_HOME}{kind.value}", totals.get((tier, kind), 0))


def _check_budgets(plan: MemoryPlan, config: OffloadConfig) -> None:
    for tier in TierName:
        budget: int | None = getattr(config.budgets, tier.value)
        needed = plan.tier_bytes(tier)
        if budget is not None and needed > budget:
            raise BudgetError(
                f"offloadzero.budgets.{tier.value}: {format_bytes(needed)} are needed, "
                f"{format_bytes(budget)} are allowed ({format_bytes(needed - budget)} short).\n"
                f"{plan.table()}\n{advice(plan, [tier], config)}",
                needed={tier.value: needed},
            )


_MOVES = {
    TierName.DEVICE: "parameters or states on host or nvme",
    TierName.HOST: "segments on nvme",
    TierName.NVME: "segments on host",
}


def advice(
    plan: MemoryPlan, tiers: Sequence[TierName], config: OffloadConfig, *, of_machine: bool = False
) -> str:
    """Say which settings to change where `tiers` hold too much for a budget, or for the machine."""
    *others, last = _advice(plan, tiers, config, of_machine=of_machine)
    return f"What would make it fit: {', '.join([*others, 'or ' + last]) if others else last}."


def _advice(
    plan: MemoryPlan, tiers: Sequence[TierName], config: OffloadConfig, *, of_machine: bool
) -> Iterator[str]:
    """Yield what is left to change. "auto" has moved all that it may: it is told of no segment."""
    taken = sum(plan.inputs.tier_bytes(tier) for tier in tiers) if plan.inputs is not None else 0
    if taken:
        yield f"a smaller {INPUT_BYTES_KEY} ({format_bytes(taken)} of this are for inputs)"
        yield "another offloadzero.activation_checkpoints.tier"
    of_host = any(tier.is_host_memory for tier in tiers)
    if config.placement.auto:
        given = [
            f"offloadzero.budgets.{tier.value}"
            for tier in tiers
            if getattr(config.budgets, tier.value) is not None
        ]
        if of_host and not config.nvme_paths:
            yield "a directory on a drive (offloadzero.nvme_path), which auto then uses"
        if of_machine and given:
            yield f"less of what auto may fill ({', '.join(given)})"
    elif any(map(plan.holds_homes, tiers)):
        yield "segments on a slower tier" if of_machine else _MOVES[tiers[0]]
    if of_host and plan.num_slots:
        yield "a smaller offloadzero.update.chunk_elements"
    if not all(tier.is_file for tier in tiers):
        yield "smaller units (offloadzero.units.patterns)"
    if not of_machine:
        yield "a larger budget"


def first_enough(size_after: Callable[[int], int], freed: Sequence[int], enough: int) -> int:
    """Return the first number of moves with a size of at most `enough`; else none or all, whichever is smaller.

    Args:
        size_after: bytes after so many moves, 0 to `len(freed) - 1`.
        freed: bytes that so many moves free together, before what they make necessary: `freed[0]` is 0.
        enough: bytes.
    """
    number = 0
    while number < len(freed):
        size = size_after(number)
        if size <= enough:
            return number
        number = bisect_left(freed, freed[number] + size - enough)
    return min((0, len(freed) - 1), key=size_after)
