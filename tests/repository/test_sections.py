"""What the fixture `no_section_is_left` asks: a section left open, and one that another thread is in."""

from __future__ import annotations

import threading
import time

from offloadzero.core.interrupts import uninterrupted
from tests.support.sections import end_those_left


def test_a_section_that_another_thread_is_in_is_waited_for() -> None:
    inside = threading.Event()

    def remove_files() -> None:
        with uninterrupted:
            inside.set()
            time.sleep(0.05)

    thread = threading.Thread(target=remove_files)
    thread.start()
    inside.wait()
    assert uninterrupted.depth == 1
    assert end_those_left() == 0
    thread.join()


def test_a_section_that_was_left_open_fails_one_test_alone() -> None:
    uninterrupted.__enter__()
    assert end_those_left(patience_s=0.01) == 1
    assert end_those_left(patience_s=0.01) == 0
