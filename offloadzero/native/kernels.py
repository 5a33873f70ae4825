"""The optimizer kernels as typed calls on checked tensors, and the choice of their instruction set.

All tensors are contiguous CPU tensors of the same number of elements, at any address that their element size
allows; their shape does not matter. A tensor that does not fit raises ConfigError (a ValueError) naming the
argument. Every call releases the GIL, may be made from several threads at once, and gives the same bits for
every instruction set and number of threads: see [Note: Adam arithmetic] in csrc/cpu_adam/cpu_adam.h.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection
from enum import Enum

import torch
from torch import Tensor

from offloadzero.core.limits import MAX_UPDATE_THREADS
from offloadzero.errors import ConfigError
from offloadzero.kernel_arguments.adam import AdamHyper, adam_scalars
from offloadzero.kernel_arguments.tensors import address, describe, float_code, layout_code, typed_address
from offloadzero.native import _kernels

ISA_ENV = "OFFLOADZERO_ISA"


class Isa(str, Enum):
    """The instruction set of the kernels: plain C++ for any CPU, AVX2 with FMA and F16C, AVX-512 F, BW, VL and DQ."""

    SCALAR = "scalar"
    AVX2 = "avx2"
    AVX512 = "avx512"


# The values of the enums in csrc/cpu_adam/cpu_adam.h.
_ISA_CODE = {Isa.SCALAR: 0, Isa.AVX2: 1, Isa.AVX512: 2}


def isa_supported(isa: Isa) -> bool:
    """Whether this CPU, its operating system and this build have the instruction set."""
    return _kernels.isa_supported(_ISA_CODE[isa])


@functools.cache
def active_isa() -> Isa:
    """Return the instruction set in use: the widest there is, or the one OFFLOADZERO_ISA names on first use.

    Raises ConfigError if OFFLOADZERO_ISA names one that does not exist or that this CPU lacks.
    """
    forced = os.environ.get(ISA_ENV)
    if forced:
        names = [isa.value for isa in Isa]
        if forced not in names:
            raise ConfigError(ISA_ENV, forced, "allowed " + ", ".join(names), known_keys=[ISA_ENV])
        isa = Isa(forced)
        if not isa_supported(isa):
            raise ConfigError(
                ISA_ENV, forced, "this CPU or this build does not have it", known_keys=[ISA_ENV]
            )
        return isa
    return next(isa for isa in (Isa.AVX512, Isa.AVX2, Isa.SCALAR) if isa_supported(isa))


# The threads of calls that name no number, the calling one among them: one for each CPU this process may run on.
DEFAULT_NUM_THREADS = min(len(os.sched_getaffinity(0)), MAX_UPDATE_THREADS)


def set_cores(cores: Collection[int]) -> None:
    """Keep the kernels' threads, which all calls of this process share, and the calling thread on these CPUs.

    Raises ConfigError for CPUs that this process may not run on.
    """
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing or not cores:
        allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(
            "cores", list(cores), f"allowed: some of the CPUs this thread may run on, {allowed}"
        )
    mask = sum(1 << core for core in set(cores))
    _kernels.set_cores(mask.to_bytes(max(cores) // 8 + 1, "little"))
    os.sched_setaffinity(0, cores)


def check_num_threads(num_threads: int | None) -> int:
    """Return the number, or the default for None; raises ConfigError for one that is not allowed."""
    if num_threads is None:
        return DEFAULT_NUM_THREADS
    if not 1 <= num_threads <= MAX_UPDATE_THREADS:
        raise ConfigError("num_threads", num_threads, f"allowed 1 to {MAX_UPDATE_THREADS}")
    return num_threads


def isa_code(isa: Isa | None) -> int:
    """Return the kernels' number of an instruction set; None is the active one."""
    return _ISA_CODE[active_isa() if isa is None else isa]


class GradCheck(str, Enum):
    """The treatment of gradients that are not finite.

    OFF: nothing. REPORT: the step returns the gradient's squared norm, computed in the same pass over memory
    (NaN or Inf exactly when an element is); the step is done whatever it is. REFUSE: the norm is computed first,
    in a pass of its own over the gradient, and a step with a gradient that is not finite changes nothing.
    """

    OFF = "off"
    REPORT = "report"
    REFUSE = "refuse"


