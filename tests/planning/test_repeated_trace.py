"""The trace of many equal blocks from those of a few, beside the trace of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offloadzero.planning.model import trace
from offloadzero.planning.model.shapes import read_model
from offloadzero.planning.model.trace import FEW, trace_blocks, trace_micro_batch
from tests.support.cases import each_pair

BLOCKS = {"llama": "model.layers", "gpt": "transformer.h"}


@pytest.fixture
def five_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all blocks are traced time grows with them: five are more than the few, as a dozen are."""
    assert max(FEW) < 5 < trace.MIN_BLOCKS
    monkeypatch.setattr(trace, "MIN_BLOCKS", 5)


@pytest.mark.usefixtures("five_are_many")
@pytest.mark.parametrize(
    ("kind", "sizes", "sequence", "dtype", "is_checkpointed"),
    [
        *each_pair(
            BLOCKS, ["64/6/4/101", "32/5/1/4000"], [9], [torch.bfloat16, torch.float32], [True, False]
        ),
        # So long, the tables of rotary positions are inputs that leave the device, with the first block's.
        ("llama", "64/6/4/101", 257, torch.bfloat16, True),
    ],
)
def test_it_is_the_trace_of_all_blocks(
    kind: str, sizes: str, sequence: int, dtype: torch.dtype, is_checkpointed: bool
) -> None:
    source = read_model(f"{kind}:{sizes}")
    names = [f"{BLOCKS[kind]}.{index}" for index in range(source.num_blocks)] if is_checkpointed else []
    keys: dict[str, Any] = {"dtype": dtype, "micro_batch": 2, "sequence": sequence, "checkpointed": names}
    built: list[int] = []

    def build(number: int) -> nn.Module:
        built.append(number)
        return source.on_meta(number)

    assert trace_blocks(build, source.num_blocks, **keys) == trace_micro_batch(source.on_meta(), **keys)
    assert built == list(FEW)


@pytest.mark.usefixtures("five_are_many")
@pytest.mark.parametrize(
    "names", [["model.layers.0"], ["model.layers.3", "lm_head"], ["model.layers.4", "model.layers.2"]]
)
def test_other_checkpoints_than_of_all_blocks_take_the_trace_of_all(names: list[str]) -> None:
    source = read_model("llama:64/5/4/101")
    keys: dict[str, Any] = {"dtype": None, "micro_batch": 1, "sequence": 9, "checkpointed": names}
    found = trace_blocks(source.on_meta, source.num_blocks, **keys)
    assert found == trace_micro_batch(source.on_meta(), **keys)
    assert len(found.inputs) == len(names)


@pytest.mark.usefixtures("five_are_many")
def test_blocks_that_differ_are_all_traced() -> None:
    """The fourth is wider, and the logs of two and three do not say so."""
    source = read_model("llama:64/5/4/101")

    def build(number: int) -> nn.Module:
        model: Any = source.on_meta(number)
        if number > 3:
            model.model.layers[3].mlp = read_model("llama:64/1/4/101/999").on_meta().model.layers[0].mlp  # type: ignore[union-attr,index]
        return model  # type: ignore[no-any-return]

    keys: dict[str, Any] = {"dtype": None, "micro_batch": 1, "sequence": 9}
    assert trace_blocks(build, 5, **keys) == trace_micro_batch(build(5), **keys)
    assert trace_blocks(build, 5, **keys) != trace_blocks(source.on_meta, 5, **keys)
