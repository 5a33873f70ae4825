"""Weights that a script reads are the present ones, and what it writes arrives; torch.compile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offloadzero import OffloadError
from tests.scripts import common, weights, weights_replaced
from tests.scripts.common import Script, assert_matches, cases, offloaded, reference, run

COMPILED_STEPS = 3


@pytest.mark.parametrize(("name", "placement"), cases(weights.SCRIPTS, ["host", "nvme", "stage 1"]))
def test_weights_are_those_of_torch(name: str, placement: str, tmp_path: Path) -> None:
    script = weights.SCRIPTS[name]
    assert_matches(run(script, offloaded(placement, tmp_path, clipping=0.0)), reference(script))


def followed_or_refused(script: Script, words: str, directory: Path) -> None:
    expected = reference(script)
    try:
        result = run(script, offloaded("host", directory, clipping=0.0))
    except OffloadError as error:
        assert re.search(words, str(error)), error  # noqa: PT017
    except ValueError as error:
        assert "read-only" in str(error)  # noqa: PT017 - numpy's own words
    else:
        assert_matches(result, expected)


@pytest.mark.parametrize("name", weights_replaced.MAY_BE_REFUSED)
def test_followed_or_refused_by_name(name: str, tmp_path: Path) -> None:
    followed_or_refused(*weights_replaced.MAY_BE_REFUSED[name], tmp_path)


@pytest.mark.parametrize("name", weights_replaced.COMPILED)
def test_compiled_models_train_or_are_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "NUM_STEPS", COMPILED_STEPS)
    followed_or_refused(weights_replaced.COMPILED[name], "torch.compile", tmp_path)
