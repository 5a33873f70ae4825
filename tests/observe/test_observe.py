"""What is recorded of a run: spans, bounds, records, traces, and that every wait has a name."""

from __future__ import annotations

import itertools
import json
import logging
import random
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

from offloadzero.config import ObserveConfig
from offloadzero.errors import ConfigError
from offloadzero.io.engine import AioEngine, AioTicket
from offloadzero.memory.arena import BufferPool
from offloadzero.memory.lanes import LaneTicket
from offloadzero.memory.tickets import Promise
from offloadzero.observe import bound
from offloadzero.observe.bound import BestRates, LaneUse
from offloadzero.observe.clock import StepClock
from offloadzero.observe.collectives import (
    ALL_REDUCE,
    BROADCAST,
    CollectiveCount,
    CollectiveCounter,
    volume_bytes,
)
from offloadzero.observe.monitor import StepMonitor, step_line
from offloadzero.observe.run_dir import tracks
from offloadzero.observe.step_report import StepReport
from offloadzero.observe.timeline import COMPUTE, LANES, WAIT, Span, Timeline
from offloadzero.update.specs.adam import ADAM
from tests.support.plain_form import engine_config, make_model, offloaded
from tests.support.tiny import make_engine, settings, tokens, train

# --- the timeline ------------------------------------------------------------------------------------------


def test_off_nothing_is_recorded() -> None:
    timeline = Timeline()
    with timeline.span("h2d", "a", 1), timeline.launching():
        timeline.enter_model()
    timeline.add("h2d", "a", 0.0, 1.0)
    timeline.add_unfinished("nvme read", "a", lambda: (0.0, 1.0))
    timeline.waited("fetch", 0.0, 1.0)
    timeline.lap("forward")
    assert timeline.take(1) == ([], False)
    assert (timeline.launch_s, timeline.waited_s) == (0.0, 0.0)
    assert timeline.span("h2d", "a") is timeline.launching()  # one object for all


def test_spans_of_all_threads_are_recorded_once_and_with_their_step() -> None:
    timeline = Timeline(is_on=True)

    def work(name: str) -> None:
        for _ in range(100):
            with timeline.span("update", name, 7):
                pass

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans, is_full = timeline.take(3)
    assert not is_full
    assert sorted(span.name for span in spans) == sorted(f"t{i}" for i in range(4) for _ in range(100))
    assert {(span.lane, span.num_bytes, span.step) for span in spans} == {("update", 7, 3)}
    assert all(span.start_s <= span.end_s for span in spans)
    assert timeline.take(4) == ([], False)


def test_an_exception_inside_a_span_passes_and_is_recorded() -> None:
    timeline = Timeline(is_on=True)
    with pytest.raises(KeyError), timeline.span("h2d", "a"):
        raise KeyError
    assert len(timeline.take(1)[0]) == 1


def test_what_is_under_way_is_asked_until_it_has_ended() -> None:
    timeline = Timeline(is_on=True)
    times: list[tuple[float, float] | None] = [None]
    timeline.add_unfinished("nvme read", "a", lambda: times[0], 5)
    assert timeline.take(1) == ([], False)
    times[0] = (1.0, 2.0)
    assert timeline.take(2) == ([Span("nvme read", "a", 1.0, 2.0, 5, 2)], False)
    assert timeline.take(3) == ([], False)


def test_a_full_timeline_keeps_the_latest_and_says_so() -> None:
    timeline = Timeline(is_on=True, max_spans=3)
    for i in range(5):
        timeline.add("h2d", str(i), 0.0, 1.0)
    spans, is_full = timeline.take(1)
    assert [span.name for span in spans] == ["2", "3", "4"]
    assert is_full


def test_a_lap_is_what_the_thread_did_without_its_waits() -> None:
    timeline = Timeline(is_on=True)
    timeline.lap("before")
    timeline.take(0)
    start_s = time.perf_counter()
    timeline.waited("fetch", start_s + 0.010, start_s + 0.015)
    timeline.waited("update", start_s + 0.012, start_s + 0.020)  # overlaps: counted once
    while time.perf_counter() < start_s + 0.030:
        pass
    timeline.lap("forward a")
    timeline.lap("forward b")
    work = [span for span in timeline.take(1)[0] if span.lane == COMPUTE]
    assert [span.name for span in work] == ["forward a", "forward a", "forward b"]
    assert work[0].end_s == start_s + 0.010
    assert work[1].start_s == start_s + 0.020
    assert work[1].end_s == work[2].start_s


def test_the_training_loop_is_named_where_the_model_is_left() -> None:
    timeline = Timeline(is_on=True)
    timeline.lap("step", leaves_model=True)
    timeline.enter_model()
    timeline.lap("forward a")
    timeline.enter_model()
    timeline.lap("forward b")
    names = [span.name for span in timeline.take(1)[0]]
    assert names == ["step", "training loop", "forward a", "forward b"]


