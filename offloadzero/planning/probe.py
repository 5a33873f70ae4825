"""What the machine has (floor 4)."""

from __future__ import annotations

from pathlib import Path


def available_host_bytes() -> int:
    """Memory that can be taken now without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")
