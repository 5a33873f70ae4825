"""Modules that are units of their own, whatever their forward uses of them: experts, of which the data choose some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from offloadzero.config.schema import LeafModuleConfig
from offloadzero.errors import ConfigError

MARK = "_z3_leaf"  # the attribute that DeepSpeed sets on a module


def is_marked(module: nn.Module) -> bool:
    """Whether a script has made the module a leaf."""
    return bool(vars(module).get(MARK, False))


def is_of_class(module: nn.Module, classes: Sequence[type | str]) -> bool:
    """Whether a module is of one of the classes, or has the name of one, with or without that of its file."""
    own = type(module)
    names = (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return any(isinstance(module, each) if isinstance(each, type) else each in names for each in classes)


def leaf_modules(model: nn.Module, config: LeafModuleConfig) -> dict[int, str]:
    """Return the name of each leaf module by its id: those that are marked, and those that the configuration names.

    Raises ConfigError for the model itself.
    """
    leaves = {
        id(module): name
        for name, module in model.named_modules()
        if is_marked(module) or _is_named(name, module, config)
    }
    if id(model) in leaves:
        raise ConfigError(
            "leaf modules", type(model).__name__, "modules of the model, and not the model itself"
        )
    return leaves


def idle_leaf_modules(model: nn.Module, config: LeafModuleConfig) -> Iterator[str]:
    """Say of each name in the configuration that no module has it: a misspelt one, as a rule, or another model's."""
    for key in ("classes", "names", "name_suffixes"):
        for name in getattr(config, key):
            alone = LeafModuleConfig(**{key: (name,)})
            if not any(_is_named(each, module, alone) for each, module in model.named_modules()):
                yield f"zero_optimization.leaf_module.{key}: {name!r} is that of no module of the model"


def _is_named(name: str, module: nn.Module, config: LeafModuleConfig) -> bool:
    return name in config.names or name.endswith(config.name_suffixes) or is_of_class(module, config.classes)
