"""What tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.checkpoints import small_engine


@pytest.fixture
def engine_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes engines that are closed at the end."""
    engines: list[Any] = []

    def make(model: nn.Module | None = None, placement: str = "host", **keys: Any) -> Any:
        engines.append(small_engine(tmp_path / "nvme", placement, model=model, **keys))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
