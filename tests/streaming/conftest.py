"""What tests of streaming share beside their loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def no_files_left(tmp_path: Path) -> Iterator[None]:
    """Engines that were closed leave nothing behind."""
    yield
    assert not list(tmp_path.rglob("*.bin"))
