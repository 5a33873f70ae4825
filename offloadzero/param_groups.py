"""The param groups of an offloaded optimizer: which options the update follows, and which it refuses (floor 6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offloadzero.config import UNRESOLVED, OptimizerConfig
from offloadzero.errors import ConfigError
from offloadzero.native.cpu_adam import AdamHyper

# Options of torch.optim.Adam that change the numbers and are not built.
_REFUSED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False}


def expect_options(group: Mapping[str, Any], name: str) -> None:
    """Refuse what the update would not compute exactly."""
    for option, allowed in _REFUSED_OPTIONS.items():
        if group.get(option, allowed) != allowed:
            raise ConfigError(f"{name}.{option}", group[option], f"allowed: {allowed}")


def adam_hyper(group: Mapping[str, Any], name: str) -> AdamHyper:
    """The hyperparameters of one param group as of now: scripts and schedulers change them between steps."""
    expect_options(group, name)
    beta1, beta2 = _betas(group, name)
    return AdamHyper(
        lr=_number(group["lr"], f"{name}.lr"),
        beta1=beta1,
        beta2=beta2,
        eps=_number(group["eps"], f"{name}.eps"),
        weight_decay=_number(group["weight_decay"], f"{name}.weight_decay"),
        decoupled=bool(group["decoupled_weight_decay"]),
        bias_correction=bool(group.get("bias_correction", True)),
    )


def adam_hypers(groups: Iterable[Mapping[str, Any]], owner: str) -> list[AdamHyper]:
    """Of all groups. `owner` is whose they are, for errors."""
    return [adam_hyper(group, f"{owner}.param_groups[{index}]") for index, group in enumerate(groups)]


def _betas(group: Mapping[str, Any], name: str) -> tuple[float, float]:
    betas = group["betas"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ConfigError(f"{name}.betas", betas, "two numbers")
    return _number(betas[0], f"{name}.betas[0]"), _number(betas[1], f"{name}.betas[1]")


def _number(value: Any, name: str) -> float:
    if type(value) is float:
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements is a RuntimeError
        raise ConfigError(name, value, "a number, or a tensor of one element") from None


def group_defaults(config: OptimizerConfig | None) -> dict[str, Any]:
    """A param group's options from the JSON's optimizer block."""
    if config is None:
        raise ConfigError("optimizer", None, "pass one to initialize() or name one in the config")
    return {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "decoupled_weight_decay": config.decoupled_weight_decay,
        "bias_correction": config.bias_correction,
    }


def expect_rates(param_groups: Iterable[Mapping[str, Any]]) -> None:
    """A rate that the configuration leaves at "auto" has to come with the groups."""
    if any(group["lr"] is None for group in param_groups):
        raise ConfigError("optimizer.params.lr", "auto", f"{UNRESOLVED}; or pass an optimizer")
