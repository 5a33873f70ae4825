"""Reads and writes of a parameter's gradient wherever it is, as `param.grad` needs them.

[Note: the life of param.grad]
Each trainable parameter has one `GradientTensor`, made once, which the hook on its gradient puts into `param.grad`. It
stands for the parameter's part of the record's gradient: in the device lease until the unit's gradients are complete,
then landing, then at home, earlier micro batches included. Nothing intercepts `param.grad = None` or
`param.grad = tensor`. They are seen when it matters: when the next gradient of the parameter arrives, and at the step.
If `param.grad` is the tensor itself, the kept gradient counts. If it is None, the gradient was dropped, and takes no
part in the norm and in the update. If it is another tensor, that one is the gradient, and it stays the script's own (it
may be a view of a buffer that the script goes on to write into).

In a later backward of a window autograd adds to `param.grad` in place. The tensor keeps that contribution for the hook,
which takes it as it takes a first one; nothing is read.

After backward(create_graph=True) another tensor of the same source is there, which is in the graph of that backward.

A script may keep a dropped gradient and go on to make the next one. In torch these are two tensors; here the home would
be the next one's, so the kept one becomes an error.

[Note: param.grad over several ranks]
When backward has ended a gradient is the mean over the ranks, and each rank keeps its part. A read gathers the parts,
so all ranks read the same gradients in the same order, as they read the same weights ([Note: ranks say what they read]
in access/agreement.py). The norms of all gradients are gathered at once when the first one is asked for:
so `clip_grad_norm_` is one collective. An edit sends nothing. Each rank keeps its part of the value, or the factor, and
notes what it did: a rank that has edited otherwise is found at the next fetch or step.

Before that, in a hook say, a gradient is one rank's own, and belongs to no step: to read it there is refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloadzero.access.agreement import Announcements
from offloadzero.access.gradient import GradientTensor, GradientValue, product_is_exact
from offloadzero.access.home_access import HomeAccess
from offloadzero.arithmetic import device_math
from offloadzero.core.segments import SegmentKind
from offloadzero.core.torch_private import (
    DisableTorchFunctionSubclass,
    current_autograd_node,
    current_graph_task_id,
    running_backward,
)
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.tickets import Ticket
from offloadzero.ranks.group import Group
from offloadzero.step.record_gradient import RecordGradient, WindowGradients, copy_waiting, end_trial
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept_elements import kept_place
from offloadzero.update.records import Record

KEEP_KEY = '"offloadzero": {"update": {"in_backward": false}}'


class Contribution(NamedTuple):
    """A gradient that autograd has added and the hook has not taken; `is_all`: it includes the earlier ones."""

    grad: Tensor
    is_all: bool
    backward: int  # the number of the backward that has brought it


class ParamGradient(GradientValue):
    """The gradient of one parameter until it is dropped. Later reads and writes raise StateError.

    They raise it as well for a gradient that is lost, or gone with an update in backward. This object holds neither
    parameter nor handle nor engine: `param.grad` is an edge that Python's collector does not see.
    """

    def __init__(self, access: GradientAccess, handle: GradientHandle) -> None:
        record, slot = handle.record, handle.slot
        super().__init__(f"{slot.name}.grad", slot.shape, record.dtype, access.device)
        self._access = weakref.ref(access)
        self.handle = weakref.ref(handle)
        self.index = (record.index, slot.index)
        self.is_dropped = False
        self.contribution: Contribution | None = None

    def _expect(self) -> GradientAccess:
        access = self._access()
        if self.is_dropped or access is None:
            raise StateError(
                f"{self.name}: this gradient was dropped (by zero_grad(), by param.grad = None, or with its engine), "
                "and its memory is used for the next one: keep a copy, param.grad.clone()"
            )
        return access

    def read(self, *, to_write: bool = False) -> Tensor:
        """Return the present value, on the device; it may be the home itself."""
        value = self._present(self._expect())
        return value.clone() if to_write else value

    def _present(self, access: GradientAccess) -> Tensor:
        state, slot = access.locate(self)
        contribution = self.contribution
        if contribution is not None and contribution.is_all:
            return contribution.grad
        added = None if contribution is None else contribution.grad
        if slot.index not in state.arrived:
            value = access.at_home(state, slot) if added is None else access.with_earlier(state, slot, added)
        else:
            value = state.targets[slot.index] if added is None else state.targets[slot.index] + added
            if state.lease is not None:  # else the flat gradient is the home
                value = access.with_earlier(state, slot, value)
        return value.to(self.dtype).view(slot.shape)

    def write(self, value: Tensor) -> None:
        """Write the value to the gradient's place; what the hook has not taken yet is replaced."""
        access = self._expect()
        state, slot = access.locate(self)
        if self.contribution is not None:
            self.contribution = self.contribution._replace(grad=value, is_all=True)
        elif slot.index in state.arrived:
            state.targets[slot.index].copy_(value)
            state.forget(slot)  # drops the part at home
        else:
            access.store(state, slot, value)

    def take_contribution(self) -> Contribution | None:
        """Return what autograd has added since the last call, if it has."""
        contribution, self.contribution = self.contribution, None
        return contribution

    def norm(self) -> float | None:
        """The 2-norm as measured; None for a gradient in a lease, or one that has not been measured."""
        access = self._expect()
        state, slot = access.locate(self)
        if self.contribution is not None or slot.index in state.arrived or state.is_unmeasured:
            return None
        return math.sqrt(state.sq_norm_of(slot, access.sq_norm_at_home(state, slot)))

    def scale(self, factor: float) -> bool:
        """Keep a factor where the update gives the same numbers with it: [Note: gradients as tensors]."""
        access = self._expect()
        state, slot = access.locate(self)
        before = state.factors.get(slot.index, 1.0)
        if self.contribution is not None or slot.index in state.arrived or not math.isfinite(factor):
            return False
        if not product_is_exact(before, factor):
            return False
        if slot.index in state.zeroed:
            return True
        if abs(before * factor) > 1.0:
            if state.is_unmeasured:
                return False
            bound = math.sqrt(access.sq_norm_at_home(state, slot)) * abs(before * factor)
            if not bound <= torch.finfo(self.dtype).max:
                return False  # an element may overflow
        state.set_factor(slot, before * factor)
        access.note_edit(state, slot, "times", before * factor)
        return True

    def clear(self) -> None:
        """Make it zeros, which are written only if they still stand at the step."""
        access = self._expect()
        state, slot = access.locate(self)
        if self.contribution is not None or slot.index in state.arrived or access.updates_in_backward:
            self.write(torch.zeros(slot.shape, dtype=self.dtype, device=self.device))
        else:
            state.clear(slot)
            access.note_edit(state, slot, "zero")

    def accept(self, contribution: Tensor) -> bool:
        """Take `contribution` for the hook if autograd adds it right now, replacing a left-over one."""
        access = self._expect()
        node, backward = current_autograd_node(), current_graph_task_id()
        left, handle = self.contribution, self.handle()
        if node is None or handle is None or handle.taken_in == backward:
            return False  # a hook's own addition
        if left is not None and access.runs(left.backward):
            return False
        if getattr(node, "variable", None) is not handle.param:
            return False
        access.note_running(backward)
        self.contribution = Contribution(contribution, is_all=False, backward=backward)
        return True

    def is_worn(self, tensor: Tensor) -> bool:
        handle = self.handle()
        with DisableTorchFunctionSubclass():
            return not self.is_dropped and handle is not None and handle.param.grad is tensor


