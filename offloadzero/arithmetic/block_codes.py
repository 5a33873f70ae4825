"""Values as small integers with one scale per block, in torch operations on any device.

[Note: block codes]
Flat values are cut into blocks. A block has a scale, its largest magnitude divided by (a bit more than) the
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
INT4_BLOCK = 64
INT4_SCALE_DTYPE = torch.bfloat16
INT4_LARGEST = 7
PIECE_ELEMENTS = 1 << 20  # values that are worked on at once
_SMALLEST_SCALE = 2.0**-126  # the smallest normal number: division by it is exact enough
_ABOVE_ONE = 1 + 2.0**-22  # so that the largest code times its scale is no larger than the largest number
_ABOVE_BF16 = 1 + 2.0**-7  # the same for a scale that is rounded to bf16


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
        work = scratch[: stop - start]
        work.copy_(values[start:stop])
        of_piece, blocks = scales[start // INT8_BLOCK : stop // INT8_BLOCK], work.view(-1, INT8_BLOCK)
        _divided(blocks, _scales_of(blocks, of_piece, INT8_LARGEST))
        codes[start:stop].copy_(work)


def decode_int8(codes: Tensor, scales: Tensor, values: Tensor, *, scratch: Tensor) -> None:
    """Write what codes and scales stand for into `values`, shapes and dtypes as for `encode_int8`.

    `codes` may be the last n bytes of the memory of `values`: those of a piece are read before they are overwritten.
    """
    for start, stop in _pieces(codes.numel(), INT8_BLOCK, scratch):
        work = scratch[: stop - start]
        work.copy_(codes[start:stop])
        work.view(-1, INT8_BLOCK).mul_(scales[start // INT8_BLOCK : stop // INT8_BLOCK, None])
        values[start:stop].copy_(work)


def encode_int4(values: Tensor, codes: Tensor, scales: Tensor, *, scratch: Tensor) -> None:
    """Write `values` as codes of four bits, two in a byte, and bf16 scales: [Note: block codes].

    A byte has a value of the first half of its block in the low bits and one of the second half in the high ones.

    Args:
        values: floating point, shape (rows, n), n a multiple of INT4_BLOCK.
        codes: uint8, shape (rows, n / 2).
        scales: bf16, shape (rows, n / INT4_BLOCK).
        scratch: fp32, 1.125 * rows * n elements at least; it is overwritten.
    """
    num_elements = values.numel()
    work = scratch[:num_elements].view(*scales.shape, INT4_BLOCK)
    work.view(values.shape).copy_(values)
    exact = scratch[num_elements : num_elements + scales.numel()].view(scales.shape)
    scales.copy_(_scales_of(work, exact, INT4_LARGEST).mul_(_ABOVE_BF16))
    halves = _divided(work, exact.copy_(scales)).add_(INT4_LARGEST + 1)
    halves = halves.view(*scales.shape, 2, INT4_BLOCK // 2)
    low, high = halves.unbind(-2)
    low.add_(high.mul_(16))
    codes.view(*scales.shape, INT4_BLOCK // 2).copy_(low)


def add_decoded_int4(codes: Tensor, scales: Tensor, total: Tensor, *, scratch: Tensor) -> None:
    """Add what codes and scales of `encode_int4` stand for to `total`, fp32, shape (rows, n).

    `scratch`: fp32, 1.125 * rows * n elements at least.
    """
    num_elements = total.numel()
    packed = codes.view(*scales.shape, INT4_BLOCK // 2)
    work = scratch[:num_elements].view(*scales.shape, INT4_BLOCK)
    low, high = work.view(*scales.shape, 2, INT4_BLOCK // 2).unbind(-2)
    halves = scratch[num_elements : num_elements + num_elements // 8].view(torch.uint8).view(packed.shape)
    low.copy_(torch.bitwise_and(packed, 15, out=halves))
    high.copy_(torch.bitwise_right_shift(packed, 4, out=halves))
    work.sub_(INT4_LARGEST + 1).mul_(scales[..., None])
    total.add_(work.view(total.shape))


def _pieces(num_elements: int, block: int, scratch: Tensor) -> Iterator[tuple[int, int]]:
    num_blocks(num_elements, block)
    size = num_blocks(scratch.numel() // block * block, block) * block
    if not size:
        raise AssertionError(f"{scratch.numel()} elements of scratch are less than a block of {block}")
    for start in range(0, num_elements, size):
        yield start, min(start + size, num_elements)


def _scales_of(blocks: Tensor, scales: Tensor, largest: int) -> Tensor:
    """Set `scales`, fp32, to those of `blocks`, fp32, whose last dimension is a block; return them."""
    torch.linalg.vector_norm(blocks, ord=math.inf, dim=-1, out=scales)
    return scales.div_(largest * _ABOVE_ONE).clamp_(min=_SMALLEST_SCALE)


def _divided(blocks: Tensor, scales: Tensor) -> Tensor:
    """Turn `blocks` into whole multiples of their scales; return them."""
    return blocks.div_(scales[..., None]).round_().nan_to_num_(0.0)  # NaN only where the scale is not finite
