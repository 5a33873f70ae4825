"""Ctrl-C at any place: waits can be left, submissions are whole, what is closed twice is closed, runs go on or refuse.

The campaign plays whole runs with one interrupt each (tests/engine/interrupts.py). Its size comes from the environment:
OFFLOADZERO_TEST_INJECTED and OFFLOADZERO_TEST_INTERRUPTS, the seed from OFFLOADZERO_TEST_INTERRUPT_SEED.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.core import interrupts
from offloadzero.core.interrupts import uninterrupted, uninterrupted_throughout, wait
from offloadzero.engine.lifetime import EngineState, Resources
from offloadzero.errors import StateError
from offloadzero.memory.arena import Arena, BufferPool
from offloadzero.memory.lanes import Lane
from offloadzero.memory.tickets import AllOf, Failures, Latch, Promise, unfinished
from tests.engine.interrupts import FINE, Injected, InjectedError, InjectedFault, summary
from tests.engine.leftovers import assert_as_before, collect, forms, fresh_model, handled, threads_of_ours
from tests.support.faults import observes
from tests.support.tiny import REPOSITORY, make_engine, script_environment, settings, train
from tests.support.warm import run_warm

SOON_S = 5.0
TWO = (signal.SIGALRM, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Ours, which holds interrupts back where the code says so."""
    interrupts.install()
    yield
    interrupts.held.clear()
    interrupts.uninstall()


def raise_timed_out(*_: Any) -> None:
    """A script's handler."""
    raise TimeoutError  # which is an OSError


def interrupt_after(delay_s: float) -> None:
    """Ctrl-C while the main thread waits."""
    threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


# --- sections that are not interrupted ---


def test_a_section_is_interrupted_at_its_end() -> None:
    done = []

    @uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("inner")

    @uninterrupted
    def outer() -> None:
        inner()
        done.append("outer")

    def use() -> None:
        outer()
        done.append("behind")

    with pytest.raises(KeyboardInterrupt):
        use()
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # outside at once


def test_a_wait_in_a_section_can_be_left() -> None:
    started_s = time.monotonic()
    interrupt_after(0.05)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(Latch().wait)()

    @uninterrupted
    def interrupted_before() -> None:
        signal.raise_signal(signal.SIGINT)
        Latch().wait()

    with pytest.raises(KeyboardInterrupt):
        interrupted_before()
    interrupt_after(0.05)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(BufferPool((), failures=Failures()).take)()
    assert time.monotonic() - started_s < SOON_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGCHLD])
def test_a_handler_of_the_users_waits_as_pythons_does(number: int) -> None:
    came: list[FrameType | None] = []

    def note(_number: int, frame: FrameType | None) -> None:
        came.append(frame)

    @uninterrupted
    def twice() -> None:
        signal.raise_signal(number)
        signal.raise_signal(number)  # one and the same
        assert came == []

    before = signal.signal(number, note)
    try:
        interrupts.install()
        twice()
        assert len(came) == 1
        assert came[0] is not None
        signal.raise_signal(number)  # outside at once
        assert len(came) == 2
        interrupts.uninstall()
        assert signal.getsignal(number) is note
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("frame_is_given", [True, False])
def test_a_second_signal_passes_through_a_handler_that_calls_the_one_before_it(frame_is_given: bool) -> None:
    ours = signal.getsignal(signal.SIGINT)
    assert callable(ours)
    came = []

    def note_first(number: int, frame: FrameType | None) -> None:
        came.append(number)
        ours(number, frame if frame_is_given else None)

    @uninterrupted_throughout
    def wait_long() -> None:
        for _ in range(5):
            wait(signal.raise_signal, signal.SIGINT)

    with handled(signal.SIGINT, note_first):
        with pytest.raises(KeyboardInterrupt):
            wait_long()
        assert len(came) == 1  # the first one waits, the second one does not
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(signal.raise_signal)(signal.SIGINT)
        assert len(came) == 2


def test_handlers_of_two_signals_are_both_called_though_the_first_raises() -> None:
    came = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        raise ZeroDivisionError

    before = [signal.signal(each, note) for each in TWO]
    try:
        interrupts.install()

        @uninterrupted
        def both() -> None:
            for each in TWO:
                signal.raise_signal(each)

        with pytest.raises(ZeroDivisionError) as raised:
            both()
        assert interrupts.is_interrupt(raised.value)
        assert not interrupts.is_interrupt(ZeroDivisionError())
        assert len(came) == 1
        assert interrupts.held.pending
        with pytest.raises(ZeroDivisionError):
            uninterrupted(len)(())
        assert sorted(came) == sorted(TWO)
        assert not interrupts.held.pending
    finally:
        for each, handler in zip(TWO, before, strict=True):
            signal.signal(each, handler)


