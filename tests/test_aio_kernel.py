"""Deadlines, cancellation, registered buffers, the ways of io_uring, and little locked memory."""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from offloadzero.errors import AioError, ConfigError, StateError
from offloadzero.native.aio import AioDeadlineError, AioEngine, UringOptions

REPOSITORY = Path(__file__).resolve().parent.parent
BACKENDS = ["io_uring", "native_aio", "aiofiles"]
MIB = 1 << 20
BLOCK = 16384
DEPTH = 4
WAIT_S = 30.0
LONG_MS = 3_600_000


def make_engine(backend: str, uring: UringOptions | None = None, **options: int) -> AioEngine:
    try:
        return AioEngine(backend=backend, uring=uring, **options)
    except ConfigError as refusal:
        if "not available here" in str(refusal):
            pytest.skip(str(refusal))
        raise


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[AioEngine]:
    made = make_engine(request.param, block_size=BLOCK, queue_depth=DEPTH)
    yield made
    made.close(cancel=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    name = tmp_path / "states.bin"
    name.write_bytes(random.Random(3).randbytes(16 * BLOCK))
    return name


def aligned(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + num_bytes]


def aligned_copy(data: bytes) -> np.ndarray:
    copy = aligned(len(data))
    copy[:] = np.frombuffer(data, np.uint8)
    return copy


def wait_for_blocks(engine: AioEngine, num_blocks: int) -> None:
    """Until so many have begun."""
    limit_s = time.monotonic() + WAIT_S
    while engine.stats()["blocks"] < num_blocks:
        assert time.monotonic() < limit_s
        time.sleep(0.001)


class TestDeadline:
    @pytest.mark.alone
    def test_the_caller_learns_at_once_and_the_buffer_is_kept(self, engine: AioEngine, path: Path) -> None:
        file = engine.open(path)
        engine.inject("delay", 2, 1000)
        buffer = aligned(4 * BLOCK)
        is_alive = weakref.ref(buffer)
        begin = time.monotonic()
        ticket = engine.read(file, buffer, offset=0, deadline_s=0.05, label="layers.1")
        with pytest.raises(AioDeadlineError) as caught:
            ticket.wait(WAIT_S)
        waited_s = time.monotonic() - begin
        assert 0.05 <= waited_s < 0.95
        del buffer
        assert not ticket.wait_released(0.0)
        assert is_alive() is not None
        assert isinstance(caught.value, AioError)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.errno, caught.value.label) == (errno.ETIMEDOUT, "layers.1")
        assert ticket.done()
        assert ticket.wait_released(WAIT_S)
        assert time.monotonic() - begin >= 1.0
        engine.write(file, b"", offset=0).wait(WAIT_S)  # collects what is released
        gc.collect()
        assert is_alive() is None
        with pytest.raises(AioDeadlineError):
            ticket.wait()

    def test_what_has_not_started_never_does(self, engine: AioEngine, path: Path) -> None:
        before = path.read_bytes()
        file = engine.open(path)
        for nth in range(1, 5):
            engine.inject("delay", nth, 200)
        blockers = [engine.write(file, before[:BLOCK], offset=0) for _ in range(4)]
        late = engine.write(file, bytes(8 * BLOCK), offset=4 * BLOCK, deadline_s=0.0)
        assert late.done()
        with pytest.raises(AioDeadlineError):
            late.wait(0.0)
        for ticket in blockers:
            ticket.wait(WAIT_S)
        assert late.wait_released(WAIT_S)
        assert path.read_bytes() == before

    def test_in_time(self, engine: AioEngine, path: Path) -> None:
        back = bytearray(5000)
        engine.read(engine.open(path), back, offset=77, deadline_s=WAIT_S).wait()
        assert back == path.read_bytes()[77:5077]

    def test_a_shorter_timeout_comes_first(self, engine: AioEngine, path: Path) -> None:
        file = engine.open(path)
        engine.inject("delay", 1, 150)
        ticket = engine.read(file, bytearray(BLOCK), offset=0, deadline_s=WAIT_S)
        with pytest.raises(TimeoutError) as caught:
            ticket.wait(0.01)
        assert not isinstance(caught.value, AioError)
        ticket.wait(WAIT_S)

    @pytest.mark.parametrize("is_cancelled", [True, False])
    def test_passes_over_an_earlier_failure(self, engine: AioEngine, path: Path, is_cancelled: bool) -> None:
        # Otherwise the caller would take the buffer for free while a block is in flight.
        file = engine.open(path)
        engine.inject("delay", 1, 300)
        if not is_cancelled:
            engine.inject("errno", 2, errno.EIO)
        ticket = engine.read(file, aligned(16 * BLOCK), offset=0, deadline_s=0.1)
        while engine.stats()["blocks"] == 0:
            time.sleep(0.001)
        if is_cancelled:
            ticket.cancel()
        with pytest.raises(AioDeadlineError):
            ticket.wait(WAIT_S)
        assert not ticket.wait_released(0.0)
        assert ticket.wait_released(WAIT_S)

    def test_negative(self, engine: AioEngine, path: Path) -> None:
        with pytest.raises(ConfigError, match="deadline_s"):
            engine.read(engine.open(path), bytearray(1), offset=0, deadline_s=-1.0)


