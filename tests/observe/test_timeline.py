"""What is recorded on the timeline and reckoned from it: spans, laps, busy seconds, the bound, a step's line."""

from __future__ import annotations

import random
import threading
import time

import pytest

from offloadzero.observe import bound
from offloadzero.observe.bound import BestRates, LaneUse, StepReport
from offloadzero.observe.monitor import step_line, tracks
from offloadzero.observe.timeline import COMPUTE, WAIT, Span, Timeline

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


def test_launch_time_leaves_out_what_other_code_does_inside() -> None:
    timeline = Timeline(is_on=True)
    start_s = time.perf_counter()
    with timeline.launching(), timeline.elsewhere():
        while time.perf_counter() < start_s + 0.02:
            pass
        timeline.waited("fetch", start_s, start_s + 0.01)
        before_s = time.perf_counter()
        with timeline.launching():
            pass
        inner_s = time.perf_counter() - before_s
    all_s = time.perf_counter() - start_s
    assert 0.0 <= timeline.take_launch_s() <= all_s - 0.02 + inner_s


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


# --- the tracks of a trace --------------------------------------------------------------------------------


def test_overlapping_spans_go_to_tracks_of_their_own() -> None:
    spans = spans_of(("h2d", 0, 4, 0), ("h2d", 1, 2, 0), ("h2d", 2, 3, 0), ("h2d", 3, 5, 0), ("h2d", 4, 5, 0))
    assert tracks(spans) == [0, 1, 1, 1, 0]