def test_a_handler_that_is_set_after_the_start_waits_from_the_next_forward_on(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="host"))
    before = signal.signal(signal.SIGALRM, raise_timed_out)
    try:
        train(engine, num_steps=1)
        assert signal.getsignal(signal.SIGALRM) is not raise_timed_out
        engine.close()
        assert signal.getsignal(signal.SIGALRM) is raise_timed_out
    finally:
        engine.close()
        signal.signal(signal.SIGALRM, before)


def test_an_error_of_a_handler_in_a_wait_is_no_failure_of_the_engine() -> None:
    failures = Failures()
    with handled(signal.SIGALRM, raise_timed_out):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError), failures.handed_over():
            Promise().wait()
        failures.check()


@pytest.mark.parametrize("place", ["checkpoint.write", "fsync", "checkpoint.read"])
def test_a_timeout_of_a_handler_is_no_error_of_a_file(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(*_: Any) -> None:
        signal.raise_signal(signal.SIGALRM)

    engine = make_engine(settings(tmp_path, placement="host"))
    train(engine, num_steps=1)
    if place == "checkpoint.read":
        engine.save_checkpoint(tmp_path / "saved")
    before = signal.signal(signal.SIGALRM, raise_timed_out)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(TimeoutError))
            if place == "fsync":
                monkeypatch.setattr(os, "fsync", time_out)
            else:
                stack.enter_context(observes(place, before=time_out))
            (engine.load_checkpoint if place == "checkpoint.read" else engine.save_checkpoint)(
                tmp_path / "saved"
            )
        monkeypatch.undo()
        train(engine, num_steps=1)
        engine.save_checkpoint(tmp_path / "saved")
    finally:
        signal.signal(signal.SIGALRM, before)
        engine.close()


class _OfSignal:
    """A ticket of work that is done, in whose wait a signal comes."""

    num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        signal.raise_signal(signal.SIGALRM)

    def done(self) -> bool:
        return True


def test_an_error_of_a_handler_ends_a_wait_for_several_tickets_at_once() -> None:
    failed = Promise()
    failed.fail(OSError("the drive is gone"))
    with handled(signal.SIGALRM, raise_timed_out):
        last = _OfSignal()
        with pytest.raises(TimeoutError):
            AllOf([failed, _OfSignal(), last]).wait()
        assert not last.num_waits  # it might never come
        with pytest.raises(TimeoutError):
            unfinished(_OfSignal())


def test_what_must_be_whole_and_was_not_makes_the_engine_unusable() -> None:
    failures = Failures()
    with pytest.raises(TimeoutError), failures.whole("the handing over of a gradient"):
        raise TimeoutError("a handler of SIGALRM, say")
    with pytest.raises(StateError, match=r"handing over of a gradient was interrupted half-way"):
        failures.check()
    assert isinstance(failures.first.__cause__, TimeoutError)  # type: ignore[union-attr]


# --- waits for what never comes ---


def test_a_wait_for_a_ticket_that_nobody_fulfils_ends_with_the_engines_failure() -> None:
    failures = Failures()
    threading.Timer(0.05, failures.record, [OSError("the drive is gone")]).start()
    with pytest.raises(OSError, match="the drive is gone"), failures.handed_over():
        Promise().wait()


def test_a_thread_that_waits_for_what_never_comes_ends_with_its_engine() -> None:
    failures = Failures()
    lane = Lane("stage", failures)
    lane.submit(lambda: None, after=[Promise()])
    ticket = lane.submit(lambda: None)
    failures.give_up()
    lane.close()
    ticket.wait()
    with pytest.raises(StateError, match="given up"):
        failures.check()


@pytest.mark.alone
def test_buffers_that_are_given_back_at_once_reach_all_who_wait() -> None:
    failures = Failures()
    arena = Arena("host", torch.zeros(3 * 4096, dtype=torch.uint8))
    pool = BufferPool([arena.lease(4096, str(i)) for i in range(3)], failures=failures)
    taken = [pool.take() for _ in range(3)]
    arrived_s: list[float] = []

    def wait() -> None:
        pool.take()
        arrived_s.append(time.monotonic())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    interrupt_after(0.05)
    with pytest.raises(KeyboardInterrupt):
        pool.take()  # a wait that is interrupted takes nobody's buffer
    given_s = time.monotonic()
    for buffer in taken:
        pool.give_back(buffer)
    for thread in threads:
        thread.join()
    assert max(arrived_s) - given_s < 0.4  # nobody had to look up


