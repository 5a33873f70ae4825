"""The optimizer kernels as typed calls on checked tensors, and the choice of their instruction set.

All tensors are contiguous CPU tensors of the same number of elements, at any address that their element size
allows; their shape does not matter. A tensor that does not fit raises ConfigError (a ValueError) naming the
argument. Every call releases the GIL, may be made from several threads at once, and gives the same bits for
every instruction set and number of threads: see [Note: Adam arithmetic] in csrc/cpu_adam/cpu_adam.h.

[Note: compact records]
The compact optimizer state takes 5 bytes per parameter and two scales per block. A record of n parameters is five flat
CPU tensors: `param` (bf16), `remainder_i8` (int8), `exp_avg_i8` (int8), `exp_avg_sq_u8` (uint8), each of n elements,
and `scales` (fp32) of `num_scales(n)`. [Note: compact state] in csrc/cpu_adam/cpu_adam.h says what they mean and how
far they are from fp32. Blocks of COMPACT_BLOCK elements share a pair of scales, so a range that is updated by itself
begins at a block's border and ends at one or at the end of the record. Under that condition the results are the same
bits for every cut, instruction set and number of threads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping
from enum import Enum

import torch
from torch import Tensor

from offloadzero.core.constants import COMPACT_BLOCK, MAX_UPDATE_THREADS, num_scales
from offloadzero.errors import ConfigError
from offloadzero.native import _kernels
from offloadzero.native.hyper import AdagradHyper, AdamHyper, LionHyper, SgdHyper, StepScalars

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


# --- tensors as arguments: checked, then an address and a number ---

# The values of DType in csrc/cpu_adam/cpu_adam.h.
DTYPE_CODE = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# The values of Layout there, by the dtypes of parameter and master.
LAYOUT_CODE: dict[tuple[torch.dtype, torch.dtype | None], int] = {
    (torch.bfloat16, torch.int16): 0,
    (torch.float32, None): 1,
    (torch.float16, torch.float32): 2,
    (torch.bfloat16, torch.float32): 3,
}


def describe(tensor: Tensor) -> str:
    """Return the description of a tensor for an error message."""
    layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{layout} {tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}"


def address(name: str, tensor: Tensor, num_elements: int) -> int:
    """Return the address of a dense CPU tensor of `num_elements` elements; raises ConfigError for any other."""
    if not tensor.is_cpu or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ConfigError(name, describe(tensor), "must be a contiguous CPU tensor")
    if tensor.numel() != num_elements:
        raise ConfigError(
            name, describe(tensor), f"must have {num_elements} elements like the first argument"
        )
    place = tensor.data_ptr()
    if place % tensor.element_size():
        raise ConfigError(name, f"{describe(tensor)}, at {place:#x}", "must be aligned to its elements")
    return place


def typed_address(name: str, tensor: Tensor, num_elements: int, dtype: torch.dtype) -> int:
    """Return the `address` of a tensor; raises ConfigError for one of another dtype, too."""
    if tensor.dtype != dtype:
        raise ConfigError(name, describe(tensor), f"must be {dtype}")
    return address(name, tensor, num_elements)


def float_code(name: str, tensor: Tensor) -> int:
    """The kernels' number of a tensor's dtype; raises ConfigError for any but bf16, fp16 and fp32."""
    code = DTYPE_CODE.get(tensor.dtype)
    if code is None:
        raise ConfigError(name, describe(tensor), "allowed torch.bfloat16, torch.float16, torch.float32")
    return code


def layout_code(param: Tensor, master: Tensor | None) -> int:
    """The kernels' number of a parameter with its master; raises ConfigError for dtypes that do not go together."""
    layout = LAYOUT_CODE.get((param.dtype, None if master is None else master.dtype))
    if layout is None:
        given = "no master" if master is None else f"a {master.dtype} master"
        raise ConfigError(
            "param",
            f"{param.dtype} with {given}",
            "allowed bfloat16 with int16 or float32, float16 with float32, float32 with none",
        )
    return layout


# --- the steps ---


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
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """One Adam or AdamW step in place, in one pass over memory.

    `param` and `master` are one of: bf16 with its remainder ([Note: bf16 split] in csrc/cpu_adam/remainders.h), bf16 or
    fp16 with an fp32 master (the parameter is the master rounded to nearest even), fp32 with None. `grad`
    is bf16, fp16 or fp32 and is multiplied by `grad_scale` first (1 / loss scale, times the clipping factor);
    `exp_avg` and `exp_avg_sq` are fp32. `step` counts from 1. The buffers must not overlap.
    """
    scalars = hyper.scalars(step=step, grad_scale=grad_scale)
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    _step(_kernels.adam_step, param, grad, moments, master, scalars, num_threads, isa)


def lion_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    *,
    hyper: LionHyper,
    grad_scale: float = 1.0,
    master: Tensor | None = None,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """One Lion step in place, in one pass over memory; dtypes are those of `adam_step`."""
    scalars = hyper.scalars(grad_scale=grad_scale)
    _step(_kernels.lion_step, param, grad, {"exp_avg": exp_avg}, master, scalars, num_threads, isa)


