"""The file engine against os.pread and os.pwrite: every backend, odd sizes, many operations, tickets, files."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from offloadzero.errors import AioError, ConfigError, StateError
from offloadzero.io.engine import AioEngine, AioFile
from tests.io.engines import KERNEL_BACKENDS, MIB, make_engine, random_bytes

SIZES = [0, 1, 511, 4096, 4097, MIB - 1, MIB, MIB + 1]
OFFSETS = [0, 1, 199, 4095, 4096, 8191, 65536 + 512]
WAIT_S = 30.0


def plain_read(path: Path, num_bytes: int, offset: int) -> bytes:
    """The oracle: os.pread on a descriptor of its own, until all is there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts: list[bytes] = []
        while num_bytes and (part := os.pread(descriptor, num_bytes, offset)):
            parts.append(part)
            num_bytes -= len(part)
            offset += len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


class TestBytes:
    @pytest.mark.parametrize("size", SIZES)
    def test_write_matches_pwrite(self, engine: AioEngine, folder: Path, size: int) -> None:
        old = random_bytes(2 * MIB + 77, seed=1)
        new = random_bytes(size, seed=2)
        for offset in OFFSETS:
            ours, theirs = folder / "ours", folder / "theirs"
            ours.write_bytes(old)
            theirs.write_bytes(old)
            with engine.open(ours) as file:
                engine.write(file, new, offset=offset).wait(WAIT_S)
            descriptor = os.open(theirs, os.O_WRONLY)
            assert os.pwrite(descriptor, new, offset) == size
            os.close(descriptor)
            assert ours.read_bytes() == theirs.read_bytes()

    @pytest.mark.parametrize("size", SIZES)
    def test_read_matches_pread(self, engine: AioEngine, folder: Path, size: int) -> None:
        path = folder / "data"
        path.write_bytes(random_bytes(2 * MIB + 77))
        with engine.open(path) as file:
            for offset in OFFSETS:
                # A margin on each side shows a write outside the buffer; odd starts make it unaligned.
                for start in (64, 1, 4096):
                    memory = np.full(size + 8192, 0xA5, dtype=np.uint8)
                    engine.read(file, memory[start : start + size], offset=offset).wait(WAIT_S)
                    assert memory[start : start + size].tobytes() == plain_read(path, size, offset)
                    assert (memory[:start] == 0xA5).all()
                    assert (memory[start + size :] == 0xA5).all()

    @pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 300_001])
    @pytest.mark.parametrize("old_size", [0, 1, 4096, 5000])
    def test_growing_writes_leave_the_exact_size(
        self, engine: AioEngine, folder: Path, size: int, old_size: int
    ) -> None:
        old, new = random_bytes(old_size, seed=3), random_bytes(size, seed=4)
        for offset in (0, 199, 4096, 12345):
            path = folder / "grown"
            path.write_bytes(old)
            with engine.open(path) as file:
                engine.write(file, new, offset=offset).wait(WAIT_S)
                expected = bytearray(old)
                if size:
                    expected.extend(bytes(max(0, offset + size - len(expected))))
                    expected[offset : offset + size] = new
                assert file.num_bytes == len(expected)
            assert path.read_bytes() == expected

    def test_ends_with_the_last_partial_unit_of_the_file(self, engine: AioEngine, folder: Path) -> None:
        path = folder / "data"
        data = random_bytes(3 * 4096 + 1234)
        path.write_bytes(data)
        memory = bytearray(len(data) - 4096)
        with engine.open(path) as file:
            engine.read(file, memory, offset=4096).wait(WAIT_S)
        assert memory == data[4096:]

    def test_aligned_transfers_are_not_copied(self, tmp_path: Path) -> None:
        for backend in KERNEL_BACKENDS:
            with make_engine(backend) as engine, engine.open(tmp_path / backend, create=True) as file:
                if not file.direct:
                    pytest.skip(f"no direct I/O here: {file.direct_reason}")
                memory = np.frombuffer(memoryview(np.zeros(2 * MIB + 4096, np.uint8)), np.uint8)
                start = -memory.ctypes.data % 4096
                engine.write(file, memory[start : start + 2 * MIB], offset=4096).wait(WAIT_S)
                engine.read(file, memory[start : start + 2 * MIB], offset=4096).wait(WAIT_S)
                assert engine.stats()["bounced"] == 0
                assert engine.stats()["blocks"] == 4

    def test_tensors_memoryviews_and_arrays(self, engine: AioEngine, tmp_path: Path) -> None:
        with engine.open(tmp_path / "data", create=True) as file:
            tensor = torch.randn(3, 333, dtype=torch.float32).to(torch.bfloat16)
            engine.write(file, tensor, offset=10).wait(WAIT_S)
            same = torch.empty_like(tensor)
            engine.read(file, same, offset=10).wait(WAIT_S)
            assert torch.equal(same.view(torch.int16), tensor.view(torch.int16))
            array = np.arange(1000, dtype=np.int64).reshape(10, 100)
            engine.write(file, array, offset=10_000).wait(WAIT_S)
            view = memoryview(bytearray(8000))
            engine.read(file, view, offset=10_000).wait(WAIT_S)
            assert np.array_equal(np.frombuffer(view, np.int64).reshape(10, 100), array)


