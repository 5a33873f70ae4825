"""The bytes that one step moves on each lane: a pure function of records, placement and schedule.

[Note: bytes of a step]
From the second step on each step moves the same; with leases of frozen units, which last, from a later one on (or a few
kinds of steps take turns, and the bytes are those of the one that fetches most). Fetches are those of the running
schedule (`planning/step_fetches.py`) in the arena that the plan has for unit leases: forward and backward of each micro
batch use the units there and back, and an update makes leases of units that it trains stale. If a unit's parameters
live on NVMe, fetches that have a lease before the update begins get the new parameters from the update itself, [Note:
delivery] in update/delivery.py, and are not read. Their number depends on time, so reads of the drive are a range: at
least, all fetches that find room are delivered, at most none.

Of several ranks the bytes are those of one: its shards on its own link and drive, and the tensors of its collectives,
[Note: which collectives a step has] in planning/collective_traffic.py. No update delivers a shard to a lease.

Lanes have the names of observe/timeline.py, and the bytes are counted as they are there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offloadzero.config import OffloadConfig
from offloadzero.memory.arena import align_up
from offloadzero.observe.collectives import CollectiveCount, volume_bytes
from offloadzero.observe.timeline import (
    COLLECTIVES,
    D2H,
    DEVICE_UPDATE,
    H2D,
    LANDING,
    NVME_READ,
    NVME_WRITE,
    UPDATE,
)
from offloadzero.planning.activation_trace import CallInputs
from offloadzero.planning.collective_traffic import (
    OF_TENSORS,
    Collective,
    of_fetch,
    of_gradient,
    of_update,
)
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.planning.step_fetches import fetches_in_order, uses_of_micro_batch
from offloadzero.segments import SegmentKind, TierName
from offloadzero.update.records import Record

PARAM, GRAD = SegmentKind.PARAM, SegmentKind.GRAD
FORWARD, BACKWARD, AFTER = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, AFTER)


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
    # Of several ranks, by phase; keys as in `Ranks.collectives`: purpose and kind.
    collectives: Mapping[str, Mapping[str, CollectiveCount]] = field(default_factory=dict)
    # By phase and lane, the collectives that begin there; what the hosts agree on is on no lane.
    starts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

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
        self.collectives: dict[str, dict[str, CollectiveCount]] = {phase: {} for phase in PHASES}
        self.starts: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}

    def add(self, phase: str, lane: str, num_bytes: int) -> None:
        if num_bytes:
            lanes = self.by_phase[phase]
            lanes[lane] = lanes.get(lane, 0) + num_bytes

    def send(self, phase: str, collectives: Iterable[Collective], *, times: int = 1) -> None:
        counts = self.collectives[phase]
        for purpose, kind, num_bytes in collectives:
            key = f"{purpose} {kind}"
            one = CollectiveCount(times, times * num_bytes)
            if purpose in OF_TENSORS:
                self.add(phase, COLLECTIVES, volume_bytes({key: one}))
                self.starts[phase][COLLECTIVES] = self.starts[phase].get(COLLECTIVES, 0) + times
            before = counts.get(key, CollectiveCount())
            counts[key] = CollectiveCount(before.num_calls + one.num_calls, before.num_bytes + one.num_bytes)


@dataclass(frozen=True)
class Uses:
    """Records by their index in the order in which one micro batch uses them, each as often as it does."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class Fetch(NamedTuple):
    """One fetch of a step."""

    phase: str
    record: Record
    is_near: bool  # from the copies that the ranks of a machine keep


def step_traffic(
    records: Sequence[Record],
    plan: MemoryPlan,
    config: OffloadConfig,
    *,
    uses: Uses,
    inputs: Sequence[CallInputs] = (),
    num_local_ranks: int | None = None,
) -> StepTraffic:
    """Return the bytes of one step after the first.

    Args:
        inputs: those of the calls of checkpointed units in a micro batch.
        num_local_ranks: the ranks of a machine; None: all are on one.
    """
    sheet = _Sheet()
    num_micro = config.batch.gradient_accumulation_steps
    fetches = _fetches_in(records, plan, uses, num_micro)
    delivered = _add_fetches(sheet, fetches, plan, config)
    machine_ranks = config.zero_plus_plus.node_ranks
    if machine_ranks == 1:
        machine_ranks = num_local_ranks or config.world_size
    for record in records:
        if record.num_trainable:
            _add_gradient(sheet, record, plan, num_micro)
            _add_update(sheet, record, plan)
        if record.num_trainable and record.is_reduced:
            reduced = of_gradient(record, plan, config, machine_ranks=machine_ranks)
            sheet.send(BACKWARD, reduced, times=num_micro)
            sheet.send(AFTER, of_update(record))
    if config.activation_checkpoints is not None:
        _add_inputs(sheet, config.activation_checkpoints.tier, inputs, num_micro)
    num_uses = num_micro * (len(uses.forward) + len(uses.backward))
    on_device = [r for r in records if r.num_trainable and plan.placement[r.index, GRAD].is_device]
    measured = sum(
        _num_measured(r, num_micro) * r.state.kept_trainable * r.grad_dtype.itemsize for r in on_device
    )
    return StepTraffic(sheet.by_phase, delivered, num_uses, measured, sheet.collectives, sheet.starts)


