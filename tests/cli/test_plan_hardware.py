"""`offloadzero plan`: the machine that it goes by, and the rates that are kept of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadzero.cli.main import FAILURE, USER_ERROR, main
from offloadzero.cli.plan import computation, measure
from offloadzero.errors import ConfigError
from offloadzero.memory.device import CpuDevice, find_device
from offloadzero.planning.hardware import Memory, cache_file, hardware_from_json, read_hardware
from offloadzero.update.spec import UpdateForm
from offloadzero.update.specs.adam import ADAM
from offloadzero.update.specs.lion import LION
from tests.cli.planned import GIB, MACHINE, MIB, PlanText, words, write
from tests.planning.test_time_model import KNOWN

MEASURED = replace(KNOWN, holds={"copy": 1e-10, "fp32": 2e-11, "compact": 3e-11})


def test_a_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    machine = replace(
        MACHINE,
        memory=Memory(host=1, device=2, nvme=None),
        device="a card",
        adam_form=UpdateForm.TRITON,
        identity={"machine": {"cpu": "x"}},
    )
    path = write(tmp_path / "machine.json", machine.to_json())
    assert read_hardware(path) == machine
    assert measure.form_on(machine, ADAM) is UpdateForm.TRITON
    assert measure.form_on(machine, LION) is UpdateForm.TORCH
    assert measure.form_on(MACHINE, ADAM) is UpdateForm.NATIVE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": {"h2d": -1}}, "--hardware.rates.h2d = -1: a positive number"),
        ({"rates": {"h2d": True}}, "--hardware.rates.h2d = True: a positive number"),
        ({"rates": {"h2s": 1}}, "did you mean 'h2d'"),
        ({"rates": 3}, "--hardware.rates = 3: an object"),
        ({"rates": {"h2d": 1e30}}, "--hardware.rates.h2d = 1e+30: a positive number below 1e+24"),
        ({"rates": {"flops": {"bf16": "fast"}}}, "--hardware.rates.flops.bf16 = 'fast'"),
        ({"rates": {"flops": {"bf61": 1e9}}}, "--hardware.rates.flops.bf61 = 1000000000.0: no such entry"),
        ({"rates": {"update": {"compac": 1e9}}}, "did you mean 'compact'"),
        ({"rates": {"holds": {"copies": 1e-10}}}, "--hardware.rates.holds.copies = 1e-10: no such entry"),
        ({"rates": {"holds": {"drive": -1}}}, "--hardware.rates.holds.drive = -1: a positive number"),
        ({"rates": {"nvme_beside": 0}}, "--hardware.rates.nvme_beside = 0: a positive number"),
        ({"rates": {"nvme_beside": 1.5}}, "nvme_beside = 1.5: a part of the drive's rate, at most 1"),
        ({"memory": {"host": 1.5}}, "--hardware.memory.host = 1.5: a whole number"),
        ({"adam_form": "triten"}, "did you mean 'triton'"),
        ({"device": 3}, "--hardware.device = 3: a name"),
        ({"nothing": 3}, "--hardware.nothing = 3: no such entry"),
        ({"memory": {"device": 1 << 34}}, "--hardware.memory.host = None: the bytes of the host's memory"),
        ({"device": "a card"}, "--hardware.memory.device = None: the bytes of a card; where the CPU is"),
    ],
)
def test_what_is_wrong_with_a_machine_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hardware_from_json("--hardware", {**MACHINE.to_json(), **change})
    assert message in str(caught.value)


def test_a_file_of_another_kind_is_refused_with_both_that_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words(tmp_path)
    Path(arguments[arguments.index("--hardware") + 1]).write_text('{"format": "offloadzero.plan"}')
    assert main(arguments) == USER_ERROR
    said = capsys.readouterr().err
    assert "(format offloadzero.hardware), nor a cluster (format offloadzero.cluster)" in said


def test_a_function_that_gives_no_model_is_refused_before_the_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: Any, **__: Any) -> Any:
        raise AssertionError("a minute of measurement")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "this_hardware", measured)
    (tmp_path / "a_model_that_is_none.py").write_text("def make():\n    return 7\n")
    arguments = words(tmp_path)
    at = arguments.index("--hardware")
    arguments[arguments.index("--model") + 1] = "a_model_that_is_none:make"
    assert main(arguments[:at] + arguments[at + 2 :]) == USER_ERROR
    assert "a function that returns an nn.Module, not int" in capsys.readouterr().err


def test_memory_is_what_a_process_finds_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python and torch are a part of what is needed: they were taken off what is available as well."""
    held = 300 * MIB
    monkeypatch.setattr(measure, "host_bytes_before", lambda: 2 * GIB)
    monkeypatch.setattr(measure, "resident_bytes", lambda *_: held)
    machine = measure.memory_only("cpu", [])
    assert (machine.memory.host, machine.process_bytes) == (2 * GIB, held)