class TestCancel:
    def test_drops_what_has_not_started(self, engine: AioEngine, path: Path) -> None:
        before = path.read_bytes()
        file = engine.open(path)
        for nth in range(1, DEPTH + 1):
            engine.inject("delay", nth, LONG_MS)
        first = engine.write(file, aligned_copy(before[: DEPTH * BLOCK]), offset=0)
        wait_for_blocks(engine, DEPTH)  # all places in the queue are taken: nothing else begins
        queued = [engine.write(file, bytes(4 * BLOCK), offset=0) for _ in range(10)]
        assert [ticket.cancel() for ticket in queued] == [True] * 10
        assert not first.done()
        assert not first.cancel()
        engine.close(cancel=True)  # ends the delays
        first.wait(WAIT_S)
        for ticket in queued:
            with pytest.raises(AioError) as caught:
                ticket.wait(WAIT_S)
            assert caught.value.errno == errno.ECANCELED
            assert "engine was closed" not in str(caught.value)
            assert ticket.wait_released(0.0)
            assert not ticket.cancel()
        assert path.read_bytes() == before

    def test_of_one_in_flight_waits_for_its_blocks(self, engine: AioEngine, path: Path) -> None:
        file = engine.open(path)
        engine.inject("delay", 1, 150)
        num_bytes = 15 * BLOCK
        begin = time.monotonic()
        ticket = engine.read(file, aligned(num_bytes), offset=0)
        if not ticket.cancel():
            ticket.wait(WAIT_S)  # all of it was in the kernel already
            return
        with pytest.raises(AioError):
            ticket.wait(WAIT_S)
        assert ticket.wait_released(0.0)
        assert time.monotonic() - begin >= 0.15 or engine.stats()["blocks"] == 0

    def test_after_close(self, engine: AioEngine, path: Path) -> None:
        ticket = engine.write(engine.open(path), b"x", offset=0)
        engine.close()
        assert not ticket.cancel()
        ticket.wait()


