"""The leases of units: fetched into after the units' last updates, arrived, released.

[Note: leases of several sizes]
Leases do not move, so free bytes may lie in several holes, none of which is large enough. Most units of a model are
blocks of the same, largest size: their leases are cut from the begin of the arena, all others (embedding, head) from
its end, so that what one block leaves fits the next. Where the holes are too small even so, the next fetches are
planned as if the largest hole were all that is free: the units that leave for them are those that leave next anyway.

Fences cover the work launched on a stream: a fetch into a lease waits, on its stream, for the work that had been
launched on the [Note: streams that compute] when the lease was given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from offloadzero.errors import BudgetError, StateError
from offloadzero.memory.arena import Arena, BufferPool, Lease, align_up
from offloadzero.memory.device import Stream
from offloadzero.memory.lanes import Fence, Lane, LaneTicket
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.memory.tiers import FETCH_PRIORITY
from offloadzero.memory.transfer import Fetcher, FileWay, Staging
from offloadzero.observe.clock import Mark
from offloadzero.schedule.prefetch import Evict, Move
from offloadzero.streaming.leased_unit import FETCHING, HOME, LeasedUnit
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_gather import UnitGather
from offloadzero.update.delivery import Delivery, UpdateTicket


class UnitLeases:
    """Moves units as the residency policy decides, and tells it which are there."""

    def __init__(
        self,
        units: Sequence[LeasedUnit],
        store: TieredStore,
        *,
        arena: Arena,
        residency: ResidencyPolicy,
        staging: BufferPool,
        gather: UnitGather,
    ) -> None:
        """Take the `arena`, the part of the device's memory from which the leases are cut; make the fetching threads.

        `gather` makes units whole that come in shards.
        """
        self._units = units
        self._store = store
        self.arena = arena
        self._residency = residency
        self._gather = gather
        self._lane = store.accelerator.lane("fetch", store.failures)
        self._fetcher = Fetcher(
            store, lane=self._lane, files=FileWay(Lane("stage", store.failures), Staging(staging))
        )
        sizes = [align_up(unit.num_bytes) for unit in units if unit.residency is not HOME]
        self._largest_bytes = max(sizes, default=0)

    def prefetch(self) -> None:
        """Start the moves that are next: [Note: leases of several sizes]."""
        if not self._start(self._residency.plan(self.arena.free_bytes)):
            self._start(self._residency.plan(self.arena.largest_free_bytes))  # the next use tries again

    def _start(self, moves: Iterable[Move]) -> bool:
        """Start moves in their order; False: up to the first that finds no hole."""
        for move in moves:
            unit = self._units[move.unit]
            if type(move) is Evict:
                unit.expect_no_late_write()
                self.release(unit)
                continue
            lease = self._try_lease(unit)
            if lease is None:
                return False
            self.start_fetch(unit, lease)
        return True

    def _try_lease(self, unit: LeasedUnit) -> Lease | None:
        from_end = align_up(unit.num_bytes) < self._largest_bytes
        return self.arena.try_lease(unit.num_bytes, unit.record.name, from_end=from_end)

    def lease_on_demand(self, unit: LeasedUnit, *, ends_guards: bool) -> Lease:
        """Return a lease for a unit that is used now.

        `ends_guards`: a forward begins, so parameters read outside of forwards have been used. Raises BudgetError where
        all leases are in use.
        """
        name, size = unit.record.name, unit.num_bytes
        while (lease := self._try_lease(unit)) is None:
            victims = self._residency.victims(align_up(size) - self.arena.free_bytes)
            if victims:
                for victim in victims:
                    self._units[victim].expect_no_late_write()
                    self.release(self._units[victim])
                continue
            arriving = [u for u in self._units if u.residency is FETCHING]
            if not arriving and ends_guards and self._residency.end_guards():
                continue
            if not arriving:
                raise self._no_room(name, size)
            for other in arriving:  # units fetched for later: their room is needed now
                self.complete_fetch(other, self._store.accelerator.note_stream())
        return lease

    def _no_room(self, name: str, size: int) -> BudgetError:
        kept = [
            self._units[i].record.name for i in sorted(self._residency.protected()) if self._units[i].lease
        ]
        return BudgetError(
            f"{name}: {size:,} bytes do not fit beside {', '.join(kept) or 'nothing'}, which are in use "
            f"({self.arena.free_bytes:,} of {self.arena.num_bytes:,} bytes of unit leases are free): "
            "raise offloadzero.budgets.device or cut smaller units"
        )

    def start_fetch(self, unit: LeasedUnit, lease: Lease) -> None:
        """Start to fetch a unit into `lease`, whole: [Note: waits look up]."""
        try:  # not `failures.whole()`, which would be made for each fetch
            views = unit.layout_views.in_lease(lease)
            unit.begin_fetch(lease, views, self.submit(unit, views.memory))
            self._residency.entered(unit.record.index)
        except BaseException as error:
            self._store.failures.leave_half_done(f"the fetch of {unit.record.name}", error)
            raise

    def complete_fetch(self, unit: LeasedUnit, stream: Stream | None, *, since: Mark | None = None) -> None:
        """Order later work of `stream` behind the unit's arrival."""
        if unit.fetched is None:
            raise AssertionError(f"{unit.record.name} is not being fetched")
        if not unit.fetched.done():
            with self._store.failures.handed_over(), self._store.clock.waiting("fetch", since=since):
                unit.fetched.order_compute()
        self._store.failures.check_readable()  # a failed ticket counts as done
        unit.arrive(stream)

    def wait_arrived(self, unit: LeasedUnit) -> None:
        """Block until nothing writes the unit's lease. Raises StateError in the forward of its module."""
        if unit.residency is HOME:
            return
        if self._residency.pins[unit.record.index]:
            raise StateError(f"{unit.record.name} is updated while its module is in its forward")
        if unit.residency is FETCHING and unit.fetched is not None and not unit.fetched.done():
            with self._store.clock.waiting("fetch"), self._store.failures.handed_over():
                unit.fetched.wait()

    def release(self, unit: LeasedUnit) -> None:
        """Give the unit's lease up; launched work may still read it."""
        views = unit.views
        lease = unit.leave()
        self._residency.left(unit.record.index)
        if unit.shown_at:
            unit.show()  # placeholders
        if views is not None and views.num_holders():
            try:
                unit.give_up(views)
            except StateError as error:
                # An error in a release may leave it half done: the next use raises it.
                self._store.failures.record(error)
        if self._store.poison:
            self._store.accelerator.join_streams()  # they may still read the memory that is poisoned now
        lease.release()

    # --- fetches, in the order in which they were asked for ---

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

    def read_home(self, unit: LeasedUnit) -> torch.Tensor:
        """Read the unit's parameters into memory of their own on the device, shape (num_elements,)."""
        record = unit.record
        if record.is_gathered:
            memory = self._store.accelerator.allocate(record.num_elements * record.dtype.itemsize)
            target = memory.view(record.dtype)
            with self._store.clock.waiting("fetch"), self._store.failures.handed_over():
                self.submit(unit, target).order_compute()
            return target
        home = torch.empty(record.num_elements, dtype=record.dtype, device="cpu")
        with self._store.clock.waiting("fetch"), self._store.failures.handed_over():
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
