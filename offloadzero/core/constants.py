"""Numbers that several rooms keep: limits that the configuration names, and the format of the compact state.

The compiled modules have constants of their own for the same; tests/native/test_native_numbers.py compares them.
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

# The compact optimizer state: [Note: compact state] in csrc/cpu_adam/cpu_adam.h says what these mean.
COMPACT_BLOCK = 128  # elements
SCALE_BYTES = 2 * 4  # of a block: a pair of fp32
COMPACT_BYTES_PER_PARAM = 5.0 + SCALE_BYTES / COMPACT_BLOCK
# Elements of an update's pieces: their scales, which are the fewest bytes of a segment, are on the grid of direct I/O.
COMPACT_CHUNK_MULTIPLE = GRID_BYTES // SCALE_BYTES * COMPACT_BLOCK

SMALLEST_SCALED = 2.0**-100  # a step size or a block's largest magnitude below it counts as 0
# Of exp_avg (M) and of the root of exp_avg_sq (S):
SPAN_M, SPAN_S = 14.75, 2.984375  # y - 1 of the largest magnitude of a block
SHIFT_M, SHIFT_S = 18, 16  # mantissa bits of y below those of its code
DITHER_STEP_M, DITHER_STEP_S = 0x9E3779B9, 0x6A09E667  # of the dither from one step to the next, modulo 2^32


def num_scales(num_elements: int) -> int:
    """The number of scales of that many parameters: a pair (exp_avg, exp_avg_sq) per block."""
    return -(-num_elements // COMPACT_BLOCK) * 2
