"""The work of a step: the bytes of each unit on each lane, in the order in which a step needs them, and its operations.

[Note: bytes of a step]
From the second step on each step moves the same; with leases of frozen units, which last, from a later one on (or a few
kinds of steps take turns, and the bytes are those of the one that fetches most). Fetches are those of the running
schedule (fetches.py) in the arena that the plan has for unit leases: forward and backward of each micro batch use the
units there and back, and an update makes leases of units that it trains stale. If a unit's parameters live on NVMe,
fetches that have a lease before the update begins get the new parameters from the update itself, [Note: delivery] in
update/delivery.py, and are not read. Their number depends on time, so reads of the drive are a range: at least, all
fetches that find room are delivered, at most none.

Of several ranks the bytes are those of one: its shards on its own link and drive, and the tensors of its collectives.
No update delivers a shard to a lease. Lanes have the names of observe/timeline.py, and are counted as they are there.

[Note: which collectives a step has]
A fetch of a unit whose parameters are divided gathers its regions, the trainable elements and the frozen ones: over all
ranks, or, with ZeRO++'s copies for near ranks, over those of a machine, but for the first time after an update. A
gradient is reduced once in each backward: whole, in pieces of another dtype, or as codes, within a machine and then
between machines. Parameters that stay whole on each device are gathered once, after their update. Before each gather
over all ranks, and before each one from near copies, the ranks compare their orders. Bytes are those of [Note: bytes of
a collective] in observe/collectives.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from offloadzero.config import OffloadConfig, UpdateConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.memory.arena import align_up
from offloadzero.observe.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    CollectiveCount,
    comparison,
    volume_bytes,
)
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
from offloadzero.planning.checkpointed_inputs import INPUTS_AHEAD
from offloadzero.planning.memory_plan import NUM_GRAD_LEASES, MemoryPlan
from offloadzero.planning.model.trace import CallInputs
from offloadzero.planning.step.fetches import StartedFetch, fetches_in_order, uses_of_micro_batch
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES
from offloadzero.update.wire_codes import gradient_wire, wire_regions

PARAM, GRAD = SegmentKind.PARAM, SegmentKind.GRAD
FORWARD, BACKWARD, AFTER = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, AFTER)
WEIGHTS, NEAR_WEIGHTS, UPDATES, ORDERS = "weights", "near_weights", "updates", "orders"
GRADIENTS, NEAR_GRADIENTS, FAR_GRADIENTS = "gradients", "near_gradients", "far_gradients"
# Their bytes are those of parameters and gradients; others are some bytes in host memory.
OF_TENSORS = (WEIGHTS, NEAR_WEIGHTS, UPDATES, GRADIENTS, NEAR_GRADIENTS, FAR_GRADIENTS)

NVME_MIXED = "nvme"  # [Note: one drive for both directions]
LINKS, NETWORK, HOST_MEMORY = "links", "network", "host memory"  # [Note: lanes between ranks]
THROUGH_HOST_MEMORY = (H2D, D2H, UPDATE, LANDING, NVME_READ, NVME_WRITE)

Lanes = Mapping[str, float]  # bytes, bytes per second or seconds, by lane
Collective = tuple[str, str, int]  # purpose, kind, bytes


class Uses(NamedTuple):
    """Records by their index in the order in which one micro batch uses them, each as often as it does."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class UnitWork:
    """The bytes that one record moves, by lane."""

    name: str
    lease_bytes: int = 0  # on the device for each use; 0: its parameters live there
    fetch: Lanes = field(default_factory=dict)  # one fetch
    trains: bool = True
    trains_whole: bool = True  # its update has all of its parameters, and can deliver them to a lease
    gradient: Lanes = field(default_factory=dict)  # one micro batch's
    measured_on_device: bool = False  # its gradient's norm, where the device computes
    update: Lanes = field(default_factory=dict)  # with the states that it reads and writes
    num_chunks: int = 1  # of the update
    shares_leases: bool = False  # its gradient comes through a lease that units take turns in
    passes: bool = False  # its gradient passes through a buffer on the host
    is_staged: bool = False  # its gradient is added to the one at home
    is_tried: bool = False  # its update is, in backward: [Note: versions] in update/pipeline.py


class UnitUse(NamedTuple):
    unit: int
    share: float = 0.0  # of the operations of forward or backward
    inputs: float = 0.0  # bytes of a checkpointed unit's inputs, which leave after it or come back before it


