"""What orders the host's threads, and what they do to memory: told to an `Order` for the length of a test.

[Note: host edges]
A thread that sets a latch, queues a task, gives a buffer back or starts another thread hands over all it has done; who
sees the latch set, gets the task, takes the buffer, runs or joins the thread comes after it. A lock orders what it
protects: only those are edges that exist for that, not every one, or the order of a run would be taken for a rule.
A file transfer is an agent of its own from its submission on, and its ticket's wait is an edge. Files are memory, too.
"""

from __future__ import annotations

import inspect
import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from offloadzero.activations import input_homes
from offloadzero.activations import store as activations
from offloadzero.memory import arena, checksums, lanes, nvme, store, tickets
from offloadzero.memory.device import CpuDevice
from offloadzero.native import kernels
from offloadzero.streaming import executor, unit_changes
from offloadzero.update import delivery, records
from tests.simulated.memory import is_own_work
from tests.simulated.operations import (
    has_own_dispatch,
    is_view,
    looks_at_shapes,
    name_of,
    tensors_in,
    written,
)
from tests.simulated.order import DEVICE_THREAD, Clock, Holder, Order

# What host kernels read; all other tensors they write.
KERNELS: dict[Any, dict[str, tuple[str, ...]]] = {
    kernels: {
        "adam_step": ("grad",),
        "lion_step": ("grad",),
        "adagrad_step": ("grad",),
        "sgd_step": ("grad",),
        "compact_adam_step": ("grad",),
        "sq_norm": ("grad",),
        "sq_norms": ("grad",),
        "accumulate": ("grad",),
        "split_master": ("master_fp32",),
        "join_master": ("param_bf16", "remainder_i16"),
        "copy": ("src",),
    },
}
_FILES_START = 1 << 60  # no memory has such addresses


