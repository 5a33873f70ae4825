"""`offloadzero report`: one page, complete, and nothing in a run's files can become markup."""

from __future__ import annotations

import json
import os
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.cli import report
from offloadzero.cli.main import USER_ERROR, main
from offloadzero.cli.output import make_page, page_template
from offloadzero.cli.plan import command
from offloadzero.observe.monitor import FORECAST_FORMAT, FORMAT, FORMAT_VERSION, trace_events
from offloadzero.observe.timeline import Span
from offloadzero.planning.model.shapes import read_model
from tests.cli.planned import SHAPE, words
from tests.support.tiny import make_engine, settings, train

HOSTILE = "</script><script>alert(\"1\")</script><!--<b onclick='x'>&amp; \u2028 ü"


class Page(HTMLParser):
    """Tags, the data and the addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self._is_data = False
        self.data: dict[str, Any] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self._is_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self.data = json.loads(data)
            self._is_data = False


TEMPLATE_TAGS = list(Page(make_page(report.PAGE, {})).tags)


def step_record(step: int, **keys: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "step": step,
        "step_s": 0.5,
        "bound_s": 0.4,
        "bound_lane": "compute",
        "efficiency": 0.8,
        "lanes_s": {"compute": 0.4},
        "busy_s": {"h2d": 0.1},
        "bytes": {"h2d": 10**8},
        "waits_s": {"fetch": 0.1},
        "launch_s": 0.01,
        "loss": 2.0,
    }
    return {**record, **keys}


def write_run(
    directory: Path, records: list[Any], *, tiers: dict[str, Any] | None = None, **keys: Any
) -> Path:
    directory.mkdir(exist_ok=True)
    run = {"format": FORMAT, "format_version": FORMAT_VERSION, "tiers": tiers or {}, **keys}
    (directory / "run.json").write_text(json.dumps(run))
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (directory / "steps.jsonl").write_text("".join(line + "\n" for line in lines))
    return directory


def make(directory: Path, *options: str) -> Page:
    assert main(["report", str(directory), *options]) == 0
    output = Path(options[1]) if options else directory / "report.html"
    return Page(output.read_text(encoding="utf-8"))


def test_a_real_run_becomes_one_page_that_loads_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    engine = make_engine(settings(tmp_path, observe={"run_dir": str(run_dir), "trace_steps": "3-4"}))
    losses = train(engine, num_steps=5)
    engine.close()
    page = make(run_dir, "-o", str(tmp_path / "page.html"))
    assert page.tags == TEMPLATE_TAGS
    assert page.addresses == []
    assert "http" not in (tmp_path / "page.html").read_text().replace("http://www.w3.org/2000/svg", "")
    data = page.data
    assert data["steps"]["step"] == [1, 2, 3, 4, 5]
    assert data["steps"]["loss"] == losses
    assert "A step takes" in data["summary"]
    assert data["notes"] == []
    assert [trace["step"] for trace in data["traces"]] == [3, 4]
    assert sum(line["num_bytes"] for line in data["tiers"]["nvme"]) == engine.reserved_bytes()["nvme"]
    for trace in data["traces"]:
        written = json.loads((run_dir / f"trace_step_{trace['step']}.json").read_text())["traceEvents"]
        spans = [event for event in written if event["ph"] == "X" and event["cat"] != "step"]
        shown = [(lane["name"], span) for lane in trace["lanes"] for span in lane["spans"]]
        assert len(shown) == len(spans)
        assert sorted(trace["names"][s[2]] for _, s in shown) == sorted(event["name"] for event in spans)
        assert sum(s[3] for _, s in shown) == sum(event["args"].get("bytes", 0) for event in spans)
        assert all(lane["num_tracks"] > span[4] for lane in trace["lanes"] for span in lane["spans"])


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    directory = tmp_path / 'a"<img src=x>&'
    write_run(
        directory,
        [
            step_record(
                1, waits_s={HOSTILE: 0.2}, bound_lane=HOSTILE, lanes_s={HOSTILE: 0.4}, bytes={HOSTILE: 1}
            )
        ],
        tiers={HOSTILE: [{"what": HOSTILE, "num_bytes": 5}]},
        device=HOSTILE,
        file_engine=HOSTILE,
    )
    trace = trace_events(1, [Span("compute", HOSTILE, 0.0, 1.0)], start_s=0.0, end_s=2.0)
    (directory / "trace_step_1.json").write_text(json.dumps(trace))
    page = make(directory)
    assert page.tags == TEMPLATE_TAGS
    data = page.data
    assert data["title"] == directory.name
    assert list(data["steps"]["waits_s"]) == [HOSTILE]
    assert list(data["tiers"]) == [HOSTILE]
    assert ["device", HOSTILE] in data["facts"]
    assert HOSTILE in data["summary"]
    assert data["traces"][0]["names"] == [HOSTILE]
    template = page_template(report.PAGE)
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in template  # text reaches the page as text only


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2, of "#rrggbb"."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_can_be_read_on_every_color_that_has_some() -> None:
    light, _, dark = page_template(report.PAGE).partition("prefers-color-scheme: dark")
    for style in (light, dark.partition("\n}")[0]):
        colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", style))
        pairs = [("on", f"c{i}") for i in range(9)]  # labels of spans and bars
        pairs += [("on", name) for name in ("wait", "forward", "backward", "other")]
        pairs += [(name, on) for name in ("text", "quiet", "wait") for on in ("card", "page")]
        for pair in pairs:
            dim, bright = sorted(luminance(colors[name]) for name in pair)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, pair


def test_a_run_without_steps_loss_or_trace_says_so(tmp_path: Path) -> None:
    data = make(write_run(tmp_path / "empty", [])).data
    assert data["summary"] == "No step has been recorded yet."
    assert data["steps"]["step"] == []
    assert data["lanes"] == []
    (tmp_path / "empty" / "steps.jsonl").unlink()
    assert make(tmp_path / "empty").data["steps"]["step"] == []
    record = step_record(1)
    del record["loss"]
    data = make(write_run(tmp_path / "bare", [record])).data
    assert data["steps"]["loss"] is None
    assert data["traces"] == []


def test_what_cannot_be_read_is_counted_and_the_rest_is_shown(tmp_path: Path) -> None:
    broken = ['{"step": 2, "st', "[]", "{}", step_record(3, waits_s={"a": "x"}), step_record(4, step_s=True)]
    directory = write_run(tmp_path / "run", [step_record(1), *broken, step_record(5)])
    (directory / "trace_step_7.json").write_text("{}")
    (directory / "trace_step_8.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    data = make(directory).data
    assert data["steps"]["step"] == [1, 5]
    notes = " ".join(data["notes"])
    assert "steps.jsonl" in notes
    assert ": 5." in notes
    assert "trace_step_7.json cannot be read." in data["notes"]
    assert "trace_step_8.json cannot be read." in data["notes"]


def test_a_run_that_goes_on_from_a_checkpoint_replaces_later_steps(tmp_path: Path) -> None:
    steps = [1, 2, 3, 4, 3, 4, 5]
    directory = write_run(tmp_path, [step_record(s, loss=float(i)) for i, s in enumerate(steps)])
    data = make(directory).data
    assert data["steps"]["step"] == [1, 2, 3, 4, 5]
    assert data["steps"]["loss"] == [0.0, 1.0, 4.0, 5.0, 6.0]


def test_a_long_run_is_drawn_as_means(tmp_path: Path) -> None:
    num_steps = 2 * report.MAX_POINTS + 1
    records = [step_record(s + 1, loss=float(s), step_s=1.0 + s % 3) for s in range(num_steps)]
    records[4]["loss"] = None  # not finite
    data = make(write_run(tmp_path, records)).data["steps"]
    assert data["group"] == 3
    assert len(data["step"]) <= report.MAX_POINTS
    assert data["loss"][:3] == [1.0, 4.0, 7.0]
    assert data["loss"][1] == (3.0 + 5.0) / 2
    assert data["step_s"][0] == 2.0
    assert data["step"][-1] == num_steps


def test_medians_leave_the_first_steps_out(tmp_path: Path) -> None:
    slow = {"step_s": 50.0, "bound_s": 1.0, "efficiency": 0.02}
    records = [step_record(1, **slow), step_record(2, **slow), step_record(3), step_record(4), step_record(5)]
    data = make(write_run(tmp_path, records, num_units=4)).data
    facts = dict(data["facts"])
    assert facts["step (median)"] == "500 ms"
    assert facts["overlap efficiency"] == "80.0%"
    assert facts["in named waits"] == "20.0%"
    assert facts["hooks per unit"] == "2.5 ms"
    assert data["summary"].endswith("compute alone needs 80.0% of that; largest waits: fetch 20.0%.")
    assert data["lanes"] == [
        ["compute", "", "", "", "", "400 ms"],
        ["h2d", "95.4 MiB", "100 ms", "20.0%", "1.00 GB/s", ""],
    ]


def test_of_a_huge_trace_the_longest_spans_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_SPANS", 3)
    directory = write_run(tmp_path, [step_record(1)])
    spans = [Span("h2d", f"s{i}", i, i + 0.1 * (i + 1)) for i in range(5)]
    trace = trace_events(1, spans, start_s=0.0, end_s=5.0)
    (directory / "trace_step_1.json").write_text(json.dumps(trace))
    data = make(directory).data
    assert sorted(data["traces"][0]["names"]) == ["s2", "s3", "s4"]
    assert data["notes"] == ["trace_step_1.json: the 2 shortest spans are left out of this page."]


@pytest.mark.parametrize("content", [None, "{", "{}", json.dumps({"format": FORMAT, "format_version": 0})])
def test_what_is_no_run_directory_is_named(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert "RUN_DIR" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [])
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "--output" in capsys.readouterr().err


# --- damaged ---

NUM_DAMAGES = int(os.environ.get("OFFLOADZERO_TEST_DAMAGES", "150"))
STRANGE = (None, True, "x", [], {}, [[]], -1, 0, 1e29, -1e29, "\ud800", {"a": {}}, 2**62, [1, "2"])
STRANGE_TEXT = ("NaN", "Infinity", "1e999", "9" * 5000, "[" * 5000, '"', "\x00", "\ud7ff", "-", "1" * 400)


def change_a_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with something strange somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: change_a_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], change_a_value(value[at], rng), *value[at + 1 :]]
    return rng.choice(STRANGE)


def damage(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    at = rng.randrange(len(content))
    way = rng.randrange(6)
    if way == 0:
        content = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    elif way == 1:
        content = content[:at]
    elif way == 2:
        content = content[:at] + rng.choice(STRANGE_TEXT).encode() + content[at + rng.randrange(9) :]
    elif way == 3:
        content = content[:at] + rng.randbytes(20) + content[at:]
    else:
        lines = content.decode().splitlines() if file.suffix == ".jsonl" else [content.decode()]
        line = rng.randrange(len(lines))
        lines[line] = json.dumps(change_a_value(json.loads(lines[line]), rng))
        content = "\n".join(lines).encode()
    file.write_bytes(content)


def test_a_damaged_run_directory_is_a_page_or_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = {"nvme": [{"what": "home: param", "num_bytes": 5}]}
    trace = json.dumps(trace_events(1, [Span("h2d", "a", 0.0, 1.0)], start_s=0.0, end_s=2.0))
    statuses = []
    for seed in range(NUM_DAMAGES):
        rng = random.Random(seed)
        directory = write_run(
            tmp_path / str(seed), [step_record(i) for i in (1, 2, 3)], tiers=tiers, num_units=4, device="cpu"
        )
        (directory / "trace_step_1.json").write_text(trace)
        for file in rng.sample(sorted(directory.iterdir()), rng.randrange(1, 4)):
            damage(file, rng)
        statuses.append(main(["report", str(directory)]))
        out, err = capsys.readouterr()
        assert len(err.splitlines()) == (statuses[-1] != 0), (seed, err)
        if statuses[-1] == 0:
            assert Page((directory / "report.html").read_text(encoding="utf-8")).tags == TEMPLATE_TAGS
            assert "written to" in out
        else:
            assert err.startswith("offloadzero: RUN_DIR")
    assert {0, 2} == set(statuses)


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "trace_step_1.json"])
def test_a_directory_in_place_of_a_file(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run", [step_record(1)])
    (directory / name).unlink(missing_ok=True)
    (directory / name).mkdir()
    status = main(["report", str(directory)])
    err = capsys.readouterr().err
    assert (status, len(err.splitlines())) == {"run.json": (2, 1), "steps.jsonl": (1, 1)}.get(name, (0, 0))


# --- beside the forecast that `offloadzero plan --json` made of it ---


NUM_STEPS = 12


def plan_file(path: Path, seconds: float | None, lanes_s: dict[str, float], **moved: int) -> str:
    plan = {
        "format": command.FORMAT,
        "format_version": command.FORMAT_VERSION,
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
            *(2.0, {"compute": 0.8, "nvme read": 0.8}),
            "2 s were forecast: 50.0% less. The lane that departs most is compute: 500 ms, 800 ms were forecast. "
            "That is less than half of it: the lanes overlapped more than was forecast.",
        ),
    ],
)
def test_it_says_how_much_a_step_departs_and_why(
    seconds: float, lanes_s: dict[str, float], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The causes are tested in tests/observe/test_forecast.py."""
    took = {"compute": 0.5, "nvme read": 0.2}
    run = run_of(tmp_path / "run", lanes_s=took, busy_s={"nvme read": 0.7}, bytes={"nvme read": 7})
    plan = plan_file(tmp_path / "plan.json", seconds, lanes_s)
    assert main(["report", str(run), "--plan", plan]) == 0
    assert f"A step took 1 s (median), {said}\n" in capsys.readouterr().out


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
        "format_version": command.FORMAT_VERSION,
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
