"""A checkpoint that is written while training goes on.

[Note: saving in the background]
Records whose states have two places need no copy in memory: their present places are pinned, as if a commit needed them
([Note: durable runs] in update/commits.py), and the next update writes the others. Updates after it write where they
read, without trials, until the checkpoint is written. What lives in one place is written before the call returns. In a
durable run the pinned places are those of its last commit, and no other is made meanwhile.

Of several ranks the first one writes, and the others follow its reads ([Note: the first rank reads, the others follow])
each on a thread of its own, in the collectives of a durable run's commits. When these go on depends on all of them:
after each step they ask each other whether the checkpoint is there.

An error is raised, on all ranks, by the next call that saves or loads, and by close(), which the end of the
process calls, too; training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from offloadzero.access.agreement import Announcements
from offloadzero.checkpoint.states import States
from offloadzero.engine.runtime import Runtime
from offloadzero.errors import RankError
from offloadzero.memory.lanes import Lane
from offloadzero.memory.tickets import FINISHED, Promise, Ticket

log = logging.getLogger("offloadzero.checkpoint")


class BackgroundSave:
    """Writes one checkpoint at a time on a thread of its own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lane: Lane | None = None
        self._written: Ticket = FINISHED
        self._error: BaseException | None = None
        runtime.on_close.append(self.finish)

    def is_running(self) -> bool:
        """Whether a checkpoint is being written, on any rank: all of them ask together."""
        if self._written is not FINISHED:
            self._runtime.announce("asks whether the checkpoint is there that is written in the background")
            if not self._runtime.group.is_on_some(not self._written.done()):
                self._written = FINISHED
        return self._written is not FINISHED

    def pin(self, states: States) -> States | None:
        """Pin what can be, in its present places, on all ranks; None: nothing can, or ranks have no commits."""
        runtime = self._runtime
        if not runtime.group.is_alone and runtime.durable is None:
            return None
        runtime.announce("saves a checkpoint in the background")
        runtime.synchronize()
        if runtime.durable is not None:
            runtime.durable.wait_complete()
        # Of a record that a step has updated on some ranks alone, whose part is not only padding, nobody's is pinned.
        on_all = runtime.group.least([record.can_be_pinned for record in states.records])
        pinned = [record.pin() for record, is_pinned in zip(states.records, on_all, strict=True) if is_pinned]
        if not pinned:
            return None
        announcements = Announcements(runtime.group.commits, pinned)
        return replace(states, records=pinned, weights=runtime.weights.pinned(announcements))

    def begin(self, finish: Callable[[], object], pinned: States) -> None:
        """Have `finish` called in the background by the first rank, and what was pinned given up."""
        if self._lane is None:
            self._lane = self._runtime.accelerator.lane("save", self._runtime.failures)

        def write() -> None:
            try:
                pinned.weights.homes.read_by_first(finish)
            except BaseException as error:
                self._error = error
                # The first rank waits for what another one has failed to read: the end of that engine tells it.
                if not self._runtime.group.is_first and not isinstance(error, RankError):
                    self._runtime.failures.record(error)
                log.error("the checkpoint that was written in the background is not there: %s", error)
            finally:
                self.release(pinned).wait()

        self._written = self._lane.submit(write, label="checkpoint")

    def release(self, pinned: States) -> Ticket:
        """Give up what was pinned, unless the last commit of a durable run needs it. The ticket says when that is."""
        if self._runtime.durable is not None:
            return FINISHED
        indices = {record.index for record in pinned.records}
        released = Promise()

        def unpin() -> None:
            for record in self._runtime.records:
                if record.index in indices:
                    record.unpin()
            released.fulfil()

        self._runtime.parts.pipeline.submit(unpin)
        return released

    def finish(self) -> None:
        """Block until the checkpoint is written. Raises what has kept it from that, once."""
        if self._written.done() and self._error is None:
            return
        with self._runtime.clock.waiting("checkpoint"), self._runtime.failures.handed_over():
            self._written.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
