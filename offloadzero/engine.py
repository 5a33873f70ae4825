"""`initialize()` and the Engine, with DeepSpeed's names and returns (floor 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from offloadzero.checkpoint.states import (
    States,
    find_checkpoint,
    load_states,
    read_meta,
    save_states,
    save_weights,
)
from offloadzero.config import OffloadConfig, TierName, load_config
from offloadzero.errors import ConfigError
from offloadzero.observe.clock import StepReport
from offloadzero.optim.lr_schedules import build_lr_scheduler
from offloadzero.optimizer import ConfigSource, OffloadedOptimizer, check_optimizer, group_defaults

OptimizerSource = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
SchedulerSource = Any  # a torch scheduler, or a callable that makes one from the optimizer


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerSource = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerSource = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    config_params: ConfigSource | None = None,
) -> tuple[Engine, OffloadedOptimizer, DataLoader[Any] | None, Any]:
    """Make a training engine of `model` from a DeepSpeed-shaped JSON.

    Args:
        args: an object whose `deepspeed_config` names the JSON, when `config` is None.
        optimizer: a torch.optim.Adam or AdamW, or a callable that makes one from the parameters; None takes the
            config's optimizer block.
        model_parameters: parameters or param groups for the config's optimizer; None takes all trainable ones.
        training_data: a dataset for the returned DataLoader, at the micro batch size.
        lr_scheduler: a scheduler or a callable that makes one from the optimizer; None takes the config's.
        config, config_params: a dict, a path, or an OffloadConfig.

    Returns:
        (engine, optimizer, dataloader or None, lr_scheduler or None).

    Raises:
        ConfigError, BudgetError, AioError.
    """
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError("config", None, "a dict, the path of a JSON file, or an OffloadConfig")
    if model is None:
        raise ConfigError("model", None, "an nn.Module")
    settings = load_config(source)
    groups = _param_groups(model, optimizer, model_parameters, settings)
    offloaded = OffloadedOptimizer(model, groups, settings)
    scheduler = _make_scheduler(lr_scheduler, settings, offloaded)
    engine = Engine(model, offloaded, scheduler)
    loader = None
    if training_data is not None:
        loader = DataLoader(
            training_data, batch_size=settings.batch.micro_batch_size or 1, collate_fn=collate_fn
        )
    return engine, offloaded, loader, scheduler


def _param_groups(
    model: nn.Module, optimizer: OptimizerSource, model_parameters: Any, config: OffloadConfig
) -> list[dict[str, Any]]:
    trainable = [param for param in model.parameters() if param.requires_grad]
    if not any(True for _ in model.parameters()):
        raise ConfigError("model", type(model).__name__, "a module with parameters: this one has none")
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(model_parameters if model_parameters is not None else trainable)
        check_optimizer(optimizer)
        return optimizer.param_groups
    if config.optimizer is None:
        raise ConfigError("optimizer", None, "pass one to initialize() or name one in the config")
    defaults = group_defaults(config.optimizer)
    given: list[Any] = list(model_parameters) if model_parameters is not None else list(trainable)
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**defaults, **group, "params": list(group["params"])} for group in groups]


def _make_scheduler(source: SchedulerSource, config: OffloadConfig, optimizer: OffloadedOptimizer) -> Any:
    if source is None:
        return build_lr_scheduler(config.scheduler, optimizer) if config.scheduler is not None else None
    if isinstance(source, torch.optim.lr_scheduler.LRScheduler) or not callable(source):
        return source
    return source(optimizer)


class Engine:
    """Trains one model: `loss = engine(batch); engine.backward(loss); engine.step()`.

    Attributes it does not have are the module's.
    """

    def __init__(self, model: nn.Module, optimizer: OffloadedOptimizer, lr_scheduler: Any) -> None:
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._runtime = optimizer.runtime
        self._boundary_override: bool | None = None
        self._num_micro_steps = 0
        self._stepper = optimizer.runtime.stepper
        self._stepper.boundary = self.is_gradient_accumulation_boundary

    # --- the loop ---

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Backward of `loss` / accumulation steps; returns that quotient."""
        if self._runtime.monitor.wants_loss:
            self._runtime.monitor.add_loss(self._runtime.accelerator.read_later(loss))
        scaled = loss / self.gradient_accumulation_steps() if self.gradient_accumulation_steps() > 1 else loss
        self.optimizer.scale(scaled).backward()
        return scaled

    def step(self) -> None:
        """At an accumulation boundary: update the weights and advance the learning-rate schedule."""
        boundary = self.is_gradient_accumulation_boundary()
        self._num_micro_steps += 1
        if not boundary:
            return
        self.optimizer.step()
        may_skip = self._runtime.config.precision.param_dtype == "fp16"
        if self.lr_scheduler is not None and (not may_skip or self.was_step_applied()):
            self.lr_scheduler.step()
        every = self._runtime.config.steps_per_print
        if every and self.global_steps % every == 0:
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}", flush=True)

    def zero_grad(self) -> None:
        """Drop gradients that no step has used."""
        self.optimizer.zero_grad()

    def train(self, mode: bool = True) -> Engine:
        """The module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """The module's evaluation mode."""
        return self.train(False)

    # --- accumulation ---

    def gradient_accumulation_steps(self) -> int:
        """Micro batches per step."""
        return self._runtime.config.batch.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """As configured."""
        return self._runtime.config.batch.micro_batch_size

    def train_batch_size(self) -> int | None:
        """As configured or resolved."""
        return self._runtime.config.batch.train_batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether `step()` after the present micro batch updates the weights."""
        if self._boundary_override is not None:
            return self._boundary_override
        return (self._num_micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Override the counting, until set again."""
        self._boundary_override = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro batches inside are no boundary."""
        previous = self._boundary_override
        self._boundary_override = False
        try:
            yield
        finally:
            self._boundary_override = previous

    # --- what happened ---

    def get_global_grad_norm(self) -> float:
        """Of the last step, before clipping; waits until it is known."""
        return self.optimizer.grad_norm()

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """False when the last step was skipped; waits until it is known."""
        return self.optimizer.was_step_applied()

    @property
    def loss_scale(self) -> float:
        """The present loss scale (1.0 without fp16)."""
        return self._stepper.loss_scale

    @property
    def device(self) -> torch.device:
        """Where the computation runs."""
        return self._runtime.accelerator.device

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._stepper.counts.global_steps

    @property
    def micro_steps(self) -> int:
        """Calls of `step()` so far."""
        return self._num_micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for non-finite gradients; waits until the last step is decided."""
        self.was_step_applied()
        return self._stepper.counts.skipped_steps

    def memory_table(self) -> str:
        """Bytes per tier, the files on NVMe and the file engine in use."""
        return self._runtime.memory_table()

    def reserved_bytes(self) -> dict[str, int]:
        """Bytes reserved in each tier: "device", "host", "nvme"."""
        return {tier.value: self._runtime.reserved_bytes(tier) for tier in TierName}

    def last_step_report(self) -> StepReport:
        """Seconds of the last step and what the training thread lost in which wait."""
        return self._runtime.clock.last

    def synchronize(self) -> None:
        """Block until all updates are home; raises what failed."""
        self._runtime.synchronize()

    def close(self) -> None:
        """Finish the updates, stop the threads, remove the files. Raises the first failure."""
        self._runtime.close()

    # --- checkpoints ---

    def _states(self) -> States:
        return States(self.module, self._runtime.records, self._runtime.weights)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write all states to `save_dir`/`tag` (default: global_stepN); the old checkpoint stays until this is whole.

        `client_state` must be JSON. See [Note: checkpoint format] in offloadzero/checkpoint/states.py.
        """
        scheduler = getattr(self.lr_scheduler, "state_dict", None)
        meta = {
            "client_state": dict(client_state or {}),
            "global_steps": self.global_steps,
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self._stepper.loss_scale_state(),
            "lr_scheduler": scheduler() if callable(scheduler) else None,
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
        }
        save_states(
            self._states(),
            Path(save_dir),
            tag=tag or f"global_step{self.global_steps}",
            meta=meta,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Take over a checkpoint, whatever the placement or dtype it was written from.

        Returns:
            (its path, client_state); (None, {}) when `load_dir` has no checkpoint.

        Raises:
            CheckpointError: it is not whole or does not fit the model.
        """
        path = find_checkpoint(Path(load_dir), tag)
        if path is None:
            return None, {}
        meta = read_meta(path)
        with_states = load_optimizer_states and not load_module_only
        load_states(self._states(), path, strict=load_module_strict, load_optimizer_states=with_states)
        if with_states:
            self._num_micro_steps = meta["micro_steps"]
            self._stepper.restore(meta["global_steps"], meta["skipped_steps"], meta["loss_scale"])
            for group, saved in zip(self.optimizer.param_groups, meta["param_groups"], strict=True):
                group.update(saved)
        if load_lr_scheduler_states and not load_module_only and meta["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(meta["lr_scheduler"])
        return str(path), meta["client_state"]

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> bool:
        """One safetensors file with the weights in their training dtype."""
        save_weights(self._states(), Path(save_dir) / save_filename)
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.module, name)
