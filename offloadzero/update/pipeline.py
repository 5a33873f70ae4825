"""The update pipeline: optimizer steps over records whose segments live anywhere.

[Note: update pipeline]
One thread takes record updates in order and cuts each into chunks. Segments in host memory are updated in
place; those on NVMe or on the device are staged through slots of pinned memory. With three slots, the reads of
chunk k+1, the step on chunk k and the write-back of chunk k-1 run at once, across the borders of records. A chunk's
slot is used again only when its writes are complete. A record whose update lives wholly on the device is
updated there, on a lane of its own: [Note: forms of the update] in update/adam_form.py.

[Note: versions]
Where a step must know all gradients before it changes a state (clipping, loss scaling, several ranks), its updates
would begin when backward ends, and the drive would idle until then. A record whose states live on NVMe may have two
places for them, and for its parameters there or in host memory. Its update can then be tried while backward runs: as if
the step were applied with the factor that most steps have, 1 over the loss scale. A trial reads the present version and
writes the next one, which nobody reads. The step that follows is one like any other, with its decision and its jobs. A
job whose trial has done exactly what it would do (the same hyperparameters, ranges, factor; neither states nor gradient
written since) adopts it: the two places are exchanged, and the update is over. Any other job updates the present
version from the gradient, which is kept till then as ever. So a trial changes when bytes move and never which: if it is
wrong, late or not begun, only time is lost.

Trials wait behind all other work, one record at a time. When a step is decided those that have not begun are given up,
and their records are updated in the order in which the next forward needs them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from offloadzero.core.fail_points import through
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import StateError
from offloadzero.memory import device as devices
from offloadzero.memory.arena import Lease
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.tickets import AllOf, Ticket, unfinished
from offloadzero.observe.timeline import D2H, DEVICE_UPDATE, H2D, UPDATE
from offloadzero.update.delivery import Delivery, UpdateTicket
from offloadzero.update.records import Record, UpdateRange, all_ranges
from offloadzero.update.spec import Hyper, UpdateForm
from offloadzero.update.staging import ChunkStager, StagedChunk, cut_device_memory, needs_slot


class RecordUpdate:
    """One record's update of one step, as the pipeline sees it."""

    ranges: Sequence[UpdateRange] = ()  # the parts with a gradient
    grad_scale: float = 1.0  # the factor of the gradient
    is_trial = False  # it writes the next version: [Note: versions]
    adopted: Ticket | None = None  # done when the next version is home, which is what the update would make
    _grad: torch.Tensor | Segment | None = None

    def __init__(self, record: Record, hypers: Sequence[Hyper], *, before: Ticket) -> None:
        """Make an update, with the hyperparameters by group index.

        `before`: done when what the record's last update has made is home, and on all ranks. In a durable run the
        commit of the step before comes first, too.
        """
        self.record = record
        self.hypers = hypers
        self.before = record.commits.after(before)
        self.ticket = UpdateTicket()  # done when all results are home

    @property
    def grad(self) -> torch.Tensor | Segment:
        """The gradient: record.kept_trainable elements in memory, complete when it begins, or an NVMe segment."""
        if self._grad is None:
            raise AssertionError(f"the update of {self.record.name} has not begun")
        return self._grad

    def may_begin(self) -> bool:
        """Whether the pipeline shall run it now; a trial may have been given up."""
        return True

    def release_gradient(self) -> None:
        """Release the gradient, which has been read or will not be. Pipeline threads call this, perhaps twice."""


@dataclass(eq=False)
class _Chunk:
    """Elements [start, stop) of one record's update."""

    update: RecordUpdate
    start: int
    stop: int
    is_last: bool
    makes_next_version: bool
    delivery: Delivery | None
    writes: list[Ticket]  # of all chunks of the update
    previous: Ticket  # the record's update before this one, whose writes come first
    data: StagedChunk | None = None


# A call runs between updates; the updates that it returns are next.
_Work = RecordUpdate | Callable[[], Iterable[RecordUpdate] | None]


def update_bytes(buffers: Mapping[SegmentKind, torch.Tensor]) -> int:
    """The bytes that an update of these segments moves: all are read, all but the gradient are written."""
    return sum(b.nbytes * (1 if kind is SegmentKind.GRAD else 2) for kind, b in buffers.items())


