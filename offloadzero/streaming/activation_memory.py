"""Memory for the inputs of checkpointed units: of the plan, or taken as the first step shows the sizes (floor 5).

[Note: how much inputs take]
Nobody knows before the first forward how large a unit's inputs are, but the user does: micro batch x length x width x 2
bytes, as a rule. Where `offloadzero.activation_checkpoints.input_bytes` says so, what inputs take in every tier is a
part of the plan, reserved before the first step; what does not fit in there is an error that names the key. Where it
does not, buffers are taken beside the plan in the first step, within the budgets of host and nvme, used again in every
later one, and counted by `reserved_bytes()` and `memory_table()`.

[Note: fetched inputs]
An input that has come back is lent to the recomputation: autograd saves it, a script may keep it. So each lies in a
storage of its own, and its memory is used again when nobody else holds that. By then all that reads it has been
launched; the next fetch writes behind a fence.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from offloadzero.config import TierName
from offloadzero.errors import BudgetError
from offloadzero.memory.arena import Arena, Lease, align_up, allocate_host
from offloadzero.memory.device import Stream
from offloadzero.memory.lanes import Accelerator
from offloadzero.planning.memory_plan import INPUT_BYTES_KEY, format_bytes
from offloadzero.planning.probe import available_host_bytes
from offloadzero.torch_private import storage_use_count, with_own_storage


@dataclass(frozen=True, eq=False)
class PlannedMemory:
    """What the plan holds for inputs: [Note: how much inputs take]."""

    input_bytes: int  # of one call
    device: Arena
    host: Arena
    nvme_bytes: int


def beyond_plan(tier: TierName, num_bytes: int, label: str, *, free_bytes: int, planned: int) -> BudgetError:
    """The error of an input that has no room in what is planned."""
    return BudgetError(
        f"{label}: {INPUT_BYTES_KEY}: {num_bytes:,} bytes do not fit in what is planned on {tier.value} for the inputs "
        f"of checkpointed units ({free_bytes:,} of {planned:,} bytes are free). It is the bytes of all inputs of one "
        "unit's call; units that are called twice, or graphs that live at once, need a multiple of it. Without the "
        "key memory is taken as it is needed."
    )


def _lease_from(arena: Arena, tier: TierName, num_bytes: int, label: str) -> Lease:
    lease = arena.try_lease(num_bytes, label)
    if lease is None:
        raise beyond_plan(
            tier, num_bytes, label, free_bytes=arena.free_bytes, planned=arena.num_bytes
        ) from None
    return lease


class Reserve:
    """Counts what a tier's checkpoints take beside the plan, and refuses what does not fit."""

    def __init__(self, tier: TierName, *, budget: int | None, planned_bytes: int) -> None:
        self.tier = tier
        self.num_bytes = 0
        self._budget = budget
        self._planned_bytes = planned_bytes

    def add(self, num_bytes: int, label: str) -> None:
        """`num_bytes` more (or less). Raises BudgetError."""
        if num_bytes > 0:
            self.check(num_bytes, label)
        self.num_bytes += num_bytes

    def check(self, num_bytes: int, label: str) -> None:
        """Raises BudgetError when `num_bytes` more do not fit."""
        taken = f"{format_bytes(self.num_bytes)} of activation checkpoints are taken"
        if self._budget is not None:
            needed = self._planned_bytes + self.num_bytes + num_bytes
            if needed > self._budget:
                raise BudgetError(
                    f"{label}: offloadzero.budgets.{self.tier.value}: {format_bytes(needed)} are needed, "
                    f"{format_bytes(self._budget)} are allowed. {format_bytes(self._planned_bytes)} are planned for "
                    f"states, {taken}, {format_bytes(num_bytes)} more are asked for.\nWhat would make it fit: "
                    "another offloadzero.activation_checkpoints.tier, a smaller micro batch, or a larger budget."
                )
        elif self.tier is TierName.HOST and num_bytes > available_host_bytes():
            raise BudgetError(
                f"{label}: {format_bytes(num_bytes)} of host memory are asked for, "
                f"{format_bytes(available_host_bytes())} are available; {taken}"
            )