def _fetches_in(records: Sequence[Record], plan: MemoryPlan, uses: Uses, num_micro: int) -> list[Fetch]:
    """Return the fetches of a step in their order."""
    streamed = {r.index: r for r in records if r.is_gathered or not plan.placement[r.index, PARAM].is_device}
    trained = {index for index, record in streamed.items() if record.num_trainable}
    forward = [index for index in uses.forward if index in streamed]
    backward = [index for index in uses.backward if index in streamed]
    of_micro = uses_of_micro_batch(
        forward, backward, trained=trained, update_in_backward=plan.update_in_backward
    )
    sizes = {index: align_up(record.param_bytes) for index, record in streamed.items()}
    kept = streamed.keys() - trained
    places: dict[int, list[int]] = {}
    for place, use in enumerate(of_micro):
        places.setdefault(use.unit, []).append(place)
    found: list[Fetch] = []
    copied = set(kept)  # near copies are those of the weights since the last update
    for start, index in fetches_in_order(
        of_micro, sizes, arena_bytes=plan.unit_lease_bytes, kept=kept, times=num_micro
    ):
        of_unit = places[index]
        following = bisect_left(of_unit, start % len(of_micro)) % len(of_unit)  # of the uses that it is for
        phase = FORWARD if of_unit[following] < len(forward) else BACKWARD
        is_near = index in copied and index in plan.near_copies
        found.append(Fetch(phase, streamed[index], is_near))
        copied.add(index)
    return found


def _add_fetches(sheet: _Sheet, fetches: Sequence[Fetch], plan: MemoryPlan, config: OffloadConfig) -> int:
    """Add the fetches; return the bytes that updates may deliver."""
    seen = {fetch.record.index for fetch in fetches if not fetch.record.num_trainable}
    delivered, room = 0, plan.unit_lease_bytes
    for fetch in fetches:
        record, is_file = fetch.record, plan.placement[fetch.record.index, PARAM].is_file
        if record.is_gathered:
            _add_gather(sheet, fetch, plan, config)
            continue
        sheet.add(fetch.phase, H2D, record.param_bytes)
        if is_file:
            sheet.add(fetch.phase, NVME_READ, record.param_bytes)
        if record.index not in seen:  # the first units of the forward, as many as have room at once
            seen.add(record.index)
            room -= align_up(record.param_bytes)
            if room >= 0 and is_file and record.is_trained_whole:
                delivered += record.param_bytes
    return delivered


def _add_gather(sheet: _Sheet, fetch: Fetch, plan: MemoryPlan, config: OffloadConfig) -> None:
    """Add a fetch of a record of which each rank has a part; copies inside the device are on no lane."""
    phase, record, is_near = fetch
    sheet.send(phase, of_fetch(record, config, is_near=is_near))
    tier = plan.placement[record.index, PARAM]
    near_tier, near_bytes = plan.near_copies.get(record.index, (TierName.DEVICE, 0))
    if is_near:
        sheet.add(phase, H2D, 0 if near_tier.is_device else near_bytes)
        return
    if not tier.is_device:
        sheet.add(phase, H2D, record.kept_param_bytes)
    if tier.is_file:
        sheet.add(phase, NVME_READ, record.kept_param_bytes)
    if not near_tier.is_device:
        sheet.add(phase, D2H, near_bytes)


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
    home = record.state.kept_trainable * record.grad_dtype.itemsize
    if tier.is_device:
        sheet.add(BACKWARD, LANDING, _num_measured(record, num_micro) * home)
        return
    brought = record.state.kept_trainable * record.dtype.itemsize
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


def _num_measured(record: Record, num_micro: int) -> int:
    """The times that a gradient at home on the device is measured: once for the window, or after each reduction."""
    return num_micro if record.is_reduced else 1


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
    sheet.add(AFTER, D2H, grad_bytes if tiers[GRAD].is_device else 0)
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
