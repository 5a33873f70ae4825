"""The collection of gradients from autograd, unit by unit, in leases on the device.

[Note: what a backward leaves that does not finish]
The hooks are `uninterrupted`: a gradient that autograd has brought is taken, unless a wait inside was left. Each
wait comes before the change that it is for, so an error there leaves a gradient that is either not taken yet or on its
way home; dropping the gradients is then enough. A gradient that a hook never saw (another hook raised) is recognised by
the number of its backward, and is not added to.

[Note: a script's own gradient]
A tensor that a script has put into `param.grad` before backward, a view of a flat buffer say, is added to in place by
autograd and belongs to the script afterwards. It stays where it is and is copied home at the step. Two things tell it:
it was written in place, and something besides `param.grad` holds it or its storage.

[Note: small gradients wait]
A copy of a few kilobytes costs its launch, and half of a block's parameters are that small (norms, biases). Their
gradients are copied together, on a GPU in one launch where they lie as their parameters do: when the last one of their
unit is there, when backward is over, or when a script asks for one. Until then they count as on their way, as all
others do: `param.grad` stands for them. They are copied on the stream on which they came, which also frees their
memory. A gradient is copied at once if it comes on another stream, in a graph, as a part of something larger, or in
addition to an earlier one (autograd does not make such a gradient its own).

[Note: gradients that others have seen]
A script's hook that was put on a parameter before the engine's is called before it and may keep `param.grad`, to edit
it after backward. Then the tensor is the script's own. Nothing else comes between autograd and the engine's hook.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from offloadzero.access.gradient import GradientTensor, in_graph_of
from offloadzero.core.torch_private import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    foreach_zero,
    storage_use_count,
)
from offloadzero.errors import StateError
from offloadzero.memory.arena import BufferPool, PooledBuffer
from offloadzero.memory.device import Stream
from offloadzero.memory.lanes import order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.step.param_grad import (
    KEEP_KEY,
    GradientHandle,
    expect_dense,
)
from offloadzero.step.record_gradient import Brought, RecordGradient, WindowGradients, copy_waiting
from offloadzero.update.flat_layout import ParamSlot, SlotViews, slot_layout
from offloadzero.update.records import Record

log = logging.getLogger("offloadzero.gradients")

MAX_WAITING_BYTES = 64 << 10  # a gradient that is no larger waits: [Note: small gradients wait]
MAX_WAITING_UNIT_BYTES = 1 << 20  # of all waiting gradients of a unit

_BESIDE_THE_PLAN = (
    "%s: its gradient comes while all %d gradient leases wait for the rest of other units' gradients: it takes a "
    "temporary buffer of %d bytes on the device, beside the plan. The numbers are the same. That is so where a loss "
    "uses weights outside their units' forward, in a penalty say: leave room there, or let the optimizer's "
    "weight_decay do it"
)
_BESIDE_OTHER_RANKS = (
    "%s: its gradient comes while all %d gradient leases wait for other ranks: it takes a temporary buffer of %d bytes "
    "on the device, beside the plan. The numbers are the same. That is so where some rank completes a unit's gradient "
    "only at the end of backward, an expert without a token say"
)


class GradientCollector:
    """Takes gradients from autograd record by record.

    Those that are reduced over ranks come into leases wherever their home is: each backward's are reduced by
    themselves.
    """

    # A lease may wait for a rank that comes to its reduction only at the end of backward, while that rank waits for
    # this one's next fetch. So the wait has an end, after which a gradient takes more memory and has the same numbers.
    LEASE_WITHIN_S = 2.0

    def __init__(
        self,
        gradients: WindowGradients,
        handles: Mapping[int, Sequence[GradientHandle]],
        store: TieredStore,
        *,
        device_leases: BufferPool,
        own_leases: Mapping[int, BufferPool],
        previous_update: Callable[[int], Ticket],
        updates_in_backward: bool,
    ) -> None:
        """Make the collector.

        Args:
            handles: of the parameters' gradients, by record and slot.
            device_leases: leases that units take turns in.
            own_leases: by the index of a record, the one lease that belongs to it alone.
            previous_update: the last update of a record, which may still read its gradient's home.
            updates_in_backward: a gradient is consumed as it lands.
        """
        self._gradients = gradients
        self._handles = handles
        self._store = store
        self._device = store.accelerator.asynchronous
        self._has_streams = store.accelerator.has_streams
        self._device_leases = device_leases
        self._own_leases = own_leases
        self._previous_update = previous_update
        self._updates_in_backward = updates_in_backward
        self._views = _slot_views(gradients.values())
        self._small = {index: _small_slots(gradient.record) for index, gradient in gradients.items()}
        self._num_filling = 0  # of the leases that units take turns in
        self._told: set[int] = set()
        self._left_with_script: dict[str, None] = {}  # parameters whose gradients should be reduced
        self.backward = -1  # the number of the backward whose gradients are taken, while it runs
        self._is_nested = False  # a checkpoint has run a backward of its own inside it
        self._records_graph = False  # backward(create_graph=True)

    def expect_seen(self, index: int, number: int) -> None:
        """Note that a script's hook sees the parameter's gradient first: [Note: gradients that others have seen]."""
        # With updates in backward the gradient is gone after it.
        self._handles[index][number].expect_seen(is_seen=not self._updates_in_backward)

    # --- in backward ---

    def add(self, index: int, number: int) -> RecordGradient | None:
        """Take the gradient that backward has put into a parameter's `grad`, and put a tensor there that stands for it.

        The parameter is given by the numbers of its record and of its slot there. Returns the record's gradient if this
        one was its last. Raises StateError where the weights are updated in backward and it comes a second time.
        """
        handle, state = self._handles[index][number], self._gradients[index]
        in_graph: Tensor | None = None  # in the graph of an earlier backward, where it stays
        is_added = False  # to a gradient that this backward has brought before
        small_bytes = self._small[index].get(number)  # None: it does not wait
        with DisableTorchFunctionSubclass():
            grad = handle.param.grad
            # A fresh one is held by nothing else: autograd takes over such a tensor, or copies it.
            if type(grad) is not Tensor or number in state.present or grad._version or handle.is_seen:
                small_bytes = None
                if handle.is_own(grad):
                    in_graph = grad if grad is not None and grad.requires_grad else None
                    contribution = handle.source.contribution
                    is_added = contribution is not None and not contribution.is_all
                grad = self._contribution(state, handle, grad)
                if grad is None:
                    return self._keep_with_script(state, number)
            if self._records_graph:
                small_bytes = None
                if grad.requires_grad:
                    in_graph, grad = in_graph_of(grad, handle.source), grad.detach()
            handle.take_in(self.backward, in_graph)
        if state.flat is None:
            if state.closed and self._updates_in_backward:
                raise StateError(
                    f"{handle.slot.name} gets a second gradient in one backward (a reentrant checkpoint around a "
                    f"shared module?), but the first one has already updated its weights: set {KEEP_KEY}"
                )
            self._begin(state)
        stream = self._order_stream(state) if self._has_streams else None
        if self._is_nested and number in state.arrived:
            self._bring_again(state, handle, number, grad, is_added=is_added)
            return None
        if small_bytes is None or not state.arrive_waiting(number, grad, stream, num_bytes=small_bytes):
            self._bring(state, handle, number, grad)
            state.arrive(number)
        if state.num_missing and not (state.kept and state.is_complete(self.backward)):
            return None
        return state

    def _keep_with_script(self, state: RecordGradient, number: int) -> RecordGradient | None:
        """Leave a gradient that came with the script: there is nothing to take, and its unit does not wait for it."""
        if state.record.is_reduced:
            self._left_with_script.setdefault(state.record.trainable_slots[number].name)
        if self._updates_in_backward or state.record.is_reduced:
            return None
        state.keep(number, self.backward)
        return state if state.arrived and state.is_complete(self.backward) else None

    @staticmethod
    def _bring(state: RecordGradient, handle: GradientHandle, number: int, grad: Tensor) -> None:
        """Copy a gradient into the lease (or home) in which it lies until it leaves the device."""
        if state.lease is None and number in state.present:
            _add(handle.slot, grad, state.targets[number], factor=state.take_factor(number))
            return
        try:
            state.targets[number].copy_(grad)
        except RuntimeError:
            expect_dense(handle.slot, grad)
            raise

    def _bring_again(
        self, state: RecordGradient, handle: GradientHandle, number: int, grad: Tensor, *, is_added: bool
    ) -> None:
        """Copy the gradient of a parameter that has come before, in the backward around this one."""
        copy_waiting(state, self._device)
        if is_added:
            _add(handle.slot, grad, state.targets[number])
        else:  # a hook of the script's has dropped or replaced that one
            state.targets[number].copy_(grad)

    def begin_backward(self) -> None:
        """Take the gradients of the running backward from here on."""
        self._is_nested = self.backward >= 0
        self.backward = current_graph_task_id()
        self._records_graph = torch.is_grad_enabled()

    def end_backward(self) -> None:
        """End the backward: the next gradient is another's."""
        self.backward = -1
        self._is_nested = False

    @property
    def is_in_backward(self) -> bool:
        """Whether gradients of a backward are being taken."""
        return self.backward >= 0

    @staticmethod
    def _contribution(state: RecordGradient, handle: GradientHandle, grad: Tensor | None) -> Tensor | None:
        """Return the gradient to take where `param.grad` was not empty before: [Note: the life of param.grad]."""
        slot, source = handle.slot, handle.source
        if handle.is_own(grad):
            contribution = source.take_contribution()
            if contribution is None:
                return None
            if contribution.is_all or slot.index in state.zeroed:
                state.forget(slot)
            return contribution.grad
        source.take_contribution()  # another tensor is the gradient now
        if slot.index in state.present:  # the script has dropped it, or put another in its place
            state.forget(slot)
            handle.drop()
        if grad is None or isinstance(grad, GradientTensor):
            return None
        expect_dense(slot, grad)  # one from before offload(), say
        if (grad._version or handle.is_seen) and _is_held(grad):
            return None  # [Note: a script's own gradient]
        return grad

    def _begin(self, state: RecordGradient) -> None:
        record, home = state.record, state.device_home
        views = self._views[record.index]
        if home is not None:
            # An update of the last step may still read the home, or the thread that measures earlier micro batches.
            free = AllOf([self._previous_update(record.index), state.landed])
            with self._store.clock.waiting("update"), self._store.failures.handed_over():
                order_compute_after(free)
            padding = state.begin_at_home(home.memory, views, free=free)
        else:
            padding = state.begin(self._take_device_lease(record), views)
        if self._has_streams:
            state.add_stream(self._store.accelerator.note_stream())
        if padding:
            foreach_zero(padding)  # in one launch

    def _order_stream(self, state: RecordGradient) -> Stream | None:
        """Let a second stream that brings gradients wait for the memory, too. Returns the present one."""
        stream = self._store.accelerator.note_stream()
        if stream not in state.streams:
            state.add_stream(stream)
            order_compute_after(state.free)
        return stream

    def _take_device_lease(self, record: Record) -> PooledBuffer:
        leases = self._leases_of(record)
        lease = leases.try_take()
        if lease is None and leases is self._device_leases and self._num_filling >= leases.num_buffers:
            # Every lease waits for gradients that may come after this one: waiting would never end.
            lease = self._temporary_lease(leases, record)
        elif lease is None:
            lease = self._wait_for_lease(leases, record)
        if not lease.last_use.done():
            try:
                with self._store.clock.waiting("gradient lease"), self._store.failures.handed_over():
                    order_compute_after(lease.last_use)
            except BaseException:
                leases.give_back(lease, last_use=lease.last_use)
                raise
        self._num_filling += leases is self._device_leases and not lease.temporary
        return lease

    def _wait_for_lease(self, leases: BufferPool, record: Record) -> PooledBuffer:
        with self._store.clock.waiting("gradient lease"), self._store.failures.handed_over():
            if not record.is_reduced:
                return leases.take()
            lease = leases.take_within(self.LEASE_WITHIN_S)
        return self._temporary_lease(leases, record) if lease is None else lease

    def _temporary_lease(self, leases: BufferPool, record: Record) -> PooledBuffer:
        size = record.num_trainable * record.dtype.itemsize
        if record.index not in self._told:
            self._told.add(record.index)
            if record.is_reduced:
                log.info(_BESIDE_OTHER_RANKS, record.name, leases.num_buffers, size)
            else:
                log.warning(_BESIDE_THE_PLAN, record.name, leases.num_buffers, size)
        return PooledBuffer(self._store.accelerator.allocate(size), temporary=True)

    def _leases_of(self, record: Record) -> BufferPool:
        """The leases that units take turns in, or the one of the record's own."""
        return self._own_leases.get(record.index, self._device_leases)

    # --- out of the leases ---

    def hand_over(self, state: RecordGradient, *, closes: bool) -> Brought:
        """Put the gradient of a record that has arrived into the window, and give up its lease.

        `closes`: no other micro batch of the window follows.
        """
        copy_waiting(state, self._device)
        leases, lease = self._leases_of(state.record), state.lease
        if lease is not None:
            self._num_filling -= leases is self._device_leases and not lease.temporary
        return state.hand_over(leases, closes=closes)

    def fill(self, gradient: RecordGradient, places: Sequence[int]) -> None:
        """Make zeros of the slots of which another rank has a gradient, and this one none."""
        if gradient.flat is None:
            self._begin(gradient)
        for place in places:
            handle = self._handles[gradient.record.index][place]
            gradient.targets[place].zero_()
            gradient.arrive(place)
            with DisableTorchFunctionSubclass():
                if handle.param.grad is None:
                    handle.param.grad = handle.tensor

    def expect_all_reduced(self) -> None:
        """Raise StateError where a backward has added to a tensor of the script's own, which no other rank has."""
        for name in self._left_with_script:
            raise StateError(
                f"{name}.grad was assigned before a backward, which has added this rank's gradient to it instead of "
                "the mean over the ranks: assign it after the backward, or drop all gradients with zero_grad()"
            )

    def abandon(self) -> None:
        """Drop the gradients that have arrived and were not handed over; their backward is over."""
        for state in self._gradients.values():
            if state.lease is not None and not state.lease.temporary:
                leases = self._leases_of(state.record)
                leases.give_back(state.lease, last_use=self._store.accelerator.computed())
        self._num_filling = 0
        self._left_with_script.clear()
        self.end_backward()


