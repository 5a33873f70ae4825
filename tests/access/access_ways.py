"""The ways to a weight that torch offers: reads and writes of the access table."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.access.access_model import WIDTH, Run, inputs

# --- reads: (run, name of a parameter) -> its value ---

Read = Callable[[Run, str], Any]
READS: dict[str, Read] = {
    "module attribute": lambda r, n: getattr(r.layer(n), n.split(".")[-1]).clone(),
    "parameters()": lambda r, n: list(r.model.parameters())[r.names().index(n)].clone(),
    "named_parameters()": lambda r, n: r.param(n) * 1,
    "get_parameter()": lambda r, n: r.model.get_parameter(n).clone(),
    "module.parameters(recurse)": lambda r, n: dict(r.layer(n).named_parameters())[n.split(".")[-1]] + 0,
    "optimizer.param_groups": lambda r, n: r.groups()[0]["params"][r.names().index(n)].clone(),
    ".data": lambda r, n: r.param(n).data.clone(),
    ".data without a copy": lambda r, n: r.param(n).data,
    ".detach()": lambda r, n: r.param(n).detach().clone(),
    ".detach() without a copy": lambda r, n: r.param(n).detach(),
    "state_dict()": lambda r, n: r.model.state_dict()[n].clone(),
    "state_dict() of the layer": lambda r, n: r.layer(n).state_dict()[n.split(".")[-1]].clone(),
    "state_dict(keep_vars=True)": lambda r, n: r.model.state_dict(keep_vars=True)[n].clone(),
    "parameters_to_vector": lambda r, n: parameters_to_vector(r.layer(n).parameters()),
    "parameters_to_vector of all": lambda r, _: parameters_to_vector(r.model.parameters()),
    "functional_call of the layer": lambda r, n: functional_call(
        r.layer(n), dict(r.layer(n).named_parameters()), (inputs(7, r.dtype),)
    ),
    "functional_call with halved weights": lambda r, n: functional_call(
        r.layer(n), {k: 0.5 * p for k, p in r.layer(n).named_parameters()}, (inputs(7, r.dtype),)
    ),
    "arithmetic": lambda r, n: (2 * r.param(n) + 1).sum(dim=0),
    "matmul": lambda r, n: nn.functional.linear(inputs(7, r.dtype), r.layer(n).weight),
    "norm": lambda r, n: r.param(n).norm(),
    "item": lambda r, n: torch.tensor([r.param(n).sum().item(), float(r.param(n).detach().flatten()[3])]),
    "tolist": lambda r, n: torch.tensor(r.param(n).tolist()),
    "index": lambda r, n: (
        torch.stack([r.param(n)[1], r.param(n).view(WIDTH, -1)[:, 0][2].expand(WIDTH)])
        if r.param(n).dim() > 1
        else r.param(n)[1:].clone()
    ),
    "iteration": lambda r, n: torch.stack(list(r.param(n))),
    "transpose": lambda r, n: r.param(n).T.contiguous() if r.param(n).dim() > 1 else r.param(n).clone(),
    "foreach": lambda r, n: torch.stack(torch._foreach_norm([r.param(n), r.layer(n).bias])),
    "stack, cat": lambda r, n: torch.cat([r.param(n), r.param(n)]),
    "to another dtype": lambda r, n: r.param(n).to(torch.float64),
    "comparison": lambda r, n: (
        torch.equal(r.param(n), r.param(n).clone()) and torch.isfinite(r.param(n)).all()
    ),
    "numpy": lambda r, n: torch.from_numpy(r.param(n).detach().float().numpy().copy()),
    "numpy(force=True)": lambda r, n: torch.tensor(np.array(_upcast(r.param(n)).numpy(force=True))),
    "copy.deepcopy": lambda r, n: _deepcopy(r.param(n)),
    "torch.save": lambda r, n: _saved(r.param(n)),
    "repr": lambda r, n: torch.tensor([float(x) for x in _numbers(repr(r.param(n).data[:1]))]),
    "autograd.grad": lambda r, n: _gradient(r.param(n)),
    "vmap": lambda r, n: torch.vmap(lambda row: row.sum())(r.layer(n).weight.detach()),
    "out=": lambda r, n: torch.mul(r.param(n).detach(), 2, out=torch.empty_like(r.param(n).detach())),
    "copied into another": lambda r, n: torch.empty_like(r.param(n).detach()).copy_(r.param(n).detach()),
}


def _upcast(p: Tensor) -> Tensor:
    return p if p.dtype == torch.float32 else p.float()  # numpy has no bf16


def _deepcopy(p: Tensor) -> Tensor:
    import copy

    return copy.deepcopy(p).detach().clone()


def _saved(p: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False).detach()


def _numbers(text: str) -> Iterator[str]:
    return (
        part
        for part in text.replace("tensor(", "").replace("[", " ").replace("]", " ").split(",")
        if _is_number(part)
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _gradient(p: Tensor) -> Tensor:
    """Of p**3 summed: 3 p**2."""
    with torch.enable_grad():
        return torch.autograd.grad((p**3).sum(), p)[0]


# --- reads through what was taken before the first step ---

KEPT_READS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "kept .data": lambda p: p.data,
    "kept .detach()": lambda p: p.detach(),
    "kept .data.view(-1)": lambda p: p.data.view(-1),
}

# --- reads through what the last forward made and kept; before the first one, of the parameter itself ---

MADE_READS: dict[str, Callable[[Tensor], Tensor]] = {
    "made in the forward: .T": lambda p: p.view(-1, 2).T,
    "made in the forward: torch.detach": torch.detach,
    "made in the forward: [1:]": lambda p: p[1:],
}

# --- writes: (run, name) changes the value ---

Write = Callable[[Run, str], Any]


def _no_grad(write: Callable[[Run, str], Any]) -> Write:
    def run(r: Run, n: str) -> None:
        with torch.no_grad():
            write(r, n)

    return run


def _new(p: Tensor) -> Tensor:
    """A value that depends on nothing but the shape, exact in bf16."""
    return torch.linspace(-0.5, 0.4375, 16).repeat(p.numel())[: p.numel()].view(p.shape).to(p.dtype)


def _assign_item(target: Tensor) -> None:
    target.view(-1)[0] = 0.5
    target[1] = 0.25


def _plus_equals(p: Tensor) -> None:
    p.data += 0.25


def _numpy_write(p: Tensor) -> None:
    p.detach().numpy()[1] = 0.25


def _inference_mode(r: Run, n: str) -> None:
    with torch.inference_mode():
        r.param(n).mul_(0.5)


WRITES: dict[str, Write] = {
    "mul_": _no_grad(lambda r, n: r.param(n).mul_(0.5)),
    "add_ through parameters()": _no_grad(
        lambda r, n: list(r.model.parameters())[r.names().index(n)].add_(0.25)
    ),
    "module attribute *=": _no_grad(lambda r, n: r.layer(n).weight.__imul__(0.5)),
    "param_groups": _no_grad(lambda r, n: r.groups()[0]["params"][r.names().index(n)].mul_(0.5)),
    "copy_": _no_grad(lambda r, n: r.param(n).copy_(_new(r.param(n)))),
    "fill_ of a row": _no_grad(lambda r, n: r.param(n)[0].fill_(0.5)),
    "setitem": _no_grad(lambda r, n: r.param(n).__setitem__(1, 0.25)),
    "setitem of a view": _no_grad(lambda r, n: r.param(n).view(-1).__setitem__(0, 0.5)),
    "view.mul_": _no_grad(lambda r, n: r.param(n).view(-1)[:5].mul_(0.5)),
    "T.add_": _no_grad(lambda r, n: r.layer(n).weight.T[0].add_(0.5)),
    "lerp_": _no_grad(lambda r, n: r.param(n).lerp_(_new(r.param(n)), 0.5)),
    "clamp_": _no_grad(lambda r, n: r.param(n).clamp_(-0.125, 0.125)),
    "foreach": _no_grad(lambda r, n: torch._foreach_mul_([r.layer(n).weight, r.layer(n).bias], 0.5)),
    "out=": _no_grad(lambda r, n: torch.mul(r.param(n), 0.5, out=r.param(n))),
    "index_fill_": _no_grad(lambda r, n: r.param(n).index_fill_(0, torch.tensor([1, 2]), 0.25)),
    "masked_fill_": _no_grad(lambda r, n: r.param(n).masked_fill_(r.param(n) > 0, 0.125)),
    "inference_mode": _inference_mode,
    ".data.mul_": lambda r, n: r.param(n).data.mul_(0.5),
    ".data.copy_": lambda r, n: r.param(n).data.copy_(_new(r.param(n))),
    ".data[0] =": lambda r, n: _assign_item(r.param(n).data),
    ".data +=": lambda r, n: _plus_equals(r.param(n)),
    ".data =": lambda r, n: setattr(r.param(n), "data", _new(r.param(n))),
    ".data.view(-1)[0] =": lambda r, n: r.param(n).data.view(-1).__setitem__(0, 0.5),
    ".detach().mul_": lambda r, n: r.param(n).detach().mul_(0.5),
    ".detach()[0] =": lambda r, n: _assign_item(r.param(n).detach()),
    "nn.init.constant_": lambda r, n: nn.init.constant_(r.param(n), 0.125),
    "nn.init.uniform_": lambda r, n: nn.init.uniform_(
        r.param(n), -0.5, 0.5, generator=torch.Generator().manual_seed(1)
    ),
    "load_state_dict": lambda r, n: r.model.load_state_dict(
        {**r.model.state_dict(), n: _new(r.param(n))}, strict=True
    ),
    "load_state_dict of the layer": lambda r, n: r.layer(n).load_state_dict(
        {n.split(".")[-1]: _new(r.param(n))}, strict=False
    ),
    "vector_to_parameters": lambda r, n: vector_to_parameters(
        _new(parameters_to_vector(r.layer(n).parameters())), r.layer(n).parameters()
    ),
}

# What scripts seldom mean: the optimizer goes on with the old parameter; memory shared with numpy or a state dict.
UNUSUAL_WRITES: dict[str, Write] = {
    "module.weight = nn.Parameter": lambda r, n: setattr(
        r.layer(n), n.split(".")[-1], nn.Parameter(_new(r.param(n)))
    ),
    "load_state_dict(assign=True)": lambda r, n: r.layer(n).load_state_dict(
        {n.split(".")[-1]: _new(r.param(n))}, strict=False, assign=True
    ),
    "numpy": lambda r, n: _numpy_write(r.param(n)),
    "state_dict().mul_": _no_grad(lambda r, n: r.model.state_dict()[n].mul_(0.5)),
    "kept .data": lambda r, n: r.held[n].mul_(0.5),
    "kept .data[0] =": lambda r, n: _assign_item(r.held[n]),
}
