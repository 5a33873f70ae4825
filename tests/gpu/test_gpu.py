"""What only a CUDA device can show: pinning, streams, device arithmetic, parity and memory there."""

from __future__ import annotations

import gc
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

# Read when cuBLAS is first used: without it, its results may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from offloadzero import NonFiniteError, zero
from offloadzero.arithmetic import device_math
from offloadzero.kernel_arguments.adam import AdamHyper
from offloadzero.kernel_arguments.compact import num_scales
from offloadzero.memory.arena import allocate_host
from offloadzero.memory.device import find_device
from offloadzero.memory.lanes import Accelerator, LaneTicket
from offloadzero.memory.tickets import Failures, Promise
from offloadzero.native import kernels
from offloadzero.native.compact import compact_encode
from offloadzero.observe.clock import StepClock
from offloadzero.observe.timeline import Timeline
from offloadzero.segments import SegmentKind, TierName
from offloadzero.update import device_adam
from offloadzero.update.device_adam import triton_problem
from offloadzero.update.spec import UpdateForm
from tests.support.tiny import TinyModel, all_states, make_engine, settings, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SLOW_CYCLES = 400_000_000  # some 0.2 s at 2 GHz: far longer than any launch
MIB = 1024 * 1024


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    made = Accelerator(find_device("cuda"))
    # CUDA loads a kernel at its first launch, and that may wait for the device: not in the middle of a test.
    torch.cuda._sleep(1)
    warm = torch.zeros(1024, device="cuda").fill_(1.0) * 2
    warm.copy_(torch.full_like(warm, 2.0))
    assert torch.equal(warm.cpu(), torch.full((1024,), 2.0))
    assert bool((warm == 2.0).all())
    yield made
    made.asynchronous.synchronize()


@pytest.fixture
def pinned(accelerator: Accelerator) -> Iterator[torch.Tensor]:
    """4 MiB of registered host memory as fp32, zero."""
    buffer = allocate_host(4 * MIB)
    accelerator.pin(buffer, label="a test's buffer")
    yield buffer.view(torch.float32)
    accelerator.asynchronous.synchronize()
    accelerator.unpin(buffer)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


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


# --- arithmetic ---

HYPERS = [
    AdamHyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1),
    AdamHyper(lr=3e-4, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.01, decoupled=False),
    AdamHyper(lr=5e-2, beta1=0.0, beta2=0.9, eps=1e-3, weight_decay=0.0, bias_correction=False),
]
DTYPES = [
    (torch.bfloat16, torch.int16),
    (torch.float16, torch.float32),
    (torch.float32, None),
]


