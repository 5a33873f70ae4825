"""DeepSpeed's functions for leaf modules: modules that are one unit each, whatever their forward uses of them.

At stage 3 all ranks fetch a unit together. If each expert of a block were a unit, ranks whose data go to different
experts could not. set_z3_leaf_modules(model, [the class that holds the experts]), before `initialize()` or
`offload()`, makes all experts of a block one unit. So does `zero_optimization.leaf_module`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from offloadzero.engine.runtime import Runtime, runtime_of
from offloadzero.errors import ConfigError, StateError
from offloadzero.streaming.building.leaf_modules import MARK, is_marked, is_of_class, leaf_modules

Classes = Sequence[type[nn.Module] | str]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make each module of these classes one unit, if it is not part of one; return them.

    Args:
        model: a model that is not offloaded yet.
        leaf_module_classes: classes of modules, or their names, with or without that of their file's module.
        raise_if_not_found: whether it is an error that the model has none.

    Raises ConfigError for what is no class and where the model has none of them, StateError for an offloaded model.
    """
    return _mark(model, leaf_module_classes, raise_if_not_found, is_leaf=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules` for these classes; return their modules. Raises its errors."""
    return _mark(model, leaf_module_classes, raise_if_not_found, is_leaf=False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model: those that are set, and once it is offloaded its configuration's, too."""
    runtime = _runtime_of(model)
    ids = {} if runtime is None else _leaves_of(runtime)
    return [module for module in model.modules() if is_marked(module) or id(module) in ids]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is a leaf module."""
    return any(module is model for module in get_z3_leaf_modules(model))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter of an offloaded model belongs to a leaf module; of another model none does."""
    runtime = runtime_of(model)
    if runtime is None:
        return False
    leaves = _leaves_of(runtime)
    return any(
        param is model
        for module in runtime.model.modules()
        if id(module) in leaves
        for param in module.parameters()
    )


def _leaves_of(runtime: Runtime) -> dict[int, str]:
    return leaf_modules(runtime.model, runtime.config.units.leaf_modules)


def _runtime_of(model: nn.Module) -> Runtime | None:
    return next((found for found in map(runtime_of, model.parameters()) if found is not None), None)


def _mark(model: nn.Module, classes: Classes, raise_if_not_found: bool, *, is_leaf: bool) -> list[nn.Module]:
    classes = [classes] if isinstance(classes, (str, type)) else classes
    for each in classes:
        if not isinstance(each, (type, str)):
            raise ConfigError("leaf_module_classes", each, "classes of modules, or their names")
    if _runtime_of(model) is not None:
        raise StateError(
            "leaf modules are set before initialize() or offload(), which cut the model into its units: this one is "
            "offloaded"
        )
    found = [module for module in model.modules() if is_of_class(module, classes)]
    if not found and raise_if_not_found:
        names = [each if isinstance(each, str) else each.__name__ for each in classes]
        known = {type(module).__name__ for module in model.modules()}
        raise ConfigError(
            "leaf_module_classes",
            ", ".join(names),
            "classes of the model's modules",
            known_values=sorted(known),
        )
    for module in found:
        setattr(module, MARK, is_leaf)
    return found
