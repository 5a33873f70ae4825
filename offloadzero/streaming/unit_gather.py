"""The parameters of units, made whole from the shards of all ranks as they are fetched.

[Note: what a rank fetches]
Each rank brings its shard of a unit from its own home into the shard's place in the unit's lease, over its own link and
from its own drive, and an all-gather in place fills the rest in. All of it is one task of the lane `fetch`, so the
collectives come in the order in which the fetches were submitted: [Note: collectives in one order].

That order must follow from the order of use alone. With a single rank a unit that has arrived but has not been used may
leave again at once; when it has arrived is a matter of time. Here it counts as arriving until the computation has
waited for it. And with a single rank a unit that has all of its gradients is free to leave right then; ranks whose
data go different ways (experts that got no token) see this at different moments. Here the end of a use is the next use,
or the end of the backward.

[Note: hpZ copies]
The first gather of a unit after its weights have changed goes over all ranks. Each of the `node_ranks` consecutive ones
that count as a machine then keeps its part of the result, and the gathers up to the next change, those of backward and
of later micro batches, take these parts and go over these ranks alone. They have the bits of the first gather, also
where that went as codes. Which kind a gather is follows from the order of fetches and changes, which the ranks, all of
them, compare before each.

The parts lie on the device where the weights' homes do, and in host memory where these are off the device: a drive is
read once for each change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from offloadzero.core.torch_private import NO_GRAPH_TASK, current_graph_task_id
from offloadzero.memory.lanes import Accelerator
from offloadzero.observe.timeline import D2H
from offloadzero.ranks.group import Collectives, Group
from offloadzero.streaming.coded_gather import CodedGather
from offloadzero.streaming.leased_unit import LeasedUnit
from offloadzero.update.kept_elements import gathered_regions, kept_regions
from offloadzero.update.records import Record


class HpzCopies:
    """This rank's parts of the copies; what it keeps of them is asked on one thread and moved by one lane."""

    def __init__(
        self, accelerator: Accelerator, memory: Mapping[int, Tensor], *, weights: Collectives
    ) -> None:
        """Use `memory`, by record, uint8, of `near_copy_bytes`; `weights` is a channel of the ranks of a machine."""
        self._accelerator = accelerator
        self._memory = memory
        self._weights = weights
        # By record: of the weights that the copy has, or is about to get.
        self._generations: dict[int, int] = {}

    def is_current(self, unit: LeasedUnit) -> bool:
        """Return whether the copy has the unit's weights, once all fetches have run that were submitted so far."""
        return self._generations.get(unit.record.index) == unit.generation

    def renew(self, unit: LeasedUnit) -> None:
        """Note that the fetch that is submitted now fills the copy."""
        self._generations[unit.record.index] = unit.generation

    def forget(self, index: int) -> None:
        """Note that the weights of a record have changed without an update."""
        self._generations.pop(index, None)

    # --- on the lane ---

    def keep(self, record: Record, params: Tensor) -> None:
        """Fill the copy from all of a record's parameters, shape (num_elements,)."""
        for region, part in self._parts(record, params):
            if record.param_home.is_on_device:
                self._accelerator.copy_inside(part, region[self._own(region)])
            else:
                self._accelerator.copy(part, region[self._own(region)], lane=D2H)

    def gather(self, record: Record, params: Tensor, label: str) -> None:
        """Fill `params`, shape (num_elements,), from the copies of all ranks of the machine."""
        copy = self._accelerator.copy_inside if record.param_home.is_on_device else self._accelerator.copy
        for region, part in self._parts(record, params):
            copy(region[self._own(region)], part)
            self._weights.all_gather(region, label)

    def _own(self, region: Tensor) -> slice:
        return slice(*self._weights.spec.kept_range(region.numel()))

    def _parts(self, record: Record, params: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each region of the parameters, and this rank's part of its copy."""
        memory, start = self._memory[record.index].view(torch.uint8), 0
        for region in gathered_regions(record, params):
            num_bytes = self._weights.spec.kept_elements(region.numel()) * record.dtype.itemsize
            yield region, memory[start : start + num_bytes].view(record.dtype)
            start += num_bytes


class Gather(NamedTuple):
    """One of the two ways in which a unit becomes whole in its lease; each is a call on the lane's thread."""

    with_shard: Callable[[torch.Tensor, torch.Tensor], None] | None  # given the lease, and this rank's shard
    from_copies: Callable[[torch.Tensor], None] | None  # given the lease: [Note: hpZ copies]


class UnitGather:
    """Gathers units of which each rank keeps a shard: [Note: what a rank fetches]. With one rank there are none."""

    def __init__(
        self, group: Group, accelerator: Accelerator, *, coded: CodedGather, near: HpzCopies | None
    ) -> None:
        self._group = group
        self._accelerator = accelerator
        self._coded = coded
        self._near = near
        self.before_backward: Callable[[], None] | None = None  # called before each fetch of a backward

    def begin(self, unit: LeasedUnit) -> Gather:
        """Count the fetch of a unit that is gathered as the next one, and return how it becomes whole."""
        if self.before_backward is not None and current_graph_task_id() != NO_GRAPH_TASK:
            self.before_backward()
        group, near = self._group, self._near
        group.order.note(unit.record.index)
        sums = group.order.value, group.writes.value
        if near is not None and near.is_current(unit):
            return Gather(None, functools.partial(self._gather_near, near, unit.record, *sums))
        if near is not None:
            near.renew(unit)
        return Gather(functools.partial(self._gather, unit.record, *sums), None)

    def forget(self, index: int) -> None:
        """Have the unit's next fetch read the home, and not the copy that the ranks of a machine keep."""
        if self._near is not None:
            self._near.forget(index)

    # --- on the lane's thread; `order` sums up the fetches until then, `writes` the writes ---

    def _gather_near(
        self, near: HpzCopies, record: Record, order: int, writes: int, target: torch.Tensor
    ) -> None:
        label = f"{record.name}.param"
        self._group.orders.expect_same(order, writes, label)
        near.gather(record, target, label)

    def _gather(
        self, record: Record, order: int, writes: int, target: torch.Tensor, kept: torch.Tensor
    ) -> None:
        label = f"{record.name}.param"
        self._group.orders.expect_same(order, writes, label)
        shards, first = kept_regions(record, kept), 0
        for region, shard in zip(gathered_regions(record, target), shards, strict=True):
            self._gather_region(record, first, region, shard, label)
            first += region.numel()
        if self._near is not None:
            self._near.keep(record, target)

    def _gather_region(
        self, record: Record, first: int, region: torch.Tensor, shard: torch.Tensor, label: str
    ) -> None:
        """Gather one region, which begins with the record's element `first`."""
        wire = self._coded.region_at(record, first)
        is_here = record.param_home.is_on_device
        copy = self._accelerator.copy_inside if is_here else self._accelerator.copy
        if wire is not None:
            self._coded.gather(wire, region, shard, self._group.weights, label, copy=copy)
            return
        start, stop = record.shard.kept_range(region.numel())
        copy(region[start:stop], shard)
        self._group.weights.all_gather(region, label)
