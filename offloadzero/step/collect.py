"""Gradients on their way from autograd to where their update runs (floor 5).

[Note: a gradient's way]
A parameter's gradient is copied into its unit's gradient lease on the device the moment autograd has it. When
the unit's last gradient has arrived the lease goes to the host in one copy, and from there (on the landing
thread) into its home, where micro batches add up. What is left at the end of backward, because some parameters
took no part, lands then; parameters without a gradient are left out of the norm and of the update, as
torch.optim leaves out parameters whose grad is None. A gradient whose update runs on the device is accumulated in
its home there and never leaves. `param.grad` stands for it all the way: [Note: the life of param.grad].

[Note: what a backward leaves that does not finish]
The hooks run under `uninterrupted`: what autograd has brought is taken, or a wait inside was left. Each wait comes
before the change that it is for, so what is raised there leaves a gradient that is either not taken yet or on its way
home; dropping the gradients is then all that there is to do. What a hook never saw (another hook raised) is known by
the number of its backward, and is not added to.

[Note: a script's own gradient]
A tensor that a script has put into `param.grad` before backward, a view of a flat buffer say, is added to in place by
autograd and is the script's to read and write afterwards. It stays where it is and is copied home at the step. It is
known by two things: it was written in place, and somebody besides `param.grad` holds it or its storage.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch

from offloadzero.config import TierName
from offloadzero.errors import StateError
from offloadzero.memory.arena import BufferPool, PooledBuffer
from offloadzero.memory.lanes import order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.optim.records import ParamSlot, Record, SlotViews, slot_layout
from offloadzero.parameters.gradient import GradientSource, GradientTensor, in_graph_of
from offloadzero.step.assigned import Change, bring_home, passed_on
from offloadzero.step.job import UpdateJob
from offloadzero.step.landing import Landing
from offloadzero.step.param_grad import (
    KEEP_KEY,
    GradientAccess,
    GradientHandle,
    ParamGradient,
    drop_gradients,
    expect_dense,
)
from offloadzero.step.record_gradient import Brought, RecordGradient
from offloadzero.torch_private import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    foreach_zero,
    storage_use_count,
)

log = logging.getLogger("offloadzero.gradients")

_BESIDE_THE_PLAN = (
    "%s: its gradient comes while all %d gradient leases wait for the rest of other units' gradients: it takes a "
    "temporary buffer of %d bytes on the device, beside the plan. The numbers are the same. That is so where a loss "
    "uses weights outside their units' forward, in a penalty say: leave room there, or let the optimizer's "
    "weight_decay do it"
)


class GradientCollector:
    """Takes gradients from autograd record by record and lands them."""

    def __init__(
        self,
        records: Sequence[Record],
        store: TieredStore,
        *,
        device_leases: BufferPool,
        own_leases: Mapping[int, BufferPool],
        landing: Landing,
        clock: StepClock,
        num_threads: int | None,
        previous_update: Callable[[int], Ticket],
        keeps_after_step: bool,
        updates_in_backward: bool,
        may_not_train: Sequence[ParamSlot],
        on_begin: Callable[[], None],
        on_complete: Callable[[RecordGradient], None],
        on_sending: Callable[[RecordGradient], UpdateJob | None],
    ) -> None:
        """Args:
        device_leases: those that units take turns in.
        own_leases: by the index of a record: the one lease that is its alone.
        previous_update: the last update of a record, which may still read its gradient's home.
        keeps_after_step: gradients stay until they are dropped, as torch's do; else the step drops them.
        updates_in_backward: a gradient is consumed as it lands.
        may_not_train: parameters of the optimizer that were frozen when the model was offloaded.
        on_begin: called in each backward before the first gradient is taken.
        on_complete: called in backward when a record's gradients have all arrived.
        on_sending: called after that when their landing begins, gives what follows it; what it raises leaves them.
        """
        self._store = store
        self._has_streams = store.accelerator.has_streams
        self._device_leases = device_leases
        self._own_leases = own_leases
        self._landing = landing
        self._clock = clock
        self._previous_update = previous_update
        self._on_begin = on_begin
        self._on_complete = on_complete
        self._on_sending = on_sending
        self.gradients = {r.index: RecordGradient(r) for r in records if r.num_trainable}
        self._views = {
            index: SlotViews(state.record.trainable_slots, state.record.padding)
            for index, state in self.gradients.items()
        }
        shared: dict[Hashable, SlotViews] = {}
        for index, state in self.gradients.items():
            if state.home is None or state.home.tier is not TierName.DEVICE:
                record = state.record
                layout = (record.dtype, record.padding, slot_layout(record.trainable_slots))
                self._views[index] = shared.setdefault(layout, self._views[index])
        self._num_filling = 0
        self._told: set[int] = set()
        self.last_micro_batch = True  # whether the running backward closes the window
        self._running = -1  # the backward whose gradients are taken
        self._is_nested = False  # a checkpoint has run a backward of its own inside it
        self._records_graph = False  # backward(create_graph=True)
        self._keeps_after_step = keeps_after_step
        self._updates_in_backward = updates_in_backward
        self._may_not_train = tuple(may_not_train)
        self.access = GradientAccess(
            store,
            clock=clock,
            num_threads=num_threads,
            current=lambda index: self.gradients[index],
            previous_update=previous_update,
            updates_in_backward=updates_in_backward,
        )
        self._handles = {i: self.access.handles(s.record) for i, s in self.gradients.items()}

    # --- in backward ---

    def add(self, index: int, number: int) -> None:
        """Take what backward has put into a parameter's `grad`, and put there what stands for it.

        The parameter by numbers: of its record, and of its slot there.
        """
        with DisableTorchFunctionSubclass():
            handle = self._handles[index][number]
            if current_graph_task_id() != self._running:
                self._is_nested = self._running >= 0
                self._begin_backward(handle)
            param = handle.param
            grad = param.grad
            state = self.gradients[index]
            in_graph: torch.Tensor | None = None  # of an earlier backward, in which it stays
            if type(grad) is not torch.Tensor or number in state.present or grad._version:
                if grad is not None and grad.requires_grad and handle.is_own(grad):
                    in_graph = grad
                grad = self._contribution(state, handle, grad)
                if grad is None:
                    return
            if self._records_graph and grad.requires_grad:
                in_graph, grad = in_graph_of(grad, handle.source), grad.detach()
            param.grad = handle.tensor if in_graph is None else in_graph
            handle.taken_in = self._running
        slot = handle.slot
        if state.flat is None:
            if state.closed and self._updates_in_backward:
                raise StateError(
                    f"{slot.name} gets a gradient a second time in one backward (a reentrant checkpoint around a "
                    f"shared module?), but the weights are updated in backward: set {KEEP_KEY}"
                )
            self._begin(state)
        if self._has_streams:
            self._order_stream(state)
        arrived, targets = state.arrived, state.targets
        if self._is_nested and slot in arrived:
            _add(slot, grad, targets[number])
            return
        if state.lease is None and number in state.present:
            _add(slot, grad, targets[number], factor=state.factors.pop(number, 1.0))
        else:
            try:
                targets[number].copy_(grad)
            except RuntimeError:
                expect_dense(slot, grad)
                raise
        arrived.append(slot)
        if len(arrived) == len(targets):
            self._complete(state)

    def _begin_backward(self, handle: GradientHandle) -> None:
        """The first gradient of a backward has arrived, the one of `handle`."""
        param, grad = handle.param, handle.param.grad
        is_own, is_remote = handle.is_own(grad), isinstance(grad, GradientTensor)
        if not is_own:
            param.grad = None  # as it was before this backward, unless it is the script's own
        try:
            self._on_begin()
            if is_remote:
                param.grad = grad
            if not (self._is_nested or self._updates_in_backward or torch.is_grad_enabled()):
                self._settle_passed_on()
        except BaseException:
            # What this backward has brought is not taken, and must not be there for the next one.
            handle.source.contribution = None
            raise
        if not is_remote:
            param.grad = grad
        self._running = current_graph_task_id()
        self._records_graph = torch.is_grad_enabled()

    def end_backward(self) -> None:
        """The next gradient is another backward's."""
        self._running = -1
        self._is_nested = False

    @staticmethod
    def _contribution(
        state: RecordGradient, handle: GradientHandle, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What there is to take where `param.grad` was not empty before: [Note: the life of param.grad]."""
        slot, source = handle.slot, handle.source
        if handle.is_own(grad):
            contribution, source.contribution = source.contribution, None
            if contribution is None:
                return None
            if contribution.is_all or slot.index in state.zeroed:
                state.forget(slot)
            return contribution.grad
        if isinstance(grad, GradientTensor) and grad.source is source:
            handle.param.grad = grad.read()  # a view of it, of other rows and columns say
            return None
        if slot.index in state.present:  # the script has dropped it, or put another in its place
            state.forget(slot)
            handle.drop()
        if grad is None or isinstance(grad, GradientTensor):
            return None
        if grad._version and _is_held(grad):
            return None  # [Note: a script's own gradient]
        return grad

    def flush(self) -> None:
        """Backward is over: land the records of which some parameter took no part.

        In the last micro batch records that only earlier ones reached are closed too.
        """
        for state in self.gradients.values():
            if state.arrived:
                self._complete(state)
            elif self.last_micro_batch and state.present and not state.closed:
                # Its gradient says nothing of this micro batch, which may have read the weights all the same.
                after = self._store.accelerator.computed()  # and what has landed before: one after the other
                self._on_complete(state)
                job = self._on_sending(state)
                state.closed = True
                self._landing.measure(state, after, job=job)

    def _begin(self, state: RecordGradient) -> None:
        record = state.record
        home = state.home
        if home is not None and home.tier is TierName.DEVICE:
            # An update of the last step may still read it, or who measures what earlier micro batches brought.
            state.free = AllOf([self._previous_update(record.index), state.landed])
            with self._clock.waiting("update"), self._store.failures.handed_over():
                order_compute_after(state.free)
            state.flat = home.memory
        else:
            state.lease = self._take_device_lease(record)
            state.free = state.lease.last_use
            state.flat = state.lease.view(record.dtype, record.num_trainable)
        views = self._views[record.index]
        if state.lease is not None and state.lease.temporary:
            state.targets, padding = views.of(state.flat)
        else:
            state.targets, padding = views.at(state.flat)
        if self._has_streams:
            state.streams.append(self._store.accelerator.note_stream())
        if padding:
            foreach_zero(padding)  # in one launch

    def _order_stream(self, state: RecordGradient) -> None:
        """A second stream that brings gradients waits for the memory, too."""
        stream = self._store.accelerator.note_stream()
        if stream not in state.streams:
            state.streams.append(stream)
            order_compute_after(state.free)

    def _take_device_lease(self, record: Record) -> PooledBuffer:
        leases = self._leases_of(record)
        lease = leases.try_take()
        if lease is None and leases is self._device_leases and self._num_filling >= leases.num_buffers:
            # Every lease waits for gradients that may come after this one's: waiting would never end.
            size = record.num_trainable * record.dtype.itemsize
            if record.index not in self._told:
                self._told.add(record.index)
                log.warning(_BESIDE_THE_PLAN, record.name, leases.num_buffers, size)
            lease = PooledBuffer(self._store.accelerator.allocate(size), temporary=True)
        elif lease is None:
            with self._clock.waiting("gradient lease"), self._store.failures.handed_over():
                lease = leases.take()
        if not lease.last_use.done():
            try:
                with self._clock.waiting("gradient lease"), self._store.failures.handed_over():
                    order_compute_after(lease.last_use)
            except BaseException:
                leases.give_back(lease, last_use=lease.last_use)
                raise
        self._num_filling += self._is_shared(record, lease)
        return lease

    def _leases_of(self, record: Record) -> BufferPool:
        """Those that units take turns in, or the one of the record's own."""
        return self._own_leases.get(record.index, self._device_leases)

    def _is_shared(self, record: Record, lease: PooledBuffer) -> bool:
        return not lease.temporary and record.index not in self._own_leases

    def _complete(self, state: RecordGradient) -> None:
        """All that backward brings of a record is in its lease: send it home.

        First come the waits. What is raised there leaves everything as it was; from then on nothing is raised.
        """
        self._on_complete(state)
        place = None if state.lease is None else self._landing.reserve(state)
        before = self._previous_update(state.record.index)  # the one that is about to begin replaces it
        try:
            job = self._on_sending(state)
        except BaseException:
            if place is not None:
                place.give_back()
            raise
        self._landing.send(self._hand_over(state), place, before=before, job=job)

    def _hand_over(self, state: RecordGradient) -> Brought:
        """What has arrived is in the window, and its lease is no longer this object's."""
        record, flat, lease = state.record, state.flat, state.lease
        if flat is None:
            raise AssertionError(f"{record.name} has no gradient lease")
        earlier, arrived, state.arrived = state.present, state.arrived, []
        state.lease, state.flat, state.targets, state.streams = None, None, (), []
        state.present = earlier.union([slot.index for slot in arrived])
        state.closed = self.last_micro_batch
        factors = {}
        if lease is not None:
            self._num_filling -= self._is_shared(record, lease)
            if state.factors:
                factors = {s.index: state.factors.pop(s.index) for s in arrived if s.index in state.factors}
        return Brought(state, flat, lease, self._leases_of(record), arrived, earlier, factors)

    # --- after backward ---

    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient."""
        with DisableTorchFunctionSubclass():
            for handles in self._handles.values():
                for handle in handles:
                    if handle.param.grad is not None:
                        return True
        return False

    def abandon_window(self) -> None:
        """Drop the window's gradients, those of a backward that did not finish included."""
        self._abandon()
        self.drop_tensors()

    def zero_window(self) -> None:
        """Make every gradient that is there zero; what a backward that did not finish has left, too."""
        self._abandon()
        others: list[tuple[RecordGradient, GradientHandle, torch.Tensor]] = []
        zeroed: set[GradientSource] = set()
        for index, handles in self._handles.items():
            for handle in handles:
                handle.source.contribution = None
                with DisableTorchFunctionSubclass():
                    grad = handle.param.grad
                if handle.is_own(grad):
                    _wear_zeros(self.gradients[index], handle)
                    zeroed.add(handle.source)
                elif grad is not None:
                    others.append((self.gradients[index], handle, grad))
        for state, handle, grad in others:
            source = grad.source if isinstance(grad, GradientTensor) else None
            if source in zeroed:  # another parameter's gradient, which both go on to wear
                handle.param.grad = grad.detach() if grad.requires_grad else grad
            elif isinstance(source, ParamGradient):
                _wear_zeros(state, handle)  # nobody's gradient is at home there any more
            else:
                _zero(grad)

    def _abandon(self) -> None:
        for state in self.gradients.values():
            if state.lease is not None and not state.lease.temporary:
                leases = self._leases_of(state.record)
                leases.give_back(state.lease, last_use=self._store.accelerator.computed())
        self._num_filling = 0
        self.end_backward()
        self._new_window()

    def _new_window(self) -> None:
        # What still lands comes before what lands next.
        self.gradients = {
            index: RecordGradient(state.record, landed=state.landed)
            for index, state in self.gradients.items()
        }

    def drop_tensors(self) -> None:
        """No parameter has a gradient any more."""
        with DisableTorchFunctionSubclass():
            for handles in self._handles.values():
                drop_gradients(handles)
            for slot in self._may_not_train:
                slot.param.grad = None

    def _changed(self) -> Iterator[Change]:
        """The parameters, with `param.grad`, where that is not the gradient that backward has brought."""
        for index, state in self.gradients.items():
            handles = self._handles[index]
            is_whole = state.is_full and not state.zeroed
            with DisableTorchFunctionSubclass():
                # Of most records nothing is left to look at.
                grads = [(h, h.param.grad) for h in handles if not is_whole or h.param.grad is not h.tensor]
            for handle, grad in grads:
                is_present = handle.slot.index in state.present
                if grad is handle.tensor:
                    if not is_present or state.zeroed:
                        yield Change(state, handle, grad)
                elif grad is not None or is_present:
                    yield Change(state, handle, grad)

    def settle(self) -> None:
        """Before the step: what scripts have assigned comes home, what they have dropped is left out."""
        others = []
        for change in self._changed():
            if change.handle.is_own(change.grad):
                self._settle_own(change.state, change.handle.slot)
            else:
                others.append(change)
        bring_home(others, self.access)

    def _settle_passed_on(self) -> None:
        """Before another backward of the window: [Note: gradients assigned from gradients]."""
        if any(state.present for state in self.gradients.values()):
            others = [change for change in self._changed() if not change.handle.is_own(change.grad)]
            bring_home(passed_on(others), self.access)

    def _settle_own(self, state: RecordGradient, slot: ParamSlot) -> None:
        if slot.index not in state.present:
            raise StateError(
                f"{slot.name}.grad was lost with a backward that did not finish: call optimizer.zero_grad()"
            )
        if slot.index in state.zeroed:
            self.access.store(state, slot, torch.zeros(slot.num_elements, dtype=state.record.dtype))

    def expect_untouched(self) -> None:
        """Where the update has run in backward, a gradient that was dropped or assigned since is an error."""
        for state, handle, grad in self._changed():
            if handle.is_own(grad):
                continue
            slot = handle.slot
            slot.param.grad = handle.tensor if slot.index in state.present else None
            raise StateError(
                f"{slot.name}.grad was {'dropped' if grad is None else 'assigned'} before step(), but weights are "
                f"updated in backward: set {KEEP_KEY} to keep gradients until the step"
            )

    def expect_frozen(self) -> None:
        """A parameter that was frozen when the model was offloaded has no states to train it with."""
        with DisableTorchFunctionSubclass():
            for slot in self._may_not_train:
                if slot.param.requires_grad:
                    raise StateError(
                        f"{slot.name}: was frozen when the model was offloaded, so it has no optimizer state: unfreeze "
                        "it before offload() or initialize() (it may be frozen again right after)"
                    )

    def take_window(self) -> list[RecordGradient]:
        """Close the window: its gradients, in the records' order."""
        window = [state for state in self.gradients.values() if state.present]
        for state in window:
            if state.is_unmeasured and not state.closed:  # a step before the last micro batch
                self._landing.measure(state, state.landed, job=None)
        if self._keeps_after_step:
            return [state.as_of_now() for state in window]
        self._new_window()
        self.drop_tensors()
        return window


def _add(slot: ParamSlot, grad: torch.Tensor, target: torch.Tensor, *, factor: float = 1.0) -> None:
    """Add a gradient to what is there, which is to be multiplied by `factor` first."""
    expect_dense(slot, grad)
    if factor != 1.0:
        target.mul_(factor)
    target.add_(grad)


def _wear_zeros(state: RecordGradient, handle: GradientHandle) -> None:
    """The gradient is there, in no graph, and zero."""
    handle.param.grad = handle.tensor
    state.present |= {handle.slot.index}
    state.zeroed.add(handle.slot.index)


def _zero(grad: torch.Tensor) -> None:
    """A script's own gradient, which may be a view: as torch.optim's zero_grad does it."""
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()


def _holders(grad: torch.Tensor) -> tuple[int, int]:
    """References to a tensor, and to its storage."""
    return sys.getrefcount(grad), storage_use_count(grad.untyped_storage()._cdata)


def _is_held(grad: torch.Tensor) -> bool:
    """Whether somebody holds `param.grad`, or its storage, besides the parameter and two calls of ours."""
    return any(map(operator.gt, _holders(grad), _unheld()))


@functools.cache
def _unheld() -> tuple[int, int]:
    """Versions of torch count differently."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)

    def called(grad: torch.Tensor) -> tuple[int, int]:
        def again(grad: torch.Tensor) -> tuple[int, int]:
            return _holders(grad)

        return again(grad)

    def hook() -> tuple[int, int]:
        grad = param.grad
        assert grad is not None
        return called(grad)

    return hook()
