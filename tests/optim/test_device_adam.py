"""Adam on a device: the fused kernel and the torch form give the host kernel's bits, and move and take what is said.

Without a device Triton's interpreter runs the kernel, and its compiler shows what a GPU would run.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import pytest
import torch

from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.update import adam_form
from offloadzero.update.spec import UpdateForm
from tests.native.compact_records import make_grad
from tests.optim.device_states import (
    CASES,
    HYPERS,
    LAYOUTS,
    assert_same,
    compare,
    extremes,
    make,
    take_step,
)
from tests.optim.triton_process import HAS_TRITON, TritonProcess

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

LARGEST_RUN = int(os.environ.get("OFFLOADZERO_TEST_ELEMENTS", str(1 << 20)))
# --- the fused kernel in the interpreter ---


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonProcess]:
    process = TritonProcess(interprets=True, cache=tmp_path_factory.mktemp("triton"))
    yield process
    process.close()


@needs_triton
@pytest.mark.parametrize(("layout", "grad_dtype", "hyper"), CASES, ids=str)
def test_the_fused_kernel_gives_the_host_kernels_bits(
    interpreter: TritonProcess, layout: str, grad_dtype: torch.dtype, hyper: str
) -> None:
    interpreter(compare, UpdateForm.TRITON, layout, grad_dtype, 1500, hyper)


@needs_triton
@pytest.mark.parametrize("num_elements", [1, 127, 511, 4097])
@pytest.mark.parametrize("layout", ["bf16 and remainder", "compact"])
def test_any_number_of_elements(interpreter: TritonProcess, layout: str, num_elements: int) -> None:
    interpreter(compare, UpdateForm.TRITON, layout, torch.bfloat16, num_elements, "AdamW")


def compare_in_large_programs(layout: str) -> None:
    from offloadzero.arithmetic import triton_adam

    small = triton_adam.ADAM_BLOCK, triton_adam.COMPACT_ROWS
    triton_adam.ADAM_BLOCK = 1 << 17  # the interpreter takes its time per program, not per element
    triton_adam.COMPACT_ROWS = triton_adam.ADAM_BLOCK // COMPACT_BLOCK
    try:
        compare(UpdateForm.TRITON, layout, torch.bfloat16, LARGEST_RUN, "AdamW", (3,))
    finally:
        triton_adam.ADAM_BLOCK, triton_adam.COMPACT_ROWS = small


@needs_triton
@pytest.mark.parametrize("layout", ["bf16 and remainder", "compact"])
def test_a_million_elements(interpreter: TritonProcess, layout: str) -> None:
    interpreter(compare_in_large_programs, layout)


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_extremes_in_the_fused_kernel(interpreter: TritonProcess, layout: str) -> None:
    interpreter(extremes, layout, UpdateForm.TRITON)


def compare_at_odd_offsets(layout: str) -> None:
    """Ranges of a record with other hyperparameters each, and at unaligned addresses in the fp32 layouts."""
    bounds = (0, 128, 384, 511) if layout == "compact" else (0, 1, 34, 511)
    ours = make(layout, 511)
    kernels = {name: array.clone() for name, array in ours.items()}
    grad = make_grad(511, torch.float16)
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for state, form in ((ours, UpdateForm.TRITON), (kernels, UpdateForm.NATIVE)):
            parts = {name: array[start:stop] for name, array in state.items() if name != "scales"}
            if "scales" in state:
                parts["scales"] = state["scales"][num_scales(start) : num_scales(stop)]
            take_step(parts, grad[start:stop], form, 1 + index, list(HYPERS.values())[index])
    assert_same(ours, kernels)


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranges_of_a_record(interpreter: TritonProcess, layout: str) -> None:
    interpreter(compare_at_odd_offsets, layout)


# --- what a GPU would run ---

flushes_subnormals = HAS_TRITON and tuple(map(int, version("triton").split(".")[:2])) < (3, 6)
rounds_right = pytest.mark.skipif(flushes_subnormals, reason="this Triton flushes, which the first try finds")

GPU_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int16: "*i16"}


def compiled(layout: str, grad: torch.dtype, capability: int, with_l2: bool, fusion: bool = False) -> str:
    """PTX of a kernel for a whole record, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from offloadzero.arithmetic import triton_adam

    pointers = {"grad": GPU_TYPES[grad], "exp_avg": "*fp32", "exp_avg_sq": "*fp32"}
    constants: dict[str, Any] = {"WITH_L2": with_l2}
    if layout == "compact":
        kernel = triton_adam._compact_adam
        pointers |= {"param": "*i16", "remainder": "*i8", "exp_avg": "*i8", "exp_avg_sq": "*u8"}
        pointers["scales"] = "*fp32"
        constants["ROWS"] = triton_adam.COMPACT_ROWS
    else:
        kernel = triton_adam._adam
        dtype, master = LAYOUTS[layout]
        is_split = constants["IS_SPLIT"] = master == torch.int16
        pointers["param"] = "*i16" if is_split else GPU_TYPES[dtype]
        if master is None:
            constants["master"] = None
        else:
            pointers["master"] = GPU_TYPES[master]
        constants["BLOCK"] = triton_adam.ADAM_BLOCK
    integers = dict.fromkeys(("num_elements", "phase_m", "phase_s"), "i32")
    types = {**integers, **pointers, **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, "fp32") for name in kernel.arg_names}
    aligned = [(kernel.arg_names.index(name),) for name in (*pointers, "num_elements")]
    source = ASTSource(kernel, signature, constants, {place: [["tt.divisibility", 16]] for place in aligned})
    options = {"enable_fp_fusion": fusion}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return ptx


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonProcess]:
    process = TritonProcess(interprets=False, cache=tmp_path_factory.mktemp("triton"))
    yield process
    process.close()


