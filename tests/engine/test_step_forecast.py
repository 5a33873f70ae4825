"""The forecast that an engine makes of its own step: what it says after ten steps, and that it touches nothing."""

from __future__ import annotations

import gc
import json
import logging
import random
import re
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.cli.main import main
from offloadzero.engine import forecast as step_forecast
from offloadzero.memory.device import find_device
from offloadzero.observe.forecast import MIN_STEPS, PlannedStep
from offloadzero.planning.hardware import Hardware, cache_file, describe, model_key
from offloadzero.planning.model.shapes import read_model
from offloadzero.planning.step.forecast import Computation
from tests.cli.planned import MACHINE, SHAPE, words
from tests.observe.test_device_time import Case, timed_engine, train_step
from tests.support.faults import delays
from tests.support.tiny import VOCABULARY, TinyModel, make_engine, settings, tokens, train

LOGGER = "offloadzero.steps"
ON_HOST: dict[str, Any] = {"placement": "host", "poison_released_leases": False}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """This machine has the rates of another one, which has been measured."""
    monkeypatch.setattr(step_forecast, "kept_hardware", lambda _: MACHINE)
    return MACHINE


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of the forecast."""
    assert all(record.levelno == logging.INFO for record in caplog.records if record.name == LOGGER)
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER and not record.getMessage().startswith("step ")
    ]


# --- the forecast ---


@pytest.mark.parametrize(
    ("keys", "is_measured"),
    [
        ({"placement": {"param": "host", "states": "nvme"}, "gradient_clipping": 1.0}, True),
        ({"placement": "nvme", "gradient_accumulation_steps": 2}, False),
        ({"placement": "host", "activation_checkpoints": {"tier": "host"}}, True),
        ({"placement": "host"}, False),
    ],
    ids=["clipped, by its own rates", "accumulated", "checkpointed, by its own rates", "updated in backward"],
)
def test_it_is_the_plans(
    keys: dict[str, Any],
    is_measured: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_params = sum(param.numel() for param in read_model(SHAPE).on_meta().parameters())
    of_models = {model_key("bf16", 32, num_params): Computation(1e6, 1e6)} if is_measured else {}
    machine = replace(MACHINE, of_models=of_models)
    monkeypatch.setattr(step_forecast, "kept_hardware", lambda _: machine)
    assert main([*words(tmp_path, machine=machine, **keys), "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["forecast"]["seconds"] > 1.0) == is_measured
    config = settings(tmp_path / "files", observe={"run_dir": str(tmp_path / "run")}, **keys)
    engine, *_ = offloadzero.initialize(model=read_model(SHAPE).build(), config=config)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randint(101, (2, 16))))
        engine.step()
    engine.close()
    found = json.loads((tmp_path / "run" / "forecast.json").read_text())
    assert found["seconds"] == plan["forecast"]["seconds"]
    assert found["lane"] == plan["forecast"]["lane"]
    assert found["lanes_s"] == plan["forecast"]["lanes_s"]
    moved: dict[str, int] = {}
    for lanes in plan["traffic"].values():
        for lane, size in lanes.items():
            moved[lane] = moved.get(lane, 0) + size
    assert found["num_bytes"] == moved


@pytest.mark.usefixtures("machine")
def test_one_line_is_said_after_ten_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    engine = make_engine(settings(**ON_HOST))
    train(engine, num_steps=MIN_STEPS - 1)
    assert told(caplog) == []
    train(engine, num_steps=1)
    (line,) = told(caplog)
    assert line.startswith("forecast ")
    assert " per step, measured " in line
    assert " (median of 8 steps), ratio " in line
    assert "longest lane: forecast cores, measured cores." in line
    train(engine, num_steps=MIN_STEPS + 1)
    assert told(caplog) == [line]
    assert engine.optimizer.runtime.monitor._check is None, (
        "what is kept of the first steps costs nothing now"
    )
    engine.close()


@pytest.mark.usefixtures("machine")
def test_the_printed_line_has_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(settings(observe={"step_line": True}, **ON_HOST))
    train(engine, num_steps=MIN_STEPS)
    engine.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["step"] * MIN_STEPS + ["forecast"]


def test_a_machine_that_was_not_measured_is_said_once(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, LOGGER)
    engine = make_engine(settings(observe={"step_line": True}, **ON_HOST))
    train(engine, num_steps=2 * MIN_STEPS)
    engine.close()
    (line,) = told(caplog)
    assert "this machine has not been measured. `offloadzero plan " in line
    assert "--hardware probe`" in line
    assert all(line.startswith("step ") for line in capsys.readouterr().out.splitlines())


def test_rates_are_read_from_where_the_plan_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    identity = describe(find_device("cpu"), [])
    kept = cache_file(identity)
    kept.parent.mkdir()
    machine = {**MACHINE.to_json(), "identity": identity}
    caplog.set_level(logging.INFO, LOGGER)
    for text, said in (
        (json.dumps(machine), "forecast "),
        (json.dumps({**machine, "identity": {}}), "this machine has not been measured"),
        ("{", "what was measured of this machine is not used: --hardware = "),
        (json.dumps({**machine, "rates": {}}), "no rate or no count of compute (rates.flops), "),
    ):
        kept.write_text(text)
        caplog.clear()
        engine = make_engine(settings(**ON_HOST))
        train(engine, num_steps=MIN_STEPS)
        engine.close()
        (line,) = told(caplog)
        assert said in line


# --- the count of the operations ---


class Noisy(TinyModel):
    """Draws random numbers, and keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__(width=16)
        self.dropout = nn.Dropout(0.5)
        self.seen: list[torch.Tensor] = []
        self.table = torch.ones(3)  # neither parameter nor buffer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.emb(tokens[:, :-1])
        for block in self.blocks:
            hidden = self.dropout(block(hidden)) * random.random() + np.random.rand()
        self.seen.append(hidden.detach())
        loss: torch.Tensor = self.head(self.norm(hidden)).float().logsumexp(-1).mean()
        return loss


