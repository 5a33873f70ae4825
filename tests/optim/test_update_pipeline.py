"""The update pipeline alone: every combination of tiers gives the bits of one kernel call on plain tensors."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadzero.config import AioConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.engine import build
from offloadzero.errors import AioError, OffloadError
from offloadzero.memory.arena import align_up
from offloadzero.memory.device import CpuDevice
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.store import Segment, StoreSizes, TieredStore
from offloadzero.memory.tickets import FINISHED, Failures, Ticket
from offloadzero.native import kernels
from offloadzero.native.hyper import AdamHyper
from offloadzero.step import landing
from offloadzero.update.delivery import UpdateTicket
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.pipeline import RecordUpdate, UpdatePipeline
from offloadzero.update.records import Record, UpdateRange, make_record, update_ranges
from offloadzero.update.specs.adam import ADAM
from tests.simulated.device import simulated
from tests.support.cases import each_pair
from tests.support.faults import observes
from tests.support.tiny import all_states, make_engine, run_script, settings
from tests.support.training import make_config, run_engine

MASTER_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None}
HYPERS = (
    AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1),
    AdamHyper(lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.01, decoupled=False),
    AdamHyper(lr=5e-2, beta1=0.0, beta2=0.9, eps=1e-3, weight_decay=0.0, bias_correction=False),
)
SIZES = ((3, 7), (1,), (4097,), (64, 33), (199,))
GROUPS: tuple[int | None, ...] = (0, 2, 1, 0, None)


@dataclass
class Bench:
    """A store and a pipeline over it."""

    store: TieredStore
    pipeline: UpdatePipeline

    def apply(self, updates: Sequence[RecordUpdate]) -> None:
        for update in updates:
            self.pipeline.submit(update)
        self.wait(updates)

    def wait(self, updates: Sequence[RecordUpdate]) -> None:
        for update in updates:
            update.ticket.wait()


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(*, chunk_elements: int = 4096, num_slots: int = 3, num_threads: int | None = 1) -> Bench:
        slot_bytes = (
            align_up(18 * chunk_elements) + 5 * 4096
        )  # fp16, fp32 master, moments and gradient, apart
        sizes = StoreSizes(
            device=48 << 20, host=(48 << 20) + num_slots * slot_bytes, nvme=48 << 20
        )  # fmt: skip
        store = TieredStore(
            Accelerator(CpuDevice()),
            sizes=sizes,
            nvme_paths=[tmp_path],
            aio=AioConfig(),
            failures=Failures(),
            poison=True,
        )  # fmt: skip
        leases = [store.host.lease(slot_bytes, f"slot {i}") for i in range(num_slots)]
        pipeline = UpdatePipeline(
            store, slot_leases=leases, chunk_elements=chunk_elements, num_threads=num_threads
        )
        benches.append(Bench(store, pipeline))
        return benches[-1]

    yield make
    for bench in benches:
        bench.pipeline.close()
        bench.store.close()


@dataclass
class Plain:
    """The same record as plain tensors, updated by one kernel call per parameter."""

    param: torch.Tensor
    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def step(self, slots: Sequence[ParamSlot], grad: torch.Tensor, grad_scale: float) -> None:
        for slot in slots:
            part = slice(slot.offset, slot.offset + slot.num_elements)
            assert slot.group_index is not None
            kernels.adam_step(
                self.param[part],
                grad[part],
                self.exp_avg[part],
                self.exp_avg_sq[part],
                hyper=HYPERS[slot.group_index],
                step=slot.step,
                grad_scale=grad_scale,
                master=None if self.master is None else self.master[part],
                num_threads=1,
            )


@dataclass(eq=False)
class Update:
    """A RecordUpdate."""

    record: Record
    ranges: Sequence[UpdateRange]
    hypers: Sequence[AdamHyper]
    grad: torch.Tensor | Segment
    grad_scale: float
    on_release: Callable[[], None] | None = None
    before: Ticket = FINISHED
    ticket: UpdateTicket = field(default_factory=UpdateTicket)
    is_trial: bool = False
    adopted: Ticket | None = None

    def may_begin(self) -> bool:
        return True

    def release_gradient(self) -> None:
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()


@dataclass
class Case:
    """One record in the store and its plain twin."""

    record: Record
    plain: Plain
    grad_tier: TierName
    generator: torch.Generator
    kept: list[torch.Tensor] = field(default_factory=list)

    def update(self, bench: Bench, slots: Sequence[ParamSlot], grad_scale: float = 0.5) -> Update:
        record = self.record
        grad = torch.zeros(record.num_trainable, dtype=record.grad_dtype)
        for slot in slots:
            slot.step += 1
            values = torch.randn(slot.num_elements, generator=self.generator)
            grad[slot.offset : slot.offset + slot.num_elements] = values.to(grad.dtype)
        self.plain.step(slots, grad, grad_scale)
        if self.grad_tier is TierName.HOST:
            source: torch.Tensor = grad.clone()
            self.kept.append(source)
            given = source
        else:
            home = record.segments[SegmentKind.GRAD]
            bench.store.write(home, grad).wait()
            given = home.memory if home.tier is TierName.DEVICE else home  # type: ignore[assignment]
        return Update(
            record=record, ranges=update_ranges(record, slots), hypers=HYPERS, grad=given, grad_scale=grad_scale
        )  # fmt: skip

    def check(self, bench: Bench) -> None:
        expected = {
            SegmentKind.PARAM: self.plain.param,
            SegmentKind.MASTER: self.plain.master,
            SegmentKind("exp_avg"): self.plain.exp_avg,
            SegmentKind("exp_avg_sq"): self.plain.exp_avg_sq,
        }
        for kind, tensor in expected.items():
            if tensor is None:
                assert kind not in self.record.segments
                continue
            found = torch.zeros_like(tensor)
            bench.store.read(self.record.segments[kind], found).wait()
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), (
                f"{self.record.name}: {kind}"
            )


def make_case(
    bench: Bench,
    tiers: dict[SegmentKind, TierName],
    *,
    dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype | None = None,
    sizes: Sequence[tuple[int, ...]] = SIZES,
    groups: Sequence[int | None] = GROUPS,
    number: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(number)
    params = [
        (f"p{i}", nn.Parameter(torch.zeros(shape)), group)
        for i, (shape, group) in enumerate(zip(sizes, groups, strict=True))
    ]
    record = make_record(number, f"unit{number}", dtype, params, spec=ADAM)
    record.grad_dtype = grad_dtype or dtype
    count, trainable = record.num_elements, record.num_trainable
    weights = torch.zeros(count)
    for slot in record.slots:
        weights[slot.offset : slot.offset + slot.num_elements] = torch.randn(
            slot.num_elements, generator=generator
        )
    master_dtype = MASTER_DTYPES[dtype]
    plain = Plain(weights.to(dtype), None, torch.zeros(trainable), torch.zeros(trainable))
    if master_dtype is torch.int16:
        plain.master = torch.zeros(trainable, dtype=torch.int16)
        kernels.split_master(weights[:trainable].clone(), plain.param[:trainable], plain.master)
    elif master_dtype is not None:
        plain.master = weights[:trainable].clone()
    contents = {
        SegmentKind.PARAM: plain.param,
        SegmentKind.MASTER: plain.master,
        SegmentKind("exp_avg"): plain.exp_avg,
        SegmentKind("exp_avg_sq"): plain.exp_avg_sq,
    }
    for kind, tensor in contents.items():
        if tensor is not None:
            segment = bench.store.create(record.name, kind, tensor.dtype, tensor.numel(), tiers[kind])
            bench.store.write(segment, tensor).wait()
            record.segments[kind] = segment
    grad_tier = tiers[SegmentKind.GRAD]
    if grad_tier is not TierName.HOST:
        record.segments[SegmentKind.GRAD] = bench.store.create(
            record.name, SegmentKind.GRAD, record.grad_dtype, trainable, grad_tier
        )
    return Case(record, plain, grad_tier, generator)


def tiers_of(kinds: Sequence[SegmentKind]) -> list[dict[SegmentKind, TierName]]:
    """Any two segments on any two tiers; all on one tier, and all but one, where a rule about all of them changes."""
    combinations = set(each_pair(*[TierName] * len(kinds)))
    for most, one, index in itertools.product(TierName, TierName, range(len(kinds))):
        combinations.add((*[most] * index, one, *[most] * (len(kinds) - 1 - index)))
    return [dict(zip(kinds, tiers, strict=True)) for tiers in sorted(combinations)]


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_combinations_of_tiers(make_bench: MakeBench, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    bench = make_bench(chunk_elements=4096)
    kinds = [kind for kind in ADAM.kinds if not (dtype is torch.float32 and kind is SegmentKind.MASTER)]
    cases = [
        make_case(bench, tiers, dtype=dtype, grad_dtype=grad_dtype, sizes=((2500,), (3, 700), (9,)),
                  groups=(0, 1, None), number=number)
        for number, tiers in enumerate(tiers_of(kinds))
    ]  # fmt: skip
    for _ in range(2):
        bench.apply([case.update(bench, case.record.trainable_slots) for case in cases])
    for case in cases:
        case.check(bench)


SPREAD = [
    {SegmentKind.PARAM: TierName.NVME, SegmentKind.MASTER: TierName.NVME, SegmentKind("exp_avg"): TierName.NVME,
     SegmentKind("exp_avg_sq"): TierName.NVME, SegmentKind.GRAD: TierName.NVME},
    {SegmentKind.PARAM: TierName.DEVICE, SegmentKind.MASTER: TierName.HOST, SegmentKind("exp_avg"): TierName.NVME,
     SegmentKind("exp_avg_sq"): TierName.HOST, SegmentKind.GRAD: TierName.HOST},
    dict.fromkeys(ADAM.kinds, TierName.HOST),
    dict.fromkeys(ADAM.kinds, TierName.DEVICE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("chunk_elements", "num_slots", "num_threads"),
    each_pair([4096, 8192, 12288, 1 << 20], [2, 3, 5], [1, 2]),
)
def test_chunks_slots_and_threads_change_nothing(
    make_bench: MakeBench, chunk_elements: int, num_slots: int, num_threads: int
) -> None:
    bench = make_bench(chunk_elements=chunk_elements, num_slots=num_slots, num_threads=num_threads)
    cases = [
        make_case(bench, tiers, sizes=((40_001,), (97, 101), (1,), (30_000,)), groups=(0, 1, 2, 0), number=number)
        for number, tiers in enumerate(SPREAD)
    ]  # fmt: skip
    for _ in range(3):
        bench.apply([case.update(bench, case.record.trainable_slots) for case in cases])
    for case in cases:
        case.check(bench)


@pytest.mark.parametrize("tiers", SPREAD)
def test_parts_of_a_record_with_their_own_groups_and_steps(
    make_bench: MakeBench, tiers: dict[SegmentKind, TierName]
) -> None:
    """Parameters without a gradient keep every bit, whatever chunk they share."""
    bench = make_bench()
    case = make_case(bench, tiers)
    slots = case.record.trainable_slots
    for chosen in ([0, 1, 2, 3], [1], [0, 3], [2], [], [3, 2, 1]):
        update = case.update(bench, [slots[i] for i in chosen], grad_scale=0.25)
        bench.apply([update])
        case.check(bench)
    assert len({slot.step for slot in slots}) > 1


# --- order, hand-over, failures ---


def test_calls_run_between_updates_and_first_means_first(make_bench: MakeBench) -> None:
    bench = make_bench()
    cases = [make_case(bench, SPREAD[0], number=number) for number in range(4)]
    order: list[str] = []
    gate = threading.Event()
    updates = []
    for number, case in enumerate(cases):
        update = case.update(bench, case.record.trainable_slots)
        update.on_release = lambda number=number: order.append(f"update {number}")
        updates.append(update)
    bench.pipeline.submit(lambda: updates[2:] if gate.wait() else None)
    bench.pipeline.submit(updates[0])
    bench.pipeline.submit(lambda: order.append("call"))
    bench.pipeline.submit(updates[1])
    gate.set()
    bench.wait(updates)
    assert order == ["update 2", "update 3", "update 0", "call", "update 1"]
    for case in cases:
        case.check(bench)


def test_the_gradient_is_handed_back_when_it_was_read(make_bench: MakeBench) -> None:
    bench = make_bench()
    for number, tiers in enumerate(SPREAD[:3]):
        case = make_case(bench, tiers, number=number)
        update = case.update(bench, case.record.trainable_slots)
        spoiled = threading.Event()

        def spoil(update: Update = update, spoiled: threading.Event = spoiled) -> None:
            if isinstance(update.grad, torch.Tensor):
                update.grad.fill_(float("nan"))
            spoiled.set()

        update.on_release = spoil
        bench.apply([update])
        assert spoiled.is_set()
        case.check(bench)


@pytest.mark.parametrize("nth", range(1, 16, 2))
def test_a_failing_transfer_fails_its_update_and_all_that_follow(make_bench: MakeBench, nth: int) -> None:
    bench = make_bench()
    assert bench.store.nvme is not None
    cases = [make_case(bench, SPREAD[0], number=number) for number in range(3)]
    updates = [case.update(bench, case.record.trainable_slots) for case in cases]
    consumed: list[int] = []
    for number, update in enumerate(updates):
        update.on_release = lambda number=number: consumed.append(number)
    bench.store.nvme.engine.inject("errno", nth, 5)
    for update in updates:
        bench.pipeline.submit(update)
    outcomes = []
    for update in updates:
        try:
            update.ticket.wait()
        except AioError as error:
            outcomes.append(str(error))
    assert outcomes
    assert all(text.startswith("unit") for text in outcomes)
    bench.pipeline.close()
    assert sorted(consumed) == [0, 1, 2], "each gradient's buffer must come back, once"
    with pytest.raises(OffloadError, match="closed"):
        bench.pipeline.submit(updates[0])


def test_a_failing_call_does_not_stop_the_thread(make_bench: MakeBench) -> None:
    bench = make_bench()

    def fail() -> None:
        raise ValueError("decided badly")

    bench.pipeline.submit(fail)
    case = make_case(bench, SPREAD[0])
    update = case.update(bench, case.record.trainable_slots)
    bench.pipeline.submit(update)
    with pytest.raises(ValueError, match="decided badly"):
        update.ticket.wait()


# --- reading ahead, seen from the engine ---


class TwoBranches(nn.Module):
    """The second layer is used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        x = self.layers[0](x)
        return (self.layers[1](x) if uses_second else x).float().square().mean()


