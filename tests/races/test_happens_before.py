"""The happens-before checker: it sees what nothing orders, whatever the run did, and only that."""

from __future__ import annotations

import inspect
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.arithmetic import device_math
from offloadzero.config import AioConfig
from offloadzero.memory.arena import BufferPool, PooledBuffer, allocate_host
from offloadzero.memory.lanes import Accelerator, Lane
from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.tickets import Failures, Promise
from offloadzero.native import kernels
from tests.simulated import edges, mutations, removals, small_loops, small_runs
from tests.simulated.checked import checked
from tests.simulated.device import SimulatedDevice, simulated
from tests.simulated.order import Order, RaceError
from tests.streaming.loops import MODELS, take_inputs
from tests.support.cases import each_pair
from tests.support.homes import file_home
from tests.support.models import Stack, features
from tests.support.training import assert_same, make_config, merge, one_step, run_engine

BASE = 1 << 20  # an address
ALL = os.environ.get("OFFLOADZERO_TEST_MUTATIONS") == "all"  # runs and mutants


def races_of(order: Order) -> list[tuple[str, str]]:
    """The labels of the accesses."""
    return [(race.first.label, race.second.label) for race in order.races]


@pytest.fixture
def order() -> Order:
    order = Order()
    order.track(BASE, 4096, "memory")
    return order


# --- clocks and bytes


def test_an_order_is_what_was_released_and_acquired(order: Order) -> None:
    one, two, three = (order.agent(name) for name in ("one", "two", "three"))
    order.access(one, BASE, 100, writes=True, label="first")
    two.acquire(one.release())
    order.access(one, BASE + 100, 100, writes=True, label="after the release")
    three.acquire(two.release())
    order.access(three, BASE, 100, writes=True, label="by way of two")
    assert order.races == []
    order.access(three, BASE + 50, 100, writes=False, label="too early")
    assert races_of(order) == [("after the release", "too early")]
    assert order.races[0].num_bytes == 50


def test_tracking_anew_forgets(order: Order) -> None:
    one, two = order.agent("one"), order.agent("two")
    order.access(one, BASE, 64, writes=True, label="a")
    order.track(BASE, 4096, "other memory")
    order.access(two, BASE, 64, writes=True, label="b")
    assert order.races == []


def test_memory_goes_back_after_all_uses(order: Order) -> None:
    owner, copying = order.agent("compute"), order.agent("d2h")
    copying.acquire(owner.release())
    order.access(copying, BASE, 64, writes=False, label="copy")
    event = copying.release()
    order.free(BASE, 4096, owner)
    order.access(owner, BASE, 64, writes=True, label="allocated")
    assert races_of(order) == [("copy", "given back")]
    order.races.clear()
    order.acquire(event)
    order.free(BASE, 4096, owner)
    order.access(copying, BASE, 64, writes=False, label="after its end")
    assert races_of(order) == [("given back", "after its end")]


def test_a_transfer_takes_the_place_of_one_that_was_waited_for(order: Order) -> None:
    first = order.transfer("read")
    second = order.transfer("read")
    assert first is not second
    order.acquire(first.release())
    assert order.transfer("write") is first
    assert first.name == "write"


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_by_the_whole_graph(seed: int) -> None:
    """The oracle keeps every access and every edge and looks for a path between each two that conflict."""
    draw = random.Random(seed)
    order = Order()
    order.track(BASE, 64, "memory")
    agents = [order.agent(str(number)) for number in range(4)]
    last = [-1] * len(agents)
    before: list[set[int]] = []  # of each event: those that came before it
    accesses: list[tuple[int, int, int, bool]] = []  # event, start, end, writes
    messages: list[tuple[Any, int]] = []
    raced = False

    def event(number: int, *others: int) -> int:
        known = {last[number], *others} - {-1}
        before.append(known.union(*(before[other] for other in known)) if known else set())
        last[number] = len(before) - 1
        return last[number]

    for _ in range(draw.randrange(5, 60)):
        number = draw.randrange(len(agents))
        agent = agents[number]
        kind = draw.choice(("release", "acquire", "access"))
        if kind == "release":
            messages.append((agent.release(), event(number)))
        elif kind == "acquire" and messages:
            clock, sent = draw.choice(messages)
            agent.acquire(clock)
            event(number, sent)
        else:
            start = draw.randrange(60)
            end, writes = start + draw.randrange(1, 64 - start + 1), draw.random() < 0.4
            here = event(number)
            raced = raced or any(
                (writes or other_writes)
                and start < other_end
                and other_start < end
                and other not in before[here]
                for other, other_start, other_end, other_writes in accesses
            )
            accesses.append((here, start, end, writes))
            order.access(agent, BASE + start, end - start, writes=writes, label="")
        assert bool(order.races) == raced


