"""Trains the same thing under different placements, and says where two outcomes differ."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.access.home_access import HomeAccess
from offloadzero.memory.store import Segment
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept_elements import kept_place
from offloadzero.update.records import Record
from tests.support.lion import ExactLion

Config = dict[str, Any]
Loop = Callable[[Any], list[float]]  # drives an Engine (or a PlainEngine) and gives the losses

# What an optimizer of the JSON is compared with.
REFERENCES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, foreach=True),
    "Lion": ExactLion,
    "Adagrad": functools.partial(torch.optim.Adagrad, foreach=True),
    "SGD": functools.partial(torch.optim.SGD, foreach=True),
}

# Where segments live: a tier for all, or rules by unit and segment.
PLACEMENTS: dict[str, Any] = {
    "resident": "device",
    "host": "host",
    "nvme": "nvme",
    "mixed": [
        {"param": "nvme", "master": "host", "exp_avg": "nvme", "exp_avg_sq": "host", "grad": "nvme"},
        {"units": "*.1", "param": "host", "master": "nvme", "exp_avg": "host", "exp_avg_sq": "nvme"},
        {"units": "*.2", "param": "device", "master": "device", "exp_avg": "device", "exp_avg_sq": "device"},
        {"units": "*.3", "param": "host", "master": "host", "exp_avg": "device", "grad": "host"},
        {"units": "(rest)", "master": "nvme", "exp_avg": "host", "exp_avg_sq": "host"},
    ],
}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Config:
    """`over` laid over `base`, object by object."""
    merged: Config = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def make_config(
    placement: str,
    directory: Path | str,
    *,
    clipping: float = 0.0,
    accumulation: int = 1,
    dtype: str | None = "bf16",
    lr: float = 1e-3,
    **over: Any,
) -> Config:
    """A configuration under which released leases turn to NaN and few units fit on the device at once.

    `over` is laid over it: top-level keys of the JSON.
    """
    base: Config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.1}},
        # The smallest leases: one unit, or as many as a single module needs at once.
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1},
        "offloadzero": {
            "device": "cpu",
            "placement": PLACEMENTS.get(placement, placement),
            "nvme_path": str(directory),
            "poison_released_leases": True,
            "units": {"min_leaf_elements": 256},
        },
    }
    if dtype == "bf16":
        base["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        base["fp16"] = {"enabled": True, "loss_scale": 128.0}
    return merge(base, over)


def one_step(engine: Any, *batch: Any) -> float:
    """The loss of a micro batch, on which an engine trains."""
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return float(loss.item())


@dataclass
class Outcome:
    """What a run leaves behind. `states` is torch's optimizer state: number of the parameter -> tensors."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[int, dict[str, Tensor]]
    norm: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def snapshot(engine: offloadzero.Engine, losses: Sequence[float]) -> Outcome:
    """The present state of a run, copied."""
    with _segments_read_once(engine.optimizer.runtime.weights.homes):
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        states = copy.deepcopy(dict(engine.optimizer.state_dict()["state"]))
    norm = engine.get_global_grad_norm() if engine.global_steps else None
    return Outcome(list(losses), weights, states, norm)


