"""The tiers that hold the inputs of checkpointed units until backward (floor 5).

Their memory and file: [Note: how much inputs take] in offloadzero/streaming/activation_memory.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offloadzero.config import AioConfig, TierName
from offloadzero.errors import BudgetError
from offloadzero.memory.arena import BufferPool, Holes, PooledBuffer, align_up
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.memory.lanes import Accelerator, Fence, Lane, LaneTicket
from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.slots import Slots
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import Failures, Ticket
from offloadzero.memory.tiers import FETCH_PRIORITY, Extent, Home
from offloadzero.observe.clock import StepClock
from offloadzero.planning.memory_plan import INPUTS_AHEAD, NUM_INPUT_STAGING
from offloadzero.streaming.activation_memory import HostMemory, Reserve, beyond_plan


class HomeCopy(Protocol):
    """One input at home."""

    copied: LaneTicket  # the device's memory has been read

    def fetch(self, target: torch.Tensor, fence: Fence) -> LaneTicket:
        """Fill `target`, device, shape (n,), which may be written behind `fence`."""

    def home(self) -> Ticket:
        """Done when the input is home."""

    def release(self) -> None:
        """Nobody uses the home any more."""


class InputTier(Protocol):
    """A tier for inputs."""

    num_ahead: int  # calls that are fetched ahead

    def send(self, source: torch.Tensor, label: str, *, call: int) -> HomeCopy:
        """Start the copy of `source`, device, shape (n,), an input of the call of this number."""

    def reserved(self) -> dict[TierName, int]:
        """Bytes taken so far."""

    def file_engine(self) -> str | None:
        """Which one moves the inputs, and how, if any does so far."""

    def close(self) -> None:
        """Finish the transfers, stop the threads, give the memory back."""


@dataclass(frozen=True, eq=False)
class EndedCell:
    """What a cell leaves behind: its home, and device memory that a copy may still read, a fetch still write."""

    copy: HomeCopy
    users: Ticket
    held: tuple[torch.Tensor | None, ...]


class EndedCells:
    """Cells whose graph is gone; their homes are free once their transfers are done."""

    def __init__(self, *, clock: StepClock, failures: Failures) -> None:
        self._clock = clock
        self._failures = failures
        self._entries: deque[EndedCell] = deque()

    def note(self, entry: EndedCell) -> None:
        """From any thread, at any time."""
        self._entries.append(entry)

    def release(self, *, wait: bool = False) -> None:
        """Give back the homes that no transfer uses any more; `wait` until that is all of them."""
        for _ in range(len(self._entries)):
            entry = self._entries.popleft()
            if wait and not entry.users.done():
                with self._clock.waiting("activation copy"), self._failures.handed_over():
                    entry.users.wait()
            if entry.users.done():
                entry.copy.release()
            else:
                self._entries.append(entry)


def _take_planned(
    slots: Slots, ended: EndedCells, tier: TierName, num_bytes: int, label: str, call: int
) -> int:
    """An offset in the call's slot; where there is none, in that of another. Raises BudgetError."""
    offset = slots.take(call, num_bytes)
    if offset is None:
        ended.release(wait=True)
        offset = slots.take(call, num_bytes)
    if offset is None:
        offset = slots.take_anywhere(num_bytes)
    if offset is None:
        raise beyond_plan(tier, num_bytes, label, slots)
    return offset


class _Lanes:
    """One lane in each direction."""

    def __init__(self, accelerator: Accelerator, failures: Failures) -> None:
        self.d2h = accelerator.lane("activation-d2h", failures)
        self.h2d = accelerator.lane("activation-h2d", failures)

    def close(self) -> None:
        self.d2h.close()
        self.h2d.close()


@dataclass(eq=False)
class _HostCopy:
    tier: HostHome
    buffer: torch.Tensor
    view: torch.Tensor
    label: str
    copied: LaneTicket

    def home(self) -> Ticket:
        return self.copied

    def fetch(self, target: torch.Tensor, fence: Fence) -> LaneTicket:
        copy, view = self.tier.accelerator.copy, self.view
        targets = [target]  # the lane lets go of it before the ticket is done
        # What is fetched was given up behind its copy, and the fence is behind that.
        return self.tier.lanes.h2d.submit(lambda: copy(targets.pop(), view), fence=fence, label=self.label)

    def release(self) -> None:
        self.tier.give_back(self.buffer)


