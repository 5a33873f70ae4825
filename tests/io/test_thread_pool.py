"""The pool whose calls run where no thread takes them: once each."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest

from offloadzero.core.thread_pool import CallerRunsThreadPool
from tests.support.tiny import run_script


@pytest.mark.parametrize("num_threads", [0, 1])
def test_past_the_limit_of_threads_each_call_runs_once(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that runs finds the calls in its queue for which no other has started."""
    start, num_started = threading.Thread.start, 0

    def start_some(thread: threading.Thread) -> None:
        nonlocal num_started
        num_started += 1
        if num_started > num_threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    ran: Counter[int] = Counter()

    def call(number: int) -> int:
        ran[number] += 1
        return 1 // number

    with CallerRunsThreadPool(4) as pool:
        futures = [pool.submit(call, number) for number in range(200)]
        with pytest.raises(ZeroDivisionError):
            futures[0].result()
        assert [future.result() for future in futures[1:]] == [1] + [0] * 198
    assert ran == Counter(range(200))
    assert num_started > num_threads


def test_a_piece_that_was_hashed_does_not_stay_in_memory_until_the_pool_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with CallerRunsThreadPool(1) as pool:
        piece = {1}
        reference = weakref.ref(piece)
        assert pool.submit(len, piece).result() == 1
        del piece
        assert reference() is None


def test_a_script_may_end_while_aiofiles_writes(tmp_path: Path) -> None:
    """The interpreter ends its pools of threads before the engine, which has updates and a commit to write."""
    script = """
        import sys
        from dataclasses import replace
        from tests.durable.runs import KINDS, make, train_step
        kind = replace(KINDS["nvme"], own={"aio": {"backend": "aiofiles"}})
        engine = make(kind, sys.argv[1])
        state = engine.resume()
        print(state)
        train_step(engine, kind, 0 if state is None else state["next"])
    """
    for found in (None, {"next": 1}, {"next": 2}):
        done = run_script(script, tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{found}\n", "")
