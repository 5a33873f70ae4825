"""A unit between its home and the device: its present place, and the views of its parameters there.

[Note: views are kept]
Making a view of a weight costs more than using it, and a unit comes back to the same few leases. So views are kept,
by the address of the unit; and units of one layout that take turns in the leases share theirs: a stack of blocks has
the views of one block, which stay in the processor's cache.

[Note: kept views]
A module's own forward may make views of its weights without a copy (`w.t()`, `w[0]`, `torch.detach(w)`). They share the
weights' memory, and a script may keep them: return them, hang them on the module, put them into an autograd Function's
context. While the unit stays they are right. When the unit leaves, its memory becomes another's. So the views of a unit
have a storage of their own at each address, made over the lease's memory, and torch counts its holders: a count above
the engine's own says that something is kept, at the cost of one look. Only then are the holders looked for, among all
of Python's objects, and each becomes a remote tensor or, in a graph, a `KeptView`: both read and write the weight
wherever it is. A view that only C++ holds is an error.

A resident unit stays where it is, and kept views of it stay valid. Its updates run behind step(), so step() waits for
those of a unit that has kept views.

A write through a kept view between the forward and the moment when the unit leaves goes to memory that is given up:
the next look at the unit raises an error. It goes by the parameter's version, which counts its views' writes. While a
script has gathered the parameter, that counts the script's own writes as well: a write through a kept view of the same
parameter is not told from these, and is not noticed.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from offloadzero.access.parameter import classes_of, keep_view, tensors_over
from offloadzero.core.torch_private import (
    DisableTorchFunctionSubclass,
    set_data,
    storage_use_count,
    with_own_storage,
)
from offloadzero.errors import StateError
from offloadzero.memory.arena import Lease
from offloadzero.memory.device import Stream
from offloadzero.memory.lanes import LaneTicket
from offloadzero.memory.store import Segment
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

MAX_WEIGHT_VIEWS = 256  # kept for each layout
MAX_ADDRESSES = 256  # addresses of leases


class Residency(Enum):
    """The place of a unit's parameters, as the device sees it."""

    RELEASED = "released"
    FETCHING = "fetching"
    READY = "ready"
    HOME = "home"  # they live on the device


# Looking a member up in its enum costs more than comparing with it, and each use of a weight compares.
RELEASED, FETCHING, READY, HOME = Residency


class LayoutViews:
    """The views of units of one layout, at the addresses of their leases: [Note: views are kept]."""

    def __init__(self, record: Record, device: torch.device) -> None:
        fill = float("nan") if record.dtype.is_floating_point else 0
        placeholder = torch.full((), fill, dtype=record.dtype, device=device)
        self._slots = record.slots
        self._dtype, self._num_elements = record.dtype, record.num_elements
        self.placeholders = tuple(placeholder.expand(slot.shape) for slot in record.slots)
        # The forms that autograd saves, made by `new_weight`.
        self.weights: dict[tuple[Any, ...], WeightView] = {}
        self._at: dict[int, UnitViews] = {}

    def in_lease(self, lease: Lease) -> UnitViews:
        """Return the views of a unit in a lease, whose memory must last as long as this object."""
        return self._at.get(lease.address) or self.in_memory(lease.view(self._dtype, self._num_elements))

    def in_memory(self, flat: torch.Tensor) -> UnitViews:
        """Return new views of a unit in `flat`, shape (num_elements,), whose memory must last as long as this."""
        if len(self._at) == MAX_ADDRESSES:
            del self._at[next(iter(self._at))]
        views = UnitViews(self._slots, flat)
        self._at[views.address] = views
        return views

    def new_weight(self, unit: LeasedUnit, key: tuple[Any, ...]) -> WeightView:
        """Make a form of saved weights. `key`: byte offset in the unit, dtype, size and stride."""
        if len(self.weights) == MAX_WEIGHT_VIEWS:
            self.weights.clear()
            for views in self._at.values():
                views.weights.clear()
        view = self.weights[key] = WeightView(unit, *key)
        return view


