"""Looks at events by which the engine reads the device's clock: they say when, and order nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from offloadzero.memory.device_clock import DeviceClock


class _Reading(threading.local):
    is_inside = False


_reading = _Reading()


def reads_clock() -> bool:
    """Whether the calling thread is looking at the clock."""
    return _reading.is_inside


def watch_clock_reads(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    at_s = DeviceClock.at_s

    def reading(clock: DeviceClock, event: Any) -> float | None:
        _reading.is_inside = True
        try:
            return at_s(clock, event)
        finally:
            _reading.is_inside = False

    patch.setattr(DeviceClock, "at_s", reading)
