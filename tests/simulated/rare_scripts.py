"""What few scripts do, and some orders are there for: streams that change, interrupts, views that are kept."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offloadzero.errors import BudgetError, StateError
from offloadzero.memory.lanes import LaneTicket
from offloadzero.step import collect
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.leased_unit import RELEASED
from offloadzero.streaming.unit_leases import UnitLeases
from offloadzero.zero import safe_set_full_fp32_param
from tests.simulated.order import Order
from tests.support.models import NUM_BLOCKS, Block, PartlyUnusedBlock, Stack, features

NUM_STEPS = 2


class Running:
    """The device that runs, and the order of what it does."""

    machine: Any = None
    order: Order | None = None

    @classmethod
    def races(cls) -> list[str]:
        """So far."""
        return [] if cls.order is None else [str(race) for race in list(cls.order.races)]


@contextmanager
def on_stream(name: str) -> Iterator[None]:
    """Inside, the calling thread computes on a stream of its own."""
    machine = Running.machine
    with machine.launching_on(machine.new_stream(name)):
        yield


def train_unseen(engine: Any) -> list[float]:
    """Nobody asks for a loss before the end."""
    losses = []
    for seed in range(NUM_STEPS + 1):
        loss = engine(features(seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


# --- views that are kept ---


class KeepingLinear(nn.Linear):
    """Keeps a view of its weight from its forward."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.weight.view(-1)[7:]
        return super().forward(x)


class KeepingBlock(Block):
    """One of its modules keeps a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up = KeepingLinear(self.up.in_features, self.up.out_features)


def keeping_stack() -> nn.Module:
    """Its blocks keep views."""
    return Stack(KeepingBlock)


def read_what_is_kept(engine: Any) -> list[float]:
    """Right after the step."""
    seen = []
    for seed in range(NUM_STEPS):
        engine.backward(engine(features(seed)))
        engine.step()
        with torch.no_grad():
            seen += [block.up.kept.float().sum() for block in engine.module.blocks]
    return [float(value) for value in seen]


# --- streams that change ---


class TurningBlock(Block):
    """Its backward goes on upon another stream where it has half of its gradients, as autograd does behind a forward
    on two: what follows waits for the node before it, and not for what takes that node's gradients.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = F.gelu(self.up(self.norm(x)))
        after = self.down(between)
        if after.grad_fn is not None and between.grad_fn is not None:
            turn = _Turn()
            after.grad_fn.register_hook(turn.note)
            between.grad_fn.register_prehook(turn.take)
        return x + after


class _Turn:
    """From the stream of one node to another stream, for the next node."""

    def __init__(self) -> None:
        self._event: Any = None

    def note(self, _given: Any, taken: Any) -> None:
        self._event = Running.machine.current_stream.record()
        Running.machine.held.append(taken)

    def take(self, *grads: Any) -> None:
        machine = Running.machine
        machine.held.append(grads)  # with a real device autograd tells the allocator of the second stream
        one, two = machine.turning
        stream = two if machine.current_stream is one else one
        stream.wait_event(self._event)
        machine._here.stream = stream


def turning_stack() -> nn.Module:
    """Backward turns in each block."""
    return Stack(TurningBlock)


def ask_while_turning(engine: Any) -> list[float]:
    """Gradients that came on the one stream are read on the other, in backward."""
    seen: list[torch.Tensor] = []

    def read(block: nn.Module) -> None:
        grad = block.get_parameter("down.bias").grad
        if grad is not None:
            seen.append(grad * 2.0)

    for block in engine.module.blocks:
        block.up.bias.register_post_accumulate_grad_hook(lambda _, block=block: read(block))  # type: ignore[misc]
    losses = train_turning(engine)
    return [*losses, *(float(one.float().sum()) for one in seen)]


def train_turning(engine: Any) -> list[float]:
    """Backward takes two streams in turns; the forward after it waits for both."""
    machine = Running.machine
    machine.turning = machine.default_stream, machine.new_stream("other")
    machine.held = []
    losses = []
    for seed in range(NUM_STEPS):
        loss = engine(features(seed))
        engine.backward(loss, retain_graph=True)
        machine._here.stream = None
        one, two = machine.turning
        one.wait_event(two.record())
        two.wait_event(one.record())
        machine.held.clear()
        engine.step()
        losses.append(loss.detach())
        del loss
    return [float(loss) for loss in losses]


class BreakingBlock(Block):
    """Backward ends in an error when it has half of the block's gradients, if it is told to."""

    breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = F.gelu(self.up(self.norm(x)))
        if self.breaks and between.requires_grad:
            between.register_hook(_break)
        return x + self.down(between)


