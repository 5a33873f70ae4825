"""Lion (Chen et al. 2023, arXiv 2302.06675); weight decay is decoupled."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from offloadzero.arithmetic.torch_steps import Fp32Piece
from offloadzero.core.segments import SegmentKind
from offloadzero.native import kernels
from offloadzero.native.hyper import LionHyper, StepScalars
from offloadzero.optim.cpu_optimizers import CPULion
from offloadzero.update.spec import Buffers, Fp32Spec, betas, number

EXP_AVG = SegmentKind("exp_avg")


class LionSpec(Fp32Spec[LionHyper]):
    """Lion: its state is one moment."""

    name = "Lion"
    types = ("Lion",)
    classes = (CPULion,)
    states = (EXP_AVG,)
    counts_steps = False
    refused_options = MappingProxyType({"maximize": False})

    def hyper(self, group: Mapping[str, Any], name: str) -> LionHyper:
        """Return the hyperparameters of a group."""
        beta1, beta2 = betas(group, name)
        return LionHyper(
            lr=number(group, "lr", name),
            beta1=beta1,
            beta2=beta2,
            weight_decay=number(group, "weight_decay", name),
        )

    def scalars(self, hyper: LionHyper, *, step: int, grad_scale: float) -> StepScalars:  # noqa: ARG002
        """Return the fp32 scalars, which are those of every step."""
        return hyper.scalars(grad_scale=grad_scale)

    def native_step(
        self,
        buffers: Buffers,
        *,
        hyper: LionHyper,
        step: int,  # noqa: ARG002
        grad_scale: float,
        num_threads: int | None,
    ) -> None:
        """Do one step in place by the kernel."""
        kernels.lion_step(
            buffers[SegmentKind.PARAM],
            buffers[SegmentKind.GRAD],
            buffers[EXP_AVG],
            hyper=hyper,
            grad_scale=grad_scale,
            master=buffers.get(SegmentKind.MASTER),
            num_threads=num_threads,
        )

    def torch_step(self, piece: Fp32Piece, scalars: StepScalars) -> None:
        """Do [Note: Lion and Adagrad arithmetic] in csrc/cpu_adam/cpu_adam.h; u is in the spare."""
        weights, (m,) = piece.weights, piece.states
        g = piece.scaled_grad(scalars.grad_scale)
        u = torch.mul(m, scalars.beta1, out=piece.spare).add_(g.mul_(scalars.one_minus_beta1))
        # torch's sign has no signs of zeros and no NaN: u - u is 0 or NaN once infinities are cut.
        sign = torch.copysign(torch.sign(u, out=g), u, out=g)
        u.clamp_(-1.0, 1.0)
        sign.sub_(u.sub_(u))
        weights.mul_(scalars.decay).sub_(sign.mul_(scalars.step_size))
        g = piece.scaled_grad(scalars.grad_scale)
        m.mul_(scalars.beta2).add_(g.mul_(scalars.one_minus_beta2))


LION = LionSpec()