class UnitViews:
    """A unit's memory at one address, in a storage of its own: [Note: kept views]."""

    def __init__(self, slots: Sequence[ParamSlot], flat: torch.Tensor) -> None:
        self.memory = flat
        self.address = flat.data_ptr()
        with torch.inference_mode(False), torch.no_grad():  # an evaluation's views are used in training too
            self.flat = with_own_storage(flat.view(torch.uint8)).view(flat.dtype)
            self.params = tuple(slot.view_in(self.flat) for slot in slots)
        self._flats = {flat.dtype: self.flat}
        self.weights: dict[WeightView, torch.Tensor] = {}  # the forms that autograd has saved
        self._storage = int(self.flat.untyped_storage()._cdata)
        self._num_of_params = storage_use_count(self._storage) - len(self._flats)

    def num_holders(self) -> int:
        """The number of tensors (and storages) that share the memory with these views."""
        # Counted as they are: two threads of a backward may both make a form, of which one stays.
        return storage_use_count(self._storage) - self._num_of_params - len(self._flats) - len(self.weights)

    def make_weight(
        self, form: WeightView, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], start: int
    ) -> torch.Tensor:
        """Make a weight in a form that autograd saved, `start` elements of `dtype` from the unit's first byte."""
        with torch.inference_mode(False), torch.no_grad():
            flat = self._flats.get(dtype)
            if flat is None:
                flat = self._flats[dtype] = self.flat.view(dtype)
            weight = self.weights[form] = flat.as_strided(size, stride, start)
            return weight

    def holders(self) -> Iterator[torch.Tensor]:
        """Yield the holders that are ordinary tensors of Python's, until no other is left."""
        own = {id(one) for one in (*self._flats.values(), *self.params, *self.weights.values())}
        for tensors in tensors_over(self._storage):
            yield from (one for one in tensors if id(one) not in own)
            if not self.num_holders():
                return


