"""The trial of a configured schedule on a stand-in, before the optimizer gets the schedule.

torch's schedules check few of their parameters: StepLR with a step size of 0 divides by it, and MultiStepLR reads
its milestones only at a step that comes after the weights have changed. Here that is a ConfigError at the start.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offloadzero.config.schema import SchedulerConfig
from offloadzero.core.interrupts import is_interrupt
from offloadzero.errors import ConfigError

_PARAMS_KEY = "scheduler.params"

# The spellings that torch's constructors use for the types they do not check.
_WHOLE = ("int", "int | None", "Optional[int]")
_NUMBER = ("float",)
_WHOLE_LIST = tuple(f"{kind}[int]" for kind in ("Iterable", "Sequence", "list", "List"))

# torch's method without its decorator, which imports torch.compile to keep it out: 1.5 s and 70 MiB.
_add_param_group: Callable[..., None] = inspect.unwrap(Optimizer.add_param_group)


class _StandIn(Optimizer):
    """An optimizer with the hyperparameters of another one's groups, and nothing to update."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([_without_weights(group) for group in optimizer.param_groups], {})
        self.defaults = dict(optimizer.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _add_param_group(self, param_group)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _without_weights(group: Mapping[str, Any]) -> dict[str, Any]:
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    return {**options, "params": [torch.zeros(1, device="cpu")]}


def rehearse(config: SchedulerConfig, cls: type[LRScheduler], optimizer: Optimizer) -> dict[str, Any]:
    """Build the schedule and take a step on a stand-in of `optimizer`, which is not touched.

    Returns:
        The schedule's parameters, whole numbers that were written as floats as integers.

    Raises:
        ConfigError: a parameter is no number where one is required, or the schedule fails with it.
    """
    signature = inspect.signature(cls).parameters
    params = {
        name: _read_param(f"{_PARAMS_KEY}.{name}", value, signature[name].annotation)
        for name, value in config.params.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule itself repeats the warnings
        stand_in = _StandIn(optimizer)
        schedule = _attempt("refuses them", config, lambda: cls(stand_in, **copy.deepcopy(params)))
        if not isinstance(schedule, ReduceLROnPlateau):  # it steps on a metric
            stand_in.step()
            _attempt("fails with them at its first step", config, schedule.step)
    for group in stand_in.param_groups:
        if not _is_finite(group["lr"]):
            allowed = f"{config.type} gives a learning rate of {group['lr']} with them"
            raise ConfigError(_PARAMS_KEY, dict(config.params), allowed)
    return params


def _attempt(how: str, config: SchedulerConfig, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:  # an error of torch's code, or of the caller's function
        if is_interrupt(error):
            raise
        what = f"{config.type} {how}: {type(error).__name__}: {error}"
        raise ConfigError(_PARAMS_KEY, dict(config.params), what) from error


def _is_finite(rate: object) -> bool:
    if isinstance(rate, torch.Tensor):
        return bool(rate.isfinite().all())
    return isinstance(rate, (int, float)) and math.isfinite(rate)


def _read_param(key: str, value: Any, annotation: Any) -> Any:
    _check_finite(key, value)
    hint = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    if hint in _NUMBER and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ConfigError(key, value, "a number")
    if hint in _WHOLE and not (value is None and hint != "int"):
        return _read_whole(key, value)
    if hint in _WHOLE_LIST:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(key, value, "a list of whole numbers")
        return [_read_whole(f"{key}[{index}]", entry) for index, entry in enumerate(value)]
    return value


def _read_whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != math.floor(value):
        raise ConfigError(key, value, "a whole number")
    return int(value)


def _check_finite(key: str, value: object) -> None:
    """Raise ConfigError for an infinity or a NaN, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, value, "a finite number")
    if isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _check_finite(f"{key}[{index}]", entry)