# --- what orders the host's threads

Handing = Callable[[Callable[[], None]], None]  # runs a call elsewhere, and comes after it


def by_ticket(task: Callable[[], None]) -> None:
    lane = Lane("test", Failures())
    lane.submit(task).wait()
    lane.close()


def by_looking(task: Callable[[], None]) -> None:
    lane = Lane("test", Failures())
    ticket = lane.submit(task)
    while not ticket.done():
        pass
    lane.close()


def by_closing(task: Callable[[], None]) -> None:
    lane = Lane("test", Failures())
    lane.submit(task)
    lane.close()


def by_promise(task: Callable[[], None]) -> None:
    promise = Promise()
    thread = threading.Thread(target=lambda: (task(), promise.fulfil()))
    thread.start()
    promise.wait()


def by_pool(task: Callable[[], None]) -> None:
    pool = BufferPool((), failures=Failures())

    def run() -> None:
        task()
        pool.give_back(PooledBuffer(torch.empty(1, dtype=torch.uint8)))

    threading.Thread(target=run).start()
    pool.take()


def by_luck(task: Callable[[], None]) -> None:
    """It is over, and nothing that is made for it says so."""
    seen: list[int] = []
    threading.Thread(target=lambda: (task(), seen.append(1))).start()
    while not seen:
        pass


@pytest.mark.parametrize("handing", [by_ticket, by_looking, by_closing, by_promise, by_pool, by_luck])
@pytest.mark.parametrize("operation", ["copy_", "kernel"])
def test_a_thread_comes_after_what_it_has_waited_for(handing: Handing, operation: str) -> None:
    source = torch.ones(64)
    with pytest.raises(RaceError) if handing is by_luck else nullcontext(), checked() as order:
        target = torch.zeros(64)
        order.track_storage(target, "the target")
        target.fill_(2.0)
        handing(lambda: _write(operation, target, source))
        assert float(target.sum()) == 64.0
        assert order.num_accesses >= 3


