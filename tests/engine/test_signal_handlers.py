"""What holding signal handlers back leaves as it was: a script's flags, a forked child's handlers, engines' errors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from offloadzero.core import interrupts
from offloadzero.core.interrupts import uninterrupted
from offloadzero.errors import StateError
from offloadzero.memory.tickets import Failures
from tests.engine.leftovers import handled


@pytest.fixture(autouse=True)
def held_back() -> Iterator[None]:
    """As while an engine lives."""
    interrupts.install()
    yield
    interrupts.uninstall()


@pytest.mark.parametrize("restarts", [True, False])
def test_a_signal_breaks_system_calls_off_as_the_script_has_set_it(restarts: bool) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        signal.siginterrupt(signal.SIGUSR1, not restarts)
        assert interrupts._restarts_calls(signal.SIGUSR1) is restarts
        interrupts.install()
        assert interrupts._restarts_calls(signal.SIGUSR1) is restarts
        interrupts.uninstall()
        assert interrupts._restarts_calls(signal.SIGUSR1) is restarts
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_threads_section_holds_nothing_back_nor_does_a_fork_beside_it() -> None:
    inside, over = threading.Event(), threading.Event()

    @uninterrupted
    def stay() -> None:
        inside.set()
        over.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            status = 0
        finally:
            os._exit(status)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_section_in_which_its_thread_forks_ends_in_the_child() -> None:
    status = 1

    @uninterrupted
    def fork() -> int:
        nonlocal status
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)
            status = 2
        return child

    parent = os.getpid()
    try:
        child = fork()
    except KeyboardInterrupt:
        status = 0 if status == 2 else 3
    finally:
        if os.getpid() != parent:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_engines_own_failure_is_no_interrupt_where_a_handler_raises_it() -> None:
    failures = Failures()
    failures.record(own := StateError("the drive is gone"))
    with handled(signal.SIGUSR1, lambda *_: failures.check()):
        with pytest.raises(StateError) as caught:
            signal.raise_signal(signal.SIGUSR1)
        assert caught.value is own
        assert not interrupts.is_interrupt(own)


def test_another_engines_failure_interrupts_a_change_where_a_handler_raises_it() -> None:
    others, own = Failures(), Failures()
    others.record(StateError("the drive is gone"))
    told = pytest.raises(StateError, match="the drive is gone")
    with handled(signal.SIGUSR1, lambda *_: others.check()), told, own.whole("a change"):
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(StateError, match=r"a change was interrupted half-way \(the drive is gone\)"):
        own.check()
