"""The bytes that one step moves on each lane: a pure function of records, placement and schedule.

[Note: bytes of a step]
From the second step on each step moves the same. Fetches are those of an optimal schedule in the arena that the plan
has for unit leases (`schedule/prefetch.py`): forward and backward of each micro batch use the units there and back,
and an update makes leases of units that it trains stale. If a unit's parameters live on NVMe, fetches that have a lease
before the update begins get the new parameters from the update itself, [Note: delivery] in update/delivery.py, and are
not read. Their number depends on time, so reads of the drive are a range: at least, all fetches that find room are
delivered, at most none.

Lanes have the names of observe/timeline.py, and the bytes are counted as they are there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from offloadzero.config import OffloadConfig
from offloadzero.memory.arena import align_up
from offloadzero.observe.timeline import D2H, DEVICE_UPDATE, H2D, LANDING, NVME_READ, NVME_WRITE, UPDATE
from offloadzero.planning.activation_trace import CallInputs
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.schedule.prefetch import choose_victims, next_uses
from offloadzero.segments import SegmentKind, TierName
from offloadzero.update.records import Record

PARAM, GRAD = SegmentKind.PARAM, SegmentKind.GRAD
FORWARD, BACKWARD, AFTER = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, AFTER)
HORIZON = 6  # uses per unit that are looked ahead: three micro batches


@dataclass(frozen=True)
class StepTraffic:
    """The bytes by phase and lane of one step, all micro batches together: [Note: bytes of a step].

    The bytes of updates are in the phase AFTER, whether they run in backward or not. `delivered_bytes` of the drive's
    reads in FORWARD are spared where their units' updates begin late enough.
    """

    by_phase: Mapping[str, Mapping[str, int]]
    delivered_bytes: int
    num_uses: int  # uses of units in forward and backward
    measured_on_device: int = (
        0  # of the lane LANDING: gradients whose norms are taken where the device computes
    )

    def lane(self, name: str) -> int:
        """The bytes on one lane in the whole step."""
        return sum(lanes.get(name, 0) for lanes in self.by_phase.values())

    @property
    def lanes(self) -> dict[str, int]:
        """The bytes by lane in the whole step."""
        names = dict.fromkeys(name for lanes in self.by_phase.values() for name in lanes)
        return {name: self.lane(name) for name in names}


class _Sheet:
    """Adds up bytes by phase and lane."""

    def __init__(self) -> None:
        self.by_phase: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}

    def add(self, phase: str, lane: str, num_bytes: int) -> None:
        if num_bytes:
            lanes = self.by_phase[phase]
            lanes[lane] = lanes.get(lane, 0) + num_bytes


@dataclass(frozen=True)
class Uses:
    """Records by their index in the order in which one micro batch uses them, each as often as it does."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def step_traffic(
    records: Sequence[Record],
    plan: MemoryPlan,
    config: OffloadConfig,
    *,
    uses: Uses,
    inputs: Sequence[CallInputs] = (),
) -> StepTraffic:
    """Return the bytes of one step after the first.

    Args:
        inputs: those of the calls of checkpointed units in a micro batch.
    """
    sheet = _Sheet()
    num_micro = config.batch.gradient_accumulation_steps
    streamed = [r for r in records if not plan.placement[r.index, PARAM].is_device]
    delivered = _add_fetches(sheet, streamed, plan, uses, num_micro)
    for record in records:
        if record.num_trainable:
            _add_gradient(sheet, record, plan, num_micro)
            _add_update(sheet, record, plan)
    if config.activation_checkpoints is not None:
        _add_inputs(sheet, config.activation_checkpoints.tier, inputs, num_micro)
    num_uses = num_micro * (len(uses.forward) + len(uses.backward))
    on_device = [r for r in records if r.num_trainable and plan.placement[r.index, GRAD].is_device]
    measured = sum(r.state.kept_trainable * r.grad_dtype.itemsize for r in on_device)
    return StepTraffic(sheet.by_phase, delivered, num_uses, measured)


def _add_fetches(
    sheet: _Sheet, streamed: Sequence[Record], plan: MemoryPlan, uses: Uses, num_micro: int
) -> int:
    """Add the fetches; return the bytes that updates may deliver."""
    sizes = {record.index: align_up(record.param_bytes) for record in streamed}
    by_index = {record.index: record for record in streamed}
    kept = frozenset(record.index for record in streamed if not record.num_trainable)
    order = [(True, index) for index in uses.forward if index in sizes]
    order += [(False, index) for index in uses.backward if index in sizes]
    delivered, room, seen = 0, plan.unit_lease_bytes, set(kept)
    for is_forward, index in fetches_of_step(
        order * num_micro, sizes, arena_bytes=plan.unit_lease_bytes, kept=kept
    ):
        record, phase = by_index[index], FORWARD if is_forward else BACKWARD
        sheet.add(phase, H2D, record.param_bytes)
        if plan.placement[index, PARAM].is_file:
            sheet.add(phase, NVME_READ, record.param_bytes)
        if index not in seen:  # the first units of the forward, as many as have room at once
            seen.add(index)
            room -= sizes[index]
            if room >= 0 and plan.placement[index, PARAM].is_file:
                delivered += record.param_bytes
    return delivered


