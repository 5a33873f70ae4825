"""The fetches of units into their leases, after their last update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offloadzero.memory.arena import BufferPool
from offloadzero.memory.lanes import Fence, Lane, LaneTicket
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.memory.tiers import FETCH_PRIORITY
from offloadzero.memory.transfer import Fetcher, PoolStaging
from offloadzero.observe.clock import StepClock
from offloadzero.streaming.leased_unit import LeasedUnit
from offloadzero.update.delivery import Delivery, UpdateTicket


class UnitFetches:
    """Fetches units, in the order in which they were asked for."""

    def __init__(self, store: TieredStore, *, staging: BufferPool, clock: StepClock) -> None:
        self._store = store
        self._clock = clock
        self._lane = store.accelerator.lane("fetch", store.failures)
        self._fetcher = Fetcher(
            store,
            lane=self._lane,
            reader=Lane("stage", store.failures),
            staging=PoolStaging(staging),
        )

    def submit(self, unit: LeasedUnit, target: torch.Tensor) -> LaneTicket:
        """Fetch a unit, after its last update, into `target`, device, shape (num_elements,).

        Work that has been launched till now may still use that memory.
        """
        fence = self._store.accelerator.fence()
        delivered = None if unit.home.is_in_host_memory else self._ask_for_delivery(unit, target, fence)
        return self._fetcher.submit(
            unit.home,
            target,
            after=[unit.updated],
            fence=fence,
            label=unit.record.name,
            delivered=delivered,
        )

    def forget(self, index: int) -> None:
        """Note that a script writes the unit's home, where a fetch may read something else."""

    def read_home(self, unit: LeasedUnit) -> torch.Tensor:
        """Read the unit's parameters into memory of their own on the device, shape (num_elements,)."""
        home = torch.empty(unit.record.num_elements, dtype=unit.record.dtype, device="cpu")
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
