"""Numbers that ranks compare in the place of something longer."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


class OrderSum:
    """A number that is the same for two orders of collectives only if they are the same orders."""

    MODULUS = (1 << 61) - 1

    def __init__(self) -> None:
        self.value = 0
        self.number = 0

    def note(self, index: int) -> None:
        """Count a collective over the record of that number, or a write with that digest, as the next one."""
        self.number += 1
        self.value = (self.value * 1_000_003 + index + 1) % self.MODULUS


def digest(text: str) -> int:
    """A number of 56 bits that ranks compare in the place of `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def machine() -> str:
    """A text that processes have in common which share a machine's memory and cores, also in other containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