def losses_of(model: nn.Module) -> list[float]:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    engine = make_engine(settings(observe={"step_line": True}, **ON_HOST), model)
    losses = train(engine, num_steps=MIN_STEPS)
    engine.close()
    return losses


def test_it_touches_nothing_of_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> Noisy:
        torch.manual_seed(1)
        return Noisy()

    without = losses_of(build())
    assert "forecast " not in capsys.readouterr().out
    monkeypatch.setattr(step_forecast, "kept_hardware", lambda _: MACHINE)
    model = build()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert losses_of(model) == without
    assert "forecast " in capsys.readouterr().out
    assert len(calls) == len(model.seen) == MIN_STEPS
    assert all(type(tensor) is torch.Tensor for tensor in model.seen)
    assert not any(module._forward_pre_hooks for module in model.modules())
    forward: Any = model.forward
    assert forward._forward.__func__ is Noisy.forward, "later calls are not looked at"


@pytest.mark.usefixtures("machine")
def test_a_run_that_is_not_observed_makes_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)

    def refuse(*_: Any, **__: Any) -> PlannedStep:
        raise AssertionError("nobody would read it")

    monkeypatch.setattr(step_forecast, "forecast_step", refuse)
    engine = make_engine(settings(**ON_HOST))
    assert engine.module.forward._forward.__func__ is TinyModel.forward, "no call is looked at"
    train(engine, num_steps=1)
    engine.close()


class Twisted(TinyModel):
    """Its forward is a function that holds the module."""

    def __init__(self) -> None:
        super().__init__()
        forward = self.forward
        self.forward = lambda tokens: forward(tokens)


class Uncopied(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__)  # noqa: SIM115 - a file has no copy


class Quantized(TinyModel):
    """Refuses a cast."""

    def to(self, *_: Any, **__: Any) -> Any:
        raise ValueError("no cast")


class Batch:
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids


class Objects(TinyModel):
    """Takes a batch that is no tensor."""

    def forward(self, batch: Batch) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch.ids)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()


class Blocks(Features):
    """Its script calls the blocks."""


def of_an_object(engine: Any) -> torch.Tensor:
    return engine(Batch(tokens(0)))  # type: ignore[no-any-return]


def of_its_blocks(engine: Any) -> torch.Tensor:
    x = torch.ones(2, 48, dtype=torch.bfloat16)
    for block in engine.module.blocks:
        x = block(x)
    return x.float().pow(2).mean()


