"""No test may hang: one that takes HANG_S ends its process with the stacks of all threads. Long files come first."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# Where "it hangs" is certain; the slowest test takes a quarter of it on two busy cores.
HANG_S = float(os.environ.get("OFFLOADZERO_TEST_HANG_S", "120"))
_NUMBERS = itertools.count()  # of tests in this process

SLOW_FACTOR = 6  # for tests marked slow

# By the seconds that they compute, ten and more: begun last, one would keep a single worker busy at the end.
LONG_FILES = (
    "ranks/test_ranks_trainer.py",
    "races/test_simulated_device.py",
    "io/test_aio_stress.py",
    "native/test_aio_native.py",
    "native/test_compact_native.py",
    "access/test_access_table.py",
    "races/test_happens_before.py",
    "scripts/test_script_gradients.py",
    "ranks/test_ranks_quantized.py",
    "ranks/test_ranks_gathered.py",
    "engine/test_lifetime.py",
    "scripts/test_fine_tuning_page.py",
    "ranks/test_ranks_partitioned.py",
    "engine/test_parity.py",
    "engine/test_interrupts.py",
    "ranks/test_ranks_parity.py",
    "scripts/test_finetune.py",
    "streaming/test_streaming.py",
    "durable/test_durable_images.py",
    "ranks/test_ranks_gradients.py",
    "optim/test_device_adam.py",
    "step/test_versions_and_scripts.py",
    "engine/test_failures.py",
    "streaming/test_activations.py",
    "scripts/test_script_weights.py",
    "cli/test_plan_answer.py",
    "engine/test_interrupted_places.py",
    "ranks/test_ranks_order.py",
    "planning/test_repeated_trace.py",
    "memory/test_memory.py",
    "ranks/test_ranks_states.py",
    "ranks/test_ranks_simulated.py",
    "ranks/test_ranks_building.py",
    "ranks/test_ranks_mesh.py",
    "races/test_races.py",
    "races/test_first_cases.py",
    "ranks/test_ranks_departures.py",
    "ranks/test_ranks_bytes.py",
    "ranks/test_ranks_errors.py",
    "repository/test_gpu_benchmark.py",
)

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that is imported is garbage: a third of the time was the collector's."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those with a slow test."""
    long = {Path(__file__).parent / name: number for number, name in enumerate(LONG_FILES)}
    slow = {item.path: len(long) for item in items if item.get_closest_marker("slow")}
    place = {**slow, **long}
    items.sort(key=lambda item: place.get(item.path, len(long) + 1))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: the collector, which many tests call, need not go through it each time."""
    if hasattr(session.config, "workerinput"):
        import torch._dynamo  # noqa: F401 -- an optimizer imports it, so each worker does sooner or later
    gc.freeze()
    # At its usual threshold, 700, it took 5 to 9 % of the time of all. Tests that are about garbage call it.
    gc.set_threshold(5_000)


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
    import torch  # not above: the process that hands out tests to workers runs none

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_was_measured_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By rates that a plan has kept at home, or another test, engines would forecast their steps and place by time."""
    own = tmp_path_factory.getbasetemp() / "caches" / str(next(_NUMBERS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))


@pytest.fixture(autouse=True)
def large_and_small_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and biases of the models here are small gradients, and their matrices are none."""
    from tests.support.models import SMALL_GRADIENT_BYTES

    monkeypatch.setattr("offloadzero.step.collect.MAX_WAITING_BYTES", SMALL_GRADIENT_BYTES)


@pytest.fixture
def faults() -> Iterator[ExitStack]:
    """Keeps delays and faults of tests/support/faults.py, entered in it, until the test's end."""
    with ExitStack() as entered:
        yield entered


@pytest.fixture(autouse=True, scope="session")
def seeds_of_devices_that_are_there() -> Iterator[None]:
    """For each other kind `torch.manual_seed()` would keep a call and the stack as text: a millisecond a time."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda _: None, raising=False)  # torch 2.9: not of all
        yield


@pytest.fixture(autouse=True, scope="session")
def one_compute_thread() -> Iterator[None]:
    """The models here are small: a second thread of torch costs more than it computes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
