"""Pools, lanes and the tiered store, down to the bytes in the files."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadzero.config import AioConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import AioError, BudgetError, OffloadError
from offloadzero.memory.arena import BufferPool, PooledBuffer, allocate_host
from offloadzero.memory.device import CpuDevice, CudaDevice
from offloadzero.memory.lanes import Accelerator, Lane, LaneTicket
from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.pages import populate
from offloadzero.memory.store import Segment, StoreSizes, TieredStore
from offloadzero.memory.swap_file import MARK_BYTES
from offloadzero.memory.tickets import FINISHED, AllOf, Failures, Promise
from tests.memory.test_arena import arena
from tests.simulated.device import SimulatedDevice
from tests.support.tiny import small_disk

PAGE = 4096
STRIPE = 4 * 1024 * 1024
WAIT_S = 20.0


# --- pools and tickets ---


def test_a_pool_hands_out_each_buffer_once_and_waits() -> None:
    space = arena(2)
    pool = BufferPool([space.lease(PAGE, "0"), space.lease(PAGE, "1")], failures=Failures())
    first, second = pool.take(), pool.take()
    assert first.bytes.data_ptr() != second.bytes.data_ptr()
    assert pool.try_take() is None
    threading.Timer(0.1, lambda: pool.give_back(second)).start()
    assert pool.take().bytes.data_ptr() == second.bytes.data_ptr()


def test_a_pool_tells_its_last_use() -> None:
    pool = BufferPool([arena(1).lease(PAGE, "0")], failures=Failures(), poison=True)
    buffer = pool.take()
    buffer.bytes.fill_(3)
    running = Promise()
    pool.give_back(buffer, last_use=running)
    again = pool.take()
    assert again.last_use is running
    assert bool((again.bytes == 3).all()), "it was poisoned under a transfer"
    pool.give_back(again)
    assert bool((pool.take().bytes == 0xFF).all())


def test_waiting_for_a_buffer_ends_with_the_engine() -> None:
    failures = Failures()
    pool = BufferPool([], failures=failures)
    threading.Timer(0.1, lambda: failures.record(OSError("the disk is gone"))).start()
    with pytest.raises(OSError, match="the disk is gone"):
        pool.take()


def test_all_of_waits_for_all_and_raises_the_first() -> None:
    promises = [Promise() for _ in range(3)]
    both = AllOf(promises)
    promises[2].fail(ValueError("second"))
    promises[0].fail(ValueError("first"))
    assert not both.done()
    threading.Timer(0.1, promises[1].fulfil).start()
    with pytest.raises(ValueError, match="first"):
        both.wait()
    assert promises[1].done()
    assert both.done()


def test_a_promise_hands_on() -> None:
    outer, inner = Promise(), Promise()
    outer.fulfil(inner)
    assert not outer.done()
    inner.fulfil()
    assert outer.done()
    outer.wait()
    AllOf([]).wait()
    FINISHED.wait()


# --- lanes ---


def test_a_lane_keeps_the_order_and_waits_for_its_dependencies() -> None:
    lane = Lane("test", Failures())
    gate = Promise()
    seen: list[int] = []
    tickets = [lane.submit(lambda: seen.append(0), after=[gate])]
    tickets += [lane.submit(lambda i=i: seen.append(i)) for i in range(1, 20)]
    time.sleep(0.05)
    assert seen == []
    assert not tickets[-1].done()
    gate.fulfil()
    tickets[-1].wait()
    assert seen == list(range(20))
    lane.close()
    assert all(ticket.done() for ticket in tickets)
    with pytest.raises(OffloadError, match="closed"):
        lane.submit(lambda: None)


def test_a_ticket_that_is_finished_holds_nothing_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees it and lets go of what was copied is the last to hold it."""
    finish, alive = LaneTicket._finish, []

    def finishing(ticket: LaneTicket, *result: Any, **options: Any) -> None:
        alive.append(reference() is not None)
        finish(ticket, *result, **options)

    monkeypatch.setattr(LaneTicket, "_finish", finishing)
    lane = Lane("test", Failures())
    source = torch.ones(3)
    reference = weakref.ref(source.untyped_storage())
    begun = Promise()
    ticket = lane.submit(partial(torch.Tensor.sum, source.detach()), after=[begun])
    del source
    begun.fulfil()
    ticket.wait()
    assert alive == [False]
    lane.close()