class TestManyOperations:
    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_adjacent_small_writes_lose_nothing(self, backend: str, tmp_path: Path, num_threads: int) -> None:
        data = random_bytes(5 * 4096)
        path = tmp_path / "data"
        path.write_bytes(bytes(len(data)))
        with make_engine(backend, queue_depth=32, num_threads=num_threads) as engine:
            # Two descriptors of one file: the serialisation is by inode.
            files = [engine.open(path), engine.open(path)]
            tickets = [
                engine.write(files[begin % 2], data[begin : begin + 23], offset=begin)
                for begin in range(0, len(data), 23)
            ]
            for ticket in tickets:
                ticket.wait(WAIT_S)
        assert path.read_bytes() == data

    def test_threads_share_an_engine(self, engine: AioEngine, tmp_path: Path) -> None:
        failures: list[BaseException] = []

        def work(index: int, file: AioFile) -> None:
            try:
                for turn in range(50):
                    data = random_bytes(3000, seed=index * 1000 + turn)
                    engine.write(file, data, offset=index * 3000).wait(WAIT_S)
                    back = bytearray(3000)
                    engine.read(file, back, offset=index * 3000).wait(WAIT_S)
                    assert back == data
            except BaseException as failure:
                failures.append(failure)

        with engine.open(tmp_path / "data", create=True) as file:
            threads = [threading.Thread(target=work, args=(index, file)) for index in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert failures == []

    @pytest.mark.parametrize("backend", KERNEL_BACKENDS)
    def test_a_lower_priority_number_overtakes(self, backend: str, folder: Path) -> None:
        # Submitting takes microseconds, each write about a millisecond: most are still queued at the read.
        size = 4 * MIB
        data = bytes(size)
        with make_engine(backend, block_size=65536, queue_depth=2) as engine:
            file = engine.open(folder / "data", create=True, direct=False)
            engine.write(file, data, offset=0).wait(WAIT_S)
            # They overlap, with the same bytes: the file stays small.
            writes = [engine.write(file, data, offset=0, priority=5) for _ in range(150)]
            num_before = sum(ticket.done() for ticket in writes)
            engine.read(file, bytearray(4096), offset=0, priority=-1).wait(WAIT_S)
            num_meanwhile = sum(ticket.done() for ticket in writes) - num_before
            assert num_before < len(writes) / 2
            assert num_meanwhile < (len(writes) - num_before) / 2
            engine.close(cancel=True)


class TestTickets:
    def test_an_error_is_raised_again(self, engine: AioEngine, tmp_path: Path) -> None:
        path = tmp_path / "short"
        path.write_bytes(bytes(10_000))
        with engine.open(path) as file:
            ticket = engine.read(file, bytearray(5000), offset=6000, label="layers.3.mlp.w1")
            for _ in range(2):
                with pytest.raises(AioError) as caught:
                    ticket.wait(WAIT_S)
                error = caught.value
                assert error.errno == errno.ENODATA
                assert (error.label, error.operation, error.path) == ("layers.3.mlp.w1", "pread", str(path))
                assert (error.offset, error.num_bytes) == (6000, 5000)
                assert str(error).startswith(f"layers.3.mlp.w1 (nvme): pread {path}+0x1770, 5000 bytes: ")
                assert "end of file at 0x2710" in str(error)

    @pytest.mark.parametrize("offset", [4096, 5000, 8192, 1 << 40])
    def test_read_past_the_end(self, engine: AioEngine, folder: Path, offset: int) -> None:
        path = folder / "short"
        path.write_bytes(bytes(4096))
        with engine.open(path) as file, pytest.raises(AioError) as caught:
            engine.read(file, bytearray(4096), offset=offset).wait(WAIT_S)
        assert caught.value.errno == errno.ENODATA

    def test_write_to_a_readonly_file(self, engine: AioEngine, folder: Path) -> None:
        path = folder / "data"
        path.write_bytes(b"a" * 8192)
        with engine.open(path, readonly=True) as file:
            for size in (100, 8192):
                with pytest.raises(AioError) as caught:
                    engine.write(file, b"b" * size, offset=0).wait(WAIT_S)
                assert caught.value.errno == errno.EBADF
                assert caught.value.operation == "pwrite"
            memory = bytearray(8192)
            engine.read(file, memory, offset=0).wait(WAIT_S)
        assert memory == path.read_bytes() == b"a" * 8192

    def test_timeout_then_success(self, engine: AioEngine, tmp_path: Path) -> None:
        with engine.open(tmp_path / "data", create=True) as file:
            engine.inject("delay", 1, 300)
            ticket = engine.write(file, b"x" * 5000, offset=0)
            with pytest.raises(TimeoutError, match="not done after"):
                ticket.wait(0.01)
            assert not ticket.done()
            ticket.wait(WAIT_S)
            assert ticket.done()

    def test_a_dropped_ticket_keeps_the_buffer_alive(self, engine: AioEngine, tmp_path: Path) -> None:
        path = tmp_path / "data"
        with engine.open(path, create=True) as file:
            engine.inject("delay", 1, 200)
            array = np.frombuffer(random_bytes(300_000), np.uint8).copy()
            expected = array.tobytes()
            is_alive = weakref.ref(array)
            engine.write(file, array, offset=0)
            del array
            gc.collect()
            assert is_alive() is not None
            deadline = time.monotonic() + WAIT_S
            while engine.stats()["operations"] == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            engine.write(file, b"", offset=0).wait(WAIT_S)
            gc.collect()
            assert is_alive() is None
        assert path.read_bytes() == expected

    def test_a_ticket_outlives_the_engines_name(self, backend: str, tmp_path: Path) -> None:
        engine = make_engine(backend)
        file = engine.open(tmp_path / "data", create=True)
        ticket = engine.write(file, b"y" * 10_000, offset=5)
        del engine, file
        gc.collect()
        ticket.wait(WAIT_S)
        assert (tmp_path / "data").read_bytes() == bytes(5) + b"y" * 10_000


class TestFiles:
    def test_open_errors_name_the_file(self, engine: AioEngine, tmp_path: Path) -> None:
        with pytest.raises(AioError) as caught:
            engine.open(tmp_path / "missing")
        assert (caught.value.errno, caught.value.operation) == (errno.ENOENT, "open")
        assert caught.value.path == str(tmp_path / "missing")
        with pytest.raises(AioError) as caught:
            engine.open(tmp_path)
        assert caught.value.errno == errno.EISDIR

    def test_create_is_private_and_keeps_bytes(self, engine: AioEngine, tmp_path: Path) -> None:
        path = tmp_path / "data"
        engine.open(path, create=True).close()
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_bytes(b"kept")
        with engine.open(path, create=True) as file:
            assert file.num_bytes == 4

    def test_preallocate(self, engine: AioEngine, folder: Path) -> None:
        with engine.open(folder / "data", create=True) as file:
            engine.write(file, b"kept", offset=0).wait(WAIT_S)
            file.preallocate(100_000)
            assert file.num_bytes == 100_000
            file.preallocate(5000)
            assert file.num_bytes == 100_000
            assert os.stat(file.path).st_blocks * 512 >= 100_000
            file.sync()
        assert (folder / "data").read_bytes() == b"kept" + bytes(99_996)

    def test_preallocate_all_but_the_begin(self, engine: AioEngine, folder: Path) -> None:
        with engine.open(folder / "data", create=True) as file:
            file.preallocate(1_000_000, start=800_000)
            assert file.num_bytes == 1_000_000
            assert 200_000 <= os.stat(file.path).st_blocks * 512 < 300_000
            engine.write(file, b"kept", offset=900_000).wait(WAIT_S)
            file.preallocate(800_000, start=4096)
            assert file.num_bytes == 1_000_000
            assert os.stat(file.path).st_blocks * 512 >= 1_000_000 - 4096
            free = os.statvfs(folder)
            with pytest.raises(AioError) as caught:
                file.preallocate(2_000_000 + 2 * free.f_blocks * free.f_frsize, start=1_000_000)
            assert caught.value.errno == errno.ENOSPC
            assert file.num_bytes == 1_000_000
            for start in (-1, 1000, 1001):
                with pytest.raises(ConfigError, match="start"):
                    file.preallocate(1000, start=start)
        assert (folder / "data").read_bytes() == bytes(900_000) + b"kept" + bytes(99_996)

    def test_preallocate_beyond_the_disk(self, engine: AioEngine, folder: Path) -> None:
        space = os.statvfs(folder)
        with engine.open(folder / "data", create=True) as file:
            file.preallocate(1000)
            with pytest.raises(AioError) as caught:
                file.preallocate(4 * space.f_blocks * space.f_frsize)
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.operation == "preallocate"
            assert file.num_bytes == 1000

    def test_direct_modes(self, tmp_path: Path) -> None:
        with make_engine("native_aio") as engine:
            buffered = engine.open(tmp_path / "data", create=True, direct=False)
            assert (buffered.direct, buffered.alignment) == (False, 1)
            assert buffered.direct_reason == "asked for"
            engine.write(buffered, b"z" * 4097, offset=3).wait(WAIT_S)
            auto = engine.open(tmp_path / "data")
            assert auto.direct == (auto.alignment >= 4096) == (auto.direct_reason == "O_DIRECT")
            memory = bytearray(4097)
            engine.read(auto, memory, offset=3).wait(WAIT_S)
            assert memory == b"z" * 4097
        with make_engine("aiofiles") as engine:
            assert not engine.open(tmp_path / "data").direct

    @pytest.mark.parametrize("kernel_backend", KERNEL_BACKENDS)
    def test_auto_is_buffered_where_direct_is_refused(self, kernel_backend: str) -> None:
        # procfs, sysfs and the like refuse O_DIRECT with EINVAL; this one is a regular file anyone may read.
        path = "/proc/self/maps"
        with make_engine(kernel_backend) as engine:
            file = engine.open(path, readonly=True)
            assert not file.direct
            assert file.direct_reason == "O_DIRECT: EINVAL"

    def test_a_closed_file_takes_no_operations(self, engine: AioEngine, tmp_path: Path) -> None:
        file = engine.open(tmp_path / "data", create=True)
        ticket = engine.write(file, b"q" * 300_000, offset=0)
        file.close()
        file.close()
        ticket.wait(WAIT_S)
        with pytest.raises(StateError, match="closed"):
            engine.read(file, bytearray(1), offset=0)
        with pytest.raises(StateError, match="closed"):
            file.preallocate(1)
