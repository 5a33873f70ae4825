"""The Engine, with DeepSpeed's names and returns."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from offloadzero.api.arguments import Collate, make_loader, step_arguments
from offloadzero.api.checkpoints import EngineCheckpoints
from offloadzero.api.deepspeed import engine_names as deepspeed_names
from offloadzero.api.deepspeed.missing_names import ENGINE_NAMES, no_attribute
from offloadzero.api.optimizer import OffloadedOptimizer
from offloadzero.core import launch
from offloadzero.core.interrupts import uninterrupted, uninterrupted_throughout
from offloadzero.core.segments import TierName
from offloadzero.engine.lifetime import EngineState
from offloadzero.engine.runtime import Runtime
from offloadzero.errors import ConfigError, StateError
from offloadzero.observe.bound import StepReport
from offloadzero.observe.collectives import CollectiveCount

log = logging.getLogger("offloadzero")


class LossScale(float):
    """The present loss scale as a number that can also be called, as DeepSpeed's `loss_scale()` is."""

    def __call__(self) -> float:
        """Return the number."""
        return float(self)


_DROPPED = (
    "engine.zero_grad() has dropped the gradients of %d of the %d micro batches of a step, which begins anew: a loop "
    "that calls it before each of them never takes a step. It is not needed, as step() drops the gradients that it has "
    "used"
)


