"""What the probe of `offloadzero plan` measures: links, drives, and what a process has resident."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero.cli.output import Progress
from offloadzero.cli.plan import computation, measure
from offloadzero.cli.plan import computation as beside
from offloadzero.cli.plan.computation import copies_beside, drive_beside
from offloadzero.errors import OffloadError
from offloadzero.memory.device import CpuDevice, find_device
from offloadzero.planning.step.forecast import Computation, Rates
from tests.support.tiny import run_bare_script

MIB, GIB = 1 << 20, 1 << 30


def test_what_a_process_has_is_what_it_has_in_its_first_step() -> None:
    """torch loads its compiler with the first optimizer: 70 MB that a run within its limit was killed for."""
    script = """
import sys
from offloadzero.cli.plan.measure import resident_bytes
loaded = "torch._dynamo" in sys.modules
found = resident_bytes()
import torch
weights = [torch.ones(300, 300, dtype=dtype, requires_grad=True) for dtype in (torch.bfloat16, torch.float32)]
optimizer = torch.optim.AdamW(weights)
sum((weight @ weight).float().sum() for weight in weights).backward()
optimizer.step()
print(loaded, resident_bytes() - found)
"""
    done = run_bare_script(script)
    assert done.returncode == 0, done.stderr
    loaded, more = done.stdout.split()
    assert loaded == "False"
    assert int(more) < 24 * MIB


def test_a_device_is_measured_in_every_dtype_of_parameters_and_on_its_own_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Card(CpuDevice):
        def free_bytes(self) -> int | None:
            return GIB

    def rate_of(_: Any, dtype: torch.dtype) -> Computation:
        return Computation(float(dtype.itemsize), 3.0 * dtype.itemsize, 0.5)

    monkeypatch.setattr(measure, "block_rates", rate_of)
    for name in ("copy_rate", "device_update_rates", "python_per_use"):
        monkeypatch.setattr(measure, name, lambda *_: None)
    threads: list[Any] = []
    for name in ("host_update_rates", "landing_rate"):
        monkeypatch.setattr(measure, name, threads.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    seen: list[Any] = []

    def link_rates(device: Any) -> dict[str, float]:
        seen.append(device)
        return {"h2d": 8.0, "d2h": 9.0}

    monkeypatch.setattr(measure, "link_rates", link_rates)
    card = Card()
    found = measure.measure(card, [])
    assert found.flops == {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
    assert found.gradient_flops == {"bf16": 6.0, "fp16": 6.0, "fp32": 12.0}
    assert (found.h2d, found.d2h) == (8.0, 9.0)
    assert threads == [6, 6], "those of an engine, which leaves cores to the launching thread"
    assert seen == [card], "the link of the device that trains, not of the default one"


@pytest.mark.gpu
def test_both_ways_of_the_link_are_measured() -> None:
    rates = measure.link_rates(find_device("cuda"))
    assert set(rates) == {"h2d", "d2h"}
    assert all(1e9 < rate < 1e12 for rate in rates.values()), rates


def test_a_device_that_others_have_filled_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card(CpuDevice):
        def name(self) -> str | None:
            return "H100"

        def free_bytes(self) -> int | None:
            return GIB

    def block_rates(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB.")

    monkeypatch.setattr(measure, "block_rates", block_rates)
    with pytest.raises(
        OffloadError, match=r"H100 has too little free memory to be measured, 1.00 GiB: another"
    ):
        measure.measure(Card(), [])


def test_an_update_on_a_device_is_measured_once_its_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where that took longer than all samples together the first update was the only one, and its rate was kept."""
    compiled: set[int] = set()

    def update(_: Any, buffers: dict[Any, torch.Tensor], **__: Any) -> None:
        is_first = len(buffers) not in compiled  # the layouts have kernels of their own
        compiled.add(len(buffers))
        time.sleep(0.4 if is_first else 0.001)

    monkeypatch.setattr(computation, "ENOUGH_S", 0.3)
    monkeypatch.setattr(type(measure.ADAM), "step", update)
    num_params = 1 << 12
    rates = measure.device_update_rates(CpuDevice(), num_params=num_params)
    assert len(compiled) == 2
    for layout, bytes_per_param in (("fp32", 20), ("compact", 8)):
        assert rates[layout] > bytes_per_param * num_params / 0.1, layout


def test_two_directories_of_one_drive_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[str]] = []

    def measure_paths(paths: list[str], **_: Any) -> dict[str, Any]:
        measured.append(paths)
        row = {"traffic": "read", "roles": ["default"], "gb_per_s": 2.0, "cpu_s_per_gb": 0.5}
        return {"results": {"traffic": [row], "first_write": {"gb_per_s": 1.0}}}

    monkeypatch.setattr(measure, "measure_paths", measure_paths)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    rates = measure.drive_rates([tmp_path / "a", tmp_path / "b", tmp_path / "c"], time_s=5.0)
    # No row of writes, as where a fast drive has come to the write limit: the first write's rate is taken.
    assert rates == {"nvme_read": 2e9, "nvme_cpu_s_per_byte": 0.5e-9, "nvme_write": 1e9}
    drives = {str(tmp_path / "a"): 1, str(tmp_path / "b"): 2}
    monkeypatch.setattr(measure, "drive_of", lambda path: drives[str(path)])
    measure.drive_rates([tmp_path / "a", tmp_path / "b"], time_s=5.0)
    assert measured == [[str(tmp_path / "a")], [str(tmp_path / "a"), str(tmp_path / "b")]]