def checked_step(
    step: Callable[[bool], float | None],
    grad: Tensor,
    *,
    grad_check: GradCheck,
    num_threads: int | None,
    isa: Isa | None,
) -> float | None:
    """Run `step(with_sq_norm)` as `grad_check` says; return None, or the squared norm of the unscaled gradient."""
    if grad_check is not GradCheck.REFUSE:
        return step(grad_check is GradCheck.REPORT)
    squared = sq_norm(grad, num_threads=num_threads, isa=isa)
    if math.isfinite(squared):
        step(False)
    return squared


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    hyper: AdamHyper,
    step: int,
    grad_scale: float = 1.0,
    master: Tensor | None = None,
    grad_check: GradCheck = GradCheck.OFF,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> float | None:
    """One Adam or AdamW step in place, in one pass over memory.

    `param` and `master` are one of: bf16 with its remainder ([Note: bf16 split] in csrc/cpu_adam/remainders.h), bf16 or
    fp16 with an fp32 master (the parameter is the master rounded to nearest even), fp32 with None. `grad`
    is bf16, fp16 or fp32 and is multiplied by `grad_scale` first (1 / loss scale, times the clipping factor);
    `exp_avg` and `exp_avg_sq` are fp32. `step` counts from 1. The buffers must not overlap.
    Returns None, or with `grad_check` the squared norm of the gradient before `grad_scale`, as `sq_norm` does.
    """
    num_elements = param.numel()
    arguments = (
        layout_code(param, master),
        float_code("grad", grad),
        address("param", param, num_elements),
        0 if master is None else address("master", master, num_elements),
        typed_address("exp_avg", exp_avg, num_elements, torch.float32),
        typed_address("exp_avg_sq", exp_avg_sq, num_elements, torch.float32),
        address("grad", grad, num_elements),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
        adam_scalars(hyper, step=step, grad_scale=grad_scale),
    )
    return checked_step(
        lambda with_sq_norm: _kernels.adam_step(*arguments, with_sq_norm),
        grad,
        grad_check=grad_check,
        num_threads=num_threads,
        isa=isa,
    )


def sq_norm(grad: Tensor, *, num_threads: int | None = None, isa: Isa | None = None) -> float:
    """Return the sum of squares of a bf16, fp16 or fp32 tensor, in double and in a fixed order of additions.

    It is finite exactly when every element is: the squares of finite elements cannot overflow a double's sum.
    """
    num_elements = grad.numel()
    return _kernels.sq_norm(
        float_code("grad", grad),
        address("grad", grad, num_elements),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def sq_norms(
    grad: Tensor,
    parts: tuple[tuple[int, int], ...],
    *,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> tuple[float, ...]:
    """Return `sq_norm` of each of the parts [start, stop) of a tensor, in one call that takes the GIL once."""
    num_elements = grad.numel()
    return _kernels.sq_norms(
        float_code("grad", grad),
        address("grad", grad, num_elements),
        num_elements,
        parts,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def accumulate(acc: Tensor, grad: Tensor, *, num_threads: int | None = None, isa: Isa | None = None) -> None:
    """Compute acc = round(float(acc) + float(grad)), to nearest even; each of the two is bf16, fp16 or fp32."""
    num_elements = acc.numel()
    _kernels.accumulate(
        float_code("acc", acc),
        float_code("grad", grad),
        address("acc", acc, num_elements),
        address("grad", grad, num_elements),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def split_master(
    master_fp32: Tensor,
    param_bf16: Tensor,
    remainder_i16: Tensor,
    *,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Write fp32 weights as bf16 parameter and int16 remainder: [Note: bf16 split] in csrc/cpu_adam/remainders.h."""
    num_elements = master_fp32.numel()
    _kernels.split_master(
        typed_address("master_fp32", master_fp32, num_elements, torch.float32),
        typed_address("param_bf16", param_bf16, num_elements, torch.bfloat16),
        typed_address("remainder_i16", remainder_i16, num_elements, torch.int16),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def join_master(
    param_bf16: Tensor,
    remainder_i16: Tensor,
    out_fp32: Tensor,
    *,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Write the fp32 weights that a bf16 parameter and its int16 remainder stand for; exact."""
    num_elements = param_bf16.numel()
    _kernels.join_master(
        typed_address("param_bf16", param_bf16, num_elements, torch.bfloat16),
        typed_address("remainder_i16", remainder_i16, num_elements, torch.int16),
        typed_address("out_fp32", out_fp32, num_elements, torch.float32),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def copy(dst: Tensor, src: Tensor, *, num_threads: int | None = 1) -> None:
    """Copy the bytes of `src` to `dst` without the GIL; the dtypes may differ, num_bytes may not.

    `num_threads` None is the default of the other calls. Overlapping ranges raise ConfigError.
    """
    num_bytes = src.numel() * src.element_size()
    dst_address = address("dst", dst, dst.numel())
    src_address = address("src", src, src.numel())
    if dst.numel() * dst.element_size() != num_bytes:
        raise ConfigError("dst", describe(dst), f"must have {num_bytes} bytes like src")
    if num_bytes and abs(dst_address - src_address) < num_bytes:
        raise ConfigError("dst", describe(dst), "must not overlap src")
    _kernels.copy_bytes(dst_address, src_address, num_bytes, check_num_threads(num_threads))
