"""The blocks of the compact optimizer state: how many elements share a pair of scales, and which."""

from __future__ import annotations

COMPACT_BLOCK = 128  # elements; the constant of csrc/cpu_adam/cpu_adam.h
BYTES_PER_PARAM = 5.0 + 2 * 4 / COMPACT_BLOCK


def num_scales(num_elements: int) -> int:
    """The number of scales of that many parameters: a pair (exp_avg, exp_avg_sq) per block."""
    return -(-num_elements // COMPACT_BLOCK) * 2
