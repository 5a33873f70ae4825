"""The gradient of one record: its memory, and its measured norms."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from offloadzero.core.segments import SegmentKind
from offloadzero.core.torch_private import foreach_copy
from offloadzero.memory.arena import BufferPool, PooledBuffer
from offloadzero.memory.device import Device, Stream
from offloadzero.memory.store import Segment
from offloadzero.memory.tickets import FINISHED, AllOf, Promise, Ticket
from offloadzero.update.flat_layout import ParamSlot, SlotViews
from offloadzero.update.pipeline import RecordUpdate
from offloadzero.update.records import Record, UpdateRange, all_ranges, update_ranges


class Borrowed:
    """A buffer of a pool, until it is given back."""

    __slots__ = ("_buffer", "_pool")

    def __init__(self, buffer: PooledBuffer, pool: BufferPool) -> None:
        self._buffer = buffer
        self._pool = pool

    def view(self, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
        """Return the buffer's first elements: shape (num_elements,)."""
        return self._buffer.view(dtype, num_elements)

    def give_back(self) -> None:
        """Give the buffer back, which may be written at once."""
        self._pool.give_back(self._buffer)


class Tried(Protocol):
    """An update that reads a gradient before its step is decided."""

    @property
    def ticket(self) -> Ticket:
        """Done when all of it is home."""

    def has_done(self, job: RecordUpdate) -> bool:
        """Whether it has done what the step's update would do."""

    def give_up(self) -> Ticket:
        """Let no step have its result; return the ticket of the end of its reads."""


