"""A model with frozen weights of 4-bit codes, as libraries for quantised weights make them, and adapters that train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 16  # codes that share a scale
VOCABULARY = 64


class Scales:
    """What a module needs to read codes; it moves as a tensor does. `second`: that of the scales themselves."""

    def __init__(self, scales: Tensor, table: Tensor, second: Scales | None = None) -> None:
        self.scales = scales
        self.table = table
        self.second = second

    def to(self, device: Any) -> None:
        self.scales, self.table = self.scales.to(device), self.table.to(device)


class Codes(nn.Parameter):
    """Codes in pairs, (elements / 2, 1) bytes, in the memory of any dtype; `scales` decodes them."""

    scales: Scales

    def __new__(cls, data: Tensor, scales: Scales) -> Codes:
        made: Codes = torch.Tensor._make_subclass(cls, data, False)
        made.scales = scales
        return made

    def __init__(self, data: Tensor, scales: Scales) -> None:
        pass

    def to(self, *args: Any, **kwargs: Any) -> Codes:
        """Make another parameter, over whatever memory this one has."""
        return Codes(super().to(*args, **kwargs), self.scales)


def encode(weight: Tensor, storage: torch.dtype) -> Codes:
    """Quantise a matrix whose elements are whole blocks."""
    blocks = weight.detach().reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1) / 7
    codes = ((blocks / scales[:, None]).round() + 8).to(torch.uint8).reshape(-1, 2)
    packed = (codes[:, 0] << 4 | codes[:, 1]).contiguous()
    table = torch.arange(-8.0, 8.0)
    doubled = Scales(scales.new_ones(1), table.clone())
    return Codes(packed.view(storage).view(-1, 1), Scales(scales, table, doubled))


def decode(codes: Tensor, scales: Scales, shape: torch.Size) -> Tensor:
    """The matrix, in fp32."""
    packed = codes.reshape(-1).view(torch.uint8)
    pairs = torch.stack([packed >> 4, packed & 15], dim=1).long()
    values = scales.table[pairs].view(-1, BLOCK) * scales.scales[:, None]
    return values.view(shape)


class Product(torch.autograd.Function):
    """`x @ weight.t()`. Its context holds the codes past autograd, as bitsandbytes' does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Scales, shape: torch.Size) -> Tensor:
        ctx.codes, ctx.scales, ctx.shape = codes.view(-1, 1), scales, shape
        return x @ decode(codes, scales, shape).to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad @ decode(ctx.codes, ctx.scales, ctx.shape).to(grad.dtype), None, None, None


class CodedLinear(nn.Module):
    def __init__(self, width: int, storage: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        self.shape = weight.shape
        self.weight = encode(weight, storage)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self.weight.scales, self.shape)  # type: ignore[no-any-return, no-untyped-call]


class CodedBlock(nn.Module):
    def __init__(self, width: int, storage: torch.dtype) -> None:
        super().__init__()
        self.base = CodedLinear(width, storage)
        self.a = nn.Linear(width, 4, bias=False)
        self.b = nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


class CodedModel(nn.Module):
    """`forward(tokens)` gives the loss; all but the adapters is frozen."""

    def __init__(self, storage: torch.dtype = torch.uint8, *, width: int = 32, num_blocks: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(CodedBlock(width, storage) for _ in range(num_blocks))
        self.emb.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.emb(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = hidden @ self.emb.weight.t()
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def codes(self) -> list[Codes]:
        return [block.base.weight for block in self.blocks]


def bytes_of(param: Tensor) -> Tensor:
    """The parameter's bytes, wherever they are."""
    return param.detach().clone().reshape(-1).view(torch.uint8)