class Engine:
    """Trains one model: `loss = engine(batch); engine.backward(loss); engine.step()`.

    Any other attribute is a question of DeepSpeed's (offloadzero/api/deepspeed/engine_names.py), or the module's.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: OffloadedOptimizer | None,
        lr_scheduler: Any,
        training_dataloader: DataLoader[Any] | None,
    ) -> None:
        """Make the engine of a runtime. Without an optimizer the engine only evaluates."""
        self.module = runtime.model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._schedule_needs = step_arguments(lr_scheduler)
        self.training_dataloader = training_dataloader
        self.local_rank = launch.local_rank()
        self._runtime = runtime
        self._coordinator = runtime.coordinator
        self._accumulation = runtime.accumulation
        self.client_state: dict[str, Any] = {}  # what `resume()` shall return, as `step()` finds it
        self._has_dropped = False
        self._checkpoints = EngineCheckpoints(runtime, optimizer)

    # --- the loop ---

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self.module(*inputs, **kwargs)

    forward = __call__

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run backward of `loss` divided by the accumulation steps, and return that quotient.

        `scale_wrt_gas=False` leaves the division out.

        Raises:
            StateError: the engine has no optimizer or is closed, or `step()` has to come first.
            NonFiniteError, AioError: an earlier update failed.
        """
        optimizer = self._expect_optimizer("backward")
        if self._runtime.monitor.wants_loss:
            self._runtime.monitor.add_loss(self._runtime.accelerator.read_later(loss))
        self._advance_schedule()
        num_parts = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        scaled = loss / num_parts if num_parts > 1 else loss
        self._coordinator.begin_window()
        optimizer.scale(scaled).backward(retain_graph=retain_graph)
        return scaled

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss for a backward of the script's own: `engine.scale(loss).backward()`.

        Raises StateError if the engine has no optimizer or is closed.
        """
        optimizer = self._expect_optimizer("scale")
        self._coordinator.begin_window()
        return optimizer.scale(loss)

    @uninterrupted
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count the micro batch, and after the last one of a step update the weights and advance the schedule.

        `lr_kwargs` go to the schedule's `step()`.

        Raises:
            StateError: the engine has no optimizer or is closed, or `optimizer.step()` raises it.
            NonFiniteError, AioError: the update of this step or of an earlier one failed.
            ConfigError: `lr_kwargs` lacks what the schedule's `step()` takes, or a param group's option is refused.
        """
        optimizer = self._expect_optimizer("step")
        for name in self._schedule_needs:
            if name not in (lr_kwargs or {}):
                raise ConfigError(
                    "lr_kwargs",
                    lr_kwargs,
                    f'{type(self.lr_scheduler).__name__} needs engine.step({{"{name}": ...}}); or do not give it to '
                    "initialize(), and step it yourself",
                )
        # The schedule advances together with `global_steps`: code that reads it after an interrupt relies on that.
        self._advance_schedule()
        self._coordinator.expect_whole()
        if not self._accumulation.closes_step:
            self._accumulation.take()
            return
        with self._checkpoints.committing(self.client_state):
            optimizer.step()
        self._accumulation.take()
        self._schedule_due = None if self.lr_scheduler is None else dict(lr_kwargs or {})
        (self._advance_schedule if self._runtime.durable is None else self._commit_step)()
        every = self._runtime.config.steps_per_print
        if every and self.global_steps % every == 0:
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}", flush=True)

    @uninterrupted_throughout  # the other ranks wait for the commit
    def _commit_step(self) -> None:
        self._advance_schedule()
        self._checkpoints.commit(self.client_state, self.lr_scheduler)

    _schedule_due: dict[str, Any] | None = None  # what the schedule's own step() is given for the last step

    @uninterrupted
    def _advance_schedule(self) -> None:
        """Advance the schedule for a step that it has not seen: fp16 waits for the decision, and may be interrupted."""
        if self._schedule_due is None:
            return
        may_skip = self._runtime.config.precision.param_dtype == "fp16"
        applied = not may_skip or self.was_step_applied()
        due, self._schedule_due = self._schedule_due, None
        if applied and due is not None:
            self.lr_scheduler.step(**due)

    @uninterrupted
    def zero_grad(self) -> None:
        """Drop the gradients since the last step, also after a backward that failed, and begin the step anew.

        DeepSpeed keeps the gradients of earlier micro batches here. A loop that calls this before each of several micro
        batches would never take a step; a warning says so. After a NonFiniteError of which nothing was applied this
        lets training go on: that step counts as skipped.

        Raises:
            StateError: a backward has already updated weights (updates run in backward), so `step()` has to come first.
            NonFiniteError: the last step failed, and no call has raised its error yet.
        """
        if self.optimizer is not None:
            num_dropped = self._accumulation.num_taken
            self.optimizer.zero_grad()
            self._accumulation.restart()
            if num_dropped and not self._has_dropped:
                self._has_dropped = True
                log.warning(_DROPPED, num_dropped, self.gradient_accumulation_steps())

    def _expect_optimizer(self, call: str) -> OffloadedOptimizer:
        if self.optimizer is None:
            raise StateError(
                f"engine.{call}(): the engine has no optimizer, so it only evaluates: pass one to initialize(), or "
                "name one in the configuration"
            )
        self._checkpoints.expect_resumed(call)
        return self.optimizer

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: over several ranks each backward reduces its own gradients."""

    def train(self, mode: bool = True) -> Engine:
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module's evaluation mode."""
        return self.train(False)

    # --- methods of the module that return the module: here they return the engine ---

    def to(self, *places: Any, **more: Any) -> Engine:
        """Return the engine if nothing would change; so do `cuda()`, `half()` and the like.

        Raises:
            StateError: the call would move the engine or change its dtype.
        """
        wanted = (*places, *(more[key] for key in ("device", "dtype", "tensor") if key in more))
        for place in wanted:
            if place is not None and not isinstance(place, bool):  # non_blocking
                deepspeed_names.expect_place(self._runtime, place)
        return self

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
    ) -> None:
        """Compile the module as `module.compile(backend=..., **compile_kwargs)` does, and no schedule: ConfigError."""
        if schedule is not None:
            raise ConfigError("schedule", schedule, "None: DeepSpeed's compile passes are not built")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether `compile()` was called."""
        return self.module._compiled_call_impl is not None

    # --- batches and accumulation ---

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Make a DataLoader of micro batches, as `initialize(training_data=...)` does.

        Raises ConfigError where no size of a micro batch is known, and over several ranks for an IterableDataset.
        """
        return make_loader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            route=route,
            sampler=data_sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            num_workers=num_local_io_workers or 0,
            rank=self.get_data_parallel_rank(),
            world_size=self.dp_world_size,
        )

    def gradient_accumulation_steps(self) -> int:
        """Micro batches per step."""
        return self._accumulation.num_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per micro batch and rank, as configured or set."""
        return self._accumulation.batch.micro_batch_size

    def train_batch_size(self) -> int | None:
        """Samples per step over all ranks, as configured, resolved or set."""
        return self._accumulation.batch.train_batch_size

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps, between two steps. The micro batch stays as it is.

        Raises:
            ConfigError: the size is not a multiple of the micro batches of all ranks, the configuration has no micro
                batch, or gradients are not kept from one to the next.
            StateError: some micro batches of a step have been taken.
        """
        self._accumulation.set_train_batch_size(train_batch_size, global_steps=self.global_steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro batch, between two steps. The accumulation steps stay as they are.

        A DataLoader that exists keeps its batch size. Raises StateError after the first micro batch of a step.
        """
        self._accumulation.set_micro_batch_size(micro_batch_size, global_steps=self.global_steps)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether `step()` after the present micro batch updates the weights."""
        return self._accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether `step()` updates the weights, until set again; micro batches are no longer counted.

        Raises StateError with "managed_gradient_accumulation": false, where each `step()` does.
        """
        if not self._runtime.config.batch.managed:
            raise StateError(
                "managed_gradient_accumulation is false: each step() is a boundary, and nothing else is"
            )
        self._accumulation.override = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block no micro batch is a boundary."""
        previous = self._accumulation.override
        self._accumulation.override = False
        try:
            yield
        finally:
            self._accumulation.override = previous

    # --- what happened ---

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping; waits until it is known. None before the first step."""
        if self.optimizer is None or not self.optimizer.has_stepped:
            return None
        return self.optimizer.grad_norm()

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self._param_groups]

    def get_mom(self) -> list[Any]:
        """The betas of each param group; for SGD its momentum, and 0.0 where there is none."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._param_groups]

    def get_type(self) -> list[Any]:
        """The value of "type" in each param group, or 0.0 without one, as in DeepSpeed."""
        return [group.get("type", 0.0) for group in self._param_groups]

    def optimizer_name(self) -> str | None:
        """The class name of the optimizer that was given, or the type in the configuration."""
        origin = None if self.optimizer is None else self.optimizer.origin
        config = self._runtime.config.optimizer
        return type(origin).__name__ if origin is not None else config.type if config is not None else None

    def was_step_applied(self) -> bool:
        """False when the last step was skipped; waits until it is known."""
        return self._coordinator.was_applied()

    @property
    def loss_scale(self) -> LossScale:
        """The present loss scale (1.0 without fp16)."""
        return LossScale(self._coordinator.loss_scale)

    @property
    def device(self) -> torch.device:
        """The device on which the computation runs."""
        return self._runtime.accelerator.device

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._coordinator.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of all steps, by the batch sizes of the configuration and of `set_train_batch_size()`."""
        return self._accumulation.num_samples(self.global_steps)

    @property
    def micro_steps(self) -> int:
        """Calls of `step()` so far."""
        return self._accumulation.num_micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for non-finite gradients; waits until the last step is decided."""
        self.was_step_applied()
        return self._coordinator.skipped_steps

    def memory_table(self) -> str:
        """Bytes per tier, the files on NVMe and the file engine in use."""
        return self._runtime.memory_table()

    def reserved_bytes(self) -> dict[str, int]:
        """Bytes reserved in each tier: "device", "host", "nvme"."""
        return {tier.value: self._runtime.reserved_bytes(tier) for tier in TierName}

    def collectives(self) -> dict[str, CollectiveCount]:
        """Calls and bytes over the ranks since the start, by purpose and kind: "gradients reduce-scatter".

        Empty with one process. Bytes are those of the whole tensors, each once.
        """
        return self._runtime.group.collectives()

    def last_step_report(self) -> StepReport:
        """Return how long the last step took, and what the computation waited for.

        With CUDA this is the last step that the device has finished: the call does not wait for a later one.
        """
        return self._runtime.clock.last

    def synchronize(self) -> None:
        """Block until all updates are home; raises what failed."""
        self._runtime.synchronize()

    def close(self) -> None:
        """Finish the updates, stop the threads, remove the files. Raises the first failure."""
        self._runtime.close()

    destroy = close  # DeepSpeed's name

    def restore_model(self) -> None:
        """Make the model an ordinary one again, with its weights as they are now, and close the engine.

        All weights come into memory, in the dtype and on the device that they had; fp32 ones get their fp32 masters.
        Raises StateError if the engine is closed, inside a GatheredParameters block, and in the model's forward.
        """
        self._runtime.restore_model()

    @property
    def state(self) -> EngineState:
        """The engine's state: open, failed (any use raises the reason), closed, or its model is given back."""
        return self._runtime.state

    # --- checkpoints ---

    def resume(self) -> dict[str, Any] | None:
        """Go on with a durable run (`"offloadzero": {"durable": true}`) from its last step, or begin one.

        Weights, states, counters, schedule and random states are those after the step that was committed last. Returns
        `client_state` as it was then; None: there was no run in the directories of nvme_path.

        Raises:
            ConfigError: the run is not durable.
            CheckpointError: param groups or schedule are others than the run's. Nothing has changed then.
            StateError: steps were taken, or weights written, before.
        """
        return self._checkpoints.resume(self.lr_scheduler)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        wait: bool = True,
    ) -> bool:
        """Write all states to `save_dir`/`tag` (default: global_stepN); the old checkpoint stays until this is whole.

        `client_state` is a dict of numbers, texts, None, lists, tuples and dicts of them. Where frozen parameters
        were left out, `load_checkpoint()` leaves them as the model has them. Without `wait` states that have two places
        (`durable`, of one rank also `versions`) are written while training goes on: the next save or load,
        `finish_saving()` and `close()` wait for it, and raise what went wrong.

        Raises:
            ConfigError: `save_dir` or `tag` cannot be the name of a directory, or `client_state` cannot be written as
                JSON.
            CheckpointError: `tag` or `latest` is there already and is not of this package: it is left alone; or the
                model has parameters or buffers that cannot be in it.
            AioError: the disk is full, or fails: nothing was saved.
            StateError: a load did not come to its end, so the states are a mixture; or the engine is closed.
        """
        self._checkpoints.expect_savable("save_checkpoint")
        self._advance_schedule()
        self._checkpoints.save(
            save_dir,
            tag,
            client_state,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            lr_scheduler=self.lr_scheduler,
            wait=wait,
        )
        return True

    def finish_saving(self) -> None:
        """Block until a checkpoint that is written in the background is there. Raises AioError, CheckpointError."""
        self._checkpoints.background.finish()

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

        All of it is checked before the first weight, state or counter changes. Gradients of a step that was begun are
        dropped. Counters come with all but `load_module_only`, as in DeepSpeed.

        Returns:
            (its path, client_state); (None, {}) only when `load_dir` has no checkpoint and no `tag` is given.

        Raises:
            CheckpointError: the checkpoint is missing, not whole, or does not fit the model. Nothing has changed then.
            ConfigError: `load_dir` cannot be the name of a directory, or `tag` is neither a text nor a number.
            StateError: the engine is closed, or a load before did not come to its end.
        """
        is_training = self.optimizer is not None and not load_module_only
        found = self._checkpoints.find(
            load_dir,
            tag,
            strict=load_module_strict,
            with_counters=not load_module_only,
            with_states=load_optimizer_states and is_training,
            with_schedule=load_lr_scheduler_states and is_training,
            lr_scheduler=self.lr_scheduler,
        )
        if found is None:
            return None, {}
        if found.meta.partial_step is not None:
            warnings.warn(
                f"{found.path} was saved in the middle of a step: {found.meta.partial_step}", stacklevel=2
            )
        if self.optimizer is not None:
            self._coordinator.give_up_step()
            self._accumulation.restart()
        self._schedule_due = None
        self._checkpoints.load(found, lr_scheduler=self.lr_scheduler)
        return str(found.path), found.meta.client_state

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> bool:
        """Write one file with the weights in their training dtype; a file of that name is replaced.

        Safetensors if the name ends in ".safetensors"; else, as under DeepSpeed's name "pytorch_model.bin", a state
        dict as `torch.save()` writes it, for `torch.load()`.

        Raises:
            ConfigError: `save_dir` cannot be the name of a directory.
            CheckpointError: the directory cannot be written, or the model has parameters or buffers that cannot be in
                the file.
            StateError: a load did not come to its end, so the weights are a mixture; or the engine is closed.
        """
        self._checkpoints.save_weights(save_dir, save_filename)
        return True

    save_fp16_model = save_16bit_model  # its old name

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state_dict; its weights are new tensors in host memory."""
        values: dict[str, Any] = self.module.state_dict()
        if exclude_frozen_parameters:
            named = self.module.named_parameters(remove_duplicate=False)
            for name in [name for name, param in named if not param.requires_grad]:
                values.pop(name, None)
        return values

    _zero3_consolidated_16bit_state_dict = module_state_dict  # Accelerate and the HF Trainer call this

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., None] | None = None,
        fetch_z3_params: bool = False,  # noqa: ARG002 (DeepSpeed's signature)
    ) -> None:
        """Load weights: a state_dict of the module, or one under "module" as in DeepSpeed's checkpoints."""
        weights = checkpoint["module"] if isinstance(checkpoint.get("module"), Mapping) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=weights, dst=self.module)
        else:
            self.module.load_state_dict(weights, strict=strict)

    # --- attributes of the configuration and of the module ---

    def __getattr__(self, name: str) -> Any:
        own = type(self).__name__
        if name.startswith("__") or not {"module", "_runtime"} <= self.__dict__.keys():
            raise AttributeError(f"{own} has no attribute {name!r}", name=name)
        if name in deepspeed_names.MOVES:
            return functools.partial(self.to, *deepspeed_names.MOVES[name])
        if name in deepspeed_names.NAMES:
            return deepspeed_names.look_up(name, self._runtime)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            note = f", and neither has its module, a {type(self.module).__name__}"
            known = (*dir(self), *dir(self.module))
            raise no_attribute(own, name, known=known, reasons=ENGINE_NAMES, note=note) from error

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *deepspeed_names.NAMES, *deepspeed_names.MOVES})
