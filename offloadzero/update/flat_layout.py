"""The places of parameters in a unit's flat memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from offloadzero.core.segments import SegmentKind
from offloadzero.memory.mapped_files import FileRange


@dataclass(eq=False)
class ParamSlot:
    """One parameter's place in its record."""

    param: torch.nn.Parameter
    name: str
    shape: torch.Size
    offset: int  # elements from the start of the record
    num_elements: int
    group_index: int | None  # of the optimizer's param_groups; None: frozen
    index: int = 0  # in its record's slots
    step: int = 0  # updates so far
    source: FileRange | None = None  # where the value of a frozen one lies already: [Note: weights in place]
    num_writes: Counter[SegmentKind] = field(default_factory=Counter)  # other than updates

    @property
    def trainable(self) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.group_index is not None

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of `flat`, in its shape."""
        return flat[self.offset : self.offset + self.num_elements].view(self.shape)


class FlatViews(NamedTuple):
    """The views into a record's flat memory: by slot, and between the slots."""

    slots: tuple[torch.Tensor, ...]
    padding: tuple[torch.Tensor, ...]


class SlotViews:
    """The views of a record's parameters at the few fixed addresses where leases place it.

    Making a view costs more than using it: the views at the last addresses are kept. Records of one layout that take
    turns in the same leases may share them.
    """

    MAX_ADDRESSES = 256

    def __init__(self, slots: Sequence[ParamSlot], padding: Sequence[tuple[int, int]] = ()) -> None:
        self._slots = slots
        self._padding = padding
        self._views: dict[int, FlatViews] = {}

    def at(self, flat: torch.Tensor) -> FlatViews:
        """Return the views in `flat`; the memory must last as long as this object."""
        address = flat.data_ptr()
        views = self._views.get(address)
        if views is None:
            if len(self._views) == self.MAX_ADDRESSES:
                del self._views[next(iter(self._views))]
            with torch.inference_mode(False):  # an evaluation's views are used in training too
                views = self._views[address] = self.of(flat)
        return views

    def of(self, flat: torch.Tensor) -> FlatViews:
        """Return new views of memory that need not last."""
        return FlatViews(
            tuple(slot.view_in(flat) for slot in self._slots),
            tuple(flat[start:stop] for start, stop in self._padding),
        )


def slot_layout(slots: Sequence[ParamSlot]) -> Hashable:
    """Return a key that is equal for slots that lie in the same way in records of the same dtype."""
    return tuple((slot.offset, slot.shape) for slot in slots)
