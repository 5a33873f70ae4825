"""The weights among the tensors that autograd saves: their handles, and the return from these to the weights.

[Note: weights that find no room]
The plan has room for the units that sites need together; a node of backward may need weights of more units. A weight
that finds no room then is read from its home into memory of its own. While the node waits for a recomputation, which
needs the room for its sites, it holds such a copy from the start. (Where the configuration has units checkpointed, the
plan has room for both unless a device budget is too small for that.)
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import chain

import torch

from offloadzero.access.dtensors import Form
from offloadzero.errors import BudgetError, StateError
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.leased_unit import HOME, LeasedUnit, WeightView


@dataclass(eq=False, slots=True)
class SavedWeight:
    """The object that autograd keeps instead of a weight: the weight's place in its unit."""

    owner: int  # the address of its engine's device memory: models may be nested in each other's forward
    unit: int
    generation: int
    view: WeightView
    version: int  # the version of the parameter


@dataclass(frozen=True)
class SavedShard:
    """The object that autograd keeps instead of a DTensor whose local tensor is a weight."""

    weight: SavedWeight
    form: Form


class SavedWeights:
    """Turns weights that are saved into handles, and handles into weights, fetched again if need be."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._units = executor.units
        self._residency = executor.residency
        # The records that are needed with a record, where that is not the record alone.
        needed_with = executor.residency.needed_with
        self._needed_with = {index: needed for index, needed in needed_with.items() if len(needed) > 1}
        self._uses_again = executor.uses_again
        homes = sorted((u for u in executor.units if u.residency is HOME), key=lambda unit: unit.address)
        self._homes = [unit.record.index for unit in homes]
        self._home_addresses = [unit.address for unit in homes]
        # [low, high): the addresses at which a saved tensor is a weight of this engine.
        self.address_range = executor.address_range

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in device memory of this engine."""
        low, high = self.address_range
        return low <= tensor.data_ptr() < high

    def save(self, tensor: torch.Tensor, address: int) -> SavedWeight:
        """Make a handle for a tensor that is a weight; `address` is its `data_ptr()`.

        Raises StateError where no unit lies there any more.
        """
        unit = self._units[self._residency.current]  # most likely
        # Not `unit.holds(address)`, which takes twice as long.
        if not 0 <= address - unit.address < unit.num_bytes:
            unit = self._unit_at(address)
        views = unit.layout_views
        key = (address - unit.address, tensor.dtype, tensor.shape, tensor.stride())
        view = views.weights.get(key) or views.new_weight(unit, key)
        # An update does not change frozen weights.
        generation = unit.edits if view.is_frozen else unit.generation
        return SavedWeight(unit.owner, unit.record.index, generation, view, unit.clocks[view.place]._version)

    def _unit_at(self, address: int) -> LeasedUnit:
        """The unit whose parameters on the device hold `address`."""
        home = bisect_right(self._home_addresses, address) - 1
        for index in chain((self._homes[home],) if home >= 0 else (), self._residency.present):
            if self._units[index].holds(address):
                return self._units[index]
        raise StateError("a tensor saved for backward lies in a released lease")

    def load(self, saved: SavedWeight, *, may_recompute: bool = False) -> torch.Tensor:
        """Return the weight that `saved` stands for, fetched again if need be: [Note: weights that find no room].

        `may_recompute`: forwards may run before the operation that needs the weight. Raises StateError where the weight
        has changed since it was saved.
        """
        index = saved.unit
        unit, view = self._units[index], saved.view
        # Autograd looks at versions itself, but not for tensors that saved-tensor hooks have taken.
        generation = unit.edits if view.is_frozen else unit.generation
        if generation != saved.generation or unit.clocks[view.place]._version != saved.version:
            raise _changed_since(unit, saved)
        if may_recompute or index in self._needed_with or not self._uses_again(index, unit):
            try:
                for each in self._needed_with.get(index, (index,)):
                    self._executor.touch(each, guard=True)
            except BudgetError:  # every lease is in use
                return view.view_in(self._executor.read_home(unit))
        if unit.views is None:
            raise StateError(f"{unit.record.name} is not on the device")
        weight = unit.views.weights.get(view)
        if weight is None:
            weight = view.make_in(unit.views)
        if may_recompute and self._residency.is_tight:
            self._residency.unguard(self._needed_with.get(index, (index,)))
            return weight.clone()
        return weight


def _changed_since(unit: LeasedUnit, saved: SavedWeight) -> StateError:
    """Make the error about a weight that is not as it was when autograd saved it."""
    view = saved.view
    name = unit.record.slots[view.place].name
    if (unit.edits if view.is_frozen else unit.generation) != saved.generation:
        return StateError(
            f"{name}: its unit was updated between this forward and its backward "
            "(a backward pass through a graph from before the last step? A second backward() of one step, where "
            'weights are updated in backward? Then set "offloadzero": {"update": {"in_backward": false}}. Or '
            "written in backward, by an optimizer that steps in gradient hooks, say? Then write them after "
            "backward())"
        )
    return StateError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{name} is at version {unit.clocks[view.place]._version}; expected version "
        f"{saved.version} instead. Write a weight before its module uses it, or after backward()"
    )
