"""Timeouts, registered buffers, descriptors, and little locked memory."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offloadzero.errors import AioError, AioTimeoutError, ConfigError, StateError
from offloadzero.io.engine import AioEngine
from tests.io.engines import BACKENDS, BLOCK, DEPTH, MIB, aligned, make_engine, run_script

WAIT_S = 30.0
LONG_MS = 3_600_000
TIMEOUT_S = 0.5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    name = tmp_path / "states.bin"
    name.write_bytes(random.Random(3).randbytes(16 * BLOCK))
    return name


def wait_for_blocks(engine: AioEngine, num_blocks: int) -> None:
    """Until so many have begun."""
    limit_s = time.monotonic() + WAIT_S
    while engine.stats()["blocks"] < num_blocks:
        assert time.monotonic() < limit_s
        time.sleep(0.001)


@pytest.fixture(params=BACKENDS)
def hasty(request: pytest.FixtureRequest) -> Iterator[AioEngine]:
    """An engine whose transfers may take half a second."""
    made = make_engine(request.param, block_size=BLOCK, queue_depth=DEPTH, transfer_timeout_s=TIMEOUT_S)
    yield made
    made.close(cancel=True)  # ends the delays


class TestTimeout:
    def test_the_caller_learns_at_once_and_the_buffer_is_kept(self, hasty: AioEngine, path: Path) -> None:
        file = hasty.open(path)
        hasty.inject("delay", 1, LONG_MS)
        buffer = aligned(BLOCK)
        is_alive = weakref.ref(buffer)
        begin_s = time.monotonic()
        ticket = hasty.read(file, buffer, offset=0, label="layers.1")
        wait_for_blocks(hasty, 1)
        with pytest.raises(AioTimeoutError) as caught:
            ticket.wait(WAIT_S)
        assert time.monotonic() - begin_s >= TIMEOUT_S
        assert isinstance(caught.value, AioError)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.errno == errno.ETIMEDOUT
        assert str(caught.value).startswith(f"layers.1 (nvme): pread {path}+0x0, {BLOCK} bytes: ")
        assert "not complete after 0.5 s (transfer_timeout_s)" in str(caught.value)
        assert ticket.done()
        assert ticket.times() is None
        del buffer
        hasty.write(file, b"", offset=0).wait(WAIT_S)  # collects what is released
        gc.collect()
        assert is_alive() is not None
        hasty.close(cancel=True)
        gc.collect()
        assert is_alive() is None
        assert ticket.times() is not None
        with pytest.raises(AioTimeoutError):
            ticket.wait()

    def test_what_has_not_started_never_does(self, hasty: AioEngine, path: Path) -> None:
        before = path.read_bytes()
        file = hasty.open(path)
        for nth in range(1, DEPTH + 1):
            hasty.inject("delay", nth, LONG_MS)
        tickets = [hasty.write(file, before[:BLOCK], offset=0) for _ in range(DEPTH)]
        wait_for_blocks(hasty, DEPTH)  # all places in the queue are taken: nothing else begins
        tickets.append(hasty.write(file, bytes(8 * BLOCK), offset=4 * BLOCK))
        for ticket in tickets:
            with pytest.raises(AioTimeoutError):
                ticket.wait(WAIT_S)
        hasty.close(cancel=True)
        assert path.read_bytes() == before

    def test_in_time(self, path: Path) -> None:
        for name in BACKENDS:
            with make_engine(name, transfer_timeout_s=WAIT_S) as engine:
                back = bytearray(5000)
                engine.read(engine.open(path), back, offset=77).wait()
                assert back == path.read_bytes()[77:5077]

    def test_a_shorter_wait_comes_first(self, hasty: AioEngine, path: Path) -> None:
        file = hasty.open(path)
        hasty.inject("delay", 1, LONG_MS)
        ticket = hasty.read(file, bytearray(BLOCK), offset=0)
        with pytest.raises(TimeoutError) as caught:
            ticket.wait(0.01)
        assert not isinstance(caught.value, AioError)
        with pytest.raises(AioTimeoutError):
            ticket.wait(WAIT_S)

    def test_passes_over_an_earlier_failure(self, hasty: AioEngine, path: Path) -> None:
        # Otherwise the caller would take the buffer for free while a block is in flight.
        file = hasty.open(path)
        hasty.inject("delay", 1, LONG_MS)
        hasty.inject("errno", 2, errno.EIO)
        ticket = hasty.read(file, aligned(16 * BLOCK), offset=0)
        wait_for_blocks(hasty, 1)
        with pytest.raises(AioTimeoutError):
            ticket.wait(WAIT_S)
        assert ticket.times() is None

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0])
    def test_none_at_all(self, timeout_s: float) -> None:
        with pytest.raises(ConfigError, match="transfer_timeout_s"):
            AioEngine(transfer_timeout_s=timeout_s)


class TestClose:
    def test_drops_what_has_not_started(self, shallow: AioEngine, path: Path) -> None:
        before = path.read_bytes()
        file = shallow.open(path)
        for nth in range(1, DEPTH + 1):
            shallow.inject("delay", nth, LONG_MS)
        begun = [shallow.write(file, before[:BLOCK], offset=0) for _ in range(DEPTH)]
        wait_for_blocks(shallow, DEPTH)  # all places in the queue are taken: nothing else begins
        queued = [shallow.write(file, bytes(4 * BLOCK), offset=0) for _ in range(10)]
        shallow.close(cancel=True)  # ends the delays
        for ticket in begun:
            ticket.wait(WAIT_S)
        for ticket in queued:
            with pytest.raises(AioError, match="the engine was closed") as caught:
                ticket.wait(WAIT_S)
            assert caught.value.errno == errno.ECANCELED
        assert path.read_bytes() == before


class TestRegisteredBuffers:
    def test_transfers_use_them(self, path: Path) -> None:
        with make_engine("io_uring", block_size=BLOCK) as engine, engine.open(path) as file:
            arena = aligned(64 * BLOCK)
            assert engine.buffers_reason == "none registered"
            if not engine.register_parts(arena):
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
            assert engine.register_parts(arena[5:]) == arena.nbytes - 5

    def test_are_kept_alive_until_they_are_given_back(self, path: Path) -> None:
        with make_engine("io_uring", num_threads=2) as engine, engine.open(path) as file:
            tensor = torch.zeros(MIB, dtype=torch.uint8)
            if not engine.register_parts(tensor):
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
                assert not engine.register_parts(arena)
                assert engine.buffers_reason == f"{name} has none"
                engine.read(file, arena, offset=0).wait(WAIT_S)
                assert arena.tobytes() == path.read_bytes()

    def test_mistakes(self) -> None:
        engine = make_engine("io_uring")
        arena = aligned(4 * BLOCK)
        if not engine.register_parts(arena):
            pytest.skip(engine.buffers_reason)
        for overlapping in (arena, arena[:1], arena[BLOCK:]):
            with pytest.raises(ConfigError, match="overlap"):
                engine.register_parts(overlapping)
        for unknown in (aligned(BLOCK), arena[BLOCK:]):
            with pytest.raises(ConfigError, match="registered"):
                engine.unregister_buffer(unknown)
        with pytest.raises(ConfigError, match="writable"):
            engine.register_parts(b"constant")
        assert engine.register_parts(bytearray()) == 0
        engine.close()
        with pytest.raises(StateError):
            engine.register_parts(aligned(BLOCK))

    def test_slots_run_out(self) -> None:
        with make_engine("io_uring") as engine:
            arena = aligned(1100 * 4096)
            pieces = [arena[k * 4096 : (k + 1) * 4096] for k in range(1100)]
            if not engine.register_parts(pieces[0]):
                pytest.skip(engine.buffers_reason)
            taken = [engine.register_parts(piece) == piece.nbytes for piece in pieces[1:]]
            assert taken == [True] * 1023 + [False] * 76
            assert engine.buffers_reason == "io_uring: ENOSPC"
            engine.unregister_buffer(pieces[5])
            assert engine.register_parts(pieces[-1])


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
        from offloadzero.io.engine import AioEngine

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
            can_register = engine.register_parts(small) == small.nbytes
            print(can_register, engine.buffers_reason, sep="; ")
            print(engine.register_parts(large) == large.nbytes, engine.buffers_reason, sep="; ")
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

    @pytest.mark.parametrize(
        ("name", "limit"), [*((name, 65536) for name in BACKENDS), ("io_uring", 8 * MIB)]
    )
    def test_a_refused_buffer_is_visible_and_harmless(self, name: str, limit: int, tmp_path: Path) -> None:
        make_engine(name).close()
        done = run_script(self.SCRIPT, name, str(tmp_path / "data"), str(limit))
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
