"""Records: parameters of one dtype in flat memory, the shard of them that this rank keeps, and its state.

[Note: compact records]
A bf16 record of n trainable elements in the compact layout has, beside the parameters, an 8-bit remainder, int8 and
uint8 moments of n elements each, and two fp32 scales per block of COMPACT_BLOCK elements: 5 + 1/16 bytes per
element. What the bytes mean: [Note: compact state] in csrc/cpu_adam/cpu_adam.h. Parameters may have different
hyperparameters and step counts and are then updated apart, which a block cannot be. So every parameter begins at a
block's border, and no block belongs to two: that costs up to 127 elements (643 bytes) per parameter and makes the
bits of a parameter's state independent of what else is in its record. A record is a whole number of file blocks in
its one-byte segments (up to 4095 elements of padding) and its scales are padded to one; the chunks of its update are
multiples of 65,536 elements, 4096 bytes of scales, so every chunk of every segment is on the grid of direct I/O.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import torch

from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.core.segments import SegmentKind
from offloadzero.memory.arena import ALIGN_BYTES, align_up
from offloadzero.memory.store import Segment
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.ranks.shard import WHOLE, ShardSpec
from offloadzero.update.commits import Commits, Committed
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.spec import AnySpec, Buffers, StateCodes

PARAM_ALIGN_BYTES = 64  # as torch's CPU allocator: kernels see the alignment that they see without offloading


def segment_slice(kind: SegmentKind, start: int, stop: int) -> slice:
    """The elements of a segment that belong to elements [start, stop) of its record, or of a chunk of it.

    `start` is a multiple of COMPACT_BLOCK for the scales, and `stop` may lie inside the last block of a parameter.
    """
    if kind is not SegmentKind.SCALES:
        return slice(start, stop)
    if start % COMPACT_BLOCK:
        raise AssertionError(f"elements [{start}, {stop}) begin inside a block of {COMPACT_BLOCK} elements")
    return slice(num_scales(start), num_scales(stop))


class Edits:
    """Keeps the writes of scripts to a record's states apart from reads ahead of its update: [Note: reading ahead]."""

    def __init__(self) -> None:
        self.num_begun = 0  # changes other than updates in place
        self._lock = threading.Lock()
        self._num_running = 0
        self._reads: list[Ticket] = []  # reads ahead that may not be complete

    def begin(self) -> Ticket:
        """Announce a write; return the ticket of the reads that it must wait for."""
        with self._lock:
            self.num_begun += 1
            self._num_running += 1
            return AllOf(self._reads)

    def note(self) -> None:
        """Count a change that is home already."""
        with self._lock:
            self.num_begun += 1

    def end(self) -> None:
        """End an announced write, which is home or is not to be."""
        with self._lock:
            self._num_running -= 1

    @contextmanager
    def reading(self) -> Iterator[list[Ticket] | None]:
        """A block that gets the list for tickets of reads ahead; None while the record is written."""
        with self._lock:
            if self._num_running:
                yield None
                return
            self._reads = [read for read in self._reads if not read.done()]
            yield self._reads


@dataclass(frozen=True)
class UpdateRange:
    """Elements [start, stop) that share hyperparameters, step count and the factor of their gradient.

    `shape` is that of the one parameter in it where the optimizer takes parameters whole, without the padding.
    """

    start: int
    stop: int
    group_index: int
    step: int
    factor: float = 1.0
    shape: torch.Size | None = None

    def of(self, buffers: Buffers, first: int, last: int) -> Buffers | None:
        """The range's part of segments, of which `buffers` are elements [first, last); None where it has none there."""
        low, high = max(self.start, first) - first, min(self.stop, last) - first
        if low >= high:
            return None
        parts = {kind: buffer[segment_slice(kind, low, high)] for kind, buffer in buffers.items()}
        return parts if self.shape is None else {kind: part.view(self.shape) for kind, part in parts.items()}