def fetches_of_step(
    uses: Sequence[tuple[bool, int]],
    num_bytes: Mapping[int, int],
    *,
    arena_bytes: int,
    kept: Collection[int] = (),
) -> list[tuple[bool, int]]:
    """Return those of the `uses` of a step, (whether in forward, unit), that need a fetch.

    The step is like the one before it. Units in `kept` are made stale by no update: their leases last into the next.
    """
    present: set[int] = set()
    fetched: list[tuple[bool, int]] = []
    for _ in range(2):  # the second begins as every later one does
        fetched = list(_fetches(uses, num_bytes, arena_bytes, present))
        present &= set(kept)
    return fetched


def _fetches(
    uses: Sequence[tuple[bool, int]], num_bytes: Mapping[int, int], arena_bytes: int, present: set[int]
) -> Iterator[tuple[bool, int]]:
    horizon = HORIZON * len(num_bytes)
    for place, (is_forward, unit) in enumerate(uses):
        if unit in present:
            continue
        wanted = num_bytes[unit] + sum(num_bytes[other] for other in present) - arena_bytes
        if wanted > 0:
            following = (other for _, other in uses[place + 1 : place + 1 + horizon])
            distances = next_uses(following, among=present)
            present.difference_update(choose_victims(present, distances, num_bytes=num_bytes, wanted=wanted))
        present.add(unit)
        yield is_forward, unit


def gradient_bytes(record: Record, plan: MemoryPlan, num_micro: int) -> Mapping[str, int]:
    """Return the bytes by lane of a record's gradient in backward, all micro batches together."""
    sheet = _Sheet()
    _add_gradient(sheet, record, plan, num_micro)
    return sheet.by_phase[BACKWARD]


def update_bytes(record: Record, plan: MemoryPlan) -> Mapping[str, int]:
    """Return the bytes by lane of a record's update, of a gradient that lives on a drive too."""
    sheet = _Sheet()
    _add_gradient(sheet, record, plan, 1)
    _add_update(sheet, record, plan)
    return sheet.by_phase[AFTER]


def _add_gradient(sheet: _Sheet, record: Record, plan: MemoryPlan, num_micro: int) -> None:
    tier = plan.placement[record.index, GRAD]
    if tier.is_device:  # measured on the device, when the last micro batch has ended
        sheet.add(BACKWARD, LANDING, record.state.kept_trainable * record.grad_dtype.itemsize)
        return
    brought = record.num_trainable * record.dtype.itemsize
    home = record.state.kept_trainable * record.grad_dtype.itemsize
    sheet.add(BACKWARD, D2H, num_micro * brought)
    # Norms are taken of the gradient at home; later ones are added to it.
    sheet.add(BACKWARD, LANDING, num_micro * home)
    has_merges = num_micro > 1 or record.grad_dtype != record.dtype or tier.is_file
    if has_merges and plan.grads_have_homes:
        same = record.grad_dtype == record.dtype
        num_merges = num_micro if not same or tier.is_file else num_micro - 1
        sheet.add(BACKWARD, LANDING, num_merges * (brought + home))
    if tier.is_file and plan.grads_have_homes:
        sheet.add(BACKWARD, NVME_WRITE, num_micro * home)
        sheet.add(BACKWARD, NVME_READ, (num_micro - 1) * home)
        sheet.add(AFTER, NVME_READ, home)


def _add_update(sheet: _Sheet, record: Record, plan: MemoryPlan) -> None:
    trainable = record.state.kept_trainable
    grad_bytes = trainable * record.grad_dtype.itemsize
    sizes: dict[SegmentKind, int] = {}
    for kind, (dtype, _) in record.layout().items():
        part = record.chunk_slice(kind, 0, trainable)
        sizes[kind] = (part.stop - part.start) * dtype.itemsize
    tiers = {kind: plan.placement[record.index, kind] for kind in (*sizes, GRAD)}
    moved = grad_bytes + 2 * sum(sizes.values())
    if all(tier.is_device for tier in tiers.values()):
        sheet.add(AFTER, DEVICE_UPDATE, moved)
        return
    sheet.add(AFTER, UPDATE, moved)
    for kind, num_bytes in sizes.items():
        if tiers[kind].is_file:
            sheet.add(AFTER, NVME_READ, num_bytes)
            sheet.add(AFTER, NVME_WRITE, num_bytes)
        elif tiers[kind].is_device:
            sheet.add(AFTER, D2H, num_bytes)
            sheet.add(AFTER, H2D, num_bytes)


def _add_inputs(sheet: _Sheet, tier: TierName, inputs: Sequence[CallInputs], num_micro: int) -> None:
    """Add the inputs: all leave, and come back for each call; those that backward needs first may still be there."""
    if tier.is_device:
        return
    sent = num_micro * sum(call.sent for call in inputs)
    fetched = num_micro * sum(call.fetched for call in inputs)
    sheet.add(FORWARD, D2H, sent)
    sheet.add(BACKWARD, H2D, fetched)
    if tier.is_file:
        sheet.add(FORWARD, NVME_WRITE, sent)
        sheet.add(BACKWARD, NVME_READ, fetched)
