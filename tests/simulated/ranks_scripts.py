"""What several ranks do together on the simulated device: scripts, each called on every rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from offloadzero.errors import NonFiniteError
from offloadzero.zero import (
    GatheredParameters,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from tests.simulated.rare_scripts import no_room_in_backward
from tests.support.faults import delays
from tests.support.models import Stack, features
from tests.support.sharded import micro_batch, said_of

NUM_STEPS = 2
LATE_S = 0.3  # of what is known too late, where nothing waits


class Here(NamedTuple):
    """Where a script runs."""

    rank: int
    world_size: int
    directory: Path  # the same on all ranks


Script = Callable[[Any, Here], list[float]]


class EndedError(Exception):
    """A script ends with this in place of numbers: what it was told."""


def inputs(number: int, here: Here) -> Tensor:
    """Those of this rank's micro batch: (2, WIDTH)."""
    return features(number * here.world_size + here.rank, rows=2)


def floats(values: list[Tensor]) -> list[float]:
    """What was seen, read when all is launched."""
    return [float(value) for value in values]


def train(engine: Any, here: Here) -> list[float]:
    losses = []
    for number in range(NUM_STEPS * engine.gradient_accumulation_steps()):
        loss = engine(inputs(number, here))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return floats(losses)


def use_a_graph_from_before_the_step(engine: Any, here: Here) -> list[float]:
    """Its gradients come while the update may still read those of the step."""
    losses = []
    for number in range(NUM_STEPS):
        graphs = [engine(inputs(2 * number + each, here)) for each in range(2)]
        for loss in graphs:
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    return floats(losses)


def step_again(engine: Any, here: Here) -> list[float]:
    """Two steps with the same gradients, as a plain loop may take them: between them no one waits for new weights."""
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runtime.coordinator._window, "_keeps_after_step", True)
        for number in range(NUM_STEPS):
            loss = engine(inputs(number, here))
            engine.backward(loss)
            engine.step()
            engine.step()
            losses.append(loss.detach())
            engine.zero_grad()
    return floats(losses)


def use_old_graphs_without_room(engine: Any, here: Here) -> list[float]:
    """Backward finds no lease for a weight and gathers it into memory of its own."""
    with no_room_in_backward():
        return use_a_graph_from_before_the_step(engine, here)


def read_states(engine: Any, here: Here) -> list[float]:
    """Of all ranks, right after the step."""
    losses = train(engine, here)
    for name in ("blocks.0.up.weight", "out.bias"):
        state = safe_get_full_optimizer_state(engine.module.get_parameter(name), "exp_avg")
        assert state is not None
        losses.append(float(state.double().sum()))
    return losses


def edit_gradients(engine: Any, here: Here) -> list[float]:
    """They are read, written, scaled and measured as they come home."""
    seen = []
    for number in range(NUM_STEPS):
        loss = engine(inputs(number, here))
        engine.backward(loss)
        _edit_gradient(engine.module, engine.module.blocks[0].up.weight)
        seen.append(loss.detach())
        engine.step()
    return floats(seen)


def _edit_gradient(model: nn.Module, param: nn.Parameter) -> None:
    if param.grad is not None:
        param.grad.add_(param.grad.abs().max(), alpha=1e-2)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def drop_gradients(engine: Any, here: Here) -> list[float]:
    """They are dropped while they land, and others come to their place."""
    losses = []
    for number in range(NUM_STEPS):
        engine.backward(engine(inputs(number + 5, here)))
        engine.optimizer.zero_grad()
        loss = engine(inputs(number, here))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return floats(losses)


def trained_at_the_end() -> nn.Module:
    """Nothing before the last block waits for an update."""
    model = Stack().requires_grad_(False)
    model.blocks[-1].requires_grad_(True)
    return model


def notice_a_refused_step(engine: Any, here: Here) -> list[float]:
    """How many blocks the forward behind it has entered when the script hears of it, on each rank the same."""
    entered: list[object] = []
    for block in engine.module.blocks:
        block.register_forward_pre_hook(lambda *_: entered.append(None))
    losses = train(engine, here)
    with delays("landing.measure", LATE_S):
        engine.backward(engine(inputs(7, here)) * float("inf"))
        entered.clear()
        with pytest.raises(NonFiniteError):  # noqa: PT012 (either of them may be where it is told)
            engine.step()
            engine(inputs(8, here))
    num_entered = len(entered)
    engine.optimizer.zero_grad()
    return [*losses, float(num_entered), *train(engine, here)]


