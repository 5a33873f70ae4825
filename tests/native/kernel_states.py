"""States and gradients for tests of the optimizer kernels, with special values among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from offloadzero.native import kernels
from offloadzero.native.hyper import AdamHyper
from offloadzero.native.kernels import Isa

ISAS = [isa for isa in Isa if kernels.isa_supported(isa)]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "bf16_split": (torch.bfloat16, torch.int16),
    "fp32": (torch.float32, None),
    "fp16_master": (torch.float16, torch.float32),
    "bf16_master": (torch.bfloat16, torch.float32),
}
ADAMW = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
L2 = replace(ADAMW, decoupled=False)
SIZES = [1, 15, 16, 17, 511, 4097, 1_000_003]


def to_bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def place(values: Tensor, offset: int) -> Tensor:
    """A copy that starts `offset` elements into its buffer: aligned to an element and no more."""
    buffer = torch.empty(values.numel() + offset, dtype=values.dtype)
    buffer[offset:] = values
    return buffer[offset:]


@dataclass
class State:
    """A parameter, what completes its master weight, and the moments that its optimizer keeps."""

    param: Tensor
    master: Tensor | None
    moments: tuple[Tensor, ...]

    @property
    def exp_avg(self) -> Tensor:
        return self.moments[0]

    @property
    def exp_avg_sq(self) -> Tensor:
        return self.moments[1]

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.param, self.master, *self.moments) if t is not None]

    def _each(self, change: Callable[[Tensor], Tensor]) -> State:
        master = None if self.master is None else change(self.master)
        return State(change(self.param), master, tuple(map(change, self.moments)))

    def copy(self, *, offset: int = 0) -> State:
        return self._each(lambda tensor: place(tensor, offset))

    def piece(self, begin: int, end: int) -> State:
        return self._each(lambda tensor: tensor[begin:end])

    def weights(self) -> np.ndarray:
        """The fp32 master weights, put together with numpy integers."""
        if self.master is None:
            return self.param.numpy().copy()
        if self.master.dtype == torch.float32:
            return self.master.numpy().copy()
        hi = self.param.view(torch.int16).numpy().astype(np.int64)
        bits = (hi * 65536 + self.master.numpy().astype(np.int64)) % 2**32
        return bits.astype(np.uint32).view(np.float32)

    def step(self, grad: Tensor, **kwargs: object) -> None:
        """One step of Adam."""
        kernels.adam_step(self.param, grad, *self.moments, master=self.master, **kwargs)

    def assert_same_bits(self, other: State) -> None:
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            assert torch.equal(to_bits(mine), to_bits(theirs))


def with_specials(values: Tensor, specials: list[float], seed: int) -> Tensor:
    if values.numel() < 15:
        return values
    places = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(seed))
    for value, at in zip(specials, places.tolist(), strict=False):
        values[at] = value
    return values


def make_state(layout: str, n: int, *, seed: int = 0, scale: float = 0.05, specials: bool = True) -> State:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(n, generator=generator) * scale
    exp_avg = torch.randn(n, generator=generator) * 1e-3
    exp_avg_sq = torch.rand(n, generator=generator) * 1e-6
    if specials:
        with_specials(weights, [0.0, -0.0, 1e-40, -1e-45, 3e-39, 60000.0, -1e-20], seed)
        with_specials(exp_avg, [0.0, -0.0, 1e-42, -3e-39, 1e10], seed + 1)
        with_specials(exp_avg_sq, [0.0, 1e-45, 1e-40, 1e20], seed + 2)
    param_dtype, master_dtype = LAYOUTS[layout]
    if master_dtype == torch.int16:
        bits = weights.numpy().view(np.uint32).astype(np.uint64)
        hi = ((bits + 0x8000) >> 16).astype(np.uint16).view(np.int16)
        lo = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
        param, master = torch.from_numpy(hi.copy()).view(torch.bfloat16), torch.from_numpy(lo.copy())
        return State(param, master, (exp_avg, exp_avg_sq))
    master = None if master_dtype is None else weights.clone()
    return State(weights.to(param_dtype), master, (exp_avg, exp_avg_sq))


def make_grad(n: int, dtype: torch.dtype, *, seed: int = 100, specials: bool = True) -> Tensor:
    grad = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e-2
    if specials:
        with_specials(grad, [0.0, -0.0, 1e-7, 6e-8, 1e-40, -1e-45, 65504.0, -1e18, 1e-25, 3e38], seed)
    return grad.clamp(-65504, 65504).to(dtype) if dtype == torch.float16 else grad.to(dtype)
