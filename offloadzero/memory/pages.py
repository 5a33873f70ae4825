"""Pages of host memory: taken from the system, filled with memory before they are locked, and given back when freed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tool that measures drives loads no torch
    import torch


_MADV_POPULATE_WRITE = 23  # Python's mmap module lacks it
_libc = ctypes.CDLL(None)  # its calls release the GIL
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_pages(num_bytes: int) -> mmap.mmap:
    """Map `num_bytes` > 0 that read as zero, as huge pages where possible; a page has memory once it is touched."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def populate(buffer: torch.Tensor, *, num_threads: int) -> None:
    """Give the pages of host memory that begins on a page their memory, by several threads; its content stays.

    Locking memory does this otherwise, on the calling thread alone. Linux before 5.14 lacks the call: nothing is done.
    """
    if not buffer.numel():
        return
    pages = -(-buffer.numel() // mmap.PAGESIZE)
    share = -(-pages // num_threads) * mmap.PAGESIZE
    starts = range(0, buffer.numel(), share)

    def touch(start: int) -> None:
        _libc.madvise(buffer.data_ptr() + start, min(share, buffer.numel() - start), _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(len(starts)) as pool:
        list(pool.map(touch, starts))


def _find_malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim; other C libraries have none."""
    trim = getattr(_libc, "malloc_trim", None)
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
