"""The arithmetic of gradients and updates where the memory is: native kernels on the host, torch on CUDA (4).

[Note: one arithmetic]
The CUDA form repeats the native kernel's operations one by one (see [Note: Adam arithmetic] in
csrc/cpu_adam): separate torch operations, each rounded to fp32, none of them a fused multiply-add, so an update
on the device and one on the host give the same bits as far as the chip's fp32 multiply, add, divide and square
root are correctly rounded, which CUDA's are. The compact layout's form is in optim/compact_math.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offloadzero.memory import device as devices
from offloadzero.native import compact, cpu_adam
from offloadzero.native.cpu_adam import AdamHyper, adam_scalars
from offloadzero.optim import compact_math


def sq_norm(grad: torch.Tensor, *, num_threads: int | None = None) -> float:
    """Sum of squares of a flat gradient; not finite if an element is not. Blocks the host on CUDA."""
    if devices.is_host_memory(grad):
        return cpu_adam.sq_norm(grad, num_threads=num_threads)
    return float(grad.double().square_().sum())


def sq_norms(
    grad: torch.Tensor, parts: Sequence[tuple[int, int]], *, num_threads: int | None = None
) -> list[float]:
    """`sq_norm` of parts [start, stop) of a flat gradient. Blocks the host once on CUDA."""
    if not parts:
        return []
    if devices.is_host_memory(grad):
        return [cpu_adam.sq_norm(grad[start:stop], num_threads=num_threads) for start, stop in parts]
    sums = [grad[start:stop].double().square_().sum() for start, stop in parts]
    values: list[float] = torch.stack(sums).tolist()
    return values


def accumulate(acc: torch.Tensor, grad: torch.Tensor, *, num_threads: int | None = None) -> None:
    """acc += grad, rounded to acc's dtype."""
    if devices.is_host_memory(acc):
        cpu_adam.accumulate(acc, grad, num_threads=num_threads)
    else:
        acc.add_(grad)


def adam_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    hyper: AdamHyper,
    step: int,
    grad_scale: float,
    master: torch.Tensor | None,
    scales: torch.Tensor | None = None,
    num_threads: int | None = None,
) -> None:
    """One Adam step in place on flat tensors of one device; see `native.cpu_adam.adam_step`.

    With `scales` the state is compact: see `native.compact.compact_adam_step`.
    """
    on_host = devices.is_host_memory(param)
    if scales is not None:
        if master is None:
            raise AssertionError("a compact state without remainder")
        record = (param, grad, master, exp_avg, exp_avg_sq, scales)
        if on_host:
            compact.compact_adam_step(
                *record, hyper=hyper, step=step, grad_scale=grad_scale, num_threads=num_threads
            )
        else:
            compact_math.torch_compact_adam_step(*record, hyper=hyper, step=step, grad_scale=grad_scale)
        return
    if on_host:
        cpu_adam.adam_step(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            hyper=hyper,
            step=step,
            grad_scale=grad_scale,
            master=master,
            num_threads=num_threads,
        )
        return
    torch_adam_step(
        param, grad, exp_avg, exp_avg_sq, hyper=hyper, step=step, grad_scale=grad_scale, master=master
    )


def join_master(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """The fp32 master weights of (bf16, int16 or int8 remainder), (fp16, fp32) or (fp32, None): a new tensor."""
    if master is None:
        return param.clone()
    if master.dtype == torch.int8:
        return compact_math.join(param, master)
    if master.dtype == torch.float32:
        return master.clone()
    high = param.view(torch.int16).to(torch.int32) << 16
    return (high + master.to(torch.int32)).view(torch.float32)


def split_master(weights: torch.Tensor, param: torch.Tensor, master: torch.Tensor | None) -> None:
    """Write fp32 master weights into a record's parameter and remainder (or fp32 master)."""
    if master is None:
        param.copy_(weights)
    elif master.dtype == torch.float32:
        master.copy_(weights)
        param.copy_(weights)
    elif master.dtype == torch.int8:
        compact_math.split(weights, param, master)
    else:
        bits = weights.view(torch.int32)
        param.view(torch.int16).copy_((bits + 0x8000) >> 16)
        master.copy_(bits)  # keeps the low 16 bits


def torch_adam_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    hyper: AdamHyper,
    step: int,
    grad_scale: float,
    master: torch.Tensor | None,
) -> None:
    """The kernel's arithmetic in torch operations (any device): [Note: one arithmetic]."""
    scalars = adam_scalars(hyper, step=step, grad_scale=grad_scale)
    weights = join_master(param, master)
    g = grad.float() * scalars.grad_scale
    if hyper.weight_decay and not hyper.decoupled:
        g = g + weights * scalars.weight_decay
    if hyper.decoupled:
        weights = weights * scalars.decay
    exp_avg.copy_(exp_avg * scalars.beta1 + g * scalars.one_minus_beta1)
    exp_avg_sq.copy_(exp_avg_sq * scalars.beta2 + (g * scalars.one_minus_beta2) * g)
    denominator = compact_math.sqrt(exp_avg_sq) * scalars.inv_sqrt_bias_correction2 + scalars.eps
    weights = weights - (exp_avg * scalars.step_size) / denominator
    split_master(weights, param, master)