class Pairs(nn.Module):
    """Takes a tuple, and gives no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], *, scale: float) -> dict[str, Any]:
        left, right = (block(self.emb(ids)) for block, ids in zip(self.blocks, pair, strict=True))
        return {"left": left.float().sum() * scale, "right": (right.float().mean(), pair[0])}


def of_tokens(engine: Any) -> torch.Tensor:
    return engine(tokens(0))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "loss_of", "said"),
    [
        (Twisted, of_tokens, "its operations are not counted: a copy of the model calls the model itself: "),
        (Uncopied, of_tokens, "the model has no copy: TypeError: "),
        (Quantized, of_tokens, "its operations are not counted: Quantized: ValueError: no cast"),
        (Objects, of_an_object, "its operations are not counted: Objects is called with an object: Batch"),
        (Blocks, of_its_blocks, "the model has not been called"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_a_model_whose_operations_are_not_counted_trains_on(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Any], torch.Tensor],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    engine = make_engine(settings(**ON_HOST), make())
    losses = []
    for _ in range(MIN_STEPS):
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    assert losses[-1] < losses[0]
    (line,) = told(caplog)
    assert said in line


@pytest.mark.usefixtures("machine")
def test_the_call_is_the_first_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its arguments and results are: two products of matrices in forward, and twice as many in backward."""
    flops: list[int] = []
    plan_step = step_forecast.plan_step

    def noting(*args: Any, **keys: Any) -> Any:
        flops.append(keys["trace"].flops)
        return plan_step(*args, **keys)

    monkeypatch.setattr(step_forecast, "plan_step", noting)
    engine = make_engine(settings(observe={"run_dir": str(tmp_path)}, **ON_HOST), Pairs())
    ids = torch.zeros(5, 7, dtype=torch.long)
    with torch.no_grad():
        engine((ids, ids), scale=2.0)
    for length in (9, 11):
        ids = torch.zeros(2, length, dtype=torch.long)
        sums = engine((ids, ids), scale=2.0)
        engine.backward(sums["left"] + sums["right"][0])
        engine.step()
    engine.close()
    assert flops == [2 * 3 * 2 * (2 * 9) * 48 * 48]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_loop_that_accumulates_has_a_forecast_where_it_says_so(
    num_micro: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    plain = TinyModel()
    config = settings(gradient_accumulation_steps=num_micro, **ON_HOST)
    model, optimizer = offloadzero.offload(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), config)
    for seed in range(MIN_STEPS):
        model(tokens(seed)).backward()
        model(tokens(seed + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    (line,) = told(caplog)
    if num_micro == 2:
        assert line.startswith("forecast ")
    else:
        assert "the first step has called the model 2 times, and gradient_accumulation_steps is 1: " in line


@pytest.mark.usefixtures("machine")
def test_a_call_that_is_computed_again_is_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    engine = make_engine(settings(**ON_HOST))
    for seed in range(MIN_STEPS):
        engine.backward(checkpoint(engine, tokens(seed), use_reentrant=False))
        engine.step()
    engine.close()
    (line,) = told(caplog)
    assert line.startswith("forecast ")


@pytest.mark.usefixtures("machine")
def test_products_have_the_rate_of_the_dtype_in_which_autocast_computes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    assert MACHINE.rates.flops.keys() == {"bf16"}
    for is_on, said in ((False, "no rate or no count of compute"), (True, "longest lane: forecast ")):
        caplog.clear()
        engine = make_engine(settings(bf16=None, **ON_HOST))
        for seed in range(MIN_STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                loss = engine(tokens(seed))
            engine.backward(loss)
            engine.step()
        engine.close()
        (line,) = told(caplog)
        assert said in line


@pytest.mark.usefixtures("machine")
def test_an_engine_that_never_steps_is_collected(tmp_path: Path) -> None:
    engine = make_engine(settings(observe={"run_dir": str(tmp_path)}, **ON_HOST))
    runtime = weakref.ref(engine.optimizer.runtime)
    del engine
    gc.collect()
    assert runtime() is None


# --- the cause ---

# Six blocks of 10 ms forward and 20 ms backward, and little to move: a step of 182 ms.
NOMINAL = PlannedStep(
    seconds=0.182,
    lanes_s={"compute": 0.18, "h2d": 0.012, "d2h": 0.006, "update": 0.0, "nvme read": 0.0},
    num_bytes={},
    lane="compute",
)


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        (Case(), ""),
        (Case(forward=20, backward=40), "compute: 360 ms, 180 ms"),
        (Case(forward=5, backward=10), "compute: 90 ms, 180 ms"),
        (Case(fetch=40), "h2d: 360 ms, 12 ms"),
        (Case(d2h=60), "d2h: 360 ms, 6 ms"),
        (Case(update=60), "update: 360 ms, 0 us"),
        # 60 ms for each read, 42 to 45 of them in a step: a fetch that begins before its unit's update needs none,
        # which its thread may just miss, and a median lies between two steps that differ.
        (Case(read=60, placement="nvme"), r"nvme read: 2\.(49|5[0-9]|6[0-9]|70) s, 0 us"),
    ],
    ids=["as forecast", "computation", "fast computation", "link", "gradients", "update", "drive"],
)
def test_a_slow_lane_is_named(
    case: Case,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a device whose clock is virtual, with one lane slower than its forecast."""
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(step_forecast, "forecast_step", lambda *_, **__: NOMINAL)
    with timed_engine(case, tmp_path, monkeypatch) as (engine, device):
        for _ in range(MIN_STEPS):
            train_step(engine, device)
            device.synchronize()
            engine.last_step_report()
    (line,) = told(caplog)
    assert line.startswith("forecast 182 ms per step, measured ")
    if not cause:
        assert line.endswith("ratio 1.00; longest lane: forecast compute, measured compute.")
        return
    assert re.search(f" The lane that departs most is {cause} were forecast[.]", line)
    lane = cause.partition(":")[0]
    assert f"longest lane: forecast compute, measured {lane}." in line


def test_where_no_lane_departs_the_longest_wait_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, faults: ExitStack
) -> None:
    """The lane sleeps before it begins: its copies take as long as they did."""
    caplog.set_level(logging.INFO, LOGGER)
    planned = PlannedStep(seconds=0.02, lanes_s={"cores": 0.01}, num_bytes={}, lane="cores")
    monkeypatch.setattr(step_forecast, "forecast_step", lambda *_, **__: planned)
    faults.enter_context(delays("lane.launch", 0.05, about="fetch"))
    engine = make_engine(settings(**ON_HOST))
    train(engine, num_steps=MIN_STEPS)
    engine.close()
    (line,) = told(caplog)
    assert (
        "lanes overlapped less than was forecast, or other work had the cores; the longest wait is fetch, "
        in line
    )
