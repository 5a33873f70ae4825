"""A model whose projections are quantised as its config.json says, for `offloadzero plan`.

Of bitsandbytes' 4 bits the bytes are known (bitsandbytes/functional.py, quantize_4bit): two weights in a byte; for each
64 weights a scale in fp32, or in 8 bits with a second scale in fp32 for each 256 of these; and a table for each code.
The time of decoding is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from offloadzero.errors import ConfigError

CODES_BLOCK = 64  # weights that share a scale
SCALES_BLOCK = 256  # scales that share one
_CODES, _SCALE_CODES = 16, 256  # entries of the tables


class _Codes(nn.Parameter):
    """Codes of a matrix, with the tensors that decode them as attributes."""

    quant_state: SimpleNamespace  # as that of bitsandbytes it has the shape of the weights
    table: Tensor
    scales: Tensor
    second_table: Tensor
    second_scales: Tensor
    offset: Tensor

    @staticmethod
    def of(shape: torch.Size, *, doubled: bool) -> _Codes:
        """Make those of weights of that shape; `doubled`: the scales are codes as well."""
        num_elements = shape.numel()
        codes = _Codes(torch.empty(-(-num_elements // 2), 1, dtype=torch.uint8), requires_grad=False)
        num_scales = -(-num_elements // CODES_BLOCK)
        codes.quant_state = SimpleNamespace(shape=shape)
        codes.table = torch.empty(_CODES)
        codes.scales = torch.empty(num_scales, dtype=torch.uint8 if doubled else torch.float32)
        if doubled:
            codes.second_table = torch.empty(_SCALE_CODES)
            codes.second_scales = torch.empty(-(-num_scales // SCALES_BLOCK))
            codes.offset = torch.empty(())
        return codes


class _Product(torch.autograd.Function):
    """The operations of a product whose weight is decoded for forward and again for backward, and not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return x @ x.new_zeros(shape).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ grad.new_zeros(ctx.shape), None


class FourBitLinear(nn.Linear):
    """A projection of 4-bit codes."""

    def __init__(self, base: nn.Linear, *, doubled: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self.weight = _Codes.of(base.weight.shape, doubled=doubled)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply as the projection does, without its numbers."""
        product: Tensor = _Product.apply(x, (self.out_features, self.in_features))  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


def quantize(model: nn.Module, settings: Mapping[str, Any], head: Any) -> nn.Module:
    """Give the projections of a model the form that a config.json's `quantization_config` says, and freeze it.

    Those that it names stay as they are; where it names none, the head.
    Raises ConfigError for another form than 4 bits of bitsandbytes.
    """
    method = settings.get("quant_method")
    if method != "bitsandbytes" or not settings.get("load_in_4bit"):
        name = "8 bits of bitsandbytes" if method == "bitsandbytes" else method
        raise ConfigError(
            "quantization_config",
            name,
            "4 bits of bitsandbytes (load_in_4bit), or none: of others neither the bytes are known, nor do they stream",
        )
    kept: Collection[str] | None = settings.get("llm_int8_skip_modules")
    doubled = bool(settings.get("bnb_4bit_use_double_quant"))
    for parent_name, parent in [*model.named_modules()]:
        for name, child in [*parent.named_children()]:
            path = f"{parent_name}.{name}".strip(".")
            is_kept = child is head if kept is None else _is_named(path, kept)
            if type(child) is nn.Linear and not is_kept:
                setattr(parent, name, FourBitLinear(child, doubled=doubled))
    return model.requires_grad_(False)


def _is_named(path: str, names: Collection[str]) -> bool:
    """Whether a module is among those that transformers leaves as they are: by the begin of its name, or the end."""
    return any(path.endswith(name) or f"{path}.".startswith(f"{name}.") for name in names)
