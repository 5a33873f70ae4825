"""Memory for the inputs of checkpointed units: planned, or taken as the first step shows the sizes.

[Note: how much inputs take]
The engine cannot know before the first forward how large a unit's inputs are, but the user does: micro batch x length x
width x 2 bytes, as a rule. Where `offloadzero.activation_checkpoints.input_bytes` says so, the memory of inputs in
every tier is a part of the plan, reserved before the first step, with a slot of that size for each call; an input that
does not fit in there is an error that names the key. Where the key is missing, buffers are taken beside the plan in the
first step, within the budgets of host and nvme, used again in every later one, and counted by `reserved_bytes()` and
`memory_table()`.

[Note: fetched inputs]
An input that has come back is lent to the recomputation: autograd saves it, a script may keep it. So each lies in a
storage of its own, and its memory is used again when nothing else holds that storage. By then all operations that read
it have been launched; the next fetch writes behind a fence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from offloadzero.core.segments import TierName
from offloadzero.core.torch_private import storage_use_count, with_own_storage
from offloadzero.errors import BudgetError
from offloadzero.memory.arena import ALIGN_BYTES, Arena, Lease, Slots, align_up, allocate_host
from offloadzero.memory.device import Stream
from offloadzero.memory.lanes import Accelerator
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.checkpointed_inputs import INPUT_BYTES_KEY


@dataclass(frozen=True, eq=False)
class PlannedMemory:
    """The memory that the plan has for inputs: [Note: how much inputs take]."""

    input_bytes: int  # of one call's inputs
    kept_bytes: int  # the same at home: fewer where ranks divide inputs
    device: torch.Tensor
    host: Arena
    nvme_bytes: int

    def device_slots(self) -> Slots:
        """Divide the device's memory into slots, one for each call that is fetched: [Note: a slot each]."""
        return Slots(self.device.numel() // self.input_bytes, self.input_bytes)

    def home_slots(self, num_bytes: int) -> Slots:
        """Divide the `num_bytes` of homes, one slot for each call."""
        return Slots(num_bytes // self.kept_bytes, self.kept_bytes)


def beyond_plan(tier: TierName, num_bytes: int, label: str, slots: Slots) -> BudgetError:
    """Make the error of an input that has no room in the planned memory."""
    return BudgetError(
        f"{label}: {INPUT_BYTES_KEY}: {align_up(num_bytes):,} bytes do not fit in what is planned on {tier.value} for "
        f"the inputs of checkpointed units ({slots.free_bytes:,} of {slots.num_bytes:,} bytes are free, at most "
        f"{slots.largest_bytes:,} in one piece). Set the key to the bytes of all inputs of one unit's call, each "
        f"rounded up to {ALIGN_BYTES:,}, or a multiple of it where a unit is called twice or graphs live at once; "
        "or leave it out, and memory is taken as it is needed."
    )


class Reserve:
    """Counts the bytes of a tier's checkpoints beside the plan, and refuses those that do not fit."""

    def __init__(
        self,
        tier: TierName,
        *,
        budget: int | None,
        planned_bytes: int,
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Begin at 0. `available_bytes`: the machine's free bytes, of a tier that is shared with other programs."""
        self.tier = tier
        self._available_bytes = available_bytes
        self.num_bytes = 0
        self._budget = budget
        self._planned_bytes = planned_bytes

    def add(self, num_bytes: int, label: str) -> None:
        """Count `num_bytes` more (or fewer). Raises BudgetError."""
        if num_bytes > 0:
            self.check(num_bytes, label)
        self.num_bytes += num_bytes

    def check(self, num_bytes: int, label: str) -> None:
        """Raise BudgetError when `num_bytes` more do not fit."""
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
        elif self._available_bytes is not None and num_bytes > (available := self._available_bytes()):
            raise BudgetError(
                f"{label}: {format_bytes(num_bytes)} of {self.tier.value} memory are asked for, "
                f"{format_bytes(available)} are available; {taken}"
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
        """Allocate uint8 memory of at least `num_bytes`. Raises BudgetError."""
        size = align_up(num_bytes)
        with self.lock:
            if self.planned is not None:
                lease = self.planned.host.lease(size, label)
                buffer = lease.bytes
                self.leases[buffer.data_ptr()] = lease
            else:
                self.reserve.add(size, label)
                try:
                    buffer = allocate_host(size)
                    if self.pin:
                        self.accelerator.pin(buffer, label=f"activation checkpoints of {label}")
                except BaseException:
                    self.reserve.add(-size, label)  # a smaller batch may fit
                    raise
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

    @property
    def taken_bytes(self) -> int:
        """The bytes taken beside the plan."""
        return self.reserve.num_bytes


class GrowingDeviceMemory:
    """Device memory for homes of inputs, beside the plan. A buffer that is freed is in no use any more."""

    planned = None

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.taken_bytes = 0

    def allocate(self, num_bytes: int, label: str) -> torch.Tensor:  # noqa: ARG002
        """Allocate uint8 memory of at least `num_bytes`."""
        size = align_up(num_bytes)
        buffer = self._accelerator.allocate(size)
        self.taken_bytes += size
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Give a buffer back: to torch's allocator, with the last reference."""
        self.taken_bytes -= buffer.numel()

    def free_all(self) -> None:
        """Forget all buffers."""
        self.taken_bytes = 0


class _FetchBuffer:
    """Device memory in a storage of its own."""

    def __init__(self, memory: torch.Tensor, *, stream: Stream | None = None, offset: int = 0) -> None:
        self.bytes = memory
        self.stream = stream  # the stream on which it was taken; to the allocator it belongs to that
        self.offset = offset  # in the planned memory
        self._storage = int(memory.untyped_storage()._cdata)
        self._num_own = storage_use_count(self._storage)

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    def is_held(self) -> bool:
        """Whether a tensor of other code lies over it."""
        return storage_use_count(self._storage) > self._num_own


class GrowingFetchMemory:
    """Device memory for inputs that come back, taken as it is needed: [Note: fetched inputs]. Not thread-safe."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers: list[_FetchBuffer] = []

    def reserved(self) -> dict[TierName, int]:
        """The bytes taken so far, beside the plan."""
        return {TierName.DEVICE: sum(buffer.num_bytes for buffer in self._buffers)}

    def take(self, num_bytes: int, label: str, *, call: int) -> torch.Tensor:  # noqa: ARG002
        """Lend uint8 memory, shape (num_bytes,), until no tensor over it is left. Launched work may still read it.

        It is the smallest free buffer that is large enough, or a new one in place of a free one that is not.
        """
        size = align_up(num_bytes)
        free = [buffer for buffer in self._buffers if not buffer.is_held()]
        fitting = [buffer for buffer in free if buffer.num_bytes >= size]
        if fitting:
            return min(fitting, key=lambda buffer: buffer.num_bytes).bytes[:num_bytes]
        if free:
            self._let_go(free[0])
        free.clear()  # no reference may keep it while the larger one is taken
        stream = self._accelerator.asynchronous.current_stream()
        self._buffers.append(_FetchBuffer(self._accelerator.allocate(size), stream=stream))
        return self._buffers[-1].bytes[:num_bytes]

    def _let_go(self, buffer: _FetchBuffer) -> None:
        """Return a buffer to the allocator, which may lend it to its stream at once: behind reads on other streams."""
        self._accelerator.join_streams(buffer.stream)
        self._buffers.remove(buffer)


NUM_SPARE = 64


class PlannedFetchMemory:
    """A slot of the planned memory for each call that is fetched: [Note: a slot each]."""

    def __init__(self, planned: PlannedMemory) -> None:
        self._memory = planned.device
        self._slots = planned.device_slots()
        self._lent: list[_FetchBuffer] = []
        # Free ones by place, for inputs of the same size.
        self._spare: dict[tuple[int, int], _FetchBuffer] = {}

    def reserved(self) -> dict[TierName, int]:
        """Return nothing: all of it is in the plan."""
        return {}

    def take(self, num_bytes: int, label: str, *, call: int) -> torch.Tensor:
        """Lend memory in the call's slot. Raises BudgetError."""
        self._take_back()
        offset = self._slots.take(call, num_bytes)
        if offset is None:
            offset = self._slots.take_anywhere(num_bytes)
        if offset is None:
            raise beyond_plan(TierName.DEVICE, num_bytes, label, self._slots)
        buffer = self._over(offset, align_up(num_bytes))
        self._lent.append(buffer)
        return buffer.bytes[:num_bytes]

    def _take_back(self) -> None:
        for buffer in [buffer for buffer in self._lent if not buffer.is_held()]:
            self._lent.remove(buffer)
            self._slots.give(buffer.offset, buffer.num_bytes)
            self._spare[buffer.offset, buffer.num_bytes] = buffer

    def _over(self, offset: int, size: int) -> _FetchBuffer:
        if len(self._spare) > NUM_SPARE:
            self._spare.clear()
        spare = self._spare.pop((offset, size), None)
        if spare is not None:
            return spare
        with torch.inference_mode(False):
            return _FetchBuffer(with_own_storage(self._memory[offset : offset + size]), offset=offset)
