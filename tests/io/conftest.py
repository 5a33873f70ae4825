"""What tests of the file engine share: engines of every backend, a folder on a disk and one in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from offloadzero.io.engine import AioEngine
from tests.io.engines import BACKENDS, BLOCK, DEPTH, FILESYSTEMS, make_engine


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(backend: str) -> Iterator[AioEngine]:
    with make_engine(backend, block_size=128 << 10, queue_depth=16) as made:
        yield made


@pytest.fixture(params=BACKENDS)
def shallow(request: pytest.FixtureRequest) -> Iterator[AioEngine]:
    """Of small blocks, and of few at once; its faults and delays end with it."""
    made = make_engine(request.param, block_size=BLOCK, queue_depth=DEPTH)
    yield made
    made.close(cancel=True)


@pytest.fixture(params=FILESYSTEMS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)
