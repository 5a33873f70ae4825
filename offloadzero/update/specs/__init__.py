"""The optimizers that the engine trains with, one file each: [Note: an optimizer spec] in update/spec.py."""

from __future__ import annotations

import torch

from offloadzero.errors import ConfigError
from offloadzero.update.spec import AnySpec
from offloadzero.update.specs.adagrad import ADAGRAD
from offloadzero.update.specs.adam import ADAM
from offloadzero.update.specs.lion import LION
from offloadzero.update.specs.muon import MUON
from offloadzero.update.specs.sgd import SGD

SPECS: tuple[AnySpec, ...] = (ADAM, LION, ADAGRAD, SGD, MUON)

KNOWN_CLASSES = tuple(cls for spec in SPECS for cls in spec.classes)


def spec_of_type(name: str) -> AnySpec:
    """Return the spec for a type in the JSON, which the loader has checked."""
    return next(spec for spec in SPECS if name in spec.types)


def spec_of(optimizer: torch.optim.Optimizer) -> AnySpec:
    """Return the spec for an optimizer; raises ConfigError for one of an unknown class."""
    for spec in SPECS:
        if isinstance(optimizer, spec.classes):
            return spec
    raise ConfigError("optimizer", type(optimizer).__name__, f"allowed: {known_classes_text()}")


def known_classes_text() -> str:
    """Name the modules from which the known classes are imported."""
    return ", ".join(map(_public_name, KNOWN_CLASSES))


def _public_name(cls: type) -> str:
    home = "torch.optim" if cls.__module__.startswith("torch.optim.") else "offloadzero.optim"
    return f"{home}.{cls.__name__}"
