"""Compact states and gradients for tests of their kernels, of magnitudes that differ by orders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.native import kernels
from tests.native.kernel_states import place


@dataclass
class Record:
    param: Tensor
    remainder: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    scales: Tensor

    @staticmethod
    def empty(n: int) -> Record:
        dtypes = (torch.bfloat16, torch.int8, torch.int8, torch.uint8)
        return Record(*(torch.zeros(n, dtype=d) for d in dtypes), torch.zeros(num_scales(n)))

    @staticmethod
    def of(master: Tensor, m: Tensor, v: Tensor, **kwargs: object) -> Record:
        record = Record.empty(master.numel())
        kernels.compact_encode(master, m, v, *record.tensors(), **kwargs)
        return record

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.param, self.remainder, self.exp_avg, self.exp_avg_sq, self.scales

    def copy(self, *, offset: int = 0) -> Record:
        return Record(*(place(t, offset) for t in self.tensors()))

    def piece(self, start: int, stop: int) -> Record:
        scales = self.scales[num_scales(start) : num_scales(stop)]
        return Record(*(t[start:stop] for t in self.tensors()[:4]), scales)

    def step(self, grad: Tensor, **kwargs: object) -> None:
        kernels.compact_adam_step(self.param, grad, *self.tensors()[1:], **kwargs)

    def decode(self, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
        out = tuple(torch.empty(self.param.numel()) for _ in range(3))
        kernels.compact_decode(*self.tensors(), *out, **kwargs)
        return out

    def weights(self) -> np.ndarray:
        return self.decode()[0].numpy()

    def assert_same_bits(self, other: Record) -> None:
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def make_state(n: int, *, seed: int = 0, specials: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Master, exp_avg and exp_avg_sq; magnitudes differ by orders within and between blocks."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(3 * torch.randn(n, generator=generator))
    master = torch.randn(n, generator=generator) * 0.05
    m = torch.randn(n, generator=generator) * 1e-4 * spread
    v = torch.rand(n, generator=generator) * 1e-6 * spread * spread
    if specials and n > 1000:
        master[:7] = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 1.0, -2.0, 3e38])
        m[: 3 * COMPACT_BLOCK] = 0.0
        v[: 2 * COMPACT_BLOCK] = 0.0
        m[COMPACT_BLOCK : 2 * COMPACT_BLOCK] = 1e-42
        m[500:505] = torch.tensor([0.0, -0.0, 1e-42, -1e10, 1e-20])
        v[700:704] = torch.tensor([0.0, 1e-45, 1e-40, 1e20])
    return master, m, v


def make_grad(n: int, dtype: torch.dtype, *, seed: int = 100, specials: bool = True) -> Tensor:
    grad = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e-3
    if specials and n > 1000:
        values = [0.0, -0.0, 1e-7, 1e-40, -1e-45, 1e4, -1e18, 1e-25, 1e30]
        grad[900 : 900 + len(values)] = torch.tensor(values)
    return grad.clamp(-65504, 65504).to(dtype) if dtype == torch.float16 else grad.to(dtype)
