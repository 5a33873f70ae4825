"""The forecasts of benchmarks/gpu_forecasts.md, for machines that have not been measured, are those of the plan.

A row that differs is printed as it would be now: `pytest tests/planning/test_gpu_forecasts.py` after a change of the
forecast, of the machines in offloadzero/cli/plan/machines or of an estimate of bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offloadzero.cli.main import main
from offloadzero.cli.plan import answer as plan_answer
from offloadzero.cli.plan.command import MACHINES
from offloadzero.planning.engine_plan import Change
from offloadzero.planning.model.trace import MicroBatchTrace

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = ROOT / "benchmarks" / "hardware"
TITLE = "## Forecasts made before the first run on a GPU"
COLUMNS = (
    "card",
    "model",
    "configuration",
    "device GiB",
    "host GiB",
    "nvme GiB",
    "s per step",
    "tokens/s",
    "TFLOPS",
    "longest lane",
    "the step waits for",
    "without clipping, s",
    "clipping costs",
)
NUM_TOKENS = 8 * 2048
GIB = 1 << 30
LORA = ["llama:70b", "--lora", "16"]
LEAST_SHARE = 0.03  # of a step, of a lane that is named


def cells(line: str) -> list[str]:
    """Return a row of a table in Markdown as its cells."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def section() -> str:
    """Return the part of the page."""
    return (ROOT / "benchmarks" / "gpu_forecasts.md").read_text().split(TITLE)[1].split("\n## ")[0]


def published_rows() -> list[list[str]]:
    """Return the rows of the table."""
    table = [cells(line) for line in section().splitlines() if line.startswith("|")]
    start = next(number for number, row in enumerate(table) if tuple(row) == COLUMNS)
    return [row for row in table[start + 2 :] if len(row) == len(COLUMNS)]


ROWS = published_rows()
OF_EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]} {row[2].strip('`')}" for row in ROWS])
Found = dict[str, Any]


@dataclass
class Answers:
    """What `offloadzero plan` says, asked once; micro batches are traced once for all machines."""

    traces: dict[tuple[Any, ...], MicroBatchTrace] = field(default_factory=dict)
    of_rows: dict[tuple[str, ...], Found] = field(default_factory=dict)

    def traced(self, trace_blocks: Any, model_of: Any, num_blocks: int, **how: Any) -> MicroBatchTrace:
        """Return what `trace_blocks` returns: neither the machine nor the clipping changes it."""
        names = tuple(sorted(how["checkpointed"]))
        rest = (how[name] for name in ("dtype", "micro_batch", "sequence", "on_cpu"))
        key = (model_of.__self__.name, num_blocks, names, *rest)
        if key not in self.traces:
            self.traces[key] = trace_blocks(model_of, num_blocks, **how)
        return self.traces[key]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """The answers so far."""
    return Answers()


@pytest.fixture
def plan(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Found]:
    """Return the command of a row of the page, which has its JSON as the result."""
    monkeypatch.setattr(plan_answer, "trace_blocks", partial(answers.traced, plan_answer.trace_blocks))
    monkeypatch.chdir(ROOT)  # where the commands of the page run

    def ask(row: list[str], *, clips: bool = True) -> Found:
        key = (*row[:3], str(clips))
        if key not in answers.of_rows:
            card, model, config = (cell.strip("`") for cell in row[:3])
            path = HARDWARE / "configs" / config
            if not clips:  # as the page's `sed` does
                text = path.read_text()
                assert text.count('"gradient_clipping": 1.0') == 1
                path = tmp_path / config
                path.write_text(text.replace('"gradient_clipping": 1.0', '"gradient_clipping": 0'))
            words = [
                "plan",
                "--model",
                *model.split(),
                "--config",
                str(path),
                "--sequence",
                "2048",
                "--json",
                "-",
            ]
            assert main([*words, "--hardware", card.lower()]) == 0
            answers.of_rows[key] = json.loads(capsys.readouterr().out)
        return answers.of_rows[key]

    return ask


