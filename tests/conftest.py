"""No test may hang: one that takes HANG_S ends the run with the stacks of all threads."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest
import torch

# Where "it hangs" is certain; the slowest test takes a quarter of it on two busy cores.
HANG_S = float(os.environ.get("OFFLOADZERO_TEST_HANG_S", "120"))


SLOW_FACTOR = 6  # for tests marked slow


@pytest.fixture(autouse=True)
def never_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """Arm the timer before each test and disarm it after."""
    limit_s = HANG_S * (SLOW_FACTOR if request.node.get_closest_marker("slow") else 1)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_compute_thread() -> Iterator[None]:
    """The models here are small: a second thread of torch costs more than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
