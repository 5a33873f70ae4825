"""The Trainer of transformers, and those of TRL that are made from it: offloaded, on one rank or several."""

from __future__ import annotations

import inspect
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.trainer import SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_SAFE_WEIGHTS_NAME

from offloadzero.api.checkpoints import EngineCheckpoints
from offloadzero.api.optimizer import ACCELERATE_MARK, ConfigSource, OffloadedOptimizer, offload
from offloadzero.errors import CheckpointError, ConfigError

log = logging.getLogger("offloadzero")

_STATES = "offloadzero"  # the folder of the states in a checkpoint of the Trainer


def _models_in(folder: Path) -> dict[Path, tuple[int, ...]]:
    """The model in one file and the one in shards, as far as they are there, and what changes when one is written."""
    found = [path for path in (folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME) if path.exists()]
    return {
        path: (status.st_ino, status.st_size, status.st_mtime_ns)
        for path in found
        for status in [path.stat()]
    }


def _remove_older(before: dict[Path, tuple[int, ...]], folder: Path) -> None:
    """Where a save has written the other one of the two, remove the one of before: loading takes the one file.

    Which is newer their times do not say: a clock may have been put back, or be another machine's.
    """
    now = _models_in(folder)
    kept = [path for path, status in now.items() if before.get(path) == status]
    if len(now) > len(kept) == 1:
        kept[0].unlink()