@dataclass(eq=False)
class Record:
    """Parameters of one dtype that are fetched and released together, and this rank's part of their states.

    Full sizes are those of all ranks' parts together, kept ones those of this rank's: `shard`. All of them include
    padding. `resident` records keep their parameters on the device.
    """

    index: int
    name: str
    dtype: torch.dtype
    slots: tuple[ParamSlot, ...]  # trainable ones first; each begins at a multiple of `granule` elements
    num_trainable: int  # full: the elements that the optimizer updates, which are the first ones
    num_elements: int  # full
    granule: int
    shard: ShardSpec
    spec: AnySpec  # the optimizer
    compact: bool  # the states are codes with scales
    keeps_whole_params: bool = False  # a shard is trained here, but all parameters are kept
    resident: bool = False
    is_reduced: bool = False  # its gradient is the mean over several ranks
    grad_dtype: torch.dtype = torch.float32  # the dtype in which gradients are added up
    segments: dict[SegmentKind, Segment] = field(default_factory=dict)  # those that have a home
    whole_param: Segment | None = None  # all parameters; the update's segment is a part of it
    edits: Edits = field(default_factory=Edits)
    commits: Commits = field(default_factory=Commits)  # the run's
    committed: Committed = Committed.NONE  # of the two places that its segments may have
    is_tried: bool = False  # its updates are tried in backward: [Note: versions] in update/pipeline.py

    @property
    def unit_name(self) -> str:
        """The unit's name: a unit has a record for each dtype and optimizer, `blocks.0`, `blocks.0#bfloat16`."""
        return self.name.split("#")[0]

    # --- full sizes; constant values are looked up once ---

    @property
    def is_trained_whole(self) -> bool:
        """Whether the optimizer updates all of its parameters."""
        return self.num_trainable == self.num_elements

    @cached_property
    def param_bytes(self) -> int:
        """The bytes of the parameters."""
        return self.num_elements * self.dtype.itemsize

    @property
    def num_params(self) -> int:
        """The number of elements of the parameters without padding."""
        return sum(slot.num_elements for slot in self.slots)

    @cached_property
    def trainable_slots(self) -> tuple[ParamSlot, ...]:
        """The slots that the optimizer updates."""
        return tuple(slot for slot in self.slots if slot.trainable)

    @cached_property
    def trainable_parts(self) -> tuple[tuple[int, int], ...]:
        """The elements [start, stop) of each trainable slot, without padding."""
        return tuple((slot.offset, slot.offset + slot.num_elements) for slot in self.trainable_slots)

    @cached_property
    def trainable_groups(self) -> tuple[tuple[ParamSlot, ...], ...]:
        """The trainable slots by the optimizer's group: neighbours, without a gap between them."""
        grouped = itertools.groupby(self.trainable_slots, key=lambda slot: slot.group_index)
        return tuple(tuple(slots) for _, slots in grouped)

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) behind trainable parameters, up to where the next may begin."""
        ends = ((stop, start + self.padded(stop - start)) for start, stop in self.trainable_parts)
        return tuple((end, stop) for end, stop in ends if stop > end)

    def padded(self, num_elements: int) -> int:
        """The number of elements that a parameter takes here."""
        return align_up(num_elements, self.granule)

    # --- kept sizes ---

    @cached_property
    def is_gathered(self) -> bool:
        """Whether the parameters on the device come from the shards of all ranks."""
        return self.shard.world_size > 1 and not self.keeps_whole_params

    @property
    def param_home(self) -> Segment:
        """The home of the parameters that this rank keeps."""
        return self.whole_param or self.segments[SegmentKind.PARAM]

    @cached_property
    def kept_elements(self) -> int:
        """The number of elements of the parameters here."""
        return self.num_elements if self.keeps_whole_params else self.shard.kept_elements(self.num_elements)

    @cached_property
    def kept_trainable(self) -> int:
        """The number of elements that the optimizer updates here."""
        return self.shard.kept_elements(self.num_trainable)

    @property
    def kept_param_bytes(self) -> int:
        """The bytes of the parameters here."""
        return self.kept_elements * self.dtype.itemsize

    @cached_property
    def kept_parts(self) -> tuple[tuple[int, int], ...]:
        """`trainable_parts`, cut to this shard and counted in it. Empty parts keep their place in the order."""
        clip, total = self.shard.clipped, self.num_trainable
        return tuple(clip(start, stop, total) for start, stop in self.trainable_parts)

    @property
    def can_be_compact(self) -> bool:
        """Whether the states are in the fp32 layout, and could be in the compact one."""
        return not self.compact and self.spec.is_compact(self.dtype)

    @property
    def codes(self) -> StateCodes | None:
        """The codes of the states; None in the fp32 layout."""
        return self.spec.codes if self.compact else None

    @cached_property
    def layout(self) -> Mapping[SegmentKind, tuple[torch.dtype, int]]:
        """The dtype and number of elements of each segment except the gradient."""
        segments = {SegmentKind.PARAM: (self.dtype, self.kept_elements)}
        trainable = self.kept_trainable
        if trainable:
            dtypes = self.spec.state_dtypes(self.dtype, compact=self.compact)
            segments.update({kind: (dtype, trainable) for kind, dtype in dtypes.items()})
        if trainable and self.compact:
            scale_bytes = align_up(num_scales(trainable) * torch.float32.itemsize)
            segments[SegmentKind.SCALES] = (torch.float32, scale_bytes // torch.float32.itemsize)
        return segments

    def chunk_slice(self, kind: SegmentKind, start: int, stop: int) -> slice:
        """The segments' elements of a chunk [start, stop). The last includes the padding: file blocks move whole."""
        part = segment_slice(kind, start, stop)
        if kind is SegmentKind.SCALES and stop == self.kept_trainable:
            return slice(part.start, self.layout[kind][1])
        return part

    def chunks(self, first: int, last: int, chunk_elements: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces [start, stop) in which an update brings elements [first, last) of the shard into memory.

        They are on a fixed grid, or whole parameters: file offsets stay whole blocks.
        """
        if self.spec.takes_whole:
            places = ((start, start + self.padded(stop - start)) for start, stop in self.kept_parts)
            yield from ((start, stop) for start, stop in places if max(start, first) < min(stop, last))
            return
        for start in range(first // chunk_elements * chunk_elements, last, chunk_elements):
            yield start, min(start + chunk_elements, self.kept_trainable)

    def num_chunks(self, chunk_elements: int) -> int:
        """The number of these pieces of a whole shard."""
        if self.spec.takes_whole:
            return sum(start < stop for start, stop in self.kept_parts)
        return -(-self.kept_trainable // chunk_elements)

    def most_chunk_elements(self, chunk_elements: int) -> int:
        """The elements of the largest of all these pieces, on the rank whose piece is the largest."""
        if self.spec.takes_whole:
            return max((self.padded(slot.num_elements) for slot in self.trainable_slots), default=0)
        return min(chunk_elements, self.kept_trainable)

    @property
    def has_versions(self) -> bool:
        """Whether all of its states have two places: [Note: versions] in update/pipeline.py."""
        return all(self.segments[kind].has_versions for kind in self.layout)

    @property
    def makes_next_version(self) -> bool:
        """Whether an update writes the next version, as the present one belongs to a commit: [Note: durable runs]."""
        return self.committed is Committed.PRESENT

    def flip(self) -> None:
        """Let the next version of the states be the present one. What was read ahead is of the former one."""
        for kind in self.layout:
            if self.segments[kind].has_versions:
                self.segments[kind].flip()
        self.committed = self.committed.flipped()
        self.edits.note()

    @property
    def can_be_pinned(self) -> bool:
        """Whether updates can write its other places alone."""
        return bool(self.kept_trainable) and self.has_versions and self.committed is not Committed.NEXT

    def pin(self) -> Record:
        """Return the record as it is, and have updates write its other places. They are home; `unpin` ends that."""
        self.committed = Committed.PRESENT
        present = {kind: self.segments[kind] for kind in self.layout}
        return replace(self, segments={k: replace(each, place=each.present) for k, each in present.items()})

    def unpin(self) -> None:
        """Let updates write any place again. On the thread of the updates."""
        self.committed = Committed.NONE

    @property
    def updates_on_device(self) -> bool:
        """Whether all segments of the update live on the device."""
        return all(segment.is_on_device for segment in self.segments.values())


def make_record(
    index: int,
    name: str,
    dtype: torch.dtype,
    params: Sequence[tuple[str, torch.nn.Parameter, int | None]],
    *,
    spec: AnySpec,
    shard: ShardSpec = WHOLE,
    resident: bool = False,
    compact: bool = False,
    keeps_whole_params: bool = False,
    is_reduced: bool = False,
) -> Record:
    """Lay out parameters (name, parameter, group index or None): trainable ones first, by group, then frozen ones.

    Trainable and frozen elements are each a whole number of shards. `compact` is the layout of the states, which have
    scales per block: no block belongs to two parameters or shards. A dtype without it keeps the fp32 layout. Where the
    optimizer takes parameters whole, each begins at a file block and lies in one shard: [Note: whole parameters].
    """
    compact = compact and spec.is_compact(dtype)
    block = ALIGN_BYTES if compact else ALIGN_BYTES // 2  # file blocks are whole in the smallest dtype
    granule = COMPACT_BLOCK if compact else PARAM_ALIGN_BYTES // dtype.itemsize
    trained = [item for item in params if item[2] is not None]
    frozen = [item for item in params if item[2] is None]
    trained.sort(key=lambda item: item[2] or 0)
    takes_whole = spec.takes_whole and bool(trained)
    if takes_whole:
        granule = block
    # The small rest is whole on each of perhaps a thousand ranks: a file block for each would be most of it.
    shard_align = block if shard.world_size == 1 or not resident else granule
    num_parts = shard.world_size if takes_whole else 1
    sizes = [align_up(param.numel(), granule) for _, param, _ in trained]
    places, part_elements = _divide_whole(sizes, num_parts)
    # Parameters of no elements alone have gradients and steps, too.
    at_least = 1 if trained or not frozen else 0
    align = shard_align * shard.world_size // num_parts
    part_elements = align_up(max(part_elements, at_least), align)
    num_trainable = part_elements * num_parts
    offsets = [part * part_elements + start for part, start in places]
    position = num_trainable
    for _, param, _ in frozen:
        offsets.append(position)
        position += align_up(param.numel(), granule)
    placed = sorted(zip(offsets, [*trained, *frozen], strict=True), key=lambda item: item[0])
    slots = tuple(
        ParamSlot(param, param_name, param.shape, offset, param.numel(), group, place)
        for place, (offset, (param_name, param, group)) in enumerate(placed)
    )
    return Record(
        index,
        name,
        dtype,
        slots,
        num_trainable,
        align_up(position, shard_align * shard.world_size),
        granule,
        shard,
        spec,
        compact,
        keeps_whole_params,
        resident,
        is_reduced,
    )


def _divide_whole(sizes: Sequence[int], num_parts: int) -> tuple[list[tuple[int, int]], int]:
    """Divide parameters of so many elements among parts, whole: the largest first, each into the emptiest part.

    Returns the part of each and its place there, one behind the other, and the elements of the fullest part.
    """
    loads = [0] * num_parts
    parts = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]) if num_parts > 1 else ():
        parts[index] = loads.index(min(loads))
        loads[parts[index]] += sizes[index]
    ends = [0] * num_parts
    places = []
    for part, size in zip(parts, sizes, strict=True):
        places.append((part, ends[part]))
        ends[part] += size
    return places, max(ends)


def update_ranges(
    record: Record, slots: Iterable[ParamSlot], *, factors: Mapping[int, float] = MappingProxyType({})
) -> list[UpdateRange]:
    """Merge neighbouring `slots` with equal group, step and factor into ranges of the shard, in the record's order.

    `factors` of gradients are by slot, 1 where there is none. Padding behind a parameter belongs to its
    range: its gradient is zero, so it stays zero. An optimizer that takes parameters whole has a range for each.
    """
    ranges: list[UpdateRange] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if slot.group_index is None:
            raise AssertionError(f"{slot.name} is frozen")
        stop = slot.offset + record.padded(slot.num_elements)
        factor = factors.get(slot.index, 1.0)
        shared = (slot.group_index, slot.step, factor)
        if record.spec.takes_whole:
            ranges.append(UpdateRange(slot.offset, slot.offset + slot.num_elements, *shared, slot.shape))
            continue
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and last.stop == slot.offset
            and (last.group_index, last.step, last.factor) == shared
        ):
            ranges[-1] = UpdateRange(last.start, stop, *shared)
        else:
            ranges.append(UpdateRange(slot.offset, stop, *shared))
    return _kept(record, ranges)


def all_ranges(record: Record) -> list[UpdateRange]:
    """Return `update_ranges` of all trainable slots; in most steps all of a group have the same count."""
    if record.spec.takes_whole:
        return update_ranges(record, record.trainable_slots)
    ranges: list[UpdateRange] = []
    for slots in record.trainable_groups:
        first, last = slots[0], slots[-1]
        if first.group_index is None or any(slot.step != first.step for slot in slots):
            return update_ranges(record, record.trainable_slots)
        stop = last.offset + record.padded(last.num_elements)
        ranges.append(UpdateRange(first.offset, stop, first.group_index, first.step))
    return _kept(record, ranges)


def _kept(record: Record, ranges: list[UpdateRange]) -> list[UpdateRange]:
    """Cut ranges of the record to its shard, and count them in that."""
    if record.shard.world_size == 1:
        return ranges
    clipped = ((part, record.shard.clipped(part.start, part.stop, record.num_trainable)) for part in ranges)
    return [replace(part, start=start, stop=stop) for part, (start, stop) in clipped if start < stop]
