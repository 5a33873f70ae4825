"""The place where the ranks of one model tell each other of their ends: in the store of torch's process group.

[Note: errors of other ranks]
When a rank's engine fails it leaves the text in the store of torch's process group. A rank that waits for a collective
looks there now and then, so it stops with that text, long before the group's timeout. A rank that is gone closes its
connections, which ends the collectives of the others. Process groups are made by all ranks together, in a wait that
does not look into the store. So before that each rank notes in the store that it has come so far; one that cannot start
notes the reason.

An engine that is closed where nothing has failed ends that of the ranks that train the same part of the model, but
other parts may be at the work of their last step still, which needs no rank of it. So a rank leaves that text under its
own name: it stops the collectives that the rank would take part in, and no others. Nor those in which it has done its
part before it closed: a rank may be through with a collective while others still pass on what they have from it. So
with the text it says how many it has begun in each channel.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist

from offloadzero.core.torch_private import default_process_group_store
from offloadzero.errors import RankError

log = logging.getLogger("offloadzero")

LOOK_UP_S = 0.5  # between two looks of a wait at the store

_NCCL_REASON = "Last error:"  # the line before the one that says what is wrong, two ranks on one GPU say

_numbers = itertools.count()  # numbers of the models of this process, which all ranks make in one order


class FailureStore:
    """The place where the first rank that fails leaves its text for the others: [Note: errors of other ranks]."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # In a fake group nobody reads it, and its own store can do nothing.
        self._store = dist.HashStore() if is_fake() else default_process_group_store()  # type: ignore[attr-defined]
        self._key = f"offloadzero/{next(_numbers)}/error"
        self._lock = threading.Lock()
        self.has_ended = False  # the engine of this rank
        self.begun: list[int] = []  # collectives of this rank, by channel: all ranks make these in one order
        FailureStore.latest = weakref.ref(self)

    latest: ClassVar[Callable[[], FailureStore | None]] = lambda: None

    def join(self, world_size: int, timeout: timedelta, *, what: str) -> None:
        """Return when all ranks have called this. Raises RankError where one cannot start, or does not come.

        Also where ranks start different things, of which `what` is this rank's.
        """
        self._expect_same(what)
        what = f"the start of {what} (rank {self._rank} of {world_size})"
        here = [f"{self._key}/{rank} is here" for rank in range(world_size)]
        all_here = f"{self._key}/all are here"
        until_s = time.monotonic() + timeout.total_seconds()
        with named(what), self._lock:
            self._store.set(here[self._rank], "1")
            # The last one says so: were each to wait for the keys of all, the store would look for them N x N times.
            if self._store.add(f"{self._key}/number here", 1) == world_size:
                self._store.set(all_here, "1")
        while True:
            self.look(what)
            begun_s = time.monotonic()
            try:
                self._store.wait([all_here], timedelta(seconds=LOOK_UP_S))
                return
            except RuntimeError as error:  # torch has a timeout of its own only in newer versions
                # It has not waited its time: the rank that holds the store is gone.
                if time.monotonic() - begun_s < LOOK_UP_S / 2:
                    raise RankError(f"{what} has failed ({first_line(error)})") from error
                if time.monotonic() > until_s:
                    with named(what):
                        late = [rank for rank, key in enumerate(here) if not self._store.check([key])]
                    raise RankError(f"{what}: ranks {late} did not take part in time") from error

    def _expect_same(self, what: str) -> None:
        """Raise RankError unless the first rank that has come starts the same: they would make different groups."""
        name = f"the start of {what} (rank {self._rank})"
        with named(name), self._lock:
            first = bytes(self._store.compare_set(f"{self._key}/what", "", what)).decode()
        if first != what:
            raise RankError(f"{name}: another rank is at the start of {first}: all ranks must start the same")

    def report(self, error: BaseException, *, has_failed: bool = True) -> None:
        """Tell the others, unless one of them was first. Without `has_failed`, those that wait for this rank alone."""
        self.has_ended = True
        text = f"rank {self._rank}: {type(error).__name__}: {error}"
        key = self._key
        if not has_failed:
            key, text = (
                self._key_of_end(self._rank),
                f"{json.dumps(self.begun, separators=(',', ':'))} {text}",
            )
        try:
            with self._lock:
                self._store.compare_set(key, "", text)
                self._store.set(self._key_of_any, "1")  # last: who sees it finds the text
        except RuntimeError as unreachable:  # the rank that holds the store is gone, which the others notice
            log.warning("the other ranks could not be told of the failure: %s", unreachable)

    def _key_of_end(self, rank: int) -> str:
        return f"{self._key}/{rank} has ended"

    @property
    def _key_of_any(self) -> str:
        """The key of the note that some key has a text: while nobody has ended a look asks for one key alone."""
        return f"{self._key}/any"

    def look(self, what: str, members: Iterable[int] = (), collective: tuple[int, int] | None = None) -> None:
        """Raise RankError where the engine of some rank has failed, or that of one of `members` is closed.

        `collective`: a channel's place in `begun` and a number there: a closed one that has begun so many is no error.
        """
        text = self.text(members, collective)
        if text is not None:
            raise RankError(f"{what} is given up: {text}")
        if self.has_ended:
            raise RankError(f"{what} is given up: the engine of rank {self._rank} has failed")

    def text(self, members: Iterable[int] = (), collective: tuple[int, int] | None = None) -> str | None:
        """The text of the first rank that has failed, or else of the first of `members` that has ended before."""
        try:
            with self._lock:
                if not self._store.check([self._key_of_any]):
                    return None
                if (failed := self._read(self._key)) is not None:
                    return failed
                for ended in filter(None, (self._read(self._key_of_end(member)) for member in members)):
                    begun, _, text = ended.partition(" ")
                    if collective is None or json.loads(begun)[collective[0]] < collective[1]:
                        return text
        except RuntimeError:  # the rank that holds the store is gone: the collective itself raises
            pass
        return None

    def put(self, name: str, text: str) -> None:
        """Leave a text for the others under a name, in the place of one that is there."""
        # RuntimeError: the rank that holds the store is gone, and the collective itself raises.
        with suppress(RuntimeError), self._lock:
            self._store.set(f"{self._key}/{name}", text)

    def get(self, name: str) -> str | None:
        """The text that some rank has left under a name; None where nobody has."""
        with suppress(RuntimeError), self._lock:
            return self._read(f"{self._key}/{name}")
        return None

    def _read(self, key: str) -> str | None:
        return bytes(self._store.get(key)).decode(errors="replace") if self._store.check([key]) else None


@contextmanager
def named(what: str) -> Iterator[None]:
    """Raise RankError in the place of what torch raises where a rank or the store is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{what} has failed ({first_line(error)})") from error


def is_fake() -> bool:
    """Whether the default process group is torch's fake one: only this rank is there, and collectives do nothing.

    Engines can be built in it, which shows what a rank of so many keeps; they do not train.
    """
    return bool(dist.get_backend() == "fake")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none; of NCCL's also the reason, which comes last."""
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    if _NCCL_REASON in more[:-1]:
        return f"{first}: {more[more.index(_NCCL_REASON) + 1].strip()}"
    return first
