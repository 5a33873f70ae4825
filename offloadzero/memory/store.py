"""The tiered store: every segment has one home, and one way in and out of it (floor 3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offloadzero.config import AioConfig, SegmentKind, TierName
from offloadzero.memory.arena import Arena, Lease, align_up, allocate_host, apart
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.memory.lanes import Accelerator, Lane
from offloadzero.memory.nvme import Extent, NvmeTier
from offloadzero.memory.tickets import FINISHED, Failures, Ticket

# What the computation waits for overtakes what only has to be home in time.
FETCH_PRIORITY = 0
UPDATE_PRIORITY = 1


@dataclass(frozen=True)
class Segment:
    """One contiguous piece of a record: `num_elements` of `dtype` with one home.

    `home` is the typed memory, shape (num_elements,), for device and host; `extent` the place on NVMe.
    """

    record: str
    kind: SegmentKind
    dtype: torch.dtype
    num_elements: int
    tier: TierName
    home: torch.Tensor | None = None
    extent: Extent | None = None

    @property
    def label(self) -> str:
        """For errors: `blocks.3.exp_avg`."""
        return f"{self.record}.{self.kind.value}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return self.num_elements * self.dtype.itemsize

    @property
    def memory(self) -> torch.Tensor:
        """The home of a segment that lives in memory."""
        if self.home is None:
            raise AssertionError(f"{self.label} lives on {self.tier.value}, not in memory")
        return self.home


@dataclass(frozen=True)
class StoreSizes:
    """Bytes to reserve before the first step; in host memory the checksums of nvme count, where there are any."""

    device: int
    host: int
    nvme: int
    waiting: Mapping[int, int] = field(default_factory=dict)  # on the drives of nvme, by `st_dev`: `NvmeTier`


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
        poison: bool = False,
    ) -> None:
        self.accelerator = accelerator
        self.failures = failures
        self.timeline = accelerator.timeline
        self.poison = poison
        self._pinned = False
        self.is_closed = False
        self.nvme = (
            NvmeTier(
                nvme_paths,
                num_bytes=sizes.nvme,
                aio=aio,
                timeline=accelerator.timeline,
                waiting=sizes.waiting,
            )
            if sizes.nvme
            else None
        )
        host_bytes = sizes.host - (checksum_bytes(sizes.nvme) if aio.checksums else 0)
        try:
            self.host = Arena("host", allocate_host(align_up(host_bytes)), poison=poison)
            self.device = Arena("device", accelerator.allocate(align_up(sizes.device)), poison=poison)
            # State traffic has lanes of its own. Fetches wait for updates on theirs; an update that had to queue
            # behind such a fetch would never end.
            self.h2d: Lane = accelerator.lane("state-h2d", failures)
            self.d2h: Lane = accelerator.lane("state-d2h", failures)
        except BaseException:  # a device may have less than it said
            if self.nvme is not None:
                self.nvme.close()
            raise

    def pin(self) -> None:
        """Page-lock the host arena. Done when the first weights are in it: pinning takes all pages at once."""
        if not self._pinned:
            self.accelerator.pin(self.host.buffer, label="the host arena")
            self._pinned = True

    def register(self, leases: Sequence[Lease], *, may_pin: bool) -> None:
        """Tell the file engine of host leases that its transfers go to and from: pinned once, not at each of them."""
        if self.nvme is None:
            return
        for start, stop in _joined(leases):
            self.nvme.register(self.host.buffer[start:stop], may_pin=may_pin)

    def create(
        self, record: str, kind: SegmentKind, dtype: torch.dtype, num_elements: int, tier: TierName
    ) -> Segment:
        """Reserve a segment's home; its content is zero."""
        size = num_elements * dtype.itemsize
        label = f"{record}.{kind.value}"
        if tier is TierName.NVME:
            if self.nvme is None:
                raise AssertionError(f"{label}: no nvme was reserved")
            extent = self.nvme.allocate(size, label)
            return Segment(record, kind, dtype, num_elements, tier, extent=extent)
        on_device = tier is TierName.DEVICE
        lease = self.device.lease(size, label) if on_device else self.host.lease(apart(size), label)
        home = lease.view(dtype, num_elements)
        if on_device:
            home.zero_()  # the host arena is fresh, hence zero
            self.accelerator.launched().wait()  # the lanes that write here do not wait for this thread's stream
        return Segment(record, kind, dtype, num_elements, tier, home=home)

    def reserve(self, segments: Iterable[Segment], *, waiting: Mapping[int, int]) -> None:
        """Reserve on nvme the homes of `segments`, and what is `waiting` there no more. Raises BudgetError."""
        if self.nvme is not None:
            extents = (segment.extent for segment in segments if segment.extent is not None)
            self.nvme.reserve(extents, waiting=waiting)

    def read(
        self, segment: Segment, target: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Copy elements [start, start + target.numel()) of a segment into host memory.

        A caller that launched kernels which write a device segment waits for them first.

        Args:
            target: host, contiguous, the segment's dtype; shape (n,).
        """
        if segment.tier is TierName.NVME:
            return self._nvme.read(
                self._extent(segment),
                target,
                start_byte=start * segment.dtype.itemsize,
                priority=priority,
                label=segment.label,
            )
        source = segment.memory[start : start + target.numel()]
        if segment.tier is TierName.DEVICE:
            return self.d2h.submit(lambda: self.accelerator.copy(target, source), label=segment.label)
        target.copy_(source)
        return FINISHED

    def write(
        self, segment: Segment, source: torch.Tensor, *, start: int = 0, priority: int = UPDATE_PRIORITY
    ) -> Ticket:
        """Commit host memory to elements [start, start + source.numel()) of a segment's home."""
        if segment.tier is TierName.NVME:
            return self._nvme.write(
                self._extent(segment),
                source,
                start_byte=start * segment.dtype.itemsize,
                priority=priority,
                label=segment.label,
            )
        target = segment.memory[start : start + source.numel()]
        if segment.tier is TierName.DEVICE:
            return self.h2d.submit(lambda: self.accelerator.copy(target, source), label=segment.label)
        target.copy_(source)
        return FINISHED

    @property
    def _nvme(self) -> NvmeTier:
        if self.nvme is None:
            raise AssertionError("the store has no nvme tier")
        return self.nvme

    @staticmethod
    def _extent(segment: Segment) -> Extent:
        if segment.extent is None:
            raise AssertionError(f"{segment.label} has no extent")
        return segment.extent

    def close(self) -> None:
        """Drain the lanes, end the file transfers, remove the files, unpin."""
        self.is_closed = True
        self.h2d.close()
        self.d2h.close()
        if self.nvme is not None:
            self.nvme.close()
        if self._pinned:
            self.accelerator.unpin(self.host.buffer)
            self._pinned = False


def _joined(leases: Sequence[Lease]) -> list[tuple[int, int]]:
    """Where they lie in their arena: [start, stop) of each run without a gap."""
    runs: list[tuple[int, int]] = []
    for lease in sorted(leases, key=lambda lease: lease.offset):
        start, stop = lease.offset, lease.offset + lease.num_bytes
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs
