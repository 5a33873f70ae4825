"""The hook on a parameter's gradient, which has the collector take it and tells the coordinator of it."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable

import torch

from offloadzero.core.interrupts import call_late, held, uninterrupted, uninterrupted_itself
from offloadzero.core.torch_private import current_graph_task_id
from offloadzero.observe.timeline import Timeline
from offloadzero.step.coordinator import StepCoordinator
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

GradientHook = Callable[[torch.Tensor], None]


class GradientHooks:
    """Makes the hooks of parameters. This object holds the coordinator; no hook does."""

    def __init__(self, coordinator: StepCoordinator, timeline: Timeline) -> None:
        self._coordinator = coordinator
        take = _taking(coordinator)
        self._take = uninterrupted(_timed(take, timeline)) if timeline.is_on else take

    def of(self, record: Record, slot: ParamSlot) -> GradientHook:
        """Make the function that autograd calls when the parameter's gradient is in `param.grad`."""
        if not slot.trainable:
            return _leave
        if slot.param._post_accumulate_grad_hooks:
            self._coordinator.collector.expect_seen(record.index, slot.index)
        return functools.partial(self._take, record.index, slot.index)


def _taking(coordinator: StepCoordinator) -> Callable[[int, int, torch.Tensor], None]:
    # A weak reference: the parameter holds the hook in C++, where Python's collector does not see it.
    reference = weakref.ref(coordinator)

    # One function serves all parameters and finds theirs by numbers: by the time that a function of a parameter's own
    # is called again, it has left the processor's caches.

    # A gradient that autograd has put into `param.grad` is taken before an interrupt is raised.

    @uninterrupted_itself
    def take(index: int, number: int, _: torch.Tensor) -> None:
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
            while held.pending and call_late(sys._getframe().f_back):
                pass

    return take


def _timed(
    take: Callable[[int, int, torch.Tensor], None], timeline: Timeline
) -> Callable[[int, int, torch.Tensor], None]:
    def timed_take(index: int, number: int, gradient: torch.Tensor) -> None:
        with timeline.launching():
            take(index, number, gradient)

    return timed_take


def _leave(_: torch.Tensor) -> None:
    """Do nothing: no group of the optimizer holds the parameter, so, as in torch, its gradient is not used."""
