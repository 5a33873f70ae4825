"""The bytes of the buffers that the plan counts beside the homes: leases, slots of the update, scratch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from offloadzero.arithmetic.device_math import norm_scratch_bytes
from offloadzero.config import OffloadConfig
from offloadzero.core.segments import SegmentKind
from offloadzero.memory.arena import ALIGN_BYTES, align_up, room_for, staggered
from offloadzero.planning.placement_rules import Placement
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import UpdateForm
from offloadzero.update.staging import device_bytes


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