@dataclass(eq=False)
class RecordGradient:
    """The gradient of one record in one accumulation window. Only its own methods write its attributes."""

    record: Record
    # In backward:
    lease: PooledBuffer | None = None
    flat: torch.Tensor | None = None  # on the device, shape (num_trainable,)
    targets: Sequence[torch.Tensor] = ()  # views of `flat` by slot
    arrived: dict[int, None] = field(default_factory=dict)  # slots whose gradient is there, in order
    num_missing: int = 0  # of the slots of a gradient that has begun, those not among them
    # Of those that are there the ones not copied yet, with their gradients:
    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    waiting_stream: Stream | None = None  # the stream on which these came
    copying: threading.Lock = field(default_factory=threading.Lock)  # held while they are copied
    kept: set[int] = field(default_factory=set)  # slots whose gradient came and is the script's own
    kept_in: int = -1  # the backward for which `kept` is known
    free: Ticket = FINISHED  # the former use of the memory; each stream that writes it waits for that
    streams: list[Stream | None] = field(default_factory=list)  # streams that have waited for `free`
    # In the window:
    present: frozenset[int] = frozenset()  # indices of the slots that have a gradient
    # By slot: the product of factors that scripts have applied, unless 1.
    factors: dict[int, float] = field(default_factory=dict)
    zeroed: set[int] = field(default_factory=set)  # slots whose gradient is zero, whatever the home holds
    landed: Ticket = FINISHED
    sq_norms: list[float] = field(default_factory=list)  # of landed gradients, by slot, without factors
    is_unmeasured: bool = False  # the norms lack the part on the device since the last micro batch
    closed: bool = False  # its last micro batch is landing
    passing: Borrowed | None = None  # the host buffer of a gradient without a home
    trial: Tried | None = None  # an update with what is there: [Note: versions] in update/pipeline.py

    def __post_init__(self) -> None:
        # The place until the step; None: the gradient is consumed as it lands.
        self.home: Segment | None = self.record.segments.get(SegmentKind.GRAD)
        # The place into which it is taken from autograd; None: a lease.
        self.device_home = (
            self.home
            if self.home is not None and self.home.is_on_device and not self.record.is_reduced
            else None
        )
        if not self.sq_norms:
            self.sq_norms = [0.0] * len(self.record.trainable_slots)

    @property
    def is_full(self) -> bool:
        """Whether all parameters have a gradient."""
        return len(self.present) == len(self.sq_norms)

    @property
    def present_slots(self) -> Iterable[ParamSlot]:
        """The parameters that have a gradient."""
        if self.is_full:
            return self.record.trainable_slots
        return (slot for slot in self.record.trainable_slots if slot.index in self.present)

    # --- in backward ---

    def begin(self, lease: PooledBuffer, views: SlotViews) -> Sequence[torch.Tensor]:
        """Take this backward's gradients into a lease; return the padding there, which is to be zeroed."""
        self.lease, self.free = lease, lease.last_use
        self.flat = flat = lease.view(self.record.dtype, self.record.num_trainable)
        self.targets, padding = views.of(flat) if lease.temporary else views.at(flat)
        self.num_missing = len(self.targets)
        return padding

    def begin_at_home(
        self, memory: torch.Tensor, views: SlotViews, *, free: Ticket
    ) -> Sequence[torch.Tensor]:
        """Take this backward's gradients into the home on the device; return the padding there, as `begin` does."""
        self.flat, self.free = memory, free
        self.targets, padding = views.at(memory)
        self.num_missing = len(self.targets)
        return padding

    def add_stream(self, stream: Stream | None) -> None:
        """Note a stream that writes the memory."""
        self.streams.append(stream)

    def arrive(self, number: int) -> None:
        """Count the gradient of a slot, which is in its target."""
        self.arrived[number] = None
        self.num_missing -= 1

    def arrive_waiting(
        self, number: int, grad: torch.Tensor, stream: Stream | None, *, num_bytes: int
    ) -> bool:
        """Count the gradient of a slot, which came on `stream` and waits with others: [Note: small gradients wait].

        Returns whether it does, and is counted; the first one to wait decides on the stream. `num_bytes`: of the slot.
        """
        waiting = self.waiting
        if not waiting:
            self.waiting_stream = stream
        elif stream is not self.waiting_stream and stream != self.waiting_stream:
            return False
        try:
            if grad.untyped_storage().nbytes() > num_bytes:
                return False  # it is a part of something larger
        except NotImplementedError:  # it is sparse
            return False
        waiting.append((number, grad))
        self.arrived[number] = None
        self.num_missing -= 1
        return True

    def keep(self, number: int, backward: int) -> None:
        """Count the gradient of a slot as come in that backward, which stays with the script."""
        if self.kept_in != backward:
            self.kept, self.kept_in = set(), backward
        self.kept.add(number)

    def is_complete(self, backward: int) -> bool:
        """Whether all gradients have come in that backward."""
        if not self.num_missing or not self.kept or self.kept_in != backward:
            return not self.num_missing
        return len(self.kept.union(self.arrived)) == len(self.targets)

    def hand_over(self, leases: BufferPool, *, closes: bool) -> Brought:
        """Put what has arrived into the window, and give up the memory, which goes back to `leases`.

        `closes`: no other micro batch of the window follows.
        """
        flat, lease = self.flat, self.lease
        if flat is None:
            raise AssertionError(f"{self.record.name} has no gradient lease")
        earlier, arrived, self.arrived = self.present, list(self.arrived), {}
        self.lease, self.flat, self.targets, self.streams = None, None, (), []
        self.num_missing = 0
        self.present = earlier.union(arrived)
        self.closed = closes
        factors = {}
        if lease is not None and self.factors:
            factors = {place: self.factors.pop(place) for place in arrived if place in self.factors}
        return Brought(self, flat, lease, leases, arrived, earlier, factors)

    # --- on the way home ---

    def begin_landing(self) -> Promise:
        """Return the promise that it has landed, which it waits for from now on."""
        self.landed = done = Promise()
        return done

    def stay_unmeasured(self, landed: Ticket) -> None:
        """Count what has come as landed after `landed`; the norms lack it."""
        self.landed = landed
        self.is_unmeasured = True

    def close(self) -> None:
        """Close the window: no other micro batch follows."""
        self.closed = True

    def begin_trial(self, trial: Tried | None) -> None:
        """Let an update be tried with what is there when it has landed."""
        self.trial = trial

    def take_trial(self) -> Tried | None:
        """Return the update that was tried, if any, and know nothing of it any more."""
        trial, self.trial = self.trial, None
        return trial

    def land_after(self, ticket: Ticket) -> None:
        """Let what lands next come after `ticket`, too."""
        self.landed = AllOf([self.landed, ticket])

    def pass_in(self, buffer: Borrowed | None) -> None:
        """Be in that host buffer until it is released, or, with None, in the home."""
        self.passing = buffer

    def measured(self, sq_norms: Sequence[float], places: Sequence[int] | None) -> None:
        """Take over the squared norms of the slots at `places` (None: all)."""
        if places is None:
            self.sq_norms[:] = sq_norms
        else:
            for place, sq_norm in zip(places, sq_norms, strict=True):
                self.sq_norms[place] = sq_norm
        self.is_unmeasured = False

    # --- changes by scripts ---

    def forget(self, slot: ParamSlot) -> None:
        """Take the home's part of a parameter for its gradient no longer."""
        self.present -= {slot.index}
        self.factors.pop(slot.index, None)
        self.zeroed.discard(slot.index)

    def assign(self, slot: ParamSlot, sq_norm: float) -> None:
        """Take the home's part of a parameter, of that squared norm, for its gradient."""
        self.sq_norms[slot.index] = sq_norm
        self.present |= {slot.index}

    def clear(self, slot: ParamSlot) -> None:
        """Make the gradient of a parameter zero, whatever the home holds."""
        self.factors.pop(slot.index, None)
        self.zeroed.add(slot.index)
        self.present |= {slot.index}

    def set_factor(self, slot: ParamSlot, factor: float) -> None:
        """Multiply what the home holds of a parameter by `factor`, in the place of the present one."""
        if factor == 1.0:
            self.factors.pop(slot.index, None)
        else:
            self.factors[slot.index] = factor

    def take_factor(self, number: int) -> float:
        """Return the factor of a slot, by which the home's part is multiplied now."""
        return self.factors.pop(number, 1.0)

    # --- as it is ---

    def sq_norm_of(self, slot: ParamSlot, at_home: float | None = None) -> float:
        """The squared norm of a gradient that has landed. `at_home`: that of what the home holds; None: as measured."""
        if slot.index in self.zeroed:
            return 0.0
        factor = self.factors.get(slot.index, 1.0)
        return (self.sq_norms[slot.index] if at_home is None else at_home) * factor * factor

    def sq_norms_by_slot(self) -> list[float]:
        """The squared norms of all landed gradients, on which the decision over the step rests."""
        if self.is_full and not self.factors and not self.zeroed:
            return self.sq_norms
        return [self.sq_norm_of(slot) for slot in self.present_slots]

    @property
    def is_finite(self) -> bool:
        """Whether all landed gradients are finite."""
        return all(map(math.isfinite, self.sq_norms_by_slot()))

    def ranges(self) -> list[UpdateRange]:
        """The parts with a gradient, as ranges of the record (with the steps done so far)."""
        if self.is_full and not self.factors:
            return all_ranges(self.record)
        return update_ranges(self.record, self.present_slots, factors=self.factors)

    def in_memory(self) -> torch.Tensor | None:
        """The accumulated gradient, shape (kept_trainable,), unless it lives on NVMe."""
        if self.passing is not None:
            return self.passing.view(self.record.grad_dtype, self.record.kept_trainable)
        home = self.home
        return None if home is None or not home.is_in_memory else home.memory

    def for_update(self) -> torch.Tensor | Segment | None:
        """What an update reads: the gradient in memory, or its home."""
        in_memory = self.in_memory()
        return self.home if in_memory is None else in_memory

    def release(self) -> None:
        """Give back the buffer of a gradient without a home: it was read, or is not wanted."""
        buffer, self.passing = self.passing, None
        if buffer is not None:
            buffer.give_back()

    def as_of_now(self) -> RecordGradient:
        """Return a copy for a step after which the gradient stays: later changes by scripts do not show in it.

        The measured norms are shared: a change at home must wait for the last update first. The update that was tried
        is the step's from now on, which ends it.
        """
        now = replace(self, factors=dict(self.factors), zeroed=set(self.zeroed), passing=None)
        self.trial = None
        return now


