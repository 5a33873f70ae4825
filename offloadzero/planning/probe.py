"""What the machine has (floor 4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def cores_beside_launching(usable: Sequence[int]) -> tuple[int, ...]:
    """The CPUs for updates beside a device that runs what it is launched: not the first, of eight not the first two.

    A device waits whenever the thread that launches does; updates on all cores would push it aside for milliseconds.
    Of three and fewer none can be spared: empty, which is any.
    """
    spared = 0 if len(usable) < 4 else 1 if len(usable) < 8 else 2
    return tuple(usable[spared:]) if spared else ()


def available_host_bytes() -> int:
    """Memory that can be taken now without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")
