"""The fetches of units into their leases, after their last update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offloadzero.memory.arena import BufferPool
from offloadzero.memory.lanes import Fence, Lane, LaneTicket
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.memory.tiers import FETCH_PRIORITY
from offloadzero.memory.transfer import Fetcher, Staging
from offloadzero.observe.clock import StepClock
from offloadzero.streaming.leased_unit import LeasedUnit
from offloadzero.streaming.unit_gather import UnitGather
from offloadzero.update.delivery import Delivery, UpdateTicket


class UnitFetches:
    """Fetches units, in the order in which they were asked for."""

    def __init__(
        self, store: TieredStore, *, staging: BufferPool, clock: StepClock, gather: UnitGather
    ) -> None:
        """Make the lane, and the thread that stages. `gather` makes units whole that come in shards."""
        self._store = store
        self._gather = gather
        self._clock = clock
        self._lane = store.accelerator.lane("fetch", store.failures)
        self._fetcher = Fetcher(
            store,
            lane=self._lane,
            reader=Lane("stage", store.failures),
            staging=Staging(staging),
        )

    def submit(self, unit: LeasedUnit, target: torch.Tensor) -> LaneTicket:
        """Fetch a unit, after its last update, into `target`, device, shape (num_elements,).

        Work that has been launched till now may still use that memory.
        """
        record, fence = unit.record, self._store.accelerator.fence()
        copy = delivered = None
        if record.is_gathered:
            copy, from_copies = self._gather.begin(unit)
            if from_copies is not None:
                targets = [target]  # the lane lets go of it before the ticket is done
                return self._lane.submit(lambda: from_copies(targets.pop()), fence=fence, label=record.name)
        elif not unit.home.is_in_host_memory:
            delivered = self._ask_for_delivery(unit, target, fence)
        return self._fetcher.submit(
            unit.home,
            target,
            after=[unit.updated],
            fence=fence,
            label=record.name,
            copy=copy,
            delivered=delivered,
        )

    def forget(self, index: int) -> None:
        """Note that a script writes the unit's home, where a fetch may read something else."""
        self._gather.forget(index)

    def read_home(self, unit: LeasedUnit) -> torch.Tensor:
        """Read the unit's parameters into memory of their own on the device, shape (num_elements,)."""
        record = unit.record
        if record.is_gathered:
            memory = self._store.accelerator.allocate(record.num_elements * record.dtype.itemsize)
            target = memory.view(record.dtype)
            with self._clock.waiting("fetch"), self._store.failures.handed_over():
                self.submit(unit, target).order_compute()
            return target
        home = torch.empty(record.num_elements, dtype=record.dtype, device="cpu")
        with self._clock.waiting("fetch"), self._store.failures.handed_over():
            unit.updated.wait()
            self._store.read(unit.home, home, priority=FETCH_PRIORITY).wait()
        return home.to(self._store.accelerator.device)

    def _ask_for_delivery(
        self, unit: LeasedUnit, target: torch.Tensor, fence: Fence
    ) -> Callable[[], Sequence[Ticket] | None] | None:
        """Ask the unit's next update, if it has not begun, to deliver its parameters to `target`: [Note: delivery].

        Returns a call for `Fetcher.submit` that blocks until the update is over and returns its copies. No update has
        all parameters of a unit that is frozen in part.
        """
        updated = unit.updated
        if not isinstance(updated, UpdateTicket) or not unit.record.is_trained_whole:
            return None
        device, label = self._store.on_device, unit.record.name

        def copy(start: int, params: torch.Tensor) -> Ticket:
            return device.copy_in(target[start : start + params.numel()], params, fence=fence, label=label)

        last = unit.record.slots[-1]
        delivery = Delivery(copy, num_elements=last.offset + last.num_elements)
        if not updated.ask(delivery):
            return None

        def delivered() -> Sequence[Ticket] | None:
            updated.wait_fulfilled()
            if delivery.is_complete:
                return delivery.copies
            AllOf(delivery.copies).wait()  # the lease may soon be another unit's
            return None

        return delivered
