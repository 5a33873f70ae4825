"""The tiered store: every segment has one home, and one way in and out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from offloadzero.config import AioConfig
from offloadzero.core.fail_points import through
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.memory.arena import Arena, Lease, align_up, allocate_host
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.mapped_files import FileRange
from offloadzero.memory.nvme import InPlaceTier, NvmeTier
from offloadzero.memory.swap_file import KeptFile
from offloadzero.memory.tickets import Failures, Ticket
from offloadzero.memory.tiers import (
    UPDATE_PRIORITY,
    DeviceTier,
    Home,
    HostTier,
    InParts,
    Place,
    Tier,
    TwoPlaces,
)
from offloadzero.observe.clock import StepClock


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment(Home):
    """One contiguous piece of a record."""

    record: str
    kind: SegmentKind

    def next_version(self) -> Segment:
        """The second place of a segment, which nobody else reads: [Note: versions] in update/pipeline.py."""
        return replace(self, place=self._two().next)

    def flip(self) -> None:
        """Let what was written there be the segment's data."""
        self._two().flip()

    @property
    def has_versions(self) -> bool:
        """Whether it has two places."""
        return isinstance(self.place, TwoPlaces)

    def _two(self) -> TwoPlaces:
        if not isinstance(self.place, TwoPlaces):
            raise AssertionError(f"{self.label} has one place")
        return self.place


@dataclass(frozen=True)
class StoreSizes:
    """The bytes to reserve before the first step; host memory includes the checksums of nvme, where there are any."""

    device: int
    host: int
    nvme: int
    waiting: Mapping[int, int] = field(default_factory=dict)  # on nvme's drives, by `st_dev`: see `NvmeTier`
    # To which nvme may grow when weights in place are written; None: what the drives have.
    most_nvme: int | None = None


class HomePart(NamedTuple):
    """Elements of a segment's home that have a place of their own; `source` has their values already."""

    start: int
    num_elements: int
    source: FileRange | None
    label: str


class TieredStore:
    """Owns the arenas, the NVMe files and the copy lanes.

    Everything is reserved in the constructor: BudgetError or AioError there, never later.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        sizes: StoreSizes,
        nvme_paths: Sequence[Path],
        aio: AioConfig,
        failures: Failures,
        clock: StepClock | None = None,
        poison: bool = False,
        kept: KeptFile | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.failures = failures
        self.timeline = accelerator.timeline
        self.clock = clock or StepClock(self.timeline)  # counts the waits of all parts of an engine
        self.poison = poison
        self._pinned = False
        self.is_closed = False
        # A device may have less than it said: what is made is closed again where a later one fails.
        with ExitStack() as made:
            self.nvme = None
            self.in_place: InPlaceTier | None = None
            if sizes.nvme:
                self.nvme = NvmeTier(
                    nvme_paths,
                    num_bytes=sizes.nvme,
                    aio=aio,
                    timeline=accelerator.timeline,
                    waiting=sizes.waiting,
                    kept=kept,
                )
                made.callback(self.nvme.close)
                self.in_place = InPlaceTier(self.nvme, budget=sizes.most_nvme)
            host_bytes = sizes.host - (checksum_bytes(sizes.nvme) if aio.checksums else 0)
            self.host = Arena("host", allocate_host(align_up(host_bytes)), poison=poison)
            self.device = Arena("device", accelerator.allocate(align_up(sizes.device)), poison=poison)
            self.on_device = DeviceTier(self.device, accelerator, failures)
            made.callback(self.on_device.close)
            tiers: list[Tier] = [self.on_device, HostTier(self.host)]
            if self.nvme is not None:
                tiers.insert(0, self.nvme)
            self.tiers = {tier.name: tier for tier in tiers}
            made.pop_all()

    def pin(self) -> None:
        """Page-lock the host arena, after the first weights are in it: pinning takes all pages at once."""
        if not self._pinned:
            self.accelerator.pin(self.host.buffer, label="the host arena")
            self._pinned = True

    def register(self, leases: Sequence[Lease], *, may_pin: bool) -> None:
        """Register host leases with the file engine that transfers them: pinned once, not at each transfer."""
        if self.nvme is None:
            return
        for start, stop in _joined(leases):
            self.nvme.register(self.host.buffer[start:stop], may_pin=may_pin)

    def create(
        self,
        record: str,
        kind: SegmentKind,
        dtype: torch.dtype,
        num_elements: int,
        tier: TierName,
        parts: Sequence[HomePart] = (),
        *,
        versions: bool = False,
    ) -> Segment:
        """Reserve a segment's home; it holds zeros, or where it is in `parts` what their sources have.

        With `versions` it has two places.
        """
        label = f"{record}.{kind.value}"
        backing = self.in_place if parts else self.tiers.get(tier)
        if backing is None:
            raise AssertionError(f"{label}: no {tier.value} was reserved")
        place: Place
        if isinstance(backing, InPlaceTier):
            place = InParts([backing.add(*part, dtype=dtype) for part in parts])
        else:
            place = first = backing.allocate(dtype, num_elements, label)
            if versions:
                place = TwoPlaces(first, next=backing.allocate(dtype, num_elements, label))
        return Segment(
            record=record,
            kind=kind,
            label=label,
            dtype=dtype,
            num_elements=num_elements,
            backing=backing,
            place=place,
        )

    def reserve(self, segments: Iterable[Segment], *, waiting: Mapping[int, int]) -> None:
        """Reserve on nvme the homes of `segments`, and the bytes that are no longer `waiting`. Raises BudgetError."""
        if self.nvme is not None:
            extents = [
                part.home.extent
                for segment in segments
                for part in segment.parts
                if part.home.extent is not None
            ]
            through("nvme.reserve", self.nvme.reserve, self.nvme)(extents, waiting=waiting)

    def read(
        self, home: Home, target: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Copy elements [start, start + target.numel()) of a home into host memory.

        A caller that launched kernels which write a home on the device waits for them before the call.

        Args:
            target: host, contiguous, the home's dtype; shape (n,).
        """
        return home.backing.read(home, target, start=start, priority=priority)

    def write(
        self, home: Home, source: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Commit host memory to elements [start, start + source.numel()) of a home."""
        return home.backing.write(home, source, start=start, priority=priority)

    def move_written(self, home: Home, source: torch.Tensor, *, start: int = 0) -> None:
        """Have what lies in files of others, and is written next with other values, moved: see `InPlaceTier`."""
        if isinstance(home.backing, InPlaceTier):
            home.backing.move_written(home, source, start=start)

    def close(self) -> None:
        """Drain the lanes, end the file transfers, remove the files, unpin: each of it, whatever fails before it."""
        self.is_closed = True
        with ExitStack() as ends:  # from the last to the first
            ends.callback(self._unpin)
            if self.nvme is not None and self.in_place is not None:
                ends.callback(self.nvme.close)
                ends.callback(self.in_place.close)
            ends.callback(self.on_device.close)

    def _unpin(self) -> None:
        if self._pinned:
            self.accelerator.unpin(self.host.buffer)
            self._pinned = False


def _joined(leases: Sequence[Lease]) -> list[tuple[int, int]]:
    """Yield the ranges [start, stop) of the leases in their arena, joined where there is no gap between them."""
    runs: list[tuple[int, int]] = []
    for lease in sorted(leases, key=lambda lease: lease.offset):
        start, stop = lease.offset, lease.offset + lease.num_bytes
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs
