"""What happened before what: vector clocks, and accesses to memory that nothing orders.

[Note: vector clocks]
An agent is what does one thing after another: a host thread, a stream, a file transfer. Its clock says of every agent
how far that one had come when something that this one has waited for, or was told, was done. Who hands something over
(an event recorded, a latch set, a task queued) *releases* its clock, who takes it *acquires* it. An access remembers
its agent's own time; it came before another access if the other's agent has acquired that time. Two accesses to the
same bytes of which one writes and neither came before the other are a race, however the run went: no bad luck is
needed to see it. What is not seen is an order that only this run had by luck, such as that of a lock.

Clocks are never changed once made, so a finalizer, which may run in the middle of anything, can release one.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

import offloadzero

Clock = Mapping[int, int]  # by agent: its time
Place = tuple[tuple[str, int, str], ...]  # file, line, function; the innermost first

DEVICE_THREAD = "simulated device"  # it runs what streams were given, and is no agent itself
_PACKAGE = str(Path(offloadzero.__file__).parent) + "/"
_TESTS = str(Path(__file__).parents[1]) + "/"
_SIMULATION = str(Path(__file__).parent) + "/"
NUM_FRAMES = 3


class RaceError(AssertionError):
    """Accesses that nothing orders."""


class Agent:
    """Does one thing after another."""

    __slots__ = ("_has_released", "clock", "name", "number")

    def __init__(self, number: int, name: str, clock: Clock) -> None:
        self.number = number
        self.name = name
        self.clock: Clock = {**clock, number: 1}
        self._has_released = False

    def release(self) -> Clock:
        """What it has done and acquired so far; what it does from now on is later."""
        self._has_released = True
        return self.clock

    def acquire(self, clock: Clock | None) -> None:
        """What it does from now on comes after all that `clock` knows of."""
        mine = self.clock
        if clock is None or clock is mine:
            return
        for number, time in clock.items():
            if time > mine.get(number, 0):
                self.clock = joined(mine, clock)
                return

    def now(self) -> int:
        """The time of what it does now."""
        if self._has_released:
            self._has_released = False
            self.clock = {**self.clock, self.number: self.clock[self.number] + 1}
        return self.clock[self.number]


def joined(one: Clock, other: Clock) -> Clock:
    """Knows what either knows."""
    more = {number: time for number, time in other.items() if time > one.get(number, 0)}
    return {**one, **more} if more else one


class Access(NamedTuple):
    """One agent reads or writes some bytes."""

    agent: int
    time: int
    writes: bool
    by: str
    label: str
    place: Place

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        where = " < ".join(f"{file}:{line} {function}" for file, line, function in self.place)
        return f"{self.label}: {self.by} {verb} ({where or 'the test'})"


class Race(NamedTuple):
    """Two accesses to the same bytes, of which one writes, without an order."""

    first: Access
    second: Access
    memory: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes of {self.memory}:\n    {self.first}\n    {self.second}"


class _Cell:
    """What was last done to some bytes."""

    __slots__ = ("reads", "write")

    def __init__(self, write: Access | None, reads: dict[int, Access]) -> None:
        self.write = write
        self.reads = reads  # since the write, by agent


class _Region:
    """The cells of one piece of memory, by address and without gaps."""

    def __init__(self, start: int, end: int, name: str) -> None:
        self.start, self.end, self.name = start, end, name
        self._starts = [start]
        self._cells = [_Cell(None, {})]

    def enter(self, access: Access, clock: Clock, start: int, end: int) -> Iterator[tuple[Access, int]]:
        """Note an access to [start, end); gives the earlier ones that `clock` does not know of, with bytes."""
        first = self._cut(start)
        last = self._cut(end) if end < self.end else len(self._cells)
        for index in range(first, last):
            cell = self._cells[index]
            for earlier in self._conflicting(cell, access):
                if clock.get(earlier.agent, 0) < earlier.time and earlier.agent != access.agent:
                    yield earlier, self._end(index) - self._starts[index]
            if not access.writes:
                cell.reads[access.agent] = access
        if access.writes:
            self._starts[first:last] = [start]
            self._cells[first:last] = [_Cell(access, {})]

    @staticmethod
    def _conflicting(cell: _Cell, access: Access) -> Iterator[Access]:
        if cell.write is not None:
            yield cell.write
        if access.writes:
            yield from cell.reads.values()

    def _end(self, index: int) -> int:
        return self._starts[index + 1] if index + 1 < len(self._starts) else self.end

    def _cut(self, at: int) -> int:
        """The index of the cell that begins at `at`."""
        index = bisect_right(self._starts, at) - 1
        if self._starts[index] != at:
            index += 1
            cell = self._cells[index - 1]
            self._starts.insert(index, at)
            self._cells.insert(index, _Cell(cell.write, dict(cell.reads)))
        return index


class _Freed(NamedTuple):
    """Memory that went back, noted where a finalizer ran."""

    start: int
    end: int
    owner: Agent | None  # the stream that may give it to another at once; None: the memory is gone
    clock: Clock  # of what came before
    place: Place


class Holder:
    """A task that holds a reference to memory until it has run; before that the memory cannot go back."""

    __slots__ = ("_agent", "_ended_at")

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._ended_at: Clock | None = None

    def begin(self, agent: Agent | None) -> None:
        self._agent = agent

    def end(self) -> None:
        self._ended_at = None if self._agent is None else self._agent.release()

    @property
    def clock(self) -> Clock:
        """Of who has let go by now."""
        return self._ended_at or (self._agent.release() if self._agent is not None else {})


class Order:
    """All agents, and the memory they are watched in. Memory that is not tracked is nobody's concern."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # of the agents that are no host threads, and of the memory
        self.races: list[Race] = []
        self.num_accesses = 0
        self._seen: set[tuple[object, ...]] = set()
        self._numbers = itertools.count()
        self._here = threading.local()
        self._regions: list[_Region] = []  # by start
        self._starts: list[int] = []
        self._freed: deque[_Freed] = deque()
        self._transfers: list[Agent] = []
        self._threads: set[int] = set()
        self._holders: dict[int, list[Holder]] = {}  # by where the memory starts

    # --- agents ---

    def agent(self, name: str, clock: Clock | None = None) -> Agent:
        """A new one, that begins after `clock`."""
        return Agent(next(self._numbers), name, clock or {})

    def here(self) -> Agent | None:
        """The calling host thread; None of the one that plays the device."""
        try:
            return self._here.agent  # type: ignore[no-any-return]
        except AttributeError:
            thread = threading.current_thread()
            begun = getattr(thread, "begun_at", None)
            is_device = thread.name == DEVICE_THREAD
            self._here.agent = agent = None if is_device else self.agent(f"thread {thread.name}", begun)
            if agent is not None:
                self._threads.add(agent.number)
            return agent

    def release(self) -> Clock:
        """Of the calling thread."""
        agent = self.here()
        return {} if agent is None else agent.release()

    def acquire(self, clock: Clock | None) -> None:
        """By the calling thread."""
        agent = self.here()
        if agent is not None:
            agent.acquire(clock)

    def transfer(self, name: str) -> Agent:
        """An agent for a transfer that the calling thread starts; that of an earlier one which it has waited for."""
        submitter = self.release()
        with self.lock:
            for agent in self._transfers:
                if submitter.get(agent.number, 0) >= agent.clock[agent.number]:
                    agent.release()
                    agent.acquire(submitter)
                    agent.name = name
                    return agent
            agent = self.agent(name, submitter)
            self._transfers.append(agent)
            return agent

    # --- memory ---

    def track(self, start: int, num_bytes: int, name: str) -> None:
        """Watch memory from now on, as if nobody had used it."""
        if not num_bytes:
            return
        with self.lock:
            self._take_freed()
            end = start + num_bytes
            first = bisect_right(self._starts, start)
            first -= first > 0 and self._regions[first - 1].end > start
            last = bisect_left(self._starts, end)
            self._regions[first:last] = [_Region(start, end, name)]
            self._starts[first:last] = [start]

    def track_storage(self, tensor: torch.Tensor, name: str) -> None:
        """Watch a tensor's memory until it is given back, which must come after all uses."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            start = storage.data_ptr()
            self.track(start, storage.nbytes(), name)
            weakref.finalize(storage, self.free, start, storage.nbytes(), None)

    def tracks(self, address: int) -> bool:
        """Whether memory is watched there."""
        return self._region(address) is not None

    def free(self, start: int, num_bytes: int, owner: Agent | None) -> None:
        """Memory goes back, now; `owner` is the stream whose next allocation may get it.

        Who has let go of it before has done with it: what they had waited for is over.
        """
        clock = joined(self.release(), {} if owner is None else owner.clock)
        for holder in self._holders.pop(start, ()):
            clock = joined(clock, holder.clock)
        self._freed.append(_Freed(start, start + num_bytes, owner, clock, place_in_code()))

    def hold(self, holder: Holder, address: int) -> None:
        """A reference to the memory there is `holder`'s."""
        region = self._region(address)
        if region is not None:
            self._holders.setdefault(region.start, []).append(holder)

    def access(self, agent: Agent | None, start: int, num_bytes: int, *, writes: bool, label: str) -> None:
        """`agent` reads or writes bytes. What it does not come after is a race."""
        if agent is None or not num_bytes:
            return
        with self.lock:
            self._take_freed()
            region = self._region(start)
            if region is None:
                return
            self.num_accesses += 1
            access = Access(agent.number, agent.now(), writes, agent.name, label, place_in_code())
            self._enter(region, access, agent.clock, start, start + num_bytes)

    def access_tensor(self, agent: Agent | None, tensor: torch.Tensor, *, writes: bool, label: str) -> None:
        """The same of the bytes that a tensor spans."""
        if tensor.numel():
            spanned = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            self.access(agent, tensor.data_ptr(), spanned * tensor.itemsize, writes=writes, label=label)

    def _region(self, address: int) -> _Region | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or self._regions[index].end <= address:
            return None
        return self._regions[index]

    def _enter(
        self,
        region: _Region,
        access: Access,
        clock: Clock,
        start: int,
        end: int,
        *,
        spare: Collection[int] = (),
    ) -> None:
        """`spare`: agents whose earlier accesses are in order."""
        for earlier, num_bytes in region.enter(access, clock, start, min(end, region.end)):
            if earlier.agent in spare:
                continue
            key = (earlier.place, earlier.label, earlier.writes, access.place, access.label, access.writes)
            if key not in self._seen:
                self._seen.add(key)
                self.races.append(
                    Race(earlier, access, f"{region.name}+{start - region.start:#x}", num_bytes)
                )

    def _take_freed(self) -> None:
        while self._freed:
            freed = self._freed.popleft()
            region = self._region(freed.start)
            if region is None:
                continue
            owner = freed.owner or self.agent("whoever gets the memory next", freed.clock)
            if freed.owner is not None:
                owner.release()  # what uses it after this must come after this
            access = Access(owner.number, owner.now(), True, owner.name, "given back", freed.place)
            # A thread that uses memory holds a reference to it, for a transfer the file engine does: the last one
            # was dropped after that.
            spare = self._threads.union(transfer.number for transfer in self._transfers)
            self._enter(region, access, freed.clock, freed.start, freed.end, spare=spare)
            if freed.owner is None:
                index = self._regions.index(region)
                del self._regions[index], self._starts[index]

    # --- what was found ---

    def settle(self) -> None:
        """Look at what has gone back since the last access, too."""
        with self.lock:
            self._take_freed()

    def check(self, *, cause: Exception | None = None) -> None:
        """RaceError if there was one; `cause` is what it may have led to."""
        self.settle()
        with self.lock:
            races, self.races = self.races, []
        if races:
            shown = "\n".join(map(str, races[:6]))
            raise RaceError(f"{len(races)} pairs of accesses that nothing orders:\n{shown}") from cause


def place_in_code() -> Place:
    """Where the package is at now; failing that, where the test is."""
    found: list[tuple[str, int, str]] = []
    test: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < NUM_FRAMES:
        code = frame.f_code
        package, path = _shortened(code.co_filename)
        if path and (package or not test):
            (found if package else test).append((path, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found or test)


@functools.cache
def _shortened(path: str) -> tuple[bool, str]:
    """Whether a file is the package's, and its path there or among the tests; "" of all others."""
    if path.startswith(_PACKAGE):
        return True, path[len(_PACKAGE) :]
    is_test = path.startswith(_TESTS) and not path.startswith(_SIMULATION)
    return False, path[len(_TESTS) :] if is_test else ""