@dataclass(frozen=True)
class StepWork:
    """The work of a rank's step, unit by unit."""

    units: Sequence[UnitWork]
    forward: Sequence[UnitUse]
    backward: Sequence[UnitUse]
    arena_bytes: int  # the bytes that unit leases share
    num_micro: int = 1
    update_in_backward: bool = True
    inputs_on_file: bool = False
    num_grad_leases: int = 2
    num_passing: int = 2
    num_grad_staging: int = 1
    num_slots: int = UpdateConfig.num_chunks_in_flight
    inputs_ahead: int = 1

    @property
    def uses(self) -> Sequence[UnitUse]:
        return (*self.forward, *self.backward)

    def fetches(self, num_micro: int) -> list[StartedFetch]:
        """Return the fetches of a step of so many micro batches, each with the number of uses before it."""
        sizes = {number: unit.lease_bytes for number, unit in enumerate(self.units) if unit.lease_bytes}
        trained = {number for number in sizes if self.units[number].trains}
        uses = uses_of_micro_batch(
            [use.unit for use in self.forward if use.unit in sizes],
            [use.unit for use in self.backward if use.unit in sizes],
            trained=trained,
            update_in_backward=self.update_in_backward,
        )
        places = [place for place, use in enumerate(self.uses) if use.unit in sizes]  # of `uses` among all
        kept = sizes.keys() - trained

        def among_all(start: int) -> int:
            micro, before = divmod(start - 1, len(uses))  # the use that it follows
            return micro * len(self.uses) + places[before] + 1 if start else 0

        found = fetches_in_order(uses, sizes, arena_bytes=self.arena_bytes, kept=kept, times=num_micro)
        return [StartedFetch(among_all(start), number) for start, number in found]


def work_of_step(
    records: Sequence[Record],
    plan: MemoryPlan,
    config: OffloadConfig,
    *,
    uses: Uses,
    inputs: Sequence[CallInputs] = (),
) -> StepWork:
    """Return the work of one rank's step after the first; `inputs` are those of checkpointed calls in a micro batch."""
    num_micro = config.batch.gradient_accumulation_steps
    checkpointing = config.activation_checkpoints
    if checkpointing is None or checkpointing.tier.is_device:
        inputs = ()
    forward, backward = _shared_out(records, uses, inputs)
    return StepWork(
        units=[_unit_work(record, plan, config, num_micro) for record in records],
        forward=forward,
        backward=backward,
        arena_bytes=plan.unit_lease_bytes,
        num_micro=num_micro,
        update_in_backward=plan.update_in_backward,
        inputs_on_file=checkpointing is not None and checkpointing.tier.is_file,
        num_grad_leases=NUM_GRAD_LEASES,
        num_passing=plan.num_host_grads,
        num_grad_staging=plan.num_grad_staging,
        num_slots=plan.num_slots,
        inputs_ahead=INPUTS_AHEAD.get(checkpointing.tier, 1) if checkpointing is not None else 1,
    )


def _unit_work(record: Record, plan: MemoryPlan, config: OffloadConfig, num_micro: int) -> UnitWork:
    streams = record.is_gathered or not plan.placement[record.index, PARAM].is_device
    unit = UnitWork(
        record.name,
        align_up(record.param_bytes) if streams else 0,
        fetch_bytes(record, plan),
        trains=record.num_trainable > 0,
        trains_whole=record.is_trained_whole,
    )
    if not unit.trains:
        return unit
    tier = plan.placement[record.index, GRAD]
    is_merged = num_micro > 1 or record.grad_dtype != record.dtype or tier.is_file
    return replace(
        unit,
        gradient={lane: size / num_micro for lane, size in gradient_bytes(record, plan, num_micro).items()},
        measured_on_device=tier.is_device,
        update=update_bytes(record, plan),
        num_chunks=record.num_chunks(config.update.chunk_elements),
        shares_leases=not tier.is_device and not record.resident,
        passes=not tier.is_device and not plan.grads_have_homes,
        is_staged=not tier.is_device and plan.grads_have_homes and is_merged,
        is_tried=record.index in plan.versioned,
    )


# --- the bytes of one record ---


def fetch_bytes(record: Record, plan: MemoryPlan, *, is_near: bool = False) -> dict[str, int]:
    """Return the bytes by lane of a fetch. `is_near`: from the copies that the ranks of a machine keep.

    Copies inside the device are on no lane.
    """
    tier = plan.placement[record.index, PARAM]
    near_tier, near_bytes = plan.near_copies.get(record.index, (TierName.DEVICE, 0))
    if is_near:
        return {} if near_tier.is_device else {H2D: near_bytes}
    size = record.kept_param_bytes if record.is_gathered else record.param_bytes
    lanes = {} if tier.is_device else {H2D: size}
    if tier.is_file:
        lanes[NVME_READ] = size
    return lanes if near_tier.is_device else {**lanes, D2H: near_bytes}


