"""A counter of micro batches that knows which one is the last of its step, and the losses that a script has scaled."""

from __future__ import annotations

import functools
import operator
import weakref
from dataclasses import replace
from typing import Any, SupportsIndex

import torch

from offloadzero.config.readers import MAX_COUNT, read_int
from offloadzero.config.schema import BatchConfig, resolve_batch
from offloadzero.core.torch_private import running_backward
from offloadzero.errors import ConfigError, StateError


class Accumulation:
    """Counts micro batches to the boundary, under a batch size that may be set anew between steps.

    A micro batch ends with its backward, or with the engine's `step()`, which DeepSpeed's loops call after each.
    """

    def __init__(
        self, batch: BatchConfig, *, keeps_gradients: bool, ends_with_step: bool, world_size: int = 1
    ) -> None:
        """Begin to count.

        Args:
            keeps_gradients: gradients stay from one micro batch to the next, so a step may have several.
            ends_with_step: a micro batch ends with the engine's `step()`.
        """
        self.batch = batch
        self.ends_with_step = ends_with_step
        self.num_backwards = 0  # of the present step, which have come to their end
        self.override: bool | None = None
        self.num_micro_steps = 0
        self._is_set = False  # the batch size, by the script
        self._keeps_gradients = keeps_gradients
        self._world_size = world_size
        self._window_start = 0  # the first micro step of the present step
        self._steps_before, self._samples_before = 0, 0  # counts up to the last change of the batch size

    @property
    def num_steps(self) -> int:
        """Micro batches per step."""
        return self.batch.gradient_accumulation_steps

    @property
    def sizes_set(self) -> list[int] | None:
        """Micro batch and accumulation steps where the script has set them; None: they are the configuration's."""
        micro = self.batch.micro_batch_size
        return [micro, self.num_steps] if self._is_set and micro is not None else None

    @property
    def num_taken(self) -> int:
        """The micro batches of the present step that have been counted."""
        return self.num_micro_steps - self._window_start

    def is_boundary(self) -> bool:
        """Whether the present micro batch is the last of its step.

        Where accumulation is not managed the answer is False: it is not known before `step()` is called.
        """
        if not self.ends_with_step:
            return (self.num_backwards + 1) % self.num_steps == 0
        if self.override is not None:
            return self.override
        return self.batch.managed and (self.num_taken + 1) % self.num_steps == 0

    @property
    def closes_step(self) -> bool:
        """Whether `step()` now takes the step."""
        return self.is_boundary() if self.batch.managed or self.override is not None else True

    def take(self) -> bool:
        """Count the present micro batch; True if it was the last of its step."""
        was_last = self.closes_step
        self.num_micro_steps += 1
        if was_last:
            self._window_start = self.num_micro_steps
        return was_last

    def end_backward(self) -> None:
        """Count a backward that has come to its end."""
        self.num_backwards += 1

    def drop_backwards(self) -> None:
        """Begin to count backwards anew: the step was taken, or its gradients were dropped."""
        self.num_backwards = 0

    def restart(self) -> None:
        """Begin the present step anew: its gradients were dropped, and its micro batches come again."""
        self.num_micro_steps = self._window_start

    def resume(self, num_micro_steps: int, *, global_steps: int, num_samples: int | None) -> None:
        """Go on from a checkpoint at the begin of a step: no gradients come with it.

        `num_samples`: of the `global_steps` before; None: not known, and counted by the present batch size.
        """
        self.num_micro_steps = self._window_start = num_micro_steps
        self._samples_before, self._steps_before = (
            (0, 0) if num_samples is None else (num_samples, global_steps)
        )

    def num_samples(self, global_steps: int) -> int:
        """Return the samples of `global_steps` steps, where a micro batch of unknown size counts 1."""
        per_step = self.batch.train_batch_size or self.num_steps
        return self._samples_before + (global_steps - self._steps_before) * per_step

    def set_train_batch_size(self, size: int, *, global_steps: int) -> None:
        """Change the accumulation steps; micro batches stay as they are. Raises ConfigError, StateError."""
        micro = self.batch.micro_batch_size
        if micro is None:
            key = "train_micro_batch_size_per_gpu"
            raise ConfigError(key, None, "set_train_batch_size() needs it in the config")
        size = _read_size("train_batch_size", size)
        self._set(resolve_batch(size, micro, None, world_size=self._world_size), global_steps)

    def set_micro_batch_size(self, size: int, *, global_steps: int) -> None:
        """Change the micro batch; accumulation steps stay as they are. Raises ConfigError, StateError."""
        size = _read_size("train_micro_batch_size_per_gpu", size)
        self._set(resolve_batch(None, size, self.num_steps, world_size=self._world_size), global_steps)

    def set_sizes(self, micro_batch_size: int, num_steps: int, *, global_steps: int) -> None:
        """Change both, as a run has had them. Raises ConfigError, StateError."""
        self._set(resolve_batch(None, micro_batch_size, num_steps, world_size=self._world_size), global_steps)

    def _set(self, batch: BatchConfig, global_steps: int) -> None:
        if self.num_taken:
            taken = f"{self.num_taken} of {self.num_steps} micro batches of this step have been taken"
            raise StateError(f"the batch size changes between steps: {taken}")
        if batch.gradient_accumulation_steps > 1 and not self._keeps_gradients:
            raise ConfigError(
                "gradient_accumulation_steps",
                batch.gradient_accumulation_steps,
                "1: gradients are not kept from one micro batch to the next. Begin with 2 or more in the config, or "
                'set "offloadzero": {"update": {"in_backward": false}}',
            )
        self._samples_before, self._steps_before = self.num_samples(global_steps), global_steps
        self.batch = replace(batch, managed=self.batch.managed)
        self._is_set = True


class ScaledLosses:
    """Lets each scaled loss have one backward, of which reentrant checkpoints may make many.

    Such a checkpoint runs a backward of its own inside of that of the loss. Where all gradients come from them, those
    of a model with a tied or frozen head say, each is the first that takes gradients, as far as anyone can see.
    """

    def __init__(self) -> None:
        self._num_waiting = 0  # losses of this step whose backward has not begun
        self._num_steps = 0
        self._running: weakref.ref[Any] | None = None

    def add(self, scaled: torch.Tensor) -> None:
        """Note that a loss is scaled."""
        self._num_waiting += 1
        if scaled.requires_grad:
            scaled.register_hook(functools.partial(self._begin, self._num_steps))

    def _begin(self, num_steps: int, _: torch.Tensor) -> None:
        if num_steps == self._num_steps:
            self._running = running_backward()

    def end_step(self) -> None:
        """Forget the losses of this step: the next ones may have another scale."""
        self._num_waiting = 0
        self._num_steps += 1
        self._running = None

    def expect_backward(self) -> None:
        """Raise StateError where a backward that begins is not that of a scaled loss."""
        if self._num_waiting:
            self._num_waiting -= 1
        elif self._running is None or self._running() is None:
            raise StateError(
                "fp16 gradients need loss scaling, once for each backward: call optimizer.scale(loss).backward(), or "
                "engine.backward(loss)"
            )


def _read_size(key: str, size: object) -> int:
    """Read a number of samples, which may be numpy's."""
    if isinstance(size, SupportsIndex) and not isinstance(size, bool):
        size = operator.index(size)
    return read_int(key, size, minimum=1, maximum=MAX_COUNT)
