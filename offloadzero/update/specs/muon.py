"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) as torch.optim.Muon does it, beside AdamW.

A matrix's momentum is made nearly orthogonal by a Newton-Schulz iteration in bf16. Each operation is torch's, on the
same shapes and strides, so that a step of fp32 weights gives torch.optim.Muon's bits on the same device.

Param groups with `use_muon` false are AdamW's, as in DeepSpeed. Without groups that say so a parameter's own attribute
`use_muon` decides, and where it has none its name and its shape do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from offloadzero.arithmetic.remainders import join, split
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError
from offloadzero.memory.arena import align_up
from offloadzero.native.hyper import MuonHyper
from offloadzero.update.spec import AnySpec, Buffers, FormChoice, OptimizerSpec, UpdateForm, number
from offloadzero.update.specs.adam import ADAM

MOMENTUM_BUFFER = SegmentKind("momentum_buffer")
_NOT_HIDDEN = ("embed", "lm_head")  # in names of parameters: DeepSpeed's rule
# Options of one half of a group that the configuration splits, and that mean nothing to the other.
_OF_MUON = ("momentum",)
_OF_ADAM = ("betas", "eps", "decoupled_weight_decay")


def uses_muon(name: str, param: Tensor) -> bool:
    """Whether a parameter is Muon's where no group says so: a matrix between embedding and output, as in DeepSpeed."""
    chosen: bool | None = getattr(param, "use_muon", None)
    if chosen is not None:
        return bool(chosen)
    return param.ndim >= 2 and not any(part in name.lower() for part in _NOT_HIDDEN)


