"""Pages of host memory: taken from the system, and given their memory before they are locked (floor 3)."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

import torch

_MADV_POPULATE_WRITE = 23  # not in Python's mmap
_libc = ctypes.CDLL(None)  # its calls let go of the GIL
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_pages(num_bytes: int) -> mmap.mmap:
    """`num_bytes` > 0 that read as zero, huge pages where the system has them; none has memory until it is touched."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def populate(buffer: torch.Tensor, *, num_threads: int) -> None:
    """Give host memory that begins on a page its pages, by several threads; what is in it stays.

    To lock memory does it otherwise, on the calling thread alone. Linux before 5.14 cannot: nothing happens then.
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