def gradient_bytes(record: Record, plan: MemoryPlan, num_micro: int) -> dict[str, int]:
    """Return the bytes by lane of a record's gradient in backward, all micro batches together."""
    tier = plan.placement[record.index, GRAD]
    home = record.kept_trainable * record.grad_dtype.itemsize
    if tier.is_device:
        return {LANDING: _num_measured(record, num_micro) * home}
    brought = record.kept_trainable * record.dtype.itemsize
    # Norms are taken of the gradient at home; later ones are added to it.
    lanes = {D2H: num_micro * brought, LANDING: num_micro * home}
    if not plan.grads_have_homes:
        return lanes
    is_same = record.grad_dtype == record.dtype
    num_merges = num_micro if not is_same or tier.is_file else num_micro - 1
    lanes[LANDING] += num_merges * (brought + home)
    if tier.is_file:
        lanes |= {NVME_WRITE: num_micro * home, NVME_READ: (num_micro - 1) * home}
    return lanes


def _num_measured(record: Record, num_micro: int) -> int:
    """The times that a gradient at home on the device is measured: once for the window, or after each reduction."""
    return num_micro if record.is_reduced else 1


def update_bytes(record: Record, plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes by lane of a record's update, of a gradient that lives on a drive too."""
    trainable = record.kept_trainable
    grad_bytes = trainable * record.grad_dtype.itemsize
    sizes: dict[SegmentKind, int] = {}
    for kind, (dtype, _) in record.layout.items():
        part = record.chunk_slice(kind, 0, trainable)
        sizes[kind] = (part.stop - part.start) * dtype.itemsize
    tiers = {kind: plan.placement[record.index, kind] for kind in (*sizes, GRAD)}
    moved = grad_bytes + 2 * sum(sizes.values())
    if all(tier.is_device for tier in tiers.values()):
        return {DEVICE_UPDATE: moved}
    on_files = sum(size for kind, size in sizes.items() if tiers[kind].is_file)
    on_device = sum(size for kind, size in sizes.items() if tiers[kind].is_device)
    reads_gradient = tiers[GRAD].is_file and plan.grads_have_homes
    # [Note: whole parameters] in update/spec.py: they go to the device and back.
    whole = sum(sizes.values()) if record.spec.takes_whole else 0
    lanes = {
        DEVICE_UPDATE if whole else UPDATE: moved,
        D2H: on_device + whole + (grad_bytes if tiers[GRAD].is_device else 0),
        H2D: on_device + whole + (grad_bytes if whole else 0),
        NVME_READ: on_files + (grad_bytes if reads_gradient else 0),
        NVME_WRITE: on_files,
    }
    return {lane: size for lane, size in lanes.items() if size}


# --- shares of the operations ---


def used_elements(records: Sequence[Record], uses: Uses) -> int:
    """Return the number of elements that a micro batch multiplies by, each as often as it does."""
    elements = {record.index: record.num_elements for record in records}
    return sum(elements[uses.forward[there]] for there, _ in _in_both(uses))


def _shared_out(
    records: Sequence[Record], uses: Uses, inputs: Sequence[CallInputs]
) -> tuple[list[UnitUse], list[UnitUse]]:
    """Share operations and inputs out among the uses that forward and backward have in common.

    What a unit computes is taken as its share of the parameters. An embedding, which backward does not use, looks up.
    """
    places = {record.index: place for place, record in enumerate(records)}
    both = _in_both(uses)
    elements = [records[places[uses.forward[number]]].num_elements for number, _ in both]
    total = sum(elements)
    forward = [UnitUse(places[index]) for index in uses.forward]
    backward = [UnitUse(places[index]) for index in uses.backward]
    calls: list[CallInputs | None] = [None] * len(both)
    for number, call in enumerate(inputs):
        if both:  # calls and units are in the same order
            calls[(2 * number + 1) * len(both) // (2 * len(inputs))] = call
    for (there, back), num_elements, of_use in zip(both, elements, calls, strict=True):
        share = num_elements / total
        sent, fetched = (0, 0) if of_use is None else (of_use.sent, of_use.fetched)
        forward[there] = UnitUse(forward[there].unit, share, sent)
        backward[back] = UnitUse(backward[back].unit, share, fetched)
    return forward, backward


def _in_both(uses: Uses) -> list[tuple[int, int]]:
    """Return the places in forward and in backward of uses that are the same there and back, in the forward's order."""
    found: list[tuple[int, int]] = []
    end = len(uses.forward)
    for back, index in enumerate(uses.backward):
        there = next((place for place in range(end - 1, -1, -1) if uses.forward[place] == index), None)
        if there is not None:
            found.append((there, back))
            end = there
    return found[::-1]


# --- the whole step by phase ---


@dataclass(frozen=True)
class StepTraffic:
    """The bytes by phase and lane of one step, all micro batches together: [Note: bytes of a step].

    The bytes of updates are in the phase AFTER, whether they run in backward or not. `delivered_bytes` of the drive's
    reads in FORWARD are spared where their units' updates begin late enough.
    """

    by_phase: Mapping[str, Mapping[str, int]]
    delivered_bytes: int
    num_uses: int  # uses of units in forward and backward
    measured_on_device: int = 0  # of LANDING: gradients whose norms are taken where the device computes
    # Of several ranks, by phase; keys as in `Ranks.collectives`: purpose and kind.
    collectives: Mapping[str, Mapping[str, CollectiveCount]] = field(default_factory=dict)
    # By phase and lane, the collectives that begin there; what the hosts agree on is on no lane.
    starts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def lane(self, name: str) -> int:
        return sum(lanes.get(name, 0) for lanes in self.by_phase.values())

    @property
    def lanes(self) -> dict[str, int]:
        names = dict.fromkeys(name for lanes in self.by_phase.values() for name in lanes)
        return {name: self.lane(name) for name in names}


class _Sheet:
    def __init__(self) -> None:
        self.by_phase: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}
        self.collectives: dict[str, dict[str, CollectiveCount]] = {phase: {} for phase in PHASES}
        self.starts: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}

    def add(self, phase: str, lanes: Mapping[str, int]) -> None:
        for lane, num_bytes in lanes.items():
            if num_bytes:
                self.by_phase[phase][lane] = self.by_phase[phase].get(lane, 0) + num_bytes

    def send(self, phase: str, collectives: Iterable[Collective], *, times: int = 1) -> None:
        counts, starts = self.collectives[phase], self.starts[phase]
        for purpose, kind, num_bytes in collectives:
            key = f"{purpose} {kind}"
            if purpose in OF_TENSORS:
                one = CollectiveCount(times, times * num_bytes)
                self.add(phase, {COLLECTIVES: volume_bytes({key: one})})
                starts[COLLECTIVES] = starts.get(COLLECTIVES, 0) + times
            before = counts.get(key, CollectiveCount())
            counts[key] = CollectiveCount(before.num_calls + times, before.num_bytes + times * num_bytes)


