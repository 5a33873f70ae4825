"""Models for `zero.Init`, what their parameters hold, and the master weights of an engine."""

from __future__ import annotations

import torch

import offloadzero
from offloadzero import zero
from offloadzero.core.torch_private import DisableTorchFunctionSubclass, get_data
from tests.support.tiny import TinyModel


def build(seed: int = 1) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(width=80)


def stored_bytes(param: torch.Tensor) -> int:
    """Bytes of memory that a parameter holds itself."""
    with DisableTorchFunctionSubclass():
        return get_data(param).untyped_storage().nbytes()


def masters(engine: offloadzero.Engine) -> dict[str, torch.Tensor]:
    return {name: zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


def reference_split(weights: torch.Tensor) -> torch.Tensor:
    """bf16 of fp32, to nearest with ties away from zero, by integers: DESIGN, 16-bit remainder."""
    return (((weights.view(torch.int32) + 0x8000) >> 16) << 16).view(torch.float32).bfloat16()
