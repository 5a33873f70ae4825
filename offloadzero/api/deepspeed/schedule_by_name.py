"""The learning-rate schedule that a configuration names, made and tried before the optimizer gets it.

[Note: a schedule is tried]
torch's schedules check few of their parameters: StepLR with a step size of 0 divides by it, and MultiStepLR reads its
milestones only at a step that comes after the weights have changed. Here a stand-in of the optimizer takes a step with
the schedule first, and such a mistake is a ConfigError at the start.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offloadzero.api.deepspeed.schedules import DEEPSPEED_SCHEDULES
from offloadzero.config import UNRESOLVED, SchedulerConfig
from offloadzero.config.readers import AUTO, is_auto, read_int
from offloadzero.core.interrupts import is_interrupt
from offloadzero.core.torch_private import add_param_group
from offloadzero.errors import ConfigError

_PARAMS_KEY = "scheduler.params"

# The spellings that torch's constructors use for the types they do not check.
_WHOLE = ("int", "int | None", "Optional[int]")
_NUMBER = ("float",)
_WHOLE_LIST = tuple(f"{kind}[int]" for kind in ("Iterable", "Sequence", "list", "List"))
# The values that the Trainer puts for "auto"; None is each group's own rate, which it has put there too.
_AUTO_RATES: Mapping[str, float | None] = MappingProxyType({"warmup_min_lr": 0.0, "warmup_max_lr": None})


def build_lr_scheduler(config: SchedulerConfig, optimizer: Optimizer) -> LRScheduler:
    """Build the schedule that `config.type` names: one of DeepSpeed's, or any class of torch.optim.lr_scheduler.

    A torch schedule that needs more than the configuration can say (ReduceLROnPlateau wants a metric at each
    step) is built; `engine.step({"metrics": loss})` hands it over.

    Raises:
        ConfigError: an unknown name or parameter (with the nearest known one), a missing parameter, or values
            that the schedule refuses when it is made or at its first step.
    """
    config = _without_auto(config)
    known = {**_torch_schedules(), **DEEPSPEED_SCHEDULES}
    cls = known.get(config.type)
    if cls is None:
        names = ", ".join(DEEPSPEED_SCHEDULES)
        allowed = f"unknown schedule: allowed {names}, or a class of torch.optim.lr_scheduler"
        raise ConfigError("scheduler.type", config.type, allowed, known_values=known)
    _check_params(config, cls)
    return cls(optimizer, **_rehearse(config, cls, optimizer))


def _torch_schedules() -> dict[str, type[LRScheduler]]:
    return {
        name: cls
        for name, cls in vars(lr_scheduler).items()
        if inspect.isclass(cls)
        and issubclass(cls, LRScheduler)
        and cls is not LRScheduler
        and not name.startswith("_")
    }


def _check_params(config: SchedulerConfig, cls: type[LRScheduler]) -> None:
    parameters = list(inspect.signature(cls).parameters.values())[1:]  # without the optimizer
    names = [parameter.name for parameter in parameters]
    for name, value in config.params.items():
        if name not in names:
            raise ConfigError(
                f"{_PARAMS_KEY}.{name}", value, f"{config.type} has no such parameter", known_keys=names
            )
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in config.params:
            raise ConfigError(f"{_PARAMS_KEY}.{parameter.name}", None, f"{config.type} needs it")


def _without_auto(scheduler: SchedulerConfig) -> SchedulerConfig:
    """Return the schedule without "auto": a warmup then goes from 0 to each parameter group's own rate.

    Raises:
        ConfigError: any other parameter is "auto"; a default would be another schedule than the one meant.
    """
    for key in unresolved_keys(scheduler):
        raise ConfigError(key, AUTO, UNRESOLVED)
    params = {
        name: _AUTO_RATES[name] if is_auto(value) else value for name, value in scheduler.params.items()
    }
    return SchedulerConfig(scheduler.type, MappingProxyType(params))


def unresolved_keys(scheduler: SchedulerConfig) -> list[str]:
    """The keys of the parameters that are "auto" and for which nothing stands here."""
    return [
        f"{_PARAMS_KEY}.{name}"
        for name, value in scheduler.params.items()
        if is_auto(value) and name not in _AUTO_RATES
    ]


# --- the trial ---


class _StandIn(Optimizer):
    """An optimizer with the hyperparameters of another one's groups, and nothing to update."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([_without_weights(group) for group in optimizer.param_groups], {})
        self.defaults = dict(optimizer.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        add_param_group(self, param_group)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _without_weights(group: Mapping[str, Any]) -> dict[str, Any]:
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    return {**options, "params": [torch.zeros(1, device="cpu")]}


def _rehearse(config: SchedulerConfig, cls: type[LRScheduler], optimizer: Optimizer) -> dict[str, Any]:
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
        return read_int(key, value)
    if hint in _WHOLE_LIST:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(key, value, "a list of whole numbers")
        return [read_int(f"{key}[{index}]", entry) for index, entry in enumerate(value)]
    return value


def _check_finite(key: str, value: object) -> None:
    """Raise ConfigError for an infinity or a NaN, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, value, "a finite number")
    if isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _check_finite(f"{key}[{index}]", entry)