def _write(operation: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if operation == "kernel":
        kernels.copy(target, source)
    else:
        target.copy_(source)


def test_every_host_kernel_is_recorded() -> None:
    """What takes tensors and is not listed would be an access that nobody sees."""
    for module, named in edges.KERNELS.items():
        for name, function in inspect.getmembers(module, inspect.isfunction):
            takes = [str(p.annotation) for p in inspect.signature(function).parameters.values()]
            is_kernel = function.__module__ == module.__name__ and any("Tensor" in kind for kind in takes)
            unused = name in ("compact_encode", "compact_decode") or name.startswith("_")
            # What these tell of a tensor is no access to its memory.
            unused = unused or name in ("address", "describe", "float_code", "layout_code", "typed_address")
            assert not is_kernel or unused or name in named, name


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_file_transfer_is_over_when_it_was_waited_for(waits: bool, checksums: bool, tmp_path: Path) -> None:
    config = AioConfig(checksums=checksums)
    with nullcontext() if waits else pytest.raises(RaceError, match="file write reads"), checked() as order:
        tier = NvmeTier([tmp_path], num_bytes=1 << 20, aio=config)
        buffer = allocate_host(8192)
        order.track_storage(buffer, "the buffer")
        buffer.fill_(3)
        home = file_home(tier, 0, 8192)
        ticket = tier.write(home, buffer)
        if waits:
            ticket.wait()
        buffer.fill_(4)
        ticket.wait()
        again = tier.read(home, buffer)
        again.wait()
        tier.close()


def test_a_read_of_a_file_range_comes_after_its_write(tmp_path: Path) -> None:
    def read_under_way() -> None:
        tier = NvmeTier([tmp_path], num_bytes=1 << 20, aio=AioConfig(checksums=False))
        home = file_home(tier, 4096, 4096)
        one, two = allocate_host(4096), allocate_host(4096)
        written = tier.write(home, one)
        read = tier.read(home, two)
        written.wait()
        read.wait()
        tier.close()

    with pytest.raises(RaceError, match=r"of the files\+0x1000"), checked():
        read_under_way()


# --- streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Order, SimulatedDevice]]:
    with checked() as order, simulated(monkeypatch) as device:
        yield order, device
        order.settle()
        order.races.clear()  # the test has looked at them


@pytest.mark.parametrize("edge", ["event", "host", "look", "none"])
def test_a_stream_comes_after_an_event(edge: str, streams: tuple[Order, SimulatedDevice]) -> None:
    order, device = streams
    machine = device.machine
    other = machine.new_stream("other")
    memory = device.allocate(256)
    with device.launching_on(other):
        other.wait_event(device.record(machine.default_stream))
        memory.fill_(1)
        event = device.record(other)
    if edge == "event":
        machine.default_stream.wait_event(event)
    elif edge == "host":
        event.synchronize()
    while edge == "look" and not event.query():
        pass
    memory.add_(1)
    expected = [] if edge != "none" else [("aten.fill_.Scalar", "aten.add_.Tensor")]
    assert races_of(order) == expected


def test_memory_is_taken_by_the_current_stream(streams: tuple[Order, SimulatedDevice]) -> None:
    order, device = streams
    memory = device.allocate(256)
    with device.launching_on(device.machine.new_stream("other")):
        memory.fill_(1)
    assert races_of(order) == [("allocated", "aten.fill_.Scalar")]


def test_memory_that_goes_back_under_a_copy(streams: tuple[Order, SimulatedDevice]) -> None:
    order, device = streams
    machine, target = device.machine, allocate_host(256)
    memory = device.allocate(256)
    other = machine.new_stream("d2h")
    other.wait_event(device.record(machine.default_stream))
    with device.launching_on(other):
        device.copy(target, memory)
    del memory
    order.settle()
    assert races_of(order) == [("copy of copy", "given back")]


# --- the engine


@pytest.mark.parametrize(
    ("name", "placement", "clipping"),
    each_pair(
        ["plain blocks", "tied head", "checkpointing", "unused parameters"],
        ["host", "nvme", "mixed"],
        [0.0, 0.5],
        in_full=ALL,
    ),
)
def test_the_lanes_of_the_cpu(name: str, placement: str, clipping: float, tmp_path: Path) -> None:
    make_model, make_input, over = MODELS[name]
    config = make_config(placement, tmp_path, clipping=clipping, **over)
    with checked() as order:
        run_engine(make_model, take_inputs(make_input), config)
    assert order.num_accesses > 100


# Each sixth, and two that were wrong: a file written under the read ahead of it, which would find what no checksum is
# of; an input whose memory went back to the stream that computed it, while another one's forward ran.
ALWAYS = ("edits before the step", "activations that grow, in turns")
NAMES = list(small_runs.RUNS)


@pytest.mark.parametrize("name", NAMES if ALL else sorted({*NAMES[::6], *ALWAYS}, key=NAMES.index))
def test_small_runs(name: str) -> None:
    digest, races = small_runs.run(name)
    assert re.fullmatch("[0-9a-f]{64}", digest), digest
    assert not races, "\n".join(races)


def test_norms_of_a_window_that_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a gradient on the device are taken on another stream, after all micro batches have added to it."""
    config = make_config("resident", tmp_path, clipping=0.5, accumulation=2)
    with checked(), simulated(monkeypatch) as device:
        monkeypatch.setattr(small_runs.Running, "machine", device.machine)
        run_engine(Stack, small_loops.train_on_its_own_stream, config)


def drop_gradients(engine: Any) -> list[float]:
    """Each other one is dropped while its norms are taken, and the next backward writes to its place."""
    losses = []
    for seed in range(4):
        engine.backward(loss := engine(features(seed)))
        if seed % 2:
            engine.step()
        else:
            engine.optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def test_norms_of_gradients_that_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next backward writes to where they are after the norms have been taken, on another stream."""
    config = make_config("resident", tmp_path, clipping=0.5)
    expected = run_engine(Stack, drop_gradients, config)
    with checked(), simulated(monkeypatch, slow=["landing"]):
        assert_same(run_engine(Stack, drop_gradients, config), expected)


def test_norms_do_not_queue_behind_the_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are launched on a stream that is not one of those which compute."""
    taken_on: list[str] = []
    sq_norms = device_math.sq_norms
    with simulated(monkeypatch) as device:

        def noted(*args: Any, **kwargs: Any) -> Any:
            taken_on.append(device.machine.current_stream.name)
            return sq_norms(*args, **kwargs)

        monkeypatch.setattr(device_math, "sq_norms", noted)
        run_engine(Stack, take_inputs(features), make_config("resident", tmp_path, clipping=0.5))
    assert len(taken_on) > 10
    assert set(taken_on) == {"landing"}


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("max_live", [1, 1_000_000], ids=["one unit", "all units"])
def test_two_streams_that_only_read_weights(
    poison: bool, max_live: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations on two streams share nothing but weights: in torch they need no order."""
    config = make_config("host", tmp_path)
    config["zero_optimization"]["stage3_max_live_parameters"] = max_live
    config["offloadzero"]["poison_released_leases"] = poison
    with checked(), simulated(monkeypatch) as device:
        engine, *_ = offloadzero.initialize(model=Stack(), config=config)
        streams = [device.new_stream(name) for name in ("one", "two")]
        device.synchronize()
        with torch.no_grad():
            for number in range(4):
                with device.launching_on(streams[number % 2]):
                    engine(features(number))
        device.synchronize()
        engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fences", [True, False])
@pytest.mark.parametrize("placement", ["host", "nvme", "mixed"])
def test_on_cuda(fences: bool, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = merge(make_config(placement, tmp_path), {"offloadzero": {"device": "cuda"}})
    if not fences:
        monkeypatch.setattr(Accelerator, "fence", lambda _accelerator: ())
    with nullcontext() if fences else pytest.raises(RaceError), checked() as order:
        run_engine(Stack, lambda engine: train_on_device(engine), config)
        assert order.num_accesses > 100


def train_on_device(engine: Any) -> list[float]:
    return [one_step(engine, features(seed).cuda()) for seed in range(3)]


# --- mutants

SOME = (
    "_launch: no self._stream.wait_event",
    "order_compute: no stream.wait_event",
    "write_back: AllOf without *writes",
    "--runs=mixed, in backward",
)


def test_every_mutant_has_a_place_of_its_own() -> None:
    found = removals.mutations()
    assert len(found) > 80
    assert len(set(found)) == len(found)
    keys = {mutation.key for mutation in found}
    assert len(keys) == len(found)
    assert not set(mutations.REDUNDANT) - keys
    assert not set(mutations.NUMBERS_ALONE) - keys
    assert not set(mutations.NUMBERS_ALONE) & set(mutations.REDUNDANT)


@pytest.mark.slow
def test_mutants_are_caught() -> None:
    """Each order of the device path, removed: OFFLOADZERO_TEST_MUTATIONS=all takes half an hour for it."""
    command = [sys.executable, "-m", "tests.simulated.mutations", *(() if ALL else SOME)]
    done = subprocess.run(command, cwd=removals.ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
