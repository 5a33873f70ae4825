"""A step's time on a device that runs behind its launches: compute, waits by cause and efficiency, against hand values.

All times are virtual, [Note: virtual time]: nothing here depends on the speed or the load of the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.cli.main import main
from offloadzero.memory.device import CpuDevice
from offloadzero.memory.device_clock import MAX_REFERENCE_AGE_S, DeviceClock, StreamMarks, note_awaited
from offloadzero.memory.lanes import Accelerator
from offloadzero.observe.bound import StepReport
from tests.races.test_simulated_device import Branches
from tests.simulated.backward import Backward
from tests.simulated.checked import checked
from tests.simulated.device import simulated
from tests.simulated.virtual_time import VirtualDevice, virtual_time
from tests.streaming.loops import take_inputs
from tests.support.models import features
from tests.support.training import assert_same, make_config, run_engine

WIDTH = 64
UNIT_BYTES = WIDTH * WIDTH * 2
MS = 1e-3
NUM_BLOCKS = 6
EXACT = 1e-9  # seconds: sums of doubles


class _Timed(torch.autograd.Function):
    """A product of matrices that takes the seconds it is given, each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: TimedBlock) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.block = block
        block.device.compute(block.forward_s)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors  # fetched here
        ctx.block.device.compute(ctx.block.backward_s)
        return grads[0] @ weight, grads[0].T @ x, None


class TimedBlock(nn.Module):
    def __init__(self, device: VirtualDevice, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.device, self.forward_s, self.backward_s = device, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return _Timed.apply(x, self.weight, self)  # type: ignore[no-any-return, no-untyped-call]


class TimedModel(nn.Module):
    def __init__(self, device: VirtualDevice, forward_s: float, backward_s: float, num_frozen: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TimedBlock(device, forward_s, backward_s) for _ in range(NUM_BLOCKS))
        for block in list(self.blocks)[:num_frozen]:
            block.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()


@dataclass(frozen=True)
class Case:
    """What takes how long, and what a step from the third on takes then. In milliseconds."""

    forward: float = 10
    backward: float = 20
    fetch: float = 1  # of one unit over the link
    d2h: float = 1  # of its gradient
    read: float = 0  # from the drive
    update: float = 0
    placement: Any = "host"
    num_frozen: int = 0
    keys: Mapping[str, Any] = field(default_factory=dict)
    step: float = 0
    waits: Mapping[str, float] = field(default_factory=dict)
    lanes: Mapping[str, float] = field(default_factory=dict)
    bound: str = "compute"

    def rates(self) -> dict[str, float]:
        lanes = {"fetch": self.fetch, "gradient-d2h": self.d2h, "nvme read": self.read}
        return {lane: UNIT_BYTES / (took * MS) for lane, took in lanes.items() if took}


@contextmanager
def timed_engine(
    case: Case, directory: Path, patch: pytest.MonkeyPatch, *, is_observed: bool = True
) -> Iterator[tuple[Any, VirtualDevice]]:
    files, run_dir = directory / "files", directory / "run"
    files.mkdir()
    observe = {"run_dir": str(run_dir), "trace_steps": [4]} if is_observed else {}
    own = {
        "placement": case.placement,
        "nvme_path": str(files),
        "units": {"min_leaf_elements": 256},
        "observe": observe,
    }
    keys = {name: value for name, value in case.keys.items() if name != "zero_optimization"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **case.keys.get("zero_optimization", {})},
        "offloadzero": own,
        **keys,
    }
    with virtual_time(patch, case.rates(), update_s=case.update * MS) as device:
        model = TimedModel(device, case.forward * MS, case.backward * MS, case.num_frozen)
        engine = offloadzero.initialize(model=model, config=config)[0]
        yield engine, device
        engine.close()


def train_step(engine: Any, device: VirtualDevice) -> None:
    """Launches a step; its transfers have really begun when it returns, on whatever thread."""
    engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
    engine.step()
    now_s = device.hosts.now_s
    for unit in engine.optimizer.runtime.executor.units:
        unit.updated.wait()
        if unit.fetched is not None:
            unit.fetched.wait()
    device.hosts.now_s = now_s  # that was no wait of the script's


