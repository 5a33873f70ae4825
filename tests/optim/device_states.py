"""States of every layout, and one step of Adam on them in a form: shared by tests of updates on a device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offloadzero.arithmetic import device_math
from offloadzero.core.constants import num_scales
from offloadzero.native.hyper import AdamHyper
from offloadzero.native.kernels import compact_encode
from offloadzero.update import adam_form
from offloadzero.update.spec import UpdateForm
from tests.native.compact_records import make_grad, make_state

INF, NAN = math.inf, math.nan
ADAMW = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
HYPERS = {
    "AdamW": ADAMW,
    "L2": AdamHyper(lr=1e-2, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1, decoupled=False),
    "L2 of 0": AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=False),
    "uncorrected": AdamHyper(5e-2, 0.0, 0.9, eps=0.0, weight_decay=0.0, bias_correction=False),
    # Scalars that are subnormal in fp32, or on the border from which the compact layout does not divide by them.
    "tiny": AdamHyper(lr=2.0**-101, beta1=0.9, beta2=0.99, eps=1e-41, weight_decay=1e-40, decoupled=False),
}
BORDERS = {
    "the smallest step": AdamHyper(lr=2.0**-100, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1),
    "no step": AdamHyper(lr=0.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1),
}
# Parameter, master: None stands for no master, int8 for the compact layout.
LAYOUTS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "bf16 and remainder": (torch.bfloat16, torch.int16),
    "compact": (torch.bfloat16, torch.int8),
    "fp32": (torch.float32, None),
    "fp16 and master": (torch.float16, torch.float32),
    "bf16 and master": (torch.bfloat16, torch.float32),
}
GRADS = (torch.bfloat16, torch.float16, torch.float32)

CASES = [
    *itertools.product(("bf16 and remainder", "compact"), GRADS, HYPERS),
    *(("fp32", torch.float32, hyper) for hyper in HYPERS),
    ("fp16 and master", torch.float16, "AdamW"),
    ("bf16 and master", torch.bfloat16, "L2"),
    *(("compact", torch.bfloat16, hyper) for hyper in BORDERS),
]
HYPERS |= BORDERS

State = dict[str, Tensor]


def make(layout: str, num_elements: int, *, seed: int = 0) -> State:
    """A state with every magnitude, subnormal ones and zeros of both signs among them."""
    dtype, master_dtype = LAYOUTS[layout]
    weights, m, v = make_state(num_elements, seed=seed)
    state = {"param": torch.empty(num_elements, dtype=dtype)}
    if master_dtype == torch.int8:
        state["master"] = torch.empty(num_elements, dtype=torch.int8)
        state["exp_avg"] = torch.empty(num_elements, dtype=torch.int8)
        state["exp_avg_sq"] = torch.empty(num_elements, dtype=torch.uint8)
        state["scales"] = torch.empty(num_scales(num_elements))
        compact_encode(weights, m, v, *state.values(), num_threads=1)
        return state
    if master_dtype is not None:
        state["master"] = torch.empty(num_elements, dtype=master_dtype)
    device_math.split_master(weights, state["param"], state.get("master"))
    return {**state, "exp_avg": m, "exp_avg_sq": v}


def take_step(
    state: State,
    grad: Tensor,
    form: UpdateForm,
    step: int,
    hyper: AdamHyper,
    *,
    grad_scale: float = 0.7,
    **more: Any,
) -> None:
    adam_form.adam_step(
        state["param"],
        grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        hyper=hyper,
        step=step,
        grad_scale=grad_scale,
        master=state.get("master"),
        scales=state.get("scales"),
        form=form,
        num_threads=1,
        **more,
    )


def assert_same(ours: State, kernels: State) -> None:
    """Bit by bit, but for the sign and the payload of a NaN."""
    for name, expected in kernels.items():
        mine = ours[name]
        if expected.is_floating_point():
            assert torch.equal(mine.isnan(), expected.isnan()), name
            lost = expected.isnan()
            mine, expected = mine.masked_fill(lost, 0.0), expected.masked_fill(lost, 0.0)
        assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8)), name


def compare(
    form: UpdateForm,
    layout: str,
    grad_dtype: torch.dtype,
    num_elements: int,
    hyper: str,
    steps: Sequence[int] = (1, 7, 2**32 - 5),
    **more: Any,
) -> None:
    """Some steps, from one state, in a form and in the host's kernels."""
    ours = make(layout, num_elements)
    kernels = {name: array.clone() for name, array in ours.items()}
    for step in steps:
        grad = make_grad(num_elements, grad_dtype, seed=step)
        take_step(kernels, grad, UpdateForm.NATIVE, step, HYPERS[hyper])
        take_step(ours, grad, form, step, HYPERS[hyper], **more)
        assert_same(ours, kernels)


def extremes(layout: str, form: UpdateForm) -> None:
    """Gradients that overflow a moment, some that are not finite, and weights that are NaN with every bit set."""
    ours = make(layout, 2500, seed=2)
    if "master" not in ours:
        ours["param"][40] = NAN
    elif ours["master"].dtype == torch.float32:
        ours["master"][40] = NAN
    else:  # hi << 16 plus lo: 0x7FFFFFFF, which a device's NaN is
        ours["param"].view(torch.int16)[40], ours["master"][40] = -0x8000, -1
    kernels = {name: array.clone() for name, array in ours.items()}
    grad = make_grad(2500, torch.float32)
    grad[2000:2004] = torch.tensor([3e38, -1e38, 1e30, 2e19])
    grad[2200], grad[2400], grad[2450] = INF, NAN, -INF
    for step, grad_scale in ((1, 0.7), (2, 0.7), (3, 0.0)):
        take_step(kernels, grad, UpdateForm.NATIVE, step, HYPERS["L2"], grad_scale=grad_scale)
        take_step(ours, grad, form, step, HYPERS["L2"], grad_scale=grad_scale)
        assert ours["param"][40].isnan(), "not zero"
        assert ours["param"].isnan().any()
        is_lost = ours["param"].isnan()
        kernels["param"][40] = NAN  # the host's split keeps the payload, and rounds it
        for name in ("param", "master"):
            if name in ours:  # of a NaN nothing is defined but that it is one
                ours[name][is_lost] = kernels[name][is_lost]
        assert_same(ours, kernels)