def test_a_failing_task_is_reported_and_the_lane_goes_on() -> None:
    failures = Failures()
    lane = Lane("test", failures)

    def fail() -> None:
        raise ValueError("this one")

    first, second = lane.submit(fail), lane.submit(lambda: None)
    third = lane.submit(lambda: None, after=[first])
    with pytest.raises(ValueError, match="this one"):
        first.wait()
    second.wait()
    with pytest.raises(ValueError, match="this one"):
        third.wait()
    with pytest.raises(ValueError, match="this one"):
        failures.check()
    lane.close()


def test_close_finishes_what_was_submitted() -> None:
    lane = Lane("test", Failures())
    seen: list[int] = []
    for i in range(50):
        lane.submit(lambda i=i: (time.sleep(0.0005), seen.append(i)))
    lane.close()
    assert seen == list(range(50))


# --- the streams that compute: which of them a fence lies on ---


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_memory_is_not_written_while_a_stream_of_an_earlier_step_reads_it(num_steps: int) -> None:
    """Steps without gradients wait for nothing: the stream's work may still lie before it when they are over."""
    simulation = SimulatedDevice(slow=["other"])
    accelerator, other = Accelerator(simulation), simulation.new_stream("other")
    with simulation.dispatching():
        weights = simulation.allocate(4096).fill_(7)
        with simulation.launching_on(other):
            accelerator.join_streams()
            accelerator.note_stream()
            read = weights.clone()
        for _ in range(num_steps):
            accelerator.end_step()
        accelerator.join_streams()
        weights.fill_(8)
        simulation.synchronize()
        assert set(read.tolist()) == {7}
    simulation.close()


def test_a_stream_is_forgotten_when_it_has_done_its_work() -> None:
    simulation = SimulatedDevice()
    accelerator, other = Accelerator(simulation), simulation.new_stream("other")
    with simulation.dispatching():
        memory = simulation.allocate(4096)
        with simulation.launching_on(other):
            accelerator.note_stream()
            memory.fill_(7)
        num_fences = []
        for _ in range(3):
            accelerator.end_step()
            simulation.synchronize()
            num_fences.append(len(accelerator.fence()))
        assert num_fences == [2, 2, 1]
    simulation.close()


# --- the store ---


def store_of(
    *, device: int = 0, host: int = 0, nvme: int = 0, paths: Sequence[Path] = (), accelerator: Any = None
) -> TieredStore:
    return TieredStore(
        accelerator or Accelerator(CpuDevice()),
        sizes=StoreSizes(device=device, host=host, nvme=nvme),
        nvme_paths=paths,
        aio=AioConfig(),
        failures=Failures(),
    )


MakeStore = Callable[..., TieredStore]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    stores: list[TieredStore] = []

    def make(
        num_files: int = 1, *, num_bytes: int = 24 * 1024 * 1024, device: int | None = None
    ) -> TieredStore:
        directories = [tmp_path / f"drive{i}" for i in range(num_files)]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        size = num_bytes if device is None else device
        stores.append(store_of(device=size, host=num_bytes, nvme=num_bytes, paths=directories))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
    assert not list(tmp_path.glob("*/*")), "files are left behind"


def random_tensor(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    raw = random.Random(seed).randbytes(count * dtype.itemsize)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("tier", list(TierName))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.float32])
def test_a_fresh_segment_is_zero(make_store: MakeStore, tier: TierName, dtype: torch.dtype) -> None:
    store = make_store()
    segment = store.create("blocks.0", SegmentKind("exp_avg"), dtype, 10_001, tier)
    assert (segment.label, segment.num_bytes) == ("blocks.0.exp_avg", 10_001 * dtype.itemsize)
    target = torch.ones(10_001, dtype=dtype)
    store.read(segment, target).wait()
    assert not target.any()


