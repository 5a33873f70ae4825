"""A return of freed memory to the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _find_malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim; other C libraries have none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim  # type: ignore[no-any-return]


_malloc_trim = _find_malloc_trim()


class FreedMemory:
    """Counts freed bytes and returns them to the machine now and then.

    glibc serves blocks of up to 32 MiB from its heap once one such block was freed, and keeps the holes: a model
    built and moved away weight by weight would leave its whole size behind in them.
    """

    def __init__(self, *, trim_bytes: int = 128 * 1024 * 1024) -> None:
        self._trim_bytes = trim_bytes
        self._freed_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` that were freed."""
        self._freed_bytes += num_bytes
        if self._freed_bytes >= self._trim_bytes:
            self.trim()

    def trim(self) -> None:
        """Return the memory that is free now to the machine."""
        self._freed_bytes = 0
        if _malloc_trim is not None:
            _malloc_trim(0)
