"""Every way to a weight that torch offers, at every moment, wherever the weight lives: against plain PyTorch.

A cell is `equal` (the outcome of the plain run), `torch's error` (plain torch raises there too), `refused` (an
OffloadError at that line), or it is wrong: another number, no error where torch has one, an error without a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import offloadzero
from offloadzero import OffloadError, zero
from offloadzero.access.parameter import AwayParameter
from tests.access.access_model import OPTIONS, Net, PlainBf16AdamW, Probe, Run, nothing
from tests.access.access_ways import KEPT_READS, MADE_READS, READS, UNUSUAL_WRITES, WRITES, Write
from tests.support.training import Config

WRITE_STEP = 1

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
        layer.make = MADE_READS.get(name, nothing)
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
