"""The command that plans, as a fixture; and each shape that it is asked for is traced once in a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offloadzero.cli.main import USER_ERROR, main
from tests.cli.planned import PlanJson, PlanText, words
from tests.support.traces import shapes_traced_once  # noqa: F401 -- a fixture


@pytest.fixture
def plan_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PlanText:
    def ask(*more: str, status: int = 0, **given: Any) -> str:
        capsys.readouterr()
        assert main(words(tmp_path, *more, **given)) == status
        printed = capsys.readouterr()
        return printed.err if status == USER_ERROR else printed.out

    return ask


@pytest.fixture
def plan_json(plan_text: PlanText) -> PlanJson:
    return lambda *more, **given: json.loads(plan_text("--json", "-", *more, **given))
