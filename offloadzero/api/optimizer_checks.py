"""What `offload()` and `initialize()` ask of an optimizer and its groups before anything of the model is taken over."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offloadzero.api.overridden_methods import overrides_text
from offloadzero.config import UNRESOLVED, OffloadConfig
from offloadzero.errors import ConfigError
from offloadzero.update.spec import AnySpec
from offloadzero.update.specs import known_classes_text, spec_of
from offloadzero.update.specs.adam import ADAM
from offloadzero.update.specs.muon import MUON

log = logging.getLogger("offloadzero")

# The attributes of torch's optimizers that hold hooks; torch runs those of the first two around `step()`.
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def check_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], config: OffloadConfig
) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizer, or Muon and then what it leaves the rest to.

    Refuses what the offloaded update would not compute exactly.
    """
    origins = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if len(origins) != 1:
        specs = [spec_of(origin) for origin in origins]
        if sorted(spec.name for spec in specs) != [ADAM.name, MUON.name]:
            names = [type(origin).__name__ for origin in origins]
            raise ConfigError("optimizer", names, "one, or a Muon and an AdamW: offload() takes no other two")
        origins.sort(key=lambda origin: spec_of(origin) is not MUON)
        for origin in origins:
            for group in origin.param_groups:
                group["use_muon"] = origin is origins[0]
        if any(getattr(origins[1], name) for name in HOOKS):
            allowed = "none of AdamW beside Muon: register them on the optimizer that is returned"
            raise ConfigError("optimizer", "hooks", allowed)
    for origin in origins:
        _check_optimizer(origin, config)
    return origins


def warn_of_others(own: torch.optim.Optimizer) -> RemovableHandle:
    """Warn once when another optimizer steps parameters of `own`, as a Trainer's without `optimizers=` does.

    It trains them in their own dtype: in bf16 small updates are lost.
    """
    of_own = weakref.ref(own)
    has_warned = False

    def warn(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal has_warned
        mine = of_own()
        if has_warned or mine is None or optimizer is mine:
            return
        params = {id(param) for group in mine.param_groups for param in group["params"]}
        if any(id(param) in params for group in optimizer.param_groups for param in group["params"]):
            has_warned = True
            log.warning(  # transformers silences warnings of its optimizer's steps
                "this %s steps parameters of an offloaded model, in their own dtype and with states in ordinary "
                "memory, and the optimizer that offload() has returned does not: take that one (of a Trainer "
                "optimizers=(optimizer, None))",
                type(optimizer).__name__,
            )

    handle = register_optimizer_step_pre_hook(warn)
    weakref.finalize(own, handle.remove)
    return handle


def groups_of(origins: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The groups of these optimizers: of one its own list, which scripts may hold."""
    if len(origins) == 1:
        return origins[0].param_groups
    return [group for origin in origins for group in origin.param_groups]


def _check_optimizer(optimizer: torch.optim.Optimizer, config: OffloadConfig) -> None:
    spec = spec_of(optimizer)
    overrides = overrides_text(optimizer)
    if overrides:
        raise ConfigError(
            "optimizer",
            type(optimizer).__name__,
            f"allowed: {known_classes_text()}, as they are: {overrides}. What it does around a step "
            "belongs in hooks of the optimizer that is returned: register_step_pre_hook() and "
            "register_step_post_hook() after offload() or initialize()",
        )
    spec.expect_origin(optimizer, config.state_layout)
    for index, group in enumerate(optimizer.param_groups):
        spec.expect_options(group, f"optimizer.param_groups[{index}]")
        for option, value in spec.default_options(optimizer).items():
            group.setdefault(option, value)


def check_parameters(model: nn.Module, param_groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse an optimizer with a parameter that is not the model's: nothing would train it."""
    names = {id(param): name for name, param in model.named_parameters()}
    held = {id(param): param for group in param_groups for param in group["params"]}
    foreign = [param for key, param in held.items() if key not in names]
    if not foreign:
        left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if left_out:
            log.info(
                "%s and %d more parameters require gradients and are in no group of the optimizer: their gradients "
                "stay on the device as torch leaves them. requires_grad_(False) would save that",
                left_out[0],
                len(left_out) - 1,
            )
        return
    missing = next((name for key, name in names.items() if key not in held), None)
    advice = "make the optimizer from model.parameters() of the model that you pass"
    if missing is not None:
        advice = f"and it does not hold the model's {missing}: {advice}"
    else:
        advice = (
            f"one has the shape {tuple(foreign[0].shape)}: {advice}. Others, of a loss say, belong into an optimizer "
            "of their own; or make one module of both and offload that"
        )
    raise ConfigError(
        "optimizer", f"{len(held)} parameters", f"{len(foreign)} of them are not the model's, {advice}"
    )


def expect_whole_parameters(spec: AnySpec, config: OffloadConfig) -> None:
    """Refuse an optimizer that takes parameters whole where ranks have parts of them."""
    if spec.takes_whole and config.mesh is not None and config.mesh.tensor_size != 1:
        allowed = (
            f"a mesh without tensor parallelism for {spec.name}, which takes matrices whole: no rank has them"
        )
        raise ConfigError("mpu", f"{config.mesh.tensor_size} tensor-parallel ranks", allowed)


def expect_rates(param_groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError for a group without a rate where the configuration leaves the rate at "auto"."""
    if any(group["lr"] is None for group in param_groups):
        raise ConfigError("optimizer.params.lr", "auto", f"{UNRESOLVED}; or pass an optimizer")
