"""SGD with momentum as torch.optim.SGD does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offloadzero.arithmetic.torch_steps import Fp32Piece
from offloadzero.core.segments import SegmentKind
from offloadzero.native import kernels
from offloadzero.native.hyper import SgdHyper, StepScalars
from offloadzero.update.spec import Buffers, Fp32Spec, number

MOMENTUM_BUFFER = SegmentKind("momentum_buffer")


class SgdSpec(Fp32Spec[SgdHyper]):
    """SGD: its state is the momentum buffer, also without momentum, as schedulers may change that between steps."""

    name = "SGD"
    types = ("SGD",)
    classes = (torch.optim.SGD,)
    states = (MOMENTUM_BUFFER,)
    counts_steps = False
    begins_without = True

    def hyper(self, group: Mapping[str, Any], name: str) -> SgdHyper:
        """Return the hyperparameters of a group."""
        return SgdHyper(
            lr=number(group, "lr", name),
            momentum=number(group, "momentum", name),
            dampening=number(group, "dampening", name),
            weight_decay=number(group, "weight_decay", name),
            nesterov=bool(group["nesterov"]),
        )

    def counts_update(self, hyper: SgdHyper) -> bool:
        """Whether the step has momentum: torch makes the buffer in the first such step, and dampens only later ones."""
        return hyper.momentum != 0.0

    def scalars(self, hyper: SgdHyper, *, step: int, grad_scale: float) -> StepScalars:
        """Return the fp32 scalars of a step, which counts from 1; 0: no step had momentum."""
        return hyper.scalars(step=max(step, 1), grad_scale=grad_scale)

    def native_step(
        self, buffers: Buffers, *, hyper: SgdHyper, step: int, grad_scale: float, num_threads: int | None
    ) -> None:
        """Do one step in place by the kernel."""
        kernels.sgd_step(
            buffers[SegmentKind.PARAM],
            buffers[SegmentKind.GRAD],
            buffers[MOMENTUM_BUFFER],
            hyper=hyper,
            step=max(step, 1),
            grad_scale=grad_scale,
            master=buffers.get(SegmentKind.MASTER),
            num_threads=num_threads,
        )

    def torch_step(self, piece: Fp32Piece, scalars: StepScalars) -> None:
        """Do [Note: SGD arithmetic] in csrc/cpu_adam/cpu_adam.h."""
        weights, t, (m,) = piece.weights, piece.spare, piece.states
        g = piece.scaled_grad(scalars.grad_scale)
        if scalars.with_l2:
            g.add_(torch.mul(weights, scalars.weight_decay, out=t))
        if scalars.beta2:
            m.mul_(scalars.beta1).add_(torch.mul(g, scalars.one_minus_beta1, out=t))
            g = torch.mul(m, scalars.beta2, out=t).add_(g.mul_(scalars.one_minus_beta2))
        weights.sub_(g.mul_(scalars.step_size))


SGD = SgdSpec()
