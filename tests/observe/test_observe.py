"""What is recorded of a run: records, traces, the times of file operations, and that every wait has a name."""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from offloadzero.config import ObserveConfig
from offloadzero.core.torch_private import NO_GRAPH_TASK, current_graph_task_id
from offloadzero.errors import ConfigError
from offloadzero.io.engine import AioEngine, AioTicket
from offloadzero.memory.arena import BufferPool
from offloadzero.memory.lanes import LaneTicket
from offloadzero.memory.tickets import Promise
from offloadzero.observe.bound import StepReport
from offloadzero.observe.clock import StepClock
from offloadzero.observe.collectives import (
    ALL_REDUCE,
    BROADCAST,
    CollectiveCount,
    CollectiveCounter,
    volume_bytes,
)
from offloadzero.observe.monitor import StepMonitor
from offloadzero.observe.timeline import LANES, UPDATE, Timeline
from offloadzero.update.specs.adam import ADAM
from tests.support.plain_form import engine_config, make_model, offloaded
from tests.support.tiny import Block, TinyModel, make_engine, settings, tokens, train

# --- file operations know their times ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "native_aio", "aiofiles"])
def test_a_file_operation_knows_when_it_began_and_ended(backend: str, tmp_path: Path) -> None:
    with (
        AioEngine(backend=backend, block_size=4096) as engine,
        engine.open(tmp_path / "f", create=True) as file,
    ):
        engine.inject("delay", 2, 50)
        before_s = time.perf_counter()
        ticket = engine.write(file, torch.zeros(3 * 4096 + 511, dtype=torch.uint8), offset=0)
        early = ticket.times()
        assert early is None or ticket.done()
        ticket.wait()
        times = ticket.times()
        assert times is not None
        assert before_s <= times[0] <= times[1] - 0.05
        assert times[1] <= time.perf_counter()
        empty = engine.read(file, bytearray(0), offset=0)
        empty.wait()
        times = empty.times()
        assert times is not None
        assert before_s <= times[0] <= times[1]
    assert ticket.times() is not None  # a closed engine changes nothing


# --- a run -------------------------------------------------------------------------------------------------


def observed(directory: Path, run_dir: Path, *, placement: Any = "nvme", **keys: Any) -> dict[str, Any]:
    observe = {"run_dir": str(run_dir), **keys.pop("observe", {})}
    return settings(directory, placement=placement, observe=observe, **keys)


def records_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]


def test_off_no_file_and_no_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    engine = make_engine(settings(tmp_path / "files"))
    train(engine, num_steps=2)
    timeline = engine.optimizer.runtime.monitor.timeline
    assert not timeline.is_on
    assert timeline.take(1) == ([], False)
    report = engine.last_step_report()
    assert (report.step, report.bound, report.efficiency) == (2, None, None)
    engine.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["files"]


