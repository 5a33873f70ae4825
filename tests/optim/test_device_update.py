"""Which form of Adam updates records on the device; the torch form keeps to its scratch, which is in the plan."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offloadzero.arithmetic import device_math, torch_steps
from offloadzero.arithmetic.torch_steps import COMPACT_SCRATCH_BYTES, FP32_SCRATCH_BYTES
from offloadzero.core.constants import COMPACT_BLOCK
from offloadzero.core.segments import TierName
from offloadzero.native import kernels
from offloadzero.planning.memory_plan import plan_memory
from offloadzero.update import spec
from offloadzero.update.adam_form import choose_form
from offloadzero.update.spec import FormChoice, UpdateForm, device_form
from offloadzero.update.specs.adam import ADAM
from tests.native.compact_records import make_grad
from tests.optim.device_states import ADAMW, CASES, LAYOUTS, compare, extremes, make, take_step
from tests.planning.test_memory_plan import config, everything, records

CPU = torch.device("cpu")


# --- the torch form ---


def scratch_for(layout: str, num_blocks: int) -> Tensor:
    """Poisoned, and a little larger than so many blocks take."""
    per_element = COMPACT_SCRATCH_BYTES if layout == "compact" else FP32_SCRATCH_BYTES
    return torch.full((num_blocks * COMPACT_BLOCK * per_element + 100,), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize(("layout", "grad_dtype", "hyper"), CASES, ids=str)
def test_the_torch_form_gives_the_host_kernels_bits(layout: str, grad_dtype: torch.dtype, hyper: str) -> None:
    compare(UpdateForm.TORCH, layout, grad_dtype, 1500, hyper, scratch=scratch_for(layout, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extremes_in_the_torch_form(layout: str) -> None:
    extremes(layout, UpdateForm.TORCH)


class _Allocations(TorchDispatchMode):
    """The largest new memory that an operation's result lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_torch_form_takes_nothing_beside_its_scratch(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for numbers per block, and the dither of one block. A device has no need of fp64 for a root."""
    monkeypatch.setattr(torch_steps, "sqrt_", Tensor.sqrt_)
    num_blocks = 300
    state, grad = make(layout, 40_000), make_grad(40_000, torch.bfloat16)
    scratch = scratch_for(layout, num_blocks)
    with _Allocations() as allocations:
        take_step(state, grad, UpdateForm.TORCH, 1, ADAMW, scratch=scratch)
    of_a_piece = 8 * max(num_blocks, COMPACT_BLOCK) if layout == "compact" else 0
    assert allocations.largest_bytes <= of_a_piece


def test_scratch_that_holds_no_block_is_refused() -> None:
    state, grad = make("fp32", 10), make_grad(10, torch.float32)
    scratch = torch.empty(COMPACT_BLOCK * FP32_SCRATCH_BYTES - 1, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="1535 bytes of scratch hold no block of 128 elements"):
        take_step(state, grad, UpdateForm.TORCH, 1, ADAMW, scratch=scratch)


def test_norms_on_a_device_take_no_memory_but_their_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_math, "NORM_ELEMENTS", 1000)
    grad = make_grad(40_000, torch.float32, specials=False)
    grad[37] = grad[20_037] = math.nan  # padding
    parts = ((0, 30), (30, 37), (38, 39), (39, 20_036), (20_038, 21_038), (21_038, 40_000))
    num_bytes = device_math.norm_scratch_bytes(parts)
    assert num_bytes == 8 * (1000 + 3 + 20 + 1 + 19)
    scratch = torch.empty(num_bytes, dtype=torch.uint8)
    with _Allocations() as allocations:
        found = device_math.sq_norms_in_pieces(grad, parts, scratch)
    assert allocations.largest_bytes == 0
    for (start, stop), total in zip(parts, found, strict=True):
        assert total == pytest.approx(math.fsum(x * x for x in grad[start:stop].tolist()), rel=1e-12)
    for value in (math.inf, math.nan):
        (total,) = device_math.sq_norms_in_pieces(torch.tensor([1.0, value]), ((0, 2),))
        assert not math.isfinite(total)


