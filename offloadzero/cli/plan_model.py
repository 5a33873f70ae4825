"""A model without memory, cut and planned as by the engine: from its shape, its config.json, or a function.

[Note: a model that is nowhere]
`initialize()` and `offload()` cut a model into units and plan the bytes of every tier before they move anything. They
need names, shapes and dtypes, which a model on the meta device has as well. So the plan of a model without memory is
made by the engine's own functions, and equals the plan that the engine makes of the real model.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadzero.config import OffloadConfig, settle_for_initialize, settle_for_offload
from offloadzero.errors import ConfigError
from offloadzero.planning.engine_plan import DTYPES, plan_records
from offloadzero.planning.memory_plan import MemoryPlan, with_kept_gradients
from offloadzero.planning.shapes import PUBLISHED, ModelShape, read_shape
from offloadzero.planning.traffic import Uses
from offloadzero.segments import TierName
from offloadzero.sharding.shard_spec import WHOLE, ShardSpec, divides_params, divides_states
from offloadzero.streaming.units import Site, UnitCut, checkpointed_modules, cut_units
from offloadzero.update.records import Record
from offloadzero.update.spec import AnySpec, UpdateForm
from offloadzero.update.specs import spec_of_type
from offloadzero.update.specs.adam import ADAM

KEY = "--model"


class Loop(str, Enum):
    """The script's way of starting: it decides on clipping and on how long gradients are kept."""

    INITIALIZE = "initialize"
    OFFLOAD = "offload"


@dataclass(frozen=True)
class ModelSource:
    """The model named by `--model`: `build` makes it on torch's default device."""

    text: str
    build: Callable[[], nn.Module]
    shape: ModelShape | None = None

    def on_meta(self) -> nn.Module:
        """Make the model without its numbers: [Note: a model that is nowhere]."""
        with torch.device("meta"):
            return self.build()