def end_trial(gradient: RecordGradient) -> Ticket:
    """Give up the update that was tried. Returns the ticket after which nothing of it reads the gradient."""
    trial = gradient.take_trial()
    return FINISHED if trial is None else trial.give_up()


def copy_waiting(gradient: RecordGradient, device: Device) -> None:
    """Copy waiting gradients to the place until they leave the device: [Note: small gradients wait].

    A script's thread that looks at a gradient may do this while autograd's thread adds the next one.
    """
    if not gradient.waiting:
        return
    with gradient.copying:
        batch = gradient.waiting[:]
        if not batch:
            return
        numbers, grads = zip(*batch, strict=True)
        targets = list(map(gradient.targets.__getitem__, numbers))
        stream = gradient.waiting_stream
        current = None if stream is None else device.current_stream()
        if stream is None or current is None or stream == current:
            foreach_copy(targets, grads)
        else:
            with device.launching_on(stream):
                foreach_copy(targets, grads)
            current.wait_event(device.record(stream))
        del gradient.waiting[: len(batch)]


class WindowGradients(dict[int, RecordGradient]):
    """The gradients of the present window, by the index of their record."""

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__({record.index: RecordGradient(record) for record in records if record.num_trainable})

    def present(self) -> list[RecordGradient]:
        """The gradients that are home in whole or part, or on their way, in the records' order."""
        return [gradient for gradient in self.values() if gradient.present]

    def renew(self) -> None:
        """Begin a new window: gradients that still land come before the next ones."""
        for index, gradient in list(self.items()):
            landed = gradient.landed
            if gradient.trial is not None:
                landed = AllOf([landed, gradient.trial.ticket])
            self[index] = RecordGradient(gradient.record, landed=landed)

    def end_trials(self, *, of_absent: bool = False) -> None:
        """Give up the updates that were tried; `of_absent`: those of gradients that are left out of the step."""
        for gradient in self.values():
            if gradient.trial is not None and not (of_absent and gradient.present):
                gradient.land_after(end_trial(gradient))


class Brought(NamedTuple):
    """The gradient of a record from one backward, on its way home from the device."""

    gradient: RecordGradient
    flat: torch.Tensor  # on the device, shape (num_trainable,)
    lease: PooledBuffer | None  # the lease of `flat`; None: it is in its home
    leases: BufferPool  # the lease goes back to them, unless it is temporary
    places: Sequence[int]  # places that have got a gradient
    earlier: frozenset[int]  # places that had one before
    factors: Mapping[int, float]  # by place: the factor of the gradient at home, unless 1
