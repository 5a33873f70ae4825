"""The floating-point operations of a call of torch, as torch.utils.flop_counter counts them.

They are those of matrix products, convolutions and attention, two for each multiplication and addition, and attention
in full although half of it is masked. An operation of torch with the name of one of these, of a recurrent layer, a
decomposition, a distance or a Fourier transform, and any that is not torch's own, would count as nothing without a
formula: so its name is kept, and the operations of the micro batch are not known.
torch.utils.flop_counter.register_flop_formula gives it one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from offloadzero.core.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    cpu_lstm,
    cpu_lstm_backward,
    grouped_matmul,
)

_TORCHS_OWN = ("aten", "prim", "prims", "profiler")  # namespaces in which the name says what is heavy
_HEAVY = re.compile(  # in the name of an operation
    r"mm(?![a-z])|matmul|conv(?!ert)|attention|transformer|(^|_)linear(_backward|$)|mv_?$|^v?dot$"
    r"|^_trilinear$|rnn(?!_flatten)|lstm|gru|cdist|pdist|euclidean_dist|^_fft_[cr]2[cr]$"
    r"|^_?linalg_(?!vector_norm|cross|check_errors|diagonal|_powsum)"
    r"|cholesky|lu_solve|lu_with_info|triangular_solve|geqrf|orgqr|ormqr"
)

Formula = Callable[..., int]


def formula_of(func: Any) -> Formula | None:
    """Return the formula of an operation; one that a script has given torch counts as well."""
    operation = func.overloadpacket
    found = _COUNTS.get(operation) or flop_registry.get(operation)
    return found if found is not None else _COUNTS_BY_NAME.get(str(operation))


def is_heavy(func: Any) -> bool:
    """Whether an operation without a formula may compute much."""
    return func.namespace not in _TORCHS_OWN or bool(_HEAVY.search(func.overloadpacket.__name__))


def _of_first(num_args: int, count: Callable[..., Any]) -> Formula:
    """Make a formula, which takes all arguments and `out_val`, of a function of the first arguments."""
    return lambda *args, **_: int(count(*args[:num_args]))


def _size(tensor: Any) -> int:
    return math.prod(tensor.shape)


def _attention(count: Callable[..., Any], *tensors: Any, heads_at: int = 1) -> Any:
    """Return torch's count for query, key and value, in backward behind a gradient; dimension `heads_at` has the heads.

    In 2.11 torch's formulas refuse keys that several queries share: each is multiplied by them.
    """
    query = tensors[-3]
    num_heads = query.shape[heads_at]
    shapes = [(one.shape[0], num_heads, one.shape[3 - heads_at], one.shape[3]) for one in tensors]
    return count(*shapes)


def _grouped_matmul(left: Any, right: Any) -> int:
    """The groups are ranges of rows, of columns or of the inner dimension, or the third dimension of both."""
    num_products = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return int(2 * num_products * left.shape[-2] * left.shape[-1] * right.shape[-1])


def _lstm(inputs: Any, of_inputs: Any, of_hidden: Any) -> int:
    """Of one layer in one direction: each vector of the input passes through two matrices, of all four gates."""
    return 2 * int(math.prod(inputs.shape[:-1])) * (_size(of_inputs) + _size(of_hidden))


_MATRIX_VECTOR = _of_first(1, lambda matrix: 2 * _size(matrix))
# Formulas by operation. torch has them for attention on devices, but not on the CPU, nor for products by groups.
_COUNTS: Mapping[Any, Formula] = {
    cpu_attention: _of_first(3, partial(_attention, sdpa_flop_count)),
    cpu_attention_backward: _of_first(4, partial(_attention, sdpa_backward_flop_count)),
    grouped_matmul: _of_first(2, _grouped_matmul),
    torch.ops.aten.mv: _MATRIX_VECTOR,
    torch.ops.aten.dot: _MATRIX_VECTOR,
    torch.ops.aten.vdot: _MATRIX_VECTOR,
    torch.ops.aten.addmv: _of_first(2, lambda _, matrix: 2 * _size(matrix)),
    torch.ops.aten.addbmm: _of_first(3, lambda _, left, right: 2 * _size(left) * right.shape[-1]),
    cpu_lstm: _of_first(3, _lstm),
    cpu_lstm_backward: _of_first(3, lambda *args: 2 * _lstm(*args)),
}
# Those of packages that need not be installed.
_COUNTS_BY_NAME: Mapping[str, Formula] = {
    "flash_attn._flash_attn_forward": _of_first(3, partial(_attention, sdpa_flop_count, heads_at=2)),
    "flash_attn._flash_attn_backward": _of_first(
        4, partial(_attention, sdpa_backward_flop_count, heads_at=2)
    ),
}
