"""Gradients on their way from autograd to where their update runs (floor 5).

[Note: a gradient's way]
A parameter's gradient is copied into its unit's gradient lease on the device the moment autograd has it. When
the unit's last gradient has arrived the lease goes to the host in one copy, and from there (on the landing
thread) into its home, where micro batches add up. What is left at the end of backward, because some parameters
took no part, lands then; parameters without a gradient are left out of the norm and of the update, as
torch.optim leaves out parameters whose grad is None. A gradient whose update runs on the device is accumulated in
its home there and never leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from offloadzero.config import SegmentKind, TierName
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.arena import BufferPool, PooledBuffer
from offloadzero.memory.lanes import Fence, Lane, order_compute_after
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.tickets import FINISHED, AllOf, Promise, Ticket
from offloadzero.native.cpu_adam import AdamHyper, set_cores
from offloadzero.observe.clock import StepClock
from offloadzero.observe.timeline import LANDING
from offloadzero.optim import device_math
from offloadzero.optim.delivery import UpdateTicket
from offloadzero.optim.records import ParamSlot, Record, SlotViews, UpdateRange, slot_layout, update_ranges

log = logging.getLogger("offloadzero.gradients")


@dataclass(frozen=True, eq=False)
class BegunUpdate:
    """An update that waits for its gradient to land: its ticket, and the hyperparameters by group index."""

    ticket: UpdateTicket
    hypers: Sequence[AdamHyper]
    step: int


@dataclass(eq=False)
class RecordGradient:
    """The gradient of one record in one accumulation window."""

    record: Record
    # In backward:
    lease: PooledBuffer | None = None
    flat: torch.Tensor | None = None  # on the device, shape (num_trainable,)
    targets: Sequence[torch.Tensor] = ()  # views of `flat` by slot
    arrived: list[ParamSlot] = field(default_factory=list)
    # In the window:
    present: frozenset[int] = frozenset()  # offsets of the slots that have a gradient
    landed: Ticket = FINISHED
    fence: Fence = None
    sq_norm: float = 0.0  # of what has landed
    closed: bool = False  # its last micro batch is landing; on_landed follows
    update: BegunUpdate | None = None  # set in backward when the update follows the landing
    passing: PooledBuffer | None = None  # the host buffer of a gradient without a home

    def __post_init__(self) -> None:
        # Where it is kept until the step; None: it is consumed as it lands.
        self.home: Segment | None = self.record.segments.get(SegmentKind.GRAD)

    @property
    def present_slots(self) -> Iterator[ParamSlot]:
        """The parameters that have a gradient."""
        return (slot for slot in self.record.trainable_slots if slot.offset in self.present)

    def ranges(self) -> list[UpdateRange]:
        """What has a gradient, as ranges of the record (with the steps done so far)."""
        return update_ranges(self.record, self.present_slots)

    def in_memory(self) -> torch.Tensor | None:
        """The accumulated gradient, shape (num_trainable,), unless it lives on NVMe."""
        if self.passing is not None:
            return self.passing.view(self.record.grad_dtype, self.record.num_trainable)
        home = self.home
        return None if home is None or home.tier is TierName.NVME else home.memory


class GradientCollector:
    """Takes gradients from autograd record by record and lands them."""

    def __init__(
        self,
        records: Sequence[Record],
        store: TieredStore,
        *,
        device_leases: BufferPool,
        passing: BufferPool,
        staging: BufferPool,
        clock: StepClock,
        num_threads: int | None,
        cores: Collection[int],
        previous_update: Callable[[int], Ticket],
        on_begin: Callable[[], None],
        on_complete: Callable[[RecordGradient], None],
        on_landed: Callable[[RecordGradient], None],
    ) -> None:
        """Args:
        device_leases, passing, staging: gradient leases on the device; host buffers of gradients without a
            home; host buffers for gradients that are added to one already there.
        cores: CPUs that landing keeps to; empty: any.
        previous_update: the last update of a record, which may still read its gradient's home.
        on_begin: called in backward before a record's first gradient is taken.
        on_complete: called in backward when a record's gradients have all arrived and their landing begins.
        on_landed: called on the landing thread when the gradient of the whole window is home.
        """
        self._store = store
        self._device_leases = device_leases
        self._passing = passing
        self._staging = staging
        self._clock = clock
        self._num_threads = num_threads
        self._previous_update = previous_update
        self._on_begin = on_begin
        self._on_complete = on_complete
        self._on_landed = on_landed
        self._d2h = store.accelerator.lane("gradient-d2h", store.failures)
        self._landing = Lane("landing", store.failures)
        if cores:
            self._landing.submit(lambda: set_cores(cores))
        self.gradients = {r.index: RecordGradient(r) for r in records if r.num_trainable}
        self._views = {index: SlotViews(s.record.trainable_slots) for index, s in self.gradients.items()}
        shared: dict[Hashable, SlotViews] = {}
        for index, state in self.gradients.items():
            if state.home is None or state.home.tier is not TierName.DEVICE:
                layout = (state.record.dtype, slot_layout(state.record.trainable_slots))
                self._views[index] = shared.setdefault(layout, self._views[index])
        self._num_filling = 0
        self.last_micro_batch = True  # whether the running backward closes the window

    # --- in backward ---

    def add_slot(self, index: int, number: int) -> None:
        """`add` by numbers: of the record, and of the slot in it."""
        self.add(index, self.gradients[index].record.slots[number])

    def add(self, index: int, slot: ParamSlot) -> None:
        """Take `slot.param.grad` away from the parameter."""
        param = slot.param
        grad = param.grad
        param.grad = None
        if grad is None:
            raise AssertionError(f"{slot.name} has no gradient")
        state = self.gradients[index]
        if state.flat is None:
            self._on_begin()
            self._begin(state)
        if grad.is_sparse:
            raise ConfigError(
                slot.name, "sparse gradient", "dense gradients only: build the module sparse=False"
            )
        target = state.targets[slot.index]
        if state.lease is None and slot.offset in state.present:
            target.add_(grad)
        else:
            target.copy_(grad)
        arrived = state.arrived
        arrived.append(slot)
        if len(arrived) == len(state.targets):
            self._complete(state)

    def flush(self) -> None:
        """Backward is over: land the records of which some parameter took no part.

        In the last micro batch records that only earlier ones reached are closed too.
        """
        for state in self.gradients.values():
            if state.arrived:
                self._complete(state)
            elif self.last_micro_batch and state.present and not state.closed:
                # Its gradient says nothing of this micro batch, which may have read the weights all the same.
                after = [state.landed, self._store.accelerator.launched()]
                state.landed = done = Promise()
                state.closed = True
                try:
                    self._on_complete(state)
                    self._land(state, done, after, None)
                except BaseException as error:
                    self._lose(state, done, error)
                    raise

    def _begin(self, state: RecordGradient) -> None:
        record = state.record
        home = state.home
        if home is not None and home.tier is TierName.DEVICE:
            # An update of the last step may still read it.
            with self._clock.waiting("update"), self._store.failures.handed_over():
                order_compute_after(self._previous_update(record.index))
            state.flat = home.memory
        else:
            state.lease = self._take_device_lease(record)
            state.flat = state.lease.view(record.dtype, record.num_trainable)
        if state.lease is not None and state.lease.temporary:
            state.targets = [slot.view_in(state.flat) for slot in record.trainable_slots]
        else:
            state.targets = self._views[record.index].at(state.flat)
        for start, stop in record.padding:
            state.flat[start:stop].zero_()

    def _take_device_lease(self, record: Record) -> PooledBuffer:
        lease = self._device_leases.try_take()
        if lease is None and self._num_filling >= self._device_leases.num_buffers:
            # Every lease waits for gradients that may come after this one's: waiting would never end.
            log.warning("%s: more units in backward at once than gradient leases", record.name)
            size = record.num_trainable * record.dtype.itemsize
            lease = PooledBuffer(self._store.accelerator.allocate(size), temporary=True)
        elif lease is None:
            with self._clock.waiting("gradient lease"), self._store.failures.handed_over():
                lease = self._device_leases.take()
        self._num_filling += not lease.temporary
        if not lease.last_use.done():
            with self._clock.waiting("gradient lease"), self._store.failures.handed_over():
                order_compute_after(lease.last_use)
        return lease

    def _complete(self, state: RecordGradient) -> None:
        record = state.record
        arrived, state.arrived = state.arrived, []
        lease, state.lease, flat, state.flat, state.targets = state.lease, None, state.flat, None, ()
        if flat is None:
            raise AssertionError(f"{record.name} has no gradient lease")
        earlier = state.present
        state.present = earlier.union([slot.offset for slot in arrived])
        before = self._previous_update(record.index)  # on_complete replaces it
        state.fence = self._store.accelerator.fence()
        state.landed = done = Promise()
        state.closed = self.last_micro_batch
        try:
            self._on_complete(state)
            if lease is None:
                arrival: Ticket = self._store.accelerator.launched()
                self._land(state, done, [arrival], None)
                return
            self._num_filling -= not lease.temporary
            target = self._landing_place(state, not earlier)
            copied = self._copy_to_host(state, flat, lease, target, before)
            if target.in_place:
                self._land(state, done, [copied], None)
            else:
                self._land(state, done, [copied], lambda: self._merge(state, target, arrived, earlier))
        except BaseException as error:
            self._lose(state, done, error)
            raise

    def _lose(self, state: RecordGradient, done: Promise, error: BaseException) -> None:
        """What was raised (Ctrl-C in a wait, say) must not leave tickets that nobody will ever fulfil."""
        lost = StateError(f"{state.record.name}: backward was interrupted while its gradient was on the way")
        lost.__cause__ = error
        self._store.failures.record(lost)
        self._store.failures.was_raised = True
        done.fail(lost)
        if state.update is not None:
            state.update.ticket.fail(lost)

    def _landing_place(self, state: RecordGradient, is_first: bool) -> _Landing:
        record, home = state.record, state.home
        same_dtype = record.grad_dtype == record.dtype
        if is_first and same_dtype and home is not None and home.tier is TierName.HOST:
            return _Landing(home.memory, None, in_place=True)
        if home is None and same_dtype:
            state.passing = self._take_host(self._passing)
            view = state.passing.view(record.dtype, record.num_trainable)
            return _Landing(view, None, in_place=True)
        buffer = self._take_host(self._staging)
        return _Landing(buffer.view(record.dtype, record.num_trainable), buffer, in_place=False)

    def _take_host(self, pool: BufferPool) -> PooledBuffer:
        buffer = pool.try_take()
        if buffer is None:
            # Updates are slower than backward: this is where backward waits for them.
            with self._clock.waiting("gradient buffer on the host"), self._store.failures.handed_over():
                buffer = pool.take()
        return buffer

    def _copy_to_host(
        self,
        state: RecordGradient,
        flat: torch.Tensor,
        lease: PooledBuffer,
        target: _Landing,
        before: Ticket,
    ) -> Ticket:
        accelerator = self._store.accelerator

        def copy() -> None:
            try:
                before.wait()  # the last update may still read the gradient's home
                accelerator.copy(target.flat, flat)
            finally:
                if not lease.temporary:
                    self._device_leases.give_back(lease, last_use=accelerator.launched())

        return self._d2h.submit(copy, fence=state.fence, label=state.record.name)

    # --- on the landing thread ---

    def _land(
        self, state: RecordGradient, done: Promise, after: Sequence[Ticket], merge: Callable[[], None] | None
    ) -> None:
        closed = state.closed

        def task() -> None:
            try:
                AllOf(after).wait()
                if merge is not None:
                    merge()
                self._measure(state)
                if closed:
                    self._on_landed(state)
                done.fulfil()
            except BaseException as error:
                self._store.failures.record(error)  # before anyone who waits can see it
                done.fail(error)
                if state.update is not None:
                    state.update.ticket.fail(error)
                self.release_passing(state)
                raise

        self._landing.submit(task)

    def _measure(self, state: RecordGradient) -> None:
        """Take the norm while the gradient is in memory; put one that lives on NVMe away."""
        grad = state.in_memory()
        if grad is None:
            return  # on its file, measured by an earlier micro batch
        with self._store.timeline.span(LANDING, state.record.name, grad.nbytes):
            state.sq_norm = sum(
                device_math.sq_norm(grad[part.start : part.stop], num_threads=self._num_threads)
                for part in state.ranges()
            )
        home = state.home
        if home is not None and home.tier is TierName.NVME:
            self._store.write(home, grad).wait()
            self.release_passing(state)

    def _merge(
        self,
        state: RecordGradient,
        landing: _Landing,
        arrived: Sequence[ParamSlot],
        earlier: frozenset[int],
    ) -> None:
        """Copy what is the first of its window, add what is at the offsets `earlier`, which its home holds already."""
        record = state.record
        home = state.home
        on_file = home is not None and home.tier is TierName.NVME
        if on_file or home is None:
            state.passing = self._passing.take()
        acc = state.in_memory()
        if acc is None:
            raise AssertionError(f"{record.name}: no memory for its gradient")
        if on_file and earlier and home is not None:
            self._store.read(home, acc).wait()
        with self._store.timeline.span(LANDING, record.name, landing.flat.nbytes + acc.nbytes):
            for part in update_ranges(record, [slot for slot in arrived if slot.offset not in earlier]):
                acc[part.start : part.stop].copy_(landing.flat[part.start : part.stop])
            for part in update_ranges(record, [slot for slot in arrived if slot.offset in earlier]):
                device_math.accumulate(
                    acc[part.start : part.stop],
                    landing.flat[part.start : part.stop],
                    num_threads=self._num_threads,
                )
        if landing.buffer is not None:
            self._staging.give_back(landing.buffer)

    # --- after backward ---

    def abandon_window(self) -> None:
        """Drop the window's gradients, those of a backward that did not finish included."""
        for state in self.gradients.values():
            if state.lease is not None:
                self._num_filling -= not state.lease.temporary
                if not state.lease.temporary:
                    self._device_leases.give_back(state.lease, last_use=self._store.accelerator.launched())
                state.lease = None
        for state in self.take_window():
            with self._clock.waiting("gradient landing"):
                state.landed.wait()
            self.release_passing(state)

    def release_passing(self, state: RecordGradient) -> None:
        """The update has read the gradient."""
        if state.passing is not None:
            buffer, state.passing = state.passing, None
            self._passing.give_back(buffer)

    def take_window(self) -> list[RecordGradient]:
        """Close the window: its gradients, in the records' order, now belong to the caller."""
        window = [state for state in self.gradients.values() if state.present]
        self.gradients = {index: RecordGradient(state.record) for index, state in self.gradients.items()}
        return window

    def close(self) -> None:
        """Finish the copies and stop the lanes."""
        self._d2h.close()
        self._landing.close()


class _Landing(NamedTuple):
    """Where a gradient's bytes arrive on the host; `in_place`: that is where it stays."""

    flat: torch.Tensor
    buffer: PooledBuffer | None
    in_place: bool
