"""Tiers: places with a capacity where data have their homes.

[Note: what is asked of a tier]
Code that plans, moves or computes data asks a tier for its abilities, and never which one it is: whether kernels of the
device address it, whether code on the host does, and for reads and writes. The plan has names alone, which answer the
first two as their tiers do. Beyond that a name says where bytes count, and what a configuration calls the tier.

The memory of a device counts as the device's alone. With the CPU as the device code on the host could address it, but
that would be another way than with any other device.
"""

# ruff: noqa: ARG002 - a tier may not need all that it is given

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from offloadzero.core.segments import TierName
from offloadzero.memory.arena import ALIGN_BYTES, Arena, staggered
from offloadzero.memory.lanes import NO_FENCE, Accelerator, Fence, LaneTicket
from offloadzero.memory.mapped_files import FileRange
from offloadzero.memory.tickets import FINISHED, Failures, Ticket

# Transfers that the computation waits for overtake those that only have to be home in time.
FETCH_PRIORITY = 0
UPDATE_PRIORITY = 1
SAVE_PRIORITY = 2  # for those that nothing waits for


@dataclass(frozen=True)
class Extent:
    """`num_bytes` from `offset` on in the striped space of all files."""

    offset: int
    num_bytes: int


OnePlace = torch.Tensor | Extent


@dataclass(eq=False)
class TwoPlaces:
    """Two places of one home, each as large as all of it: [Note: versions] in update/pipeline.py."""

    present: OnePlace  # reads and writes of the home go here
    next: OnePlace

    def flip(self) -> None:
        """Let the next one be the present one. Transfers that have begun stay where they are."""
        self.present, self.next = self.next, self.present


class Part(NamedTuple):
    """A home of its own for the elements from `start` on of another one."""

    start: int
    home: Home

    @property
    def stop(self) -> int:
        """The element behind the last."""
        return self.start + self.home.num_elements


@dataclass(frozen=True, eq=False)
class InParts:
    """Several places of one home, in their order. What lies between them is padding, and reads as zeros."""

    parts: list[Part]


# Typed memory, shape (num_elements,); a range of the swap files; two of either; a range of a file that is not ours; or
# some of these.
Place = OnePlace | TwoPlaces | FileRange | InParts