def test_drives_of_which_a_file_says_nothing_are_not_taken_for_none(
    tmp_path: Path, plan_text: PlanText
) -> None:
    silent = replace(MACHINE, memory=Memory(host=8 * GIB))
    for more in ([], ["--no-time"], ["--largest"]):
        said = plan_text(*more, machine=silent, placement="nvme", status=USER_ERROR)
        assert f"--hardware.memory.nvme = None: the bytes of the drives under {tmp_path}, which" in said
    none = replace(silent, memory=Memory(host=8 * GIB, nvme=0))
    assert "It does not fit: nvme " in plan_text(machine=none, placement="nvme", status=FAILURE)
    host = {"placement": "host", "nvme_path": None}
    assert main(words(tmp_path, machine=silent, **host)) == 0


@pytest.mark.parametrize(("layout", "with_it"), [("fp32", ""), ("compact", ' with "state_layout": "fp32"')])
def test_a_cpu_that_computes_faster_in_fp32_is_told_of(
    layout: str, with_it: str, plan_text: PlanText
) -> None:
    rates = replace(KNOWN, flops={"bf16": 2e10, "fp32": 1e11}, gradient_flops={"bf16": 2e9, "fp32": 1e11})
    slow = replace(MACHINE, rates=rates)
    # Forward and twice as much in backward: 1 / 2 + 2 / 0.2, and 3 / 10. Of the first unit backward has less.
    said = 'This CPU computes 34.9 times as fast in fp32 as in bf16: "bf16": {"enabled": false}' + with_it
    text = plan_text(machine=slow, state_layout=layout)
    assert said in text, text
    for other in (
        replace(slow, rates=replace(rates, gradient_flops={})),
        replace(slow, rates=replace(rates, flops={"bf16": 9e10, "fp32": 1e11}, gradient_flops={})),
        replace(slow, device="a card", memory=Memory(host=8 * GIB, device=8 * GIB, nvme=8 * GIB)),
    ):
        assert said not in plan_text(machine=other, state_layout=layout)


def test_a_device_without_a_name_is_none_the_less_one() -> None:
    described = {name: MACHINE.to_json()[name] for name in ("rates", "num_cores")}
    found = hardware_from_json("--hardware", {**described, "memory": {"host": GIB, "device": GIB}})
    assert (found.device, found.adam_form, found.device_is_cpu) == ("GPU", UpdateForm.TRITON, False)


def test_rates_are_kept_for_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured: list[Any] = []
    monkeypatch.setattr(measure, "measure", lambda *_, **__: measured.append(0) or MEASURED)
    for fresh, times in ((False, 1), (False, 1), (True, 2)):
        assert measure.this_hardware("cpu", [tmp_path], fresh=fresh).rates == MEASURED
        assert len(measured) == times
    (kept,) = (tmp_path / "cache" / "offloadzero").iterdir()
    other = json.loads(kept.read_text())
    other["identity"]["machine"]["cpu"] = "another"
    kept.write_text(json.dumps(other))
    measure.this_hardware("cpu", [tmp_path], fresh=False)
    assert len(measured) == 3, "a file of another machine under this one's name"
    found = measure.this_hardware("cpu", [tmp_path], fresh=False)
    assert found.device_is_cpu
    assert found.memory.host > 0
    assert found.memory.nvme


def test_a_cache_that_cannot_be_written_or_read_loses_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "measure", lambda *_, **__: MEASURED)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    found = measure.this_hardware("cpu", [], fresh=False)
    assert found.rates == MEASURED
    assert "The measurement is not kept for the next time: " in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = cache_file(found.identity)
    kept.parent.mkdir()
    for damage in (kept.mkdir, lambda: kept.rmdir() or kept.write_text("{")):
        damage()
        assert measure.this_hardware("cpu", [], fresh=False).rates == MEASURED
    assert "What was measured before is not used: --hardware = " in capsys.readouterr().err
    assert read_hardware(str(kept)).rates == MEASURED


@pytest.mark.parametrize("form", [UpdateForm.NATIVE, UpdateForm.TORCH])
def test_updates_on_a_device_are_measured_in_their_form(
    form: UpdateForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "device_form", lambda *_: form)
    monkeypatch.setattr(computation, "NUM_SAMPLES", 1)
    rates = measure.device_update_rates(find_device("cpu"), num_params=1 << 16)
    assert set(rates) == {"fp32", "compact"}
    assert min(rates.values()) > 0


def test_updates_are_launched_with_their_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the script's: Triton launches on the current one."""
    current: list[object] = []
    seen: list[object] = []

    class Second(CpuDevice):
        def current_stream(self) -> Any:
            return "its stream"

        @contextmanager
        def launching_on(self, stream: Any) -> Iterator[None]:
            current.append(stream)
            yield
            current.pop()

    monkeypatch.setattr(computation, "NUM_SAMPLES", 1)
    monkeypatch.setattr(measure.ADAM.__class__, "step", lambda *_, **__: seen.extend(current or ["none"]))
    measure.device_update_rates(Second(), num_params=1 << 10)
    assert seen == ["its stream"] * 4, "of each layout the first one compiles, and the second one is measured"
