"""Every way to a weight that torch offers, at every moment, wherever the weight lives: against plain PyTorch.

A cell is `equal` (the outcome of the plain run), `torch's error` (plain torch raises there too), `refused` (an
OffloadError at that line), or it is wrong: another number, no error where torch has one, an error without a name.
`python -m tests.parameters.access_table` prints the table as Markdown.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import offloadzero
from offloadzero import OffloadError, zero
from offloadzero.parameters.weight import AwayParameter
from tests.support.training import Config

WIDTH = 8
NUM_LAYERS = 4
NUM_STEPS = 4
WRITE_STEP = 1
OPTIONS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}

# "built": spilled by zero.Init, and not offloaded; torch's own optimizer trains it.
STATES = ("resident", "away", "present", "built")
# Where a script gets to a weight, and which layers' it takes there. Layer 2 is the one that is running.
PLACES: dict[str, tuple[int, ...]] = {
    "before the forward": (0, 2),
    "forward: own": (2,),
    "forward: own, after its use": (2,),
    "forward: earlier layer": (0,),
    "forward: later layer": (3,),
    "before backward": (1, 3),
    "hook: own": (2,),
    "hook: earlier layer": (0,),
    "hook: later layer": (3,),
    "after backward": (0, 3),
    "after step": (1, 2),
}


class Probe:
    """Runs what is planned for a place; nothing while it runs (a read may call a layer)."""

    def __init__(self) -> None:
        self.plan: dict[str, Callable[[str], None]] = {}
        self._busy = False

    def visit(self, place: str) -> None:
        if self._busy or place not in self.plan:
            return
        self._busy = True
        try:
            self.plan[place](place)
        finally:
            self._busy = False


def _nothing(_: Tensor) -> None:
    """Makes nothing."""


class Layer(nn.Module):
    """Residual; the probe is visited in its forward and in a hook of its backward, before its own gradients."""

    def __init__(self, number: int, probe: Probe) -> None:
        super().__init__()
        self.number, self.probe = number, probe
        self.make: Callable[[Tensor], Any] = _nothing  # what the forward makes of each parameter, and keeps
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        self.made = {name: self.make(p) for name, p in self.named_parameters()}
        self._visit("forward")
        out = x + torch.tanh(nn.functional.linear(x, self.weight, self.bias))
        if self.number == 2:
            self.probe.visit("forward: own, after its use")
        if out.requires_grad:
            out.register_hook(lambda _: self._visit("hook"))
        return out

    def _visit(self, where: str) -> None:
        if self.number == 2:
            for what in ("own", "earlier layer", "later layer"):
                self.probe.visit(f"{where}: {what}")


class Net(nn.Module):
    """forward(x) is the loss."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, probe) for number in range(NUM_LAYERS))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.out(x).float() - 1).pow(2).mean()