@dataclass(frozen=True)
class PlannedModel:
    """A model's records and the memory that the engine reserves for them."""

    class_name: str  # of the model
    config: OffloadConfig  # the configuration as the loop settles it
    spec: AnySpec
    cut: UnitCut
    plan: MemoryPlan
    checkpointed: tuple[str, ...]  # units that keep only their inputs for backward
    buffer_bytes: int  # of the model's buffers, which lie on the device beside what is reserved

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of all units."""
        return self.cut.records

    @property
    def num_parameters(self) -> int:
        """The number of elements, without padding."""
        return sum(record.num_params for record in self.records)

    @property
    def num_trainable(self) -> int:
        """The number of elements that the optimizer updates, without padding."""
        return sum(slot.num_elements for record in self.records for slot in record.trainable_slots)


def read_model(text: str) -> ModelSource:
    """Read a shape, a config.json of transformers (or its directory), or `module:function`. Raises ConfigError."""
    shape = read_shape(KEY, text)
    if shape is not None:
        return ModelSource(text, shape.build, shape)
    if os.path.exists(text):
        return ModelSource(text, _of_transformers(text))
    module, _, function = text.partition(":")
    if not (module.replace(".", "").isidentifier() and function.isidentifier()):
        allowed = (
            "a shape (llama:13b, gpt:10b, hidden/layers/heads/vocabulary), the path of a config.json of transformers, "
            "or module:function"
        )
        raise ConfigError(KEY, text, allowed, known_values=PUBLISHED)
    return ModelSource(text, _of_function(text, module, function))


def _of_transformers(path: str) -> Callable[[], nn.Module]:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(KEY, path, "transformers, which reads it, is not installed here") from error
    models: Any = transformers
    try:
        config = models.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # its checks of the fields raise any error
        raise ConfigError(KEY, path, f"transformers does not read it: {_reason(error)}") from error

    def build() -> nn.Module:
        try:
            model: nn.Module = _build_of_transformers(models, config)
        except Exception as error:  # any error of a model's constructor for wrong sizes
            raise ConfigError(KEY, path, f"transformers does not build it: {_reason(error)}") from error
        return model

    return build


def _build_of_transformers(models: Any, config: Any) -> Any:
    """Make the class that the file names, or the one of its type, with logits where the architecture has them."""
    for name in config.architectures or ():
        named = getattr(models, name, None)
        if isinstance(named, type) and issubclass(named, nn.Module):
            return named._from_config(config)  # type: ignore[attr-defined]  # as each auto class does
    causal = type(config) in models.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = models.AutoModelForCausalLM if causal else models.AutoModel
    return auto.from_config(config)


def _of_function(text: str, module: str, function: str) -> Callable[[], nn.Module]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # the module's own code runs here
        reason = error if isinstance(error, ImportError) else _reason(error)
        raise ConfigError(KEY, text, f"{module} cannot be imported from {Path.cwd()}: {reason}") from error
    if not callable(found):
        raise ConfigError(KEY, text, f"{module} has no function {function}")

    def build() -> nn.Module:
        try:
            model = found()
        except Exception as error:
            allowed = f"a function without arguments that returns the model; it raised {_reason(error)}"
            raise ConfigError(KEY, text, allowed) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(KEY, text, f"a function that returns an nn.Module, not {type(model).__name__}")
        return model

    return build


def _reason(error: BaseException) -> str:
    """Return an error's text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def plan_model(
    model: nn.Module,
    config: OffloadConfig,
    *,
    loop: Loop = Loop.INITIALIZE,
    available: Mapping[TierName, int],
    form: UpdateForm = UpdateForm.NATIVE,
) -> PlannedModel:
    """Plan the memory that the engine reserves for `model`, whose parameters that require gradients are all trained.

    The engines of `config.world_size` ranks reserve the same: their shards have one size.

    Args:
        available: bytes by tier for `"placement": "auto"`; of a device whose memory is the host's there is no entry.
        form: the form of the updates on the device.

    Raises:
        ConfigError, BudgetError: those of the engine.
    """
    config = settle(config, loop)
    is_several = config.world_size > 1
    if is_several:
        from offloadzero.several_ranks import expect_built  # it loads torch.distributed

        expect_built(config)
    is_divided = is_several and divides_states(config.zero_stage)
    spec = spec_of_type(config.optimizer.type) if config.optimizer is not None else ADAM
    spec.expect_layout(config.state_layout)
    cut = cut_units(
        model,
        config.units,
        group_of={id(param): 0 for param in model.parameters() if param.requires_grad},
        param_dtype=DTYPES[config.precision.param_dtype],
        spec=spec,
        compact=config.state_layout == "compact",
        shard=ShardSpec(0, config.world_size) if is_divided else WHOLE,
        gathers_params=is_several and divides_params(config.zero_stage),
        is_reduced=is_several,
    )
    checkpointing = config.activation_checkpoints
    checkpointed = (
        checkpointed_modules(model, cut, config.units, checkpointing.units) if checkpointing else {}
    )
    plan = plan_records(
        cut.records,
        config,
        together=cut.together,
        available=available,
        form=form,
        num_checkpointed=len(checkpointed),
    )
    buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    return PlannedModel(
        class_name=type(model).__name__,
        config=config,
        spec=spec,
        cut=cut,
        plan=plan,
        checkpointed=tuple(checkpointed),
        buffer_bytes=buffer_bytes,
    )


def settle(config: OffloadConfig, loop: Loop) -> OffloadConfig:
    """Fill in the open settings as the way of starting does."""
    if loop is Loop.OFFLOAD:
        # offload() trains with the optimizer that it is given.
        return with_kept_gradients(settle_for_offload(config))
    return settle_for_initialize(config)


def uses_of(cut: UnitCut) -> Uses:
    """Return the records in the order in which a micro batch uses them, which is that of the sites in the model.

    Backward needs no weights of an embedding, nor of the first module if it is a single one: the model's inputs need no
    gradients. A model whose forward goes another way than its modules are listed is used in another order.
    """
    forward: list[int] = []
    backward: list[int] = []
    for site in cut.sites:
        forward += site.records
        is_leaf = next(site.module.children(), None) is None
        if not isinstance(site.module, nn.Embedding) and not (is_leaf and site is _first_called(cut)):
            backward += site.records
    return Uses(tuple(forward), tuple(reversed(backward)))


def _first_called(cut: UnitCut) -> Site:
    """Return the first site that is not the model itself, which holds the resident records."""
    return next((site for site in cut.sites if site.name), cut.sites[0])
