"""The loops of the small runs, and the models that were made for them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.simulated.rare_scripts import Running
from tests.support.models import PartlyUnusedBlock, Stack, features, tokens
from tests.support.training import one_step

NUM_STEPS = 2


def train(engine: Any) -> list[float]:
    return [
        one_step(engine, features(seed, rows=2))
        for seed in range(NUM_STEPS * engine.gradient_accumulation_steps())
    ]


def train_on_tokens(engine: Any) -> list[float]:
    return [one_step(engine, tokens(seed)) for seed in range(NUM_STEPS)]


def script(engine: Any) -> list[float]:
    """Reads and writes gradients and weights between backward, step and the next forward."""
    seen = []
    params = list(engine.module.parameters())
    states = engine.optimizer.state_dict()
    for seed in range(2):
        engine.backward(engine(features(seed)))
        engine.backward(engine(features(seed + 7)))
        for place, param in enumerate(params[::2]):
            seen.append(float(param.grad.float().sum()))
            param.grad.copy_(param.grad * 0.7 + place)
        params[1].grad = params[1].grad.clone() * 2
        engine.step()
        with torch.no_grad():
            seen += [float(param.float().sum()) for param in reversed(params)]
            params[3].mul_(0.9)
            params[4].data = params[4].data * 1.1
            seen.append(float(engine(features(9))))
        engine.backward(engine(features(seed + 3)))
        engine.backward(engine(features(seed + 4)))
        engine.step()
        with torch.no_grad():
            params[-1].mul_(0.9)
            params[6].data = params[6].data * 1.1
        seen.append(float(engine.get_global_grad_norm()))
    engine.backward(engine(features(1)))
    engine.backward(engine(features(2)))
    engine.step()
    engine.optimizer.load_state_dict(states)
    return seen


def write_before_the_step(engine: Any) -> list[float]:
    """What the step updates first is being read ahead by then."""
    losses = train(engine)
    params = list(engine.module.parameters())
    for seed in range(NUM_STEPS):
        loss = engine(features(seed))
        engine.backward(loss)
        with torch.no_grad():
            for param in params[:3]:
                param.mul_(0.9)
        engine.step()
        losses.append(loss.item())
    return losses


def evaluate_on_two_streams(engine: Any) -> list[float]:
    """Trains on one stream and evaluates on two, which share nothing but the weights."""
    machine = Running.machine
    streams = [machine.new_stream(name) for name in ("one", "two")]
    losses = []
    for seed in range(NUM_STEPS):
        engine.backward(engine(features(seed)))
        engine.step()
        outputs = []
        with torch.no_grad():
            for number in range(4):
                with machine.launching_on(streams[number % 2]):
                    outputs.append(engine(features(number)))
        machine.synchronize()
        losses += [float(output) for output in outputs]
    return losses


def evaluate_up_to_the_end(engine: Any) -> list[float]:
    """The last evaluation is on a stream that nobody waits for, and the engine is closed."""
    losses = train(engine)
    machine = Running.machine
    with torch.no_grad(), machine.launching_on(machine.new_stream("side")):
        engine(features(1))
    return losses


def train_on_its_own_stream(engine: Any) -> list[float]:
    """Not on the default one, which is that of all other threads."""
    machine = Running.machine
    with machine.launching_on(machine.new_stream("own")):
        losses = train(engine)
    machine.synchronize()
    return losses


def train_beside_the_step(engine: Any) -> list[float]:
    """The second loss of each step has nothing to do with the model, and no gradient that the step waits for.

    The first is read, so that steps are over, and told, long before what was computed beside them.
    """
    machine = Running.machine
    beside = machine.new_stream("beside")
    losses = []
    for seed in range(NUM_STEPS + 2):
        engine.backward(loss := engine(features(seed)))
        engine.step()
        losses.append(loss.item())
        with machine.launching_on(beside):
            other = features(seed, rows=2).mul(2.0).requires_grad_().sum()
            engine.backward(other)
        engine.step()
    return losses


def evaluate_before_the_step(engine: Any) -> list[float]:
    """What is launched last before the step reads the weights, and no gradient waits for it."""
    seen = []
    for seed in range(NUM_STEPS):
        engine.backward(engine(features(seed)))
        with torch.no_grad():
            seen.append(engine(features(9)))
        engine.step()
    return [float(value) for value in seen]


def drop_gradients(engine: Any) -> list[float]:
    """Gradients that are dropped while they land, and others in their place."""
    losses = []
    for seed in range(NUM_STEPS):
        engine.backward(engine(features(seed + 5)))
        engine.optimizer.zero_grad()
        loss = engine(features(seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def fail_in_backward(engine: Any) -> list[float]:
    """Inputs that backward has fetched ahead go with their graph."""
    losses = train(engine)
    for number in (3, 2, 1):
        with pytest.raises(ZeroDivisionError):
            engine.backward(engine.module(features(number), fails_at=number))
        gc.collect()  # the error holds the graph
        engine.optimizer.zero_grad()
        losses += train(engine)
    return losses


def fail_beside_another_graph(engine: Any) -> list[float]:
    """The backward of a graph that is there already follows at once."""
    losses = train(engine)
    for number in (2, 1):
        one, other = engine.module(features(number), fails_at=number), engine.module(features(number + 3))
        with pytest.raises(ZeroDivisionError):
            engine.backward(one)
        del one
        gc.collect()  # the error holds the graph
        engine.optimizer.zero_grad()
        engine.backward(other)
        engine.step()
        losses.append(other.item())
    return losses


def train_in_turns(engine: Any) -> list[float]:
    """Several graphs on two streams, which share nothing but the weights and their gradients."""
    machine = Running.machine
    streams = [machine.new_stream(name) for name in ("one", "two")]
    losses = []
    for seed in range(NUM_STEPS):
        graphs = []
        for number, num_rows in ((0, 2), (1, 2), (1, 200), (0, 2)):
            with machine.launching_on(streams[number]):
                graphs.append((streams[number], engine(features(seed, rows=num_rows))))
        for stream, loss in graphs:
            with machine.launching_on(stream):
                engine.backward(loss)
                engine.step()
        losses += [loss.detach() for _, loss in graphs]
    machine.synchronize()
    return [float(loss) for loss in losses]


def torchs_way(engine: Any) -> list[float]:
    """Gradients outlive the step; a script changes them right after it, and adds to them."""
    module = engine.module
    optimizer = engine.optimizer
    seen = []
    for seed in range(NUM_STEPS):
        loss = module(features(seed))
        loss.backward()
        optimizer.step()
        for param in module.parameters():
            param.grad.copy_(param.grad * 0.5)
        module(features(seed + 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [float(loss) for loss in seen]


class FailingStack(Stack):
    """Backward ends in an error where it enters a block."""

    def forward(self, x: torch.Tensor, fails_at: int = -1) -> torch.Tensor:
        x = self.front(x.to(self.out_dtype()))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == fails_at:
                x.register_hook(_fail)
        return self.loss(x)


def _fail(_grad: torch.Tensor) -> None:
    raise ZeroDivisionError


class OnceWithoutGradient(Stack):
    """In every second forward its first block is frozen: only the micro batch before has gradients of it.

    Its weights are what backward reads last, for the gradient of the input, and no other gradient lands after that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.blocks[0].requires_grad_(self.num_calls % 2 == 1)
        x = super().run_blocks(x.detach().requires_grad_())
        self.blocks[0].requires_grad_(True)
        return x


def one_partly_unused() -> nn.Module:
    return Stack(PartlyUnusedBlock, num_blocks=1)


def many_partly_unused() -> nn.Module:
    """More of them in backward at once than there are leases."""
    return Stack(PartlyUnusedBlock)