def inputs(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


class PlainBf16AdamW(torch.optim.AdamW):
    """bf16 parameters, fp32 masters: elements that a script changed become the master's."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._params]
        for p in self._params:
            p.data = p.data.bfloat16()
        self._written = [p.detach().clone() for p in self._params]
        super().__init__(self._masters, **OPTIONS)

    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for p, master, written in zip(self._params, self._masters, self._written, strict=True):
            changed = p.detach() != written
            master.data[changed] = p.detach().float()[changed]
            master.grad = None if p.grad is None else p.grad.float()
        super().step()
        for i, (p, master) in enumerate(zip(self._params, self._masters, strict=True)):
            p.data.copy_(master.data)
            self._written[i] = p.detach().clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self._params:
            p.grad = None
        super().zero_grad(set_to_none)

    def groups_of_scripts(self) -> list[dict[str, Any]]:
        return [{"params": self._params}]


@dataclass
class Run:
    """A model in training under one state, and what is read on the way."""

    model: Net
    optimizer: Any
    probe: Probe
    dtype: torch.dtype
    held: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def groups(self) -> list[dict[str, Any]]:
        made = getattr(self.optimizer, "groups_of_scripts", None)
        return made() if made else self.optimizer.param_groups

    def param(self, name: str) -> nn.Parameter:
        return dict(self.model.named_parameters())[name]

    def layer(self, name: str) -> Layer:
        return self.model.layers[int(name.split(".")[1])]

    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def train(self, present: bool, after: Callable[[int], None] | None = None) -> None:
        """The plain loop, with a visit at every place."""
        for step in range(NUM_STEPS):
            self.step = step
            if present:  # what an evaluation leaves on the device is there
                self.evaluate()
            self.probe.visit("before the forward")
            loss = self.model(inputs(step, self.dtype))
            self.probe.visit("before backward")
            loss.backward()
            self.probe.visit("after backward")
            self.optimizer.step()
            if present:
                self.evaluate()
            self.probe.visit("after step")
            if after is not None:
                after(step)
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    @torch.no_grad()
    def evaluate(self) -> None:
        plan, self.probe.plan = self.probe.plan, {}
        self.model(inputs(99, self.dtype))
        self.probe.plan = plan


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


# Refusals that name no parameter: of a numpy array that cannot be written, and of an argument.
OTHER_REFUSALS = {
    "numpy": "ValueError: assignment destination is read-only",
    "load_state_dict(assign=True)": "ConfigError: load_state_dict(assign)",
}

# --- running ---


def make_config(state: str, dtype: torch.dtype) -> Config:
    """Everything on the device; homes in host memory and one lease; or those and leases for all."""
    own: Config = {"device": "cpu", "units": {"min_leaf_elements": 16}}
    zero: Config = {"stage": 1}
    if state != "resident":
        homes = {"device": "cpu"}
        zero = {"stage": 3, "offload_param": homes, "offload_optimizer": homes}
        own["poison_released_leases"] = True
        if state == "away":
            zero["stage3_max_live_parameters"] = 1
        else:
            own["budgets"] = {"device": "64MiB"}
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "offloadzero": own,
    }
    return {**config, "bf16": {"enabled": True}} if dtype == torch.bfloat16 else config


def start(state: str, dtype: torch.dtype) -> Run:
    """`state` "plain" is torch alone."""
    torch.manual_seed(0)
    probe = Probe()
    model: Any = Net(probe)
    optimizer: Any
    if state == "plain" and dtype == torch.bfloat16:
        optimizer = PlainBf16AdamW(model.parameters())
    elif state == "built":
        with patch.object(zero, "MIN_SPILL_ELEMENTS", 1):
            zero.Init(module=model)
        assert all(isinstance(p, AwayParameter) for p in model.parameters())
        made = torch.optim.AdamW if dtype == torch.float32 else PlainBf16AdamW
        optimizer = made(model.parameters(), **(OPTIONS if dtype == torch.float32 else {}))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        if state != "plain":
            model, optimizer = offloadzero.offload(model, optimizer, make_config(state, dtype))
    return Run(model, optimizer, probe, dtype)


@dataclass(frozen=True)
class Failure:
    """What was raised."""

    error: BaseException

    @property
    def is_named(self) -> bool:
        """An error of ours that says which parameter, or the unit it is in."""
        named = re.search(r"\b(layers|Layer|Linear)\.", str(self.error))
        return isinstance(self.error, OffloadError) and named is not None

    def __str__(self) -> str:
        text = " ".join(str(self.error).split())
        return f"{type(self.error).__name__}: {text[:160]}"


@dataclass
class Cell:
    """The verdict on one way at one place."""

    verdict: str  # equal, torch's error, refused, or a sentence about what is wrong
    message: str = ""

    @property
    def is_right(self) -> bool:
        return self.verdict in ("equal", "torch's error", "refused")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """A step moves a weight by about 0.01; between two exact updates only the last bit may differ."""
    return {"rtol": 2e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}


def same(one: Any, other: Any, dtype: torch.dtype) -> bool:
    """Equal up to rounding, recursively."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.allclose(one.detach().double(), other.detach().double(), **tolerance(dtype))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k], dtype) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b, dtype) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return (
            abs(one - other) <= 1e-3 * abs(other) + 1e-6
            if dtype == torch.float32
            else abs(one - other) < 0.01
        )
    return bool(one == other)


Seen = dict[str, list[Any]]  # place -> what was read there, or a Failure


