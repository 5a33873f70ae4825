"""Configurations that hold one key, and what they are read as."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from offloadzero.config import OffloadConfig, OptimizerConfig
from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS, Action, KeySpec
from offloadzero.config.schema import OPTIMIZERS
from offloadzero.core.segments import SegmentKind, TierName

TABLES = {**DEEPSPEED_KEYS, **OWN_KEYS}
ALL_KEYS = [(path, key, spec) for path, table in TABLES.items() for key, spec in table.items()]

RECORD = ("param", "master", "exp_avg", "exp_avg_sq")


def keys_with(*actions: Action) -> dict[str, tuple[str, str, KeySpec]]:
    """The keys of the tables with one of these actions, by name."""
    return {
        f"{path}.{key}".removeprefix("."): (path, key, spec)
        for path, key, spec in ALL_KEYS
        if spec.action in actions
    }


def nested(path: str, key: str, value: object, **beside: object) -> dict[str, Any]:
    """A configuration with `value` at path.key; blocks on the way get what they need to be valid."""
    inner: Any = {**NEEDED.get(path, {}), **beside, key: value}
    parts = path.split(".") if path else []
    for depth in reversed(range(len(parts))):
        name = parts[depth].removesuffix("[]")
        above = NEEDED.get(".".join(parts[:depth]), {})
        if path == "optimizer.params" and depth == 1:
            above = type_that_takes(key)
        inner = {**above, name: [inner] if parts[depth].endswith("[]") else inner}
    return dict(inner)


def type_that_takes(argument: str) -> dict[str, str]:
    types = ("AdamW", *OPTIMIZERS)
    return {"type": next((name for name in types if argument in OPTIMIZERS[name]), "AdamW")}


NEEDED = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}


def homes(config: OffloadConfig) -> dict[str, str]:
    """Where the rules for every unit put each segment of Adam's records; a later rule wins."""
    tiers: dict[str, TierName] = {}
    for rule in config.placement.rules:
        assert rule.units == "*"
        of_rule = dict(rule.tiers)
        states = of_rule.pop(SegmentKind.STATES, None)
        if states is not None:
            tiers.update(dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), states))
        tiers.update({kind.value: tier for kind, tier in of_rule.items()})
    return {kind: tier.value for kind, tier in tiers.items()}


def zero(stage: object = 3, **block: object) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **block}}


def adam(name: str, **options: Any) -> OptimizerConfig:
    """Adam with its defaults and these options."""
    defaults = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled_weight_decay": True,
        "bias_correction": True,
    }
    return OptimizerConfig(name, MappingProxyType({**defaults, **options}))
