"""The homes of the inputs of checkpointed units between forward and backward.

[Note: how much inputs take] in offloadzero/activations/memory.py explains their memory and file.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offloadzero.activations.input_parts import InputPart, InputParts
from offloadzero.activations.memory import GrowingDeviceMemory, HostMemory, Reserve, beyond_plan
from offloadzero.config import OffloadConfig
from offloadzero.core.segments import TierName
from offloadzero.errors import BudgetError
from offloadzero.memory.arena import BufferPool, Holes, PooledBuffer, Slots, align_up
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.memory.lanes import Fence, Lane, LaneTicket
from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import Ticket
from offloadzero.memory.tiers import Extent, Home
from offloadzero.memory.transfer import Fetcher, FileWay, Sender, Sent, Staging
from offloadzero.planning.checkpointed_inputs import INPUTS_AHEAD, NUM_INPUT_STAGING


@dataclass(frozen=True, eq=False)
class InputCopy:
    """One input in its home."""

    homes: InputHomes
    home: Home
    sent: Sent
    label: str
    part: InputPart | None  # None: all of it is in the home

    @property
    def copied(self) -> LaneTicket:
        """A ticket that is done when the device's memory has been read."""
        return self.sent.copied

    def fetch(self, target: torch.Tensor, fence: Fence) -> LaneTicket:
        """Fill `target`, device, shape (n,), of the whole input, which may be written behind `fence`."""
        after = [self.sent.copied, self.sent.written]
        copy = None if self.part is None else self.part.fetch()
        return self.homes.fetcher.submit(
            self.home, target, after=after, fence=fence, label=self.label, copy=copy
        )

    def expect_fetched(self) -> None:
        """Raise StateError where the last fetch, which is over, has found that it would bring something else."""
        if self.part is not None:
            self.part.expect_fetched()

    def release(self) -> None:
        """Give the home back."""
        self.homes.space.give_back(self.home)


class InputHomes:
    """The transfers of inputs to and from one tier: [Note: one way in and out]."""

    def __init__(
        self, space: MemorySpace | FileSpace, *, sender: Sender, fetcher: Fetcher, parts: InputParts | None
    ) -> None:
        """Make the homes. `parts` divides inputs among ranks; None: this one keeps them whole."""
        self.space = space
        self.num_ahead = INPUTS_AHEAD[space.tier]  # calls whose inputs are fetched ahead
        # Whether fetches follow from the order of the calls alone, and from no time.
        self.goes_by_order = parts is not None
        self.sender = sender
        self.fetcher = fetcher
        self._parts = parts

    def send(self, source: torch.Tensor, label: str, *, call: int) -> InputCopy:
        """Start the copy of what is kept of `source`, device, shape (n,), an input of the call of this number."""
        part = None
        if self._parts is not None:
            part = self._parts.divide(source, label, is_inside=self.space.tier.is_device)
        kept, copy = source, None
        if part is not None:
            kept, copy = part.of(source), functools.partial(part.send, source)
        home, sent = self.sender.submit(
            kept,
            lambda: self.space.take(kept.dtype, kept.numel(), label, call=call),
            label=label,
            copy=copy,
        )
        if part is not None:
            part.was_submitted(source)
        return InputCopy(self, home, sent, label, part)

    def close(self) -> None:
        """Finish the transfers, stop the threads, give the memory back."""
        self.sender.close()
        self.fetcher.close()
        self.space.close()


@dataclass(frozen=True, eq=False)
class EndedCell:
    """The rest of a cell: its home, and device memory that a copy may still read or a fetch still write."""

    copy: InputCopy
    users: Ticket
    held: tuple[torch.Tensor | None, ...]


class EndedCells:
    """Cells whose graph is gone; their homes are free once their transfers are done."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._entries: deque[EndedCell] = deque()

    def note(self, entry: EndedCell) -> None:
        """Add a cell; any thread may do it, at any time."""
        self._entries.append(entry)

    def release(self, *, wait: bool = False) -> None:
        """Give back the homes that no transfer uses any more; with `wait` all of them."""
        for _ in range(len(self._entries)):
            entry = self._entries.popleft()
            if wait and not entry.users.done():
                with self._store.clock.waiting("activation copy"), self._store.failures.handed_over():
                    entry.users.wait()
            if entry.users.done():
                entry.copy.release()
            else:
                self._entries.append(entry)


def _take_planned(
    slots: Slots, ended: EndedCells, tier: TierName, num_bytes: int, label: str, call: int
) -> int:
    """Take a place in the call's slot, or in that of another; return the offset. Raises BudgetError."""
    offset = slots.take(call, num_bytes)
    if offset is None:
        ended.release(wait=True)
        offset = slots.take(call, num_bytes)
    if offset is None:
        offset = slots.take_anywhere(num_bytes)
    if offset is None:
        raise beyond_plan(tier, num_bytes, label, slots)
    return offset


class MemorySpace:
    """Inputs in memory: one buffer each, from those of earlier steps or in a slot of the plan's."""

    def __init__(
        self,
        tier: TierName,
        memory: HostMemory | GrowingDeviceMemory,
        ended: EndedCells,
        *,
        store: TieredStore,
    ) -> None:
        """Make the space. `memory` is that of `tier`."""
        self.tier = tier
        self._backing = store.tiers[tier]
        self._memory = memory
        self._ended = ended
        self._poison = store.poison
        self._free: list[torch.Tensor] = []
        self._buffers: dict[int, torch.Tensor] = {}  # the buffers of homes, by address
        self._planned: tuple[torch.Tensor, Slots] | None = None
        if memory.planned is not None:
            buffer = memory.planned.host.buffer
            self._planned = buffer, memory.planned.home_slots(buffer.numel())

    def take(self, dtype: torch.dtype, num_elements: int, label: str, *, call: int) -> Home:
        """Take a home for an input of the call of this number. Raises BudgetError."""
        num_bytes = num_elements * dtype.itemsize
        buffer = self._take(num_bytes, label, call)
        self._buffers[buffer.data_ptr()] = buffer
        place = buffer[:num_bytes].view(dtype)
        return Home(label=label, dtype=dtype, num_elements=num_elements, backing=self._backing, place=place)

    def _take(self, num_bytes: int, label: str, call: int) -> torch.Tensor:
        if self._planned is None:
            return self._take_grown(num_bytes, label)
        buffer, slots = self._planned
        offset = _take_planned(slots, self._ended, self.tier, num_bytes, label, call)
        return buffer[offset : offset + align_up(num_bytes)]

    def _take_grown(self, num_bytes: int, label: str) -> torch.Tensor:
        """Take the smallest free buffer that is large enough, or a new one in place of a free one that is not."""
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

    def give_back(self, home: Home) -> None:
        """Give a home back."""
        buffer = self._buffers.pop(home.memory.data_ptr())
        if self._poison:
            buffer.fill_(0xFF)  # NaN in bf16, fp16 and fp32
        if self._planned is None:
            self._free.append(buffer)
        else:
            whole, slots = self._planned
            slots.give(buffer.data_ptr() - whole.data_ptr(), buffer.numel())

    def reserved(self) -> dict[TierName, int]:
        """The bytes taken so far beside the plan."""
        return {} if self._memory.planned is not None else {self.tier: self._memory.taken_bytes}

    def file_engine(self) -> str | None:
        """The file engine that moves the inputs, and how, once one does."""
        return None

    def close(self) -> None:
        """Give the memory back."""
        self._free = []
        self._memory.free_all()


class FileSpace:
    """Inputs on files of their own, of the planned size or growing as the first step shows the sizes."""

    tier = TierName.NVME

    def __init__(
        self,
        memory: HostMemory,
        ended: EndedCells,
        *,
        reserve: Reserve,
        open_tier: Callable[[int], NvmeTier],
        has_checksums: bool,
    ) -> None:
        self._memory = memory
        self._ended = ended
        self._reserve = reserve
        self._open = open_tier
        self._has_checksums = has_checksums
        self.files: NvmeTier | None = None
        planned = memory.planned
        self._slots = None if planned is None else planned.home_slots(planned.nvme_bytes)
        self._holes = Holes()
        if memory.planned is not None:
            self.files = open_tier(memory.planned.nvme_bytes)

    def take(self, dtype: torch.dtype, num_elements: int, label: str, *, call: int) -> Home:
        """As in memory."""
        size = align_up(num_elements * dtype.itemsize)
        if self._slots is None:
            offset = self._take_grown(size, label)
        else:
            offset = _take_planned(self._slots, self._ended, TierName.NVME, size, label, call)
        if self.files is None:
            raise AssertionError(f"{label}: a range of a file that is not open")
        return Home(
            label=f"{label} activation",
            dtype=dtype,
            num_elements=num_elements,
            backing=self.files,
            place=Extent(offset, size),
        )

    def _take_grown(self, size: int, label: str) -> int:
        """Take a free range of the file, which grows when there is none."""
        offset = self._holes.take(size)
        if offset is None:
            self._ended.release(wait=True)
            offset = self._holes.take(size)
        if offset is None:
            offset = self._reserve.num_bytes
            self._reserve.check(size, label)
            if self._has_checksums:
                self._memory.reserve.add(checksum_bytes(size), f"{label}: checksums")
            if self.files is None:
                self.files = self._open(size)
                for buffer in self._memory.buffers.values():  # as nothing is read yet, none is added
                    self.register(buffer)
            else:
                self.files.grow(offset + size)
            self._reserve.add(size, label)
        return offset

    def give_back(self, home: Home) -> None:
        extent = home.extent
        if self.files is None or extent is None:
            raise AssertionError(f"{home.label} is on no file")
        self.files.forget(extent)
        (self._holes if self._slots is None else self._slots).give(extent.offset, extent.num_bytes)

    def expect_planned(self, num_bytes: int, label: str) -> None:
        """Raise BudgetError where an input is larger than planned: it fits in no staging buffer either."""
        planned = self._memory.planned
        if planned is not None and self._slots is not None and num_bytes > planned.kept_bytes:
            raise beyond_plan(TierName.NVME, num_bytes, label, self._slots)

    def register(self, buffer: torch.Tensor) -> None:
        """Register memory for transfers with the file engine, once there is one."""
        if self.files is not None:
            self.files.register(buffer, may_pin=self._memory.pin)

    def unregister(self, buffer: torch.Tensor) -> None:
        """Undo `register`."""
        if self.files is not None:
            self.files.unregister(buffer)

    def reserved(self) -> dict[TierName, int]:
        if self._memory.planned is not None:
            return {}
        return {
            TierName.HOST: self._memory.reserve.num_bytes,
            TierName.NVME: self._reserve.num_bytes,
        }

    def file_engine(self) -> str | None:
        return None if self.files is None else self.files.description

    def close(self) -> None:
        if self.files is not None:
            self.files.close()
        self._memory.free_all()