@pytest.mark.parametrize("remainder_dtype", [torch.int16, torch.int8])
def test_a_weight_that_is_nan_is_a_parameter_that_is(remainder_dtype: torch.dtype) -> None:
    """A device's NaN has all bits set, and its upper half rounded up is zero."""
    patterns = [0x7FFFFFFF, -1, 0x7FFF8000, 0x7FC00000, 0x7F800001]
    weights = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    param, master = torch.empty(5, dtype=torch.bfloat16), torch.empty(5, dtype=remainder_dtype)
    given = weights.clone()
    device_math.split_master(weights, param, master)
    assert bool(param.isnan().all())
    assert bool(device_math.join_master(param, master).isnan().all())
    assert torch.equal(weights.view(torch.int32), given.view(torch.int32)), "they are the caller's"


def test_master_weights_are_split_as_the_host_kernel_does() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_003,), generator=torch.Generator().manual_seed(0))
    weights = bits.to(torch.int32).view(torch.float32)
    weights = weights[~weights.isnan()]
    (param, other), (master, theirs) = (
        [torch.empty(weights.shape, dtype=dtype) for _ in range(2)] for dtype in (torch.bfloat16, torch.int16)
    )
    device_math.split_master(weights, param, master)
    kernels.split_master(weights, other, theirs)
    assert torch.equal(param.view(torch.int16), other.view(torch.int16))
    assert torch.equal(master, theirs)
    assert torch.equal(device_math.join_master(param, master).view(torch.int32), weights.view(torch.int32))


# --- which form ---


def test_the_choice() -> None:
    def unasked() -> str | None:
        raise AssertionError("asked for Triton where the device is the CPU")

    native = choose_form("cpu", triton_problem=unasked)
    assert native == FormChoice(UpdateForm.NATIVE, "the device is the CPU")
    assert choose_form("cuda", triton_problem=lambda: None).form is UpdateForm.TRITON
    without = choose_form("cuda", triton_problem=lambda: "there is none")
    assert without == FormChoice(UpdateForm.TORCH, "there is none")


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    device_form.cache_clear()
    with caplog.at_level(logging.INFO, "offloadzero.update"):
        assert device_form(ADAM, CPU) is device_form(ADAM, CPU) is UpdateForm.NATIVE
    assert caplog.messages == ["update of records on cpu: native (the device is the CPU)"]


# --- the plan ---


@pytest.mark.parametrize("is_compact", [False, True])
def test_the_scratch_is_bounded_and_in_the_plan(is_compact: bool) -> None:
    per_element = COMPACT_SCRATCH_BYTES if is_compact else FP32_SCRATCH_BYTES
    assert ADAM.scratch_bytes(UpdateForm.TORCH, 129, compact=is_compact) == 256 * per_element
    largest = ADAM.scratch_bytes(UpdateForm.TORCH, 10**9, compact=is_compact)
    assert largest == spec.SCRATCH_ELEMENTS * per_element <= 128 << 20
    for form in (UpdateForm.NATIVE, UpdateForm.TRITON):
        assert ADAM.scratch_bytes(form, 10**9, compact=is_compact) == 0


def test_only_updates_on_the_device_in_torch_operations_take_scratch() -> None:
    units = records(4096, 8192)
    for tier in TierName:
        for form in UpdateForm:
            plan = plan_memory(units, config(everything(tier.value)), form=form)
            has_scratch = tier is TierName.DEVICE and form is UpdateForm.TORCH
            expected = 8192 * FP32_SCRATCH_BYTES if has_scratch else 0
            assert plan.update_scratch_bytes == expected
            assert sum(line.num_bytes for line in plan.lines if line.what == "update scratch") == expected


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
def test_a_master_weight_without_dimensions(dtype: torch.dtype) -> None:
    weight, param, remainder = (
        torch.tensor(0.1),
        torch.empty((), dtype=torch.bfloat16),
        torch.empty((), dtype=dtype),
    )
    device_math.split_master(weight, param, remainder)
    assert param == weight.bfloat16()
    assert device_math.join_master(param, remainder) == pytest.approx(0.1, rel=2**-17)
