"""What tests of offloaded weights share: models offloaded in every placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offloadzero
from tests.access.offloaded_stacks import adam, build
from tests.support.models import Stack
from tests.support.training import make_config

PLACEMENTS = ["resident", "host", "nvme"]


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def offloaded(placement: str, tmp_path: Path) -> Iterator[Callable[..., tuple[nn.Module, Any]]]:
    """Offloads a model; the leases hold one unit and are poisoned when it leaves."""
    opened = []

    def make(make_model: Callable[[], nn.Module] = Stack, **over: Any) -> tuple[nn.Module, Any]:
        model = build(make_model)
        config = make_config(placement, tmp_path, dtype=over.pop("dtype", None), **over)
        config.pop("optimizer")
        model, optimizer = offloadzero.offload(model, adam(model), config)
        opened.append(optimizer)
        return model, optimizer

    yield make
    for optimizer in opened:
        optimizer.close()
