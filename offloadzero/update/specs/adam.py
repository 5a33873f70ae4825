"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019): `decoupled_weight_decay` tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from offloadzero.arithmetic import compact_math
from offloadzero.arithmetic.remainders import COMPACT_REMAINDER_DTYPE
from offloadzero.arithmetic.torch_steps import COMPACT_SCRATCH_BYTES, FP32_SCRATCH_BYTES
from offloadzero.core.constants import num_scales
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError
from offloadzero.native.hyper import AdamHyper
from offloadzero.optim.compact_tensors import MOMENT_CODES
from offloadzero.optim.cpu_optimizers import CPUAdam
from offloadzero.update import adam_form
from offloadzero.update.spec import Buffers, FormChoice, OptimizerSpec, StateCodes, UpdateForm, betas, number

EXP_AVG = SegmentKind("exp_avg")
EXP_AVG_SQ = SegmentKind("exp_avg_sq")


class AdamCodes(StateCodes):
    """The compact layout: [Note: compact state] in csrc/cpu_adam/cpu_adam.h."""

    param_dtype = torch.bfloat16
    master_dtype = COMPACT_REMAINDER_DTYPE
    dtypes = MappingProxyType({SegmentKind(kind): dtype for kind, (_, dtype) in MOMENT_CODES.items()})
    names = MappingProxyType({SegmentKind(kind): name for kind, (name, _) in MOMENT_CODES.items()})

    def num_scales(self, num_elements: int) -> int:
        """The number of scales: one per block and moment."""
        return num_scales(num_elements)

    def scale_shape(self, num_elements: int) -> torch.Size:
        """The shape of the scales: a row of two per block."""
        return torch.Size((num_scales(num_elements) // 2, 2))

    def decode(self, kind: SegmentKind, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the fp32 values of a parameter's flat codes and scales."""
        scale_m, scale_s = scales.view(-1, 2).unbind(1)
        if kind is EXP_AVG:
            return compact_math.decode_exp_avg(codes, scale_m)
        return compact_math.decode_exp_avg_sq(codes, scale_s)

    def encode(self, kind: SegmentKind, values: Tensor, scales: Tensor) -> Tensor:
        """Return the codes of a parameter's flat fp32 moment; its scales go into `scales`."""
        scale_m, scale_s = scales.view(-1, 2).unbind(1)
        if kind is EXP_AVG:
            codes, scale = compact_math.encode_exp_avg(values)
            scale_m.copy_(scale)
        else:
            codes, scale = compact_math.encode_exp_avg_sq(compact_math.sqrt(values))
            scale_s.copy_(scale)
        return codes


class AdamSpec(OptimizerSpec[AdamHyper]):
    """Adam: its states are two moments in fp32, or in 8 bits in the compact layout."""

    name = "Adam"
    types = ("Adam", "AdamW")
    classes = (torch.optim.Adam, torch.optim.AdamW, CPUAdam)
    states = (EXP_AVG, EXP_AVG_SQ)
    codes = AdamCodes()
    refused_options = MappingProxyType({"amsgrad": False, "maximize": False, "differentiable": False})
    scratch_bytes_per_element = FP32_SCRATCH_BYTES

    def hyper(self, group: Mapping[str, Any], name: str) -> AdamHyper:
        """Return the hyperparameters of a group."""
        beta1, beta2 = betas(group, name)
        return AdamHyper(
            lr=number(group, "lr", name),
            beta1=beta1,
            beta2=beta2,
            eps=number(group, "eps", name),
            weight_decay=number(group, "weight_decay", name),
            decoupled=bool(group["decoupled_weight_decay"]),
            bias_correction=bool(group.get("bias_correction", True)),
        )

    def expect_compact(self, hyper: AdamHyper, name: str) -> None:
        """Refuse `eps` 0 with L2 decay: the padding's 0 / 0 would come into its gradient, and so into a block's scale.

        A block belongs to one parameter, whose elements it has beside the padding.
        """
        if not hyper.eps and hyper.weight_decay and not hyper.decoupled:
            allowed = 'above 0 with weight_decay of Adam and "offloadzero": {"state_layout": "compact"}'
            raise ConfigError(f"{name}.eps", hyper.eps, allowed)

    def default_options(self, origin: torch.optim.Optimizer) -> dict[str, Any]:
        """The kind of weight decay, which torch keeps in the class; here the group must have it."""
        return {"decoupled_weight_decay": isinstance(origin, torch.optim.AdamW)}

    def fixed_options(self, origin: torch.optim.Optimizer | None) -> dict[str, Any]:
        """The kind of weight decay of torch.optim.AdamW, whatever a loaded group says."""
        return {"decoupled_weight_decay": True} if isinstance(origin, torch.optim.AdamW) else {}

    def expect_origin(self, origin: torch.optim.Optimizer, state_layout: str) -> None:
        """Refuse a CPUAdam of the compact layout whose states would be fp32 ones."""
        if isinstance(origin, CPUAdam) and (origin.state_layout, state_layout) == ("compact", "fp32"):
            needed = 'needs "offloadzero": {"state_layout": "compact"} in the config'
            raise ConfigError("optimizer.state_layout", "compact", needed)
        super().expect_origin(origin, state_layout)

    def choose_form(self, device: torch.device) -> FormChoice:
        """Choose the fused kernel where it gives the host kernel's bits: [Note: forms of the update]."""
        return adam_form.choose_form(device.type, triton_problem=lambda: adam_form.triton_problem(device))

    def _piece_bytes(self, *, compact: bool) -> int:
        return COMPACT_SCRATCH_BYTES if compact else FP32_SCRATCH_BYTES

    def step(
        self,
        buffers: Buffers,
        *,
        hyper: AdamHyper,
        step: int,
        grad_scale: float,
        num_threads: int | None = None,
        form: UpdateForm = UpdateForm.NATIVE,
        scratch: Tensor | None = None,
    ) -> None:
        """Do one Adam step in place; with scales the state is compact."""
        adam_form.adam_step(
            buffers[SegmentKind.PARAM],
            buffers[SegmentKind.GRAD],
            buffers[EXP_AVG],
            buffers[EXP_AVG_SQ],
            hyper=hyper,
            step=step,
            grad_scale=grad_scale,
            master=buffers.get(SegmentKind.MASTER),
            scales=buffers.get(SegmentKind.SCALES),
            num_threads=num_threads,
            form=form,
            scratch=scratch,
        )


ADAM = AdamSpec()