@contextmanager
def _segments_read_once(homes: HomeAccess) -> Iterator[None]:
    """In one process a segment is read once and not for each of its parameters: that takes as long as two steps."""
    if not homes._group.is_alone:
        yield
        return
    copies: dict[int, Tensor] = {}

    def read(record: Record, slot: ParamSlot, segment: Segment, target: Tensor) -> None:
        if id(segment) not in copies:
            copies[id(segment)] = torch.empty(segment.num_elements, dtype=segment.dtype)
            homes._store.read(segment, copies[id(segment)]).wait()
        place = kept_place(record, slot, segment.kind)
        target.copy_(copies[id(segment)][place.start : place.start + place.num_elements])

    homes._read_home = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        del homes._read_home


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Every place in which two outcomes are not bitwise equal; empty if they are the same."""
    found = [
        f"loss {i}: {a!r} != {b!r}"
        for i, (a, b) in enumerate(zip(one.losses, other.losses, strict=True))
        if a != b
    ]
    if repr(one.norm) != repr(other.norm):  # NaN equals NaN
        found.append(f"norm: {one.norm!r} != {other.norm!r}")
    found += _tensor_differences("weight", one.weights, other.weights)
    if one.states.keys() != other.states.keys():
        found.append(f"states of {sorted(one.states)} != {sorted(other.states)}")
    for number in one.states.keys() & other.states.keys():
        found += _tensor_differences(f"state {number}", one.states[number], other.states[number])
    return found


def _tensor_differences(what: str, one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> Iterable[str]:
    if one.keys() != other.keys():
        yield f"{what}: {sorted(one)} != {sorted(other)}"
        return
    for name, value in one.items():
        if value.dtype != other[name].dtype or not torch.equal(value, other[name]):
            yield f"{what} {name}"


def assert_same(one: Outcome, other: Outcome) -> None:
    """Bitwise equal, and made of numbers."""
    assert not (found := differences(one, other)), found[:8]
    for name, value in one.weights.items():
        assert not value.is_floating_point() or bool(value.isfinite().all()), name


def run_engine(make_model: Callable[[], nn.Module], loop: Loop, config: Config, **given: Any) -> Outcome:
    """Train a fresh model; closes the engine."""
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=make_model(), config=config, **given)
    try:
        losses = loop(engine)
        return snapshot(engine, losses)
    finally:
        engine.close()


class PlainEngine:
    """The same calls on plain torch: fp32 master weights, torch's optimizer (or one written out), clip_grad_norm_.

    With fp32 parameters the master weights are the parameters themselves.
    """

    def __init__(self, model: nn.Module, config: Config, groups: list[dict[str, Any]] | None = None) -> None:
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((dtypes[name] for name in dtypes if config.get(name, {}).get("enabled")), torch.float32)
        groups = groups or [{"params": [p for p in model.parameters() if p.requires_grad]}]
        self._params = [param for group in groups for param in group["params"]]
        self._masters = [nn.Parameter(param.detach().float().clone()) for param in self._params]
        master_of = {id(p): m for p, m in zip(self._params, self._masters, strict=True)}
        own = [{**group, "params": [master_of[id(p)] for p in group["params"]]} for group in groups]
        self.optimizer = REFERENCES[config["optimizer"]["type"]](own, **config["optimizer"]["params"])
        for tensor in model.parameters():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        self.module = model
        self._clipping = config["gradient_clipping"]
        self._accumulation = config["gradient_accumulation_steps"]
        self._loss_scale = config.get("fp16", {}).get("loss_scale", 1.0)
        self._num_micro_steps = 0
        self.norm: float | None = None

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor) -> None:
        (loss / self._accumulation * self._loss_scale).backward()

    def step(self) -> None:
        self._num_micro_steps += 1
        if self._num_micro_steps % self._accumulation == 0:
            self.step_now()

    def step_now(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float() / self._loss_scale
            param.grad = None
        if self._clipping:
            self.norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._clipping))
        self.optimizer.step()
        for param, master in zip(self._params, self._masters, strict=True):
            param.data.copy_(master.data)

    def train(self, mode: bool = True) -> PlainEngine:
        self.module.train(mode)
        return self

    def eval(self) -> PlainEngine:
        return self.train(False)


def run_plain(make_model: Callable[[], nn.Module], loop: Loop, config: Config) -> Outcome:
    """The reference of `run_engine`, without any part of this package."""
    torch.manual_seed(0)
    engine = PlainEngine(make_model(), config)
    losses = loop(engine)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    return Outcome(losses, weights, {}, engine.norm)


def worst_relative_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """max |a - b| / |b|."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
