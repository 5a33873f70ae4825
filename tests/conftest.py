"""No test may hang: one that takes HANG_S ends its process with the stacks of all threads. Slow files come first."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from tests.support.models import SMALL_GRADIENT_BYTES

# Where "it hangs" is certain; the slowest test takes a quarter of it on two busy cores.
HANG_S = float(os.environ.get("OFFLOADZERO_TEST_HANG_S", "120"))


SLOW_FACTOR = 6  # for tests marked slow

# Standard error as it is outside the tests: while one runs, pytest keeps what is written to descriptor 2 for itself.
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Before the first capture. A shell's background job, as this run may be, ignores Ctrl-C; the tests need it."""
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis"):
        import hypothesis

        # How long an example takes says how busy the cores are; a hang is found below.
        hypothesis.settings.register_profile("busy cores", hypothesis.settings(), deadline=None)
        hypothesis.settings.load_profile("busy cores")


def pytest_unconfigure(config: pytest.Config) -> None:
    """The run is over."""
    os.close(config.stash[STDERR])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a slow test first, so that no worker is alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What has been imported stays: the collector, which many tests call, need not go through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def never_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """Arm the timer before each test and disarm it after."""
    limit_s = HANG_S * (SLOW_FACTOR if request.node.get_closest_marker("slow") else 1)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=request.config.stash[STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def large_and_small_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and biases of the models here are small gradients, and their matrices are none."""
    monkeypatch.setattr("offloadzero.step.collect.MAX_WAITING_BYTES", SMALL_GRADIENT_BYTES)


@pytest.fixture
def faults() -> Iterator[ExitStack]:
    """Keeps delays and faults of tests/support/faults.py, entered in it, until the test's end."""
    with ExitStack() as entered:
        yield entered


@pytest.fixture(autouse=True, scope="session")
def one_compute_thread() -> Iterator[None]:
    """The models here are small: a second thread of torch costs more than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
