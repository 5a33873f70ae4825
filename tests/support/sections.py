"""Sections of `offloadzero.core.interrupts` that are open when nothing should be in one."""

from __future__ import annotations

import time

from offloadzero.core.interrupts import uninterrupted

PATIENCE_S = 10.0  # a section that closes an engine waits for a file system, which takes milliseconds


def end_those_left(patience_s: float = PATIENCE_S) -> int:
    """How many sections somebody left open; they are ended, so that what comes after is not held back.

    Those of other threads end on their own: an engine that was collected is closed on a thread, in a section where its
    files are removed.
    """
    deadline_s = time.monotonic() + patience_s
    while uninterrupted.depth and time.monotonic() < deadline_s:
        time.sleep(0.001)
    left, uninterrupted.depth = uninterrupted.depth, 0
    return left
