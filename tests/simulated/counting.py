"""What the package asks of a device in a step: waits of the launching thread, launches, copies, memory of torch's.

A model runs in the same thread as what moves its weights, so each launch is the package's or the script's by who asked
for it: `asked_by`. Memory is what `allocate` gives, what operations on device memory return, and what factories make
where they are given the device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from offloadzero.memory import tickets
from tests.simulated.device import SimulatedDevice
from tests.simulated.machine import Machine
from tests.simulated.memory import DeviceMemory
from tests.simulated.placing import asked_by

# A root in fp64: what is the CPU to torch needs one for correct rounding, other devices take their own in place.
ONLY_ON_THE_CPU = "arithmetic/compact_math.py sqrt_"
GIVEN_TO_THE_SCRIPT = "api/engine.py backward"  # the quotient that it returns
# One element, when the engine is built, for all units of a layout: it stands for weights that are away.
PLACEHOLDER = "streaming/leased_unit.py __init__"
# The launching thread waits for the device; asked of events, reached or not: that does not hang on who is faster.
DEVICE_WAITS = "waits for the device"
THREAD_WAITS = "waits for another thread"  # those that found it not done
LAUNCHES = "launches"
COPIES = "copies"
TEMPORARY_BYTES = "temporary bytes"  # of device memory, in no arena
WAITS = (DEVICE_WAITS, THREAD_WAITS)
COUNTED = (*WAITS, LAUNCHES, COPIES, TEMPORARY_BYTES)


@dataclass
class Counts:
    """What the package has asked for so far, and where in its code."""

    of: Counter[str] = field(default_factory=Counter)
    places: Counter[tuple[str, str]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, place: str, number: int = 1) -> None:
        with self.lock:
            self.of[what] += number
            self.places[what, place] += number

    def clear(self) -> None:
        with self.lock:
            self.of.clear()
            self.places.clear()


@contextmanager
def counting() -> Iterator[Counts]:
    """Inside, what the package asks of a simulated device is counted. To be entered before `simulated`."""
    counts = Counts()
    with pytest.MonkeyPatch.context() as patch:
        _count_waits(counts, patch)
        _count_launches(counts, patch)
        yield counts


def _count_waits(counts: Counts, patch: pytest.MonkeyPatch) -> None:
    wait_event, wait_latch = Machine.wait, tickets.Latch.wait

    def waiting(machine: Machine, event: Any) -> None:
        place = asked_by()
        if place and _is_launching():
            counts.add(DEVICE_WAITS, place)
        wait_event(machine, event)

    def waiting_for_thread(latch: Any) -> None:
        if not latch.is_set and _is_launching():
            counts.add(THREAD_WAITS, asked_by() or "?")
        wait_latch(latch)

    patch.setattr(Machine, "wait", waiting)
    patch.setattr(tickets.Latch, "wait", waiting_for_thread)


def _count_launches(counts: Counts, patch: pytest.MonkeyPatch) -> None:
    launch, copy, take = Machine.launch, SimulatedDevice.copy, DeviceMemory.take
    inside = threading.local()  # of a call that is counted as a whole

    def launching(machine: Machine, stream: Any, task: Any) -> None:
        place = None if getattr(inside, "is_inside", False) else asked_by()
        if place:
            counts.add(LAUNCHES, place)
        launch(machine, stream, task)

    def whole(call: Any, *args: Any) -> Any:
        before, inside.is_inside = getattr(inside, "is_inside", False), True
        try:
            return call(*args)
        finally:
            inside.is_inside = before

    def copying(device: SimulatedDevice, target: Any, source: Any) -> None:
        counts.add(COPIES, asked_by() or "?")
        whole(copy, device, target, source)

    def taking(memory: DeviceMemory, num_bytes: int) -> Any:
        place = asked_by()
        if place and place not in (ONLY_ON_THE_CPU, GIVEN_TO_THE_SCRIPT, PLACEHOLDER):
            counts.add(TEMPORARY_BYTES, place, num_bytes)
        return whole(take, memory, num_bytes)

    patch.setattr(Machine, "launch", launching)
    patch.setattr(SimulatedDevice, "copy", copying)
    patch.setattr(DeviceMemory, "take", taking)


def _is_launching() -> bool:
    return threading.current_thread() is threading.main_thread()