def test_a_report_has_the_bound_that_is_recorded(tmp_path: Path) -> None:
    engine = make_engine(observed(tmp_path, tmp_path / "run"))
    reports = []
    for seed in range(3):
        train(engine, num_steps=1, first_seed=seed)
        reports.append(engine.last_step_report())
    engine.close()
    for report, record in zip(reports, records_of(tmp_path / "run"), strict=True):
        assert report.bound is not None
        assert (report.step, report.step_s) == (record["step"], record["step_s"])
        assert (report.bound.seconds, report.bound.lane) == (record["bound_s"], record["bound_lane"])
        assert report.efficiency == record["efficiency"]


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_records_hold_losses_waits_and_the_bytes_of_the_drive(tmp_path: Path, clipping: float) -> None:
    plain = make_engine(settings(tmp_path, gradient_clipping=clipping))
    expected = train(plain, num_steps=5)
    plain.close()
    run_dir = tmp_path / "runs" / "a"
    engine = make_engine(observed(tmp_path, run_dir, gradient_clipping=clipping))
    runtime = engine.optimizer.runtime
    before = runtime.store.nvme.engine.stats()
    waits = []
    losses = []
    for seed in range(5):
        losses += train(engine, num_steps=1, first_seed=seed)
        waits.append(engine.last_step_report().waits_s)
        assert len(records_of(run_dir)) == seed  # one step late
        if seed == 4:
            engine.synchronize()
            for unit in runtime.executor.units:  # fetches for a sixth step are on their way
                if unit.fetched is not None:
                    unit.fetched.wait()
            after = runtime.store.nvme.engine.stats()
            spans, _ = runtime.monitor.timeline.take(5)
    trainable = sum(record.num_trainable for record in runtime.records)
    engine.close()
    assert losses == expected  # looking on changes no bit
    records = records_of(run_dir)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["loss"] for record in records] == losses
    assert [record["waits_s"] for record in records] == waits
    for direction, key in (("nvme read", "bytes_read"), ("nvme write", "bytes_written")):
        recorded = sum(record["bytes"].get(direction, 0) for record in records)
        recorded += sum(span.num_bytes for span in spans if span.lane == direction)
        assert recorded == after[key] - before[key]
    # 26 bytes per parameter and update: bf16 parameter, remainder and gradient, two fp32 moments.
    updated = sum(record["bytes"].get("update", 0) for record in records)
    updated += sum(span.num_bytes for span in spans if span.lane == "update")
    assert updated == 5 * 26 * trainable
    for record in records:
        assert record["bound_s"] == max(record["lanes_s"].values())
        assert record["lanes_s"][record["bound_lane"]] == record["bound_s"]
        assert record["efficiency"] == record["bound_s"] / record["step_s"]
        assert record["lanes_s"]["compute"] <= record["step_s"]
        assert record["launch_s"] > 0.0
        assert set(record["bytes"]) <= set(LANES)
    description = json.loads((run_dir / "run.json").read_text())
    for tier, lines in description["tiers"].items():
        assert sum(line["num_bytes"] for line in lines) == engine.reserved_bytes()[tier]


class SlowBlock(Block):
    """Its recomputation takes `slow_s`."""

    slow_s = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if current_graph_task_id() != NO_GRAPH_TASK:
            time.sleep(self.slow_s)
        return super().forward(x)


class CheckpointingBlock(SlowBlock):
    """As layers of transformers do."""

    def __call__(self, x: torch.Tensor) -> Any:
        return checkpoint(super().__call__, x, use_reentrant=False)


@pytest.mark.parametrize("kind", [SlowBlock, CheckpointingBlock])
def test_a_recomputation_is_no_python_of_the_hooks(tmp_path: Path, kind: type[SlowBlock]) -> None:
    model = TinyModel(num_blocks=0)
    model.blocks.extend(kind(48) for _ in range(2))
    keys = {"activation_checkpoints": {"tier": "host"}} if kind is SlowBlock else {}
    engine = make_engine(observed(tmp_path, tmp_path / "run", placement="host", **keys), model)
    train(engine, num_steps=2)
    engine.close()
    for record in records_of(tmp_path / "run"):
        assert record["step_s"] > 2 * SlowBlock.slow_s
        assert record["launch_s"] < SlowBlock.slow_s


DOCUMENTED = (Path(__file__).resolve().parents[2] / "docs" / "measuring.md").read_text()


def documented_fields() -> dict[str, str]:
    """Field -> its meaning, of the table in docs/measuring.md."""
    table = DOCUMENTED.partition("One line of `steps.jsonl`:")[2].partition("A step's line")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {name.strip(" `"): row[1].strip() for row in rows for name in row[0].split(",")}