def run_reads(name: str, state: str, dtype: torch.dtype) -> Seen:
    """Read at every place in every step. A read that raises does not end the run."""
    r = start(state, dtype)
    seen: Seen = {place: [] for place in PLACES}
    read = READS.get(name) or (_made if name in MADE_READS else lambda run, parameter: run.held[parameter])
    for layer in r.model.layers:
        layer.make = MADE_READS.get(name, _nothing)
    if name in KEPT_READS:
        r.held = {parameter: KEPT_READS[name](p) for parameter, p in r.model.named_parameters()}

    def act(place: str) -> None:
        for number in PLACES[place]:
            for kind in ("weight", "bias"):
                try:
                    value = read(r, f"layers.{number}.{kind}")
                    value = value.detach().clone() if isinstance(value, Tensor) else value
                except Exception as error:  # what it is is judged below
                    value = Failure(error)
                seen[place].append(value)

    r.probe.plan = dict.fromkeys(PLACES, act)
    try:
        r.train(state == "present")
        seen["training"] = [r.losses, _weights(r)]
    except Exception as error:
        seen["training"] = [Failure(error)]
    finally:
        _close(r)
    return seen


def _made(r: Run, name: str) -> Tensor:
    layer, kind = r.layer(name), name.split(".")[-1]
    if not hasattr(layer, "made"):
        return layer.make(r.param(name))
    return layer.made[kind].clone()


def _weights(r: Run) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in r.model.state_dict().items()}


def _close(r: Run) -> None:
    if hasattr(r.optimizer, "close"):
        r.optimizer.close()


@cache
def plain_reads(name: str, dtype: torch.dtype) -> Seen:
    return run_reads(name, "plain", dtype)


def judge_reads(name: str, state: str, dtype: torch.dtype) -> dict[str, Cell]:
    """A cell for every place, and one for the training itself, which no read may disturb."""
    expected = plain_reads(name, dtype)
    seen = run_reads(name, state, dtype)
    return {place: _judge(seen[place], expected[place], dtype) for place in expected}


def _judge(seen: list[Any], expected: list[Any], dtype: torch.dtype) -> Cell:
    failures = [value for value in seen if isinstance(value, Failure)]
    unnamed = [failure for failure in failures if not failure.is_named]
    pairs = list(zip(seen, expected, strict=False))
    if any(isinstance(value, Failure) for value in expected):
        if len(failures) < len([v for v in expected if isinstance(v, Failure)]):
            return Cell("no error where torch has one")
        return Cell("torch's error")
    if unnamed:
        return Cell("raises", str(unnamed[0]))
    for value, wanted in pairs:
        if not isinstance(value, Failure) and not same(value, wanted, dtype):
            return Cell("another value", _difference(value, wanted))
    return Cell("refused", str(failures[0])) if failures else Cell("equal")


def _difference(value: Any, wanted: Any) -> str:
    if isinstance(value, Tensor) and isinstance(wanted, Tensor) and value.shape == wanted.shape:
        if not value.isfinite().all():
            return "NaN"
        return f"largest difference {float((value.double() - wanted.double()).abs().max()):.2g}"
    if isinstance(value, dict):
        return ", ".join(k for k in value if not value[k].isfinite().all()) or "weights"
    return f"{str(value)[:60]} for {str(wanted)[:60]}"


@dataclass
class Written:
    """Losses, weights right after the write's step (if they were looked at), and weights at the end."""

    losses: list[float] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)
    failure: Failure | None = None


def run_writes(
    state: str, dtype: torch.dtype, write: Write, places: Iterable[str], *, reads_back: bool
) -> Written:
    """Write once at each of `places`, train on; `reads_back`: state_dict() right after that step."""
    r = start(state, dtype)
    r.held = {name: p.data for name, p in r.model.named_parameters()}
    written = Written()

    def act(place: str) -> None:
        if r.step == WRITE_STEP:
            for number in PLACES[place]:
                write(r, f"layers.{number}.weight")

    def after(step: int) -> None:
        if reads_back and step == WRITE_STEP:
            written.after = _weights(r)

    r.probe.plan = dict.fromkeys(places, act)
    try:
        r.train(state == "present", after)
        written.losses, written.end = r.losses, _weights(r)
    except Exception as error:
        written.failure = Failure(error)
    finally:
        _close(r)
    return written