class CollectiveSaving:
    """Put before a Trainer's class: `class Offloaded(CollectiveSaving, KTOTrainer): ...`.

    With `offload_config` (a dict, the path of a JSON file, or an OffloadConfig) the Trainer offloads its model, and the
    optimizer that it makes or that `optimizers` has: in the place of moving the model to the device. Where the
    configuration has `activation_checkpoints`, `gradient_checkpointing` is switched off. Without `offload_config` the
    model may be one that `offload()` has returned, with `optimizers=(optimizer, None)`.

    The Trainer has rank 0 save alone. Where ranks have parts of weights and states all of them read, and rank 0 writes:
    a model of transformers in files of `max_shard_size`, one of which is in memory at a time, and of a PEFT model the
    adapters alone, as `PeftModel.from_pretrained(base, folder)` loads them. Its checkpoints have the
    optimizer's states as this package's, which are written and read one after the other; the Trainer by itself reads
    them all at once. Raises ConfigError where mixed precision is asked for that the configuration has not, for
    `save_on_each_node`, for several GPUs in one process, and for `model_init` with `offload_config`; and what
    `offload()` raises.
    """

    max_shard_size = "500MB"

    def __init__(self, *args: Any, offload_config: ConfigSource | None = None, **keys: Any) -> None:
        self._offload_config = offload_config
        if offload_config is not None:  # what create_optimizer() goes by, and the Trainer sets too late
            named = {**inspect.signature(super().__init__).bind_partial(*args, **keys).arguments, **keys}
            self.optimizer, _ = named.get("optimizers", (None, None))
            self.optimizer_cls_and_kwargs = named.get("optimizer_cls_and_kwargs")
        super().__init__(*args, **keys)
        if offload_config is not None:
            self.optimizer = self._made
        model, given = self.model, self.args  # type: ignore[attr-defined]
        if given.save_on_each_node:
            allowed = "False: rank 0 writes what all ranks read"
            raise ConfigError("TrainingArguments.save_on_each_node", True, allowed)
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if given.world_size != ranks:
            allowed = f"{ranks}, the ranks of torch.distributed: without GPUs pass use_cpu=True"
            raise ConfigError("TrainingArguments.world_size", given.world_size, allowed)
        if given.n_gpu > 1:  # the Trainer would put nn.DataParallel around the model, and multiply its batch
            allowed = (
                "1: start one process per GPU by torchrun, or hide the other GPUs by CUDA_VISIBLE_DEVICES=0"
            )
            raise ConfigError("TrainingArguments.n_gpu", given.n_gpu, allowed)
        if (given.bf16 or given.fp16) and getattr(model, ACCELERATE_MARK, False):
            wanted = torch.bfloat16 if given.bf16 else torch.float16
            if all(param.dtype != wanted for param in model.parameters()):
                name = "bf16" if given.bf16 else "fp16"
                allowed = f'"{name}": {{"enabled": true}} in the configuration: there is no autocast over several ranks'
                raise ConfigError(f"TrainingArguments.{name}", True, allowed)

    def create_accelerator_and_postprocess(self) -> None:
        """Offload the model: the last call before the Trainer moves it to the device, where it may not fit."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        config, self._offload_config = self._offload_config, None
        if config is None:
            return
        if getattr(self, "model", None) is None:
            allowed = "offload_config needs model= (not model_init=), and transformers 4.53 or newer"
            raise ConfigError("Trainer.model", None, allowed)
        made = self.create_optimizer()  # type: ignore[attr-defined]
        _, self._made = offload(self.model, made, config)  # type: ignore[attr-defined]
        if self._made.runtime.config.activation_checkpoints is not None:
            for name in ("gradient_checkpointing", "activation_checkpointing"):  # its names in 4 and 5
                if getattr(self.args, name, None):  # type: ignore[attr-defined]
                    log.info("%s is off: the configuration's activation_checkpoints take its place", name)
                    setattr(self.args, name, False)  # type: ignore[attr-defined]
            if hasattr(self.model, "config"):  # type: ignore[attr-defined]
                self.model.config.use_cache = False  # type: ignore[attr-defined]  # it would grow once more in backward

    def _offloaded(self) -> OffloadedOptimizer | None:
        """The optimizer that `offload()` has returned, which accelerate wraps."""
        given = self.optimizer
        optimizer = getattr(given, "optimizer", given)
        return optimizer if isinstance(optimizer, OffloadedOptimizer) else None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the model, but for adapters, which come with the states: PEFT would put others in their place.

        What PEFT has saved beside them is loaded, too: embeddings that were resized are in no base.
        """
        model = self.model if model is None else model  # type: ignore[attr-defined]
        folder = Path(resume_from_checkpoint)
        if not hasattr(model, "peft_config") or self._offloaded() is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        if not (folder / _STATES).is_dir():
            raise CheckpointError(
                f"{folder} has no folder {_STATES}: another Trainer has saved it, or not all of it is there. Resume "
                "from the one before it, or begin anew with its adapters: PeftModel.from_pretrained(is_trainable=True)"
            )
        frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
        with safe_open(folder / ADAPTER_SAFE_WEIGHTS_NAME, "pt") as file:
            for name in sorted(frozen.keys() & set(file.keys())):
                frozen[name].data.copy_(file.get_tensor(name))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Read on all ranks, and write on the first as the Trainer does."""
        save = partial(super().save_model, output_dir, _internal_call)  # type: ignore[misc]
        optimizer, model = self._offloaded(), self.model  # type: ignore[attr-defined]
        if optimizer is None:
            save()
            return
        if not isinstance(model, transformers.PreTrainedModel) or "save_pretrained" in vars(model):
            optimizer.runtime.read_by_first(save)
            return
        in_files = partial(model.save_pretrained, max_shard_size=self.max_shard_size)
        vars(model)["save_pretrained"] = in_files  # which the Trainer calls without a size
        folder = Path(output_dir or self.args.output_dir)  # type: ignore[attr-defined]
        before = _models_in(folder) if self.args.should_save else {}  # type: ignore[attr-defined]
        try:
            optimizer.runtime.read_by_first(save)
        finally:
            del vars(model)["save_pretrained"]
        if self.args.should_save:  # type: ignore[attr-defined]
            _remove_older(before, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self._offloaded()
        if optimizer is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        EngineCheckpoints(optimizer.runtime, optimizer).save(
            output_dir, _STATES, None, save_latest=False, exclude_frozen=True, lr_scheduler=None, wait=True
        )
        if self.args.should_save:  # type: ignore[attr-defined]
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer = self._offloaded()
        if checkpoint is None or optimizer is None or not (Path(checkpoint) / _STATES).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        checkpoints = EngineCheckpoints(optimizer.runtime, optimizer)
        try:
            found = checkpoints.find(
                checkpoint, _STATES, strict=False, with_counters=True, with_states=True, with_schedule=False,
                lr_scheduler=None,
            )  # fmt: skip
            if found is not None:
                checkpoints.load(found, lr_scheduler=None)
        except CheckpointError as error:  # it looks for others within this one, where the Trainer has none
            raise CheckpointError(
                f"{error}. Remove {checkpoint}, and resume from the one before it"
            ) from error
        schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)  # type: ignore[attr-defined]


class Trainer(CollectiveSaving, transformers.Trainer):
    """The Trainer of transformers: `Trainer(model=model, args=args, ..., offload_config="config.json")`.

    Everything else is as there; `CollectiveSaving` says what is offloaded, saved and raised.
    """