def add_host_edges(order: Order, patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    _latches(order, patch)
    _queues(order, patch)
    _hand_overs(order, patch)
    _locks(order, patch)
    _leases(order, patch)
    _references(order, patch)
    _threads(order, patch)
    _kernels(order, patch)
    _memory(order, patch)
    _files(order, patch)


def _latches(order: Order, patch: pytest.MonkeyPatch) -> None:
    """The flag keeps the clock of who has set it, which is as true as True."""

    def is_set(latch: tickets.Latch) -> bool:
        clock = vars(latch).get("is_set", False)
        if isinstance(clock, dict):
            order.acquire(clock)
        return bool(clock)

    def set_(latch: tickets.Latch, value: bool) -> None:
        vars(latch)["is_set"] = (order.release() or True) if value else False

    patch.setattr(tickets.Latch, "is_set", property(is_set, set_))


def _queues(order: Order, patch: pytest.MonkeyPatch) -> None:
    """Of lanes, of the update's pipeline and of thread pools."""

    class Ordered(queue.SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put((order.release(), item), block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            clock, item = super().get(block, timeout)
            order.acquire(clock)
            return item

        def get_nowait(self) -> Any:
            return self.get(False)

    patch.setattr(queue, "SimpleQueue", Ordered)


def _hand_overs(order: Order, patch: pytest.MonkeyPatch) -> None:
    """Deques into which one thread puts what another takes."""

    class HandOver(deque[Any]):
        def __init__(self, items: Iterable[Any] = ()) -> None:
            super().__init__()
            for item in items:
                self.append(item)

        def append(self, item: Any) -> None:
            super().append((order.release(), item))

        def popleft(self) -> Any:
            clock, item = super().popleft()
            order.acquire(clock)
            return item

    def replace(name: str, owner: Any) -> None:
        setattr(owner, name, HandOver(getattr(owner, name)))

    _after_init(patch, arena.BufferPool, lambda pool: replace("_free", pool))
    _after_init(patch, input_homes.EndedCells, lambda cells: replace("_entries", cells))


class _OrderedLock:
    """A lock that exists to order what its holders do."""

    def __init__(self, order: Order, lock: Any) -> None:
        self._order = order
        self._lock = lock
        self._clock: Clock | None = None

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._order.acquire(self._clock)

    def __exit__(self, *error: object) -> None:
        self._clock = self._order.release()
        self._lock.__exit__(*error)


def _locks(order: Order, patch: pytest.MonkeyPatch) -> None:
    ordered: dict[Any, _OrderedLock] = {}  # by the lock, which two objects may share

    def replace(owner: Any) -> None:
        owner._lock = ordered.setdefault(owner._lock, _OrderedLock(order, owner._lock))

    for kind in (
        executor.Executor,
        unit_changes.UnitChanges,
        activations.ActivationStore,
        delivery.UpdateTicket,
        checksums.CheckedRead,
        records.Edits,
    ):
        _after_init(patch, kind, replace)


def _leases(order: Order, patch: pytest.MonkeyPatch) -> None:
    """Who leases a range comes after who gave it back."""
    given: dict[int, list[tuple[int, int, Clock]]] = {}  # by arena: begin, end
    try_lease, free = arena.Arena.try_lease, arena.Arena._free

    def leasing(
        self: arena.Arena, num_bytes: int, label: str, *, from_end: bool = False
    ) -> arena.Lease | None:
        lease = try_lease(self, num_bytes, label, from_end=from_end)
        for begin, end, clock in given.get(id(self), ()) if lease is not None else ():
            if begin < lease.offset + lease.num_bytes and lease.offset < end:
                order.acquire(clock)
        return lease

    def freeing(self: arena.Arena, lease: arena.Lease) -> None:
        # What is poisoned here comes before, too: the kernels of this thread run before its next ones.
        begin, end = lease.offset, lease.offset + lease.num_bytes
        entries = given.setdefault(id(self), [])
        entries[:] = [entry for entry in entries if not (begin <= entry[0] and entry[1] <= end)]
        entries.append((begin, end, order.release()))
        free(self, lease)

    patch.setattr(arena.Arena, "try_lease", leasing)
    patch.setattr(arena.Arena, "_free", freeing)


def _references(order: Order, patch: pytest.MonkeyPatch) -> None:
    """A task that a lane runs lets go of what it holds when it is over: who lets go last comes after that."""
    submit = lanes.Lane.submit

    def submitting(lane: lanes.Lane, task: Any, **given: Any) -> lanes.LaneTicket:
        holder = Holder()
        for address in _addresses(task):
            order.hold(holder, address)

        def run() -> None:
            holder.begin(order.here())
            try:
                task()
            finally:
                holder.end()

        return submit(lane, run, **given)

    patch.setattr(lanes.Lane, "submit", submitting)
    _cells(order, patch)
    _stores(order, patch)


def _cells(order: Order, patch: pytest.MonkeyPatch) -> None:
    """Who gives up an input knows that its transfers are over; the lane that made them may let go of it later."""
    cell = activations._Cell
    give_up, delete = cell.give_up_source, cell.__del__

    def giving_up(self: Any) -> None:
        source = self.source
        give_up(self)
        _let_go(order, source)

    def deleting(self: Any) -> None:
        delete(self)
        _let_go(order, getattr(self, "source", None), getattr(self, "target", None))

    patch.setattr(cell, "give_up_source", giving_up)
    patch.setattr(cell, "__del__", deleting)


def _stores(order: Order, patch: pytest.MonkeyPatch) -> None:
    """Who has closed a store is done with its arenas; the collector, on another thread, may let go of them later."""
    close = store.TieredStore.close

    def closing(self: store.TieredStore) -> None:
        close(self)
        _let_go(order, self.host.buffer, self.device.buffer)

    patch.setattr(store.TieredStore, "close", closing)


def _let_go(order: Order, *held: torch.Tensor | None) -> None:
    """The calling thread needs this memory no more."""
    holder = Holder()
    holder.begin(order.here())
    holder.end()
    for tensor in held:
        if tensor is not None:
            order.hold(holder, tensor.untyped_storage().data_ptr())


def _addresses(value: Any, depth: int = 4) -> Iterator[int]:
    """Of the tensors that a closure holds."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage().data_ptr()
    elif isinstance(value, arena.PooledBuffer):
        yield value.bytes.untyped_storage().data_ptr()
    elif depth:
        inner: list[Any] = []
        if isinstance(value, partial):
            inner = [value.func, *value.args]
        elif isinstance(value, (tuple, list)):
            inner = list(value)
        for cell in getattr(value, "__closure__", None) or ():
            with suppress(ValueError):  # it is empty
                inner.append(cell.cell_contents)
        for each in inner:
            yield from _addresses(each, depth - 1)


def _threads(order: Order, patch: pytest.MonkeyPatch) -> None:
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join

    def starting(thread: Any) -> None:
        thread.begun_at = order.release()
        start(thread)

    def running(thread: Any) -> None:
        if thread.name == DEVICE_THREAD:
            run(thread)
            return
        try:
            with Recording(order):
                run(thread)
        finally:
            thread.ended_at = order.release()

    def joining(thread: Any, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            order.acquire(getattr(thread, "ended_at", None))

    patch.setattr(threading.Thread, "start", starting)
    patch.setattr(threading.Thread, "run", running)
    patch.setattr(threading.Thread, "join", joining)


def _kernels(order: Order, patch: pytest.MonkeyPatch) -> None:
    def recorded(kernel: Any, reads: tuple[str, ...]) -> Any:
        names = tuple(inspect.signature(kernel).parameters)

        @wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            agent = order.here()
            if agent is not None:
                label = f"{kernel.__name__} of {lanes._here.label}"
                for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                    if isinstance(value, torch.Tensor):
                        order.access_tensor(agent, value, writes=name not in reads, label=label)
            return kernel(*args, **kwargs)

        return call

    for module, named in KERNELS.items():
        for name, reads in named.items():
            patch.setattr(module, name, recorded(getattr(module, name), reads))


def _memory(order: Order, patch: pytest.MonkeyPatch) -> None:
    """Host arenas, the buffers of activations and of optimizer slots; the CPU's device memory."""
    names = {
        "offloadzero.memory.store": "the host arena",
        "offloadzero.activations.memory": "a host buffer of activations",
    }
    allocate_host, allocate = arena.allocate_host, CpuDevice.allocate

    def tracked(name: str) -> Any:
        def allocated(num_bytes: int) -> torch.Tensor:
            buffer = allocate_host(num_bytes)
            order.track_storage(buffer, name)
            return buffer

        return allocated

    def on_device(device: CpuDevice, num_bytes: int) -> torch.Tensor:
        memory = allocate(device, num_bytes)
        order.track_storage(memory, "device memory")
        return memory

    for module, name in names.items():
        patch.setattr(f"{module}.allocate_host", tracked(name))
    patch.setattr(CpuDevice, "allocate", on_device)


class Transfer:
    """The ticket of a file transfer."""

    def __init__(self, order: Order, clock: Clock, ticket: tickets.Ticket) -> None:
        self._order = order
        self._clock = clock
        self._ticket = ticket
        self.was_waited_for = False

    def wait(self) -> None:
        try:
            self._ticket.wait()
        finally:
            self._order.acquire(self._clock)
            self.was_waited_for = True

    def done(self) -> bool:
        is_done = self._ticket.done()
        if is_done:
            self._order.acquire(self._clock)
        return is_done


def _files(order: Order, patch: pytest.MonkeyPatch) -> None:
    starts = itertools.count(_FILES_START, 1 << 48)
    submit, close, verify = nvme.NvmeTier._submit, nvme.NvmeTier.close, checksums.Checksums.verify
    crc32c_blocks = checksums.crc32c_blocks

    def track(tier: Any) -> None:
        tier.address = next(starts)
        order.track(tier.address, 1 << 48, "the files")

    def submitting(self: Any, verb: str, start: int, data: torch.Tensor, *, priority: int, label: str) -> Any:
        if not order.tracks(data.data_ptr()):
            order.track_storage(data, "a buffer of file transfers")
        agent = order.transfer(f"file {verb}")
        # Submitted first: what the engine refuses it never does.
        ticket = submit(self, verb, start, data, priority=priority, label=label)
        order.access_tensor(agent, data, writes=verb == "read", label=label)
        order.access(agent, self.address + start, data.nbytes, writes=verb == "write", label=label)
        self.transfers[agent.number] = agent
        return Transfer(order, agent.release(), ticket)

    def closing(self: Any) -> None:
        close(self)
        for agent in getattr(self, "transfers", {}).values():  # it has waited for all
            order.acquire(agent.clock)

    def verifying(self: Any, data: torch.Tensor, *rest: Any) -> None:
        order.access_tensor(order.here(), data, writes=False, label="checksums of what was read")
        verify(self, data, *rest)

    def summing(data: torch.Tensor) -> Any:
        order.access_tensor(order.here(), data, writes=False, label="checksums")
        return crc32c_blocks(data)

    _before_init(patch, nvme.NvmeTier, lambda tier: setattr(tier, "transfers", {}))
    _after_init(patch, nvme.NvmeTier, track)
    patch.setattr(nvme.NvmeTier, "_submit", submitting)
    patch.setattr(nvme.NvmeTier, "close", closing)
    patch.setattr(checksums.Checksums, "verify", verifying)
    patch.setattr(checksums, "crc32c_blocks", summing)


class Recording(TorchDispatchMode):
    """What the calling thread does with tracked memory, by torch's operations, on the host."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the compiler is imported, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_own_work() or FakeTensor in types:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if any(has_own_dispatch(kind) for kind in types):
                return NotImplemented
            if not is_view(func):
                self.record(func, args, kwargs)
            return func(*args, **kwargs)

    def record(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operation reads and writes its arguments."""
        record_operation(self._order, self._order.here(), func, args, kwargs)


def record_operation(order: Order, agent: Any, func: Any, args: Any, kwargs: Any) -> None:
    """What an operation does to its arguments."""
    for tensor, writes in touched(func, args, kwargs):
        order.access_tensor(agent, tensor, writes=writes, label=name_of(func))


def touched(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """The arguments whose bytes an operation reads or, True, writes."""
    if looks_at_shapes(func):
        return
    changed = {id(tensor) for tensor in written(func, args, kwargs)}
    for tensor in tensors_in((args, kwargs)):
        if not tensor.is_meta:
            yield tensor, id(tensor) in changed


def _after_init(patch: pytest.MonkeyPatch, kind: Any, change: Any) -> None:
    init = kind.__init__

    @wraps(init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        change(self)

    patch.setattr(kind, "__init__", initialise)


def _before_init(patch: pytest.MonkeyPatch, kind: Any, change: Any) -> None:
    init = kind.__init__

    @wraps(init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        change(self)
        init(self, *args, **kwargs)

    patch.setattr(kind, "__init__", initialise)