def _break(_grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def breaking_stack() -> nn.Module:
    """Backward can break."""
    return Stack(BreakingBlock)


def break_on_another_stream(engine: Any) -> list[float]:
    """What a backward has left in a lease when it broke comes before what another stream puts there."""
    last = engine.module.blocks[-1]
    losses = []
    for seed in range(NUM_STEPS):
        last.breaks = True
        with on_stream(f"breaks {seed}"):
            loss = engine(features(seed))
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
        engine.optimizer.zero_grad()
        last.breaks = False
        with on_stream(f"goes on {seed}"):
            loss = engine(features(seed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    Running.machine.synchronize()
    return [float(loss) for loss in losses]


# --- gradients that do not come ---


class Shift(nn.Module):
    """Adds to its input: no gradient needs its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, 601))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.shift.dtype).sum() * self.shift).float().mean()


class TailBlock(Block):
    """Has more parameters that take no part than fit into a chunk of its update."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Parameter(torch.ones(6001))


def tailed_stack() -> nn.Module:
    """An update of which a part comes to no chunk."""
    return Stack(TailBlock, num_blocks=2)


def stack_of_chunks() -> nn.Module:
    """Several chunks of the first record are read ahead."""
    stack = tailed_stack()
    for name, param in stack.named_parameters():
        param.requires_grad_(name.startswith("blocks"))
    return stack


class InTurns(nn.Module):
    """Two parts, of which each forward uses the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Shift() for _ in range(2))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        loss: torch.Tensor = self.parts[self.num_calls % 2](x)
        return loss


def use_a_graph_from_before_the_step(engine: Any) -> list[float]:
    """Its gradients come while the update may still read those of the step."""
    losses = []
    for seed in range(NUM_STEPS):
        graphs = [engine(features(2 * seed + number)) for number in range(2)]
        for loss in graphs:
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    return [float(loss) for loss in losses]


def stack_of_frozen_weights() -> nn.Module:
    """Only biases train, beside frozen weights that backward needs."""
    model = Stack()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith(("up.bias", "down.bias")))
    return model


@contextmanager
def no_room_in_backward() -> Iterator[None]:
    """Inside, backward finds no lease for a weight."""
    touch = Executor.touch

    def touching(executor: Executor, index: int, **given: bool) -> None:
        is_away = executor.units[index].residency is RELEASED
        if is_away and sys._getframe(1).f_code.co_name == "load":
            raise BudgetError("no room")
        touch(executor, index, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "touch", touching)
        yield


def use_old_graphs_without_room(engine: Any) -> list[float]:
    """Weights are read from their homes, while an update writes what is beside them."""
    with no_room_in_backward():
        return use_a_graph_from_before_the_step(engine)


class LateStack(Stack):
    """In every second forward the output computes without gradients. The blocks never get all of theirs, so nothing
    lands before backward is over, and then what has got none lands first.
    """

    def __init__(self) -> None:
        super().__init__(PartlyUnusedBlock, num_blocks=2)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls % 2 == 1:
            return super().forward(x)
        with torch.no_grad():
            x = self.front(x.to(self.out_dtype()))
        x = self.run_blocks(x)
        with torch.no_grad():
            unused = self.loss(x)
        return x.float().pow(2).mean() + unused


# --- interrupts ---


def _interrupting(
    method: Callable[..., Any], function: Callable[..., Any], *, each: int
) -> Callable[..., Any]:
    """`method`, which an interrupt meets at every so many calls from `function`."""
    num_calls, code = 0, inspect.unwrap(function).__code__

    def interrupted(*args: Any) -> Any:
        nonlocal num_calls
        if sys._getframe(1).f_code is code:
            num_calls += 1
            if num_calls % each == 0:
                raise KeyboardInterrupt
        return method(*args)

    return interrupted


def interrupt_lease_waits(engine: Any) -> list[float]:
    """Backwards are interrupted where they wait for a lease; the next one takes the same.

    Each of them, so that nothing is ordered by a wait: the lease that is given back comes to the front, whatever else
    is free by then.
    """
    num_interrupts = 0
    with pytest.MonkeyPatch.context() as patch:
        ordering = _interrupting(
            collect.order_compute_after, collect.GradientCollector._take_device_lease, each=1
        )
        patch.setattr(collect, "order_compute_after", ordering)
        for seed in range(3):
            try:
                engine.backward(engine(features(seed)))
            except KeyboardInterrupt:
                num_interrupts += 1
            engine.optimizer.zero_grad()
    assert num_interrupts == 3, "a backward has not waited for a lease"
    return train_unseen(engine)


def interrupt_steps(engine: Any) -> list[float]:
    """A step that is interrupted where it waits for a fetch was not taken, and can be."""
    losses, num_interrupts, every = [], 0, tuple(range(NUM_BLOCKS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneTicket, "wait", _interrupting(LaneTicket.wait, UnitLeases.wait_arrived, each=2))
        for seed in range(2 * NUM_STEPS):
            loss = engine(features(seed), use=every)
            engine.backward(loss)
            with torch.no_grad():
                for use in (every, every[:1]):  # the second one is cut off: what follows was fetched ahead
                    engine(features(seed), use=use)
            while True:
                try:
                    engine.step()
                    break
                except KeyboardInterrupt:
                    num_interrupts += 1
            losses.append(loss.detach())
    assert num_interrupts, "no step has waited"
    return [float(loss) for loss in losses]


def break_half_a_step(engine: Any) -> list[float]:
    """A backward that updates the weights breaks: what was applied is known when its gradients are dropped."""
    losses = train_unseen(engine)
    engine.module.blocks[0].breaks = True
    with pytest.raises(ZeroDivisionError):
        engine.backward(engine(features(7)))
    with pytest.raises(StateError) as refused:
        engine.optimizer.zero_grad()
    return [*losses, *map(float, str(refused.value).encode())]


# --- what a script asks right after the step ---


def ask_for_norms(engine: Any) -> list[float]:
    """While the gradients land."""
    norms = []
    for seed in range(NUM_STEPS):
        engine.backward(engine(features(seed)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def ask_for_scales(engine: Any) -> list[float]:
    """While the step is decided that changes it, by an overflow say."""
    seen = []
    for seed in range(2 * NUM_STEPS):
        engine.backward(engine(features(seed)))
        engine.step()
        seen += [engine.optimizer.loss_scale, float(engine.skipped_steps)]
    return seen


# --- what was begun for nothing ---


def skip_blocks(engine: Any) -> list[float]:
    """Nobody waits for the last update of a unit that the next forward does without."""
    losses = []
    for seed in range(2 * NUM_STEPS):
        use = (0, 1, 2, 3) if seed % 2 == 0 else (3,)
        loss = engine(features(seed), use=use)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def drop_graphs(engine: Any) -> list[float]:
    """Inputs that are on their way home when nobody needs them any more; what was taken for them is enough for good."""
    losses = []
    for seed in range(3 * NUM_STEPS):
        loss = engine(features(seed))
        losses.append(loss.detach())
        del loss
    reserved = engine._runtime.activations.reserved()
    return [float(loss) for loss in losses] + [float(num_bytes) for num_bytes in reserved.values()]


def edit_before_the_step(engine: Any) -> list[float]:
    """States that backward has read ahead are read again where a script has written since."""
    losses = []
    first = next(param for param in engine.module.parameters() if param.requires_grad)
    for seed in range(NUM_STEPS + 1):
        loss = engine(features(seed))
        engine.backward(loss)
        with torch.no_grad():
            first.mul_(0.9)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def step_twice(engine: Any) -> list[float]:
    """Two steps with one gradient: no forward between them waits for what the first one writes."""
    losses = []
    for seed in range(NUM_STEPS):
        loss = engine.module(features(seed))
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def edit_on_another_stream(engine: Any) -> list[float]:
    """Hooks edit gradients, and read them, on a stream of their own that is joined after backward."""
    machine = Running.machine
    side = machine.new_stream("side")
    seen: list[torch.Tensor] = []

    def hook(param: torch.Tensor) -> None:
        side.wait_event(machine.current_stream.record())
        with machine.launching_on(side):
            assert param.grad is not None
            param.grad.mul_(0.5)
            seen.append(param.grad * 2.0)

    for block in engine.module.blocks:
        for param in (block.down.weight, block.down.bias):
            param.register_post_accumulate_grad_hook(hook)
    losses = []
    for seed in range(NUM_STEPS):
        loss = engine(features(seed))
        engine.backward(loss)
        machine.current_stream.wait_event(side.record())
        engine.step()
        losses.append(loss.detach())
    return [float(value.float().sum()) for value in (*losses, *seen)]


def write_from_the_host(engine: Any) -> list[float]:
    """While an evaluation reads the weights; nothing that is written was computed on the device."""
    losses = []
    params = list(engine.module.parameters())
    for seed in range(NUM_STEPS):
        with torch.no_grad():
            losses.append(engine(features(seed)))
        for number, param in enumerate(params):
            safe_set_full_fp32_param(param, torch.full(param.shape, (number + seed) / 64))
    return [float(loss) for loss in losses]


# --- the end ---


def restore(engine: Any) -> list[float]:
    """The model becomes an ordinary one while the last updates run."""
    losses = train_unseen(engine)
    engine.restore_model()
    return losses