def close_beside_one_that_failed(engine: Any, here: Here) -> list[float]:
    """The second rank fails, and the first one, whose updates still run, is told so where it closes its engine."""
    train(engine, here)
    is_applied = here.directory / "the first rank's last step is applied"
    engine.backward(engine(inputs(9, here)))
    with delays("update.compute", LATE_S if here.rank == 0 else 0.0):
        engine.step()
        engine.get_global_grad_norm()  # from here on this rank needs nothing of the other one
        if here.rank == 0:
            is_applied.touch()
            while engine._runtime._lost_to_another() is None:
                time.sleep(0.01)
            raise EndedError(said_of(engine.close))
        while not is_applied.exists():
            time.sleep(0.01)
        engine.synchronize()
        raise EndedError("it has failed")


# --- scripts that write, evaluate, save and load ---

ACTS = ("", "assign", "frozen", "master", "state", "load", "checkpoint", "zero_grad", "gather")


class Acts(NamedTuple):
    """What the script of OddModel does beside training, by step."""

    behind: tuple[str, ...]  # each step: one of ACTS
    evaluates: tuple[bool, ...]  # between forward and backward
    edits: tuple[bool, ...]  # a weight and gradients between backward and step

    @classmethod
    def draw(cls, seed: int, *, num_steps: int = 3) -> Acts:
        """Those of a random script."""
        draw = random.Random(seed)
        steps = range(num_steps)
        return cls(
            tuple(draw.choice(ACTS) for _ in steps),
            tuple(draw.random() < 0.4 for _ in steps),
            tuple(draw.random() < 0.3 for _ in steps),
        )

    def __call__(self, engine: Any, here: Here) -> list[float]:
        """Run the script."""
        model, seen = engine.module, []
        saved: dict[str, Tensor] = {}
        for step, (act, evaluates, edits) in enumerate(zip(*self, strict=True)):
            for micro in range(engine.gradient_accumulation_steps()):
                loss = engine(micro_batch(10 * step + micro, here.rank, here.world_size))
                if evaluates:
                    seen.append(_evaluate(engine, 100 + step, here))
                engine.backward(loss)
                if edits:
                    with torch.no_grad():
                        model.blocks[0].up.weight.mul_(0.99)
                    _edit_gradient(model, model.wide.weight)
                engine.step()
                seen.append(loss.detach())
            with torch.no_grad():
                _do(act, engine, saved, here)
            if evaluates:
                seen.append(_evaluate(engine, 200 + step, here))
        return floats(seen)


def _evaluate(engine: Any, number: int, here: Here) -> Tensor:
    with torch.no_grad():
        loss: Tensor = engine(micro_batch(number, here.rank, here.world_size))
        return loss


def _do(act: str, engine: Any, saved: dict[str, Tensor], here: Here) -> None:
    model = engine.module
    if act == "assign":
        model.wide.weight.data = model.wide.weight.data * 0.98
    elif act == "frozen":
        model.blocks[1].up.weight.mul_(0.97)
    elif act == "master":
        safe_set_full_fp32_param(model.emb.weight, torch.full(model.emb.weight.shape, 0.01))
    elif act == "state":
        weight = model.narrow.weight
        safe_set_full_optimizer_state(weight, torch.full(weight.shape, 0.001), "exp_avg")
    elif act == "load" and saved:
        model.load_state_dict(saved)
    elif act == "load":
        saved.update({name: value.clone() for name, value in model.state_dict().items()})
    elif act == "checkpoint":
        engine.save_checkpoint(str(here.directory), tag="a")
        engine.load_checkpoint(str(here.directory), tag="a")
    elif act == "zero_grad":
        engine.backward(engine(micro_batch(7, here.rank, here.world_size)))
        engine.optimizer.zero_grad()
    elif act == "gather":
        with GatheredParameters([model.emb.weight, model.scale, model.wide.weight], modifier_rank=1):
            model.emb.weight.mul_(0.9 + 0.05 * here.rank)
            model.scale.add_(here.rank)
            _evaluate(engine, 300, here)
            model.wide.weight.mul_(0.9 + 0.05 * here.rank)