def traffic_of(
    work: StepWork,
    records: Sequence[Record],
    plan: MemoryPlan,
    config: OffloadConfig,
    *,
    inputs: Sequence[CallInputs],
    num_local_ranks: int | None,
) -> StepTraffic:
    """Return the bytes of one step of this work.

    Args:
        inputs: those of the calls of checkpointed units in a micro batch.
        num_local_ranks: the ranks of a machine; None: all are on one.
    """
    sheet, num_micro = _Sheet(), work.num_micro
    delivered = _add_fetches(sheet, work, records, plan, config)
    machine_ranks = config.zero_plus_plus.node_ranks
    if machine_ranks == 1:
        machine_ranks = num_local_ranks or config.world_size
    measured = 0
    for record in (record for record in records if record.num_trainable):
        sheet.add(BACKWARD, gradient_bytes(record, plan, num_micro))
        sheet.add(AFTER, update_bytes(record, plan))
        if record.is_reduced:
            sheet.send(BACKWARD, _of_gradient(record, plan, config, machine_ranks), times=num_micro)
            sheet.send(AFTER, _of_update(record))
        if plan.placement[record.index, GRAD].is_device:
            home = record.kept_trainable * record.grad_dtype.itemsize
            measured += _num_measured(record, num_micro) * home
    if config.activation_checkpoints is not None:
        _add_inputs(sheet, config.activation_checkpoints.tier, inputs, num_micro)
    num_uses = num_micro * len(work.uses)
    return StepTraffic(sheet.by_phase, delivered, num_uses, measured, sheet.collectives, sheet.starts)


