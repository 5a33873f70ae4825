"""The arithmetic of gradients and updates where the memory is: native kernels on the host, others on a device (4).

[Note: one arithmetic]
An update on a device repeats the native kernel's operations one by one (see [Note: Adam arithmetic] in
csrc/cpu_adam), so it and one on the host give the same bits as far as the chip's fp32 multiply, add, divide and square
root are correctly rounded, which CUDA's are. Its forms: [Note: forms of the update] in optim/device_adam.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offloadzero.memory import device as devices
from offloadzero.native import compact, cpu_adam
from offloadzero.native.cpu_adam import AdamHyper, adam_scalars
from offloadzero.optim import compact_math
from offloadzero.optim.device_adam import AdamForm, device_form, scratch_bytes, triton_step
from offloadzero.optim.torch_adam import torch_step

_NORM_ELEMENTS = 1 << 20  # of a gradient on a device at once: 8 MiB of fp64


def sq_norm(grad: torch.Tensor, *, num_threads: int | None = None) -> float:
    """Sum of squares of a flat gradient; not finite if an element is not. Blocks the host on CUDA."""
    if devices.is_host_memory(grad):
        return cpu_adam.sq_norm(grad, num_threads=num_threads)
    return float(_sum_of_squares(grad))


def sq_norms(
    grad: torch.Tensor, parts: tuple[tuple[int, int], ...], *, num_threads: int | None = None
) -> Sequence[float]:
    """`sq_norm` of parts [start, stop) of a flat gradient. Blocks the host once on CUDA."""
    if not parts:
        return ()
    if devices.is_host_memory(grad):
        return cpu_adam.sq_norms(grad, parts, num_threads=num_threads)
    values: list[float] = torch.stack([_sum_of_squares(grad[start:stop]) for start, stop in parts]).tolist()
    return values


def _sum_of_squares(grad: torch.Tensor) -> torch.Tensor:
    """In fp64, piece by piece: on a device with little room a whole one would take four times the gradient."""
    return torch.stack([part.double().square_().sum() for part in grad.split(_NORM_ELEMENTS)]).sum()


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
    form: AdamForm | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """One Adam step in place on flat tensors of one device; see `native.cpu_adam.adam_step`.

    With `scales` the state is compact: see `native.compact.compact_adam_step`.

    Args:
        form: None is that of the tensors' device: [Note: forms of the update].
        scratch: uint8, for the form in torch operations; allocated if None.
    """
    if form is None:
        form = AdamForm.NATIVE if devices.is_host_memory(param) else device_form(param.device)
    if scales is not None and master is None:
        raise AssertionError("a compact state without remainder")
    if form is AdamForm.NATIVE:
        _native_step(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            hyper=hyper,
            step=step,
            grad_scale=grad_scale,
            master=master,
            scales=scales,
            num_threads=num_threads,
        )
        return
    scalars = adam_scalars(hyper, step=step, grad_scale=grad_scale)
    if form is AdamForm.TRITON:
        triton_step(
            param, grad, exp_avg, exp_avg_sq, scalars=scalars, step=step, master=master, scales=scales
        )
        return
    if scratch is None:
        num_bytes = scratch_bytes(form, param.numel(), is_compact=scales is not None)
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=param.device)
    torch_step(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        scalars=scalars,
        step=step,
        master=master,
        scales=scales,
        scratch=scratch,
    )


def _native_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    hyper: AdamHyper,
    step: int,
    grad_scale: float,
    master: torch.Tensor | None,
    scales: torch.Tensor | None,
    num_threads: int | None,
) -> None:
    if scales is None or master is None:
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
    else:
        compact.compact_adam_step(
            param,
            grad,
            master,
            exp_avg,
            exp_avg_sq,
            scales,
            hyper=hyper,
            step=step,
            grad_scale=grad_scale,
            num_threads=num_threads,
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