@pytest.mark.parametrize("tier", list(TierName))
@pytest.mark.parametrize("num_files", [1, 3])
def test_round_trips_at_odd_places(make_store: MakeStore, tier: TierName, num_files: int) -> None:
    store = make_store(num_files)
    before = store.create("a", SegmentKind.PARAM, torch.bfloat16, 12_345, tier)
    segment = store.create("b", SegmentKind.PARAM, torch.bfloat16, 5_000_017, tier)
    after = store.create("c", SegmentKind.PARAM, torch.float32, 777, tier)
    neighbours = {
        neighbour.label: (neighbour, random_tensor(neighbour.dtype, neighbour.num_elements, seed))
        for seed, neighbour in enumerate((before, after))
    }
    for neighbour, data in neighbours.values():
        store.write(neighbour, data).wait()
    expected = random_tensor(torch.bfloat16, segment.num_elements, 3)
    store.write(segment, expected).wait()
    generator = random.Random(5)
    places = [(0, 1), (1, 1), (199, 4096), (2048, 2048), (segment.num_elements - 1, 1), (2_097_100, 199)]
    places += [
        (start, generator.randint(1, min(3_000_000, segment.num_elements - start)))
        for start in (generator.randrange(segment.num_elements) for _ in range(6))
    ]
    for number, (start, count) in enumerate(places):
        piece = random_tensor(torch.bfloat16, count, 100 + number)
        store.write(segment, piece, start=start).wait()
        expected[start : start + count] = piece
        target = torch.zeros(count, dtype=torch.bfloat16)
        store.read(segment, target, start=start).wait()
        assert bits(target) == bits(piece), (start, count)
    whole = torch.zeros_like(expected)
    store.read(segment, whole).wait()
    assert bits(whole) == bits(expected)
    for neighbour, data in neighbours.values():
        found = torch.zeros_like(data)
        store.read(neighbour, found).wait()
        assert bits(found) == bits(data), f"{neighbour.label} was written over"