def values(num_elements: int, seed: int) -> torch.Tensor:
    """fp32 over many magnitudes, with zeros of both signs and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(num_elements, generator=generator)
    drawn *= 10.0 ** torch.randint(-12, 3, (num_elements,), generator=generator)
    drawn[::97] = 0.0
    drawn[1::97] = -0.0
    drawn[2::97] = 1e-41
    return drawn


@pytest.fixture
def form(request: pytest.FixtureRequest) -> UpdateForm:
    """A form of the update; skipped where Triton is missing or does not run, and not where it gives other bits."""
    wanted: UpdateForm = request.param
    problem = triton_problem(torch.device("cuda", 0)) if wanted is UpdateForm.TRITON else None
    if problem is not None and "other bits" not in problem:
        pytest.skip(problem)
    return wanted


FORMS = pytest.mark.parametrize("form", [UpdateForm.TRITON, UpdateForm.TORCH], indirect=True)


@FORMS
@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize(("dtype", "master_dtype"), DTYPES)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_device_update_gives_the_bits_of_the_kernel(
    form: UpdateForm,
    hyper: AdamHyper,
    dtype: torch.dtype,
    master_dtype: torch.dtype | None,
    grad_dtype: torch.dtype,
) -> None:
    count = 100_003
    weights = values(count, 1).clamp(-1e4, 1e4)
    param = torch.empty(count, dtype=dtype)
    master = None if master_dtype is None else torch.empty(count, dtype=master_dtype)
    device_math.split_master(weights, param, master)
    host = [param, torch.zeros(count), torch.zeros(count)]
    device = [tensor.cuda() for tensor in host]
    device_master = None if master is None else master.cuda()
    for step in range(1, 6):
        grad = values(count, 100 + step).clamp(-6e4, 6e4).to(grad_dtype)
        kernels.adam_step(
            host[0], grad, host[1], host[2], hyper=hyper, step=step, grad_scale=0.37, master=master
        )
        device_adam.adam_step(
            device[0],
            grad.cuda(),
            device[1],
            device[2],
            hyper=hyper,
            step=step,
            grad_scale=0.37,
            master=device_master,
            form=form,
        )
        for name, one, other in zip(("param", "exp_avg", "exp_avg_sq"), host, device, strict=True):
            assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8)), f"{name}, step {step}"
        if master is not None and device_master is not None:
            assert torch.equal(master, device_master.cpu()), f"master, step {step}"


@FORMS
@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_the_compact_update_on_the_device_gives_the_bits_of_the_kernel(
    form: UpdateForm, hyper: AdamHyper, grad_dtype: torch.dtype
) -> None:
    count = 100_003
    zeros, weights = torch.zeros(count), values(count, 1).clamp(-1e4, 1e4)
    dtypes = (torch.bfloat16, torch.int8, torch.int8, torch.uint8)
    host = [*(torch.empty(count, dtype=dtype) for dtype in dtypes), torch.empty(num_scales(count))]
    compact_encode(weights, zeros, zeros, *host)
    device = [tensor.cuda() for tensor in host]
    for step in range(1, 6):
        grad = values(count, 100 + step).clamp(-6e4, 6e4).to(grad_dtype)
        for state, given, used in ((host, grad, UpdateForm.NATIVE), (device, grad.cuda(), form)):
            param, master, exp_avg, exp_avg_sq, scales = state
            device_adam.adam_step(
                param,
                given,
                exp_avg,
                exp_avg_sq,
                hyper=hyper,
                step=step,
                grad_scale=0.37,
                master=master,
                scales=scales,
                form=used,
            )
        for name, one, other in zip(("param", "master", "m", "v", "scales"), host, device, strict=True):
            assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8)), f"{name}, step {step}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_and_sums_on_the_device(dtype: torch.dtype) -> None:
    grad = values(70_001, 3).clamp(-6e4, 6e4).to(dtype)
    expected = float(grad.double().square().sum())
    assert device_math.sq_norm(grad.cuda()) == pytest.approx(expected, rel=1e-12)
    grad[-1] = math.nan
    assert not math.isfinite(device_math.sq_norm(grad.cuda()))
    for acc_dtype in (dtype, torch.float32):
        acc = values(70_001, 4).clamp(-1e4, 1e4).to(acc_dtype)
        other = values(70_001, 5).clamp(-1e4, 1e4).to(dtype)
        on_device = acc.cuda()
        device_math.accumulate(on_device, other.cuda())
        kernels.accumulate(acc, other)
        assert torch.equal(on_device.cpu().view(torch.uint8), acc.view(torch.uint8))


# --- training ---


class Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        # Written out: the fused kernels' backward is not deterministic.
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(width // 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, -math.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGpt(TinyModel):
    """TinyModel with attention."""

    def __init__(self) -> None:
        super().__init__(width=64, num_blocks=5)
        self.blocks = nn.ModuleList(Attention(64) for _ in range(5))


PLACEMENTS: dict[str, Any] = {
    "host": "host",
    "nvme": "nvme",
    "mixed": {"param": "host", "master": "nvme", "exp_avg": "device", "exp_avg_sq": "nvme"},
    "gradients on nvme": {"param": "nvme", "master": "host", "exp_avg": "host", "exp_avg_sq": "host", "grad": "nvme"},
    "device homes": {"param": "device", "master": "host", "exp_avg": "host", "exp_avg_sq": "nvme"},
}  # fmt: skip


def trained(
    directory: Path, placement: Any, *, clipping: float, accumulation: int = 1, **own: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and all states after five steps on CUDA."""
    config = settings(
        directory,
        placement=placement,
        device="cuda",
        gradient_clipping=clipping,
        gradient_accumulation_steps=accumulation,
        **own,
    )
    torch.manual_seed(1)
    engine = make_engine(config, SmallGpt())
    losses = []
    for seed in range(5 * accumulation):
        loss = engine(tokens(seed, batch=4, length=33).cuda())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    states = all_states(engine)
    engine.close()
    return [float(loss) for loss in losses], states


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_placement_is_invisible(tmp_path: Path, placement: str, clipping: float, accumulation: int) -> None:
    expected = trained(tmp_path, "device", clipping=clipping, accumulation=accumulation)
    found = trained(tmp_path, PLACEMENTS[placement], clipping=clipping, accumulation=accumulation)
    assert all(map(math.isfinite, found[0]))
    assert found[0] == expected[0]
    for name, state in expected[1].items():
        assert torch.equal(state, found[1][name]), name
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_placement_of_compact_states_is_invisible(tmp_path: Path, clipping: float) -> None:
    expected = trained(tmp_path, "device", clipping=clipping, state_layout="compact")
    assert any(name.endswith(".scales") for name in expected[1])
    for placement in ("host", "mixed"):
        found = trained(tmp_path, PLACEMENTS[placement], clipping=clipping, state_layout="compact")
        assert found[0] == expected[0]
        for name, state in expected[1].items():
            assert torch.equal(state, found[1][name]), name


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_small_leases_and_chunks_are_invisible(tmp_path: Path, clipping: float) -> None:
    expected = trained(tmp_path, "nvme", clipping=clipping)
    small = {"units": {"min_leaf_elements": 1000, "prefetch_units": 1}, "update": {"chunk_elements": 4096}}
    found = trained(tmp_path, "nvme", clipping=clipping, **small)
    assert found[0] == expected[0]
    assert all(torch.equal(state, found[1][name]) for name, state in expected[1].items())


