"""Numbers that the configuration names and the parts that it sets keep: each has one place, here.

The compiled modules check the same limits with constants of their own; tests/native/test_native_numbers.py compares
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Bytes: direct I/O needs addresses, lengths and offsets in multiples of the logical block, at most a page.
GRID_BYTES = 4096
# Elements of an update's pieces in the fp32 layout: every segment of a piece is on the grid, at 1 byte per element too.
CHUNK_MULTIPLE = GRID_BYTES

# Of the file engine: bytes of a block, blocks of one thread that are in the kernel at once, threads.
MAX_IO_BLOCK_BYTES = 1 << 30
MAX_IO_DEPTH = 4096
MAX_IO_THREADS = 256
MAX_AIOFILES_THREADS = 8

MAX_UPDATE_THREADS = 1024

# By the number of cores that there are at least: those that updates leave to the thread which launches on a device.
SPARED_CORES: Mapping[int, int] = MappingProxyType({4: 1, 8: 2})