@dataclass(eq=False)
class LeasedUnit:
    """The parameters of one record as the device sees them."""

    record: Record
    residency: Residency
    layout_views: LayoutViews  # shared by the streamed units of one layout
    params: tuple[torch.nn.Parameter, ...]  # by slot
    home: Segment
    num_bytes: int
    owner: int  # the address of the engine's device memory
    frozen_from: int  # bytes that an update changes: the frozen weights come last
    flat: torch.Tensor | None = None  # the parameters on the device, shape (num_elements,)
    views: UnitViews | None = None  # of `flat`
    is_kept: bool = False  # `flat` had other holders when the last forward ended: [Note: kept views]
    address: int = 0  # the address of `flat`; 0: none
    lease: Lease | None = None
    fetched: LaneTicket | None = None
    arrived_for: list[Stream | None] = field(default_factory=list)  # the streams that have waited for it
    updated: Ticket = FINISHED  # the ticket of the last update, before any fetch or use
    generation: int = 0  # counts updates: a saved tensor of an older one is refused
    edits: int = 0  # counts the user's writes, in the same way for frozen weights
    shown_at: int = -1  # the address to which the parameters point; 0: placeholders; -1: various
    gathered: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot: its memory for the script
    versions: tuple[int, ...] = ()  # the parameters' versions when their module's forward began

    def __post_init__(self) -> None:
        with DisableTorchFunctionSubclass():
            # Each shares its parameter's version, and answers faster than a parameter that is away.
            self.clocks = [torch.detach(param) for param in self.params]
        self._starts = [slot.offset * self.record.dtype.itemsize for slot in self.record.slots]
        # torch.utils.swap_tensors() would leave the parameter without its place here; it refuses tensors with weak
        # references.
        self._not_to_be_swapped = [weakref.ref(param) for param in self.params]
        self._originals = [type(param) for param in self.params]
        self._present = [classes_of(original)[0] for original in self._originals]
        self._away = [classes_of(original)[1] for original in self._originals]

    def put_at(self, views: UnitViews) -> None:
        """Set the parameters' memory on the device."""
        self.flat = views.memory
        self.address = views.address
        self.views = views
        self.is_kept = False

    # --- to its lease, and away ---

    def begin_fetch(self, lease: Lease, views: UnitViews, fetched: LaneTicket) -> None:
        """The parameters are on their way into `lease`, where `views` are their views."""
        self.fetched = fetched
        self.lease = lease
        self.arrived_for = []
        self.put_at(views)
        self.residency = FETCHING

    def arrive(self, stream: Stream | None) -> None:
        """Note that work launched on `stream` from now on finds the parameters there."""
        self.residency = READY
        self.arrived_for.append(stream)

    def leave(self) -> Lease:
        """The parameters are away; gives the lease in which they were."""
        if self.lease is None:
            raise AssertionError(f"{self.record.name} holds no lease")
        lease, self.lease = self.lease, None
        self.flat = self.views = None
        self.address, self.is_kept = 0, False
        self.residency = RELEASED
        return lease

    def change(self, updated: Ticket, *, is_edit: bool = False) -> None:
        """The weights are others from here on: the trainable ones, or by an edit any; a use comes after `updated`."""
        self.updated = updated
        self.generation += 1
        self.edits += is_edit

    # --- the parameters themselves ---

    def show(self) -> None:
        """Point the parameters at the unit's memory, or at a placeholder that keeps their shape.

        The placeholder is one NaN expanded: autograd's shape checks hold, and an unforeseen use shows.
        """
        if self.shown_at != self.address:
            self._point()
            for place in self.gathered:
                self._show_gathered(place)

    def _point(self) -> None:
        views = self.layout_views.placeholders if self.views is None else self.views.params
        with DisableTorchFunctionSubclass():
            list(map(set_data, self.params, views))
        self.shown_at = self.address

    def show_copy(self, place: int) -> None:
        """Point the parameter of slot `place` at a copy of its own until the unit is shown elsewhere.

        Raises StateError where the unit is not on the device.
        """
        if self.flat is None:
            raise StateError(f"{self.record.name} is not on the device")
        with DisableTorchFunctionSubclass():
            set_data(self.params[place], self.record.slots[place].view_in(self.flat).clone())
        self.shown_at = -1

    def enter_forward(self) -> None:
        """Make the parameters ordinary ones for the forward of their module: [Note: a parameter away]."""
        if self.shown_at != self.address:
            self._point()
        for param, present in zip(self.params, self._present, strict=True):
            param.__class__ = present
        # Else writes through a kept view are committed with this forward's writes.
        if not self.is_kept:
            self.versions = tuple([clock._version for clock in self.clocks])
        elif self.gathered:
            self._pass_over(self.gathered)

    def leave_forward(self) -> None:
        """Make the parameters `AwayParameter`s again."""
        for param, away in zip(self.params, self._away, strict=True):
            param.__class__ = away
        # The forward's writes are committed already.
        self.is_kept = self.views is not None and self.views.num_holders() > len(self.params)
        if self.is_kept:
            self.versions = tuple([clock._version for clock in self.clocks])
        for place in self.gathered:
            self._show_gathered(place)

    def places_written(self) -> list[int]:
        """The slots whose parameters an operation wrote in place during the forward that now ends."""
        versions = tuple([clock._version for clock in self.clocks])
        if versions == self.versions:
            return []
        return [i for i, (now, then) in enumerate(zip(versions, self.versions, strict=True)) if now != then]

    # --- views of a forward that is over: [Note: kept views] ---

    def expect_no_late_write(self) -> None:
        """Raise if a kept view was written after the forward that made it, and the write is not committed."""
        if not self.is_kept:
            return
        # A kept view shares the version of its parameter, which a script may write where it has gathered it.
        if written := [place for place in self.places_written() if place not in self.gathered]:
            raise StateError(
                f"{self.record.slots[written[0]].name} was written through a view that its module's forward made, "
                "after that forward: write the parameter itself (under torch.no_grad()), or keep a clone() of the view"
            )

    def _pass_over(self, places: Iterable[int]) -> None:
        """Take what was written into gathered parameters, which is committed as theirs, for no write of a view."""
        versions = list(self.versions)
        for place in places:
            versions[place] = self.clocks[place]._version
        self.versions = tuple(versions)

    def stays_kept(self) -> bool:
        """Whether tensors other than the parameters look at the unit, which is on the device."""
        return self.views is not None and self.views.num_holders() > len(self.params) - len(self.gathered)

    def give_up(self, views: UnitViews) -> None:
        """Give up the memory of the unit's former `views`, which has holders: tensors over it become kept views.

        Raises StateError where something that is no Python tensor holds it.
        """
        for tensor in views.holders():
            byte_offset = tensor.data_ptr() - views.flat.data_ptr()
            place = self.place_at(byte_offset)
            keep_view(tensor, self.params[place], byte_offset - self._starts[place])
        if views.num_holders():
            raise StateError(
                f"{self.record.name}: something that is no Python tensor (or was hidden by gc.freeze()) keeps a view "
                f"of its weights, which leave the device ({', '.join(slot.name for slot in self.record.slots)}): keep "
                "a clone()"
            )

    def gather(self, place: int, value: torch.Tensor) -> None:
        """Make the parameter of slot `place` an ordinary one with memory of its own."""
        self.gathered[place] = value
        self._show_gathered(place)

    def _show_gathered(self, place: int) -> None:
        param = self.params[place]
        with DisableTorchFunctionSubclass():
            set_data(param, self.gathered[place])
        param.__class__ = self._originals[place]
        self.shown_at = -1

    def gathered_now(self) -> dict[int, torch.Tensor]:
        """The memory of gathered parameters, by slot, where the script may have given them other memory since."""
        for place in self.gathered:
            param = self.params[place]
            if type(param) is self._originals[place]:  # else it is in its module's forward
                self.gathered[place] = param.data
        return self.gathered

    def scatter(self, place: int) -> torch.Tensor:
        """Undo `gather`; return the memory that the parameter has now."""
        param = self.params[place]
        value = param.data
        if self.is_kept:
            self._pass_over([place])
        del self.gathered[place]
        param.__class__ = self._away[place]
        self.shown_at = -1
        self.show()
        return value

    # --- the parameters' place ---

    def holds(self, address: int) -> bool:
        """Whether `address` lies in the unit's parameters on the device."""
        return 0 <= address - self.address < self.num_bytes

    def place_at(self, byte_offset: int) -> int:
        """The slot of the parameter at a byte offset."""
        return bisect_right(self._starts, byte_offset) - 1


class WeightView:
    """A form in which tensors of a unit's weights are saved, and these tensors at the addresses of its leases."""

    def __init__(
        self,
        unit: LeasedUnit,
        byte_offset: int,
        dtype: torch.dtype,
        size: torch.Size,
        stride: tuple[int, ...],
    ) -> None:
        self.is_frozen = byte_offset >= unit.frozen_from
        self.place = unit.place_at(byte_offset)
        self._byte_offset = byte_offset
        self._dtype = dtype
        self._size = size
        self._stride = stride

    def make_in(self, views: UnitViews) -> torch.Tensor:
        """Make the tensor at the address of `views`, which keep it."""
        start = self._byte_offset // self._dtype.itemsize
        return views.make_weight(self, self._dtype, self._size, self._stride, start)

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the unit's parameters, shape (num_elements,)."""
        typed = flat.view(self._dtype)
        start = typed.storage_offset() + self._byte_offset // self._dtype.itemsize
        return typed.as_strided(self._size, self._stride, start)