@pytest.mark.alone
def test_the_probe_knows_every_rate_of_a_machine_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("NUM_SAMPLES", 1), ("NUM_TURNS", 1), ("MOST_TURN_S", computation.TURN_S)):
        monkeypatch.setattr(computation, name, value)
    monkeypatch.setattr(measure, "DRIVE_FILE_BYTES", 16 * MIB)
    block, records = computation._block_shape, measure.Records
    monkeypatch.setattr(computation, "_block_shape", lambda width, **more: block(width // 4, **more))
    monkeypatch.setattr(measure, "Records", lambda num_params: records(num_params // 16))
    drive = measure.drive_rates

    def small_drive(paths: Any, *, time_s: float) -> dict[str, Any]:
        assert time_s > 10
        return drive(paths, time_s=5.0)

    monkeypatch.setattr(measure, "drive_rates", small_drive)
    monkeypatch.setattr(measure, "block_rates", functools.cache(measure.block_rates))
    device = find_device("cpu")
    rates = measure.measure(device, [tmp_path / "made later"])
    of_devices = ("h2d", "d2h", "device_update")
    of_ranks = ("collectives", "links", "network", "host_memory", "collective_s")
    for name, value in vars(rates).items():
        assert bool(value) == (name not in (*of_devices, *of_ranks)), name
    assert set(rates.flops) == {"bf16", "fp32"}
    assert set(rates.update) == {"fp32", "compact"}
    monkeypatch.setattr(measure, "rates_beside", lambda rates, _: rates)
    assert measure.measure(device, ()).nvme_read is None
    assert isinstance(rates, Rates)
    assert list(tmp_path.iterdir()) == []
    assert torch.get_default_dtype() is torch.float32
    capsys.readouterr()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_the_probe_of_a_process_that_a_launcher_has_started_waits_for_no_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of a job of several has these variables in each shell: with RANK as well `plan` waited for half an hour."""
    monkeypatch.setenv(name, "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert measure.python_per_use(find_device("cpu"), num_blocks=2, num_steps=3) > 0
    assert (os.environ[name], os.environ["LOCAL_RANK"]) == ("2", "1")


def test_a_busy_machine_is_said_to_seem_slow_at_computing_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The computation's share of the cores' time is taken by a clock: a step of 0.9 s was forecast as one of 12."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    monkeypatch.setattr(measure, "block_rates", end)
    with pytest.raises(KeyboardInterrupt):
        measure.measure(find_device("cpu"), [])
    assert (
        "its computation, its drive and its link will seem slow. Once it is idle, --fresh measures again."
        in (capsys.readouterr().err)
    )


def test_what_the_probe_itself_has_computed_makes_no_machine_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first plan of a quiet machine measures it, then the model: that load was its own."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for own_s, is_said in ((60.0, False), (1.0, True)):
        monkeypatch.setattr(measure.time, "process_time", lambda own_s=own_s: own_s)
        measure._say_if_busy(Progress(1.0), "it")
        assert ("This machine is busy" in capsys.readouterr().err) == is_said


# --- computation with other work beside it: how long it takes to measure, and what it leaves behind ---


def computes_for(seconds: float) -> Callable[[], object]:
    return lambda: time.sleep(seconds)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("TURN_S", 0.02),
        ("COPY_BYTES", MIB),
        ("FILE_BYTES", 32 * MIB),
        ("MEMORY_BYTES", 8 * MIB),
        ("STATE_ELEMENTS", 1 << 16),
        ("WRITE_LIMIT_BYTES", 256 * MIB),
    ):
        monkeypatch.setattr(beside, name, value)


@pytest.mark.usefixtures("small")
def test_a_slow_computation_has_fewer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five turns of a micro batch of 0.6 s, of four micro batches each, took 50 s for copies alone."""
    turns = list[float]()
    turn = beside._turn

    def noted(*arguments: object) -> tuple[float, float]:
        turns.append(arguments[2])  # type: ignore[arg-type]
        return turn(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(beside, "_turn", noted)
    assert copies_beside(computes_for(0.01)) > 0
    assert len(turns) == beside.NUM_TURNS
    assert min(turns) >= 0.04, "four micro batches"
    monkeypatch.setattr(beside, "MOST_BESIDE_S", 0.1)
    monkeypatch.setattr(beside, "MOST_TURN_S", 0.1)
    for seconds, expected in ((0.05, 0.1), (0.2, 0.2)):
        turns.clear()
        assert copies_beside(computes_for(seconds)) > 0
        assert len(turns) == 1
        assert expected <= turns[0] < 4 * seconds


@pytest.mark.usefixtures("small")
def test_a_fast_drive_has_writes_left_for_the_time_beside_a_slow_computation(tmp_path: Path) -> None:
    """It used all of them up by itself, and nothing was known of it."""
    found = drive_beside(computes_for(0.3), tmp_path)
    assert found is not None
    assert 0 < found.share <= 1
    assert found.hold_s_per_byte > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("num_calls", [0, 1, 3])
def test_an_interrupt_leaves_no_file_and_no_thread(num_calls: int, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    calls = list[int]()

    def compute() -> None:
        if len(calls) == num_calls:
            raise KeyboardInterrupt
        calls.append(1)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        drive_beside(compute, tmp_path)
    assert not list(tmp_path.iterdir())
    assert not set(threading.enumerate()) - threads
