"""The update and the norms on a CUDA device give the bits of the kernels on the host."""

from __future__ import annotations

import math

import pytest
import torch

from offloadzero.arithmetic import device_math
from offloadzero.core.constants import num_scales
from offloadzero.native import kernels
from offloadzero.native.hyper import AdamHyper
from offloadzero.native.kernels import compact_encode
from offloadzero.update import adam_form
from offloadzero.update.adam_form import triton_problem
from offloadzero.update.spec import UpdateForm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HYPERS = [
    AdamHyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1),
    AdamHyper(lr=3e-4, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.01, decoupled=False),
    AdamHyper(lr=5e-2, beta1=0.0, beta2=0.9, eps=1e-3, weight_decay=0.0, bias_correction=False),
]
DTYPES = [
    (torch.bfloat16, torch.int16),
    (torch.float16, torch.float32),
    (torch.float32, None),
]


def values(num_elements: int, seed: int) -> torch.Tensor:
    """fp32 over many magnitudes, with zeros of both signs and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(num_elements, generator=generator)
    drawn *= 10.0 ** torch.randint(-12, 3, (num_elements,), generator=generator)
    drawn[::97] = 0.0
    drawn[1::97] = -0.0
    drawn[2::97] = 1e-41
    return drawn


@pytest.fixture
def form(request: pytest.FixtureRequest) -> UpdateForm:
    """A form of the update; skipped where Triton is missing or does not run, and not where it gives other bits."""
    wanted: UpdateForm = request.param
    problem = triton_problem(torch.device("cuda", 0)) if wanted is UpdateForm.TRITON else None
    if problem is not None and "other bits" not in problem:
        pytest.skip(problem)
    return wanted


FORMS = pytest.mark.parametrize("form", [UpdateForm.TRITON, UpdateForm.TORCH], indirect=True)


@FORMS
@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize(("dtype", "master_dtype"), DTYPES)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_device_update_gives_the_bits_of_the_kernel(
    form: UpdateForm,
    hyper: AdamHyper,
    dtype: torch.dtype,
    master_dtype: torch.dtype | None,
    grad_dtype: torch.dtype,
) -> None:
    count = 100_003
    weights = values(count, 1).clamp(-1e4, 1e4)
    param = torch.empty(count, dtype=dtype)
    master = None if master_dtype is None else torch.empty(count, dtype=master_dtype)
    device_math.split_master(weights, param, master)
    host = [param, torch.zeros(count), torch.zeros(count)]
    device = [tensor.cuda() for tensor in host]
    device_master = None if master is None else master.cuda()
    for step in range(1, 6):
        grad = values(count, 100 + step).clamp(-6e4, 6e4).to(grad_dtype)
        kernels.adam_step(
            host[0], grad, host[1], host[2], hyper=hyper, step=step, grad_scale=0.37, master=master
        )
        adam_form.adam_step(
            device[0],
            grad.cuda(),
            device[1],
            device[2],
            hyper=hyper,
            step=step,
            grad_scale=0.37,
            master=device_master,
            form=form,
        )
        for name, one, other in zip(("param", "exp_avg", "exp_avg_sq"), host, device, strict=True):
            assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8)), f"{name}, step {step}"
        if master is not None and device_master is not None:
            assert torch.equal(master, device_master.cpu()), f"master, step {step}"


@FORMS
@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_the_compact_update_on_the_device_gives_the_bits_of_the_kernel(
    form: UpdateForm, hyper: AdamHyper, grad_dtype: torch.dtype
) -> None:
    count = 100_003
    zeros, weights = torch.zeros(count), values(count, 1).clamp(-1e4, 1e4)
    dtypes = (torch.bfloat16, torch.int8, torch.int8, torch.uint8)
    host = [*(torch.empty(count, dtype=dtype) for dtype in dtypes), torch.empty(num_scales(count))]
    compact_encode(weights, zeros, zeros, *host)
    device = [tensor.cuda() for tensor in host]
    for step in range(1, 6):
        grad = values(count, 100 + step).clamp(-6e4, 6e4).to(grad_dtype)
        for state, given, used in ((host, grad, UpdateForm.NATIVE), (device, grad.cuda(), form)):
            param, master, exp_avg, exp_avg_sq, scales = state
            adam_form.adam_step(
                param,
                given,
                exp_avg,
                exp_avg_sq,
                hyper=hyper,
                step=step,
                grad_scale=0.37,
                master=master,
                scales=scales,
                form=used,
            )
        for name, one, other in zip(("param", "master", "m", "v", "scales"), host, device, strict=True):
            assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8)), f"{name}, step {step}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_and_sums_on_the_device(dtype: torch.dtype) -> None:
    grad = values(70_001, 3).clamp(-6e4, 6e4).to(dtype)
    expected = float(grad.double().square().sum())
    assert device_math.sq_norm(grad.cuda()) == pytest.approx(expected, rel=1e-12)
    grad[-1] = math.nan
    assert not math.isfinite(device_math.sq_norm(grad.cuda()))
    for acc_dtype in (dtype, torch.float32):
        acc = values(70_001, 4).clamp(-1e4, 1e4).to(acc_dtype)
        other = values(70_001, 5).clamp(-1e4, 1e4).to(dtype)
        on_device = acc.cuda()
        device_math.accumulate(on_device, other.cuda())
        kernels.accumulate(acc, other)
        assert torch.equal(on_device.cpu().view(torch.uint8), acc.view(torch.uint8))