@pytest.mark.usefixtures("deterministic")
def test_it_trains_as_plain_torch_does(tmp_path: Path) -> None:
    """fp32, resident, torch.optim.AdamW: the losses agree to a few roundings."""
    torch.manual_seed(1)
    model = SmallGpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    plain = []
    for seed in range(5):
        loss = model(tokens(seed, batch=4, length=33).cuda())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    losses, _ = trained(tmp_path, "host", clipping=0.5, bf16=None)
    assert losses == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_stops_it(tmp_path: Path, placement: str, clipping: float) -> None:
    engine = make_engine(settings(tmp_path, placement=placement, device="cuda", gradient_clipping=clipping))
    loss = engine(tokens(0).cuda())
    engine.backward(loss)
    engine.step()
    engine.synchronize()

    def spoil() -> None:
        engine.backward(engine(tokens(1).cuda()) * math.nan)
        engine.step()
        engine.synchronize()

    with pytest.raises(NonFiniteError):
        spoil()
    runtime = engine.optimizer.runtime
    for record in runtime.records:
        for kind, segment in record.segments.items():
            if kind is not SegmentKind.GRAD:
                target = torch.empty(segment.num_elements, dtype=segment.dtype)
                runtime.store.read(segment, target).wait()
                assert not target.is_floating_point() or bool(target.isfinite().all()), segment.label
    engine.close()


@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
def test_gathering_and_states_on_the_device(tmp_path: Path, placement: str) -> None:
    engine = make_engine(settings(tmp_path, placement=placement, device="cuda"))
    engine.backward(engine(tokens(0).cuda()))
    engine.step()
    weight = engine.module.blocks[1].up.weight
    before = zero.safe_get_full_fp32_param(weight)
    with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        assert weight.is_cuda
        weight[0].fill_(2.0)
    after = zero.safe_get_full_fp32_param(weight)
    assert bool((after[0] == 2.0).all())
    assert torch.equal(after[1:], before[1:])
    assert engine.module.state_dict()["blocks.1.up.weight"].device.type == "cpu"
    engine.backward(engine(tokens(1).cuda()))
    engine.step()
    engine.close()


