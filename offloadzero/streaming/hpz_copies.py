"""Copies of gathered weights that the ranks of a machine keep together: ZeRO++'s hpZ.

[Note: near copies]
The first gather of a unit after its weights have changed goes over all ranks. Each of the `node_ranks` consecutive ones
that count as a machine then keeps its part of the result, and the gathers up to the next change, those of backward and
of later micro batches, take these parts and go over these ranks alone. They have the bits of the first gather, also
where that went as codes. Which kind a gather is follows from the order of fetches and changes, which the ranks, all of
them, compare before each.

The parts lie on the device where the weights' homes do, and in host memory where these are off the device: a drive is
read once for each change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from offloadzero.memory.lanes import Accelerator
from offloadzero.observe.timeline import D2H
from offloadzero.ranks.group import Collectives
from offloadzero.streaming.leased_unit import LeasedUnit
from offloadzero.update.local_elements import gathered_regions
from offloadzero.update.records import Record


class NearCopies:
    """This rank's parts of the copies; what it keeps of them is asked on one thread and moved by one lane."""

    def __init__(
        self, accelerator: Accelerator, memory: Mapping[int, Tensor], *, weights: Collectives
    ) -> None:
        """Use `memory`, by record, uint8, of `near_copy_bytes`; `weights` is a channel of the ranks of a machine."""
        self._accelerator = accelerator
        self._memory = memory
        self._weights = weights
        self._generations: dict[
            int, int
        ] = {}  # by record: of the weights that the copy has, or is about to get

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