class TestRegisteredBuffers:
    def test_transfers_use_them(self, path: Path) -> None:
        with make_engine("io_uring", block_size=BLOCK) as engine, engine.open(path) as file:
            arena = aligned(64 * BLOCK)
            assert engine.buffers_reason == "none registered"
            if not engine.register_buffer(arena):
                pytest.skip(engine.buffers_reason)
            assert engine.buffers_reason == "registered"
            assert engine.stats()["registered_bytes"] == arena.nbytes
            engine.read(file, arena[: 16 * BLOCK], offset=0).wait(WAIT_S)
            engine.read(file, arena[20 * BLOCK + 1 : 36 * BLOCK + 1], offset=0).wait(WAIT_S)
            expected = path.read_bytes()
            assert (
                arena[: 16 * BLOCK].tobytes() == arena[20 * BLOCK + 1 : 36 * BLOCK + 1].tobytes() == expected
            )
            num_fixed = engine.stats()["fixed"]
            assert num_fixed >= 16
            engine.write(file, arena[: 16 * BLOCK], offset=BLOCK).wait(WAIT_S)
            assert engine.stats()["fixed"] == num_fixed + 16
            assert path.read_bytes() == expected[:BLOCK] + expected
            engine.unregister_buffer(arena)
            assert engine.stats()["registered_bytes"] == 0
            engine.read(file, arena[: 16 * BLOCK], offset=0).wait(WAIT_S)
            assert engine.stats()["fixed"] == num_fixed + 16

    def test_are_kept_alive_until_they_are_given_back(self, path: Path) -> None:
        with make_engine("io_uring", num_threads=2) as engine, engine.open(path) as file:
            tensor = torch.zeros(MIB, dtype=torch.uint8)
            if not engine.register_buffer(tensor):
                pytest.skip(engine.buffers_reason)
            is_alive = weakref.ref(tensor)
            engine.read(file, tensor[: 16 * BLOCK], offset=0).wait(WAIT_S)
            assert bytes(tensor[: 16 * BLOCK].numpy()) == path.read_bytes()
            del tensor
            gc.collect()
            assert is_alive() is not None
        gc.collect()
        assert is_alive() is None

    def test_other_backends_say_so(self, path: Path) -> None:
        for name in BACKENDS[1:]:
            with make_engine(name) as engine, engine.open(path) as file:
                arena = aligned(16 * BLOCK)
                assert not engine.register_buffer(arena)
                assert engine.buffers_reason == f"{name} has none"
                engine.read(file, arena, offset=0).wait(WAIT_S)
                assert arena.tobytes() == path.read_bytes()
        with make_engine("io_uring", UringOptions(fixed_buffers=False)) as engine:
            assert not engine.register_buffer(aligned(BLOCK))
            assert engine.buffers_reason == "io_uring has none"

    def test_mistakes(self) -> None:
        engine = make_engine("io_uring")
        arena = aligned(4 * BLOCK)
        if not engine.register_buffer(arena):
            pytest.skip(engine.buffers_reason)
        for overlapping in (arena, arena[:1], arena[BLOCK:]):
            with pytest.raises(ConfigError, match="overlap"):
                engine.register_buffer(overlapping)
        for unknown in (aligned(BLOCK), arena[BLOCK:]):
            with pytest.raises(ConfigError, match="registered"):
                engine.unregister_buffer(unknown)
        with pytest.raises(ConfigError, match="writable"):
            engine.register_buffer(b"constant")
        assert engine.register_buffer(bytearray())
        engine.close()
        with pytest.raises(StateError):
            engine.register_buffer(aligned(BLOCK))

    def test_slots_run_out(self) -> None:
        with make_engine("io_uring") as engine:
            arena = aligned(1100 * 4096)
            pieces = [arena[k * 4096 : (k + 1) * 4096] for k in range(1100)]
            if not engine.register_buffer(pieces[0]):
                pytest.skip(engine.buffers_reason)
            taken = [engine.register_buffer(piece) for piece in pieces[1:]]
            assert taken == [True] * 1023 + [False] * 76
            assert engine.buffers_reason == "io_uring: ENOSPC"
            engine.unregister_buffer(pieces[5])
            assert engine.register_buffer(pieces[-1])


