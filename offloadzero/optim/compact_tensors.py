"""A parameter's Adam state in 5 bytes, as tensors of a torch optimizer, with conversions from and to fp32.

`master_remainder`, `exp_avg_e2m5` (int8) and `exp_avg_sq_e1m7` (uint8) in the parameter's shape, and `scales`
(fp32, two per block of the flat parameter); [Note: compact state] in csrc/cpu_adam/cpu_adam.h says what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from offloadzero.arithmetic.remainders import COMPACT_REMAINDER_DTYPE, lengthened, shortened
from offloadzero.core.constants import num_scales
from offloadzero.errors import ConfigError
from offloadzero.native.kernels import compact_decode, compact_encode

# Of each moment the name and the dtype of its codes. The names say what the bytes mean (bits of exponent and mantissa),
# so that codes of another kind are refused and not misread.
MOMENT_CODES = {"exp_avg": ("exp_avg_e2m5", torch.int8), "exp_avg_sq": ("exp_avg_sq_e1m7", torch.uint8)}
CODE_DTYPES = {"master_remainder": COMPACT_REMAINDER_DTYPE, **dict(MOMENT_CODES.values())}
_SCALES = "scales"
KEYS = (*CODE_DTYPES, _SCALES)


def is_compact(state: Mapping[str, object]) -> bool:
    """Whether the state of a parameter is in this layout."""
    return _SCALES in state


def zeros(param: Tensor) -> dict[str, Tensor]:
    """Make the state of a contiguous bf16 parameter before its first step."""
    state = {key: torch.zeros(param.shape, dtype=dtype, device="cpu") for key, dtype in CODE_DTYPES.items()}
    return {**state, _SCALES: torch.zeros(num_scales(param.numel()), device="cpu")}


def flat_record(param: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the record that the kernels of `native.kernels` take."""
    remainder, exp_avg, exp_avg_sq, scales = (state[key].view(-1) for key in KEYS)
    return param.detach().view(-1), remainder, exp_avg, exp_avg_sq, scales


def checked(name: str, param: Tensor, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a saved compact state's tensors.

    Raises ConfigError that names `name` and the tensor if one is missing or has another shape or dtype.
    """
    copies = {}
    for key, expected in zeros(param).items():
        value = saved.get(key)
        if value is None:
            raise ConfigError(f"{name}.{key}", None, "missing beside the other tensors of a compact state")
        if key == _SCALES and value.numel() == expected.numel():
            value = value.reshape(expected.shape)  # an offloaded optimizer saves a row for each block
        if value.shape != expected.shape or value.dtype != expected.dtype:
            what = f"{value.dtype} of shape {tuple(value.shape)}"
            allowed = f"must be {expected.dtype} of shape {tuple(expected.shape)}"
            raise ConfigError(f"{name}.{key}", what, allowed)
        copies[key] = expected.copy_(value)
    return copies


def encoded(param: Tensor, exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the compact state nearest to a parameter's `exp_avg`, `exp_avg_sq` and int16 `master_remainder`.

    The parameter keeps its value: `shortened` says what that costs. A missing tensor counts as 0.
    """
    state = zeros(param)
    low = exact.get("master_remainder")
    if low is not None:
        state["master_remainder"].copy_(shortened(low))
    none_yet = torch.zeros(param.shape, device="cpu")
    moments = [exact.get(key, none_yet).reshape(-1) for key in MOMENT_CODES]
    scratch = torch.empty_like(param.detach()), torch.empty_like(state["master_remainder"])
    _, _, *codes = flat_record(param, state)
    compact_encode(torch.zeros(param.numel(), device="cpu"), *moments, *(t.view(-1) for t in scratch), *codes)
    return state


def decoded(param: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the exact values of a compact state: `exp_avg`, `exp_avg_sq` (fp32) and `master_remainder` (int16)."""
    master, exp_avg, exp_avg_sq = (torch.empty(param.shape, device="cpu") for _ in range(3))
    high = torch.zeros(param.shape, dtype=torch.bfloat16, device="cpu")
    compact_decode(*flat_record(high, state), *(t.view(-1) for t in (master, exp_avg, exp_avg_sq)))
    remainder = lengthened(state["master_remainder"])
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master_remainder": remainder}
