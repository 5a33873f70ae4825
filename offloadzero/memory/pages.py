"""Pages of host memory: taken from the system, and filled with memory before they are locked."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
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
