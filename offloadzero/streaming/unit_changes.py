"""Changes of units: an update or a script's write makes what the device has of a unit stale.

Code that writes a unit's home announces it here; a later use of the unit waits until the change is home.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from offloadzero.core.torch_private import current_autograd_node
from offloadzero.errors import StateError
from offloadzero.memory.lanes import order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.streaming.leased_unit import HOME, RELEASED, LeasedUnit
from offloadzero.streaming.unit_gather import UnitGather
from offloadzero.streaming.unit_leases import UnitLeases


class UnitChanges:
    """Knows the last change of each unit, and begins the next one."""

    def __init__(
        self,
        units: Sequence[LeasedUnit],
        leases: UnitLeases,
        gather: UnitGather,
        store: TieredStore,
        *,
        pins: Sequence[int],
        lock: threading.RLock,
    ) -> None:
        """Make the changes of `units`.

        Args:
            pins: how many running forwards keep each unit, for reading.
            lock: held while leases change.
        """
        self._units = units
        self._leases = leases
        self._gather = gather
        self._store = store
        self._pins = pins
        self._lock = lock
        self._homes = [unit for unit in units if unit.residency is HOME]
        self._updated_early: set[int] = set()  # units updated by this step's backward

    def update_ticket(self, index: int) -> Ticket:
        """The ticket of the unit's last update."""
        return self._units[index].updated

    def num_updates(self, index: int) -> int:
        """The number of the unit's updates begun so far."""
        return self._units[index].generation - self._units[index].edits

    def is_updated(self) -> bool:
        """Whether every update is home."""
        return all(unit.updated.done() for unit in self._units)

    def wait_updates(self) -> None:
        """Block until every update is home."""
        with self._store.clock.waiting("synchronize"), self._store.failures.handed_over():
            for unit in self._units:
                unit.updated.wait()
        self._store.failures.check_readable()

    def wait_for_kept(self) -> None:
        """Wait for updates of resident weights that scripts keep views of: step() returns with them done."""
        for unit in self._homes:
            if not unit.updated.done() and unit.stays_kept():
                with self._store.clock.waiting("update"), self._store.failures.handed_over():
                    order_compute_after(unit.updated)

    def wait_updatable(self, index: int) -> None:
        """Block until the unit's weights can change: `begin_update` will not wait. Nothing has changed till then."""
        with self._lock:
            self._units[index].expect_no_late_write()
            self._leases.wait_arrived(self._units[index])

    def begin_update(self, index: int, ticket: Ticket, *, in_backward: bool = False) -> None:
        """Announce a change of the unit's trainable weights: its next use comes after `ticket`.

        `in_backward`: the script has not called step() yet, so it must not see them.
        """
        with self._lock:
            if in_backward:  # else `wait_updatable` has looked
                self._units[index].expect_no_late_write()
            self.make_stale(self._units[index], ticket)
            if in_backward:
                self._updated_early.add(index)

    def close_updates(self) -> None:
        """Forget the updates that backward has begun: their step is over, or will not be."""
        self._updated_early.clear()

    def expect_forward_may_begin(self, indices: Iterable[int]) -> None:
        """Do `expect_step_taken` for units whose forward begins, unless a backward runs it again."""
        if self._updated_early and current_autograd_node() is None:
            for index in indices:
                self.expect_step_taken(index)

    def expect_step_taken(self, index: int) -> None:
        """Raise if backward has updated the unit and step() has not been called: a script would see the new weights."""
        if index in self._updated_early and self._store.failures.stop is None:
            raise StateError(
                f"{self._units[index].record.name}: backward has already updated its weights: call step() before "
                'they are used again, or set "offloadzero": {"update": {"in_backward": false}}'
            )

    def launched_reads(self) -> Ticket:
        """Return a ticket of the work that the calling thread has launched so far, which may read any weights."""
        return self._store.accelerator.computed()

    def begin_edit(self, index: int) -> None:
        """Announce that the caller is about to write any of the unit's weights.

        In its module's forward the unit stays, and the caller writes it there as well.
        """
        with self._lock:
            if not self._pins[index]:
                self._units[index].expect_no_late_write()
                self.make_stale(self._units[index], FINISHED, is_edit=True)
        self._gather.forget(index)

    def make_stale(self, unit: LeasedUnit, ticket: Ticket, *, is_edit: bool = False) -> None:
        """Give the unit's lease up: its next use fetches it again, behind `ticket`."""
        self._leases.wait_arrived(unit)
        unit.change(ticket, is_edit=is_edit)
        if unit.residency is not HOME and unit.residency is not RELEASED:
            self._leases.release(unit)

    def expect_no_late_write(self, index: int) -> None:
        """Raise if a write through a kept view has not reached the unit's home: [Note: kept views]."""
        self._units[index].expect_no_late_write()
