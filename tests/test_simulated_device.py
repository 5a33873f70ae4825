"""The engine on a device where everything runs later than it was launched: bitwise what the CPU computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.models import PartlyUnusedBlock, Stack, features
from tests.simulated.device import simulated
from tests.test_streaming import MODELS, take_inputs
from tests.training import assert_same, make_config, run_engine


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_model(
    name: str, placement: str, clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model, make_input, over = MODELS[name]
    config = make_config(placement, tmp_path, clipping=clipping, **over)
    expected = run_engine(make_model, take_inputs(make_input), config)
    with simulated(monkeypatch, seed=len(name)):
        found = run_engine(make_model, take_inputs(make_input), config)
    assert_same(found, expected)


class UsedBlock(PartlyUnusedBlock):
    """Of the same shape, with all of its parameters in use but for those of the last blocks of a model."""

    is_last = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.is_last else y + self.unused(x) * self.scale.sum()


class LastBlocksPartlyUnused(Stack):
    """In backward the last two blocks, some of whose parameters take no part, keep all gradient leases to the end."""

    def __init__(self) -> None:
        super().__init__(UsedBlock, num_blocks=6)
        for block in list(self.blocks)[-2:]:
            block.is_last = True


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_a_gradient_without_a_lease(clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is the allocator's, which must not give it to another while its copy home is under way."""
    config = make_config("host", tmp_path, clipping=clipping)
    expected = run_engine(LastBlocksPartlyUnused, take_inputs(features), config)
    with simulated(monkeypatch, slow=["gradient-d2h"]):
        found = run_engine(LastBlocksPartlyUnused, take_inputs(features), config)
    assert_same(found, expected)
