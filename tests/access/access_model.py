"""The model of the access table: places where scripts come by, a plain optimizer for it, and a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
NUM_LAYERS = 4
NUM_STEPS = 4
OPTIONS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


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


def nothing(_: Tensor) -> None:
    """Makes nothing."""


class Layer(nn.Module):
    """Residual; the probe is visited in its forward and in a hook of its backward, before its own gradients."""

    def __init__(self, number: int, probe: Probe) -> None:
        super().__init__()
        self.number, self.probe = number, probe
        self.make: Callable[[Tensor], Any] = nothing  # what the forward makes of each parameter, and keeps
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
