"""torch's schedulers on an offloaded optimizer, against the same scheduler on a plain torch optimizer."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import offloadzero
from offloadzero import ConfigError, StateError
from tests.support.cases import IN_FULL
from tests.support.tiny import TinyModel, settings, tokens

NUM_STEPS = 50 if IN_FULL else 25
SAVED_AT = 20 if IN_FULL else 10
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, MakeScheduler] = {
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[2e-2, 5e-3], total_steps=NUM_STEPS + 1),
    "OneCycleLR, three phases": lambda opt: lr_scheduler.OneCycleLR(
        opt, max_lr=1e-2, total_steps=NUM_STEPS + 1, three_phase=True, base_momentum=0.7, max_momentum=0.9
    ),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(
        opt, base_lr=[1e-4, 1e-3], max_lr=[1e-2, 2e-2], step_size_up=7, step_size_down=5, mode="triangular2"
    ),
    "CyclicLR, no momentum": lambda opt: lr_scheduler.CyclicLR(
        opt, base_lr=1e-4, max_lr=1e-2, step_size_up=7, cycle_momentum=False
    ),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=8, gamma=0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, milestones=[5, NUM_STEPS // 2 + 5], gamma=0.1),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=NUM_STEPS // 2),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=6, T_mult=2),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=6), lr_scheduler.ExponentialLR(opt, 0.95)],
        milestones=[6],
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, total_iters=9), lr_scheduler.PolynomialLR(opt, NUM_STEPS - 10)]
    ),
}


def config(**keys: Any) -> dict[str, Any]:
    return settings(placement="host", bf16=None, **keys)


def make_model() -> TinyModel:
    torch.manual_seed(3)
    return TinyModel(width=16, num_blocks=2)


def make_adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Two groups: matrices and vectors, each with a rate, betas and a decay of its own."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 4e-3, "betas": (0.85, 0.98)},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 1e-3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of torch 2.8, whose SequentialLR steps its own schedulers as it tells others not to.
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step", UserWarning)
        yield


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int
) -> tuple[list[float], list[tuple[Any, Any]]]:
    """Losses, and rates and betas by group, of steps [first, last)."""
    losses, seen = [], []
    for step in range(first, last):
        seen.append(
            (
                tuple(g["lr"] for g in optimizer.param_groups),
                tuple(g["betas"] for g in optimizer.param_groups),
            )
        )
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, seen


@functools.cache
def plain_run(make_scheduler: MakeScheduler) -> tuple[list[float], list[tuple[Any, Any]]]:
    model = make_model()
    optimizer = make_adamw(model)
    return train(model, optimizer, make_scheduler(optimizer), 0, NUM_STEPS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("made_on", ["the offloaded optimizer", "the original"])
@pytest.mark.usefixtures("no_warnings")
def test_the_rates_betas_and_losses_of_torch(name: str, made_on: str) -> None:
    """Every step's rate and betas are torch's, and the update follows them; nobody warns of the order of steps."""
    losses, seen = plain_run(SCHEDULERS[name])
    model = make_model()
    original = make_adamw(model)
    before = SCHEDULERS[name](original) if made_on == "the original" else None
    model, optimizer = offloadzero.offload(model, original, config())  # type: ignore[assignment]
    scheduler = before if before is not None else SCHEDULERS[name](optimizer)
    got_losses, got_seen = train(model, optimizer, scheduler, 0, NUM_STEPS)
    assert got_seen == seen
    assert got_losses == pytest.approx(losses, rel=1e-5)
    optimizer.close()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.usefixtures("no_warnings")
def test_a_saved_scheduler_goes_on(name: str) -> None:
    """Scheduler and optimizer saved midway, loaded into new ones: the rest is that of the undisturbed torch run."""
    losses, seen = plain_run(SCHEDULERS[name])
    model, optimizer = offloadzero.offload(first := make_model(), make_adamw(first), config())
    scheduler = SCHEDULERS[name](optimizer)
    train(model, optimizer, scheduler, 0, SAVED_AT)
    # A scheduler's state may be the scheduler's own lists and dicts.
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    optimizer.close()

    second = make_model()
    second.load_state_dict(saved[0])
    model, optimizer = offloadzero.offload(second, make_adamw(second), config())
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    got_losses, got_seen = train(model, optimizer, scheduler, SAVED_AT, NUM_STEPS)
    assert got_seen == seen[SAVED_AT:]
    assert got_losses == pytest.approx(losses[SAVED_AT:], rel=1e-5)
    optimizer.close()


@pytest.mark.usefixtures("no_warnings")
def test_schedulers_of_the_config(tmp_path: Path) -> None:
    """By name in the JSON, and through a checkpoint of the engine."""
    params = {"max_lr": 2e-2, "total_steps": NUM_STEPS + 1}
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config(**given), "scheduler": {"type": "OneCycleLR", "params": params}}))

    plain = make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    plain_scheduler = lr_scheduler.OneCycleLR(plain_optimizer, **params)
    losses, seen = train(plain, plain_optimizer, plain_scheduler, 0, 20)

    got_losses: list[float] = []
    got_seen: list[tuple[Any, Any]] = []
    for first, last in ((0, 10), (10, 20)):
        engine, optimizer, _, _ = offloadzero.initialize(model=make_model(), config=str(path))
        assert optimizer is not None
        if first:
            engine.load_checkpoint(tmp_path / "saved")
        for step in range(first, last):
            group = optimizer.param_groups[0]
            got_seen.append(((group["lr"],), (tuple(group["betas"]),)))
            loss = engine(tokens(step))
            engine.backward(loss)
            engine.step()
            got_losses.append(loss.item())
        engine.save_checkpoint(tmp_path / "saved")
        engine.close()
    assert got_seen == seen
    assert got_losses == pytest.approx(losses, rel=1e-5)


def test_the_defaults_are_those_of_the_optimizer_that_was_offloaded() -> None:
    model = make_model()
    original = make_adamw(model)
    _, optimizer = offloadzero.offload(model, original, config())
    assert optimizer.defaults == original.defaults
    assert optimizer.defaults is not original.defaults
    optimizer.close()
    _, optimizer, _, _ = offloadzero.initialize(model=make_model(), config=config())
    assert optimizer is not None
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    optimizer.close()


def test_a_wrong_order_is_still_warned_of() -> None:
    model = make_model()
    _, optimizer = offloadzero.offload(model, make_adamw(model), config())
    scheduler = SCHEDULERS["StepLR"](optimizer)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        scheduler.step()
    optimizer.close()


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    """It would set rates that nobody reads."""
    model = make_model()
    scheduler = SCHEDULERS["StepLR"](make_adamw(model))
    with pytest.raises(ConfigError, match=r"lr_scheduler = 'StepLR': it sets the rates of another optimizer"):
        offloadzero.initialize(model=model, config=config(), lr_scheduler=scheduler)
    with pytest.raises(ConfigError, match="another optimizer"):
        offloadzero.initialize(
            model=(other := make_model()),
            optimizer=make_adamw(other),
            config=config(),
            lr_scheduler=scheduler,
        )


@pytest.mark.parametrize("given", [0.5, lambda _: 0.5])
def test_what_is_no_scheduler_is_refused(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"lr_scheduler = 'float': a scheduler, or a callable .* has no step\(\)"
    ):
        offloadzero.initialize(model=make_model(), config=config(), lr_scheduler=given)


@pytest.mark.parametrize("form", ["instance", "callable"])
@pytest.mark.usefixtures("no_warnings")
def test_a_scheduler_given_to_initialize(form: str) -> None:
    """Made on the client's optimizer, or by a callable on the engine's."""
    losses, seen = plain_run(SCHEDULERS["OneCycleLR"])
    model = make_model()
    original = make_adamw(model)
    scheduler = SCHEDULERS["OneCycleLR"](original) if form == "instance" else SCHEDULERS["OneCycleLR"]
    engine, optimizer, _, returned = offloadzero.initialize(
        model=model, optimizer=original, config=config(), lr_scheduler=scheduler
    )
    assert optimizer is not None
    assert returned is engine.lr_scheduler
    for step in range(12):
        assert engine.get_lr() == list(seen[step][0])
        assert engine.get_mom() == list(seen[step][1])
        loss = engine(tokens(step))
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    engine.close()


def test_stepping_the_original_optimizer_is_refused() -> None:
    """It has neither gradients nor states: a loop that calls it would train nothing in silence."""
    model = make_model()
    original = make_adamw(model)
    offloaded, optimizer = offloadzero.offload(model, original, config())
    offloaded(tokens(0)).backward()
    with pytest.raises(
        StateError, match=r"the states of this AdamW were offloaded: call step\(\) of the optimizer that"
    ):
        original.step()
    optimizer.step()
    optimizer.close()


def test_a_scheduler_that_needs_a_metric() -> None:
    """The engine hands it over, or says before it steps that it is missing."""
    model = make_model()
    plain_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = lr_scheduler.ReduceLROnPlateau(plain_optimizer, patience=1, factor=0.5)
    scheduler = {"type": "ReduceLROnPlateau", "params": {"patience": 1, "factor": 0.5}}
    engine, *_ = offloadzero.initialize(model=make_model(), config={**config(), "scheduler": scheduler})
    rates = []
    for step, metric in enumerate([3.0, 2.0, 4.0, 4.0, 4.0, 1.0]):
        engine.backward(engine(tokens(step)))
        with pytest.raises(ConfigError, match=r'ReduceLROnPlateau needs engine\.step\({"metrics": \.\.\.}\)'):
            engine.step()
        engine.step({"metrics": metric})
        plain.step(metric)
        rates.append(engine.get_lr()[0])
        assert rates[-1] == plain_optimizer.param_groups[0]["lr"]
    assert engine.global_steps == 6
    assert rates[-1] == 5e-3
    engine.close()
