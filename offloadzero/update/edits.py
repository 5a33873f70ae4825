"""Writes of scripts to a record's states, and reads of them ahead of an update."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from offloadzero.memory.tickets import AllOf, Ticket


class Edits:
    """Keeps these writes and reads apart: [Note: reading ahead] in offloadzero/update/staging.py."""

    def __init__(self) -> None:
        self.num_begun = 0  # writes other than updates
        self._lock = threading.Lock()
        self._num_running = 0
        self._reads: list[Ticket] = []  # reads ahead that may not be complete

    def begin(self) -> Ticket:
        """Announce a write; return the ticket of the reads that it must wait for."""
        with self._lock:
            self.num_begun += 1
            self._num_running += 1
            return AllOf(self._reads)

    def end(self) -> None:
        """End an announced write, which is home or is not to be."""
        with self._lock:
            self._num_running -= 1

    @contextmanager
    def reading(self) -> Iterator[list[Ticket] | None]:
        """A block that gets the list for tickets of reads ahead; None while the record is written."""
        with self._lock:
            if self._num_running:
                yield None
                return
            self._reads = [read for read in self._reads if not read.done()]
            yield self._reads
