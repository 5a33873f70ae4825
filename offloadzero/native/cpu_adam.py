"""The typed face of the optimizer kernels: which instruction set runs, calls on checked tensors (floor 2).

All tensors are contiguous CPU tensors of the same number of elements, at any address that their element size
allows; their shape does not matter. A tensor that does not fit raises ConfigError (a ValueError) naming the
argument. Every call releases the GIL, may be made from several threads at once, and gives the same bits for
every instruction set and number of threads: see [Note: Adam arithmetic] in csrc/cpu_adam/cpu_adam.h.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from offloadzero.errors import ConfigError
from offloadzero.native import _cpu_adam

ISA_ENV = "OFFLOADZERO_ISA"

_MAX_THREADS = 1024


class Isa(str, Enum):
    """The instruction set of the kernels: plain C++ for any CPU, AVX2 with F16C, AVX-512 F, BW, VL and DQ."""

    SCALAR = "scalar"
    AVX2 = "avx2"
    AVX512 = "avx512"


# The values of the enums in csrc/cpu_adam/cpu_adam.h.
_ISA_CODE = {Isa.SCALAR: 0, Isa.AVX2: 1, Isa.AVX512: 2}
_DTYPE_CODE = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_LAYOUT_CODE: dict[tuple[torch.dtype, torch.dtype | None], int] = {
    (torch.bfloat16, torch.int16): 0,
    (torch.float32, None): 1,
    (torch.float16, torch.float32): 2,
    (torch.bfloat16, torch.float32): 3,
}
_FLOAT_DTYPES = "allowed torch.bfloat16, torch.float16, torch.float32"


@functools.cache
def _choose_isa() -> tuple[Isa, str]:
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
        return isa, f"{ISA_ENV}={forced}"
    best = next(isa for isa in (Isa.AVX512, Isa.AVX2, Isa.SCALAR) if isa_supported(isa))
    return best, "the widest this CPU has"


def isa_supported(isa: Isa) -> bool:
    """True if this CPU, its operating system and this build have the instruction set."""
    return _cpu_adam.isa_supported(_ISA_CODE[isa])


def active_isa() -> Isa:
    """The instruction set in use: the widest there is, or the one OFFLOADZERO_ISA names on first use.

    Raises ConfigError if OFFLOADZERO_ISA names one that does not exist or that this CPU lacks.
    """
    return _choose_isa()[0]


def isa_reason() -> str:
    """Why `active_isa` is what it is, in words."""
    return _choose_isa()[1]


_default_num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)


def get_default_num_threads() -> int:
    """Threads of a call that names no number: at first the CPUs this process may run on."""
    return _default_num_threads


def set_default_num_threads(num_threads: int) -> None:
    """Set the threads of calls that name no number (1 to 1024); the calling thread is one of them."""
    global _default_num_threads
    _default_num_threads = _check_num_threads(num_threads)


def _check_num_threads(num_threads: int | None) -> int:
    if num_threads is None:
        return _default_num_threads
    if not 1 <= num_threads <= _MAX_THREADS:
        raise ConfigError("num_threads", num_threads, f"allowed 1 to {_MAX_THREADS}")
    return num_threads


def _isa_code(isa: Isa | None) -> int:
    return _ISA_CODE[_choose_isa()[0] if isa is None else isa]


@dataclass(frozen=True)
class AdamHyper:
    """Hyperparameters of one Adam step (Kingma & Ba 2015; `decoupled`: AdamW, Loshchilov & Hutter 2019)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    bias_correction: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise ConfigError(name, value, "allowed finite numbers >= 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(name, value, "allowed numbers in [0, 1)")


class AdamScalars(NamedTuple):
    """The scalars of one step, each computed in double and rounded to fp32 once.

    The fields are those of the struct in csrc/cpu_adam/cpu_adam.h, in its order; [Note: Adam arithmetic]
    there says how they are used.
    """

    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float
    inv_sqrt_bias_correction2: float
    decay: float
    weight_decay: float
    decoupled: bool


_TEN_FLOATS = struct.Struct("<10f")  # the standard sizes: native "f" does not report overflow


def adam_scalars(hyper: AdamHyper, *, step: int, grad_scale: float = 1.0) -> AdamScalars:
    """The fp32 scalars of step number `step` (the first is 1), for any device that repeats the arithmetic.

    `decay` is 1 - lr * weight_decay when decoupled and 1 otherwise.
    """
    if step < 1:
        raise ConfigError("step", step, "allowed integers >= 1")
    bias_correction1 = 1.0 - hyper.beta1**step if hyper.bias_correction else 1.0
    bias_correction2 = 1.0 - hyper.beta2**step if hyper.bias_correction else 1.0
    exact = (
        grad_scale,
        hyper.beta1,
        1.0 - hyper.beta1,
        hyper.beta2,
        1.0 - hyper.beta2,
        hyper.eps,
        hyper.lr / bias_correction1,
        1.0 / math.sqrt(bias_correction2),
        1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0,
        hyper.weight_decay,
    )
    try:
        rounded = _TEN_FLOATS.unpack(_TEN_FLOATS.pack(*exact))
    except OverflowError:
        raise ConfigError("hyper", (hyper, grad_scale), "every number must fit fp32") from None
    return AdamScalars._make((*rounded, hyper.decoupled))


def _describe(tensor: Tensor) -> str:
    layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{layout} {tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}"


def _address(name: str, tensor: Tensor, num_elements: int) -> int:
    """The address of a dense CPU tensor of `num_elements` elements."""
    if not tensor.is_cpu or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ConfigError(name, _describe(tensor), "must be a contiguous CPU tensor")
    if tensor.numel() != num_elements:
        raise ConfigError(
            name, _describe(tensor), f"must have {num_elements} elements like the first argument"
        )
    return tensor.data_ptr()


def _typed_address(name: str, tensor: Tensor, num_elements: int, dtype: torch.dtype) -> int:
    if tensor.dtype != dtype:
        raise ConfigError(name, _describe(tensor), f"must be {dtype}")
    return _address(name, tensor, num_elements)


def _float_code(name: str, tensor: Tensor) -> int:
    code = _DTYPE_CODE.get(tensor.dtype)
    if code is None:
        raise ConfigError(name, _describe(tensor), _FLOAT_DTYPES)
    return code


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

    `param` and `master` are one of: bf16 with its int16 remainder ([Note: bf16 split] in csrc/cpu_adam), bf16
    or fp16 with an fp32 master (the parameter is the master rounded to nearest even), fp32 with None. `grad`
    is bf16, fp16 or fp32 and is multiplied by `grad_scale` first (1 / loss scale, times the clipping factor);
    `exp_avg` and `exp_avg_sq` are fp32. `step` counts from 1. The buffers must not overlap.
    """
    num_elements = param.numel()
    layout = _LAYOUT_CODE.get((param.dtype, None if master is None else master.dtype))
    if layout is None:
        given = "no master" if master is None else f"a {master.dtype} master"
        raise ConfigError(
            "param",
            f"{param.dtype} with {given}",
            "allowed bfloat16 with int16 or float32, float16 with float32, float32 with none",
        )
    _cpu_adam.adam_step(
        layout,
        _float_code("grad", grad),
        _address("param", param, num_elements),
        0 if master is None else _address("master", master, num_elements),
        _typed_address("exp_avg", exp_avg, num_elements, torch.float32),
        _typed_address("exp_avg_sq", exp_avg_sq, num_elements, torch.float32),
        _address("grad", grad, num_elements),
        num_elements,
        _isa_code(isa),
        _check_num_threads(num_threads),
        adam_scalars(hyper, step=step, grad_scale=grad_scale),
    )


def sq_norm(grad: Tensor, *, num_threads: int | None = None, isa: Isa | None = None) -> float:
    """Sum of squares of a bf16, fp16 or fp32 tensor, in double and in a fixed order of additions.

    Finite exactly when every element is: the squares of finite elements cannot overflow a double's sum.
    """
    num_elements = grad.numel()
    code = _float_code("grad", grad)
    address = _address("grad", grad, num_elements)
    return _cpu_adam.sq_norm(code, address, num_elements, _isa_code(isa), _check_num_threads(num_threads))


def accumulate(acc: Tensor, grad: Tensor, *, num_threads: int | None = None, isa: Isa | None = None) -> None:
    """acc = round(float(acc) + float(grad)), to nearest even; each of the two is bf16, fp16 or fp32."""
    num_elements = acc.numel()
    _cpu_adam.accumulate(
        _float_code("acc", acc),
        _float_code("grad", grad),
        _address("acc", acc, num_elements),
        _address("grad", grad, num_elements),
        num_elements,
        _isa_code(isa),
        _check_num_threads(num_threads),
    )


def split_master(
    master_fp32: Tensor,
    param_bf16: Tensor,
    remainder_i16: Tensor,
    *,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Write fp32 weights as bf16 parameter and int16 remainder: [Note: bf16 split] in csrc/cpu_adam."""
    num_elements = master_fp32.numel()
    _cpu_adam.split_master(
        _typed_address("master_fp32", master_fp32, num_elements, torch.float32),
        _typed_address("param_bf16", param_bf16, num_elements, torch.bfloat16),
        _typed_address("remainder_i16", remainder_i16, num_elements, torch.int16),
        num_elements,
        _isa_code(isa),
        _check_num_threads(num_threads),
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
    _cpu_adam.join_master(
        _typed_address("param_bf16", param_bf16, num_elements, torch.bfloat16),
        _typed_address("remainder_i16", remainder_i16, num_elements, torch.int16),
        _typed_address("out_fp32", out_fp32, num_elements, torch.float32),
        num_elements,
        _isa_code(isa),
        _check_num_threads(num_threads),
    )


def copy(dst: Tensor, src: Tensor, *, num_threads: int | None = 1) -> None:
    """Copy the bytes of `src` to `dst` without the GIL; the dtypes may differ, num_bytes may not.

    `num_threads` None is the default of the other calls. Overlapping ranges raise ConfigError.
    """
    num_bytes = src.numel() * src.element_size()
    dst_address = _address("dst", dst, dst.numel())
    src_address = _address("src", src, src.numel())
    if dst.numel() * dst.element_size() != num_bytes:
        raise ConfigError("dst", _describe(dst), f"must have {num_bytes} bytes like src")
    if num_bytes and abs(dst_address - src_address) < num_bytes:
        raise ConfigError("dst", _describe(dst), "must not overlap src")
    _cpu_adam.copy_bytes(dst_address, src_address, num_bytes, _check_num_threads(num_threads))
