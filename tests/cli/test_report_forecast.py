"""A run beside the forecast that `offloadzero plan --json` made of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.cli.main import USER_ERROR, main
from offloadzero.cli.plan.command import FORMAT, FORMAT_VERSION
from offloadzero.observe.monitor import FORECAST_FORMAT
from offloadzero.planning.model.shapes import read_model
from tests.cli.test_plan import SHAPE, words
from tests.cli.test_report import make, step_record, write_run
from tests.support.tiny import settings

NUM_STEPS = 12


def plan_file(path: Path, seconds: float | None, lanes_s: dict[str, float], **moved: int) -> str:
    plan = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "forecast": {"seconds": seconds, "lanes_s": lanes_s},
        "traffic": {"forward": {"h2d": 5}, "backward": {}, "update": moved},
    }
    path.write_text(json.dumps(plan))
    return str(path)


def run_of(path: Path, num_steps: int = NUM_STEPS, **keys: Any) -> Path:
    """Steps of a second, behind two of a minute that do not count."""
    return write_run(
        path,
        [step_record(step, step_s=60.0 if step < 3 else 1.0, **keys) for step in range(1, num_steps + 1)],
    )


def test_the_bytes_of_a_run_are_those_of_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    keys: dict[str, Any] = {"placement": {"param": "host", "states": "nvme"}, "gradient_clipping": 1.0}
    assert main([*words(tmp_path, **keys), "--json", str(plan)]) == 0
    run_dir = tmp_path / "run"
    config = settings(tmp_path / "files", observe={"run_dir": str(run_dir)}, **keys)
    engine, *_ = offloadzero.initialize(model=read_model(SHAPE).build(), config=config)
    for _ in range(NUM_STEPS):
        engine.backward(engine(torch.randint(101, (2, 16))))
        # The lane notes a copy when it is over, a moment after the landing that waits for it: else it counts for the
        # next step now and then.
        time.sleep(0.05)
        engine.step()
    engine.close()
    capsys.readouterr()
    page = make(run_dir, "-o", str(tmp_path / "page.html"), "--plan", str(plan))
    lines = capsys.readouterr().out.splitlines()
    forecast = json.loads(plan.read_text())["forecast"]["seconds"]
    sentence = next(line for line in lines if line.startswith("A step took "))
    assert "were forecast: " in sentence
    assert "The lane that departs most is " in sentence, "a machine that does not exist"
    assert sentence in page.data["notes"]
    assert page.data["facts"][1][0] == "forecast"
    assert forecast > 0
    for lane in ("d2h", "update", "nvme write", "nvme read"):
        cells = next(line for line in lines if line.startswith(f"{lane} ")).removeprefix(lane).split()
        assert cells[:2] == cells[2:4], lane


@pytest.mark.parametrize(
    ("seconds", "lanes_s", "said"),
    [
        (0.9, {"compute": 0.1}, "900 ms were forecast: 11.1% more."),
        (
            0.5,
            {"compute": 0.4, "nvme read": 0.1},
            "500 ms were forecast: 100.0% more. The lane that departs most is nvme read: 700 ms, 100 ms were forecast.",
        ),
        (
            2.0,
            {"compute": 0.8, "nvme read": 0.8},
            "2 s were forecast: 50.0% less. The lane that departs most is compute: 500 ms, 800 ms were forecast. "
            "That is less than half of it: the lanes overlapped more than was forecast.",
        ),
        (0.5, {"h2d": 1.0}, "500 ms were forecast: 100.0% more. No lane of the forecast was measured."),
    ],
)
def test_the_lane_that_departs_most_is_the_cause(
    seconds: float,
    lanes_s: dict[str, float],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_of(
        tmp_path / "run",
        lanes_s={"compute": 0.5, "nvme read": 0.2},
        busy_s={"nvme read": 0.7},
        bytes={"nvme read": 7},
    )
    plan = plan_file(tmp_path / "plan.json", seconds, lanes_s)
    assert main(["report", str(run), "--plan", plan]) == 0
    out = capsys.readouterr().out
    assert f"A step took 1 s (median), {said}\n" in out


def test_a_drive_with_one_lane_has_both_directions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", lanes_s={"compute": 1.0}, busy_s={"nvme": 0.7}, bytes={"nvme": 7})
    plan = plan_file(tmp_path / "plan.json", 1.0, {"compute": 1.0}, **{"nvme read": 3, "nvme write": 4})
    assert main(["report", str(run), "--plan", plan]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nvme ")]
    assert row.split()[1:5] == ["7", "B", "7", "B"]


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    for seconds, lanes, steps, message in (
        (None, {}, NUM_STEPS, "a plan with a forecast of the step's time: this one has none"),
        (1.0, {"compute": "x"}, NUM_STEPS, "is damaged: lanes and traffic are tables of numbers"),
        (1.0, {}, 9, "RUN_DIR = '9 steps': at least 10 beside --plan"),
    ):
        run = run_of(tmp_path / "run", steps)
        assert main(["report", str(run), "--plan", plan_file(plan, seconds, lanes)]) == USER_ERROR  # type: ignore[arg-type]
        assert message in capsys.readouterr().err
        assert not (run / "report.html").exists()
    plan_file(plan, 1.0, {}, update=5)
    run = run_of(tmp_path / "skips", bytes={"d2h": 7})
    assert main(["report", str(run), "--plan", str(plan)]) == USER_ERROR
    assert "RUN_DIR = '0 of 12 steps': at least 8 with updates after the first 2" in capsys.readouterr().err


def own_forecast(path: Path, **keys: Any) -> None:
    value = {
        "format": FORECAST_FORMAT,
        "format_version": FORMAT_VERSION,
        "seconds": 0.5,
        "lane": "compute",
        "lanes_s": {"compute": 0.4, "nvme read": 0.1},
        "num_bytes": {"nvme read": 7},
        "parts_s": {},
    }
    (path / "forecast.json").write_text(json.dumps({**value, **keys}))


def test_without_a_plan_a_run_is_compared_with_its_own_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow: dict[str, Any] = {
        "lanes_s": {"compute": 0.4},
        "busy_s": {"nvme read": 0.7},
        "bytes": {"nvme read": 7},
    }
    run = run_of(tmp_path / "run", **slow)
    own_forecast(run)
    page = make(run)
    sentence = (
        "A step took 1 s (median), 500 ms were forecast: 100.0% more. The lane that departs most is nvme read: 700 ms, "
        "100 ms were forecast."
    )
    assert sentence in page.data["notes"]
    assert page.data["facts"][1] == ["forecast", "500 ms"]
    assert sentence in capsys.readouterr().out
    plan = plan_file(tmp_path / "plan.json", 0.9, {"compute": 0.4})
    assert main(["report", str(run), "--plan", plan]) == 0
    assert "900 ms were forecast" in capsys.readouterr().out, "a plan that is named goes first"
    few = run_of(tmp_path / "few", 9, **slow)
    own_forecast(few)
    assert make(few).data["notes"] == []


@pytest.mark.parametrize(
    "damage", [{"seconds": 0}, {"lane": 3}, {"lanes_s": []}, {"num_bytes": {"a": "b"}}, {"parts_s": None}]
)
def test_a_damaged_forecast_is_named(
    damage: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    own_forecast(run, **damage)
    assert main(["report", str(run)]) == USER_ERROR
    assert "is damaged: not the forecast of a step" in capsys.readouterr().err


def test_a_run_that_goes_on_has_no_forecast_of_an_earlier_one(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    own_forecast(run)
    engine, *_ = offloadzero.initialize(
        model=read_model(SHAPE).build(), config=settings(placement="host", observe={"run_dir": str(run)})
    )
    engine.close()
    assert not (run / "forecast.json").exists()