class MuonSpec(OptimizerSpec[MuonHyper]):
    """Muon: its state is the momentum of a matrix, which a step takes whole."""

    name = "Muon"
    types = ("Muon",)
    classes = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()  # since torch 2.9
    states = (MOMENTUM_BUFFER,)
    counts_steps = False
    takes_whole = True

    @property
    def members(self) -> tuple[AnySpec, ...]:
        """Muon, and AdamW for what it leaves."""
        return self, ADAM

    def of_group(self, group: Mapping[str, Any]) -> AnySpec:
        """AdamW where the group says so."""
        return self if group.get("use_muon", True) else ADAM

    def config_groups(
        self, groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any], names: Mapping[int, str]
    ) -> list[dict[str, Any]]:
        """Split each group into that of Muon and that of AdamW; one without parameters is left out.

        A group's own options win over `muon_lr` and `adam_lr`.
        """
        made = []
        for group in groups:
            chosen = group.get("use_muon")
            params = {
                id(p): (p, uses_muon(names.get(id(p), ""), p) if chosen is None else bool(chosen))
                for p in group["params"]
            }
            for use_muon, rate, foreign in ((True, "muon_lr", _OF_ADAM), (False, "adam_lr", _OF_MUON)):
                half = [p for p, is_muons in params.values() if is_muons is use_muon]
                options = {**defaults, "lr": defaults.get(rate), **group}
                for key in ("muon_lr", "adam_lr", *foreign):
                    options.pop(key, None)
                if half:
                    made.append({**options, "params": half, "use_muon": use_muon})
        return made

    def config_defaults(self, defaults: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """None: each group has its own half of them, and an `eps` of AdamW is none of Muon's."""
        return {}

    def expect_param(self, name: str, param: Tensor) -> None:
        """Refuse what is no matrix."""
        if param.ndim != 2:
            allowed = (
                "Muon updates matrices: set `use_muon = False` on the parameter before initialize(), or put it into a "
                'param group with "use_muon": False; AdamW updates it then'
            )
            raise ConfigError(f"{name}.shape", tuple(param.shape), allowed)

    def hyper(self, group: Mapping[str, Any], name: str) -> MuonHyper:
        """Return the hyperparameters of a group; those that the configuration has no key for are torch's defaults."""
        options = {
            key: group[key]
            for key in ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
            if key in group
        }
        if "ns_coefficients" in options:
            options["ns_coefficients"] = tuple(options["ns_coefficients"])
        return MuonHyper(
            lr=number(group, "lr", name),
            momentum=number(group, "momentum", name),
            weight_decay=number(group, "weight_decay", name),
            **options,
        )

    def choose_form(self, device: torch.device) -> FormChoice:
        """Choose AdamW's form: Muon's own step is torch operations in any."""
        return ADAM.choose_form(device)

    def scratch_bytes(self, form: UpdateForm, num_elements: int, *, compact: bool) -> int:  # noqa: ARG002
        """None: `step_scratch_bytes` has it."""
        return 0

    def step_scratch_bytes(self, shape: torch.Size) -> int:
        """The bytes that `step` takes: three arrays of fp32, and two Gram matrices in bf16."""
        return sum(map(align_up, _array_bytes(shape)))

    def step(
        self,
        buffers: Buffers,
        *,
        hyper: MuonHyper,
        step: int,  # noqa: ARG002
        grad_scale: float,
        num_threads: int | None = None,  # noqa: ARG002
        form: UpdateForm = UpdateForm.TORCH,  # noqa: ARG002
        scratch: Tensor | None = None,
    ) -> None:
        """Do one step of a matrix in place, on its device: buffers of its shape (A, B)."""
        param, grad, momentum = (buffers[k] for k in (SegmentKind.PARAM, SegmentKind.GRAD, MOMENTUM_BUFFER))
        master = buffers.get(SegmentKind.MASTER)
        if scratch is None:
            num_bytes = self.step_scratch_bytes(param.shape)
            scratch = torch.empty(num_bytes, dtype=torch.uint8, device=param.device)
        weights, g, spare, *grams = _arrays(scratch, param.shape)
        g.copy_(grad).mul_(grad_scale)
        momentum.lerp_(g, 1 - hyper.momentum)
        source = torch.lerp(g, momentum, hyper.momentum, out=g) if hyper.nesterov else momentum
        update = _orthogonalised(source, hyper, halves=spare.view(torch.bfloat16), grams=grams)
        # The spare's bytes hold the update: the weights are joined in those of the gradient, which is done with.
        join(weights, param, master, spare=g)
        weights.mul_(1 - hyper.lr * hyper.weight_decay)
        weights.add_(update, alpha=-hyper.adjusted_lr(*param.shape))
        split(weights, param, master, spare=g)


def _array_bytes(shape: torch.Size) -> tuple[int, ...]:
    """The bytes of weights, gradient, spare and the two Gram matrices of a matrix."""
    size = 4 * shape.numel()
    gram = 2 * min(shape) ** 2
    return size, size, size, gram, gram


def _arrays(scratch: Tensor, shape: torch.Size) -> list[Tensor]:
    """Cut the scratch into those arrays: three of fp32, shape (A, B), and two of bf16, shape (min(A, B),) * 2."""
    arrays, start = [], 0
    smaller = (min(shape), min(shape))
    for place, num_bytes in enumerate(_array_bytes(shape)):
        part = scratch[start : start + num_bytes]
        start += align_up(num_bytes)
        dtype, form = (torch.float32, shape) if place < 3 else (torch.bfloat16, smaller)
        arrays.append(part.view(dtype).view(form))
    return arrays


def _orthogonalised(source: Tensor, hyper: MuonHyper, *, halves: Tensor, grams: list[Tensor]) -> Tensor:
    """Return the Newton-Schulz iterate of a matrix (A, B), bf16, in one of the two `halves` of memory.

    The operations and their operands' strides are those of torch.optim.Muon, for its bits.
    """
    a, b, c = hyper.ns_coefficients
    first, second = halves.flatten().split(source.numel())
    is_tall = source.shape[0] > source.shape[1]
    x: Tensor = first.view(source.shape).copy_(source)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=hyper.eps))
    gram, gram_update = grams
    for _ in range(hyper.ns_steps):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=gram_update)
        x = torch.addmm(x, gram_update, x, beta=a, out=second.view(x.shape))
        first, second = second, first
    return x.T if is_tall else x


MUON = MuonSpec()
