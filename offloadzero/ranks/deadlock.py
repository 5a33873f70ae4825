"""Ranks that wait for each other in different channels.

[Note: deadlocks]
The script of a rank issues collectives in several channels, one after the other: it reads, saves and says that it
loads over `states`, and ends a backward over `control`. It submits fetches, gradients and steps, which other threads
compare, reduce and decide over `orders`, `gradients` and `decisions`. Where one rank alone reads a weight and the
others begin a forward, each waits in a channel in which nothing is wrong, until the timeout of the groups, half an hour
by default (ten minutes with NCCL). But until its n-th collective of `states`, say, is over a script begins none of
`control`, and submits nothing. So a rank that has waited for a while leaves in the store of the process group how far
it has come. Another one that waits elsewhere, for what that rank had not begun, and has not come to what that rank
waits for, knows that neither will end.

What is in the store may be old, and is true nevertheless: the n-th collective cannot be over before all ranks have
begun it, this one among them. Only collectives that end with all ranks count, so no broadcast does. In a backward a
rank leaves nothing: what its hooks read comes in the order of its own graph.

A rank that decides over a step says so as well, though its script may go on: all scripts begin a backward, submit its
gradients and take a step in one order. So where a rank waits in the end of a backward, or for a gradient, and has not
come to a step that another one has taken before those, they do not take equally many micro batches. Fetches tell
nothing here: whether they are submitted before or after a step need not be the same on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offloadzero.core.torch_private import NO_GRAPH_TASK, current_graph_task_id
from offloadzero.errors import StateError
from offloadzero.ranks.failure_store import FailureStore
from offloadzero.ranks.group import OrderSum

WAITED_S = 2.0  # after which a rank says that it waits

_OF_SCRIPT = ("states", "control")
_STEPS = "decisions"
_BESIDE_STEPS = ("control", "gradients")  # backwards, which come before or after a step on all ranks alike


class DeadlockDetector:
    """Finds that ranks wait for each other: [Note: deadlocks]."""

    def __init__(
        self, failure_store: FailureStore, submitted: Mapping[str, OrderSum], *, rank: int, group: int
    ) -> None:
        """Watch the channels of this rank.

        Args:
            submitted: what the script submits, by the channel in which another thread does it.
            group: the first rank of those that train the same part of the model.
        """
        self._failure_store = failure_store
        self._submitted = submitted
        self._rank = rank
        self._group = group
        # Collectives of the script that end with all ranks, and what was submitted and has begun; each is counted by
        # the one thread that issues the collectives of its channel.
        self._begun = dict.fromkeys((*_OF_SCRIPT, *submitted), 0)

    def begin(self, channel: str) -> None:
        """Count one, which begins now."""
        self._begun[channel] += 1

    def look(self, channel: str, what: str) -> None:
        """Say that this rank waits in the latest collective. Raises StateError where it will not end."""
        number = self._begun[channel]
        if channel == _STEPS or (channel in _OF_SCRIPT and current_graph_task_id() == NO_GRAPH_TASK):
            before = {**self._begun, **{name: each.number for name, each in self._submitted.items()}}
            own = {"rank": self._rank, "what": what, "number": number, "before": before}
            self._failure_store.put(self._key(channel), json.dumps(own))
        others = (*_OF_SCRIPT, _STEPS) if channel in _BESIDE_STEPS else _OF_SCRIPT
        for other in others:
            text = None if other == channel else self._failure_store.get(self._key(other))
            said: Any = None if text is None else json.loads(text)
            if (
                said is not None
                and self._come_to(other) < said["number"]
                and said["before"][channel] < number
            ):
                act = "take equally many micro batches" if other == _STEPS else "save and load together"
                raise StateError(
                    f"rank {self._rank} waits in {what}, and rank {said['rank']} waits in {said['what']}, which rank "
                    f"{self._rank} has not called: both would wait forever. All ranks must run the same forwards, "
                    f"evaluations too, read the same weights, states and gradients in the same order, and {act}"
                )

    def _come_to(self, channel: str) -> int:
        """The last number of this rank's script in a channel: another thread may begin later what it submits."""
        submitted = self._submitted.get(channel)
        return self._begun[channel] if submitted is None else submitted.number

    def _key(self, channel: str) -> str:
        return f"waits in {channel} of {self._group}"


@dataclass(frozen=True)
class Watch:
    """The collectives of one channel."""

    detector: DeadlockDetector
    channel: str
    counts_collectives: bool = True  # else the thread that does it counts what was submitted

    def begin(self) -> None:
        """Count one, which begins now."""
        self.detector.begin(self.channel)

    def look(self, what: str) -> None:
        """Say that this rank waits in it. Raises StateError where it will not end."""
        self.detector.look(self.channel, what)