class GradientHandle:
    """The tensor that stands for a parameter's gradient, `source`, and its relation to `param.grad`."""

    __slots__ = (
        "__weakref__",
        "_access",
        "is_seen",
        "param",
        "record",
        "slot",
        "source",
        "taken_in",
        "tensor",
    )

    def __init__(self, access: GradientAccess, record: Record, slot: ParamSlot) -> None:
        self._access = access
        self.record = record
        self.slot = slot
        self.param = slot.param
        # By a script's hook before ours: [Note: gradients that others have seen] in step/collect.py.
        self.is_seen = False
        self._renew()

    def _renew(self) -> None:
        self.source = ParamGradient(self._access, self)
        self.tensor = GradientTensor(self.source)
        self.taken_in = -1  # the last backward in which the hook took a gradient

    def expect_seen(self, *, is_seen: bool) -> None:
        """Note whether a script's hook sees the gradient before ours."""
        self.is_seen = is_seen

    def take_in(self, backward: int, in_graph: Tensor | None) -> None:
        """Let the tensor be the parameter's `grad`, or `in_graph` in its place: the hook has taken the gradient."""
        self.param.grad = self.tensor if in_graph is None else in_graph
        self.taken_in = backward

    def is_own(self, grad: Tensor | None) -> bool:
        """Whether `grad` is this gradient: the tensor, or a result of its `detach()` or `view_as()`."""
        return grad is self.tensor or (
            isinstance(grad, GradientTensor) and grad.source is self.source and grad.is_whole
        )

    def drop(self) -> None:
        """Drop the gradient: tensors of it that are still held must not take the next one for it."""
        source = self.source
        source.take_contribution()
        # References to the tensor: this handle, the call. To the source: the tensor, this handle, this function, the
        # call.
        if getrefcount(self.tensor) > 2 or (source.num_tensors > 1 and getrefcount(self.source) > 4):
            source.is_dropped = True
            self._renew()


