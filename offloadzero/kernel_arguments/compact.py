"""The numbers of the compact optimizer state: [Note: compact state] in csrc/cpu_adam/cpu_adam.h says what they mean."""

from __future__ import annotations

from offloadzero.core.limits import GRID_BYTES

COMPACT_BLOCK = 128  # elements; the constant of csrc/cpu_adam/cpu_adam.h
SCALE_BYTES = 2 * 4  # of a block: a pair of fp32
BYTES_PER_PARAM = 5.0 + SCALE_BYTES / COMPACT_BLOCK
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
