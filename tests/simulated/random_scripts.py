"""Scripts drawn from a number: what a script may do between, before and after the calls that train.

The model and its placement are those of tests/support/schedules.py. The plain form, `offload()`, keeps gradients until
they are dropped, so anything may come between a backward and the step: an evaluation, gradients that are dropped or
clipped or looked at, a backward that ends in an error, a second loss.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import offloadzero
from tests.support.schedules import BlockForm, RandomModel, _draw_block, _draw_placement, token_ids
from tests.support.training import Config, Outcome

NUM_STEPS = 3


class ScriptError(Exception):
    """Raised by a script's own hook."""


class ScriptModel(RandomModel):
    """forward(ids, blocks in use, the block behind which backward fails)."""

    def forward(self, ids: Tensor, use: Sequence[int], fails_at: int = -1) -> Tensor:
        if fails_at < 0:
            return super().forward(ids, use)
        handle = self.blocks[fails_at].register_forward_hook(_with_failing_gradient)
        try:
            return super().forward(ids, use)
        finally:
            handle.remove()


def _with_failing_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_fail)


def _fail(_gradient: Tensor) -> None:
    raise ScriptError


@dataclass(frozen=True)
class Run:
    """What a script works with; `seen` is what it has looked at."""

    model: Any
    optimizer: Any
    depth: int
    draw: random.Random
    seen: list[Tensor]

    def loss(self, **options: Any) -> Tensor:
        """Of a forward over some blocks."""
        use = tuple(i for i in range(self.depth) if self.draw.random() < 0.85) or (0,)
        loss: Tensor = self.model(token_ids(self.draw.randrange(1000)), use, **options)
        return loss


# --- what may come between two calls ---


def evaluate(run: Run) -> None:
    with torch.no_grad():
        run.seen.append(run.loss())


def read_a_weight(run: Run) -> None:
    params = list(run.model.parameters())
    run.seen.append(run.draw.choice(params).detach().float().sum())


def write_a_weight(run: Run) -> None:
    params = list(run.model.parameters())
    with torch.no_grad():
        run.draw.choice(params).mul_(0.98)


def read_a_gradient(run: Run) -> None:
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    if grads:
        run.seen.append(run.draw.choice(grads).float().sum())


def change_a_gradient(run: Run) -> None:
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    if grads:
        run.draw.choice(grads).mul_(0.5)


def drop_gradients(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=run.draw.random() < 0.7)


def fail_in_backward(run: Run) -> None:
    """Going on needs the gradients dropped."""
    loss = run.loss(fails_at=run.draw.randrange(run.depth))
    try:
        loss.backward()
    except ScriptError:
        run.optimizer.zero_grad()
        run.loss().backward()


BETWEEN: tuple[tuple[float, Callable[[Run], None]], ...] = (
    (0.3, evaluate),
    (0.2, read_a_weight),
    (0.2, read_a_gradient),
    (0.15, drop_gradients),
    (0.15, change_a_gradient),
    (0.15, fail_in_backward),
    (0.1, write_a_weight),
)


def _between(run: Run, *kinds: Callable[[Run], None]) -> None:
    """Some of `kinds`, or of all."""
    for chance, kind in BETWEEN:
        if run.draw.random() < chance and (not kinds or kind in kinds):
            kind(run)


# --- what brings gradients ---


def one_loss(run: Run) -> None:
    loss = run.loss()
    _between(run, evaluate, read_a_weight)  # what is read before the backward of its forward
    loss.backward()
    run.seen.append(loss.detach())


def two_losses(run: Run) -> None:
    """Two graphs at once."""
    first, second = run.loss(), run.loss()
    if run.draw.random() < 0.5:
        first, second = second, first
    first.backward()
    second.backward()
    run.seen.extend([first.detach(), second.detach()])


def one_graph_twice(run: Run) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    run.seen.append(loss.detach())


def sum_of_losses(run: Run) -> None:
    loss = run.loss() + 2 * run.loss()
    loss.backward()
    run.seen.append(loss.detach())


BACKWARDS: tuple[Callable[[Run], None], ...] = (
    one_loss,
    one_loss,
    two_losses,
    one_graph_twice,
    sum_of_losses,
)


def script(run: Run) -> None:
    """Some steps."""
    for _ in range(NUM_STEPS):
        for _ in range(run.draw.choice((1, 1, 2))):
            run.draw.choice(BACKWARDS)(run)
            _between(run)
        if run.draw.random() < 0.5:
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.draw.choice((0.05, 0.5)))
            run.seen.append(norm)
        run.optimizer.step()
        if run.draw.random() < 0.8:
            run.optimizer.zero_grad()
        _between(run, evaluate, read_a_weight, write_a_weight)


# --- the draw ---


@dataclass(frozen=True)
class RandomScript:
    """`placed` and `resident` are its configurations but for the directory."""

    make_model: Callable[[], nn.Module]
    depth: int
    placed: Config
    resident: Config
    seed: int

    def outcome(self, config: Config) -> Outcome:
        """What a run leaves; it has no norm of its own."""
        torch.manual_seed(0)
        model = self.make_model()
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        module, optimizer = offloadzero.offload(model, plain, config)
        try:
            run = Run(module, optimizer, self.depth, random.Random(self.seed), [])
            script(run)
            losses = [float(value) for value in run.seen]
            weights = {name: value.clone() for name, value in module.state_dict().items()}
            states = optimizer.state_dict()["state"]
            return Outcome(losses, weights, states)
        finally:
            optimizer.close()


def draw_script(seed: int) -> RandomScript:
    """The script number `seed`."""
    draw = random.Random(seed + 10_000)
    depth = draw.randint(2, 5)
    forms: tuple[BlockForm, ...] = tuple(_draw_block(draw) for _ in range(depth))
    model = functools.partial(ScriptModel, draw.choice((15, 25, 33)), forms, tied=draw.random() < 0.4)
    own: Config = {
        "device": "cpu",
        "poison_released_leases": draw.random() < 0.7,
        "update": {"chunk_elements": draw.choice((4096, 1 << 20)), "in_backward": False},
        "units": {"min_leaf_elements": draw.choice((256, 10**6)), "prefetch_units": draw.randint(1, 3)},
    }
    if draw.random() < 0.3:
        own["activation_checkpoints"] = {"tier": draw.choice(("device", "host", "nvme"))}
    config: Config = {"zero_optimization": {"stage": 3}}
    if draw.random() < 0.7:
        config["zero_optimization"]["stage3_max_live_parameters"] = draw.choice((1, 6_000, 20_000))
    if draw.random() < 0.6:
        config["bf16"] = {"enabled": True}
    placement = _draw_placement(draw, depth)
    return RandomScript(
        model,
        depth,
        placed={**config, "offloadzero": {**own, "placement": placement}},
        resident={**config, "offloadzero": {**own, "placement": "device"}},
        seed=seed,
    )


def in_directory(config: Config, directory: object) -> Config:
    """With its files there."""
    return {**config, "offloadzero": {**config["offloadzero"], "nvme_path": str(directory)}}