def _add_fetches(
    sheet: _Sheet, work: StepWork, records: Sequence[Record], plan: MemoryPlan, config: OffloadConfig
) -> int:
    """Add the fetches; return the bytes that updates may deliver."""
    places: dict[int, list[int]] = {}
    for place, use in enumerate(work.uses):
        places.setdefault(use.unit, []).append(place)
    frozen = {number for number, unit in enumerate(work.units) if not unit.trains}
    copied, seen = set(frozen), set(frozen)  # near copies are those of the weights since the last update
    delivered, room = 0, plan.unit_lease_bytes
    for start, number in work.fetches(work.num_micro):
        record, unit, of_unit = records[number], work.units[number], places[number]
        following = of_unit[bisect_left(of_unit, start % len(work.uses)) % len(of_unit)]  # the use it is for
        phase = FORWARD if following < len(work.forward) else BACKWARD
        is_near = number in copied and record.index in plan.near_copies
        copied.add(number)
        sheet.add(phase, fetch_bytes(record, plan, is_near=is_near))
        if record.is_gathered:
            sheet.send(phase, _of_fetch(record, config, is_near=is_near))
        elif number not in seen:  # the first units of the forward, as many as have room at once
            seen.add(number)
            room -= unit.lease_bytes
            if room >= 0 and NVME_READ in unit.fetch and unit.trains_whole:
                delivered += record.param_bytes
    return delivered


def _add_inputs(sheet: _Sheet, tier: TierName, inputs: Sequence[CallInputs], num_micro: int) -> None:
    """Add the inputs: all leave, and come back for each call; those that backward needs first may still be there."""
    if tier.is_device:
        return
    sent = num_micro * sum(call.sent for call in inputs)
    fetched = num_micro * sum(call.fetched for call in inputs)
    sheet.add(FORWARD, {D2H: sent, **({NVME_WRITE: sent} if tier.is_file else {})})
    sheet.add(BACKWARD, {H2D: fetched, **({NVME_READ: fetched} if tier.is_file else {})})


# --- the collectives of one record: [Note: which collectives a step has] ---


def _of_fetch(record: Record, config: OffloadConfig, *, is_near: bool) -> Iterator[Collective]:
    yield ORDERS, *comparison(record.shard.world_size, num_values=2)
    coded = {} if is_near else wire_regions(record, config.zero_plus_plus)
    for start, stop in ((0, record.num_trainable), (record.num_trainable, record.num_elements)):
        if start == stop:
            continue
        if start in coded:
            region = coded[start]
            yield WEIGHTS, ALL_GATHER, region.num_elements  # a byte each
            yield WEIGHTS, ALL_GATHER, region.shard.world_size * region.beside_bytes
        else:
            purpose = NEAR_WEIGHTS if is_near else WEIGHTS
            yield purpose, ALL_GATHER, (stop - start) * record.dtype.itemsize


def _of_gradient(
    record: Record, plan: MemoryPlan, config: OffloadConfig, machine_ranks: int
) -> Iterator[Collective]:
    """Yield the collectives of the gradient of one backward. `machine_ranks`: [Note: two hops]'s G."""
    wire, num_ranks = gradient_wire(record, config.zero_plus_plus), record.shard.world_size
    if wire is not None:
        if wire.exact:
            num_exact = wire.exact_elements * num_ranks
            yield GRADIENTS, REDUCE_SCATTER, num_exact * record.dtype.itemsize
        num_machines = num_ranks // machine_ranks
        if machine_ranks > 1:
            yield NEAR_GRADIENTS, ALL_TO_ALL, num_ranks * wire.packet_bytes
        if num_machines > 1:
            yield FAR_GRADIENTS, ALL_TO_ALL, num_machines * wire.packet_bytes
        return
    kind = REDUCE_SCATTER if num_ranks > 1 else ALL_REDUCE
    sent_as = DTYPES[config.communication_dtype]
    if sent_as is None or sent_as == record.dtype:
        yield GRADIENTS, kind, record.num_trainable * record.dtype.itemsize
        return
    kept = record.num_trainable // num_ranks
    most = plan.gradient_piece_bytes // sent_as.itemsize // num_ranks  # of each rank's part
    for start in range(0, kept, most):
        yield GRADIENTS, kind, min(most, kept - start) * num_ranks * sent_as.itemsize


def _of_update(record: Record) -> Iterator[Collective]:
    if record.keeps_whole_params:
        yield UPDATES, ALL_GATHER, record.num_trainable * record.dtype.itemsize
