"""What tests/engine/interrupts.py says of a run: where its interrupts come, and whether one was lost."""

from __future__ import annotations

import contextlib
import io
import sys
import weakref
from collections.abc import Callable
from importlib import _bootstrap  # type: ignore[attr-defined]
from pathlib import Path
from types import FrameType

import pytest
import torch

from offloadzero.memory.tickets import Latch
from tests.engine.interrupts import CONFIGURATIONS, Case, Injected, Run, is_swallowed, play, verdict


def printed_of_dropped(callback: str, drop: Callable[[], object]) -> str:
    """What Python prints of an interrupt in the function `callback`, which `drop` lets it call from C++."""

    def strike(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == callback:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with contextlib.redirect_stderr(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
        sys.setprofile(strike)
        drop()
    return output.getvalue()


def test_what_python_drops_itself_is_told_from_what_the_package_lets_it_drop() -> None:
    def of_the_package(_: object) -> None: ...

    def drop_referent() -> None:
        reference = weakref.ref(Latch(), of_the_package)
        assert reference() is None

    pythons = printed_of_dropped("cb", lambda: _bootstrap._get_module_lock("offloadzero.none"))
    ours = printed_of_dropped("of_the_package", drop_referent)
    assert "Exception ignored" in pythons
    assert not is_swallowed(pythons)
    assert is_swallowed(ours)
    assert is_swallowed(pythons + ours)
    # Python 3.14 says it in other words.
    said = (
        "Exception ignored while calling weakref callback <function f>:\nTraceback (most recent call last):\n"
    )
    assert is_swallowed(f'{said}  File "lifetime.py", line 1, in f\nKeyboardInterrupt:\n')
    assert not is_swallowed(
        f'{said}  File "<frozen importlib._bootstrap>", line 1, in cb\nKeyboardInterrupt:\n'
    )


def test_an_interrupt_that_was_sent_and_that_nobody_caught_is_swallowed() -> None:
    report = {"status": 0, "files": [], "outcome": "never came", "output": "", "different": [], "place": ""}
    assert verdict(report) == "never came"
    assert verdict(report | {"place": "runtime.py:1 close (call)"}) == "swallowed"


def test_places_are_those_of_training_and_of_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt, ends = Injected(-1), []
    result = Run.result

    def counted(run: Run) -> dict[str, torch.Tensor]:
        ends.append(interrupt.num_places)
        values = result(run)
        ends.append(interrupt.num_places)
        return values

    monkeypatch.setattr(Run, "result", counted)
    outcome, _ = play(Case(*CONFIGURATIONS[0], kind="injected", at=-1), str(tmp_path), interrupt)
    assert outcome == "never came"
    begin, end = ends
    assert 0 < begin == end < interrupt.num_places
