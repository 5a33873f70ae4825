"""The `optimizer` and `scheduler` blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from offloadzero.config.block import Block
from offloadzero.config.keys import DEEPSPEED_KEYS
from offloadzero.config.readers import is_auto, read_bool, read_float, read_mapping, read_str
from offloadzero.config.schema import (
    KNOWN_OPTIMIZERS,
    OPTIMIZERS,
    TORCH_ADAMW_DECAY,
    OptimizerConfig,
    SchedulerConfig,
)
from offloadzero.errors import ConfigError

MAX_FP32 = 3.4e38  # the update computes in fp32
# Arguments that torch's param groups have under another name.
_GROUP_NAMES = {"adam_w_mode": "decoupled_weight_decay"}
UNRESOLVED = 'a number: "auto" is for the Hugging Face Trainer to resolve, and nobody has'


def read_optimizer(top: Block, notices: list[str]) -> OptimizerConfig | None:
    """Read the block; None without one, or with an empty one. Raises ConfigError."""
    if not top.raw("optimizer"):
        return None
    block = top.sub_block("optimizer", table=DEEPSPEED_KEYS["optimizer"], notices=notices)
    name = _read_type(block)
    params = block.sub_block("params", table=DEEPSPEED_KEYS["optimizer.params"], notices=notices)
    arguments = {key: params.read(key, _READERS[key], default) for key, default in OPTIMIZERS[name].items()}
    _expect_arguments(name, params)
    # DeepSpeed makes torch.optim's class then, whose AdamW decays where nothing is said; its own do not.
    if arguments.pop("torch_adam", False) and arguments["adam_w_mode"] and "weight_decay" not in params:
        arguments["weight_decay"] = TORCH_ADAMW_DECAY
    if name == "AdamW" and not arguments["adam_w_mode"]:
        raise ConfigError(params.dotted("adam_w_mode"), False, 'contradicts the type "AdamW": write "Adam"')
    options = {_GROUP_NAMES.get(key, key): value for key, value in arguments.items()}
    return OptimizerConfig(name, MappingProxyType(options))


def _expect_arguments(name: str, params: Block) -> None:
    """Refuse arguments of other optimizers."""
    for key in _READERS:
        if key in params and key not in OPTIMIZERS[name]:
            allowed = f"{name} takes {', '.join(OPTIMIZERS[name])}"
            raise ConfigError(params.dotted(key), params.raw(key), allowed)


def _read_type(block: Block) -> str:
    """Read the type in its canonical spelling; like DeepSpeed it compares the names without regard to case."""
    key = block.dotted("type")
    available = ", ".join(OPTIMIZERS)
    if "type" not in block:
        raise ConfigError(key, None, f"the name of an optimizer: available are {available}")
    given = read_str(key, block.raw("type"))
    by_lower = {name.lower(): name for name in (*OPTIMIZERS, *KNOWN_OPTIMIZERS)}
    name = by_lower.get(given.lower())
    if name is None:
        raise ConfigError(
            key, given, f"unknown optimizer: available are {available}", known_values=OPTIMIZERS
        )
    if name not in OPTIMIZERS:
        raise ConfigError(key, given, f"known, not built yet: available are {available}")
    return name


def _read_lr(key: str, value: object) -> float | None:
    return None if is_auto(value) else _read_magnitude(key, value)


def _read_betas(key: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigError(key, value, "two numbers, each at least 0 and below 1")
    first, second = (read_float(f"{key}[{index}]", beta, minimum=0) for index, beta in enumerate(value))
    if first >= 1 or second >= 1:
        raise ConfigError(key, value, "two numbers, each at least 0 and below 1")
    return first, second


def _read_magnitude(key: str, value: object) -> float:
    return read_float(key, value, minimum=0, maximum=MAX_FP32)


# Arguments by name, whatever the optimizer.
_READERS: Mapping[str, Callable[[str, object], Any]] = MappingProxyType(
    {
        "lr": _read_lr,
        "betas": _read_betas,
        "eps": _read_magnitude,
        "weight_decay": _read_magnitude,
        "lr_decay": _read_magnitude,
        "initial_accumulator_value": _read_magnitude,
        "momentum": _read_magnitude,
        "dampening": _read_magnitude,
        "nesterov": read_bool,
        "adam_w_mode": read_bool,
        "bias_correction": read_bool,
        "torch_adam": read_bool,
    }
)


def read_scheduler(top: Block, notices: list[str]) -> SchedulerConfig | None:
    """Read the block; None without one, or with an empty one.

    The schedule's own parameters, and an "auto" among them, are checked where the schedule is built.
    Raises ConfigError where the block has parameters and names no type, and for a key that is not known.
    """
    if not top.raw("scheduler"):
        return None
    block = top.sub_block("scheduler", table=DEEPSPEED_KEYS["scheduler"], notices=notices)
    params = block.read("params", read_mapping, {})
    if "type" not in block and not params:
        return None
    name = block.raw("type")
    if not isinstance(name, str) or not name or is_auto(name):
        raise ConfigError(block.dotted("type"), name, "the name of a learning-rate schedule")
    return SchedulerConfig(type=name, params=MappingProxyType(dict(params)))
