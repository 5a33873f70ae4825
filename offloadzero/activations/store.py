"""The inputs of checkpointed units between forward and backward: on the device, the host or NVMe.

[Note: an input's way]
An input of a checkpointed unit is a *cell*. Its copy to the home tier starts when the unit's forward does; the
device's memory is given up a few units later, behind the copy on the compute stream, so that the launching thread
waits for nothing. Backward asks for the cells in reverse order: a cell that still has its device memory returns that,
any other is fetched, and the ones before it are fetched ahead.

[Note: how much inputs take] in offloadzero/activations/memory.py explains the memory for all that. A cell
ends with the graph that holds it, on any thread and perhaps in the middle of an allocation: its end only appends to a
deque, and the next input that comes takes the memory that is free there.

[Note: inputs changed in place]
A copy on the way would read half of a change. So a source is held, with its version, until it is given up on the
training thread: a source that has changed by then is refused. A later change does not reach the copy, which is
complete.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from enum import Enum

import torch

from offloadzero.activations.input_homes import (
    EndedCell,
    EndedCells,
    InputCopy,
    InputHomes,
    MemorySpace,
    homes_in_memory,
    homes_on_file,
)
from offloadzero.activations.input_parts import InputParts
from offloadzero.activations.memory import (
    GrowingDeviceMemory,
    GrowingFetchMemory,
    HostMemory,
    PlannedFetchMemory,
    PlannedMemory,
    Reserve,
)
from offloadzero.config import OffloadConfig
from offloadzero.core.segments import TierName
from offloadzero.errors import StateError
from offloadzero.memory.arena import Arena
from offloadzero.memory.device import Stream
from offloadzero.memory.lanes import order_compute_after
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED, AllOf, Ticket
from offloadzero.planning.checkpointed_inputs import MIN_BYTES, input_key, may_leave
from offloadzero.planning.machine import available_host_bytes
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.ranks.group import Group

NUM_SENDING = 2  # inputs whose device memory is held for their copies


class CellState(Enum):
    """The place of an input."""

    KEPT = "kept"  # on the device, perhaps with a copy on its way or at home
    AWAY = "away"
    FETCHING = "fetching"


class Call:
    """One call of a checkpointed unit; numbered when it keeps its first input."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.number: int | None = None
        self.cells: list[weakref.ref[_Cell]] = []


class _Cell:
    """One input of one call, or of several calls that got the very same tensor."""

    def __init__(self, tensor: torch.Tensor, label: str, ended: EndedCells, *, stream: Stream | None) -> None:
        """Hold an input. `stream` has computed the tensor, and the allocator gives its memory to that stream again."""
        self.label = label
        self.stream = stream
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        self.source: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.origin = weakref.ref(tensor.untyped_storage())
        self.state = CellState.KEPT
        self.copy: InputCopy | None = None
        self.target: torch.Tensor | None = None
        self.fetched: Ticket = FINISHED  # the ticket of the last fetch
        self._ended = ended

    def check_unchanged(self) -> None:
        if self.source is not None and self.source._version != self.version:
            raise StateError(
                f"{self.label}: an input of this checkpointed unit was changed in place before backward: "
                "write x = x + y instead of x += y, or leave the unit out of offloadzero.activation_checkpoints.units"
            )

    def give_up_source(self) -> None:
        if self.state is not CellState.KEPT:
            raise AssertionError(f"{self.label}: {self.state}")
        self.check_unchanged()
        self.source = None
        self.state = CellState.AWAY

    def __del__(self) -> None:
        copy: InputCopy | None = getattr(self, "copy", None)
        if copy is not None:
            users = AllOf((copy.copied, copy.sent.written, self.fetched))
            is_in_use = not (copy.copied.done() and self.fetched.done())
            self._ended.note(EndedCell(copy, users, (self.source, self.target) if is_in_use else ()))


@dataclass(frozen=True, eq=False)
class KeptInput:
    """The object that autograd keeps instead of an input."""

    call: Call
    cell: _Cell