class TestUringOptions:
    @pytest.mark.parametrize(
        "uring",
        [
            UringOptions(fixed_files=False, fixed_buffers=False, defer_taskrun=False),
            UringOptions(defer_taskrun=False),
            UringOptions(sqpoll=True),
            UringOptions(iopoll=True),
        ],
    )
    def test_every_way_moves_the_same_bytes(self, uring: UringOptions, path: Path) -> None:
        model = bytearray(path.read_bytes())
        rng = random.Random(11)
        with make_engine("io_uring", uring, block_size=BLOCK, queue_depth=8) as engine:
            assert engine.uring is uring
            with engine.open(path) as file:
                arena = aligned(20 * BLOCK)
                engine.register_buffer(arena)
                for _ in range(60):
                    begin = rng.choice([0, BLOCK, rng.randrange(8 * BLOCK)])
                    size = rng.choice([1, 4096, 8 * BLOCK, rng.randrange(8 * BLOCK)])
                    data = rng.randbytes(size)
                    arena[:size] = np.frombuffer(data, np.uint8)
                    engine.write(file, arena[:size], offset=begin).wait(WAIT_S)
                    model[begin : begin + size] = data
                    back = arena[10 * BLOCK : 10 * BLOCK + len(model) // 2]
                    engine.read(file, back, offset=begin).wait(WAIT_S)
                    assert back.tobytes() == model[begin : begin + len(back)]
        assert path.read_bytes() == model

    def test_not_both_kinds_of_polling(self) -> None:
        with pytest.raises(ConfigError, match="not together with sqpoll"):
            AioEngine(uring=UringOptions(sqpoll=True, iopoll=True))


class TestDescriptors:
    @pytest.mark.alone  # others take and give back space on the same drive
    def test_a_registered_file_does_not_outlive_its_close(self, tmp_path: Path) -> None:
        """Its slot would keep the disk space of a removed file."""
        with make_engine("io_uring") as engine:
            path = tmp_path / "large"
            file = engine.open(path, create=True)
            file.preallocate(256 * MIB)
            engine.write(file, bytes(BLOCK), offset=0).wait(WAIT_S)
            before = os.statvfs(tmp_path).f_bfree
            path.unlink()
            file.close()
            limit = time.monotonic() + WAIT_S
            while os.statvfs(tmp_path).f_bfree < before + 128 * MIB // 4096 and time.monotonic() < limit:
                time.sleep(0.01)
            assert os.statvfs(tmp_path).f_bfree >= before + 128 * MIB // 4096

    def test_none_is_left(self, tmp_path: Path) -> None:
        num_before = len(os.listdir("/proc/self/fd"))
        for name in BACKENDS:
            for _ in range(3):
                with make_engine(name, num_threads=2) as engine:
                    files = [engine.open(tmp_path / str(k), create=True) for k in range(20)]
                    tickets = [engine.write(file, b"d" * 5000, offset=9) for file in files]
                    for ticket in tickets:
                        ticket.wait(WAIT_S)
        del engine, files, tickets
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == num_before


class TestLockedMemory:
    SCRIPT = """
        import ctypes, random, resource, struct, sys
        import numpy as np
        from offloadzero.native.aio import AioEngine

        # Even for root the limit holds: out with CAP_IPC_LOCK.
        libc = ctypes.CDLL(None, use_errno=True)
        header, data = struct.pack("II", 0x20080522, 0), ctypes.create_string_buffer(24)
        assert libc.capget(header, data) == 0
        words = list(struct.unpack("6I", data.raw))
        words[0] &= ~(1 << 14)
        assert libc.capset(header, struct.pack("6I", *words)) == 0

        name, path, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        rng = random.Random(7)
        with AioEngine(backend=name, queue_depth=32) as engine, engine.open(path, create=True) as file:
            memory = np.zeros(32 << 20, np.uint8)
            small, large = memory[: 16 << 10], memory[64 << 10 :]
            can_register = engine.register_buffer(small)
            print(can_register, engine.buffers_reason, sep="; ")
            print(engine.register_buffer(large), engine.buffers_reason, sep="; ")
            model = bytearray(20_000_000)
            tickets = [engine.write(file, model, offset=0)]
            for _ in range(50):
                for ticket in tickets:
                    ticket.wait()
                part = large if rng.random() < 0.8 else small
                size = rng.randrange(min(len(part), 3_000_000))
                begin, start = rng.randrange(15_000_000), rng.randrange(len(part) - size)
                part[start : start + size] = np.frombuffer(rng.randbytes(size), np.uint8)
                model[begin : begin + size] = part[start : start + size].tobytes()
                tickets = [engine.write(file, part[start : start + size], offset=begin)]
            tickets[0].wait()
            back = bytearray(len(model))
            engine.read(file, back, offset=0).wait()
            assert back == model
        print("fine")
    """

    @pytest.mark.parametrize("limit", [8 * MIB, 65536])
    @pytest.mark.parametrize("name", BACKENDS)
    def test_a_refused_buffer_is_visible_and_harmless(self, name: str, limit: int, tmp_path: Path) -> None:
        make_engine(name).close()
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(self.SCRIPT),
            name,
            str(tmp_path / "data"),
            str(limit),
        ]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        small, large, end = done.stdout.splitlines()
        assert end == "fine"
        if name != "io_uring":
            assert small == large == f"False; {name} has none"
        else:
            refused = f"False; io_uring: ENOMEM (RLIMIT_MEMLOCK is {limit} bytes)"
            without_tables = "False; io_uring has none"  # an older kernel
            # The limit counts what all processes of the user have locked: others may leave no room at all.
            assert small in ("True; registered", refused, without_tables)
            assert large == (without_tables if small == without_tables else refused)
