"""`offloadzero plan --largest`: the model of a shape with the most blocks that this machine trains."""

from __future__ import annotations

from dataclasses import replace

from offloadzero.cli.plan_answer import Planner, Question
from offloadzero.cli.plan_model import ModelSource
from offloadzero.errors import ConfigError
from offloadzero.planning.fit import Source
from offloadzero.planning.shapes import MAX_LAYERS, ModelShape


def largest_model(question: Question, source: Source) -> ModelSource:
    """Find the model of the question's shape with the most blocks that fit. Raises ConfigError if one does not."""
    shape = question.model.shape
    if shape is None:
        raise ConfigError(
            "--largest", question.model.text, "a shape (llama:13b, hidden/layers/heads/vocabulary)"
        )
    if not _fits(question, source, shape, 1):
        raise ConfigError("--largest", str(shape), "not even one block of this width fits: a smaller width")
    low, high = 1, 2
    while high < MAX_LAYERS and _fits(question, source, shape, high):
        low, high = high, 2 * high
    high = min(high, MAX_LAYERS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(question, source, shape, middle):
            low = middle
        else:
            high = middle
    return _of_shape(replace(shape, num_layers=low))


def _of_shape(shape: ModelShape) -> ModelSource:
    """Return the source of a shape."""
    return ModelSource(str(shape), shape.build, shape)


def _fits(question: Question, source: Source, shape: ModelShape, num_layers: int) -> bool:
    model = _of_shape(replace(shape, num_layers=num_layers))
    return Planner(replace(question, model=model)).verdict(source).fits