def test_buffers_are_where_the_computation_is(tmp_path: Path) -> None:
    class WithBuffer(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return super().forward(batch) * self.scale

    engine = make_engine(settings(tmp_path, placement="host", device="cuda"), WithBuffer())
    assert engine.module.scale.is_cuda
    assert engine(tokens(0).cuda()).isfinite()
    engine.close()


# --- memory ---


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_the_peak_is_the_budget_and_the_activations(tmp_path: Path, placement: str) -> None:
    """300M parameters, 600 MB in bf16, in a budget of 260 MiB."""
    torch.manual_seed(1)
    model = TinyModel(width=2048, num_blocks=12).bfloat16()
    largest_bytes = 2 * max(param.numel() for param in model.parameters())
    param_bytes = 2 * sum(param.numel() for param in model.parameters())

    # What the computation takes beside weights and gradients, on the resident model.
    resident = model.cuda()
    batch = tokens(0, batch=4, length=65).cuda()
    resident(batch).backward()  # cuBLAS has its workspace from here on
    resident.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        resident(batch)
    loss = resident(batch)
    activation_bytes = torch.cuda.max_memory_allocated() - before
    del loss, resident
    model = model.cpu()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()  # cuBLAS's workspaces and the batch

    budget = 260 * MIB
    config = settings(
        tmp_path,
        placement=placement,
        device="cuda",
        budgets={"device": budget},
        poison_released_leases=False,
        gradient_clipping=1.0,
        gradient_accumulation_steps=2,
    )
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(config, model)
    plan = engine.optimizer.runtime.plan
    assert plan.tier_bytes(TierName.DEVICE) <= budget
    for _ in range(4):
        engine.backward(engine(batch))
        engine.step()
    engine.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    engine.close()
    # Autograd makes a weight's gradient before it is copied into its lease, and the next one meanwhile.
    assert peak <= budget + activation_bytes + 3 * largest_bytes
    assert peak < param_bytes, "not even the weights would have fitted"


def test_close_gives_the_device_memory_back(tmp_path: Path) -> None:
    for _ in range(2):  # the first time cuBLAS takes its workspace
        gc.collect()
        base = torch.cuda.memory_allocated()
        engine = make_engine(settings(tmp_path, placement="host", device="cuda"))
        engine.backward(engine(tokens(0).cuda()))
        engine.step()
        held = torch.cuda.memory_allocated() - base
        assert held >= engine.optimizer.runtime.plan.tier_bytes(TierName.DEVICE)
        engine.close()
        del engine
    gc.collect()
    assert torch.cuda.memory_allocated() == base


def test_a_budget_beyond_the_device_is_refused(tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info()
    config = settings(tmp_path, placement="host", device="cuda", budgets={"device": free * 2})
    engine = make_engine(config)  # a budget is a limit: what is taken is what the model needs
    assert engine.optimizer.runtime.plan.tier_bytes(TierName.DEVICE) < free
    engine.close()


# --- activation checkpoints ---


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_checkpoints_leave_the_device_and_change_nothing(tmp_path: Path, tier: str) -> None:
    """32 inputs of 8 MiB each; a few of them are on the device at once."""
    batch = tokens(0, batch=64, length=129).cuda()
    outcomes = {}
    for name in ("device", tier):
        torch.manual_seed(1)
        config = settings(
            tmp_path,
            placement="host",
            device="cuda",
            poison_released_leases=False,
            activation_checkpoints={"tier": name},
        )
        engine = make_engine(config, TinyModel(width=512, num_blocks=32))
        losses = []
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = engine(batch)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        outcomes[name] = losses, all_states(engine), held
        engine.close()
    input_bytes = 64 * 128 * 512 * 2
    assert outcomes["device"][0] == outcomes[tier][0]
    for key, value in outcomes["device"][1].items():
        assert torch.equal(value, outcomes[tier][1][key]), key
    assert outcomes["device"][2] - outcomes[tier][2] >= 24 * input_bytes
