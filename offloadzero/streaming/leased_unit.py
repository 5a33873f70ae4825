"""A unit between its home and the device: where it is, and the ways to look at it there (floor 5).

[Note: views are kept]
To make a view of a weight costs more than to use it, and a unit comes back to the same few leases. So views are kept,
by the address of the unit; and units of one layout that take turns in the leases share theirs: a stack of blocks has
the views of one block, which stay in the processor's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from offloadzero.errors import StateError
from offloadzero.memory.arena import Lease
from offloadzero.memory.lanes import LaneTicket
from offloadzero.memory.store import Segment
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.optim.records import Record, SlotViews

MAX_WEIGHT_VIEWS = 256  # kept of a layout


class Residency(Enum):
    """Where the parameters of a unit are, seen from the device."""

    RELEASED = "released"
    FETCHING = "fetching"
    READY = "ready"
    HOME = "home"  # they live on the device


# Looking a member up in its enum costs more than comparing with it, and each use of a weight compares.
RELEASED, FETCHING, READY, HOME = Residency


class Looks:
    """The ways to look at units of one layout: [Note: views are kept]."""

    def __init__(self, record: Record, device: torch.device) -> None:
        fill = float("nan") if record.dtype.is_floating_point else 0
        placeholder = torch.full((), fill, dtype=record.dtype, device=device)
        self.views = SlotViews(record.slots)  # of the parameters
        self.placeholders = tuple(placeholder.expand(slot.shape) for slot in record.slots)
        self.weights: dict[tuple[Any, ...], WeightView] = {}  # what autograd saves


@dataclass(eq=False)
class LeasedUnit:
    """The parameters of one record as the device sees them."""

    record: Record
    residency: Residency
    looks: Looks  # shared by the streamed units of one layout
    params: tuple[torch.nn.Parameter, ...]  # by slot
    home: Segment
    num_bytes: int
    frozen_from: int  # bytes of what an update changes: the frozen weights come last
    flat: torch.Tensor | None = None  # the parameters on the device, shape (num_elements,)
    address: int = 0  # of `flat`; 0: none
    lease: Lease | None = None
    fetched: LaneTicket | None = None
    updated: Ticket = FINISHED  # the last update; a fetch or a use comes after it
    generation: int = 0  # counts updates: a saved tensor of an older one is refused
    edits: int = 0  # the same for frozen weights, which no update changes: counts writes by the user
    has_lent: bool = False  # some parameters point at copies of their own

    def put_at(self, flat: torch.Tensor | None) -> None:
        """The parameters are on the device, or no more."""
        self.flat = flat
        self.address = 0 if flat is None else flat.data_ptr()

    def holds(self, address: int) -> bool:
        """Whether `address` is that of one of its parameters on the device."""
        return 0 <= address - self.address < self.num_bytes

    def save(self, tensor: torch.Tensor, address: int) -> SavedWeight:
        """A handle for a tensor at `address`, where weights of this unit are."""
        key = (address - self.address, tensor.dtype, tensor.size(), tensor.stride())
        weights = self.looks.weights
        view = weights.get(key)
        if view is None:
            if len(weights) == MAX_WEIGHT_VIEWS:
                weights.clear()
            view = weights[key] = WeightView(self, *key)
        return SavedWeight(self.record.index, self.generation_of(view), view)

    def generation_of(self, view: WeightView) -> int:
        """Of the weights that `view` looks at: an update leaves the frozen ones as they are."""
        return self.edits if view.is_frozen else self.generation


class WeightView:
    """A way in which saved tensors look at a unit's weights, and these tensors at the addresses of its leases."""

    def __init__(
        self,
        unit: LeasedUnit,
        byte_offset: int,
        dtype: torch.dtype,
        size: torch.Size,
        stride: tuple[int, ...],
    ) -> None:
        self.is_frozen = byte_offset >= unit.frozen_from
        self._at: dict[int, torch.Tensor] = {}  # by the address of the unit
        self._byte_offset = byte_offset
        self._dtype = dtype
        self._size = size
        self._stride = stride

    def of(self, unit: LeasedUnit) -> torch.Tensor:
        """The tensor, now that the unit is on the device."""
        view = self._at.get(unit.address)
        if view is None:
            if unit.flat is None:
                raise StateError(f"{unit.record.name} is not on the device")
            flat = unit.flat.view(self._dtype)
            start = flat.storage_offset() + self._byte_offset // self._dtype.itemsize
            if len(self._at) == SlotViews.MAX_ADDRESSES:
                self._at.clear()
            view = self._at[unit.address] = flat.as_strided(self._size, self._stride, start)
        return view


@dataclass(eq=False, slots=True)
class SavedWeight:
    """What autograd keeps instead of a weight: where it lies in its unit."""

    unit: int
    generation: int
    view: WeightView
