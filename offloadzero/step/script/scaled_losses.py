"""The losses that a script has scaled for fp16, and the backwards that are theirs."""

from __future__ import annotations

import functools
import weakref

import torch

from offloadzero.core.torch_private import queue_backward_callback
from offloadzero.errors import StateError


class _Running:
    """Autograd holds it until the backward is over, or has failed."""

    def __call__(self) -> None:
        """Do nothing at the end."""


class ScaledLosses:
    """Lets each scaled loss have one backward, of which reentrant checkpoints may make many.

    Such a checkpoint runs a backward of its own inside of that of the loss. Where all gradients come from them, those
    of a model with a tied or frozen head say, each is the first that takes gradients, as far as anyone can see.
    """

    def __init__(self) -> None:
        self._num_waiting = 0  # losses of this step whose backward has not begun
        self._num_steps = 0
        self._running: weakref.ref[_Running] | None = None

    def add(self, scaled: torch.Tensor) -> None:
        """Note that a loss is scaled."""
        self._num_waiting += 1
        if scaled.requires_grad:
            scaled.register_hook(functools.partial(self._begin, self._num_steps))

    def _begin(self, num_steps: int, _: torch.Tensor) -> None:
        if num_steps == self._num_steps:
            running = _Running()
            self._running = weakref.ref(running)
            queue_backward_callback(running)

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
                "fp16 gradients need loss scaling, once for each backward: optimizer.scale(loss).backward(), or "
                "engine.backward(loss)"
            )
