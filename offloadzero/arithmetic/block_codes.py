"""Values as small integers with one scale per block, in torch operations on any device.

[Note: block codes]
Flat values are cut into blocks. A block has an fp32 scale, its largest magnitude divided by (a bit more than) the
largest code, and each value becomes the nearest multiple of the scale: symmetric around zero, so zeros stay zeros, and
the error of a value is at most half a scale (beside the rounding of the result to its dtype). A block with a value
which is not finite has a scale which is not, and decodes to NaN or infinities: an overflow stays visible.

All work is done piece by piece in memory of the caller's, so the device needs no byte beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

INT8_BLOCK = 2048  # values that share a scale; a rank's part of a unit is a multiple of it
INT8_LARGEST = 127
PIECE_ELEMENTS = 1 << 20  # values that are worked on at once
_SMALLEST_SCALE = 2.0**-126  # the smallest normal number: division by it is exact enough
_ABOVE_ONE = 1 + 2.0**-22  # so that the largest code times its scale is no larger than the largest number


def num_blocks(num_elements: int, block: int) -> int:
    """Return the number of scales of so many values, which must be whole blocks."""
    blocks, rest = divmod(num_elements, block)
    if rest:
        raise AssertionError(f"{num_elements} elements are no whole number of blocks of {block}")
    return blocks


def piece_elements(num_elements: int) -> int:
    """Return the elements of the fp32 memory in which so many values are worked on."""
    return min(num_elements, PIECE_ELEMENTS)


def encode_int8(values: Tensor, codes: Tensor, scales: Tensor, *, scratch: Tensor) -> None:
    """Write `values` as int8 codes and fp32 scales: [Note: block codes].

    Args:
        values: floating point, shape (n,), n a multiple of INT8_BLOCK.
        codes: int8, shape (n,).
        scales: fp32, shape (n / INT8_BLOCK,).
        scratch: fp32, at least a block; it is overwritten.
    """
    for start, stop in _pieces(values.numel(), INT8_BLOCK, scratch):
        of_piece = scales[start // INT8_BLOCK : stop // INT8_BLOCK]
        codes[start:stop].copy_(_rounded(values[start:stop], of_piece, INT8_LARGEST, scratch))


def decode_int8(codes: Tensor, scales: Tensor, values: Tensor, *, scratch: Tensor) -> None:
    """Write what codes and scales stand for into `values`, shapes and dtypes as for `encode_int8`.

    `codes` may be the last n bytes of the memory of `values`: those of a piece are read before they are overwritten.
    """
    for start, stop in _pieces(codes.numel(), INT8_BLOCK, scratch):
        work = scratch[: stop - start]
        work.copy_(codes[start:stop])
        work.view(-1, INT8_BLOCK).mul_(scales[start // INT8_BLOCK : stop // INT8_BLOCK, None])
        values[start:stop].copy_(work)


def _pieces(num_elements: int, block: int, scratch: Tensor) -> Iterator[tuple[int, int]]:
    num_blocks(num_elements, block)
    size = num_blocks(scratch.numel() // block * block, block) * block
    if not size:
        raise AssertionError(f"{scratch.numel()} elements of scratch are less than a block of {block}")
    for start in range(0, num_elements, size):
        yield start, min(start + size, num_elements)


def _rounded(values: Tensor, scales: Tensor, largest: int, scratch: Tensor) -> Tensor:
    """Set the `scales` of `values` and return these in multiples of them, as whole numbers in `scratch`."""
    work = scratch[: values.numel()]
    work.copy_(values)
    blocks = work.view(scales.numel(), -1)
    torch.linalg.vector_norm(blocks, ord=math.inf, dim=1, out=scales)
    scales.div_(largest * _ABOVE_ONE).clamp_(min=_SMALLEST_SCALE)
    blocks.div_(scales[:, None])
    return work.round_().nan_to_num_(0.0)  # NaN only where the scale is not finite
