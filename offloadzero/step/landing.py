"""The way of gradients from the device to their homes, where micro batches add up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from offloadzero.arithmetic import device_math
from offloadzero.core.fail_points import through
from offloadzero.memory.arena import BufferPool
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Promise, Ticket
from offloadzero.native.kernels import set_cores
from offloadzero.observe.timeline import LANDING
from offloadzero.step.decider import Decider
from offloadzero.step.job import Trial, UpdateJob
from offloadzero.step.record_gradient import Borrowed, Brought, RecordGradient, end_trial
from offloadzero.step.reduction import Reduction
from offloadzero.update.pipeline import UpdatePipeline
from offloadzero.update.records import update_ranges


class Place(NamedTuple):
    """The place where a gradient's bytes arrive on the host; `in_place`: they stay there, `buffer` included."""

    flat: torch.Tensor
    buffer: Borrowed | None
    in_place: bool

    def give_back(self) -> None:
        """Give the buffer back: nothing will land in it."""
        if self.buffer is not None:
            self.buffer.give_back()


class Landing:
    """Copies gradients to the host, adds them up at home and measures them, on threads of its own."""

    def __init__(
        self,
        store: TieredStore,
        *,
        passing: BufferPool,
        staging: BufferPool,
        norm_scratch: torch.Tensor | None,
        num_threads: int | None,
        cores: Collection[int],
        reduction: Reduction,
        decider: Decider,
        pipeline: UpdatePipeline,
    ) -> None:
        """Make the landing with its threads.

        Args:
            passing: host buffers of gradients without a home.
            staging: host buffers of gradients that are added to one at home.
            norm_scratch: device memory in which the norms of gradients there are taken, if that takes any.
            cores: CPUs that landing keeps to; empty: any.
            reduction: makes gradients those of all ranks, on the lane.
            decider: says whether a job whose gradient is home is applied.
            pipeline: takes such a job.
        """
        self._store = store
        self._passing = passing
        self._staging = staging
        self._norm_scratch = norm_scratch
        self._num_threads = num_threads
        self._reduction = reduction
        self._decider = decider
        self._pipeline = pipeline
        self._d2h = store.accelerator.lane("gradient-d2h", store.failures)
        # The lane has a stream of its own: norms of gradients on the device do not queue behind the computation.
        self._lane = store.accelerator.lane("landing", store.failures)
        if cores:
            self._lane.submit(lambda: set_cores(cores))

    # --- in backward ---

    def reserve(self, gradient: RecordGradient) -> Place | None:
        """Reserve the place where a record's gradient of this backward will land; waits for a buffer.

        None where it stays in its home on the device, and where it is reduced: other ranks wait in the reduction, so
        what must be waited for comes after it.
        """
        if gradient.lease is None or gradient.record.is_reduced:
            return None
        return self._place(gradient, self._take_host, adds=bool(gradient.present))

    def _place(
        self, gradient: RecordGradient, take: Callable[[BufferPool], Borrowed], *, adds: bool
    ) -> Place:
        """Return the place of what comes to the host; it `adds` to what earlier micro batches have brought."""
        record, home = gradient.record, gradient.home
        same_dtype = record.grad_dtype == record.dtype
        if not adds and same_dtype and home is not None and home.is_in_host_memory:
            return Place(home.memory, None, in_place=True)
        in_place = home is None and same_dtype
        buffer = take(self._passing if in_place else self._staging)
        return Place(buffer.view(record.dtype, record.kept_trainable), buffer, in_place=in_place)

    def _take_host(self, pool: BufferPool) -> Borrowed:
        buffer = pool.try_take()
        if buffer is None:
            # Updates may be slower than backward: here backward waits for them.
            with self._store.clock.waiting("gradient buffer on the host"), self._store.failures.handed_over():
                buffer = pool.take()
        return Borrowed(buffer, pool)

    def send(
        self, brought: Brought, place: Place | None, *, before: Ticket, job: UpdateJob | Trial | None
    ) -> None:
        """Take a record's gradient of this backward home; `job` follows it. Waits for nothing.

        `place`: as `reserve` has given it. `before`: the home may be written after it.
        """
        gradient, lease = brought.gradient, brought.lease
        trial = end_trial(gradient)  # of an earlier backward, which could have been the last
        gradient.begin_trial(job if isinstance(job, Trial) else None)
        if lease is None and not gradient.closed:
            # Its norm is taken for the whole window: the next micro batch waits for nothing.
            gradient.stay_unmeasured(self._store.accelerator.computed())
            return
        if not (gradient.landed.done() and trial.done()):
            before = AllOf([before, gradient.landed, trial])  # of gradients that were dropped since
        done = gradient.begin_landing()
        if lease is None:
            self._land(gradient, done, [self._store.accelerator.computed()], None, job)
            return
        if place is not None and place.in_place:
            gradient.pass_in(place.buffer)
        landed_at = [] if place is None else [place]
        merge_at = through("landing.merge", self._merge, gradient.record.name)
        places, earlier, factors = brought.places, brought.earlier, brought.factors

        def merge() -> None:
            if not landed_at[0].in_place:
                merge_at(gradient, landed_at[0], places, earlier, factors)

        copied = self._copy_to_host(brought, landed_at, before)
        self._land(gradient, done, [copied], merge, job, held=lease)

    def _copy_to_host(self, brought: Brought, landed_at: list[Place], before: Ticket) -> Ticket:
        """Reduce a gradient and copy what is kept of it, on the lane, to its place; `landed_at` has that afterwards."""
        record, lease, leases = brought.gradient.record, brought.lease, brought.leases
        if lease is None:
            raise AssertionError(f"{record.name} has no gradient lease")
        if record.is_reduced:
            self._reduction.submit(record)
        accelerator = self._store.accelerator

        def copy() -> None:
            try:
                part = self._reduction.reduce(brought)
                # The last update may still read the gradient's home. In the reduction other ranks wait for this one.
                before.wait()
                if landed_at:
                    accelerator.copy(landed_at[0].flat, part)
                else:
                    landed_at.append(self._bring(brought, part))
            finally:
                if not lease.temporary:
                    leases.give_back(lease, last_use=accelerator.launched())

        return self._d2h.submit(copy, fence=accelerator.fence(), label=record.name)

    def _bring(self, brought: Brought, part: torch.Tensor) -> Place:
        """Copy or add a reduced gradient to its place, on the lane; return that."""
        gradient, home = brought.gradient, brought.gradient.home
        if home is not None and home.is_on_device:
            self._add(gradient, home.memory, part, brought.places, brought.earlier, brought.factors)
            return Place(home.memory, None, in_place=True)
        adds = bool(brought.earlier)
        place = self._place(gradient, lambda pool: Borrowed(pool.take(), pool), adds=adds)
        self._store.accelerator.copy(place.flat, part)
        return place

    def close(self, gradient: RecordGradient, *, job: UpdateJob | Trial | None) -> None:
        """Close the window of a gradient at home; `job` follows when all work launched so far has run."""
        gradient.close()
        gradient.begin_trial(job if isinstance(job, Trial) else None)
        # Landed earlier gradients come first: one after the other.
        self.measure(gradient, self._store.accelerator.computed(), job=job)

    def measure(
        self, gradient: RecordGradient, after: Ticket, *, job: UpdateJob | Trial | None = None
    ) -> None:
        """Measure the gradient at home, after `after`."""
        done = gradient.begin_landing()
        self._land(gradient, done, [after], None, job)

    # --- on the landing thread ---

    def _land(
        self,
        gradient: RecordGradient,
        done: Promise,
        after: Sequence[Ticket],
        merge: Callable[[], None] | None,
        job: UpdateJob | Trial | None,
        *,
        held: object = None,
    ) -> None:
        """Merge and measure a gradient on the landing thread, then hand `job` on.

        The slots are those of now: by the time of the landing, scripts may have dropped gradients that a step, with a
        copy of `gradient`, still rests on. `held` is the memory that the copy reads, which the allocator would
        otherwise give to the next kernel.
        """
        places = None if gradient.is_full else sorted(gradient.present)
        name = gradient.record.name

        def task() -> None:
            nonlocal held
            try:
                AllOf(after).wait()
                held = None
                if merge is not None:
                    merge()
                through("landing.measure", self._measure, name)(gradient, places)
                if job is not None and through("decider.decide_one", self._decider.decide_one, name)(job):
                    self._pipeline.submit(job)
                done.fulfil()
            except BaseException as error:
                self._store.failures.record(error)  # before any waiting thread can see it
                done.fail(error)
                if job is not None:
                    job.ticket.fail(error)
                gradient.release()
                raise

        self._lane.submit(task)

    def _measure(self, gradient: RecordGradient, places: Sequence[int] | None) -> None:
        """Measure the slots at `places` (None: all) while the gradient is in memory.

        A gradient that lives on NVMe is then written there.
        """
        grad = gradient.in_memory()
        if grad is None:
            return  # on its file, measured by an earlier micro batch
        with self._store.timeline.span(LANDING, gradient.record.name, grad.nbytes):
            parts = gradient.record.kept_parts
            if places is not None:
                parts = tuple([parts[place] for place in places])
            measured = device_math.sq_norms(
                grad, parts, num_threads=self._num_threads, scratch=self._norm_scratch
            )
        gradient.measured(measured, places)
        home = gradient.home
        if home is not None and not home.is_in_memory:
            self._store.write(home, grad).wait()
            gradient.release()

    def _merge(
        self,
        gradient: RecordGradient,
        place: Place,
        arrived: Sequence[int],
        earlier: frozenset[int],
        factors: Mapping[int, float],
    ) -> None:
        """Copy gradients that are the first of their window, and add those at the places `earlier` to the home's.

        `factors`, by slot, multiply the home's gradient before the addition.
        """
        record, home, brought = gradient.record, gradient.home, place.flat
        on_file = home is not None and not home.is_in_memory
        if on_file or home is None:
            gradient.pass_in(Borrowed(self._passing.take(), self._passing))
        acc = gradient.in_memory()
        if acc is None:
            raise AssertionError(f"{record.name}: no memory for its gradient")
        if on_file and earlier and home is not None:
            self._store.read(home, acc).wait()
        with self._store.timeline.span(LANDING, record.name, brought.nbytes + acc.nbytes):
            self._add(gradient, acc, brought, arrived, earlier, factors)
        place.give_back()

    def _add(
        self,
        gradient: RecordGradient,
        acc: torch.Tensor,
        brought: torch.Tensor,
        arrived: Sequence[int],
        earlier: frozenset[int],
        factors: Mapping[int, float],
    ) -> None:
        """Add `brought` to `acc`, both of shape (kept_trainable,), as `_merge` says."""
        record = gradient.record
        slots = record.trainable_slots
        for part in update_ranges(record, [slots[each] for each in arrived if each not in earlier]):
            acc[part.start : part.stop].copy_(brought[part.start : part.stop])
        added = [slots[each] for each in arrived if each in earlier]
        for part in update_ranges(record, added, factors=factors):
            if part.factor != 1.0:
                acc[part.start : part.stop].mul_(part.factor)
            device_math.accumulate(
                acc[part.start : part.stop],
                brought[part.start : part.stop],
                num_threads=self._num_threads,
            )
