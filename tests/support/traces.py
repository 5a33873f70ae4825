"""Each shape that a plan is made of, with its adapters, is traced once in a process: its traces are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import pytest
from torch import nn

from offloadzero.planning.model.shapes import ModelShape, ModelSource
from offloadzero.planning.model.trace import MicroBatchTrace, trace_blocks


@functools.cache
def _trace_of_shape(
    shape: ModelShape, adapter_rank: int, checkpointed: frozenset[str], **keys: Any
) -> MicroBatchTrace:
    source = ModelSource(str(shape), shape.build, shape, adapter_rank=adapter_rank)
    return trace_blocks(source.on_meta, source.num_blocks, checkpointed=checkpointed, **keys)


def _trace_once(
    build: Callable[[int], nn.Module], num_blocks: int, *, checkpointed: Collection[str], **keys: Any
) -> MicroBatchTrace:
    source = getattr(build, "__self__", None)
    if isinstance(source, ModelSource) and source.shape is not None and num_blocks:
        return _trace_of_shape(source.shape, source.adapter_rank, frozenset(checkpointed), **keys)
    return trace_blocks(build, num_blocks, checkpointed=checkpointed, **keys)


@pytest.fixture(autouse=True)
def shapes_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tests of a folder whose conftest.py has it."""
    monkeypatch.setattr("offloadzero.cli.plan.answer.trace_blocks", _trace_once)