def test_launch_time_leaves_waits_out() -> None:
    timeline = Timeline(is_on=True)
    start_s = time.perf_counter()
    with timeline.launching():
        while time.perf_counter() < start_s + 0.02:
            pass
        timeline.waited("fetch", start_s, start_s + 0.02)
    inside_s = time.perf_counter() - start_s
    assert 0.0 <= timeline.take_launch_s() <= inside_s - 0.02 + 1e-9
    assert timeline.take_launch_s() == 0.0


# --- the bound ---------------------------------------------------------------------------------------------


def test_busy_seconds_are_those_of_the_union() -> None:
    rng = random.Random(0)
    for count in (0, 1, 2, 7, 40):
        intervals = [(a, a + rng.randrange(12)) for a in (rng.randrange(-5, 105) for _ in range(count))]
        covered = {t for low, high in intervals for t in range(low, high) if 0 <= t < 100}
        assert bound.busy_seconds(intervals, start_s=0, end_s=100) == len(covered)


def spans_of(*rows: tuple[str, float, float, int]) -> list[Span]:
    return [Span(lane, "x", start_s, end_s, num_bytes) for lane, start_s, end_s, num_bytes in rows]


def test_use_counts_bytes_and_the_time_in_which_any_moved() -> None:
    spans = spans_of(
        ("h2d", 0.0, 1.0, 10),
        ("h2d", 0.5, 2.0, 20),
        ("nvme read", 0.0, 2.0, 100),
        ("nvme write", 1.0, 4.0, 300),
        (COMPUTE, 0.0, 9.0, 0),
        (WAIT, 0.0, 9.0, 0),
    )
    assert bound.use_by_lane(spans, nvme_shared=False) == {
        "h2d": LaneUse(30, 2.0),
        "nvme read": LaneUse(100, 2.0),
        "nvme write": LaneUse(300, 3.0),
    }
    assert bound.use_by_lane(spans, nvme_shared=True) == {"h2d": LaneUse(30, 2.0), "nvme": LaneUse(400, 4.0)}


def test_the_best_rate_so_far_gives_the_least_time() -> None:
    rates = BestRates()
    rates.learn({"h2d": LaneUse(100, 2.0), "d2h": LaneUse(0, 0.0)})
    assert rates.seconds({"h2d": LaneUse(100, 2.0), "d2h": LaneUse(0, 0.0)}) == {"h2d": 2.0}
    rates.learn({"h2d": LaneUse(100, 1.0)})
    rates.learn({"h2d": LaneUse(100, 4.0)})
    assert rates.seconds({"h2d": LaneUse(250, 9.0)}) == {"h2d": 2.5}


def test_the_bound_is_the_lane_that_needs_longest() -> None:
    transfers = {"h2d": 3.0, "update": 6.0, "nvme read": 4.5, "nvme write": 1.0}
    gpu = bound.lane_seconds(transfers, step_s=8.0, wait_s=3.0, cores_s=None)
    assert gpu == {"compute": 5.0, **transfers}
    assert bound.step_bound(gpu) == bound.Bound(6.0, "update", gpu)
    assert bound.step_bound(gpu).efficiency(8.0) == 0.75
    # On the CPU copies and updates are in the cores' sum; the drive stays a lane.
    cpu = bound.lane_seconds(transfers, step_s=8.0, wait_s=5.0, cores_s=4.0)
    assert cpu == {"compute": 3.0, "cores": 4.0, "nvme read": 4.5, "nvme write": 1.0}
    assert bound.step_bound(cpu).lane == "nvme read"
    assert bound.lane_seconds({}, step_s=1.0, wait_s=2.0, cores_s=None) == {"compute": 0.0}


def test_the_line_of_a_step() -> None:
    report = StepReport(12, 0.5, {"a": 0.001, "fetch": 0.02, "update": 0.0105, "decision": 0.0001})
    found = bound.step_bound({"compute": 0.45, "nvme read": 0.2})
    assert step_line(report, found) == (
        "step 12: 0.500 s, bound 0.450 s (compute), overlap 90.0%, "
        "waits: fetch 20.0 ms, update 10.5 ms, a 1.0 ms"
    )
    assert step_line(StepReport(1, 0.5), found).endswith("waits: none")


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


DOCUMENTED = (Path(__file__).resolve().parents[2] / "docs" / "observe.md").read_text()


def documented_fields() -> dict[str, str]:
    """Field -> its meaning, of the table in docs/observe.md."""
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


def test_overlapping_spans_go_to_tracks_of_their_own() -> None:
    spans = spans_of(("h2d", 0, 4, 0), ("h2d", 1, 2, 0), ("h2d", 2, 3, 0), ("h2d", 3, 5, 0), ("h2d", 4, 5, 0))
    assert tracks(spans) == [0, 1, 1, 1, 0]


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
        self._watch(monkeypatch, BufferPool, "take", lambda pool: not pool.num_free)

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


@pytest.mark.parametrize(("clipping", "accumulation"), [(0.0, 1), (1.0, 2)])
@pytest.mark.parametrize("placement", PLACEMENTS)
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
