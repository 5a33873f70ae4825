"""The way of a unit from its home into a lease: host -> device, or file -> pinned memory -> device (floor 5)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offloadzero.memory.arena import BufferPool, PooledBuffer
from offloadzero.memory.lanes import Fence, Lane, LaneTicket, order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Promise, Ticket
from offloadzero.memory.tiers import FETCH_PRIORITY
from offloadzero.observe.clock import StepClock
from offloadzero.optim.delivery import Delivery, UpdateTicket
from offloadzero.streaming.leased_unit import LeasedUnit


@dataclass(eq=False)
class _Staged:
    """A unit's parameters in pinned memory on their way from a file to the device, or from their update."""

    read: Promise = field(default_factory=Promise)
    delivery: Delivery | None = None  # complete, and nothing was read
    buffer: PooledBuffer | None = None
    data: torch.Tensor | None = None


class UnitFetches:
    """Fetches units, in the order in which they were asked for."""

    def __init__(self, store: TieredStore, *, staging: BufferPool, clock: StepClock) -> None:
        self._store = store
        self._staging = staging
        self._clock = clock
        self._fetch_lane = store.accelerator.lane("fetch", store.failures)
        self._stage_lane = Lane("stage", store.failures)

    def submit(self, unit: LeasedUnit, target: torch.Tensor) -> LaneTicket:
        """Fetch a unit, after its last update, into `target`, device, shape (num_elements,).

        What has been launched till now may still use that memory.
        """
        record, home = unit.record, unit.home
        copy = self._store.accelerator.copy
        fence = self._store.accelerator.fence()
        if home.is_in_host_memory:
            return self._fetch_lane.submit(
                lambda: copy(target, home.memory), after=[unit.updated], fence=fence, label=record.name
            )
        staged = self._stage(unit, self._ask_for_delivery(unit, target, fence))
        return self._fetch_lane.submit(lambda: self._unstage(staged, target), fence=fence, label=record.name)

    def read_home(self, unit: LeasedUnit) -> torch.Tensor:
        """The unit's parameters in memory of their own on the device, shape (num_elements,)."""
        home = torch.empty(unit.record.num_elements, dtype=unit.record.dtype, device="cpu")
        with self._clock.waiting("fetch"), self._store.failures.handed_over():
            unit.updated.wait()
            self._store.read(unit.home, home, priority=FETCH_PRIORITY).wait()
        return home.to(self._store.accelerator.device)

    def _ask_for_delivery(self, unit: LeasedUnit, target: torch.Tensor, fence: Fence) -> Delivery | None:
        """[Note: delivery] of the coming update's parameters to `target`, if there is one yet to begin."""
        if not isinstance(unit.updated, UpdateTicket):
            return None
        store = self._store

        def copy(start: int, params: torch.Tensor) -> Ticket:
            place = target[start : start + params.numel()]
            return store.on_device.copy_in(place, params, fence=fence, label=unit.record.name)

        last = unit.record.slots[-1]
        delivery = Delivery(copy, num_elements=last.offset + last.num_elements)
        return delivery if unit.updated.ask(delivery) else None

    def _stage(self, unit: LeasedUnit, delivery: Delivery | None) -> _Staged:
        """Read a unit from its file into pinned memory, after its last update, unless that delivers it."""
        record, home = unit.record, unit.home
        updated = unit.updated
        staged = _Staged()

        def read() -> None:
            try:
                if delivery is not None and isinstance(updated, UpdateTicket):
                    updated.wait_fulfilled()
                    if delivery.is_complete:
                        staged.delivery = delivery
                        staged.read.fulfil()
                        return
                    AllOf(delivery.copies).wait()  # the lease may be another unit's soon
                updated.wait()
                buffer = self._staging.take()
                buffer.last_use.wait()
                staged.data = buffer.view(record.dtype, record.num_elements)
                staged.buffer = buffer
                staged.read.fulfil(self._store.read(home, staged.data, priority=FETCH_PRIORITY))
            except BaseException as error:
                self._store.failures.record(error)  # before anyone who waits can see it
                staged.read.fail(error)
                raise

        self._stage_lane.submit(read)
        return staged

    def _unstage(self, staged: _Staged, target: torch.Tensor) -> None:
        accelerator = self._store.accelerator
        try:
            staged.read.wait()
            if staged.delivery is not None:
                for copied in staged.delivery.copies:
                    order_compute_after(copied)
                return
            if staged.data is None:
                raise AssertionError("nothing was staged")
            accelerator.copy(target, staged.data)
        finally:
            if staged.buffer is not None:
                self._staging.give_back(staged.buffer, last_use=accelerator.launched())