# --- an interrupt at each place ---


def at_each_place(
    use: Callable[[], None], *, every: int = 1, first: int = 1, kind: type[Injected] = Injected
) -> Iterator[Injected]:
    """`use()` with an interrupt at its first place inside the package, then at the next, up to its last."""
    for countdown in range(first, 100_000, every):
        interrupt = kind(countdown)
        interrupt.arm()
        try:
            use()
        except (KeyboardInterrupt, InjectedError):
            interrupt.came = True
        finally:
            interrupt.disarm()
        yield interrupt
        if interrupt.num_places < countdown:
            return


def test_a_submission_to_a_lane_is_whole_wherever_it_is_interrupted() -> None:
    failures = Failures()
    lane = Lane("stage", failures)
    done: list[int] = []
    num_places = sum(1 for _ in at_each_place(lambda: lane.submit(lambda: done.append(1)).wait()))
    assert num_places > 5
    lane.submit(lambda: done.append(1)).wait()
    lane.close()
    assert failures.first is None
    assert len(done) >= 2


def test_a_wait_can_be_interrupted_at_each_place_and_the_others_still_end() -> None:
    number = 0
    while number < 50:
        number += 1
        latch = Latch()
        others = [threading.Thread(target=latch.wait) for _ in range(2)]
        for other in others:
            other.start()
        threading.Timer(0.01, latch.set).start()
        interrupt = Injected(number)
        interrupt.arm()
        try:
            latch.wait()
        except KeyboardInterrupt:
            pass
        finally:
            interrupt.disarm()
        for other in others:
            other.join(SOON_S)
            assert not other.is_alive(), interrupt.place
        latch.wait()
        if interrupt.num_places < number:
            break
    assert number > 4


def test_the_pipeline_takes_work_wherever_a_submission_is_interrupted(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path))
    pipeline = engine.optimizer.runtime.parts.pipeline
    for _ in at_each_place(lambda: pipeline.submit(lambda: None)):
        done = Latch()
        pipeline.submit(done.set)
        done.wait()
    for _ in at_each_place(lambda: pipeline.read_ahead(engine.optimizer.runtime.records)):
        done = Latch()
        pipeline.submit(done.set)
        done.wait()
    engine.close()


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_close_that_is_interrupted_is_done_by_the_next(tmp_path: Path, clipping: float) -> None:
    engines: list[offloadzero.Engine] = []

    def use() -> None:
        engines[-1].close()

    def open_one() -> None:
        engines.append(make_engine(settings(tmp_path, gradient_clipping=clipping)))
        train(engines[-1], num_steps=1)

    collect()  # what other tests have dropped
    threads = threads_of_ours()
    open_one()
    for interrupt in at_each_place(use, every=int(os.environ.get("OFFLOADZERO_TEST_EVERY_NTH_CLOSE", "13"))):
        engines[-1].close()  # and raises nothing: that it was interrupted has been said
        assert engines[-1].state is EngineState.CLOSED, interrupt.place
        assert (threads_of_ours(), os.listdir(tmp_path)) == (threads, []), interrupt.place
        open_one()
    engines[-1].close()
    assert len(engines) > 5


@pytest.mark.parametrize("kind", ["record", "stop_training"])
def test_a_failure_that_an_interrupted_close_has_not_told_is_told_by_the_next(
    tmp_path: Path, kind: str
) -> None:
    """Once, by whichever of the two comes to its end first."""
    engines: list[offloadzero.Engine] = []
    told: list[str] = []

    def use() -> None:
        try:
            engines[-1].close()
        except StateError as error:
            told.append(str(error))

    def open_one() -> None:
        engines.append(make_engine(settings(tmp_path)))
        getattr(engines[-1].optimizer.runtime.failures, kind)(StateError("a thread's failure"))
        told.clear()

    open_one()
    num_by_the_next = 0
    for interrupt in at_each_place(use, every=int(os.environ.get("OFFLOADZERO_TEST_EVERY_NTH_CLOSE", "13"))):
        num_by_the_next += not told
        use()
        use()
        assert told == ["a thread's failure"], interrupt.place
        open_one()
    use()
    assert num_by_the_next > 3