def place_of(address: int, num_files: int) -> tuple[int, int]:
    """File and offset of one byte of the striped space: stripes are dealt to the files in turn."""
    stripe = address // STRIPE
    return stripe % num_files, (stripe // num_files) * STRIPE + address % STRIPE


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_the_bytes_lie_in_the_files_where_the_formula_says(make_store: MakeStore, num_files: int) -> None:
    store = make_store(num_files)
    segments = [
        store.create(f"u{i}", SegmentKind.PARAM, torch.float32, count, TierName.NVME)
        for i, count in enumerate((1, 1_500_001, 1_048_576, 2_000_003))
    ]
    contents = [random_tensor(torch.float32, s.num_elements, i) for i, s in enumerate(segments)]
    for segment, data in zip(segments, contents, strict=True):
        store.write(segment, data).wait()
    assert store.nvme is not None
    descriptors = [os.open(path, os.O_RDONLY) for path, _ in store.nvme.files]
    assert [path.parent.name for path, _ in store.nvme.files] == [f"drive{i}" for i in range(num_files)]
    try:
        address = 0
        for segment, data in zip(segments, contents, strict=True):
            raw = bits(data)
            # Whole runs between stripe borders, and every border byte by byte.
            position = 0
            found = bytearray()
            while position < len(raw):
                run = min(STRIPE - (address + position) % STRIPE, len(raw) - position)
                file, offset = place_of(address + position, num_files)
                found += os.pread(descriptors[file], run, MARK_BYTES + offset)
                position += run
            assert bytes(found) == raw, segment.label
            for edge in range(STRIPE - address % STRIPE, len(raw), STRIPE):
                for byte in (edge - 1, edge):
                    file, offset = place_of(address + byte, num_files)
                    assert os.pread(descriptors[file], 1, MARK_BYTES + offset) == raw[byte : byte + 1]
            address += -(-len(raw) // PAGE) * PAGE
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_space_is_reserved_on_disk_at_the_start(make_store: MakeStore, num_files: int) -> None:
    store = make_store(num_files)
    assert store.nvme is not None
    sizes = [size for _, size in store.nvme.files]
    allocated = [path.stat().st_blocks * 512 for path, _ in store.nvme.files]
    assert sum(sizes) >= 24 * 1024 * 1024
    assert all(blocks >= size for blocks, size in zip(allocated, sizes, strict=True)), "a sparse file"
    assert sum(sizes) <= 24 * 1024 * 1024 + num_files * STRIPE


def test_many_transfers_at_once(make_store: MakeStore) -> None:
    store = make_store(2)
    segment = store.create("a", SegmentKind("exp_avg"), torch.float32, 5_000_000, TierName.NVME)
    data = random_tensor(torch.float32, 5_000_000, 1)
    step = 99_991
    AllOf(store.write(segment, data[i : i + step], start=i) for i in range(0, 5_000_000, step)).wait()
    target = torch.zeros_like(data)
    AllOf(store.read(segment, target[i : i + step], start=i) for i in range(0, 5_000_000, step)).wait()
    assert bits(target) == bits(data)


def test_reading_past_the_end_is_an_error_with_a_name(make_store: MakeStore) -> None:
    store = make_store()
    segment = store.create("blocks.3", SegmentKind("exp_avg"), torch.float32, 1024, TierName.NVME)
    with pytest.raises(AioError, match=r"blocks\.3\.exp_avg \(nvme\)") as caught:
        store.read(segment, torch.zeros(2048)).wait()
    assert "past the extent" in str(caught.value)


@pytest.mark.parametrize("tier", list(TierName))
def test_more_than_was_reserved_is_refused(make_store: MakeStore, tier: TierName) -> None:
    store = make_store(
        num_bytes=2 * PAGE if tier is TierName.HOST else PAGE
    )  # of arrays that lie a page apart
    store.create("a", SegmentKind.PARAM, torch.float32, 1024, tier)
    with pytest.raises(BudgetError, match=r"b\.param"):
        store.create("b", SegmentKind.PARAM, torch.float32, 1, tier)


@pytest.mark.parametrize("num_files", [1, 2])
def test_too_little_space_on_a_drive(tmp_path: Path, num_files: int) -> None:
    """The second drive is full: the first one's file goes too."""
    directories = [tmp_path / f"drive{i}" for i in range(num_files)]
    for directory in directories:
        directory.mkdir()
    with small_disk(directories[-1], size="4m") as full:
        with pytest.raises(BudgetError) as caught:
            NvmeTier(directories, num_bytes=32 * 1024 * 1024, aio=AioConfig())
        assert str(full) in str(caught.value)
        assert "4,190,208 are free" in str(caught.value)  # the file's mark takes a block
        assert [os.listdir(directory) for directory in directories] == [[]] * num_files


def test_labels_reach_the_errors_of_both_directions(make_store: MakeStore) -> None:
    store = make_store(2)
    segment: Segment = store.create("blocks.3", SegmentKind.MASTER, torch.int16, 4_000_000, TierName.NVME)
    assert store.nvme is not None
    for verb in ("pread", "pwrite"):
        store.nvme.engine.inject("errno", 1, 5)
        data = torch.zeros(4_000_000, dtype=torch.int16)
        ticket = store.read(segment, data) if verb == "pread" else store.write(segment, data)
        with pytest.raises(AioError) as caught:
            ticket.wait()
        text = str(caught.value)
        assert text.startswith(f"blocks.3.master (nvme): {verb} ")
        assert any(str(path) in text for path, _ in store.nvme.files)
        assert "+0x" in text


class StreamStub:
    """A stream whose work has not ended; without a device only who waits can be seen."""

    def __init__(self) -> None:
        self.waited_for: list[object] = []

    def synchronize(self) -> None:
        self.waited_for.append("all")

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)


def test_closing_a_lane_waits_for_its_stream() -> None:
    """Copies that were only launched still read and write the memory which is given back next."""
    stream: Any = StreamStub()
    device: Any = SimpleNamespace(new_stream=lambda _name: stream)
    lane = Lane("h2d", Failures(), device)
    lane.close()
    lane.close()
    assert stream.waited_for == ["all"]


def test_compute_is_ordered_on_the_device_of_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on cuda:1 is used from a thread whose current device is cuda:0."""
    streams = {torch.device("cuda", index): StreamStub() for index in range(2)}
    current = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[device or current])
    event: Any = SimpleNamespace(device=torch.device("cuda", 1))
    LaneTicket.of(CudaDevice(event.device), event).order_compute()
    assert [stream.waited_for for stream in streams.values()] == [[], [event]]


def test_a_segment_on_the_device_is_zero_before_a_lane_can_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator of a device with memory of its own gives what others have used."""
    waited: list[bool] = []
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda _: 1 << 30)
    accelerator = Accelerator(CpuDevice())
    store = store_of(device=2 * PAGE, accelerator=accelerator)
    store.device.buffer.fill_(1)

    class Launched:
        def wait(self) -> None:
            waited.append(not store.device.buffer[: 4 * 1000].any())

    monkeypatch.setattr(accelerator, "launched", Launched)
    store.create("unit", SegmentKind.PARAM, torch.float32, 1000, TierName.DEVICE)
    assert waited == [True]
    store.close()


