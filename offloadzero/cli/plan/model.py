"""The model that `--model` names: by its shape, its config.json, or a function."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from offloadzero.errors import ConfigError
from offloadzero.planning.model.shapes import PUBLISHED, ModelShape, read_shape

KEY = "--model"
_POSITIONS = re.compile(r"(^|\.)(wpe|[a-z_]*position[a-z_]*)$")  # the names of tables in transformers


@dataclass(frozen=True)
class ModelSource:
    """The model named by `--model`: `build` makes it on torch's default device."""

    text: str
    build: Callable[[], nn.Module]
    shape: ModelShape | None = None
    num_positions: int = 0  # the most tokens of a sample, as its configuration says; 0: it says none

    @staticmethod
    def of_shape(shape: ModelShape) -> ModelSource:
        """Return the source of a shape."""
        return ModelSource(str(shape), shape.build, shape)

    @property
    def num_blocks(self) -> int:
        """The number of equal blocks, of a model of a shape; of another 0, which says nothing."""
        return self.shape.num_layers if self.shape is not None and self.build == self.shape.build else 0

    @property
    def learns_positions(self) -> bool:
        """Whether it has a table of positions, beyond which there are none. Rotary ones have no such end."""
        if self.shape is not None:
            return bool(self.shape.num_positions)
        tables = (name for name, one in self.on_meta().named_modules() if isinstance(one, nn.Embedding))
        return any(_POSITIONS.search(name) for name in tables)

    def on_meta(self, num_blocks: int = 0) -> nn.Module:
        """Make the model without its numbers: [Note: a model that is nowhere].

        With another number of blocks where one is given, which a model of a shape allows.
        """
        build = self.build
        if self.shape is not None and num_blocks not in (0, self.shape.num_layers):
            build = replace(self.shape, num_layers=num_blocks).build
        with torch.device("meta"), _NoNumbers():
            return build()


class _NoNumbers(TorchFunctionMode):
    """Draws no random numbers for tensors that have no memory: torch would load its compiler to do nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def read_model(text: str) -> ModelSource:
    """Read a shape, a config.json of transformers (or its directory), or `module:function`. Raises ConfigError."""
    shape = read_shape(KEY, text)
    if shape is not None:
        return ModelSource(text, shape.build, shape, shape.num_positions)
    if os.path.exists(text):
        return _of_transformers(text)
    module, _, function = text.partition(":")
    if not (module.replace(".", "").isidentifier() and function.isidentifier()):
        allowed = (
            "a shape (llama:13b, gpt:10b, hidden/layers/heads/vocabulary), the path of a config.json of transformers, "
            "or module:function"
        )
        raise ConfigError(KEY, text, allowed, known_values=PUBLISHED)
    return ModelSource(text, _of_function(text, module, function))


def _of_transformers(path: str) -> ModelSource:
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

    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return ModelSource(path, build, num_positions=positions if isinstance(positions, int) else 0)


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
    except (Exception, SystemExit) as error:  # the module's own code runs here
        reason = error if isinstance(error, ImportError) else _reason(error)
        raise ConfigError(KEY, text, f"{module} cannot be imported from {Path.cwd()}: {reason}") from error
    if not callable(found):
        raise ConfigError(KEY, text, f"{module} has no function {function}")

    def build() -> nn.Module:
        try:
            model = found()
        except (Exception, SystemExit) as error:
            allowed = f"a function without arguments that returns the model; it raised {_reason(error)}"
            raise ConfigError(KEY, text, allowed) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(KEY, text, f"a function that returns an nn.Module, not {type(model).__name__}")
        return model

    return build


def _reason(error: BaseException) -> str:
    """Return an error's text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
