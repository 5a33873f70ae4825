"""The choice of the form in which Adam updates records on the device, and the scratch that it takes.

[Note: forms of the update]
All forms give the same bits: those of the kernels in csrc/cpu_adam. Where the device is the CPU they are those kernels.
On other devices one fused Triton kernel reads each byte once and writes each once. Triton comes with every CUDA build
of torch, but it compiles at run time, its launcher with the system's C compiler. So it is tried when the first model is
taken over, on small states whose bits are known. Where it is missing, fails or gives other bits, torch operations do
the same in pieces, in scratch that the memory plan holds: some ten passes over memory instead of one, and in the
compact layout, whose fused multiply-adds torch has not, some fifty.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from offloadzero.arithmetic.remainders import REMAINDER_DTYPE
from offloadzero.arithmetic.torch_steps import COMPACT_SCRATCH_BYTES, FP32_SCRATCH_BYTES, torch_step
from offloadzero.native import kernels
from offloadzero.native.hyper import AdamHyper
from offloadzero.optim import compact_tensors
from offloadzero.update.spec import FormChoice, UpdateForm, piece_scratch_bytes


def choose_form(device_type: str, *, triton_problem: Callable[[], str | None]) -> FormChoice:
    """Choose the form for a type of device: [Note: forms of the update].

    `triton_problem` returns why Triton cannot be used, None if it can; it is not called where the device is the CPU.
    """
    if device_type == "cpu":
        return FormChoice(UpdateForm.NATIVE, "the device is the CPU")
    problem = triton_problem()
    if problem is not None:
        return FormChoice(UpdateForm.TORCH, problem)
    return FormChoice(UpdateForm.TRITON, "one fused kernel, which gives the host kernel's bits here")


def triton_problem(device: torch.device) -> str | None:
    """Return why Triton cannot update records on `device`; None if it can and gives the host kernel's bits."""
    try:
        import offloadzero.arithmetic.triton_adam  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    try:
        with _is_current(device):
            differing = _differing_arrays(device)
    except (
        Exception
    ) as error:  # an error of its compiler, its driver, or an architecture that it does not know
        return f"Triton does not run here: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"Triton gives other bits here: {', '.join(differing)}" if differing else None


def _is_current(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current one: Triton launches on that."""
    made: AbstractContextManager[None] = torch.get_device_module(device).device(device)
    return made


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    hyper: AdamHyper,
    step: int,
    grad_scale: float,
    master: Tensor | None,
    scales: Tensor | None = None,
    num_threads: int | None = None,
    form: UpdateForm = UpdateForm.NATIVE,
    scratch: Tensor | None = None,
) -> None:
    """Do one Adam step in place on flat tensors of one device; see `native.kernels.adam_step`.

    With `scales` the state is compact: see `native.kernels.compact_adam_step`.

    Args:
        scratch: uint8, for the form in torch operations; allocated if None.
    """
    state: tuple[Tensor, ...] = (param, grad, exp_avg, exp_avg_sq)
    options: dict[str, Any] = {"master": master}
    if scales is not None:
        if master is None:
            raise AssertionError("a compact state without remainder")
        state, options = (param, grad, master, exp_avg, exp_avg_sq, scales), {}
    if form is UpdateForm.NATIVE:
        native = kernels.adam_step if scales is None else kernels.compact_adam_step
        native(*state, hyper=hyper, step=step, grad_scale=grad_scale, num_threads=num_threads, **options)
        return
    scalars = hyper.scalars(step=step, grad_scale=grad_scale)
    if form is UpdateForm.TRITON:
        from offloadzero.arithmetic import triton_adam

        if scales is None:
            triton_adam.adam_step(*state, scalars=scalars, **options)
        else:
            triton_adam.compact_adam_step(*state, scalars=scalars, step=step)
        return
    if scratch is None:
        per_element = FP32_SCRATCH_BYTES if scales is None else COMPACT_SCRATCH_BYTES
        num_bytes = piece_scratch_bytes(param.numel(), per_element)
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=param.device)
    torch_step(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        scalars=scalars,
        step=step,
        master=master,
        scales=scales,
        scratch=scratch,
    )


# --- a first try ---

_TRIAL_ELEMENTS = 1040  # more than one program has, and as aligned as the ranges of records
_TRIAL_HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-30, weight_decay=0.1)


def _differing_arrays(device: torch.device) -> list[str]:
    """The names of arrays that two steps leave with other bits than the host's kernels do; of both layouts."""
    differing = []
    for layout in ("fp32", "compact"):
        on_host = _trial_state(is_compact=layout == "compact")
        on_device = {name: array.to(device, copy=True) for name, array in on_host.items()}
        for step in (1, 2):
            grad = _trial_values(10 + step).bfloat16()
            for form, state in ((UpdateForm.NATIVE, on_host), (UpdateForm.TRITON, on_device)):
                given: dict[str, Any] = {**state, "grad": grad.to(state["param"].device)}
                adam_step(**given, hyper=_TRIAL_HYPER, step=step, grad_scale=0.7, form=form)
        for name, expected in on_host.items():
            if not torch.equal(expected.view(torch.uint8), on_device[name].cpu().view(torch.uint8)):
                differing.append(f"{name} ({layout})")
    return differing


def _trial_values(seed: int) -> Tensor:
    """Return fp32 values of many magnitudes, subnormal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-140, 10, (_TRIAL_ELEMENTS,), generator=generator, device="cpu")
    return torch.ldexp(torch.randn(_TRIAL_ELEMENTS, generator=generator, device="cpu"), exponents)


def _trial_state(*, is_compact: bool) -> dict[str, Tensor]:
    count = _TRIAL_ELEMENTS
    weights, exp_avg, exp_avg_sq = _trial_values(1), _trial_values(2), _trial_values(3).abs()
    param = torch.empty(count, dtype=torch.bfloat16, device="cpu")
    if not is_compact:
        master = torch.empty(count, dtype=REMAINDER_DTYPE, device="cpu")
        kernels.split_master(weights, param, master)
        return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master}
    record = compact_tensors.flat_record(param, compact_tensors.zeros(param))
    kernels.compact_encode(weights, exp_avg, exp_avg_sq, *record)
    return dict(zip(("param", "master", "exp_avg", "exp_avg_sq", "scales"), record, strict=True))