def adagrad_step(
    param: Tensor,
    grad: Tensor,
    square_sum: Tensor,
    *,
    hyper: AdagradHyper,
    step: int,
    grad_scale: float = 1.0,
    master: Tensor | None = None,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """One Adagrad step in place, in one pass over memory; dtypes are those of `adam_step`.

    `square_sum` (fp32) is the sum of the squared gradients; `step` counts from 1.
    """
    scalars = hyper.scalars(step=step, grad_scale=grad_scale)
    _step(_kernels.adagrad_step, param, grad, {"square_sum": square_sum}, master, scalars, num_threads, isa)


def sgd_step(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    hyper: SgdHyper,
    step: int,
    grad_scale: float = 1.0,
    master: Tensor | None = None,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """One step of SGD in place, in one pass over memory; dtypes are those of `adam_step`.

    Without momentum `momentum_buffer` (fp32) is not changed; `step` counts from 1.
    """
    scalars = hyper.scalars(step=step, grad_scale=grad_scale)
    moments = {"momentum_buffer": momentum_buffer}
    _step(_kernels.sgd_step, param, grad, moments, master, scalars, num_threads, isa)


def _step(
    kernel: Callable[..., float | None],
    param: Tensor,
    grad: Tensor,
    moments: Mapping[str, Tensor],
    master: Tensor | None,
    scalars: StepScalars,
    num_threads: int | None,
    isa: Isa | None,
) -> None:
    """Call a kernel of the fp32 layout; the names of its moments are for errors."""
    num_elements = param.numel()
    kernel(
        layout_code(param, master),
        float_code("grad", grad),
        address("param", param, num_elements),
        0 if master is None else address("master", master, num_elements),
        *(typed_address(name, moment, num_elements, torch.float32) for name, moment in moments.items()),
        address("grad", grad, num_elements),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
        scalars,
    )


# --- compact records: [Note: compact records] ---


def compact_adam_step(
    param: Tensor,
    grad: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    hyper: AdamHyper,
    step: int,
    grad_scale: float = 1.0,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """One Adam or AdamW step on a compact record, in place, in one pass over memory.

    `grad` is bf16, fp16 or fp32 and is multiplied by `grad_scale` first; `step` counts from 1, and the rounding of the
    moments depends on it ([Note: dithered codes]). The tensors must not overlap. Raises ConfigError for a tensor that
    does not fit, and as `AdamHyper.scalars` does.
    """
    _kernels.compact_adam_step(
        float_code("grad", grad),
        _compact_addresses(param, remainder_i8, exp_avg_i8, exp_avg_sq_u8, scales),
        address("grad", grad, param.numel()),
        param.numel(),
        isa_code(isa),
        check_num_threads(num_threads),
        hyper.scalars(step=step, grad_scale=grad_scale),
        step,
    )


def compact_encode(
    master_fp32: Tensor,
    exp_avg_fp32: Tensor,
    exp_avg_sq_fp32: Tensor,
    param: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    *,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Write fp32 master weights and moments (three tensors of n elements) as a compact record.

    Raises ConfigError for a tensor that does not fit.
    """
    num_elements = param.numel()
    _kernels.compact_encode(
        _fp32_addresses(master_fp32, exp_avg_fp32, exp_avg_sq_fp32, num_elements),
        _compact_addresses(param, remainder_i8, exp_avg_i8, exp_avg_sq_u8, scales),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def compact_decode(
    param: Tensor,
    remainder_i8: Tensor,
    exp_avg_i8: Tensor,
    exp_avg_sq_u8: Tensor,
    scales: Tensor,
    master_fp32: Tensor,
    exp_avg_fp32: Tensor,
    exp_avg_sq_fp32: Tensor,
    *,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Write the fp32 master weights and moments that a compact record stands for.

    Raises ConfigError for a tensor that does not fit.
    """
    num_elements = param.numel()
    _kernels.compact_decode(
        _compact_addresses(param, remainder_i8, exp_avg_i8, exp_avg_sq_u8, scales),
        _fp32_addresses(master_fp32, exp_avg_fp32, exp_avg_sq_fp32, num_elements),
        num_elements,
        isa_code(isa),
        check_num_threads(num_threads),
    )


def _compact_addresses(
    param: Tensor, remainder_i8: Tensor, exp_avg_i8: Tensor, exp_avg_sq_u8: Tensor, scales: Tensor
) -> tuple[int, int, int, int, int]:
    num_elements = param.numel()
    if scales.numel() != num_scales(num_elements):
        allowed = f"must have {num_scales(num_elements)} elements, two per block of {COMPACT_BLOCK}"
        raise ConfigError("scales", describe(scales), allowed)
    return (
        typed_address("param", param, num_elements, torch.bfloat16),
        typed_address("remainder_i8", remainder_i8, num_elements, torch.int8),
        typed_address("exp_avg_i8", exp_avg_i8, num_elements, torch.int8),
        typed_address("exp_avg_sq_u8", exp_avg_sq_u8, num_elements, torch.uint8),
        typed_address("scales", scales, scales.numel(), torch.float32),
    )


def _fp32_addresses(
    master_fp32: Tensor, exp_avg_fp32: Tensor, exp_avg_sq_fp32: Tensor, num_elements: int
) -> tuple[int, int, int]:
    return (
        typed_address("master_fp32", master_fp32, num_elements, torch.float32),
        typed_address("exp_avg_fp32", exp_avg_fp32, num_elements, torch.float32),
        typed_address("exp_avg_sq_fp32", exp_avg_sq_fp32, num_elements, torch.float32),
    )


# --- gradients, master weights, copies ---


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