@pytest.mark.parametrize("is_full", [False, True])
def test_a_record_has_the_fields_of_the_document(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_full:
        monkeypatch.setitem(cast(Any, Timeline.__init__).__kwdefaults__, "max_spans", 4)
    engine = make_engine(observed(tmp_path, tmp_path / "run"))
    train(engine, num_steps=2)
    engine.close()
    always = {name for name, text in documented_fields().items() if "only in" not in text}
    for record in records_of(tmp_path / "run"):
        assert set(record) == (set(documented_fields()) if is_full else always)


def test_the_lanes_of_the_cpu_are_those_of_the_document(tmp_path: Path) -> None:
    """The document names them in a sentence; a lane that it leaves out is none, one that it names is there."""
    engine = make_engine(observed(tmp_path, tmp_path / "run"))
    train(engine, num_steps=3)
    engine.close()
    sentence = DOCUMENTED.partition("With the CPU as the device `lanes_s` has ")[2].partition(":")[0]
    assert set(re.findall(r"`([^`]+)`", sentence)) == set(records_of(tmp_path / "run")[-1]["lanes_s"])


def test_micro_batches_give_the_mean_loss_and_a_restart_appends(tmp_path: Path) -> None:
    config = observed(tmp_path, tmp_path / "run", placement="host", gradient_accumulation_steps=2)
    losses = []
    for _ in range(2):
        engine = make_engine(config)
        losses += train(engine, num_steps=4)
        engine.close()
    means = [(losses[i] + losses[i + 1]) / 2 for i in range(0, 8, 2)]
    assert [record["loss"] for record in records_of(tmp_path / "run")] == means
    assert [record["step"] for record in records_of(tmp_path / "run")] == [1, 2, 1, 2]


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    engine = make_engine(observed(tmp_path, tmp_path / "run", placement="host"))
    engine._runtime.monitor.add_loss(lambda: float("nan"))
    train(engine, num_steps=1)
    engine.close()
    assert records_of(tmp_path / "run")[0]["loss"] is None


def test_steps_are_numbered_on_after_a_checkpoint(tmp_path: Path) -> None:
    config = observed(tmp_path, tmp_path / "run", placement="host")
    engine = make_engine(config)
    train(engine, num_steps=2)
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.close()
    engine = make_engine(config)
    engine.load_checkpoint(tmp_path / "checkpoint")
    train(engine, num_steps=1)
    engine.close()
    assert [record["step"] for record in records_of(tmp_path / "run")] == [1, 2, 3]


def test_chosen_steps_are_traced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    engine = make_engine(observed(tmp_path, run_dir, observe={"trace_steps": [2, "4-5"]}))
    names = [record.name for record in engine.optimizer.runtime.records]
    train(engine, num_steps=5)
    engine.close()
    written = {path.name for path in run_dir.glob("trace*")}
    assert written == {"trace_step_2.json", "trace_step_4.json", "trace_step_5.json"}
    streamed = {name for name in names if name.startswith("blocks")}
    seen: dict[str, set[str]] = {}
    for step in (2, 4, 5):
        trace = json.loads((run_dir / f"trace_step_{step}.json").read_text())
        lanes = check_trace(trace["traceEvents"], step)
        assert {f"{way} {name}" for way in ("forward", "backward") for name in streamed} <= lanes["compute"]
        if step > 2:
            for lane, found in lanes.items():
                seen.setdefault(lane, set()).update(found)
    # What a step begins may end in the next: the update of step 4 lies in the windows of 4 and 5.
    assert streamed <= seen["h2d"] & seen["d2h"] & seen["landing"] & seen["update"]
    assert {f"{name}.exp_avg" for name in streamed} <= seen["nvme read"] & seen["nvme write"]


def check_trace(events: list[dict[str, Any]], step: int) -> dict[str, set[str]]:
    """The Trace Event Format: complete events, named tracks, nothing that overlaps on one track.

    Gives the names of the spans on each lane.
    """
    names = {e["tid"]: e["args"]["name"] for e in events if (e["ph"], e["name"]) == ("M", "thread_name")}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) + sum(event["ph"] == "M" for event in events) == len(events)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] == 0 for event in spans)
    for track in names:
        ordered = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == track)
        for (_, end_us), (start_us, _) in itertools.pairwise(ordered):
            assert start_us >= end_us - 0.01  # times are rounded to nanoseconds
    (window,) = (event for event in spans if names[event["tid"]] == "step")
    assert window["name"] == f"step {step}"
    by_lane: dict[str, set[str]] = {}
    for event in spans:
        by_lane.setdefault(names[event["tid"]], set()).add(event["name"])
        assert event["ts"] < window["ts"] + window["dur"]
    return by_lane