def records_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "run" / "steps.jsonl").read_text().splitlines()]


ON_NVME = {"param": "nvme", "master": "host", "exp_avg": "host", "exp_avg_sq": "host"}

CASES = {
    # Six blocks of 10 and 20. Only the first block waits: for the last gradient's way home (1) and the fetch (1).
    "hidden": Case(step=182, waits={"fetch": 2}, lanes={"compute": 180, "h2d": 9, "d2h": 6}),
    "hidden, clipped": Case(
        keys={"gradient_clipping": 1.0},
        step=182,
        waits={"fetch": 2},
        lanes={"compute": 180, "h2d": 9, "d2h": 6},
    ),
    # Between that gradient and that fetch comes an update of 5.
    "slow update": Case(
        update=5, step=187, waits={"fetch": 7}, lanes={"compute": 180, "h2d": 9, "d2h": 6, "update": 30}
    ),
    # Three leases. 1 for the gradient, six fetches of 15 without a gap; the next one needs the lease of the last
    # block, which is free 2 + 4 later; three of 15 without a gap, and 4 of backward.
    "slow link": Case(
        forward=2,
        backward=4,
        fetch=15,
        step=1 + 90 + 6 + 45 + 4,
        waits={"fetch": 146 - 36},
        lanes={"compute": 36, "h2d": 135, "d2h": 6},
        bound="h2d",
    ),
    # Two gradient leases: the third block waits 10 for the first copy's end, the other three 30 each. Then the first
    # block waits until the copies that are left (50 + 50) are home and its fetch (1) is over.
    "slow gradients": Case(
        d2h=50,
        step=180 + 100 + 101,
        waits={"gradient lease": 10 + 3 * 30, "fetch": 101},
        lanes={"compute": 180, "h2d": 9, "d2h": 300},
        bound="d2h",
    ),
    # One lease; five frozen blocks in a file, the last one on the host. Each read begins when the one before has ended:
    # the first block's in the last one's backward of the step before, the others' one after the other from the start of
    # the step on. Behind the fourth of them come its copy and forward, the last block's copy, forward and backward.
    "slow drive": Case(
        read=30,
        num_frozen=5,
        placement=[ON_NVME, {"units": "*.5", "param": "host"}],
        keys={"zero_optimization": {"stage3_max_live_parameters": 1}},
        step=4 * 30 + 1 + 10 + 1 + 10 + 20,
        waits={"fetch": 162 - 80},
        lanes={"compute": 80, "h2d": 6, "nvme read": 150, "d2h": 1},
        bound="nvme read",
    ),
    "resident": Case(placement="device", step=180, lanes={"compute": 180}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_cost_what_they_cost_by_hand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    reports: list[StepReport] = []
    with timed_engine(case, tmp_path, monkeypatch) as (engine, device):
        for _ in range(6):
            train_step(engine, device)
            device.synchronize()
            reports.append(engine.last_step_report())
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    for report, record in zip(reports[2:], records_of(tmp_path)[2:], strict=True):
        waits_ms = {cause: 1e3 * seconds for cause, seconds in report.waits_s.items() if seconds > EXACT}
        assert waits_ms == pytest.approx(case.waits)
        assert report.step_s == pytest.approx(case.step * MS)
        assert record["waits_s"] == report.waits_s
        lanes_ms = {lane: 1e3 * seconds for lane, seconds in record["lanes_s"].items() if seconds > EXACT}
        assert lanes_ms == pytest.approx(case.lanes)
        assert record["bound_lane"] == case.bound
        assert record["efficiency"] == pytest.approx(max(case.lanes.values()) / case.step)


def test_without_a_wait_of_the_host_a_report_comes_when_its_step_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["hidden"]
    with timed_engine(case, tmp_path, monkeypatch) as (engine, device):
        for step in range(1, 5):
            train_step(engine, device)
            launched_at_s = device.hosts.now_s
            known = engine.last_step_report().step
            assert device.hosts.now_s == launched_at_s  # asking waits for nothing
            assert known == step - 1  # the fetch that the host waits for comes after the step before
    records = records_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["step_s"] for record in records[1:]] == pytest.approx([case.step * MS] * 3)
    assert len({record["loss"] for record in records}) == 4  # each with its own


@pytest.mark.parametrize("is_observed", [True, False], ids=["observed", "not observed"])
@pytest.mark.parametrize("name", ["hidden", "hidden, clipped", "slow link", "slow gradients", "resident"])
def test_marks_are_few_and_their_events_are_used_again(
    name: str, is_observed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two events for each unit and pass, one more where the launching thread is blocked; some for a step."""
    records, made, blocked = [], [], []
    with timed_engine(CASES[name], tmp_path, monkeypatch, is_observed=is_observed) as (engine, device):
        for _ in range(6):
            before = (device.num_records, device.num_events, device.num_blocked)
            train_step(engine, device)
            device.synchronize()
            engine.last_step_report()
            after = (device.num_records, device.num_events, device.num_blocked)
            for counts, now, then in zip((records, made, blocked), after, before, strict=True):
                counts.append(now - then)
    of_step = 5 if is_observed else 1
    of_units = (4 if name == "resident" else 3) * NUM_BLOCKS  # forward 1, backward 2; resident: 2 and 2
    for num, num_blocked in zip(records, blocked, strict=True):
        assert num <= of_units + num_blocked + of_step
    assert sum(records[2:]) > 6 * 4
    assert sum(made[2:]) <= 3 * 4  # the loss is read behind one; the others are there already


def test_a_traced_step_shows_what_the_device_did_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with timed_engine(CASES["slow link"], tmp_path, monkeypatch) as (engine, device):
        for _ in range(5):
            train_step(engine, device)
            device.synchronize()
    events = json.loads((tmp_path / "run" / "trace_step_4.json").read_text())["traceEvents"]
    step = next(event for event in events if event["ph"] == "X" and event["cat"] == "step")
    spans = sorted(
        (round((event["ts"] - step["ts"]) / 1e3, 6), event["name"], round(event["dur"] / 1e3, 6))
        for event in events
        if event["ph"] == "X" and event["cat"] in ("compute", "wait")
    )
    forward = [(16.0 + 15 * i, f"forward blocks.{i}", 2.0) for i in range(6)]
    backward = [
        (93.0, "backward blocks.5", 4.0),
        (97.0, "backward blocks.4", 4.0),
        (101.0, "backward blocks.3", 4.0),
        (112.0, "backward blocks.2", 4.0),
        (127.0, "backward blocks.1", 4.0),
        (142.0, "backward blocks.0", 4.0),
    ]
    waits = [(0.0, "wait: fetch", 16.0), *((18.0 + 15 * i, "wait: fetch", 13.0) for i in range(5))]
    waits += [(105.0, "wait: fetch", 7.0), (116.0, "wait: fetch", 11.0), (131.0, "wait: fetch", 11.0)]
    assert [span for span in spans if span[2]] == sorted([*forward, *backward, *waits])


def test_the_page_of_a_run_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with timed_engine(CASES["slow gradients"], tmp_path, monkeypatch) as (engine, device):
        for _ in range(5):
            train_step(engine, device)
            device.synchronize()
    assert main(["report", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "A step takes 381 ms (median); d2h alone needs 78.7% of that" in said
    assert "largest waits: fetch 26.5%, gradient lease 26.2%" in said


def test_what_the_training_loop_does_counts_as_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the CPU: nobody waits for the library then."""
    with timed_engine(CASES["resident"], tmp_path, monkeypatch) as (engine, device):
        for _ in range(4):
            device.synchronize()
            device.spend(7 * MS)  # the next batch
            train_step(engine, device)
    records = records_of(tmp_path)[2:]
    assert [record["step_s"] for record in records] == pytest.approx([187 * MS] * 2)
    assert [record["lanes_s"]["compute"] for record in records] == pytest.approx([187 * MS] * 2)


def test_on_the_cpu_nothing_is_marked() -> None:
    assert Accelerator(CpuDevice()).marks() is None


def test_the_first_reference_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_time(monkeypatch, {}) as device:
        new_stream = device.new_stream

        def busy(name: str) -> Any:
            stream = new_stream(name)
            stream.launch(5 * MS)
            return stream

        monkeypatch.setattr(device, "new_stream", busy)
        clock = DeviceClock(device)
        device.compute(2 * MS)
        event = clock.record(device.current_stream())
        event.synchronize()
        assert clock.at_s(event) == pytest.approx(7 * MS)


def test_marks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_time(monkeypatch, {}) as device:
        marks = StreamMarks(device, DeviceClock(device))
        device.compute(2 * MS)
        first = marks.record()
        before = marks.begin_wait()
        device.compute(3 * MS)
        note_awaited(device.record(device.current_stream(), timed=True))
        last = marks.end_wait(first, before)
        marks.look()
        assert first.at_s is None
        assert last.at_s is None
        marks.wait()
        assert first.at_s == pytest.approx(2 * MS)
        assert last.at_s == pytest.approx(5 * MS)


def test_the_reference_of_the_clock_is_renewed_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_time(monkeypatch, {}) as device:
        clock = DeviceClock(device)
        device.compute(2 * MS)
        early = clock.record(device.current_stream())
        assert clock.at_s(early) is None  # the host is not there yet
        device.synchronize()
        assert clock.at_s(early) == pytest.approx(2 * MS)
        drift_s = 0.25
        elapsed_s = device.elapsed_s

        def drifting(first: Any, last: Any) -> float:
            """The two clocks run apart: what is counted from the old reference is wrong by so much."""
            return elapsed_s(first, last) + (drift_s if last.at_s - first.at_s > MAX_REFERENCE_AGE_S else 0)

        monkeypatch.setattr(device, "elapsed_s", drifting)
        device.spend(MAX_REFERENCE_AGE_S + 1)
        late = clock.record(device.current_stream())
        assert clock.at_s(late) == pytest.approx(device.hosts.now_s + drift_s)
        busy = device.new_stream("busy")
        busy.launch(1.0)
        with monkeypatch.context() as patch:
            patch.setattr(clock, "_stream", busy)
            clock.renew()  # is not reached in a few looks: the old one stays
        assert clock.at_s(late) == pytest.approx(device.hosts.now_s + drift_s)
        clock.renew()
        assert clock.at_s(late) == pytest.approx(device.hosts.now_s)


def test_observing_orders_nothing_and_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams compute; backward runs on a thread of its own, called on another stream. What runs when is random."""
    config = make_config("mixed", tmp_path, clipping=0.5)
    expected = run_engine(Branches, take_inputs(features), config)
    config["offloadzero"]["observe"] = {"run_dir": str(tmp_path / "run")}
    with simulated(monkeypatch, seed=3) as device:
        monkeypatch.setattr(Branches, "machine", device.machine)
        found = run_engine(Branches, take_inputs(features), config)
    assert_same(found, expected)
    monkeypatch.setattr(Branches, "machine", None)
    config["offloadzero"]["observe"] = {"run_dir": str(tmp_path / "run2")}
    with checked(), simulated(monkeypatch, seed=4, backward=Backward.OTHER_STREAM):
        assert_same(run_engine(Branches, take_inputs(features), config), expected)
    for record in map(json.loads, (tmp_path / "run" / "steps.jsonl").read_text().splitlines()):
        assert record["lanes_s"]["compute"] <= record["step_s"]
        assert min(record["waits_s"].values()) >= 0.0


@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_is_taken_again_while_its_first_report_is_to_come(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is loaded: the steps' numbers go back."""
    with simulated(monkeypatch, seed=seed):
        config = make_config("host", tmp_path)
        config["offloadzero"]["observe"] = {"run_dir": str(tmp_path / "run")}
        engine, *_ = offloadzero.initialize(
            model=nn.Sequential(nn.Linear(33, 33), nn.Linear(33, 33)), config=config
        )
        x = torch.randn(2, 33).bfloat16()

        def step() -> None:
            engine.backward(engine(x).float().square().mean())
            engine.step()

        step()
        engine.save_checkpoint(tmp_path / "saved")
        step()
        engine.load_checkpoint(tmp_path / "saved")
        for _ in range(3):
            step()
        engine.synchronize()
        engine.close()
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2, 3, 4]