def test_states_that_are_still_being_written_are_not_read_ahead(tmp_path: Path) -> None:
    """A unit that a step leaves out is not waited for in its forward, so its write-back may still be going on."""
    states = {"master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"}
    placement = [{"param": "host", **dict.fromkeys(states, "host")}, {"units": "layers.1", **states}]
    config = settings(tmp_path, placement=placement, gradient_clipping=1.0, update={"chunk_elements": 8192})
    results = []
    for is_slow in (False, True):
        torch.manual_seed(1)
        engine = make_engine(config, TwoBranches())
        nvme = engine.optimizer.runtime.store.nvme
        assert nvme is not None
        for step in range(9):
            batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            loss = engine(batch, step % 3 != 1)
            if is_slow and step % 3 == 0:
                for nth in range(1, 10):
                    nvme.engine.inject("delay", nth, 40)
            engine.backward(loss)
            engine.step()
        results.append(all_states(engine))
        engine.close()
    for name, state in results[0].items():
        assert torch.equal(state, results[1][name]), name


def test_threads_keep_to_the_cores_they_are_given() -> None:
    """In a process of its own: the kernels' threads are shared by all engines of a process."""
    script = """
import os, threading, time, torch
from pathlib import Path
from offloadzero.native import kernels
from offloadzero.update.specs.adam import ADAM
from tests.support.tiny import make_engine, settings

everywhere = os.sched_getaffinity(0)
core = max(everywhere)
values = torch.ones(1 << 22)
kernels.sq_norm(values, num_threads=3)  # threads from before
engine = make_engine(settings(placement="host", update={"cores": [core], "num_threads": 5}))
kernels.sq_norm(values, num_threads=5)

def affinities():
    names = {int(t.name): (t / "comm").read_text().strip() for t in Path("/proc/self/task").iterdir()}
    pool = [os.sched_getaffinity(tid) for tid, name in names.items() if name == "oz-cpu-adam"]
    lanes = {t.name: os.sched_getaffinity(t.native_id) for t in threading.enumerate()}
    return pool, lanes["offloadzero-update"], lanes["offloadzero-landing"]

expected = ([{core}] * 4, {core}, {core})
deadline_s = time.monotonic() + 30
while affinities() != expected and time.monotonic() < deadline_s:
    time.sleep(0.05)  # a thread gives itself its name and its affinity, once it runs
assert affinities() == expected, affinities()
assert os.sched_getaffinity(0) == everywhere
engine.close()
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("update", "cores"),
    [({}, range(2, 8)), ({"num_threads": 3}, ()), ({"cores": [1, 2, 5]}, (1, 2, 5))],
    ids=["by default", "so many threads", "configured"],
)
def test_beside_a_device_the_launching_thread_has_cores_of_its_own(
    update: dict[str, Any], cores: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device waits when the thread that launches does: of eight cores the first two are left to it."""
    kept_to: dict[str, tuple[int, ...]] = {}
    num_threads: list[int | None] = []

    def set_cores(given: Sequence[int]) -> None:
        kept_to[threading.current_thread().name] = tuple(given)

    def made(pipeline: UpdatePipeline, *args: Any, **kwargs: Any) -> None:
        num_threads.append(kwargs["num_threads"])
        init(pipeline, *args, **kwargs)

    init = UpdatePipeline.__init__
    monkeypatch.setattr(UpdatePipeline, "__init__", made)
    monkeypatch.setattr(build, "set_cores", set_cores)
    monkeypatch.setattr(landing, "set_cores", set_cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    with simulated(monkeypatch):
        make_engine(settings(placement="host", update=update)).close()
    expected = ("offloadzero-update", "offloadzero-landing") if cores else ()
    assert kept_to == dict.fromkeys(expected, tuple(cores))
    assert num_threads == [len(cores) or update["num_threads"]]


@pytest.mark.parametrize(("placement", "one_each"), [("host", True), ("nvme", False)])
def test_what_lies_in_host_memory_is_updated_in_one_call(
    placement: str, one_each: bool, tmp_path: Path
) -> None:
    chunks: list[str] = []
    config = make_config(placement, tmp_path, offloadzero={"update": {"chunk_elements": 4096}})
    make_model = functools.partial(nn.Sequential, nn.Linear(96, 96), nn.Linear(96, 96))

    def loop(engine: Any) -> list[float]:
        engine.backward(engine(torch.ones(2, 96, dtype=torch.bfloat16)).float().sum())
        engine.step()
        return []

    with observes("update.compute", before=chunks.append):
        run_engine(make_model, loop, config)
    assert chunks
    assert (len(chunks) == len(set(chunks))) == one_each