@pytest.mark.parametrize("how", ["step_line", "log"])
def test_each_step_has_a_line(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    if how == "log":
        caplog.set_level(logging.INFO, logger="offloadzero.steps")
    engine = make_engine(settings(tmp_path, observe={"step_line": how == "step_line"}))
    train(engine, num_steps=2)
    engine.close()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    logged = [record.message for record in caplog.records if record.name == "offloadzero.steps"]
    lines, others = (printed, logged) if how == "step_line" else (logged, printed)
    assert others == []
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2"]
    assert all("bound" in line and "overlap" in line and "waits" in line for line in lines)


@pytest.mark.parametrize(
    ("observe", "key"),
    [
        ({"trace_steps": [1]}, "trace_steps"),
        ({"run_dir": "r", "trace_steps": ["3-2"]}, "trace_steps"),
        ({"run_dir": "r", "trace_steps": [0]}, "trace_steps"),
        ({"run_dir": "r", "trace_steps": "x"}, "trace_steps"),
        ({"run_dir": ""}, "run_dir"),
        ({"step_line": 2}, "step_line"),
        ({"trace": [1]}, "trace"),
    ],
)
def test_a_wrong_key_is_named(observe: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(settings(placement="host", observe=observe))
    assert caught.value.key == f"offloadzero.observe.{key}"


def test_a_run_directory_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offloadzero\.observe\.run_dir"):
        StepMonitor(ObserveConfig(run_dir=tmp_path / "file" / "run"))


def test_work_between_the_end_of_a_step_and_its_account_is_of_the_next_one(tmp_path: Path) -> None:
    monitor = StepMonitor(ObserveConfig(run_dir=tmp_path, trace_steps=((1, 2),)))
    after_s: list[float] = []

    def account(report: StepReport) -> StepReport:
        after_s.append(report.end_s + 0.001)  # another thread works on while this one is preempted
        monitor.timeline.add(UPDATE, f"after {report.step}", after_s[-1], after_s[-1] + 0.001, 1 << 20)
        return monitor.on_step(report)

    clock = StepClock(monitor.timeline, on_end=monitor.on_end, on_step=account)
    monitor.begin({}, device_is_cpu=True)
    for step in (1, 2):
        clock.finish_step(step)
        time.sleep(max(after_s[-1] + 0.002 - time.perf_counter(), 0.0))
    monitor.close()
    updates = [
        check_trace(json.loads((tmp_path / f"trace_step_{step}.json").read_text())["traceEvents"], step).get(
            UPDATE
        )
        for step in (1, 2)
    ]
    assert updates == [None, {"after 1"}]
    assert [record["bytes"].get(UPDATE, 0) for record in records_of(tmp_path)] == [0, 1 << 20]


def test_a_step_counts_the_collectives_since_the_one_before(tmp_path: Path) -> None:
    counter = CollectiveCounter()
    monitor = StepMonitor(ObserveConfig(run_dir=tmp_path))
    clock = StepClock(monitor.timeline, on_end=monitor.on_end, on_step=monitor.on_step)
    counter.add(ALL_REDUCE, 5)  # of the start
    monitor.begin({}, device_is_cpu=True, collectives=lambda: counter.counts)
    found = []
    for sizes in ((7, 8), (), (9,)):
        for size in sizes:
            counter.add(ALL_REDUCE, size)
        counter.add(BROADCAST, 1)
        clock.finish_step(len(found) + 1)
        found.append(clock.last.collectives)
    monitor.close()
    assert found == [
        {ALL_REDUCE: (2, 15), BROADCAST: (1, 1)},
        {BROADCAST: (1, 1)},
        {ALL_REDUCE: (1, 9), BROADCAST: (1, 1)},
    ]
    expected = [
        {kind: {"calls": calls, "bytes": size} for kind, (calls, size) in each.items()} for each in found
    ]
    assert [record["collectives"] for record in records_of(tmp_path)] == expected
    assert (
        volume_bytes(
            {"gradients all-reduce": CollectiveCount(2, 15), "updates all-gather": CollectiveCount(1, 4)}
        )
        == 34
    )


# --- waits -------------------------------------------------------------------------------------------------


class WaitWatch:
    """Stacks of the waits that the training thread entered without a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unnamed: list[str] = []
        self.num_named = 0
        self._depth = 0
        self._thread = threading.get_ident()
        self._is_watching = False
        self._name_waits(monkeypatch)
        for kind in (LaneTicket, Promise, AioTicket):
            self._watch(monkeypatch, kind, "wait", lambda ticket: not ticket.done())
        self._watch(monkeypatch, LaneTicket, "order_compute", lambda ticket: not ticket.done())
        self._watch(monkeypatch, BufferPool, "take", lambda pool: not pool._free)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._is_watching = True
        yield
        self._is_watching = False

    def _name_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = StepClock.waiting

        @contextmanager
        def waiting(clock: StepClock, name: str, **given: Any) -> Iterator[None]:
            self._depth += 1
            try:
                with original(clock, name, **given):
                    yield
            finally:
                self._depth -= 1

        monkeypatch.setattr(StepClock, "waiting", waiting)

    def _watch(
        self, monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, blocks: Callable[[Any], bool]
    ) -> None:
        original = getattr(kind, name)

        def watched(ticket: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_watching and threading.get_ident() == self._thread and blocks(ticket):
                if self._depth:
                    self.num_named += 1
                else:
                    self.unnamed.append("".join(traceback.format_stack(limit=8)))
            return original(ticket, *args, **kwargs)

        monkeypatch.setattr(kind, name, watched)


STATES = ("master", "exp_avg", "exp_avg_sq")
PLACEMENTS: dict[str, Any] = {
    "nvme": "nvme",
    "all nvme": {kind.value: "nvme" for kind in ADAM.kinds},
    "states": {"param": "device", **dict.fromkeys(STATES, "nvme")},
    "device": "device",
}


@pytest.mark.parametrize(
    ("placement", "clipping", "accumulation"),
    [("nvme", 0.0, 1), ("nvme", 1.0, 2), ("all nvme", 0.0, 1), ("states", 1.0, 2), ("device", 0.0, 1)],
)
def test_every_wait_of_a_slow_drive_has_a_name(
    placement: str, clipping: float, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = WaitWatch(monkeypatch)
    config = settings(
        tmp_path,
        placement=PLACEMENTS[placement],
        gradient_clipping=clipping,
        gradient_accumulation_steps=accumulation,
        units={"min_leaf_elements": 1000, "prefetch_units": 1},
    )
    engine = make_engine(config)
    nvme = engine.optimizer.runtime.store.nvme
    if nvme is not None:
        for nth in range(1, 400, 3):
            nvme.engine.inject("delay", nth, 3)
    with watch.watching():
        for seed in range(3 * accumulation):
            engine.backward(engine(tokens(seed)))
            engine.step()
        engine.get_global_grad_norm()
        engine.load_state_dict(engine.state_dict())
        engine.optimizer.state_dict()
        engine(tokens(0))
        engine.synchronize()
    if nvme is not None:
        nvme.engine.clear_faults()
    engine.close()
    assert not watch.unnamed, watch.unnamed[0]
    assert watch.num_named > 0 or placement == "device"


def test_a_delayed_fetch_is_seen_as_such(tmp_path: Path) -> None:
    """The first step knows no order: each unit is fetched when it is needed, and waited for."""
    engine = make_engine(settings(tmp_path, placement={"param": "nvme", **dict.fromkeys(STATES, "host")}))
    nvme = engine.optimizer.runtime.store.nvme
    for nth in (1, 2, 3):
        nvme.engine.inject("delay", nth, 200)
    train(engine, num_steps=1)
    report = engine.last_step_report()
    engine.close()
    assert (
        report.waits_s["fetch"] > 0.2
    )  # of some 0.4, two of them at once: the thread may come late to a wait
    assert report.total_wait_s <= report.step_s


def test_a_delayed_update_is_seen_as_such(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement=PLACEMENTS["states"], gradient_clipping=1.0))
    train(engine, num_steps=1)
    engine.synchronize()
    nvme = engine.optimizer.runtime.store.nvme
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    for nth in range(1, 12):
        nvme.engine.inject("delay", nth, 300)
    engine.step()
    engine(tokens(2))
    nvme.engine.clear_faults()
    engine.backward(engine(tokens(2)))
    engine.step()
    report = engine.last_step_report()
    engine.close()
    assert report.waits_s["update"] > 0.05


# --- the plain form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["resident", "host", "nvme", "mixed"])
def test_the_plain_form_tells_what_an_engine_tells(placement: str, tmp_path: Path) -> None:
    config = engine_config(placement, tmp_path, gradient_clipping=1.0)
    engine = make_engine(config, make_model())
    with offloaded(placement, tmp_path, gradient_clipping=1.0) as (model, optimizer):
        assert optimizer.reserved_bytes() == engine.reserved_bytes()
        assert sum(optimizer.reserved_bytes().values()) > 0
        of_both = [one.memory_table().splitlines() for one in (optimizer, engine)]
        plans = [[line for line in lines if str(tmp_path) not in line] for lines in of_both]
        assert plans[0] == plans[1]
        for step in range(1, 3):
            model(tokens(step)).backward()
            optimizer.step()
            assert optimizer.last_step_report().step == step
        assert optimizer.last_step_report().step_s > 0
    engine.close()
