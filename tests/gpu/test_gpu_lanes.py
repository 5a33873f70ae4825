"""What only a CUDA device can show of pinned memory, lanes and streams, and of the times that are measured there."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from offloadzero.memory.arena import allocate_host
from offloadzero.memory.device import find_device
from offloadzero.memory.lanes import Accelerator, LaneTicket
from offloadzero.memory.tickets import Failures, Promise
from offloadzero.observe.clock import StepClock
from offloadzero.observe.timeline import Timeline
from tests.support.tiny import make_engine, settings, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SLOW_CYCLES = 400_000_000  # some 0.2 s at 2 GHz: far longer than any launch


# --- pinning ---


def test_an_arena_of_any_size_is_pinned_and_unpinned(accelerator: Accelerator) -> None:
    """Also one that is no power of two, at its exact size."""
    for num_pages in (1, 3, 1025):
        buffer = allocate_host(num_pages * 4096)
        assert not buffer.is_pinned()
        accelerator.pin(buffer, label="a test's buffer")
        assert buffer.is_pinned()
        assert buffer[-4096:].is_pinned()
        accelerator.unpin(buffer)
        assert not buffer.is_pinned()
    accelerator.pin(allocate_host(0), label="nothing")


def test_the_engine_pins_its_host_arena(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, placement="host", device="cuda"))
    buffer = engine.optimizer.runtime.store.host.buffer
    assert buffer.is_pinned()
    assert engine.device.type == "cuda"
    engine.close()
    assert not buffer.is_pinned()


# --- lanes and streams ---


def test_a_lane_waits_for_the_fence(accelerator: Accelerator, pinned: torch.Tensor) -> None:
    failures = Failures()
    lane = accelerator.lane("test", failures)
    source = torch.zeros(pinned.numel(), device="cuda")
    early = torch.full_like(source, -1.0)
    accelerator.asynchronous.synchronize()
    torch.cuda._sleep(SLOW_CYCLES)
    source.fill_(7.0)
    # The control: a copy that waits for nothing overtakes the slow kernel and sees what was there before.
    lane.submit(lambda: accelerator.copy(early, source)).wait()
    ticket = lane.submit(lambda: accelerator.copy(pinned, source), fence=accelerator.fence())
    ticket.wait()
    assert bool((pinned == 7.0).all())
    accelerator.asynchronous.synchronize()
    assert bool((early == 0.0).all()), "the lane's stream is not its own, so this test shows nothing"
    lane.close()
    failures.check()


def test_compute_is_ordered_behind_a_transfer_without_blocking_the_host(
    accelerator: Accelerator, pinned: torch.Tensor
) -> None:
    lane = accelerator.lane("test", Failures())
    pinned.fill_(5.0)
    target = torch.zeros(pinned.numel(), device="cuda")
    accelerator.asynchronous.synchronize()

    def slow_copy() -> None:
        torch.cuda._sleep(SLOW_CYCLES)
        accelerator.copy(target, pinned)

    ticket = lane.submit(slow_copy, fence=accelerator.fence())
    ticket.order_compute()
    assert not ticket.done(), "ordering two streams must not wait for the copy"
    result = target * 2
    assert not ticket.done()
    assert bool((result == 10.0).all())
    assert ticket.done()
    lane.close()


def test_wait_blocks_until_the_copy_is_complete(accelerator: Accelerator, pinned: torch.Tensor) -> None:
    lane = accelerator.lane("test", Failures())
    source = torch.full((pinned.numel(),), 3.0, device="cuda")
    accelerator.asynchronous.synchronize()

    def slow_copy() -> None:
        torch.cuda._sleep(SLOW_CYCLES)
        accelerator.copy(pinned, source)

    lane.submit(slow_copy).wait()
    assert bool((pinned == 3.0).all())
    lane.close()


def test_launched_is_done_when_the_calling_threads_work_is(accelerator: Accelerator) -> None:
    torch.cuda._sleep(SLOW_CYCLES)
    ticket = accelerator.launched()
    assert isinstance(ticket, LaneTicket)
    assert not ticket.done()
    ticket.wait()
    assert ticket.done()


def test_a_copy_is_recorded_when_the_device_does_it(pinned: torch.Tensor) -> None:
    timeline = Timeline(is_on=True)
    accelerator = Accelerator(find_device("cuda"), timeline)
    target = torch.zeros_like(pinned, device="cuda")
    lane = accelerator.lane("fetch", Failures())
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    torch.cuda._sleep(SLOW_CYCLES)
    lane.submit(lambda: accelerator.copy(target, pinned), fence=accelerator.fence(), label="blocks.0").wait()
    end_s = time.perf_counter()
    lane.close()
    (span,) = timeline.take(1)[0]
    assert (span.lane, span.name, span.num_bytes) == ("h2d", "blocks.0", pinned.nbytes)
    # Behind the slow kernel, and not longer than 4 MiB take on any link.
    assert start_s + 0.05 < span.start_s < span.end_s < end_s + 1e-3
    assert span.end_s - span.start_s < 0.05


@pytest.fixture
def clock(accelerator: Accelerator) -> StepClock:
    """The clock of the steps on the device."""
    made, marks = StepClock(), accelerator.marks()
    assert marks is not None
    made.follow(marks)
    torch.cuda.synchronize()
    made.restart()
    return made


def slow_cycles_s() -> float:
    """How long SLOW_CYCLES take at the clock to which load brings the device: it may have been idle."""
    torch.cuda._sleep(SLOW_CYCLES)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.cuda._sleep(SLOW_CYCLES)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def test_a_wait_is_how_long_the_stream_stood_still(
    accelerator: Accelerator, clock: StepClock, pinned: torch.Tensor
) -> None:
    slow_s = slow_cycles_s()
    target = torch.zeros_like(pinned, device="cuda")
    lane = accelerator.lane("fetch", Failures())

    def slow_copy() -> None:
        torch.cuda._sleep(SLOW_CYCLES)
        accelerator.copy(target, pinned)

    lane.submit(slow_copy).wait()
    torch.cuda.synchronize()
    clock.restart()
    fetched = lane.submit(slow_copy)
    with clock.waiting("fetch"):
        fetched.order_compute()
    clock.finish_step(1)
    torch.cuda.synchronize()
    report = clock.last
    assert report.step == 1
    assert report.waits_s["fetch"] == pytest.approx(slow_s, rel=0.2)
    assert report.step_s == pytest.approx(slow_s, rel=0.2)
    lane.close()


def test_a_copy_that_the_stream_finds_there_is_no_wait(
    accelerator: Accelerator, clock: StepClock, pinned: torch.Tensor
) -> None:
    slow_s = slow_cycles_s()
    target = torch.zeros_like(pinned, device="cuda")
    lane = accelerator.lane("fetch", Failures())
    lane.submit(lambda: accelerator.copy(target, pinned)).wait()
    torch.cuda.synchronize()
    clock.restart()
    torch.cuda._sleep(SLOW_CYCLES)
    fetched = lane.submit(lambda: accelerator.copy(target, pinned))
    with clock.waiting("fetch"):
        fetched.order_compute()
    clock.finish_step(1)
    assert clock.last.step == 0  # it has not run, and nobody waits for it
    torch.cuda.synchronize()
    report = clock.last
    assert report.step == 1
    assert report.waits_s["fetch"] < 0.1 * slow_s
    assert report.step_s == pytest.approx(slow_s, rel=0.2)
    lane.close()


def test_the_records_of_a_run_are_those_of_the_device(tmp_path: Path) -> None:
    """The steps follow one another without a gap, and what is recorded of one fits into it."""
    run_dir = tmp_path / "run"
    (tmp_path / "files").mkdir()
    observe = {"run_dir": str(run_dir)}
    engine = make_engine(settings(tmp_path / "files", placement="host", device="cuda", observe=observe))
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for seed in range(6):
        engine.backward(engine(tokens(seed, batch=4, length=33).cuda()))
        engine.step()
    engine.close()
    end_s = time.perf_counter()
    records = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert 0.0 < sum(record["step_s"] for record in records) < end_s - start_s + 1.0
    for record in records[1:]:
        waits_s = sum(record["waits_s"].values())
        assert 0.0 <= waits_s <= record["step_s"] * 1.01 + 1e-4
        assert record["lanes_s"]["compute"] == pytest.approx(max(record["step_s"] - waits_s, 0.0))
        assert record["bytes"]["h2d"] > 0


def test_a_loss_is_read_without_a_wait_when_it_is_asked_for() -> None:
    accelerator = Accelerator(find_device("cuda"))
    loss = torch.full((1,), 2.5, device="cuda")
    assert accelerator.read_later(loss)() == 2.5  # the first one makes pinned memory, for which CUDA may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(SLOW_CYCLES)
    start_s = time.perf_counter()
    read = accelerator.read_later(loss)
    assert time.perf_counter() - start_s < 0.05
    loss.zero_()  # comes after the copy
    assert read() == 2.5


def test_a_fence_marks_the_stream_of_its_own_thread(accelerator: Accelerator, pinned: torch.Tensor) -> None:
    """Autograd's threads launch on streams of their own."""
    lane = accelerator.lane("test", Failures())
    source = torch.zeros(pinned.numel(), device="cuda")
    accelerator.asynchronous.synchronize()
    tickets: list[LaneTicket] = []

    def launch() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SLOW_CYCLES)
            source.fill_(9.0)
            tickets.append(lane.submit(lambda: accelerator.copy(pinned, source), fence=accelerator.fence()))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    tickets[0].wait()
    assert bool((pinned == 9.0).all())
    lane.close()


def test_tasks_of_a_lane_wait_for_tickets_of_another(accelerator: Accelerator, pinned: torch.Tensor) -> None:
    """Device to host on one lane, back on the other: a round trip through the same memory."""
    out, back = accelerator.lane("out", Failures()), accelerator.lane("back", Failures())
    gate = Promise()
    source = torch.randn(pinned.numel(), device="cuda")
    target = torch.zeros_like(source)
    accelerator.asynchronous.synchronize()

    def slow_copy() -> None:
        torch.cuda._sleep(SLOW_CYCLES)
        accelerator.copy(pinned, source)

    first = out.submit(slow_copy, after=[gate])
    second = back.submit(lambda: accelerator.copy(target, pinned), after=[first])
    assert not second.done()
    gate.fulfil()
    second.order_compute()
    assert torch.equal(target, source)
    out.close()
    back.close()
