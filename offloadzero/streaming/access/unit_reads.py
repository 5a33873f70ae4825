"""Reads of units outside of their modules' forwards, and the parameters that a script has gathered."""

from __future__ import annotations

import torch

from offloadzero.core.torch_private import outside_of_transforms
from offloadzero.errors import BudgetError
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.leased_unit import HOME


class UnitReads:
    """Brings a unit's parameters to a script that reads or gathers them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._units = executor.units
        self.gathered: set[int] = set()  # units of which a script has gathered some parameters

    def on_device(self, index: int) -> torch.Tensor | None:
        """Return the unit's parameters for an operation now, shape (num_elements,); None where its home should be read.

        That is so between steps, when a fetch for one parameter would drive out units that the next step needs, and
        where every lease is in use.
        """
        unit = self._units[index]
        if unit.residency is not HOME and not self._executor.is_running:
            return None  # in another thread's forward, too: units on the device may leave during the read
        if not self._executor.pins[index]:
            try:
                with outside_of_transforms():
                    self._executor.touch(index, guard=True, evaluating=self._executor.is_evaluating)
            except BudgetError:  # every lease is in use
                return None
        return unit.flat

    @property
    def is_computing(self) -> bool:
        """Whether a module is in its forward, or backward runs an operation on this thread."""
        return self._executor.is_running

    def forget_written(self, index: int) -> None:
        """Have the weights fetched again after the unit's forward: what was written in it does not go home."""
        self._executor.forget_written(index)

    def show(self, index: int, *, place: int, as_copy: bool) -> None:
        """Bring a unit to the device for a read of one parameter and point its parameters there.

        `as_copy`: that parameter points at a copy of its own, for a value that may be kept longer than the unit stays.
        """
        unit = self._units[index]
        if place in unit.gathered:  # a script has it in memory of its own
            return
        try:
            self._executor.touch(index, guard=True, evaluating=self._executor.is_evaluating)
        except BudgetError:  # every lease is in use: operations take it from its home
            return
        unit.show()
        if as_copy and unit.residency is not HOME:
            unit.show_copy(place)

    def gather(self, index: int, place: int, value: torch.Tensor) -> None:
        """Make the parameter of slot `place` an ordinary one in `value` until `scatter`."""
        self._units[index].gather(place, value)
        self.gathered.add(index)

    def scatter(self, index: int, place: int) -> torch.Tensor:
        """Undo `gather`; return the memory that the parameter has now."""
        unit = self._units[index]
        value = unit.scatter(place)
        if not unit.gathered:
            self.gathered.discard(index)
        return value

    def gathered_in(self, index: int) -> dict[int, torch.Tensor]:
        """The memory of the parameters that a script has gathered, by slot."""
        return self._units[index].gathered_now()

    def pinned_parameters(self, index: int) -> torch.Tensor | None:
        """The parameters of a unit whose module is in its forward, shape (num_elements,); else None."""
        return self._units[index].flat if self._executor.pins[index] else None