def _write(name: str) -> Write:
    return WRITES.get(name) or UNUSUAL_WRITES[name]


@cache
def plain_writes(name: str, dtype: torch.dtype, places: tuple[str, ...], reads_back: bool) -> Written:
    return run_writes("plain", dtype, _write(name), places, reads_back=reads_back)


def judge_writes(name: str, state: str, dtype: torch.dtype) -> dict[str, Cell]:
    """A cell for every place. Places that torch takes are first tried in one run; each on its own if that differs."""
    taken = tuple(p for p in PLACES if plain_writes(name, dtype, (p,), True).failure is None)
    together = (judge_write(name, state, dtype, taken, reads_back=reads_back) for reads_back in (False, True))
    if taken and all(cell.verdict == "equal" for cell in together):
        cells = dict.fromkeys(taken, Cell("equal"))
    else:
        cells = {place: _judge_alone(name, state, dtype, place) for place in taken}
    for place in PLACES:
        if place not in taken:
            cells[place] = judge_write(name, state, dtype, (place,), reads_back=True)
    return {place: cells[place] for place in PLACES}


def _judge_alone(name: str, state: str, dtype: torch.dtype, place: str) -> Cell:
    cell = judge_write(name, state, dtype, (place,), reads_back=True)
    return cell if not cell.is_right else judge_write(name, state, dtype, (place,), reads_back=False)


def judge_write(
    name: str, state: str, dtype: torch.dtype, places: tuple[str, ...], *, reads_back: bool
) -> Cell:
    expected = plain_writes(name, dtype, places, reads_back)
    found = run_writes(state, dtype, _write(name), places, reads_back=reads_back)
    if found.failure is not None:
        if found.failure.is_named or OTHER_REFUSALS.get(name, "\0") in str(found.failure):
            return Cell("refused", str(found.failure))
        same_error = expected.failure is not None and isinstance(
            found.failure.error, type(expected.failure.error)
        )
        return Cell("torch's error") if same_error else Cell("raises", str(found.failure))
    if expected.failure is not None:
        return Cell("no error where torch has one", str(expected.failure))
    if not same(found.losses, expected.losses, dtype):
        return Cell("another loss", _difference(found.losses, expected.losses))
    for what, value, wanted in (
        ("another value after the step", found.after, expected.after),
        ("another value at the end", found.end, expected.end),
    ):
        for parameter in wanted:
            if not same(value[parameter], wanted[parameter], dtype):
                return Cell(what, f"{parameter}: {_difference(value[parameter], wanted[parameter])}")
    return Cell("equal")


# --- the table ---


def rows(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[str], dict[str, Cell]]]]:
    """Every way with what judges it under a state."""
    for name in (*READS, *KEPT_READS, *MADE_READS):
        yield f"read: {name}", lambda state, name=name: judge_reads(name, state, dtype)
    for name in (*WRITES, *UNUSUAL_WRITES):
        if (name, dtype) != ("numpy", torch.bfloat16):  # numpy has no bf16
            yield f"write: {name}", lambda state, name=name: judge_writes(name, state, dtype)


def markdown(dtype: torch.dtype, states: Iterable[str] = STATES) -> str:
    """The table, then what is refused and what is wrong with the messages."""
    lines, notes = [], []
    counts: dict[str, int] = {}
    for state in states:
        lines += ["", f"**{state}, {str(dtype).removeprefix('torch.')}**", ""]
        lines += [f"| | {' | '.join(PLACES)} |", "| --- " * (len(PLACES) + 1) + "|"]
        for name, judge in rows(dtype):
            cells = judge(state)
            shown = [c.verdict if c.is_right else f"**{c.verdict}**" for c in (cells[p] for p in PLACES)]
            lines.append(f"| {name} | {' | '.join(shown)} |")
            for place, cell in cells.items():
                kind = cell.verdict if cell.is_right else "wrong"
                counts[kind] = counts.get(kind, 0) + 1
                if cell.message:
                    notes.append(f"- {state}, {name}, {place}: {cell.verdict}: {cell.message}")
    total = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    return "\n".join([f"{sum(counts.values())} cells: {total}.", *lines, "", *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(markdown(getattr(torch, args.dtype), args.states))


if __name__ == "__main__":
    main()
