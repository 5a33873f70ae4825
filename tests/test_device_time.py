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
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.marks import MAX_REFERENCE_AGE_S, DeviceClock
from offloadzero.observe.step_report import StepReport
from tests.models import features
from tests.simulated.checked import checked
from tests.simulated.device import simulated
from tests.simulated.virtual_time import VirtualDevice, virtual_time
from tests.test_simulated_device import Branches
from tests.test_streaming import take_inputs
from tests.training import assert_same, make_config, run_engine

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
    for unit in engine.optimizer.runtime.executor._units:
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