def drop_gradients(handles: Iterable[GradientHandle]) -> None:
    """Set `param.grad` to None and `drop()` for many handles, most of them held by nothing. Torch functions are off."""
    for handle in handles:
        handle.param.grad = None
        source = handle.source
        if source.contribution is not None or source.num_tensors > 1 or getrefcount(handle.tensor) > 2:
            handle.drop()


def expect_dense(slot: ParamSlot, grad: Tensor) -> None:
    """Refuse a sparse gradient: a home has a place for each element."""
    if grad.is_sparse:
        raise ConfigError(slot.name, "sparse gradient", "dense gradients only: build the module sparse=False")


class GradientAccess:
    """The places of single parameters' gradients: [Note: the life of param.grad]."""

    def __init__(
        self,
        store: TieredStore,
        homes: HomeAccess,
        *,
        group: Group,
        announcements: Announcements,
        num_threads: int | None,
        gradients: WindowGradients,
        previous_update: Callable[[int], Ticket],
        updates_in_backward: bool,
    ) -> None:
        """Make the access.

        Args:
            homes: gathers a home of which each rank has a part.
            announcements: by them the ranks tell each other what they read.
            previous_update: gives a record's last update.
        """
        self._store = store
        self._homes = homes
        self._group = group
        self._announcements = announcements
        # The squared norms of what the homes hold on all ranks together, by record and slot; and the gradients then.
        self._shared_sq_norms: dict[int, Sequence[float]] = {}
        self._measured: list[tuple[RecordGradient, Ticket]] = []
        self.device = store.accelerator.device
        self._num_threads = num_threads
        self._gradients = gradients
        self._previous_update = previous_update
        self.updates_in_backward = updates_in_backward
        self._running: dict[int, weakref.ref[Any]] = {}  # backwards, by number

    def handles(self, record: Record) -> tuple[GradientHandle, ...]:
        """Make a new handle for each trainable slot."""
        return tuple(GradientHandle(self, record, slot) for slot in record.trainable_slots)

    def locate(self, source: ParamGradient) -> tuple[RecordGradient, ParamSlot]:
        """Return where a gradient is, for work that the caller launches next. StateError for one that is not."""
        record_index, slot_index = source.index
        state = self._gradients[record_index]
        slot = state.record.trainable_slots[slot_index]
        self._expect_reachable(state, slot, source)
        if self.updates_in_backward and (state.closed or state.arrived or state.home is None):
            raise StateError(
                f"{source.name}: backward has updated the weights and dropped this gradient: set {KEEP_KEY} to keep "
                "gradients until the script drops them"
            )
        if not (
            slot.index in state.present or slot.index in state.arrived or source.contribution is not None
        ):
            raise StateError(
                f"{source.name}: this gradient was dropped, or its backward did not finish: call "
                "optimizer.zero_grad()"
            )
        copy_waiting(state, self._store.accelerator.asynchronous)
        if self._store.accelerator.has_streams:
            self._store.accelerator.note_stream()  # later launches of the caller on it use the lease
        return state, slot

    def _expect_reachable(self, state: RecordGradient, slot: ParamSlot, source: ParamGradient) -> None:
        """Raise StateError where a gradient of several ranks is not to be had now."""
        if self._group.is_alone:
            return
        why = ""
        if self._group.across is not None:
            why = "in a mesh gradients are reduced unit by unit, and no rank has one to read or to edit"
        elif (
            current_graph_task_id() >= 0  # it may be reduced on this rank, and on another not yet
            or slot.index in state.arrived
            or source.contribution is not None
        ):
            why = "over several ranks a gradient is the mean of all ranks when backward has ended, not before"
        if why:
            raise StateError(
                f"{source.name}: {why}: engine.get_global_grad_norm() gives the norm of a step, gradient_clipping clips"
            )

    def note_running(self, backward: int) -> None:
        """Remember the running backward: autograd keeps its callbacks alive as long as it runs."""
        if not self.runs(backward):
            self._running = {number: ref for number, ref in self._running.items() if ref() is not None}
            self._running[backward] = running_backward()

    def runs(self, backward: int) -> bool:
        """Whether a backward runs that has brought gradients; this one may run inside it, in a hook."""
        running = self._running.get(backward)
        return running is not None and running() is not None

    # --- at home ---

    def drop(self, state: RecordGradient, slot: ParamSlot) -> None:
        """Leave a gradient that the script has dropped out of the step."""
        state.forget(slot)
        self.note_edit(state, slot, "dropped")

    def store(self, state: RecordGradient, slot: ParamSlot, value: Tensor) -> None:
        """Make `value` (of any floating-point dtype) the gradient of the window so far."""
        home = state.home
        if home is None:
            raise AssertionError(f"{slot.name}: its gradient has no home")
        self._wait_landed(state)
        with self._store.clock.waiting("update"), self._store.failures.handed_over():
            self._previous_update(state.record.index).wait()  # it may still read the home
            end_trial(state).wait()
        place = kept_place(state.record, slot, SegmentKind.GRAD)
        flat = value.detach().reshape(-1)[place.skipped : place.skipped + place.num_elements]
        if not home.is_in_memory:
            target = flat.to("cpu", home.dtype).contiguous()
            if place.num_elements:
                with self._store.clock.waiting("gradient access"), self._store.failures.handed_over():
                    self._store.write(home, target, start=place.start).wait()
        else:
            target = home.memory[place.start : place.start + place.num_elements]
            target.copy_(flat)
        state.forget(slot)
        # This waits until the value is there, also on the device.
        state.assign(slot, device_math.sq_norm(target, num_threads=self._num_threads))
        self._measured = []
        self.note_edit(state, slot, "stored", values=value)

    def at_home(self, state: RecordGradient, slot: ParamSlot) -> Tensor:
        """Return the landed gradient with its factor, flat, in the home's dtype, on the device."""
        home = state.home
        if home is None:
            raise AssertionError(f"{slot.name}: its gradient has no home")
        if slot.index in state.zeroed:
            return torch.zeros(slot.num_elements, dtype=home.dtype, device=self.device)
        self._wait_landed(state)
        value = self._read_home(state, slot, home).to(self.device)
        factor = state.factors.get(slot.index, 1.0)
        return value if factor == 1.0 else value * factor

    def _read_home(self, state: RecordGradient, slot: ParamSlot, home: Segment) -> Tensor:
        """Return what the home holds of a parameter, flat, in the home's dtype; it may be the home itself."""
        if state.record.shard.world_size == 1 and home.is_in_memory:
            return home.memory[slot.offset : slot.offset + slot.num_elements]
        flat = torch.empty(slot.num_elements, dtype=home.dtype, device="cpu")
        with self._store.clock.waiting("gradient access"), self._store.failures.handed_over():
            self._homes.read_home(state.record, slot, home, flat)
        return flat

    def sq_norm_at_home(self, state: RecordGradient, slot: ParamSlot) -> float:
        """Return the squared norm of what the home holds of a parameter, on all ranks together."""
        if state.record.shard.world_size == 1:
            self._wait_landed(state)
            return state.sq_norms[slot.index]
        present = self._gradients.present()
        measured = [(gradient, gradient.landed) for gradient in present]
        if len(measured) != len(self._measured) or any(
            one is not other or landed is not before
            for (one, landed), (other, before) in zip(measured, self._measured, strict=True)
        ):
            self._gather_sq_norms(present)
            self._measured = measured
        return self._shared_sq_norms[state.record.index][slot.index]

    def _gather_sq_norms(self, present: Sequence[RecordGradient]) -> None:
        with self._store.failures.whole("the norms of gradients over the ranks"):
            for gradient in present:
                self._wait_landed(gradient)
            norms = [norm for gradient in present for norm in gradient.sq_norms]
            own = torch.tensor(norms, dtype=torch.float64, device="cpu")
            with self._store.clock.waiting("gradient access"), self._store.failures.handed_over():
                act = f"asks for the norms of the gradients of {len(present)} units"
                self._announcements.announce(act)
                self._group.states.all_reduce(own, "the norms of gradients")
        totals = iter(own.tolist())
        self._shared_sq_norms = {
            gradient.record.index: [next(totals) for _ in gradient.sq_norms] for gradient in present
        }

    def note_edit(
        self, state: RecordGradient, slot: ParamSlot, *what: object, values: Tensor | None = None
    ) -> None:
        """Take note of an edit of the gradient, which all ranks make."""
        record = state.record
        self._group.note_write(
            record.index, slot.index, "grad", *what, values=values, dtype=record.grad_dtype
        )

    def with_earlier(self, state: RecordGradient, slot: ParamSlot, grad: Tensor) -> Tensor:
        """Return a contribution of the running backward, with earlier ones added."""
        if slot.index not in state.present:
            return grad
        earlier = self.at_home(state, slot).view(slot.shape)
        return (earlier.float() + grad.float()).to(earlier.dtype)

    def _wait_landed(self, state: RecordGradient) -> None:
        with self._store.clock.waiting("gradient landing"), self._store.failures.handed_over():
            state.landed.wait()