def _slot_views(gradients: Iterable[RecordGradient]) -> dict[int, SlotViews]:
    """The views of each record's gradients; records of one layout that take turns in leases share theirs."""
    views = {}
    shared: dict[Hashable, SlotViews] = {}
    for gradient in gradients:
        record = gradient.record
        own = SlotViews(record.trainable_slots, record.padding)
        if gradient.device_home is None:
            layout = (record.dtype, record.padding, slot_layout(record.trainable_slots))
            own = shared.setdefault(layout, own)
        views[record.index] = own
    return views


def _small_slots(record: Record) -> dict[int, int]:
    """The bytes of the slots whose gradients wait for the rest of their unit, as many as may be kept meanwhile."""
    small, num_bytes = {}, 0
    for slot in record.trainable_slots:
        size = slot.num_elements * record.dtype.itemsize
        if size <= MAX_WAITING_BYTES and num_bytes + size <= MAX_WAITING_UNIT_BYTES:
            small[slot.index] = size
            num_bytes += size
    return small


def _add(slot: ParamSlot, grad: Tensor, target: Tensor, *, factor: float = 1.0) -> None:
    """Add a gradient to `target`, which is multiplied by `factor` first."""
    expect_dense(slot, grad)
    if factor != 1.0:
        target.mul_(factor)
    target.add_(grad)


def _holders(grad: Tensor) -> tuple[int, int]:
    """The numbers of references to a tensor, and to its storage."""
    return sys.getrefcount(grad), storage_use_count(grad.untyped_storage()._cdata)


def _is_held(grad: Tensor) -> bool:
    """Whether something holds `param.grad`, or its storage, besides the parameter and two calls of this file."""
    return any(map(operator.gt, _holders(grad), _unheld()))


@functools.cache
def _unheld() -> tuple[int, int]:
    """The numbers of references without another holder, which differ between versions of torch."""
    param = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    param.grad = torch.zeros(1, device="cpu")

    def called(grad: Tensor) -> tuple[int, int]:
        def again(grad: Tensor) -> tuple[int, int]:
            return _holders(grad)

        return again(grad)

    def hook() -> tuple[int, int]:
        grad = param.grad
        assert grad is not None
        return called(grad)

    return hook()