@dataclass(eq=False)
class HostMemory:
    """Page-aligned host memory, pinned where the configuration says so, within its budget or of the plan."""

    accelerator: Accelerator
    reserve: Reserve
    pin: bool
    planned: PlannedMemory | None = None
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)  # by address
    leases: dict[int, Lease] = field(default_factory=dict)  # of the plan's memory, by address
    lock: threading.Lock = field(default_factory=threading.Lock)  # the reading thread grows its staging

    def allocate(self, num_bytes: int, label: str) -> torch.Tensor:
        """Uint8, of `num_bytes` at least. Raises BudgetError."""
        size = align_up(num_bytes)
        with self.lock:
            if self.planned is not None:
                lease = _lease_from(self.planned.host, TierName.HOST, size, label)
                buffer = lease.bytes
                self.leases[buffer.data_ptr()] = lease
            else:
                self.reserve.add(size, label)
                buffer = allocate_host(size)
                if self.pin:
                    self.accelerator.pin(buffer, label=f"activation checkpoints of {label}")
            self.buffers[buffer.data_ptr()] = buffer
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Give a buffer back."""
        address = buffer.data_ptr()
        with self.lock:
            del self.buffers[address]
            if self.planned is not None:
                self.leases.pop(address).release()
                return
            if self.pin:
                self.accelerator.unpin(buffer)
            self.reserve.add(-buffer.numel(), "")

    def free_all(self) -> None:
        """Give every buffer back."""
        for buffer in list(self.buffers.values()):
            self.free(buffer)


class _FetchBuffer:
    """Device memory in a storage of its own."""

    def __init__(self, memory: torch.Tensor, lease: Lease | None, stream: Stream | None) -> None:
        self.bytes = memory
        self.lease = lease
        self.stream = stream  # that it was taken on, and belongs to for the allocator
        self._storage = int(memory.untyped_storage()._cdata)
        self._num_own = storage_use_count(self._storage)

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    def is_held(self) -> bool:
        """Whether somebody else has a tensor over it."""
        return storage_use_count(self._storage) > self._num_own


class FetchMemory:
    """Device memory for inputs that come back: [Note: fetched inputs]. Not thread-safe."""

    def __init__(self, accelerator: Accelerator, planned: PlannedMemory | None) -> None:
        self._accelerator = accelerator
        self._arena = planned.device if planned is not None else None
        self._buffers: list[_FetchBuffer] = []

    def reserved(self) -> dict[TierName, int]:
        """Bytes taken beside the plan."""
        if self._arena is not None:
            return {}
        return {TierName.DEVICE: sum(buffer.num_bytes for buffer in self._buffers)}

    def take(self, num_bytes: int, label: str) -> torch.Tensor:
        """Uint8, shape (num_bytes,): lent until no tensor over it is left. What was launched may still read it."""
        size = align_up(num_bytes)
        free = [buffer for buffer in self._buffers if not buffer.is_held()]
        fitting = [buffer for buffer in free if buffer.num_bytes == size or self._arena is None]
        fitting = [buffer for buffer in fitting if buffer.num_bytes >= size]
        buffer = (
            min(fitting, key=lambda buffer: buffer.num_bytes) if fitting else self._make(size, free, label)
        )
        return buffer.bytes[:num_bytes]

    def _make(self, size: int, free: list[_FetchBuffer], label: str) -> _FetchBuffer:
        """In place of what is free and of another size: of one of those, or of all where it is of the plan."""
        if self._arena is None:
            if free:
                self._let_go(free[0])
            free.clear()  # nothing here may hold it while the larger one is taken
            stream = self._accelerator.asynchronous.current_stream()
            made = _FetchBuffer(self._accelerator.allocate(size), None, stream)
        else:
            for other in free:
                self._buffers.remove(other)
                if other.lease is not None:
                    other.lease.release()
            lease = _lease_from(self._arena, TierName.DEVICE, size, label)
            with torch.inference_mode(False):
                made = _FetchBuffer(with_own_storage(lease.bytes), lease, None)
        self._buffers.append(made)
        return made

    def _let_go(self, buffer: _FetchBuffer) -> None:
        """Back to the allocator, which may give it to its stream at once: behind what others read there."""
        self._accelerator.join_streams(buffer.stream)
        self._buffers.remove(buffer)
