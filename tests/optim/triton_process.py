"""Functions of tests run in a process of their own, where Triton interprets its kernels, or compiles them.

Triton decides at its import whether it interprets; no other test is to notice that it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch

Result = TypeVar("Result")

HAS_TRITON = find_spec("triton") is not None


class TritonProcess:
    """One process that imports Triton, with the interpreter on or off."""

    def __init__(self, *, interprets: bool, cache: Path) -> None:
        self._environment = {"TRITON_INTERPRET": str(int(interprets)), "TRITON_CACHE_DIR": str(cache)}
        prepare = interpret_exactly if interprets else None
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=prepare)

    def __call__(self, function: Callable[..., Result], *args: Any) -> Result:
        """`function` of a test's module there; what it raises is raised here."""
        with mock.patch.dict(os.environ, self._environment):
            return self._pool.submit(function, *args).result()

    def close(self) -> None:
        self._pool.shutdown()


def interpret_exactly() -> None:
    """Before 3.9 Triton's interpreter rounds a fused multiply-add twice: this one rounds once."""
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    np.seterr(all="ignore")

    def create_fma(_: object, x: Any, y: Any, z: Any) -> Any:
        from offloadzero.arithmetic.compact_math import Workspace

        a, b, c = (torch.from_numpy(v.copy()) for v in np.broadcast_arrays(x.data, y.data, z.data))
        spare = Workspace(*(torch.empty(a.shape, dtype=torch.float64) for _ in range(9)))
        return interpreter.TensorHandle(spare.fma(torch.empty_like(a), a, b, c).numpy(), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma
