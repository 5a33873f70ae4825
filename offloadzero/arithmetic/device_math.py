"""The arithmetic of gradients and updates where the memory is: native kernels on the host, torch's on a device.

[Note: one arithmetic]
An update on a device repeats the native kernel's operations one by one (see [Note: Adam arithmetic] in
csrc/cpu_adam), so it and one on the host give the same bits as far as the chip's fp32 multiply, add, divide and square
root are correctly rounded, which CUDA's are. [Note: forms of the update] in update/adam_form.py lists its forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offloadzero.arithmetic import remainders
from offloadzero.memory import device as devices
from offloadzero.native import kernels

NORM_ELEMENTS = 1 << 20  # of a gradient on a device that are squared at once: 8 MiB of fp64
MASTER_ELEMENTS = 1 << 20  # of master weights that are joined or split at once


def sq_norm(grad: torch.Tensor, *, num_threads: int | None = None) -> float:
    """Return the sum of squares of a flat gradient; not finite if an element is not. Blocks the host on CUDA."""
    if devices.is_host_memory(grad):
        return kernels.sq_norm(grad, num_threads=num_threads)
    return sq_norms(grad, ((0, grad.numel()),))[0]


def sq_norms(
    grad: torch.Tensor,
    parts: tuple[tuple[int, int], ...],
    *,
    num_threads: int | None = None,
    scratch: torch.Tensor | None = None,
) -> Sequence[float]:
    """Return `sq_norm` of ascending parts [start, stop) of a flat gradient. Blocks the host once on CUDA.

    Args:
        scratch: uint8, of `norm_scratch_bytes(parts)` at least, for a gradient on a device; allocated if None.
    """
    if not parts:
        return ()
    if devices.is_host_memory(grad):
        return kernels.sq_norms(grad, parts, num_threads=num_threads)
    return sq_norms_in_pieces(grad, parts, scratch)


def sq_norms_in_pieces(
    grad: torch.Tensor, parts: Sequence[tuple[int, int]], scratch: torch.Tensor | None = None
) -> Sequence[float]:
    """Compute `sq_norms` piece by piece, in operations that every device has; torch would widen all of it to fp64."""
    if scratch is None:
        scratch = torch.empty(norm_scratch_bytes(parts), dtype=torch.uint8, device=grad.device)
    pieces = [(i, low, high) for i, part in enumerate(parts) for low, high in _cut(*part)]
    sums, room = scratch.view(torch.float64).tensor_split([len(pieces)])
    first, squares = 0, room[:0]
    for place, (_, low, high) in enumerate(pieces):
        if high > first + squares.numel():  # fills the room for squared pieces before it sums them
            first = low
            squares = room[: parts[-1][1] - first]
            squares.copy_(grad[first : first + squares.numel()]).square_()
        torch.sum(squares[low - first : high - first], dim=0, out=sums[place])
    found = [0.0] * len(parts)
    for (part, _, _), value in zip(pieces, sums.tolist(), strict=True):
        found[part] += value
    return found


def norm_scratch_bytes(parts: Sequence[tuple[int, int]]) -> int:
    """The bytes that `sq_norms` needs on a device: fp64 for all that is squared at once, and a sum for each piece."""
    num_pieces = sum(1 for part in parts for _ in _cut(*part))
    extent = parts[-1][1] - parts[0][0] if parts else 0
    return (num_pieces + min(extent, NORM_ELEMENTS)) * torch.float64.itemsize


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for low in range(start, max(stop, start + 1), NORM_ELEMENTS):
        yield low, min(low + NORM_ELEMENTS, stop)


def accumulate(acc: torch.Tensor, grad: torch.Tensor, *, num_threads: int | None = None) -> None:
    """Compute acc += grad, rounded to acc's dtype."""
    if devices.is_host_memory(acc):
        kernels.accumulate(acc, grad, num_threads=num_threads)
    else:
        acc.add_(grad)


def join_master(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """Return the fp32 master weights of (bf16, its remainder), (fp16, fp32) or (fp32, None): a new tensor."""
    weights = torch.empty_like(param, dtype=torch.float32)
    for part, part_param, part_master in _pieces(weights, param, master):
        remainders.join(part, part_param, part_master, spare=torch.empty_like(part))
    return weights


def split_master(weights: torch.Tensor, param: torch.Tensor, master: torch.Tensor | None) -> None:
    """Write fp32 master weights into a record's parameter and remainder (or fp32 master). NaN stays NaN."""
    for part, part_param, part_master in _pieces(weights, param, master):
        remainders.split(part.clone(), part_param, part_master, spare=torch.empty_like(part))


def _pieces(
    weights: torch.Tensor, param: torch.Tensor, master: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield views of contiguous tensors piece by piece: what an embedding needs in passing is not of its size."""
    for start in range(0, weights.numel(), MASTER_ELEMENTS):
        part = slice(start, start + MASTER_ELEMENTS)
        yield weights.view(-1)[part], param.view(-1)[part], None if master is None else master.view(-1)[part]