class HostHome:
    """Inputs in host memory: one buffer each, from those of earlier steps or in a slot of the plan's."""

    num_ahead = INPUTS_AHEAD[TierName.HOST]

    def __init__(self, memory: HostMemory, ended: EndedCells, *, store: TieredStore) -> None:
        self.accelerator = store.accelerator
        self.lanes = _Lanes(store.accelerator, store.failures)
        self._memory = memory
        self._ended = ended
        self._poison = store.poison
        self._free: list[torch.Tensor] = []
        self._planned: tuple[torch.Tensor, Slots] | None = None
        if memory.planned is not None:
            buffer = memory.planned.host.buffer
            self._planned = buffer, memory.planned.slots(buffer.numel())

    def send(self, source: torch.Tensor, label: str, *, call: int) -> _HostCopy:
        buffer = self._take(source.nbytes, label, call)
        view = buffer[: source.nbytes].view(source.dtype)
        copy = self.accelerator.copy
        copied = self.lanes.d2h.submit(
            lambda: copy(view, source), fence=self.accelerator.fence(), label=label
        )
        return _HostCopy(self, buffer, view, label, copied)

    def _take(self, num_bytes: int, label: str, call: int) -> torch.Tensor:
        if self._planned is None:
            return self._take_grown(num_bytes, label)
        buffer, slots = self._planned
        offset = _take_planned(slots, self._ended, TierName.HOST, num_bytes, label, call)
        return buffer[offset : offset + align_up(num_bytes)]

    def _take_grown(self, num_bytes: int, label: str) -> torch.Tensor:
        """The smallest free buffer that is large enough, or a new one in place of a free one that is not."""
        if not any(buffer.numel() >= num_bytes for buffer in self._free):
            self._ended.release(wait=True)
        fitting = [index for index, buffer in enumerate(self._free) if buffer.numel() >= num_bytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        while True:
            if self._free:
                self._memory.free(self._free.pop())
            try:
                return self._memory.allocate(num_bytes, label)
            except BudgetError:
                if not self._free:
                    raise

    def give_back(self, buffer: torch.Tensor) -> None:
        if self._poison:
            buffer.fill_(0xFF)  # NaN in bf16, fp16 and fp32
        if self._planned is None:
            self._free.append(buffer)
        else:
            whole, slots = self._planned
            slots.give(buffer.data_ptr() - whole.data_ptr(), buffer.numel())

    def reserved(self) -> dict[TierName, int]:
        return {} if self._memory.planned is not None else {TierName.HOST: self._memory.reserve.num_bytes}

    def file_engine(self) -> str | None:
        return None

    def close(self) -> None:
        self.lanes.close()
        self._free = []
        self._memory.free_all()


@dataclass(eq=False)
class _NvmeCopy:
    tier: NvmeHome
    place: Home
    label: str
    copied: LaneTicket
    written: LaneTicket

    def home(self) -> Ticket:
        return self.written

    def fetch(self, target: torch.Tensor, fence: Fence) -> LaneTicket:
        return self.tier.fetch(self, target, fence)

    def release(self) -> None:
        self.tier.give_back(self.place)


class NvmeHome:
    """Inputs on files of their own, through staging buffers in host memory."""

    num_ahead = INPUTS_AHEAD[TierName.NVME]

    def __init__(
        self,
        memory: HostMemory,
        ended: EndedCells,
        *,
        store: TieredStore,
        clock: StepClock,
        reserve: Reserve,
        paths: Sequence[Path],
        aio: AioConfig,
    ) -> None:
        self.accelerator = store.accelerator
        self.lanes = _Lanes(store.accelerator, store.failures)
        self._memory = memory
        self._ended = ended
        self._failures = store.failures
        self._clock = clock
        self._reserve = reserve
        self._open: Callable[[int], NvmeTier] = lambda num_bytes: NvmeTier(
            paths, num_bytes=num_bytes, aio=aio, timeline=store.timeline
        )
        self._has_checksums = aio.checksums
        self._tier: NvmeTier | None = None
        self._planned = memory.planned
        self._slots = memory.planned.slots(memory.planned.nvme_bytes) if memory.planned is not None else None
        self._holes = Holes()
        self._writer = Lane("activation-write", store.failures)
        # It may allocate pinned memory: with CUDA that belongs on the device of the lanes.
        self._reader = store.accelerator.lane("activation-read", store.failures)
        self._outgoing = self._staging(store)
        self._incoming = self._staging(store)
        if self._planned is not None:
            self._tier = self._open(self._planned.nvme_bytes)

    @staticmethod
    def _staging(store: TieredStore) -> BufferPool:
        """Buffers that grow to the size of what they are taken for."""
        pool = BufferPool((), failures=store.failures, poison=store.poison)
        for _ in range(NUM_INPUT_STAGING):
            pool.give_back(PooledBuffer(torch.empty(0, dtype=torch.uint8)))  # of no size yet
        return pool

    def _grown(self, pool: BufferPool, buffer: PooledBuffer, num_bytes: int, label: str) -> PooledBuffer:
        """A buffer of `pool`, now of `num_bytes` at least. Raises BudgetError."""
        buffer.last_use.wait()
        if buffer.bytes.numel() < num_bytes:
            if buffer.bytes.numel():
                if self._tier is not None:
                    self._tier.unregister(buffer.bytes)
                self._memory.free(buffer.bytes)
            if self._planned is not None:  # of one size for good: they find room whatever comes first
                num_bytes = max(num_bytes, self._planned.input_bytes)
            # A new object: the old one's views must go with its memory.
            try:
                grown = PooledBuffer(self._memory.allocate(num_bytes, f"{label}: staging"))
            except BaseException:
                pool.give_back(PooledBuffer(torch.empty(0, dtype=torch.uint8)))  # a smaller batch may fit
                raise
            if self._tier is not None:
                self._tier.register(grown.bytes, may_pin=self._memory.pin)
            return grown
        return buffer

    def send(self, source: torch.Tensor, label: str, *, call: int) -> _NvmeCopy:
        if (
            self._planned is not None
            and self._slots is not None
            and source.nbytes > self._planned.input_bytes
        ):
            raise beyond_plan(TierName.NVME, source.nbytes, label, self._slots)  # in no staging buffer either
        buffer = self._outgoing.try_take()
        if buffer is None:
            with self._clock.waiting("activation write"), self._failures.handed_over():
                buffer = self._outgoing.take()
        staging = self._grown(self._outgoing, buffer, source.nbytes, label)
        try:
            tier, extent = self._take(source.nbytes, label, call)
            place = Home(
                label=f"{label} activation",
                dtype=source.dtype,
                num_elements=source.numel(),
                backing=tier,
                place=extent,
            )
        except BaseException:
            self._outgoing.give_back(staging)
            raise
        view = staging.view(source.dtype, source.numel())
        copy, give_back = self.accelerator.copy, self._outgoing.give_back
        copied = self.lanes.d2h.submit(
            lambda: copy(view, source), fence=self.accelerator.fence(), label=label
        )

        def write() -> None:
            try:
                tier.write(place, view).wait()
            finally:
                give_back(staging)

        written = self._writer.submit(write, after=[copied], label=label)
        return _NvmeCopy(self, place, label, copied, written)

    def _take(self, num_bytes: int, label: str, call: int) -> tuple[NvmeTier, Extent]:
        size = align_up(num_bytes)
        if self._slots is None:
            offset = self._take_grown(size, label)
        else:
            offset = _take_planned(self._slots, self._ended, TierName.NVME, size, label, call)
        if self._tier is None:
            raise AssertionError(f"{label}: a range of a file that is not open")
        return self._tier, Extent(offset, size)

    def _take_grown(self, size: int, label: str) -> int:
        """A free range of the file, which grows when there is none."""
        offset = self._holes.take(size)
        if offset is None:
            self._ended.release(wait=True)
            offset = self._holes.take(size)
        if offset is None:
            offset = self._reserve.num_bytes
            self._reserve.check(size, label)
            if self._has_checksums:
                self._memory.reserve.add(checksum_bytes(size), f"{label}: checksums")
            if self._tier is None:
                self._tier = self._open(size)
                for buffer in self._memory.buffers.values():  # nothing is read yet, so none comes meanwhile
                    self._tier.register(buffer, may_pin=self._memory.pin)
            else:
                self._tier.grow(offset + size)
            self._reserve.add(size, label)
        return offset

    def fetch(self, copy: _NvmeCopy, target: torch.Tensor, fence: Fence) -> LaneTicket:
        """File -> staging -> device."""
        tier, accelerator, incoming = self._tier, self.accelerator, self._incoming
        if tier is None:
            raise AssertionError(f"{copy.label}: fetched before anything was written")
        staged: list[PooledBuffer] = []

        def read() -> None:
            view = self._take_incoming(copy, staged)
            tier.read(copy.place, view, priority=FETCH_PRIORITY).wait()

        targets = [target]  # the lane lets go of it before the ticket is done

        def copy_to_device() -> None:
            (buffer,) = staged
            try:
                accelerator.copy(targets.pop(), buffer.view(copy.place.dtype, copy.place.num_elements))
            finally:
                incoming.give_back(buffer, last_use=accelerator.launched())

        arrived = self._reader.submit(read, after=[copy.written], label=copy.label)
        return self.lanes.h2d.submit(copy_to_device, after=[arrived], fence=fence, label=copy.label)

    def _take_incoming(self, copy: _NvmeCopy, staged: list[PooledBuffer]) -> torch.Tensor:
        place = copy.place
        staged.append(self._grown(self._incoming, self._incoming.take(), place.num_bytes, copy.label))
        return staged[0].view(place.dtype, place.num_elements)

    def give_back(self, place: Home) -> None:
        extent = place.extent
        if self._tier is not None and extent is not None:
            self._tier.forget(extent)
            (self._holes if self._slots is None else self._slots).give(extent.offset, extent.num_bytes)

    def reserved(self) -> dict[TierName, int]:
        if self._planned is not None:
            return {}
        return {
            TierName.HOST: self._memory.reserve.num_bytes,
            TierName.NVME: self._reserve.num_bytes,
        }

    def file_engine(self) -> str | None:
        return None if self._tier is None else self._tier.description

    def close(self) -> None:
        self.lanes.d2h.close()
        self._writer.close()
        self._reader.close()
        self.lanes.h2d.close()
        if self._tier is not None:
            self._tier.close()
        self._memory.free_all()
