"""The work of a step unit by unit, in bytes and shares of the operations, and the rates that turn it into seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offloadzero.config import OffloadConfig
from offloadzero.memory.arena import align_up
from offloadzero.observe.timeline import D2H, H2D, LANDING, NVME_READ, NVME_WRITE, UPDATE
from offloadzero.planning.activation_trace import CallInputs
from offloadzero.planning.memory_plan import (
    INPUTS_AHEAD,
    NUM_GRAD_LEASES,
    NUM_STAGING_LEASES,
    MemoryPlan,
)
from offloadzero.planning.traffic import Uses, gradient_bytes, update_bytes
from offloadzero.segments import SegmentKind
from offloadzero.update.records import Record

Lanes = Mapping[str, float]  # bytes, bytes per second or seconds, by lane
THROUGH_HOST_MEMORY = (H2D, D2H, UPDATE, LANDING, NVME_READ, NVME_WRITE)


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


class UnitUse(NamedTuple):
    """One use of a unit in a micro batch."""

    unit: int
    share: float = 0.0  # of the operations of forward or backward
    inputs: float = 0.0  # bytes of a checkpointed unit's inputs, which leave after it or come back before it


@dataclass(frozen=True)
class StepWork:
    """The work of a step, unit by unit."""

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
    num_param_staging: int = 2
    num_slots: int = 3
    inputs_ahead: int = 1


@dataclass(frozen=True)
class LaneRates:
    """The rates of one machine for one step's work."""

    bytes_per_s: Lanes
    forward_s: float = 0.0  # computation of a micro batch
    backward_s: float = 0.0
    launch_s: float = 0.0  # Python for each use of a unit
    drive_bytes_per_s: float | None = None  # both directions at once; None: they do not share
    host_bytes_per_s: float | None = (
        None  # of all that passes through the host's memory; None: no limit is known
    )
    num_cores: int | None = None  # shared by all lanes; None: the device computes beside the host
    core_share: float = 1.0  # of the cores, which computation keeps busy
    # Where cores are shared:
    holds: Lanes = field(default_factory=dict)  # seconds that computation loses for each byte of a lane
    drive_hold_s: float = 0.0  # that it loses for each byte of the drive
    drive_beside: float = 1.0  # the part of its rate that the drive has beside work of all cores

    def seconds(self, lane: str, num_bytes: float) -> float:
        """Return the seconds of `num_bytes` on a lane of its own. KeyError: its rate is not known."""
        return num_bytes / self.bytes_per_s[lane] if num_bytes else 0.0


def work_of_step(
    records: Sequence[Record],
    plan: MemoryPlan,
    config: OffloadConfig,
    *,
    uses: Uses,
    inputs: Sequence[CallInputs] = (),
) -> StepWork:
    """Return the work of one rank's step after the first: the bytes of `step_traffic`, unit by unit.

    Args:
        inputs: those of the calls of checkpointed units in a micro batch.
    """
    num_micro = config.batch.gradient_accumulation_steps
    checkpointing = config.activation_checkpoints
    if checkpointing is None or checkpointing.tier.is_device:
        inputs = ()
    places = {record.index: place for place, record in enumerate(records)}
    forward, backward = _shared_out(records, places, uses, inputs)
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
        num_param_staging=NUM_STAGING_LEASES,
        num_slots=plan.num_slots,
        inputs_ahead=INPUTS_AHEAD.get(checkpointing.tier, 1) if checkpointing is not None else 1,
    )


def used_elements(records: Sequence[Record], uses: Uses) -> int:
    """Return the number of elements that a micro batch multiplies by, each as often as it does."""
    elements = {record.index: record.num_elements for record in records}
    return sum(elements[uses.forward[there]] for there, _ in _in_both(uses))


def _unit_work(record: Record, plan: MemoryPlan, config: OffloadConfig, num_micro: int) -> UnitWork:
    home = plan.placement[record.index, SegmentKind.PARAM]
    fetch = {} if home.is_device else {H2D: record.param_bytes}
    if home.is_file:
        fetch[NVME_READ] = record.param_bytes
    lease_bytes = 0 if home.is_device else align_up(record.param_bytes)
    if not record.num_trainable:
        return UnitWork(record.name, lease_bytes, fetch, trains=False)
    tier = plan.placement[record.index, SegmentKind.GRAD]
    of_micro = {lane: size / num_micro for lane, size in gradient_bytes(record, plan, num_micro).items()}
    is_merged = num_micro > 1 or record.grad_dtype != record.dtype or tier.is_file
    return UnitWork(
        record.name,
        lease_bytes,
        fetch,
        gradient=of_micro,
        measured_on_device=tier.is_device,
        update=update_bytes(record, plan),
        num_chunks=-(-record.state.kept_trainable // config.update.chunk_elements),
        shares_leases=not tier.is_device and not record.resident,
        passes=not tier.is_device and not plan.grads_have_homes,
        is_staged=not tier.is_device and plan.grads_have_homes and is_merged,
        trains_whole=record.is_trained_whole,
    )


def _shared_out(
    records: Sequence[Record], places: Mapping[int, int], uses: Uses, inputs: Sequence[CallInputs]
) -> tuple[list[UnitUse], list[UnitUse]]:
    """Share operations and inputs out among the uses that forward and backward have in common.

    What a unit computes is taken as its share of the parameters. An embedding, which backward does not use, looks up.
    """
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
