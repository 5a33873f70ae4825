"""The command that plans, as a fixture; and each shape that it is asked for is traced once in a process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from offloadzero.cli.main import USER_ERROR, main
from offloadzero.planning.model.shapes import ModelShape, ModelSource
from offloadzero.planning.model.trace import MicroBatchTrace, trace_blocks
from tests.cli.planned import PlanJson, PlanText, words


@functools.cache
def _trace_of_shape(shape: ModelShape, checkpointed: frozenset[str], **keys: Any) -> MicroBatchTrace:
    source = ModelSource(str(shape), shape.build, shape)
    return trace_blocks(source.on_meta, source.num_blocks, checkpointed=checkpointed, **keys)


def _trace_once(
    build: Callable[[int], nn.Module], num_blocks: int, *, checkpointed: Collection[str], **keys: Any
) -> MicroBatchTrace:
    source = getattr(build, "__self__", None)
    if isinstance(source, ModelSource) and source.shape is not None and num_blocks:
        return _trace_of_shape(source.shape, frozenset(checkpointed), **keys)
    return trace_blocks(build, num_blocks, checkpointed=checkpointed, **keys)


@pytest.fixture(autouse=True)
def shapes_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace is the same for the same shape."""
    monkeypatch.setattr("offloadzero.cli.plan.answer.trace_blocks", _trace_once)


@pytest.fixture
def plan_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PlanText:
    def ask(*more: str, status: int = 0, **given: Any) -> str:
        capsys.readouterr()
        assert main(words(tmp_path, *more, **given)) == status
        printed = capsys.readouterr()
        return printed.err if status == USER_ERROR else printed.out

    return ask


@pytest.fixture
def plan_json(plan_text: PlanText) -> PlanJson:
    return lambda *more, **given: json.loads(plan_text("--json", "-", *more, **given))
