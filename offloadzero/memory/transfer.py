"""The way of data between a home and the device, through pinned memory where the home asks for that.

[Note: one way in and out]
A home in host memory and the device exchange their data in one copy, on the stream of a lane. Data on file pass through
a staging buffer in pinned memory:

- in: the reading lane's thread waits for earlier work (the unit's update, the input's write), takes a buffer,
  submits the read and hands its ticket on; the lane to the device waits for that and launches the copy. The buffer goes
  back with the copy as its last use.
- out: the lane from the device copies into a buffer; the writing lane's thread waits for the copy, then for the write,
  and gives the buffer back.

So reads and copies of several homes overlap, in the order of their submission. The submitting thread waits for nothing
and gets the ticket of the last lane, a LaneTicket: the device waits for it by an event.

The data that an update on the host needs go through the store alone (`TieredStore.read`, `write`): its slots are
pinned memory already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from offloadzero.memory.arena import BufferPool, PooledBuffer
from offloadzero.memory.lanes import NO_FENCE, Fence, Lane, LaneTicket, order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.memory.tiers import FETCH_PRIORITY, Home

Copy = Callable[[torch.Tensor, torch.Tensor], None]  # copies to the first tensor from the second


class Staging:
    """Pinned memory through which data pass between files and the device: the buffers of a pool."""

    def __init__(self, pool: BufferPool) -> None:
        """Take the buffers of `pool`, each large enough for any transfer."""
        self._pool = pool

    def take(self, num_bytes: int, label: str) -> PooledBuffer:  # noqa: ARG002
        """Take a buffer of at least `num_bytes` that is no longer used; blocks. May raise BudgetError."""
        buffer = self._pool.take()
        buffer.last_use.wait()
        return buffer

    def give_back(self, buffer: PooledBuffer, *, last_use: Ticket = FINISHED) -> None:
        """Give a buffer back, which is free once `last_use` is done."""
        self._pool.give_back(buffer, last_use=last_use)


class FileWay(NamedTuple):
    """The thread that reads or writes files, and its pinned memory."""

    lane: Lane
    staging: Staging


@dataclass(eq=False)
class Staged:
    """Data in pinned memory on their way from a file to the device, or `delivered` there by other copies."""

    copy: Copy  # brings them to the device
    buffer: PooledBuffer | None = None
    data: torch.Tensor | None = None
    delivered: Sequence[Ticket] | None = None


class Fetcher:
    """Brings data from their homes to the device: [Note: one way in and out]."""

    def __init__(self, store: TieredStore, *, lane: Lane, files: FileWay | None) -> None:
        """Make a fetcher. `lane` copies to the device. Without `files` all homes are in host memory."""
        self._store = store
        self._accelerator = store.accelerator
        self._lane = lane
        self._files = files

    def submit(
        self,
        home: Home,
        target: torch.Tensor,
        *,
        after: Sequence[Ticket] = (),
        fence: Fence = NO_FENCE,
        label: str,
        delivered: Callable[[], Sequence[Ticket] | None] | None = None,
        copy: Copy | None = None,
    ) -> LaneTicket:
        """Copy a home into `target`, device, shape (home.num_elements,).

        Args:
            after: tickets of the work that writes the home.
            fence: `target` may be written behind it.
            label: names the copy on the timeline.
            delivered: for a home on file: blocks until it is known whether other copies bring the data to `target`,
                and returns their tickets, or None when there are none.
            copy: brings the home's data to `target`, which may then be of another size; None: one copy.
        """
        copy = copy or self._accelerator.copy
        targets = [target]  # the lane drops its reference before the ticket is done
        if home.is_in_memory:
            # What it waits for says which of two places is the present one.
            return self._lane.submit(
                lambda: copy(targets.pop(), home.memory), after=after, fence=fence, label=label
            )
        if self._files is None:
            raise AssertionError(f"{home.label}: no staging for a home on {home.tier.value}")
        lane, staging = self._files
        staged = Staged(copy)
        read = lane.start(lambda: self._stage(staging, staged, home, after, label, delivered), label=label)
        return self._lane.submit(
            lambda: self._unstage(staging, staged, read, targets.pop()), fence=fence, label=label
        )

    def close(self) -> None:
        """Finish the submitted fetches and stop the threads."""
        if self._files is not None:
            self._files.lane.close()
        self._lane.close()

    def _stage(
        self,
        staging: Staging,
        staged: Staged,
        home: Home,
        after: Sequence[Ticket],
        label: str,
        delivered: Callable[[], Sequence[Ticket] | None] | None,
    ) -> Ticket:
        """Start to read a home into pinned memory, unless its data are delivered."""
        if delivered is not None:
            staged.delivered = delivered()
            if staged.delivered is not None:
                return FINISHED
        for earlier in after:
            earlier.wait()
        staged.buffer = staging.take(home.num_bytes, label)
        staged.data = staged.buffer.view(home.dtype, home.num_elements, start_byte=home.lead_bytes)
        return self._store.read(home, staged.data, priority=FETCH_PRIORITY)

    def _unstage(self, staging: Staging, staged: Staged, read: Ticket, target: torch.Tensor) -> None:
        """Copy the data that were read to the device; on the lane's thread."""
        try:
            read.wait()
            for copied in staged.delivered or ():
                order_compute_after(copied)
            if staged.data is not None:
                staged.copy(target, staged.data)
        finally:
            if staged.buffer is not None:
                staging.give_back(staged.buffer, last_use=self._accelerator.launched())


@dataclass(frozen=True, eq=False)
class Sent:
    """Data on their way from the device to a home."""

    copied: LaneTicket  # the device's memory has been read; a home in host memory holds the data
    written: Ticket  # a home on file holds the data


class Sender:
    """Brings data from the device to their homes: [Note: one way in and out]."""

    def __init__(self, store: TieredStore, *, lane: Lane, files: FileWay | None) -> None:
        """Make a sender. `lane` copies from the device. Without `files` all homes are in host memory."""
        self._store = store
        self._accelerator = store.accelerator
        self._lane = lane
        self._files = files

    def submit(
        self, source: torch.Tensor, find_home: Callable[[], Home], *, label: str, copy: Copy | None = None
    ) -> tuple[Home, Sent]:
        """Start to copy `source`, device, shape (n,), to the home found for it once there is staging for it.

        Work launched so far may still write `source`. When the call raises, it has taken nothing.

        Args:
            find_home: takes the home. May raise BudgetError.
            label: names the copy on the timeline.
            copy: brings `source` to memory of the same size; None: one copy.
        """
        buffer = None if self._files is None else self._files.staging.take(source.nbytes, label)
        try:
            home = find_home()
        except BaseException:
            if buffer is not None and self._files is not None:
                self._files.staging.give_back(buffer)
            raise
        copy, fence = copy or self._accelerator.copy, self._accelerator.fence()
        target = home.memory if buffer is None else buffer.view(home.dtype, home.num_elements)
        copied = self._lane.submit(lambda: copy(target, source), fence=fence, label=label)
        if buffer is None or self._files is None:
            return home, Sent(copied, FINISHED)
        store, (writer, staging) = self._store, self._files

        def write() -> None:
            try:
                store.write(home, target).wait()
            finally:
                staging.give_back(buffer)

        return home, Sent(copied, writer.submit(write, after=[copied], label=label))

    def close(self) -> None:
        """Finish the submitted copies and stop the threads."""
        self._lane.close()
        if self._files is not None:
            self._files.lane.close()
