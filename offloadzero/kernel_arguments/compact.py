"""The blocks of the compact optimizer state: how many elements share a pair of scales, and which."""

from __future__ import annotations

from offloadzero.limits import GRID_BYTES

COMPACT_BLOCK = 128  # elements; the constant of csrc/cpu_adam/cpu_adam.h
SCALE_BYTES = 2 * 4  # of a block: a pair of fp32
BYTES_PER_PARAM = 5.0 + SCALE_BYTES / COMPACT_BLOCK
# Elements of an update's pieces: their scales, which are the fewest bytes of a segment, are on the grid of direct I/O.
COMPACT_CHUNK_MULTIPLE = GRID_BYTES // SCALE_BYTES * COMPACT_BLOCK


def num_scales(num_elements: int) -> int:
    """The number of scales of that many parameters: a pair (exp_avg, exp_avg_sq) per block."""
    return -(-num_elements // COMPACT_BLOCK) * 2
