"""`offloadzero plan --html`: one page, complete, that says what the text says, and nothing in it can become markup."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadzero.cli.main import FAILURE, USER_ERROR, main
from offloadzero.cli.output import make_page, page_template
from offloadzero.cli.plan.report import PAGE
from offloadzero.observe.bound import CORES
from offloadzero.planning.hardware import Hardware, Memory
from offloadzero.planning.step.forecast import OVERLAP
from tests.cli.planned import GIB, MACHINE, MIB, words
from tests.cli.test_report import HOSTILE, Page

TEMPLATE_TAGS = Page(make_page(PAGE, {})).tags
WITH_DEVICE = replace(MACHINE, memory=replace(MACHINE.memory, device=4 * GIB), device="a device")


def planned(tmp_path: Path, *more: str, status: int = 0, **keys: Any) -> tuple[Page, dict[str, Any]]:
    """The page, and the same answer as JSON."""
    page, answer = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main(words(tmp_path, "--html", str(page), "--json", str(answer), *more, **keys)) == status
    return Page(page.read_text(encoding="utf-8")), json.loads(answer.read_text())


def sizes_of(row: dict[str, Any]) -> dict[str, int]:
    return {part["what"]: part["num_bytes"] for part in row["parts"]}


def test_it_loads_nothing_and_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = planned(tmp_path)
    assert page.tags == TEMPLATE_TAGS
    assert page.addresses == []
    text = (tmp_path / "plan.html").read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in text
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"written to {tmp_path / 'plan.html'}"
    assert page.data["title"] == lines[0]
    assert page.data["summary"] in lines
    assert page.data["verdict"] == ["It fits."]
    assert set(page.data["notes"]) <= set(lines)


def test_beside_json_on_standard_output_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, "--html", str(tmp_path / "plan.html"), "--json", "-")) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert (tmp_path / "plan.html").exists()


def test_a_page_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, "--html", str(tmp_path / "no" / "plan.html"))) == USER_ERROR
    assert "--html = " in capsys.readouterr().err


@pytest.mark.parametrize("machine", [MACHINE, WITH_DEVICE], ids=["cpu", "device"])
def test_the_tiers_hold_what_is_needed(machine: Hardware, tmp_path: Path) -> None:
    page, answer = planned(
        tmp_path,
        machine=machine,
        placement={"param": "host", "states": "nvme"},
        budgets={"host": "2GiB", "device": "1GiB"},
        activation_checkpoints={"tier": "host"},
    )
    rows = {row["name"]: row for row in page.data["tiers"]}
    for tier in ("device", "host", "nvme"):
        lines = [line for line in answer["plan"] if line["tier"] == tier and line["bytes"]]
        found = sizes_of(rows[tier])
        assert [*found][: len(lines)] == [line["what"] for line in lines]
        holes = answer["beside"]["holes"] if tier == "host" else 0
        assert found.get("holes in the heap", 0) == holes
        assert sum(found.values()) == sum(line["bytes"] for line in lines) + answer["beside"][tier] + holes
    assert sizes_of(rows["host"])["Python and torch"] == 300 * MIB
    assert sizes_of(rows["host"])["inputs of checkpointed units"] > 0
    assert sizes_of(rows["device"])["activations"] == answer["beside"]["device"]
    assert (rows["host"]["budget"], rows["device"]["budget"]) == (2 * GIB, GIB)
    assert (rows["nvme"]["available"], rows["nvme"]["budget"]) == (8 * GIB, None)
    assert bool(answer["beside"]["holes"]) == (machine is not WITH_DEVICE)
    if machine is WITH_DEVICE:
        assert list(rows) == ["device", "host", "nvme"]
        assert (rows["device"]["available"], rows["host"]["available"]) == (4 * GIB, 8 * GIB)
    else:
        assert list(rows) == ["device", "host", "in all", "nvme"]
        assert (rows["device"]["available"], rows["host"]["available"]) == (None, None)
        assert rows["in all"]["available"] == 8 * GIB
        assert sum(sizes_of(rows["in all"]).values()) == answer["needed"]["host"]


@pytest.mark.parametrize("machine", [MACHINE, WITH_DEVICE], ids=["cpu", "device"])
@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"gradient_clipping": 1.0}, ["forward, with the updates of the step before", "backward"]),
        ({"gradient_clipping": 0.0}, ["forward", "backward, with its updates"]),
        (
            {"gradient_clipping": 1.0, "gradient_accumulation_steps": 3},
            [
                "forward of the first micro batch, with the updates of the step before",
                "forward of the other micro batches",
                "backward",
            ],
        ),
        (
            {"gradient_accumulation_steps": 3, "update": {"in_backward": True}},
            [
                "forward",
                "backward of the other micro batches",
                "backward of the last micro batch, with its updates",
            ],
        ),
    ],
    ids=["clipped", "in backward", "accumulated", "accumulated, in backward"],
)
def test_the_phases_are_those_of_the_forecast(
    machine: Hardware, keys: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    page, answer = planned(tmp_path, machine=machine, placement="nvme", **keys)
    phases, found = page.data["phases"], answer["forecast"]
    assert [phase["name"] for phase in phases] == names
    assert sum(phase["seconds"] for phase in phases) == pytest.approx(found["seconds"])
    # All are longer by one factor where the simulated step is.
    by_lanes_s = [max(phase["lanes"].values()) / OVERLAP for phase in phases]
    simulated_s = answer["simulated"]["seconds"] / OVERLAP
    factor = max(1.0, simulated_s / sum(by_lanes_s))
    assert found["seconds"] == pytest.approx(max(simulated_s, sum(by_lanes_s)))
    longer = f", times {factor:.2f}: simulated unit by unit, the step is longer" if factor >= 1.005 else ""
    assert page.data["stretch"] == f"over an overlap of 95%{longer}"
    for phase, seconds in zip(phases, by_lanes_s, strict=True):
        assert phase["seconds"] == pytest.approx(factor * seconds)
        assert set(phase["lanes"]) <= set(page.data["lanes"])
        if machine is MACHINE:
            parts = sum(seconds for _, seconds in phase["parts"][CORES])
            assert parts == pytest.approx(phase["lanes"][CORES])
        else:
            assert phase["parts"] == {}
    for lane in ("nvme read", "nvme write"):
        assert sum(phase["lanes"].get(lane, 0.0) for phase in phases) == pytest.approx(found["lanes_s"][lane])
        moved = sum(lanes.get(lane, 0) for lanes in answer["traffic"].values())
        assert sum(phase["bytes"].get(lane, 0.0) for phase in phases) == pytest.approx(moved)
    assert page.data["lanes"][0] == (CORES if machine is MACHINE else "compute")
    assert page.data["table"]["rows"][0][0] in found["lanes_s"]


def test_what_does_not_fit_and_what_is_not_forecast_is_said(tmp_path: Path) -> None:
    small = replace(MACHINE, memory=Memory(host=310 * MIB, nvme=8 * GIB))
    page, answer = planned(
        tmp_path, status=FAILURE, machine=small, placement="nvme", model="llama:256/2/2/9000"
    )
    assert not page.data["fits"]
    assert page.data["verdict"][0].startswith("It does not fit: host ")
    assert page.data["verdict"][1].startswith("The smallest change with which it fits: ")
    (row,) = [row for row in page.data["tiers"] if row["name"] == "in all"]
    assert sum(sizes_of(row).values()) - row["available"] == answer["short"]["host"]

    page, answer = planned(tmp_path, status=FAILURE, budgets={"host": "1KiB"})
    assert page.data["verdict"][0] == answer["refusal"]
    assert (page.data["tiers"], page.data["phases"], page.data["table"]) == ([], [], None)

    page, _ = planned(tmp_path, "--no-time")
    assert (page.data["summary"], page.data["phases"], page.data["table"]) == ("", [], None)
    assert page.data["tiers"]

    unknown = replace(MACHINE, rates=replace(MACHINE.rates, flops={}))
    page, _ = planned(tmp_path, machine=unknown)
    assert page.data["summary"].startswith("The step's time is not forecast: no rate or no count of compute")
    assert page.data["phases"] == []


def test_ranks_have_their_table(tmp_path: Path) -> None:
    page, answer = planned(tmp_path, "--ranks", "8")
    stages = page.data["stages"]
    assert [row[0] for row in stages["rows"]] == ["0", "1", "2", "3"]
    assert len(stages["notes"]) == sum(bool(stage["refusal"]) for stage in answer["stages"])
    assert page.data["summary"].startswith(
        "The step's time is not forecast: no rate or no count of collectives (rates.collectives); "
    )
    assert page.tags == TEMPLATE_TAGS


def hostile_model() -> nn.Module:
    """Its class has a name that is markup."""
    named: Any = type(HOSTILE, (Words,), {})
    return named()  # type: ignore[no-any-return]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(101, 64)
        self.head = nn.Linear(64, 101)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.emb(ids))
        return logits


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page, _ = planned(
        tmp_path,
        machine=replace(WITH_DEVICE, device=HOSTILE),
        model="tests.cli.test_plan_page:hostile_model",
        placement="host",
    )
    assert page.tags == TEMPLATE_TAGS
    assert HOSTILE in page.data["title"]
    assert ["device", HOSTILE] in page.data["facts"]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in page_template(PAGE)  # text reaches the page as text only