def test_a_failure_that_an_interrupted_close_has_not_told_is_said_when_its_engine_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: said.append(unraisable.exc_value))
    engine = make_engine(settings(tmp_path))
    engine.optimizer.runtime.failures.record(StateError("a thread's failure"))
    interrupts = [KeyboardInterrupt()]

    def close() -> None:
        while interrupts:
            raise interrupts.pop()

    engine.optimizer.runtime.resources.add(close)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    del engine
    collect(lambda: bool(said))
    assert [str(error) for error in said] == ["a thread's failure"]


EVERY_NTH_START = int(os.environ.get("OFFLOADZERO_TEST_EVERY_NTH_START", "700"))


def test_an_initialize_that_is_interrupted_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    before = forms(fresh_model())
    made: list[Any] = []

    def use() -> None:
        made.append(fresh_model())
        made.append(make_engine(settings(tmp_path), made[-1]))

    num_places = 0
    for interrupt in at_each_place(use, every=EVERY_NTH_START):
        num_places += 1
        if interrupt.came:
            assert os.listdir(tmp_path) == [], interrupt.place
            assert_as_before(made[-1], before)
        else:
            made[-1].close()
    assert num_places >= 3


@pytest.mark.parametrize("call", ["initialize", "offload"])
def test_an_error_at_any_place_of_the_start_leaves_the_model_as_it_was(tmp_path: Path, call: str) -> None:
    """Interrupts are held back here and there, an error is not."""
    before, threads = forms(fresh_model()), threads_of_ours()
    made: list[Any] = []

    def use() -> None:
        model = fresh_model()
        made.append(model)
        if call == "initialize":
            made.append(make_engine(settings(tmp_path), model))
        else:
            plain = torch.optim.AdamW(model.parameters())
            made.append(offloadzero.offload(model, plain, settings(tmp_path))[1])

    num_came = 0
    for fault in at_each_place(use, every=EVERY_NTH_START, kind=InjectedFault):
        num_came += fault.came
        if fault.came:
            assert (os.listdir(tmp_path), threads_of_ours()) == ([], threads), fault.place
            assert_as_before(made[-1], before)
        else:
            made[-1].close()
    assert num_came >= 3


def test_an_error_where_a_part_is_added_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory and files that were taken before they were known to be closed stayed, until the collector came."""
    threads, add = threads_of_ours(), Resources.add
    keys = {"activation_checkpoints": {"tier": "nvme"}}
    for failing in range(1, 10):
        num_added = 0

        def failing_add(self: Resources, close: Callable[[], None], failing: int = failing) -> None:
            nonlocal num_added
            num_added += 1
            if num_added == failing:
                raise InjectedError("no memory")
            add(self, close)

        monkeypatch.setattr(Resources, "add", failing_add)
        gc.disable()
        try:
            with contextlib.suppress(InjectedError):
                make_engine(settings(tmp_path, **keys)).close()
            assert (os.listdir(tmp_path), threads_of_ours()) == ([], threads), failing
        finally:
            gc.enable()
        if num_added < failing:
            break
    assert num_added == 3


# --- whole runs ---

NUM_INJECTED = int(os.environ.get("OFFLOADZERO_TEST_INJECTED", "6"))
NUM_REAL = int(os.environ.get("OFFLOADZERO_TEST_INTERRUPTS", "3"))
SIGNALS = ("SIGINT", "SIGALRM")
SEED = int(os.environ.get("OFFLOADZERO_TEST_INTERRUPT_SEED", "1"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("injected", NUM_INJECTED), ("real", NUM_REAL)])
def test_runs_go_on_with_the_same_bits_or_refuse_or_end(tmp_path: Path, kind: str, number: int) -> None:
    """Of each signal in turn."""
    reports_file = tmp_path / "reports.jsonl"
    done = run_warm(
        [
            sys.executable,
            "-m",
            "tests.engine.interrupts",
            kind,
            ",".join(SIGNALS),
            str(number),
            str(SEED),
            str(reports_file),
        ],
        cwd=REPOSITORY,
        env=script_environment(),
        timeout_s=600 + 40 * len(SIGNALS) * number,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in reports_file.read_text().splitlines()]
    assert all(report["verdict"] in FINE for report in reports), summary(reports)
    for name in SIGNALS:
        of_signal = [report for report in reports if report["case"]["signal"] == signal.Signals[name]]
        assert len(of_signal) == number
        # Else it would say nothing: most interrupts must hit.
        assert sum(report["verdict"] != "never came" for report in of_signal) >= number // 2
