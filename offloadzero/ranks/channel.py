"""The collectives of one thread over several processes, and how they end. No other file calls torch's.

[Note: collectives in one order]
Collectives of one process group match by their order. So each thread that issues any has a group of its own, a
`Channel`, and its collectives are a function of facts that all ranks have in common: the order of use of the units, the
order of the records, results that they have agreed on before. Their order never depends on time. But a rank whose
script takes another branch would match another unit's bytes. Therefore the order of fetches is summed up as they are
submitted, and the sums, a few bytes in host memory, are compared before the weights are gathered: a departure is an
error on all ranks before any computes with it, or, where one rank waits for collectives that the others never issue,
the error is that of the group's timeout. The values that scripts write are summed up, too, and compared there and at
each step, as each rank keeps only its part of them.

[Note: collectives that never end]
On the host a wait for a collective looks up now and then, and ends when another rank has failed. On a device nobody
waits for the collective itself: lanes wait for events behind it, and neither these nor the end of NCCL's group come
before the timeout of the group, ten minutes by default with NCCL. So an engine that has failed aborts the groups of its
device before it joins its threads. What their collectives were to write is anything then, and nobody reads it: each use
of the engine raises its failure.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offloadzero.core import interrupts
from offloadzero.core.interrupts import is_interrupt
from offloadzero.core.torch_private import abort_process_group, is_process_group
from offloadzero.errors import RankError, StateError
from offloadzero.observe.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    SCATTER,
    CollectiveCount,
    CollectiveCounter,
    tells_each,
    volume_bytes,
)
from offloadzero.observe.timeline import COLLECTIVES, OFF
from offloadzero.ranks.deadlock import WAITED_S, Watch
from offloadzero.ranks.failure_store import LOOK_UP_S, FailureStore, first_line, is_fake
from offloadzero.ranks.group import Collectives
from offloadzero.ranks.shard import ShardSpec

log = logging.getLogger("offloadzero")

ADVISED_S = 10.0  # after which a rank that waits says what may be amiss: the others may be late, too
ABORT_WITHIN_S = 30.0  # what waits for a group then goes on as before, to the group's timeout

# Between two looks of a channel before collectives. The store is one thread of one rank: if all of a thousand ranks
# asked it before each of some hundred collectives of a step, they would wait for it.
LOOK_AGAIN_S = 0.1

# Newer versions of torch have other names for these functions, and warn of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Recorder = Callable[[str, str, int], AbstractContextManager[None]]  # lane, name, bytes: Accelerator.span


class Channel(Collectives):
    """The collectives of one thread, in a process group of its own: [Note: collectives in one order].

    `Collectives` says what each does.
    """

    def __init__(
        self,
        group: Any,
        spec: ShardSpec,
        failure_store: FailureStore,
        *,
        is_on_host: bool,
        members: Sequence[int] | None = None,
    ) -> None:
        """Use `group`, in which this rank has the place that `spec` says.

        Args:
            is_on_host: tensors are in host memory, and a collective is over when its wait returns.
            members: the ranks of the group; None: all.
        """
        self._group = group
        self.spec = spec
        self.members = members = members or range(spec.world_size)
        self._who = f"rank {members[spec.rank]} of {spec.world_size}"
        if len(members) < dist.get_world_size():
            self._who = f"rank {members[spec.rank]}, with ranks {[*members]}"
        self._failure_store = failure_store
        self._place = len(failure_store.begun)
        failure_store.begun.append(0)
        self._is_on_host = is_on_host
        self.counter = CollectiveCounter()
        self.recorder: Recorder = OFF.span
        self.watch: Watch | None = None
        self._looked_s = -math.inf  # when nobody had failed
        self._tells_each = tells_each(spec.world_size) and not is_fake()
        self._is_closed = False
        self._is_in_collective = False
        self._is_aborted = False

    def all_gather(self, whole: Tensor, label: str) -> None:
        data = whole.view(torch.uint8)  # not every backend knows every dtype
        start, stop = self.spec.kept_range(data.numel())
        self._run(ALL_GATHER, label, data, lambda: _all_gather(data, data[start:stop], **self._options))

    def reduce_scatter(self, whole: Tensor, label: str) -> Tensor:
        start, stop = self.spec.kept_range(whole.numel())
        part = whole[start:stop]

        def begin() -> Any:
            # Gloo's own is an all-reduce of a copy, and its wait has no end before that: nobody could look up there.
            if self._is_on_host:
                return dist.all_reduce(whole, **self._options)
            return _reduce_scatter(part, whole, **self._options)

        self._run(REDUCE_SCATTER, label, whole, begin)
        return part

    def all_to_all(self, received: Tensor, sent: Tensor, label: str, *, advice: str = "") -> None:
        self._run(
            ALL_TO_ALL, label, sent, lambda: dist.all_to_all_single(received, sent, **self._options), advice
        )

    def all_reduce(self, values: Tensor, label: str, *, largest: bool = False, advice: str = "") -> None:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        self._run(ALL_REDUCE, label, values, lambda: dist.all_reduce(values, op=op, **self._options), advice)

    def by_rank_unless_same(self, own: Sequence[int], label: str) -> list[list[int]] | None:
        # Many ranks compare them in a few bytes, however many there are. Only where some differ do they tell which.
        if self._tells_each:
            by_rank = self.by_rank(own, label)
            return None if all(values == by_rank[0] for values in by_rank) else by_rank
        values = torch.tensor(own, dtype=torch.int64, device="cpu")
        largest = torch.stack([values, -values])
        self.all_reduce(largest, label, largest=True)
        if torch.equal(largest[0], -largest[1]):
            return None
        return self.by_rank(own, label)

    def by_rank(self, own: Sequence[int], label: str, *, advice: str = "") -> list[list[int]]:
        values, num_ranks = torch.tensor(own, dtype=torch.int64, device="cpu"), self.spec.world_size
        said = torch.zeros(num_ranks, len(own), dtype=torch.int64, device="cpu")
        said[self.spec.rank] = values
        if self._tells_each:
            sent = values.repeat(num_ranks, 1)
            self.all_to_all(said.view(torch.uint8), sent.view(torch.uint8), label, advice=advice)
        else:
            self.all_reduce(said, label, advice=advice)
        by_rank: list[list[int]] = said.tolist()
        return by_rank

    def broadcast(self, values: Tensor, label: str, *, source: int = 0) -> None:
        data = values.view(-1).view(torch.uint8)
        if data.numel():
            self._run(BROADCAST, label, data, lambda: dist.broadcast(data, group_src=source, **self._options))

    def scatter(self, part: Tensor, whole: Tensor, label: str, *, source: int = 0) -> None:
        """Fill `part` with this rank's part of `whole` on the rank at place `source`: uint8, shapes (n,), (n N,)."""
        parts = list(whole.chunk(self.spec.world_size)) if self.spec.rank == source else None
        self._run(SCATTER, label, whole, lambda: dist.scatter(part, parts, group_src=source, **self._options))

    def begin_submitted(self) -> None:
        if self.watch is not None:
            self.watch.begin()

    def report(self, error: BaseException) -> None:
        """Tell the ranks that wait in a collective of this store that this rank has failed."""
        self._failure_store.report(error)

    def close(self) -> None:
        """Give the group's threads and connections back, after its last collective. A second call does nothing.

        A group that waits in a collective stays: to end it may wait for that for ever.
        """
        self._is_closed = True
        if self._group is None or self._is_in_collective:
            return
        group, self._group = self._group, None  # its threads end with the last reference
        if is_process_group(group) and not self._is_aborted:  # else it ended with torch's default group
            dist.destroy_process_group(group)

    def begin_abort(self) -> Any:
        """Close the channel, and return its group for `abort_groups`; None where the host waits, which looks up."""
        if self._is_on_host or self._is_closed:
            return None
        self._is_closed = self._is_aborted = True
        return self._group if is_process_group(self._group) else None

    @property
    def _options(self) -> dict[str, Any]:
        return {"group": self._group, "async_op": True}

    def _run(self, kind: str, label: str, data: Tensor, start: Callable[[], Any], advice: str = "") -> None:
        """Issue the collective that `start` begins over `data`, and wait for it, or for the end of a rank before it."""
        if self._is_closed:
            raise StateError(f"{label}: the {kind}: the engine of this model is closed")
        what = f"{label}: the {kind} ({self._who})"
        self._look_before(what)
        try:
            self._is_in_collective = True
            watch = None if self.watch is None or kind in (BROADCAST, SCATTER) else self.watch
            if watch is not None and watch.counts_collectives:
                watch.begin()
            volume = volume_bytes({kind: CollectiveCount(1, data.nbytes)})
            with self.recorder(COLLECTIVES, label, volume):
                self._failure_store.begun[self._place] += 1
                work = start()
                if work is None:
                    raise AssertionError("the process is in no process group")
                self.counter.add(kind, data.nbytes)
                if self._is_on_host:
                    self._wait(work, what, watch, advice)
                else:
                    work.wait()  # makes the stream wait, not the host
            self._is_in_collective = False
        except RankError:
            raise
        except StateError as error:  # a deadlock
            self._failure_store.report(error)
            raise
        except BaseException as error:
            if is_interrupt(error):  # the collective is abandoned, and all others of the group
                self._failure_store.report(StateError(f"{type(error).__name__} in {what}"))
                raise
            if not isinstance(error, RuntimeError):
                raise
            text = self._said_within(LOOK_UP_S * 4)
            because = f": {text}" if text is not None else ""
            told = f". {advice}" if advice and text is None else ""
            raise RankError(f"{what} has failed{because} ({first_line(error)}){told}") from error

    def _look_before(self, what: str) -> None:
        """Look for failed ranks, now and then; a wait looks each time, and so does what follows this rank's own end."""
        now_s = time.monotonic()
        if self._failure_store.has_ended or now_s - self._looked_s >= LOOK_AGAIN_S:
            self._look(what, self._failure_store.begun[self._place] + 1)
            self._looked_s = now_s

    def _look(self, what: str, number: int) -> None:
        """Look for ranks that have failed, or have closed without the collective of that number."""
        self._failure_store.look(what, self.members, (self._place, number))

    def _wait(self, work: Any, what: str, watch: Watch | None, advice: str) -> None:
        look_up = timedelta(seconds=LOOK_UP_S)
        first_s = time.monotonic()
        while True:
            begun_s = time.monotonic()
            try:
                interrupts.wait(work.wait, look_up)
                return
            except RuntimeError:
                # Work that has failed need not be complete: only the time tells its errors from the end of a wait.
                if time.monotonic() - begun_s < LOOK_UP_S / 2:
                    raise
                if work.is_completed():  # since then, perhaps: the error is that of the wait, or its own
                    work.wait()
                    return
            self._look(what, self._failure_store.begun[self._place])
            waited_s = time.monotonic() - first_s
            if watch is not None and waited_s > WAITED_S:
                watch.look(what)
            if advice and waited_s > ADVISED_S:
                log.warning("%s: has waited for %.0f s. %s", what, waited_s, advice)
                advice = ""

    def _said_within(self, wait_s: float) -> str | None:
        """Return the text of a failed rank, which may come a little later than its end."""
        until_s = time.monotonic() + wait_s
        while (text := self._failure_store.text(self.members)) is None and time.monotonic() < until_s:
            time.sleep(LOOK_UP_S / 10)
        return text


def abort_groups(groups: Mapping[str, Any]) -> None:
    """Abort groups, which have names for a warning, while other threads may use them: their calls are errors then.

    All at once: the end of one of NCCL's groups may wait for the device, where the collective of another one waits.
    """
    threads = []
    for name, group in groups.items():
        thread = threading.Thread(target=functools.partial(_abort, name, group), daemon=True)
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # Python 3.12 starts none when it ends: one after the other is more than nothing
            _abort(name, group)
    until_s = time.monotonic() + ABORT_WITHIN_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


def _abort(name: str, group: Any) -> None:
    try:
        abort_process_group(group)
    except Exception as error:  # the engine has failed already, and raises that
        log.warning("the collectives of %s could not be aborted: %s", name, error)