def row_of(row: list[str], clipped: Found, plain: Found) -> list[str]:
    """Return the row as it is now."""
    forecast, simulated = clipped["forecast"], clipped["simulated"]
    seconds, plain_s = forecast["seconds"], plain["forecast"]["seconds"]
    waits = sorted(
        ((s / simulated["seconds"], lane) for lane, s in simulated["critical_s"].items()), reverse=True
    )
    return [
        *row[:3],
        *(f"{clipped['needed'].get(tier, 0) / 2**30:.1f}" for tier in ("device", "host", "nvme")),
        f"{seconds:.2f}",
        f"{forecast['tokens_per_s']:,.0f}",
        f"{clipped['tflops_of_device']:.0f}",
        forecast["lane"],
        ", ".join(f"{lane} {share:.0%}" for share, lane in waits if share >= LEAST_SHARE),
        f"{plain_s:.2f}",
        f"{1 - plain_s / seconds:.1%}",
    ]


@OF_EACH_ROW
def test_the_page_has_the_forecast(row: list[str], plan: Callable[..., Found]) -> None:
    found = row_of(row, plan(row), plan(row, clips=False))
    assert found == row, f"now: | {' | '.join(found)} |"


@OF_EACH_ROW
def test_no_step_is_faster_than_its_bytes_and_operations_allow(
    row: list[str], plan: Callable[..., Found]
) -> None:
    """The lanes in the bytes of docs/architecture.md, over the rates of the file: a floor that no plan made."""
    rates = json.loads(Path(MACHINES[row[0].lower()]).read_text())["rates"]
    for clips in (True, False):
        found = plan(row, clips=clips)
        count, is_full = found["num_trainable"], found["num_trainable"] == found["num_parameters"]
        seconds, needed = found["forecast"]["seconds"], found["needed"]
        lanes: Counter[str] = Counter()
        for phase in found["traffic"].values():
            lanes.update(phase)
        # Frozen weights have no gradient: 6 operations in the place of 8. Attention's are not in these.
        operations = (8 if is_full else 6) * found["num_parameters"] * NUM_TOKENS
        assert 0.97 < found["tflops_of_device"] * 1e12 * seconds / operations < 1.1
        assert seconds >= 0.97 * operations / rates["flops"]["bf16"]
        for lane in ("h2d", "d2h", "nvme_read", "nvme_write"):
            assert seconds >= lanes[lane.replace("_", " ")] / rates[lane]
        assert seconds >= lanes["update"] / rates["update"]["fp32"]
        if not is_full:
            continue  # adapters are few: what is frozen moves, and hardly anything else
        per_param = 12.12 if "compact" in row[2] else 26
        assert lanes["update"] + lanes["device update"] == pytest.approx(per_param * count, rel=0.01)
        if needed["device"] < 20 * GIB:  # states and parameters are all away from it
            assert lanes["d2h"] == pytest.approx(2 * count, rel=0.001)
            assert 3 * count < lanes["h2d"] <= 4 * count * 1.001
        if needed["nvme"] > 11 * count:
            assert lanes["nvme write"] == pytest.approx(12 * count, rel=0.001)
            assert 15 * count < lanes["nvme read"] <= 16 * count * 1.001


@pytest.mark.usefixtures("plan")  # for its traces
@pytest.mark.parametrize("config", ["70b_lora_host.json", "70b_lora_nvme.json"])
def test_the_page_says_what_is_short_where_one_tier_has_all_frozen_weights(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The search for a change takes a minute.
    monkeypatch.setattr(plan_answer.Planner, "smallest_change", lambda *_: Change({}))
    words = ["plan", "--model", *LORA, "--config", str(HARDWARE / "configs" / config), "--sequence", "2048"]
    assert main([*words, "--hardware", "h100", "--no-time"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert f"`{config}`: {next(line for line in said if line.startswith('It does not fit'))}" in section()


def test_the_page_of_the_machines_has_the_file_of_one() -> None:
    assert Path(MACHINES["rtx-4090"]).read_text() in (HARDWARE / "README.md").read_text()