class InputStaging(Staging):
    """Pinned buffers for one direction that grow to the sizes they are taken for."""

    def __init__(
        self, space: FileSpace, memory: HostMemory, store: TieredStore, *, counts_waits: bool
    ) -> None:
        """Make the buffers. `counts_waits`: those for one are the training's."""
        self._space = space
        self._memory = memory
        self._store = store
        self._counts_waits = counts_waits
        super().__init__(BufferPool((), failures=store.failures, poison=store.poison))
        for _ in range(NUM_INPUT_STAGING):
            self._pool.give_back(_no_buffer())

    def take(self, num_bytes: int, label: str) -> PooledBuffer:
        self._space.expect_planned(num_bytes, label)
        buffer = self._pool.try_take()
        if buffer is None:
            buffer = self._wait_for_buffer()
        buffer.last_use.wait()
        if buffer.bytes.numel() >= num_bytes:
            return buffer
        try:
            return self._grown(buffer, num_bytes, label)
        except BaseException:
            self._pool.give_back(_no_buffer())  # a smaller batch may fit
            raise

    def _wait_for_buffer(self) -> PooledBuffer:
        if not self._counts_waits:
            return self._pool.take()
        with self._store.clock.waiting("activation write"), self._store.failures.handed_over():
            return self._pool.take()

    def _grown(self, buffer: PooledBuffer, num_bytes: int, label: str) -> PooledBuffer:
        """Make a new object, as the old one's views must go with its memory."""
        if buffer.bytes.numel():
            self._space.unregister(buffer.bytes)
            self._memory.free(buffer.bytes)
        if self._memory.planned is not None:  # all of one size: they find room in any order
            num_bytes = max(num_bytes, self._memory.planned.kept_bytes)
        grown = PooledBuffer(self._memory.allocate(num_bytes, f"{label}: staging"))
        self._space.register(grown.bytes)
        return grown


def _no_buffer() -> PooledBuffer:
    return PooledBuffer(torch.empty(0, dtype=torch.uint8, device="cpu"))  # of no size yet


def homes_in_memory(space: MemorySpace, *, store: TieredStore, parts: InputParts | None) -> InputHomes:
    """Make the homes of inputs that wait in memory."""
    d2h = store.accelerator.lane("activation-d2h", store.failures)
    h2d = store.accelerator.lane("activation-h2d", store.failures)
    return InputHomes(
        space,
        sender=Sender(store, lane=d2h, files=None),
        fetcher=Fetcher(store, lane=h2d, files=None),
        parts=parts,
    )


def homes_on_file(
    memory: HostMemory,
    ended: EndedCells,
    *,
    store: TieredStore,
    reserve: Reserve,
    config: OffloadConfig,
    parts: InputParts | None,
) -> InputHomes:
    """Make the homes of inputs that leave the device for files of their own."""
    space = FileSpace(
        memory,
        ended,
        reserve=reserve,
        open_tier=lambda size: NvmeTier(
            config.nvme_paths, num_bytes=size, aio=config.aio, timeline=store.timeline
        ),
        has_checksums=config.aio.checksums,
    )
    sender = Sender(
        store,
        lane=store.accelerator.lane("activation-d2h", store.failures),
        files=FileWay(
            Lane("activation-write", store.failures),
            InputStaging(space, memory, store, counts_waits=True),
        ),
    )
    fetcher = Fetcher(
        store,
        lane=store.accelerator.lane("activation-h2d", store.failures),
        # The call may allocate pinned memory: with CUDA that belongs on the device of the lanes.
        files=FileWay(
            store.accelerator.lane("activation-read", store.failures),
            InputStaging(space, memory, store, counts_waits=False),
        ),
    )
    return InputHomes(space, sender=sender, fetcher=fetcher, parts=parts)
