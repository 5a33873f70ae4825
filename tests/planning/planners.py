"""A planner for a model on a machine that has what is said of it."""

from __future__ import annotations

from typing import Any

from offloadzero.cli.plan.answer import Planner, Question
from offloadzero.planning.hardware import Memory
from offloadzero.planning.model.shapes import ModelSource, read_model
from offloadzero.update.spec import UpdateForm

PLENTY = Memory(host=1 << 44, nvme=1 << 44)
WITH_DEVICE = Memory(host=1 << 60, device=1 << 60, nvme=1 << 60)


def planner_of(
    model: ModelSource | str,
    memory: Memory = PLENTY,
    *,
    form: UpdateForm = UpdateForm.NATIVE,
    **question: Any,
) -> Planner:
    """Of a model, or of the words that name one; without `sequence` activations are not counted."""
    source = read_model(model) if isinstance(model, str) else model
    return Planner(Question(source, lambda _: memory, lambda _: form, **question))
