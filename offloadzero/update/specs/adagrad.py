"""Adagrad (Duchi et al. 2011) as torch.optim.Adagrad does it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from offloadzero.arithmetic.compact_math import sqrt_
from offloadzero.arithmetic.torch_steps import Fp32Piece
from offloadzero.core.segments import SegmentKind
from offloadzero.native import kernels
from offloadzero.native.hyper import AdagradHyper, StepScalars
from offloadzero.optim.cpu_optimizers import CPUAdagrad
from offloadzero.update.spec import Buffers, Fp32Spec, number

SUM = SegmentKind("sum")


class AdagradSpec(Fp32Spec[AdagradHyper]):
    """Adagrad: its state is the sum of the squared gradients, which begins at `initial_accumulator_value`."""

    name = "Adagrad"
    types = ("Adagrad",)
    classes = (torch.optim.Adagrad, CPUAdagrad)
    states = (SUM,)

    def hyper(self, group: Mapping[str, Any], name: str) -> AdagradHyper:
        """Return the hyperparameters of a group."""
        return AdagradHyper(
            lr=number(group, "lr", name),
            lr_decay=number(group, "lr_decay", name),
            eps=number(group, "eps", name),
            weight_decay=number(group, "weight_decay", name),
        )

    def expect_origin(self, origin: torch.optim.Optimizer, state_layout: str) -> None:
        """Accept torch's states, which exist at once, if they are unchanged: here they begin anew."""
        if not all(_is_fresh(state, initial) for state, initial in _states(origin)):
            super().expect_origin(origin, state_layout)

    def initial_value(self, kind: SegmentKind, group: Mapping[str, Any]) -> float:  # noqa: ARG002
        """The value of every element of the sum before the first step."""
        return number(group, "initial_accumulator_value", "optimizer.param_groups")

    def scalars(self, hyper: AdagradHyper, *, step: int, grad_scale: float) -> StepScalars:
        """Return the fp32 scalars of a step, which counts from 1."""
        return hyper.scalars(step=step, grad_scale=grad_scale)

    def native_step(
        self, buffers: Buffers, *, hyper: AdagradHyper, step: int, grad_scale: float, num_threads: int | None
    ) -> None:
        """Do one step in place by the kernel."""
        kernels.adagrad_step(
            buffers[SegmentKind.PARAM],
            buffers[SegmentKind.GRAD],
            buffers[SUM],
            hyper=hyper,
            step=step,
            grad_scale=grad_scale,
            master=buffers.get(SegmentKind.MASTER),
            num_threads=num_threads,
        )

    def torch_step(self, piece: Fp32Piece, scalars: StepScalars) -> None:
        """Do [Note: Lion and Adagrad arithmetic] in csrc/cpu_adam/cpu_adam.h."""
        weights, t, (v,) = piece.weights, piece.spare, piece.states
        g = piece.scaled_grad(scalars.grad_scale)
        if scalars.with_l2:
            g.add_(torch.mul(weights, scalars.weight_decay, out=t))
        v.add_(torch.mul(g, g, out=t))
        sqrt_(t.copy_(v)).add_(scalars.eps)
        weights.sub_(g.mul_(scalars.step_size).div_(t))


def _states(origin: torch.optim.Optimizer) -> Iterable[tuple[Mapping[str, Tensor], float]]:
    """Return the states that exist, and the value of every element of a new sum."""
    for group in origin.param_groups:
        for param in group["params"]:
            if param in origin.state:
                yield origin.state[param], float(group["initial_accumulator_value"])


def _is_fresh(state: Mapping[str, Tensor], initial: float) -> bool:
    total = state["sum"]
    expected = torch.tensor(initial, dtype=total.dtype, device=total.device)
    is_initial = not total.numel() or all(torch.equal(end, expected) for end in total.aminmax())
    return is_initial and not state["step"].item()


ADAGRAD = AdagradSpec()