class Tier(Protocol):
    """A place with a capacity: [Note: what is asked of a tier]."""

    name: TierName  # in the configuration and in the plan

    @property
    def is_device(self) -> bool:
        """Whether kernels that are launched on the device address the tier."""
        return self.name.is_device

    @property
    def is_host_memory(self) -> bool:
        """Whether code on the host addresses the tier. Copies between it and the device then need no staging."""
        return self.name.is_host_memory

    def allocate(self, dtype: torch.dtype, num_elements: int, label: str) -> OnePlace:
        """Allocate a place, which holds zeros. Raises BudgetError."""

    def read(
        self, home: Home, target: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Copy elements [start, start + target.numel()) of `home` into host memory."""

    def write(
        self, home: Home, source: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Copy host memory to elements [start, start + source.numel()) of `home`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Home:
    """The place where `num_elements` of `dtype` live, and the tier that it belongs to."""

    label: str  # for errors: `blocks.3.exp_avg`
    dtype: torch.dtype
    num_elements: int
    backing: Tier
    place: Place

    @property
    def tier(self) -> TierName:
        """The tier's name, as in the plan."""
        return self.backing.name

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return self.num_elements * self.dtype.itemsize

    @cached_property
    def is_on_device(self) -> bool:
        """Whether kernels of the device address it."""
        return self.backing.is_device

    @cached_property
    def is_in_host_memory(self) -> bool:
        """Whether code on the host addresses it."""
        return self.backing.is_host_memory

    @property
    def present(self) -> Place:
        """The place of its data: of two the present one."""
        return self.place.present if isinstance(self.place, TwoPlaces) else self.place

    @property
    def is_in_memory(self) -> bool:
        """Whether it is memory, of the device or of the host."""
        return isinstance(self.present, torch.Tensor)

    @property
    def memory(self) -> torch.Tensor:
        """The memory of a home in memory, shape (num_elements,)."""
        place = self.present
        if not isinstance(place, torch.Tensor):
            raise AssertionError(f"{self.label} lives on {self.tier.value}, not in memory")
        return place

    @property
    def extent(self) -> Extent | None:
        """The range of the swap files of a home that is one."""
        place = self.present
        return place if isinstance(place, Extent) else None

    @property
    def parts(self) -> Sequence[Part]:
        """The homes that it consists of: itself alone, unless it is in parts."""
        return self.place.parts if isinstance(self.place, InParts) else (Part(0, self),)

    @cached_property
    def lead_bytes(self) -> int:
        """The bytes behind a border of ALIGN_BYTES at which memory for all of it begins best, fewer than those.

        Tensors of a file begin anywhere. Memory that begins as far behind a border as they do gets them without a copy.
        """
        for start, home in self.parts:
            if isinstance(home.place, FileRange):
                lead = (home.place.offset - start * self.dtype.itemsize) % ALIGN_BYTES
                return lead - lead % self.dtype.itemsize
        return 0


class DeviceTier(Tier):
    """The device's memory, with a lane in each direction for states.

    State traffic has lanes of its own. Fetches wait for updates on their lanes; an update that queued behind such a
    fetch would never end.
    """

    name = TierName.DEVICE

    def __init__(self, arena: Arena, accelerator: Accelerator, failures: Failures) -> None:
        self.arena = arena
        self._accelerator = accelerator
        # Of the host's memory: zero, and not touched yet.
        self._is_fresh = accelerator.asynchronous.free_bytes() is None
        self._owner = accelerator.asynchronous.current_stream()  # to which the arena's memory belongs
        self.h2d = accelerator.lane("state-h2d", failures)
        self.d2h = accelerator.lane("state-d2h", failures)

    def allocate(self, dtype: torch.dtype, num_elements: int, label: str) -> torch.Tensor:
        """Allocate memory of the device's arena. Homes are its first leases: their bytes are zero and untouched."""
        home = self.arena.lease(num_elements * dtype.itemsize, label).view(dtype, num_elements)
        if not self._is_fresh:
            home.zero_()
            self._accelerator.launched().wait()  # the lanes that write here do not wait for this thread's stream
        return home

    def read(
        self, home: Home, target: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Start a copy on the d2h lane. Kernels that write the home must be complete."""
        source = home.memory[start : start + target.numel()]
        return self.d2h.submit(lambda: self._accelerator.copy(target, source), label=home.label)

    def write(
        self, home: Home, source: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Start a copy on the h2d lane."""
        return self.copy_in(home.memory[start : start + source.numel()], source, label=home.label)

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, *, fence: Fence = NO_FENCE, label: str
    ) -> LaneTicket:
        """Copy host memory into any memory of the device, behind `fence`."""
        return self.h2d.submit(lambda: self._accelerator.copy(target, source), fence=fence, label=label)

    def close(self) -> None:
        """Finish the copies and stop the threads; the arena's memory may go then."""
        self.h2d.close()
        self.d2h.close()
        # An evaluation on another stream may read weights still. The allocator gives the memory to the next one on the
        # stream that owns it, and knows of no other.
        self._accelerator.join_streams(self._owner)


class HostTier(Tier):
    """Pinned host memory."""

    name = TierName.HOST

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def allocate(self, dtype: torch.dtype, num_elements: int, label: str) -> torch.Tensor:
        """Allocate memory of the host's arena, which is fresh, hence zero: [Note: staggered arrays]."""
        return self.arena.lease(staggered(num_elements * dtype.itemsize), label).view(dtype, num_elements)

    def read(
        self, home: Home, target: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Copy on the calling thread."""
        target.copy_(home.memory[start : start + target.numel()])
        return FINISHED

    def write(
        self, home: Home, source: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Copy on the calling thread."""
        home.memory[start : start + source.numel()].copy_(source)
        return FINISHED