def test_arrays_of_two_to_the_k_elements_lie_apart() -> None:
    """[Note: staggered arrays]: at equal offsets modulo 2 MiB an update is much slower."""
    num_elements = 1 << 20
    store = store_of(host=5 * (4 * num_elements + PAGE))
    kinds = (
        SegmentKind.PARAM,
        SegmentKind.MASTER,
        SegmentKind("exp_avg"),
        SegmentKind("exp_avg_sq"),
        SegmentKind.GRAD,
    )
    segments = [store.create("unit", kind, torch.float32, num_elements, TierName.HOST) for kind in kinds]
    assert len({segment.memory.data_ptr() % (2 << 20) for segment in segments}) == len(segments)
    assert all(segment.memory.numel() == num_elements for segment in segments)
    store.close()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AioError, match=r"open .*missing/offloadzero-.*No such file"):
        NvmeTier([tmp_path / "missing"], num_bytes=PAGE, aio=AioConfig())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_buffer_is_poisoned_only_where_the_fill_is_over_at_once(device: str) -> None:
    fills: list[int] = []
    memory: Any = SimpleNamespace(device=torch.device(device), fill_=fills.append)
    BufferPool([], failures=Failures(), poison=True).give_back(PooledBuffer(memory))
    assert fills == ([0xFF] if device == "cpu" else [])


@pytest.mark.parametrize("num_threads", [1, 4, 64])
def test_populated_memory_keeps_what_is_in_it(num_threads: int) -> None:
    """Also by more threads than there are pages, and of a size that is no multiple of them."""
    buffer = allocate_host(5 * PAGE + 17)
    buffer[PAGE + 3] = 7
    populate(buffer, num_threads=num_threads)
    assert buffer.sum() == 7
    populate(buffer[:0], num_threads=num_threads)


# --- homes on a device whose memory is the host's ---


def resident_pages(memory: torch.Tensor) -> int:
    """Of a mapping of its own, by the bit of /proc/self/pagemap that says a page has memory."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(memory.data_ptr() // 4096 * 8)
        entries = file.read(-(-memory.numel() // 4096) * 8)
    return sum(entries[at] >> 7 for at in range(7, len(entries), 8))


def test_homes_in_ordinary_memory_are_zero_and_have_no_pages_until_they_are_used(tmp_path: Path) -> None:
    """Else a model on the CPU would be there twice while its parameters are taken over one after the other."""
    store = store_of(device=64 << 20, paths=[tmp_path])
    homes = [
        store.create("block", kind, torch.float32, 5 << 20, TierName.DEVICE)
        for kind in (SegmentKind.MASTER, SegmentKind.GRAD, SegmentKind.PARAM)
    ]
    try:
        assert resident_pages(store.device.buffer) == 0
        homes[1].memory[:7] = 1.0
        assert 1 <= resident_pages(store.device.buffer) <= 512, "one page, perhaps a huge one"
        assert [int(home.memory.count_nonzero()) for home in homes] == [0, 7, 0]
    finally:
        store.close()


# --- its end, where one of its parts fails ---


def test_a_device_that_fails_at_the_end_leaves_no_files_and_nothing_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of gigabytes would stay on the drives until the next start."""
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    store = store_of(device=STRIPE, host=STRIPE, nvme=4 * STRIPE, paths=directories)
    store.pin()
    assert len(list(tmp_path.glob("*/*"))) == 2
    unpinned: list[Any] = []

    with monkeypatch.context() as broken:
        broken.setattr(store.on_device, "close", _raiser("device-side assert triggered"))
        broken.setattr(store.accelerator, "unpin", unpinned.append)
        with pytest.raises(RuntimeError, match="device-side assert"):
            store.close()
    assert not list(tmp_path.glob("*/*"))
    assert [memory.data_ptr() for memory in unpinned] == [store.host.buffer.data_ptr()]
    store.close()


def test_a_store_that_cannot_be_made_ends_its_lanes_whatever_fails_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that fails at its end would leave the threads of the device's lanes for good."""
    monkeypatch.setattr("offloadzero.memory.store.HostTier", _raiser("no memory"))
    monkeypatch.setattr(NvmeTier, "close", _raiser("the drive is gone"))
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="the drive is gone") as raised:
        store_of(device=STRIPE, host=STRIPE, nvme=STRIPE, paths=[tmp_path])
    assert "no memory" in str(raised.value.__context__)
    assert set(threading.enumerate()) <= before


def _raiser(text: str) -> Any:
    def fail(*_: Any) -> None:
        raise RuntimeError(text)

    return fail
