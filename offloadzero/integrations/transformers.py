"""The Trainer of transformers, and those of TRL that are made from it, over several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from offloadzero.api.optimizer import ACCELERATE_MARK
from offloadzero.errors import ConfigError


class CollectiveSaving:
    """Put before a Trainer's class, for several ranks: `class Offloaded(CollectiveSaving, Trainer): ...`.

    The Trainer has rank 0 save alone. Where ranks have parts of weights and states all of them read, and rank 0 writes.
    Raises ConfigError where mixed precision is asked for that the configuration has not.
    """

    _state: dict[str, Any] | None = None  # of the model, while it is saved

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        model, given = self.model, self.args  # type: ignore[attr-defined]
        if (given.bf16 or given.fp16) and getattr(model, ACCELERATE_MARK, False):
            wanted = torch.bfloat16 if given.bf16 else torch.float16
            if all(param.dtype != wanted for param in model.parameters()):
                name = "bf16" if given.bf16 else "fp16"
                allowed = f'"{name}": {{"enabled": true}} in the configuration: there is no autocast over several ranks'
                raise ConfigError(f"TrainingArguments.{name}", True, allowed)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Read on all ranks, and write as the Trainer does."""
        model = self.model  # type: ignore[attr-defined]
        if hasattr(model, "peft_config"):
            named = model.named_parameters()
            self._state = {name: param.detach().clone() for name, param in named if param.requires_grad}
        else:
            self._state = model.state_dict()
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            self._state = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._state if state_dict is None else state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        states = self.optimizer.state_dict()  # type: ignore[attr-defined]
        if self.args.should_save:  # type: ignore[attr-defined]
            torch.save(states, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)  # type: ignore[attr-defined]
