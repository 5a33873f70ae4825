"""The hook on a parameter's gradient: the gradient is collected, and the step is told where that matters (floor 5)."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from offloadzero.interrupts import uninterrupted, uninterrupted_from_start
from offloadzero.observe.timeline import Timeline
from offloadzero.optim.records import ParamSlot, Record
from offloadzero.step.coordinator import StepCoordinator
from offloadzero.torch_private import current_graph_task_id

GradientHook = Callable[[torch.Tensor], None]


def gradient_hook(
    coordinator: StepCoordinator, timeline: Timeline, record: Record, slot: ParamSlot
) -> GradientHook:
    """The hook of one parameter, for autograd to call when its gradient is in `param.grad`."""
    # Weakly: the parameter holds the hook in C++, where Python's collector does not see it.
    reference = weakref.ref(coordinator)
    index, number = record.index, slot.index

    # What autograd has put into `param.grad` is taken before an interrupt is raised.

    @uninterrupted_from_start
    def take(_: torch.Tensor) -> None:
        # `with uninterrupted` by hand: its two calls take as long as all that is found out here.
        uninterrupted.depth += 1
        try:
            step = reference()
            if step is not None:
                collector = step.collector
                if current_graph_task_id() != collector.backward:
                    step.begin_backward(index, number)
                gradient = collector.add(index, number)
                if gradient is not None:
                    step.complete(gradient)
        finally:
            uninterrupted.depth -= 1
            if uninterrupted.pending and uninterrupted.depth <= 0:
                uninterrupted.raise_unless_waiting()

    @uninterrupted_from_start
    def timed_take(gradient: torch.Tensor) -> None:
        with uninterrupted, timeline.launching():
            take(gradient)

    def leave(_: torch.Tensor) -> None:
        """No group of the optimizer holds it: as in torch, it has a gradient and nobody uses it."""

    if not slot.trainable:
        return leave
    return timed_take if timeline.is_on else take
