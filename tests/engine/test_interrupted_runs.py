"""What tests/engine/interrupts.py says of a run: where its interrupts come, and whether one was lost."""

from __future__ import annotations

import contextlib
import io
import sys
import weakref
from collections.abc import Callable
from importlib import _bootstrap  # type: ignore[attr-defined]
from types import FrameType

import pytest

from offloadzero.memory.tickets import Latch
from tests.engine.interrupts import is_swallowed


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