def instructions(ptx: str) -> list[str]:
    return re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_.:]+)\s", ptx, re.MULTILINE)


def bytes_per_thread(names: list[str], what: str) -> int:
    """Of loads or stores by one thread."""
    found = [re.fullmatch(rf"{what}\.global(?:\.v(\d))?\.b(\d+)", name) for name in names]
    return sum(int(m[1] or 1) * int(m[2]) // 8 for m in found if m)


@needs_triton
@rounds_right
@pytest.mark.parametrize(("capability", "with_l2"), [(80, True), (90, False)])
@pytest.mark.parametrize(
    ("layout", "grad_dtype", "read", "written"),
    [
        ("bf16 and remainder", torch.bfloat16, 14, 12),
        ("fp32", torch.float32, 16, 12),
        ("fp16 and master", torch.float16, 14, 14),
        ("bf16 and master", torch.bfloat16, 14, 14),
        ("compact", torch.bfloat16, 7, 5),
    ],
)
def test_what_a_gpu_runs_is_rounded_once_and_moves_each_byte_once(
    compiler: TritonProcess,
    layout: str,
    grad_dtype: torch.dtype,
    read: int,
    written: int,
    with_l2: bool,
    capability: int,
) -> None:
    names = instructions(compiler(compiled, layout, grad_dtype, capability, with_l2))
    assert not [name for name in names if "ftz" in name or "approx" in name or ".full." in name]
    per_thread = 2048 // 128 if layout == "compact" else 1024 // 128  # elements; of 4 warps
    of_scales = 8 if layout == "compact" else 0  # one thread in a row's does
    assert bytes_per_thread(names, "ld") == read * per_thread + of_scales
    assert bytes_per_thread(names, "st") == written * per_thread + of_scales
    assert (names.count("fma.rn.f32") > 0) == (layout == "compact"), "only the compact layout asks for them"
    for operation in ("div.rn.f32", "sqrt.rn.f32", "mul.rn.f32"):
        assert operation in names


# --- the first try ---


def first_try() -> str | None:
    """On the CPU, which has no current device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam_form, "_is_current", lambda _: nullcontext())
        return adam_form.triton_problem(torch.device("cpu"))


def first_try_with_flushed_roots() -> str | None:
    """As Triton 3.4 compiles them."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def flushing(_: object, x: Any) -> Any:
        data = np.where(np.abs(x.data) < 2.0**-126, np.float32(0), x.data)
        return TensorHandle(np.sqrt(data), x.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_precise_sqrt", flushing)
        return first_try()


def first_try_with_an_error() -> str | None:
    from triton.runtime.interpreter import InterpreterBuilder

    def failing(*_: object) -> None:
        raise RuntimeError("no C compiler\nand more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", failing)
        return first_try()


def first_try_without_triton() -> str | None:
    import sys

    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "offloadzero.arithmetic.triton_adam", raising=False)
        patch.setitem(sys.modules, "triton", None)
        return first_try()


def test_a_machine_without_triton_says_so() -> None:
    problem = first_try_without_triton()
    assert problem is not None
    assert problem.startswith("Triton cannot be imported: ")


@needs_triton
def test_the_first_try_compares_bits(interpreter: TritonProcess) -> None:
    assert interpreter(first_try) is None
    assert (
        interpreter(first_try_with_flushed_roots)
        == "Triton gives other bits here: param (fp32), master (fp32)"
    )
    failed = interpreter(first_try_with_an_error)
    assert failed is not None
    assert failed.startswith("Triton does not run here: ")
    assert "no C compiler" in failed
    assert "\n" not in failed