class ActivationStore:
    """Keeps the inputs of checkpointed units until backward asks for them."""

    def __init__(
        self,
        home: InputHomes | None,
        ended: EndedCells,
        *,
        fetched: GrowingFetchMemory | PlannedFetchMemory,
        store: TieredStore,
    ) -> None:
        """Make the store. `home` None keeps the inputs on the device; other inputs come back into `fetched`."""
        self._home = home
        self._fetched = fetched
        self._ended = ended
        self._store = store
        self._accelerator = store.accelerator
        self._failures = store.failures
        self._poison = store.poison
        self._lock = threading.RLock()
        self._next_number = 0
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
        self._by_input: weakref.WeakValueDictionary[object, _Cell] = weakref.WeakValueDictionary()
        self._sending: deque[weakref.ref[_Cell]] = deque()

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether this input is one that moves to the store."""
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._accelerator.device
            and not tensor.is_inference()
            and may_leave(tensor, min_bytes=MIN_BYTES)
        )

    # --- forward ---

    def keep(self, call: Call, tensor: torch.Tensor) -> KeptInput:
        """Take an input of `call` until backward. It must not be changed: [Note: inputs changed in place]."""
        with self._lock:
            self._failures.check()
            self._give_up_sources()
            self._ended.release()
            self._numbered(call)  # counts a call whose inputs are all known, too
            cell = self._find_or_make(call, tensor)
            call.cells.append(weakref.ref(cell))
            return KeptInput(call, cell)

    def _numbered(self, call: Call) -> int:
        if call.number is None:
            call.number = self._next_number
            self._next_number += 1
            self._calls[call.number] = call
        return call.number

    def _find_or_make(self, call: Call, tensor: torch.Tensor) -> _Cell:
        storage = tensor.untyped_storage()
        key = input_key(tensor)
        known = self._by_input.get(key)
        if known is not None and known.origin() is storage and known.version == tensor._version:
            return known  # a mask, or an encoder's output: every block gets it
        stream = self._accelerator.asynchronous.current_stream()
        cell = _Cell(tensor, call.label, self._ended, stream=stream)
        if self._home is not None:
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            cell.copy = self._home.send(flat, call.label, call=self._numbered(call))
            self._sending.append(weakref.ref(cell))
        self._by_input[key] = cell
        return cell

    def _give_up_sources(self) -> None:
        """Let copied inputs leave the device, and of the others all but the last few, behind their copies.

        Where what comes back is gathered from other ranks, the last few stay there though they are copied.
        """
        by_order = self._home is not None and self._home.goes_by_order
        while len(self._sending) >= (NUM_SENDING if by_order else 1):
            cell = self._sending[0]()
            if cell is not None and cell.copy is not None:
                copied = cell.copy.copied
                if not copied.done():
                    if len(self._sending) < NUM_SENDING:
                        return
                    with self._store.clock.waiting("activation copy"), self._failures.handed_over():
                        copied.order_compute(cell.stream)
                cell.give_up_source()
            self._sending.popleft()

    # --- backward ---

    def load(self, kept: KeptInput) -> torch.Tensor:
        """Return the input, in the shape, strides and dtype it had. Called once for each recomputation."""
        with self._lock:
            self._failures.check()
            cell = kept.cell
            self._fetch(cell, self._numbered(kept.call))
            self._fetch_ahead(kept.call)
            if cell.source is not None:
                cell.check_unchanged()
                return cell.source
            if cell.target is None:
                raise AssertionError(f"{cell.label}: {cell.state}")
            tensor, cell.target = cell.target, None
            cell.state = CellState.AWAY
            with self._failures.handed_over():
                if not cell.fetched.done():
                    with self._store.clock.waiting("activation fetch"):
                        order_compute_after(cell.fetched)
                if cell.copy is not None:
                    cell.copy.expect_fetched()
            self._failures.check_readable()  # a failed ticket counts as done
            return tensor

    def _fetch_ahead(self, call: Call) -> None:
        if self._home is None or call.number is None:
            return
        for number in range(call.number - 1, call.number - 1 - self._home.num_ahead, -1):
            earlier = self._calls.get(number)
            for reference in earlier.cells if earlier is not None else ():
                cell = reference()
                if cell is not None:
                    self._fetch(cell, number)

    def _fetch(self, cell: _Cell, call: int) -> None:
        """Start the fetch of a cell that is away, for the call of this number."""
        if cell.state is not CellState.AWAY or cell.copy is None:
            return
        memory = self._fetched.take(cell.size.numel() * cell.dtype.itemsize, cell.label, call=call)
        target = memory.view(cell.dtype).as_strided(cell.size, cell.stride)
        if self._poison:
            self._accelerator.join_streams()  # they may still read the memory that is poisoned now
            target.fill_(float("nan"))
        flat = target.as_strided((target.numel(),), (1,))
        cell.fetched = cell.copy.fetch(flat, self._accelerator.fence())
        cell.target = target
        cell.state = CellState.FETCHING

    # --- the whole ---

    def reserved(self) -> dict[TierName, int]:
        """The bytes taken so far beside the plan, by tier."""
        if self._home is None:
            return {}
        taken = self._fetched.reserved()
        for tier, num_bytes in self._home.space.reserved().items():
            taken[tier] = taken.get(tier, 0) + num_bytes
        return taken

    def file_engine(self) -> str | None:
        """The file engine that moves the inputs, and how, once one does."""
        return self._home.space.file_engine() if self._home is not None else None

    def close(self) -> None:
        """Finish the transfers, stop the threads, remove the file."""
        if self._home is not None:
            self._home.close()


def make_activation_store(
    config: OffloadConfig, plan: MemoryPlan, store: TieredStore, *, group: Group
) -> ActivationStore:
    """Make the store of a configuration with activation checkpoints."""
    if config.activation_checkpoints is None:
        raise AssertionError("no activation checkpoints are configured")
    tier, planned = config.activation_checkpoints.tier, _planned_memory(plan, store)
    parts = None  # where no other rank has the same inputs
    if group.activations is not None and group.activation_orders is not None:
        parts = InputParts(group.activations, group.activation_orders, store.accelerator)
    ended = EndedCells(store)
    home: InputHomes | None = None
    if tier.is_device:
        if parts is not None:
            on_device = GrowingDeviceMemory(store.accelerator)
            home = homes_in_memory(MemorySpace(tier, on_device, ended, store=store), store=store, parts=parts)
    else:
        host = Reserve(
            TierName.HOST,
            budget=config.budgets.host,
            planned_bytes=plan.tier_bytes(TierName.HOST),
            available_bytes=available_host_bytes,
        )
        memory = HostMemory(store.accelerator, host, config.pin_memory, planned)
        if tier.is_host_memory:
            home = homes_in_memory(MemorySpace(tier, memory, ended, store=store), store=store, parts=parts)
        else:
            nvme = Reserve(
                TierName.NVME, budget=config.budgets.nvme, planned_bytes=plan.tier_bytes(TierName.NVME)
            )
            home = homes_on_file(memory, ended, store=store, reserve=nvme, config=config, parts=parts)
    fetched: GrowingFetchMemory | PlannedFetchMemory = GrowingFetchMemory(store.accelerator)
    if planned is not None:
        fetched = PlannedFetchMemory(planned)
    return ActivationStore(home, ended, fetched=fetched, store=store)


def _planned_memory(plan: MemoryPlan, store: TieredStore) -> PlannedMemory | None:
    """Take the memory that is planned for inputs, if any is."""
    inputs = plan.inputs
    if inputs is None:
        return None
    label = "activation checkpoint"
    return PlannedMemory(
        inputs.input_bytes,
        inputs.kept_bytes,
        # Not of the store's arena: a tensor that autograd saves and that lies there is a weight.
        device=store.accelerator.allocate(inputs.device),
        host=Arena(label, store.host.lease(inputs.host, label).bytes),
        nvme_bytes=inputs.nvme,
    )