class UpdatePipeline:
    """Runs record updates and decisions in the order of their submission on its own thread."""

    def __init__(
        self,
        store: TieredStore,
        *,
        slot_leases: Sequence[Lease],
        chunk_elements: int,
        num_threads: int | None,
        form: UpdateForm = UpdateForm.NATIVE,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Start the thread.

        Args:
            form: the form of the updates on the device.
            scratch: the device memory that this form needs, if any.
        """
        self._store = store
        self._failures = store.failures
        self._chunk_elements = chunk_elements
        self._num_threads = num_threads
        self._form = form
        self._scratch = scratch
        self._stager = ChunkStager(store, slot_leases, chunk_elements=chunk_elements)
        self._device_lane = store.accelerator.lane("update-device", store.failures)
        # Submitted work: appending is one step, which no interrupt can halve. None: nothing more will come.
        self._arriving: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._work: deque[_Work] = deque()  # used by the thread alone
        self._trials: deque[RecordUpdate] = deque()  # behind all work
        self._chunks: deque[_Chunk] = deque()  # of the record that is being cut
        self._closing = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="offloadzero-update", daemon=True)
        store.failures.add_thread(self)
        self._thread.start()

    def submit(self, work: _Work) -> None:
        """Queue an update, or a call that runs on the pipeline's thread between updates.

        The updates that a call returns come before all others. Raises StateError where the pipeline is closed.
        """
        if self._closing:
            raise StateError("the engine of this model is closed: it updates nothing any more")
        self._arriving.put(work)

    def read_ahead(self, records: Sequence[Record]) -> None:
        """Announce that the next step updates `records` in this order: [Note: reading ahead]."""
        if self._stager.num_slots:
            self.submit(lambda: self._stager.read_ahead(records))

    def close(self) -> None:
        """Finish the submitted work and stop the thread. After an interrupt it may be called again."""
        self._closing = True
        self._arriving.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._device_lane.close()

    # --- the pipeline's thread ---

    def _run(self) -> None:
        self._failures.in_background()
        window: deque[_Chunk] = deque()
        depth = max(1, self._stager.num_slots - 1)
        while True:
            chunk = self._next_chunk(block=not window)
            if chunk is None and not window:
                return
            try:
                if chunk is not None:
                    if not chunk.previous.done():
                        while window:  # the awaited work may be among them
                            self._compute_first(window)
                        chunk.previous.wait()
                    through("update.stage", self._start_reads, chunk.update.record.name)(chunk)
                    window.append(chunk)
                if window and (chunk is None or len(window) >= depth):
                    self._compute_first(window)
            except BaseException as error:
                self._failures.record(error)
                self._fail([*window, *([chunk] if chunk is not None else [])], error)
                window.clear()
            del chunk  # a waiting thread keeps nothing of the last chunk

    def _next_chunk(self, *, block: bool) -> _Chunk | None:
        """Return the next chunk to start; None when there is none now (or, blocking, ever again)."""
        while not self._chunks:
            self._take_arrived(block=block and not self._work and not self._trials)
            if not self._work and not self._trials:
                return None
            if self._work and not block and callable(self._work[0]):
                return None  # a call comes after the updates before it
            work = (self._work or self._trials).popleft()
            if not callable(work):
                if work.is_trial and self._closing:
                    work.ticket.fulfil()
                elif work.may_begin():
                    self._begin(work)
            else:
                try:
                    self._work.extendleft(reversed(tuple(work() or ())))
                except BaseException as error:
                    self._failures.record(error)
            del work
        return self._chunks.popleft()

    def _take_arrived(self, *, block: bool) -> None:
        """Queue the submitted work; `block`: wait for some unless nothing more will come."""
        while not self._is_over:
            try:
                work = self._arriving.get(block)
            except queue.Empty:
                return
            block = False
            if work is None:
                self._is_over = True
            elif not callable(work) and work.is_trial:
                self._trials.append(work)
            else:
                self._work.append(work)

    def _begin(self, update: RecordUpdate) -> None:
        if self._failures.first is not None:
            self._fail_update(update, self._failures.first)
            return
        # A forward has waited for its parameters, which may have been delivered, but not for the writes. Between two
        # steps with the same gradients there is none: other ranks may still be sent what the first has made.
        previous = unfinished(update.before)
        if update.adopted is not None:
            update.record.flip()
            self._finish(update, (update.adopted,))
            return
        if update.record.updates_on_device and isinstance(update.grad, torch.Tensor):
            self._update_on_device(update, update.grad, previous)
            return
        makes_next_version = update.is_trial or update.record.makes_next_version
        ranges = all_ranges(update.record) if makes_next_version else update.ranges
        bounds = [(r.start, r.stop) for r in ranges if r.start < r.stop]
        if not bounds:  # what has a gradient has no elements, or none of this rank's
            self._finish(update, (previous,))
            return
        delivery, writes = update.ticket.begin(), list[Ticket]()
        first, last = bounds[0][0], bounds[-1][1]
        # Segments in host memory need no chunks: one call of the kernel.
        is_staged = self._is_staged(update)
        chunk_elements = self._chunk_elements if is_staged else update.record.kept_trainable
        for start, stop in update.record.chunks(first, last, chunk_elements):
            self._chunks.append(
                _Chunk(
                    update,
                    start,
                    stop,
                    is_last=stop >= last,
                    makes_next_version=makes_next_version,
                    delivery=delivery,
                    writes=writes,
                    previous=previous,
                )
            )

    @staticmethod
    def _is_staged(update: RecordUpdate) -> bool:
        on_host = isinstance(update.grad, torch.Tensor) and devices.is_host_memory(update.grad)
        return needs_slot(update.record) or not on_host

    def _update_on_device(self, update: RecordUpdate, grad: torch.Tensor, previous: Ticket) -> None:
        record = update.record
        buffers = {kind: segment.memory for kind, segment in record.segments.items()}
        buffers[SegmentKind.GRAD] = grad
        stop = record.kept_trainable
        # Frozen parameters lie behind the others and are not touched.
        num_bytes = update_bytes({kind: b[record.chunk_slice(kind, 0, stop)] for kind, b in buffers.items()})

        def task() -> None:
            with self._store.accelerator.span(DEVICE_UPDATE, record.name, num_bytes):
                self._step(update, buffers, start=0, stop=stop, form=self._form)
            update.release_gradient()

        update.ticket.fulfil(self._device_lane.submit(task, after=[previous]))

    def _start_reads(self, chunk: _Chunk) -> None:
        chunk.data = data = self._stager.stage(
            chunk.update.record, chunk.start, chunk.stop, makes_next_version=chunk.makes_next_version
        )
        grad = chunk.update.grad
        if isinstance(grad, torch.Tensor) and devices.is_host_memory(grad):
            data.buffers[SegmentKind.GRAD] = grad[chunk.start : chunk.stop]
            return
        dtype = chunk.update.record.grad_dtype
        data.buffers[SegmentKind.GRAD] = buffer = self._stager.memory(data, SegmentKind.GRAD, dtype)
        if isinstance(grad, Segment):
            data.reads.append(self._store.read(grad, buffer, start=chunk.start))
        else:
            source = grad[chunk.start : chunk.stop]
            copy = self._store.accelerator.copy
            name = chunk.update.record.name
            data.reads.append(self._store.on_device.d2h.submit(lambda: copy(buffer, source), label=name))

    def _compute_first(self, window: deque[_Chunk]) -> None:
        chunk = window.popleft()
        through("update.compute", self._compute, chunk.update.record.name)(chunk)

    def _compute(self, chunk: _Chunk) -> None:
        update, data = chunk.update, chunk.data
        if data is None:
            raise AssertionError("a chunk is computed that was not staged")
        if self._failures.first is not None:
            self._fail_update(update, self._failures.first)
            return
        try:
            AllOf(data.reads).wait()
            if update.record.spec.takes_whole:
                self._step_through_device(update, data.buffers, start=chunk.start, stop=chunk.stop)
            else:
                with self._store.timeline.span(UPDATE, update.record.name, update_bytes(data.buffers)):
                    self._step(update, data.buffers, start=chunk.start, stop=chunk.stop)
            readers = []
            if chunk.delivery is not None:
                readers.append(chunk.delivery.put(chunk.start, data.buffers[SegmentKind.PARAM]))
            chunk.writes.extend(self._stager.write_back(data, readers=readers))
        except BaseException as error:
            self._failures.record(error)
            self._fail_update(update, error)
            return
        if chunk.is_last:
            if chunk.makes_next_version and not update.is_trial:
                update.record.flip()
            self._finish(update, chunk.writes)

    def _step_through_device(
        self, update: RecordUpdate, buffers: Mapping[SegmentKind, torch.Tensor], *, start: int, stop: int
    ) -> None:
        """Do the step of a chunk in host memory on the device, and wait for it: [Note: whole parameters]."""
        if self._scratch is None:
            raise AssertionError(f"no scratch is planned for {update.record.name}")
        there, scratch = cut_device_memory(self._scratch, buffers)
        accelerator = self._store.accelerator

        def task() -> None:
            for kind, buffer in buffers.items():
                accelerator.copy(there[kind], buffer, lane=H2D)
            with accelerator.span(DEVICE_UPDATE, update.record.name, update_bytes(there)):
                self._step(update, there, start=start, stop=stop, form=self._form, scratch=scratch)
            for kind, buffer in buffers.items():
                if kind is not SegmentKind.GRAD:
                    accelerator.copy(buffer, there[kind], lane=D2H)

        self._device_lane.submit(task, label=update.record.name).wait()

    def _step(
        self,
        update: RecordUpdate,
        buffers: Mapping[SegmentKind, torch.Tensor],
        *,
        start: int,
        stop: int,
        form: UpdateForm = UpdateForm.NATIVE,
        scratch: torch.Tensor | None = None,
    ) -> None:
        for part in update.ranges:
            state = part.of(buffers, start, stop)
            if state is None:
                continue
            update.record.spec.step(
                state,
                hyper=update.hypers[part.group_index],
                step=part.step,
                grad_scale=update.grad_scale * part.factor,
                num_threads=self._num_threads,
                form=form,
                scratch=self._scratch if scratch is None else scratch,
            )

    @staticmethod
    def _finish(update: RecordUpdate, writes: Iterable[Ticket] = ()) -> None:
        update.release_gradient()
        update.ticket.fulfil(AllOf(writes))

    @staticmethod
    def _fail_update(update: RecordUpdate, error: BaseException) -> None:
        update.ticket.fail(error)
        update.release_gradient()

    def _fail(self, chunks: Sequence[_Chunk], error: BaseException) -> None:
        for chunk in (*chunks, *self._chunks):
            self._fail_update(chunk.update, error)
        self._chunks.clear()
